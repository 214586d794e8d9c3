"""What every benchmark measures with: a pool in processes of its own, rounds in turns, medians, CPU seconds.

What is compared is measured in the same run, in turns: machines change speed, loopback TCP even has two speeds, and
only neighbours in time are alike. So a ratio is the median of the ratios of neighbours, not a ratio of medians.
"""

import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvpool.bench.process import RoleProcess
from kvpool.core.errors import UnavailableError, UsageError
from kvpool.core.identities import META, client_identity, node_identity, operator_identity
from kvpool.core.principals import Role
from kvpool.ops.issuing import Authority
from kvpool.ops.settings import TlsSettings
from kvpool.ops.sources import load_settings

GB = 1e9

SETTLE_S = 30.0
"""How long processes get to come to rest before a measurement."""

_SETTLE_STEP_S = 0.25
_AT_REST = 0.02
"""CPU seconds a second, all processes together; idle ones use less than 0.01."""

CHILD_STOP_S = 5.0
"""How long a helper process gets to end after it was asked to."""


@dataclass(frozen=True, slots=True)
class PoolProcesses:
    """A running pool.

    Attributes:
        uri: Where it is reached.
        framed: ``tcp://`` address of the metadata service's framed protocol.
        unix: ``unix://`` address of the same.
        pids: Its processes.
        tls: What its clients need, if it has TLS.
        observer_tls: What an observer needs, who is shown the counts of all tenants.
    """

    uri: str
    framed: str
    unix: str
    pids: tuple[int, ...]
    tls: TlsSettings | None = None
    observer_tls: TlsSettings | None = None


@contextlib.contextmanager
def pool_processes(
    node_bytes: int | None,
    *,
    nodes: int = 1,
    meta_unix: bool = False,
    disk: tuple[Path, int] | None = None,
    ucx: bool = False,
    device: str = "",
    tls: bool = False,
    **meta: object,
) -> Iterator[PoolProcesses]:
    """A metadata service and, unless ``node_bytes`` is None, store nodes; nothing of them is left behind.

    Args:
        node_bytes: Memory of each node.
        nodes: How many.
        disk: Directory and bytes of a disk tier, for one node.
        meta_unix: Whether the service offers its Unix socket, which clients on this host then prefer.
        ucx: Whether nodes serve the ucx transport.
        device: A GPU whose memory nodes hold blocks in; empty: in shared memory.
        tls: Whether all parts speak TLS.
        meta: Further settings of the service.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpool-bench-")))
        certificates = _certificates(folder / "certs", nodes) if tls else None
        secured: dict[str, object] = {} if certificates is None else {"tls_dir": certificates}
        options: dict[str, object] = {"grpc_port": 0, "framed_port": 0, "expected_nodes": 1, **secured}
        if meta_unix:
            options["unix_socket"] = folder / "meta.sock"
        service = stack.enter_context(RoleProcess("meta", _flags({**options, **meta}), folder / "meta.log"))
        ready = service.ready()
        pids = [service.pid]
        for i in range(nodes if node_bytes is not None else 0):
            options = {
                "node_id": f"bench-{i}",
                "meta": ready["uri"],
                "size": node_bytes,
                "segment_dir": stack.enter_context(segment_folder()),
                "unix_socket": folder / f"node-{i}.sock",
                "data_port": 0,
                "grpc_port": 0,
                **secured,
            }
            if disk is not None:
                options["disk"], options["disk_size"] = disk
            if ucx:
                options["ucx"] = True
            if device:
                options["vram"], options["device"] = node_bytes, device
            node = stack.enter_context(RoleProcess("node", _flags(options), folder / f"node-{i}.log"))
            node.ready()
            pids.append(node.pid)
        where = (ready["uri"], ready["framed"], f"unix://{ready.get('unix', '')}")
        yield PoolProcesses(*where, tuple(pids), *(_tls_of(certificates) if certificates is not None else ()))


@contextlib.contextmanager
def segment_folder() -> Iterator[Path]:
    """A folder for a node's segment, removed with it, even when the node was killed."""
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-", dir=load_settings().node.segment_dir) as folder:
        yield Path(folder)


@contextlib.contextmanager
def child(function: Callable[..., None], *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Run a module's ``function`` in a fresh interpreter: what it `say`s comes from stdout, a line each.

    ``arguments`` are literals: text, bytes, numbers. The child should end when its stdin does.
    """
    code = f"import {function.__module__} as module; module.{function.__name__}(*{arguments!r})"
    process = subprocess.Popen(  # noqa: S603 - our own interpreter and code
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(CHILD_STOP_S)
        process.kill()
        process.communicate()


def say(text: object) -> None:
    """In a child: one line to the parent."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def heard(process: "subprocess.Popen[str]") -> str:
    """In the parent: the child's next line; raises UnavailableError when it ended instead."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise UnavailableError(f"helper process {process.pid} ended early; its error is above")
    return line


@dataclass(frozen=True, slots=True)
class Compared:
    """Times of rounds that moved the same bytes: element i of both was measured one after the other."""

    ours_s: list[float]
    limit_s: list[float]
    cpu_s: float
    """CPU time of all our rounds together."""

    @property
    def ratio(self) -> float:
        """How fast ours is, the limit being 1."""
        return statistics.median(limit / ours for ours, limit in zip(self.ours_s, self.limit_s, strict=True))


def compare(
    ours: Callable[[], object],
    limit: Callable[[], object],
    rounds: int,
    pids: Sequence[int],
    prepare: Callable[[], object] = lambda: None,
) -> Compared:
    """Run ours, limit, ours, limit, ...; a first pair of rounds warms up, and then all come to rest.

    Args:
        ours: One round of what is measured.
        limit: The same work by the simplest means there are.
        rounds: Rounds of each that count.
        pids: Processes that work in our rounds.
        prepare: Called before each of our rounds, outside the measured time.
    """
    compared = Compared([], [], 0.0)
    used_s = 0.0
    for i in range(rounds + 1):
        prepare()
        if i == 1:
            settle(pids)
        before_s = cpu_s(pids)
        ours_s = elapsed_s(ours)
        round_cpu_s = cpu_s(pids) - before_s
        limit_s = elapsed_s(limit)
        if i:
            compared.ours_s.append(ours_s)
            compared.limit_s.append(limit_s)
            used_s += round_cpu_s
    return Compared(compared.ours_s, compared.limit_s, used_s)


def settle(pids: Sequence[int]) -> None:
    """Wait until processes rest: nodes and clients that have just started still touch their memory."""
    for _ in range(round(SETTLE_S / _SETTLE_STEP_S)):
        before_s = cpu_s(pids)
        time.sleep(_SETTLE_STEP_S)
        if cpu_s(pids) - before_s < _AT_REST * _SETTLE_STEP_S:
            return


def elapsed_s(work: Callable[[], object]) -> float:
    """Seconds that ``work`` takes."""
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def cpu_s(pids: Sequence[int]) -> float:
    """CPU seconds that processes have used, all their threads together, ended ones included.

    Linux gives every process a clock whose id is made of its pid (clock_getcpuclockid(3)); /proc counts in 10 ms.
    """
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that ``percent`` of the values do not exceed."""
    return float(np.percentile(values, percent))


def rounded(value: float) -> float:
    """Four significant digits: more would be noise."""
    return float(f"{value:.4g}")


def at_least(name: str, value: int, least: int = 1) -> int:
    """``value``, if it is large enough; raises UsageError."""
    if value < least:
        raise UsageError(f"{name} is {value}; it must be {least} or more")
    return value


def _certificates(folder: Path, nodes: int) -> Path:
    """``folder``, with certificates for a day."""
    authority = Authority(folder, days=1)
    authority.issue("meta", META, renew=False)
    authority.issue("client", client_identity("default", "bench"), renew=False)
    authority.issue("observer", operator_identity(Role.OBSERVER, "bench"), renew=False)
    for i in range(nodes):
        authority.issue(f"node-bench-{i}", node_identity(f"bench-{i}"), renew=False)
    return folder


def _tls_of(folder: Path) -> tuple[TlsSettings, TlsSettings]:
    """A client's, and an observer's."""
    observer = TlsSettings(ca=folder / "ca.pem", cert=folder / "observer.pem", key=folder / "observer-key.pem")
    return TlsSettings(dir=folder), observer


def _flags(options: dict[str, Any]) -> dict[str, object]:
    return {name.replace("_", "-"): value for name, value in options.items()}
