"""How long the pool is worse off after a fault: rebuilding, coming back, forgetting; and what look-ups see meanwhile.

A metadata service and a node without bytes (`hollow`), each a process that is killed and started again, while a client
looks up one chain after the other. Times run from the fault's end (a process that has started again) or, for a loss,
from the kill, until the pool is whole again.
"""

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import msgspec

import kvpool
from kvpool.bench.hollow import CHAIN_BLOCKS, NAMESPACE, chain, serve, write_headers
from kvpool.bench.measure import at_least, child, cpu_s, heard, rounded, segment_folder
from kvpool.bench.process import RoleProcess
from kvpool.core.errors import UnavailableError

TARGETS_S = {"metadata_restart": 5.0, "reconnect": 2.0}
"""Most seconds that the design asks for, of a million blocks."""

GIVE_UP_S = 120.0
AWAY_S = 3.0
"""How long a service stays away: enough for every back-off to reach its longest pause."""

_POLL_S = 0.005
_WATCH_S = 0.002


class RecoveryRow(msgspec.Struct, frozen=True, kw_only=True, tag_field="bench", tag="recovery"):
    """Seconds until the pool was whole again after ``what``.

    Attributes:
        what: The fault.
        blocks: Blocks of the node.
        seconds: Wall time.
        cpu_s: CPU seconds that service and node used for it: what the wall time comes to where nobody else computes.
        lookup_max_ms: The slowest look-up meanwhile.
    """

    what: str
    blocks: int
    seconds: float
    cpu_s: float
    lookup_max_ms: float


def measure_recovery(blocks: int) -> Iterator[RecoveryRow]:
    """Kill and restart the service and a node that holds ``blocks`` blocks; raises KvpoolError if one stays away."""
    blocks = at_least("blocks", blocks, CHAIN_BLOCKS) // CHAIN_BLOCKS * CHAIN_BLOCKS
    with _Scene(blocks) as scene:
        yield from scene.restart_meta()
        yield scene.restart_node()
        yield scene.lose_node()


class _Scene:
    """One service, one node, one client, and a thread that looks up all the time."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._stack = ExitStack()
        self._starts = 0
        self._used_before_s = 0.0
        self._ports: dict[str, int] = {"grpc-port": 0, "framed-port": 0}

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            self._logs = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="kvpool-bench-")))
            self._headers = undo.enter_context(segment_folder())
            write_headers(self._headers, self._blocks)
            self._meta = self._start_meta(undo)
            self._client = undo.enter_context(kvpool.connect(self._uri, timeout_s=5.0))
            self._keyspace = self._client.namespace(NAMESPACE)
            self._start_node(undo)
            self._until(self._is_whole)
            self._watch = undo.enter_context(_Watch(self._keyspace))
            self._stack = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def restart_meta(self) -> Iterator[RecoveryRow]:
        """A killed service comes back on its address: a client reaches it, and its directory is whole again."""
        os.kill(self._meta.pid, signal.SIGKILL)
        self._meta.stop()
        self._watch.pause(AWAY_S)
        self._meta = self._start_meta(self._stack)
        began_s = self._begin()
        self._until(lambda: self._keyspace.match(chain(0)).reason != kvpool.MissReason.NODE_DOWN)
        yield self._row("reconnect", began_s)
        self._until(self._is_whole)
        yield self._row("metadata_restart", began_s)

    def restart_node(self) -> RecoveryRow:
        """A killed node starts again: its blocks are found, announced and matched."""
        self._kill_node()
        self._until(self._is_empty)
        began_s = self._begin()
        self._start_node(self._stack)
        self._until(self._is_whole)
        return self._row("node_restart", began_s)

    def lose_node(self) -> RecoveryRow:
        """A killed node stays away: its entries are gone."""
        self._kill_node()
        began_s = self._begin()
        self._until(self._is_empty)
        return self._row("node_loss", began_s)

    def _start_meta(self, stack: ExitStack) -> RoleProcess:
        options = {**self._ports, "http-port": 0, "expected-nodes": 1}
        meta = stack.enter_context(RoleProcess("meta", options, self._logs / "meta.log"))
        ready = meta.ready()
        self._uri = ready["uri"]
        self._ports = {f"{name}-port": int(ready[key].rpartition(":")[2]) for name, key in _PORTS}
        return meta

    def _start_node(self, stack: ExitStack) -> None:
        self._starts += 1
        arguments = (self._uri, str(self._headers), self._blocks, self._starts)
        self._node = stack.enter_context(child(serve, *arguments))
        heard(self._node)

    def _kill_node(self) -> None:
        self._node.kill()
        self._node.wait()

    def _row(self, what: str, began_s: float) -> RecoveryRow:
        seconds = time.perf_counter() - began_s
        return RecoveryRow(
            what=what,
            blocks=self._blocks,
            seconds=rounded(seconds),
            cpu_s=rounded(self._used_s() - self._used_before_s),
            lookup_max_ms=rounded(self._watch.slowest_s * 1e3),
        )

    def _begin(self) -> float:
        """What follows counts; the time now."""
        self._used_before_s = self._used_s()
        return self._watch.begin()

    def _used_s(self) -> float:
        """CPU seconds of both processes, as far as they live."""
        node = (self._node.pid,) if self._node.poll() is None else ()
        return cpu_s((self._meta.pid, *node))

    def _is_whole(self) -> bool:
        return self._counted() == self._blocks and self._keyspace.match(chain(0)).blocks == CHAIN_BLOCKS

    def _is_empty(self) -> bool:
        return self._counted() == 0

    def _counted(self) -> int:
        """Entries of the directory; -1 when it cannot be asked, or is not sure yet."""
        try:
            status = self._client.status()
        except UnavailableError:
            return -1
        return -1 if status.recovery.active else status.counters["blocks"]

    def _until(self, condition: Callable[[], bool]) -> None:
        give_up_s = time.perf_counter() + GIVE_UP_S
        while not condition():
            if time.perf_counter() > give_up_s:
                raise UnavailableError(f"the pool was not whole again after {GIVE_UP_S:g} s")
            time.sleep(_POLL_S)


_PORTS = (("grpc", "uri"), ("framed", "framed"))


class _Watch:
    """Looks up one chain again and again in a thread of its own, and keeps the slowest answer.

    Only answers of the service count: while it is away, misses ``node_down`` come from the client itself.
    """

    def __init__(self, keyspace: kvpool.Keyspace) -> None:
        self._keyspace = keyspace
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvpool-bench-watch", daemon=True)
        self.slowest_s = 0.0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def begin(self) -> float:
        """Forget what was; the time now."""
        self.slowest_s = 0.0
        return time.perf_counter()

    def pause(self, seconds: float) -> None:
        """Look on for a while."""
        self._stopping.wait(seconds)

    def _run(self) -> None:
        hashes = chain(0)
        while not self._stopping.wait(_WATCH_S):
            began_s = time.perf_counter()
            matched = self._keyspace.match(hashes)
            if matched.reason != kvpool.MissReason.NODE_DOWN or matched.blocks:
                self.slowest_s = max(self.slowest_s, time.perf_counter() - began_s)
