"""The host: shared memory, limits, huge pages, processors, clock, ports."""

import errno
import os
import resource
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvpool.cli.checks.finding import Finding, fail, ok, warn
from kvpool.core.units import format_size
from kvpool.ops.settings import Settings

SHARED_MEMORY = frozenset({"tmpfs", "hugetlbfs", "ramfs", "devtmpfs"})
HEADERS_SHARE = 0.02
"""Of a segment's size, for the headers of its slots: 64 bytes for each block of 4 KiB, the smallest."""

DESCRIPTORS_SPARE = 128
STEADY_CLOCKS = frozenset({"tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page", "xen"})
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
CLOCK = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
UNLIMITED = resource.RLIM_INFINITY


@dataclass(frozen=True, slots=True)
class Room:
    """A file system: its kind, and its bytes; ``error`` when it cannot be looked at."""

    path: str
    kind: str = ""
    size_bytes: int = 0
    free_bytes: int = 0
    own_bytes: int = 0
    """Taken by the node's own files from an earlier run: its next start uses them again."""
    error: str = ""


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What the checks of this module judge.

    Attributes:
        segments: Where segments lie.
        disk: Where the disk tier lies, if there is one.
        descriptors: Limit of open files, of one process.
        descriptors_hard: What it may be raised to.
        memlock_bytes: Limit of locked memory; `UNLIMITED` for none.
        cpus: Processors that this process may use.
        memory_bytes: Memory available without swapping.
        huge_pages: What the kernel says of huge pages in shared memory; empty where it says nothing.
        clock: The kernel's clock source.
        ports: Why each setting's port cannot be listened on; empty when it can.
    """

    segments: Room
    disk: Room | None
    descriptors: int
    descriptors_hard: int
    memlock_bytes: int
    cpus: int
    memory_bytes: int
    huge_pages: str
    clock: str
    ports: dict[str, str]


def gather(settings: Settings) -> HostFacts:
    """Look at this host; changes nothing, but listens on each port for a moment."""
    node = settings.node
    own = f"kvpool-{node.node_id}."
    files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return HostFacts(
        segments=_room(node.segment_dir, own),
        disk=_room(node.disk, own) if node.disk is not None else None,
        descriptors=files,
        descriptors_hard=hard,
        memlock_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        cpus=len(os.sched_getaffinity(0)),
        memory_bytes=_available_bytes(),
        huge_pages=_read(HUGE_PAGES),
        clock=_read(CLOCK),
        ports=_ports(settings),
    )


def check_host(settings: Settings, facts: HostFacts, *, pool_is_here: bool) -> Iterator[Finding]:
    """Judge the facts; ``pool_is_here`` says that a pool answers on this host, so that busy ports are its own."""
    node = settings.node
    if node.vram:
        yield ok("shared memory", f"not used: the node's blocks are in GPU memory ({format_size(node.vram)})")
    else:
        yield _shared_memory(facts, node.size)
        yield _huge_pages(facts.huge_pages, node.hugepages)
    if facts.disk is not None:
        yield _disk(facts.disk, node.disk_size)
    yield _descriptors(facts, max(node.connections_max, settings.meta.connections_max))
    yield _locked(facts.memlock_bytes, node.size, ucx=node.ucx)
    yield _cpus(facts.cpus)
    yield _clock(facts.clock)
    yield from _busy_ports(facts.ports, pool_is_here=pool_is_here)


def _shared_memory(facts: HostFacts, size_bytes: int) -> Finding:
    room, check = facts.segments, "shared memory"
    if room.error:
        return fail(check, f"{room.path}: {room.error}", "give a directory that is there and writable: --segment-dir")
    wanted_bytes = int(size_bytes * (1 + HEADERS_SHARE)) - room.own_bytes
    seen = f"{room.path}: {format_size(room.free_bytes)} of {format_size(room.size_bytes)} free"
    if room.kind not in SHARED_MEMORY:
        return warn(check, f"{seen}, but it is {room.kind}, no memory", "use a tmpfs: --segment-dir /dev/shm")
    if room.free_bytes < wanted_bytes:
        fix = f"mount -o remount,size={_gib(wanted_bytes + room.size_bytes - room.free_bytes)}G {room.path}"
        return fail(check, f"{seen}; --size {format_size(size_bytes)} needs more", f"{fix}, or a smaller --size")
    if facts.memory_bytes and facts.memory_bytes < wanted_bytes:
        seen = f"{seen}, but only {format_size(facts.memory_bytes)} of memory is available"
        return fail(check, seen, "choose a smaller --size, or stop what takes the memory")
    return ok(check, f"{seen}; --size is {format_size(size_bytes)}")


def _huge_pages(state: str, wanted: str) -> Finding:
    check = "huge pages"
    fix = f"echo advise > {HUGE_PAGES}"
    chosen = state.partition("[")[2].partition("]")[0]
    if not state:
        verdict = fail if wanted == "require" else warn
        return verdict(check, "the kernel has none for shared memory", "use --hugepages auto or off")
    if chosen in {"never", "deny"} and wanted != "off":
        verdict = fail if wanted == "require" else warn
        return verdict(check, f"off for shared memory ({chosen}): copies are slower", fix)
    return ok(check, f"{chosen} for shared memory; --hugepages is {wanted}")


def _disk(room: Room, size_bytes: int) -> Finding:
    check = "disk tier"
    if room.error:
        return fail(check, f"{room.path}: {room.error}", "make the directory, writable for the node: --disk")
    seen = f"{room.path}: {format_size(room.free_bytes)} free ({room.kind}); --disk-size is {format_size(size_bytes)}"
    if room.kind in SHARED_MEMORY:
        return warn(check, f"{seen}; that is memory, no disk", "name a directory on a local disk")
    if room.free_bytes + room.own_bytes < size_bytes:
        return fail(check, seen, "choose a smaller --disk-size, or another disk")
    return ok(check, seen)


def _descriptors(facts: HostFacts, connections: int) -> Finding:
    seen = f"{facts.descriptors:,} open files a process (at most {facts.descriptors_hard:,})"
    wanted = connections + DESCRIPTORS_SPARE
    if facts.descriptors < wanted:
        fix = f"ulimit -n {2 * wanted}; systemd: LimitNOFILE={2 * wanted}; or a lower --connections-max"
        return warn("open files", f"{seen}; {connections:,} connections need {wanted:,}", fix)
    return ok("open files", seen)


def _locked(memlock_bytes: int, size_bytes: int, *, ucx: bool) -> Finding:
    if memlock_bytes == UNLIMITED:
        return ok("locked memory", "unlimited")
    seen = f"{format_size(memlock_bytes)} a process"
    if ucx and memlock_bytes < size_bytes:
        fix = "ulimit -l unlimited; systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1"
        return warn("locked memory", f"{seen}; RDMA devices need all of the segment locked", fix)
    return ok("locked memory", f"{seen}; enough without RDMA")


def _cpus(cpus: int) -> Finding:
    if cpus < 2:
        return warn("processors", "1 for this process", "give it two or more: a copy and its checksum share one else")
    return ok("processors", f"{cpus} for this process")


def _clock(source: str) -> Finding:
    if source and source not in STEADY_CLOCKS:
        fix = "see `dmesg | grep -i clocksource`: a look at this clock costs microseconds; tsc is better"
        return warn("clock source", source, fix)
    return ok("clock source", source or "unknown")


def _busy_ports(ports: dict[str, str], *, pool_is_here: bool) -> Iterator[Finding]:
    busy = {name: error for name, error in ports.items() if error}
    if not busy:
        yield ok("ports", f"free: {', '.join(ports)}")
        return
    listed = "; ".join(f"{name}: {error}" for name, error in busy.items())
    if pool_is_here:
        yield ok("ports", f"in use, by the pool that answers here it seems: {', '.join(busy)}")
    else:
        fix = "stop what listens there (`ss -ltnp`), or choose others: --grpc-port, --framed-port, --data-port"
        yield warn("ports", listed, fix)


def _ports(settings: Settings) -> dict[str, str]:
    meta, node = settings.meta, settings.node
    wanted = {
        "meta.grpc_port": (meta.listen, meta.grpc_port),
        "meta.framed_port": (meta.listen, meta.framed_port),
        "meta.http_port": (meta.http_listen, meta.http_port_used),
        "node.data_port": (node.listen, node.data_port),
        "node.grpc_port": (node.listen, node.grpc_port),
        "node.http_port": (node.http_listen, node.http_port_used),
    }
    return {f"{name} {port}": _listen_error(host, port) for name, (host, port) in wanted.items() if port}


def _listen_error(host: str, port: int) -> str:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
    except OSError as error:
        return "in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
    return ""


def _room(path: Path, own: str) -> Room:
    try:
        system = os.statvfs(path)
        if not os.access(path, os.W_OK | os.X_OK):
            return Room(str(path), error="not writable for this user")
        own_bytes = sum(file.stat().st_blocks * 512 for file in path.glob(f"{own}*"))
    except OSError as error:
        return Room(str(path), error=error.strerror or str(error))
    size, free = system.f_blocks * system.f_frsize, system.f_bavail * system.f_frsize
    return Room(str(path), _kind(path), size, free, own_bytes)


def _kind(path: Path) -> str:
    """Of the file system: that of the longest mount point above the path."""
    best = ("", "unknown")
    for line in _read(Path("/proc/mounts")).splitlines():
        _, mount, kind, *_ = line.split(" ")
        where = mount.replace("\\040", " ")
        if path.resolve().is_relative_to(where) and len(where) >= len(best[0]):
            best = (where, kind)
    return best[1]


def _available_bytes() -> int:
    lines = _read(Path("/proc/meminfo")).splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), 0)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _gib(size_bytes: int) -> int:
    return -(-size_bytes // (1 << 30))
