"""Devices: UCX with its network devices, and GPUs."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from kvpool.cli.checks.finding import Finding, fail, ok, warn
from kvpool.core.errors import KvpoolError, UnavailableError
from kvpool.gpu.need import INSTALL as INSTALL_CUPY
from kvpool.gpu.need import require_gpu
from kvpool.ops.settings import Settings
from kvpool.transport.ucx.nixl import INSTALL as INSTALL_NIXL
from kvpool.transport.ucx.nixl import require_nixl

RDMA = Path("/sys/class/infiniband")
GPU = Path("/dev/nvidiactl")


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What the checks of this module judge.

    Attributes:
        nixl: Package and version; empty when there is none.
        rdma: State of the first port of each RDMA device.
        gpu_here: Whether the driver of an NVIDIA GPU is loaded.
        gpus: GPUs that CuPy sees; None without CuPy.
        gpu_error: Why CuPy sees none.
    """

    nixl: str
    rdma: dict[str, str]
    gpu_here: bool
    gpus: int | None
    gpu_error: str = ""


def gather() -> DeviceFacts:
    """Look at this host; imports CuPy where it is installed."""
    gpus, error = _gpus()
    return DeviceFacts(_nixl(), _rdma(), GPU.exists(), gpus, error)


def check_devices(settings: Settings, facts: DeviceFacts) -> Iterator[Finding]:
    """Judge the facts."""
    yield _ucx(facts, wanted=settings.node.ucx or "ucx" in settings.client.transports)
    yield _cuda(facts, wanted=bool(settings.node.vram) or "cuda" in settings.client.transports)


def _ucx(facts: DeviceFacts, *, wanted: bool) -> Finding:
    if not facts.nixl:
        if wanted:
            return fail("UCX", "NIXL, which brings it, is not installed", INSTALL_NIXL)
        return ok("UCX", "not installed, and not asked for")
    down = [name for name, state in facts.rdma.items() if "ACTIVE" not in state]
    listed = ", ".join(f"{name} {state}" for name, state in facts.rdma.items())
    if wanted and down:
        return warn("UCX", f"{facts.nixl}; RDMA devices: {listed}", "bring the port up: `ip link`, `rdma link`")
    if wanted and not facts.rdma:
        fix = "leave ucx out, or see that the device's driver is loaded (`rdma link`)"
        return warn("UCX", f"{facts.nixl}; no RDMA device: UCX goes over TCP, as the tcp transport does", fix)
    return ok("UCX", f"{facts.nixl}; RDMA devices: {listed or 'none'}")


def _cuda(facts: DeviceFacts, *, wanted: bool) -> Finding:
    if facts.gpus:
        return ok("CUDA", f"{facts.gpus} GPU{'s' if facts.gpus > 1 else ''}, reached through CuPy")
    if wanted:
        return fail("CUDA", facts.gpu_error or "CuPy is not installed", INSTALL_CUPY)
    if facts.gpu_here:
        why = facts.gpu_error or "CuPy is not installed"
        return warn(
            "CUDA", f"a GPU's driver is loaded, but {why}: caches on GPUs cannot be used directly", INSTALL_CUPY
        )
    return ok("CUDA", "no GPU, and none asked for")


def _nixl() -> str:
    try:
        package = require_nixl()
        return f"{package} {version(package.replace('_', '-'))}"
    except (KvpoolError, PackageNotFoundError):
        return ""


def _rdma() -> dict[str, str]:
    found = {}
    for device in sorted(RDMA.glob("*")):
        try:
            found[device.name] = (device / "ports/1/state").read_text(encoding="utf-8").strip()
        except OSError:
            found[device.name] = "unknown"
    return found


def _gpus() -> tuple[int | None, str]:
    if find_spec("cupy") is None:
        return None, ""
    try:
        return int(require_gpu().cuda.runtime.getDeviceCount()), ""
    except UnavailableError as error:
        return 0, str(error)
