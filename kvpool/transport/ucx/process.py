"""The parent's side of a UCX process: starts it, starts it again when it has ended, and hands it transfers.

A transfer cannot be called back. One that its caller stops waiting for goes on, and may still write to the memory it
was given: `Transfer.when_ended` says when that is over. Until then its peer gets no further transfers, so that one that
does not answer holds up no more than it has.
"""

import logging
import math
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvpool.core.errors import ClosedError, DeadlineError, KvpoolError, UnavailableError
from kvpool.transport.deadline import Deadline
from kvpool.transport.pool import ConnectionPool
from kvpool.transport.ucx.helper import READY, HelperSettings
from kvpool.transport.ucx.messages import (
    ForgetRequest,
    PeerReply,
    PeerRequest,
    Region,
    RegionRequest,
    TransferReply,
    TransferRequest,
)
from kvpool.transport.ucx.nixl import require_nixl
from kvpool.transport.wire.connection import Connection
from kvpool.transport.wire.messages import Done

WATCH_S = 0.02
"""How often a waiting transfer asks whether its peer's framed connection is still there."""

SPAWN_PAUSE_S = 1.0
"""Least time from one start to the next: one that ends at once must not keep a core busy starting."""

MEET_S = 3.0
"""How long NIXL may take to connect to a peer. It does nothing else meanwhile, and where a firewall drops what it sends
that is two minutes: so the process is ended."""

GRACE_S = 2.0
"""How long late transfers of a peer that is gone may go on before NIXL is told to drop them."""

WORDS_MAX = 4096
"""Bytes of what a UCX process says for itself."""

ENDED_S = 3600.0
"""A transfer that nobody waits for ends when UCX gives its peer up, long before this."""

log = logging.getLogger("kvpool.transport.ucx")


class StalledError(UnavailableError):
    """A peer's UCX process does not answer, though its node may."""


class Transfer:
    """One transfer under way; owns its connection to the UCX process until it has ended."""

    def __init__(self, process: "UcxProcess", stack: ExitStack, connection: Connection, peer: "Peer") -> None:
        self._process = process
        self._stack = stack
        self._connection = connection
        self._peer = peer
        self._ended = False

    def wait(self, deadline: Deadline, is_alive: Callable[[], bool]) -> None:
        """Wait until all bytes have arrived.

        Raises:
            DeadlineError: Not in time; the transfer goes on.
            UnavailableError: The peer, or the UCX process, has gone; or ``is_alive`` says that the peer has.
        """
        while not self._connection.readable(min(WATCH_S, deadline.left_s())):
            if not is_alive():
                raise UnavailableError("the peer has closed its connection")
        self._finish(deadline.left_s())

    def when_ended(self, then: Callable[[], None]) -> None:
        """Call ``then`` once nothing can be written by the transfer any more: now, or on a thread of its own."""
        if self._ended:
            self._close(then)
        else:
            self._process.outlast(self._peer, lambda: self._outlast(then))

    def _finish(self, timeout_s: float) -> None:
        try:
            reply = self._connection.collect(TransferReply, timeout_s)
        finally:
            self._ended = True  # answered, or the connection and with it the process is no more
        self._process.carrier = reply.carrier or self._process.carrier

    def _outlast(self, then: Callable[[], None]) -> None:
        with suppress(KvpoolError):
            self._finish(ENDED_S)
        self._close(then)

    def _close(self, then: Callable[[], None]) -> None:
        self._stack.close()
        then()


class Peer(msgspec.Struct, frozen=True):
    """A peer's number in one life of the UCX process."""

    life: int
    number: int


class UcxProcess:
    """A UCX process and its region. Thread-safe.

    Args:
        descriptor: The memory, to read and write; stays the caller's, who keeps it open until `stop`.
        exported_descriptor: The same memory as others may see it.
        size_bytes: Its size.
        devices: See `Agent`.

    Attributes:
        carrier: What UCX moves data over, once it has said so.
        starts: How often the process was started.

    Raises:
        SettingsError: NIXL is not installed.
    """

    def __init__(self, descriptor: int, exported_descriptor: int, size_bytes: int, devices: str) -> None:
        require_nixl()
        self.carrier = ""
        self.starts = 0
        self._memory = (descriptor, exported_descriptor, size_bytes)
        self._devices = devices
        self._lock = threading.Lock()
        self._closed = False
        self._spawned_s = -math.inf
        self._folder = tempfile.TemporaryDirectory(prefix="kvpool-ucx-")
        self._region = Region(b"", 0, 0)
        self._child: subprocess.Popen[bytes] | None = None
        self._connections: ConnectionPool | None = None
        self._late: Counter[Peer] = Counter()
        self._stopping = threading.Event()
        self._waiters: set[threading.Thread] = set()

    def start(self, deadline: Deadline) -> None:
        """Start the process if it does not run, and wait until it serves.

        Raises:
            DeadlineError: It takes longer; it goes on starting.
            UnavailableError: It does not start; its last words are in the log.
        """
        self._pool(deadline)

    def region(self, deadline: Deadline) -> Region:
        """The region, as others are told of it. Raises as `start`."""
        self._pool(deadline)
        return self._region

    def meet(self, region: Region, deadline: Deadline) -> Peer:
        """Make another region known, until `forget`.

        Raises:
            UnavailableError: It cannot be reached.
            StalledError: It does not answer in `MEET_S`, or in time.
        """
        life, pool = self._pool(deadline)
        until = Deadline(MEET_S)
        with ExitStack() as stack:
            connection = self._borrow(stack, pool, deadline)
            connection.post(PeerRequest(region.agent, region.address, region.size_bytes), deadline.left_s())
            if not connection.readable(min(MEET_S, deadline.left_s())):
                lent = stack.pop_all()
                self._wait_aside(lambda: self._meet_late(life, connection, lent, until))
                raise StalledError("the peer's UCX process does not answer")
            reply = connection.collect(PeerReply, deadline.left_s())
        self.carrier = reply.carrier or self.carrier
        return Peer(life, reply.number)

    def _meet_late(self, life: int, connection: Connection, lent: ExitStack, until: Deadline) -> None:
        """Nobody waits for a peer to be met any more: forget it when it has been, or end the process that hangs."""
        with lent, suppress(KvpoolError):
            try:
                while not connection.readable(min(WATCH_S, until.left_s())):
                    pass
            except DeadlineError:
                log.warning("a peer's UCX process does not answer: ours, which hangs over it, is ended")
                self._end_life(life)
                return
            reply = connection.collect(PeerReply, WATCH_S)
            self._forget(Peer(life, reply.number), WATCH_S)

    def _end_life(self, life: int) -> None:
        """End the process, if it is still the one of that life; what its transfers lose is read in another way."""
        with self._lock:
            if life == self.starts:
                self._end()

    def forget(self, peer: Peer, timeout_s: float = 1.0) -> None:
        """The other end of `meet`. Late transfers of the peer get `GRACE_S` to end: UCX may never notice its death."""
        if self._late[peer]:
            self._wait_aside(lambda: self._forget_later(peer, timeout_s))
        else:
            self._forget(peer, timeout_s)

    def _forget_later(self, peer: Peer, timeout_s: float) -> None:
        self._all_ended(peer)
        self._forget(peer, timeout_s)
        if not self._all_ended(peer):
            log.warning("reads from a peer that has gone do not end: the UCX process is ended for that")
            self._end_life(peer.life)

    def _all_ended(self, peer: Peer) -> bool:
        """Whether the peer has no late transfers any more; waits for that, for `GRACE_S` at most."""
        until_s = time.monotonic() + GRACE_S
        while self._late[peer] and time.monotonic() < until_s and not self._stopping.wait(WATCH_S):
            pass
        return not self._late[peer] or self._stopping.is_set()

    def _forget(self, peer: Peer, timeout_s: float) -> None:
        pool = self._connections
        if pool is not None and peer.life == self.starts:
            with suppress(KvpoolError), pool.connection(timeout_s) as connection:
                connection.call(ForgetRequest(peer.number), Done, timeout_s)

    def begin(
        self, peer: Peer, pages_each: int, ours: NDArray[np.uint32], theirs: NDArray[np.uint32], deadline: Deadline
    ) -> Transfer:
        """Begin to read blocks of ``pages_each`` pages from a peer; the caller calls `Transfer.when_ended` in the end.

        Raises:
            UnavailableError: The process was started anew since the peer was met.
            StalledError: The peer is late with others.
        """
        life, pool = self._pool(deadline)
        if life != peer.life:
            raise UnavailableError("the peer is not known any more")
        if self._late[peer]:
            raise StalledError("earlier reads of the peer's memory have not ended")
        request = TransferRequest(peer.number, pages_each, ours.tobytes(), theirs.tobytes())
        with ExitStack() as stack:
            connection = self._borrow(stack, pool, deadline)
            connection.post(request, deadline.left_s())
            return Transfer(self, stack.pop_all(), connection, peer)

    def _borrow(self, stack: ExitStack, pool: ConnectionPool, deadline: Deadline) -> Connection:
        """A connection to the process for as long as ``stack`` is open; raises as `start`."""
        try:
            return stack.enter_context(pool.connection(deadline.left_s()))
        except ClosedError as error:
            if self._closed:
                raise
            raise UnavailableError("the UCX process has just ended") from error

    def outlast(self, peer: Peer, wait: Callable[[], None]) -> None:
        """Run ``wait``, which waits for a late transfer of ``peer``, on a thread of its own."""

        def run() -> None:
            try:
                wait()
            finally:
                with self._lock:
                    self._late[peer] -= 1
                    if not self._late[peer]:
                        del self._late[peer]

        with self._lock:
            self._late[peer] += 1
        self._wait_aside(run)

    def _wait_aside(self, wait: Callable[[], None]) -> None:
        """Run ``wait`` on a thread that `stop` waits for."""

        def run() -> None:
            try:
                wait()
            finally:
                with self._lock:
                    self._waiters.discard(threading.current_thread())

        thread = threading.Thread(target=run, name="kvpool-ucx-late", daemon=True)
        with self._lock:
            self._waiters.add(thread)
        thread.start()

    def stop(self) -> None:
        """End the process, and with it every transfer."""
        self._stopping.set()
        with self._lock:
            self._closed = True
            self._end()
            waiters = list(self._waiters)
        for waiter in waiters:
            waiter.join()
        self._folder.cleanup()

    def _pool(self, deadline: Deadline) -> tuple[int, ConnectionPool]:
        """Which life of the process it is, and connections to it."""
        if not self._lock.acquire(timeout=deadline.left_s()):
            raise DeadlineError("the UCX process is still starting")
        try:
            if self._closed:
                raise ClosedError("the UCX process was stopped")
            if self._child is None or self._child.poll() is not None:
                self._spawn()
            if self._connections is None:
                self._connections = self._await_ready(deadline)
            return self.starts, self._connections
        finally:
            self._lock.release()

    def _spawn(self) -> None:
        if self._child is not None:
            log.warning("the UCX process has ended with status %s; it is started again", self._child.returncode)
            self._end()
        if time.monotonic() < self._spawned_s + SPAWN_PAUSE_S:
            raise UnavailableError("the UCX process has just ended; it is started again soon")
        self._spawned_s = time.monotonic()
        descriptor, exported_descriptor, size_bytes = self._memory
        self.starts += 1
        self._incarnation = int.from_bytes(os.urandom(8), "little") >> 1
        settings = HelperSettings(
            name=f"kvpool-{os.getpid()}-{self._incarnation:x}",
            socket=str(self._socket()),
            incarnation=self._incarnation,
            descriptor=descriptor,
            exported_descriptor=exported_descriptor,
            size_bytes=size_bytes,
            devices=self._devices,
        )
        self._child = subprocess.Popen(  # noqa: S603 - our own interpreter, arguments as a list
            [sys.executable, "-m", "kvpool.transport.ucx.helper", msgspec.json.encode(settings).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds={descriptor, exported_descriptor},
            start_new_session=True,  # Ctrl-C is for the parent, which ends this process when it has drained
        )

    def _await_ready(self, deadline: Deadline) -> ConnectionPool:
        assert self._child is not None
        assert self._child.stdout is not None
        poll = select.poll()
        poll.register(self._child.stdout, select.POLLIN)
        if not poll.poll(deadline.left_s() * 1000):
            raise DeadlineError("the UCX process is still starting")
        said = self._child.stdout.readline(WORDS_MAX).strip()
        if said != READY:
            self._end()
            raise UnavailableError(said.decode(errors="replace") or "the UCX process did not start; its log says why")
        pool = ConnectionPool(f"unix://{self._socket()}", f"pid:{os.getpid()}", self._incarnation)
        with pool.connection(deadline.left_s()) as connection:
            self._region = connection.call(RegionRequest(), Region, deadline.left_s())
        return pool

    def _socket(self) -> Path:
        return Path(self._folder.name) / f"{self.starts}.sock"

    def _end(self) -> None:
        if self._connections is not None:
            self._connections.close()
            self._connections = None
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            for pipe in (self._child.stdin, self._child.stdout):
                assert pipe is not None
                pipe.close()
            self._child = None
