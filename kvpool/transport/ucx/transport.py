"""`ucx`: clients read a node's segment one-sided, and nodes read what a writer has laid out for them.

The node is asked over its framed connection only for what needs a decision: to offer its segment, to prepare slots, to
pull and commit. Acceptance is the checksum over the destination, as everywhere.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from kvpool.core.errors import ClosedError, DeadlineError, KvpoolError, StaleGrantError, UnavailableError
from kvpool.core.limits import PAGE_BYTES
from kvpool.core.units import pages_of
from kvpool.ops.addresses import split_address
from kvpool.transport.base import (
    OnDiskError,
    ReadBatch,
    ReadStatus,
    Target,
    Transport,
    WriteBatch,
    WriteStatus,
    verdicts,
)
from kvpool.transport.copying import load_slots, store_slots
from kvpool.transport.deadline import Deadline
from kvpool.transport.once import OpenOnce
from kvpool.transport.pool import ConnectionPool
from kvpool.transport.streams import Streams
from kvpool.transport.tcp import TcpTransport
from kvpool.transport.ucx.arena import LEASE_BYTES_MAX, REGION_BYTES, Lease
from kvpool.transport.ucx.messages import OfferRequest, PullRequest, Region, RegisterRequest
from kvpool.transport.ucx.process import Peer, StalledError
from kvpool.transport.ucx.said import runs_over_tcp
from kvpool.transport.ucx.shared import devices_for, hold
from kvpool.transport.wire.connection import Connection
from kvpool.transport.wire.messages import NOT_MAPPED, Done, Statuses, pack, unpack
from kvpool.transport.writing import Prepared, write_prepared

START_TIMEOUT_S = 10.0
BLOCK_BYTES_MAX = REGION_BYTES // 4
"""Larger blocks go through frames."""

PATIENCE = 0.5
"""Part of the time left that UCX gets for one transfer; the rest is for frames."""

PATIENCE_S = 0.1
"""What UCX does not do in less says nothing of the node."""

PAUSE_FIRST_S = 5.0
PAUSE_MAX_S = 300.0
"""How long all goes through frames when UCX does not reach the node; then it is tried again. Doubles each time."""

FRAMES = "frames"
"""What carries the bytes then."""

log = logging.getLogger("kvpool.transport.ucx")


class UcxTransport(Transport):
    """A node's segments read over UCX; ``ucx://host:port`` is where its framed protocol answers."""

    name = "ucx"

    def __init__(self, target: Target) -> None:
        deadline = Deadline(target.timeout_s)
        self._side, self._let_go = hold(devices_for(split_address(target.place)[0]), deadline)
        try:
            uri = f"{'tcp' if target.peer is None else 'tls'}://{target.place}"
            self._framed = TcpTransport(replace(target, uri=uri, timeout_s=deadline.left_s()))
            self._connections = ConnectionPool(uri, target.principal, target.incarnation, target.peer)
            self._streams = Streams(target.streams)
            self._peers: OpenOnce[bytes, tuple[Peer, Region]] = OpenOnce("the transport", self._forget)
            self._on_disk: set[bytes] = set()
            self._closed = threading.Event()
            self._pause_s = PAUSE_FIRST_S
            self._paused_until_s = 0.0
            self._known_life = 0
        except BaseException:
            self._let_go()
            raise

    @classmethod
    def prepare(cls, pool_uri: str) -> Callable[[], None]:
        """See `Transport.prepare`: starts the UCX process."""
        host = pool_uri.partition("://")[2].rpartition(":")[0].strip("[]")
        return hold(devices_for(host), Deadline(START_TIMEOUT_S))[1]

    def reach(self, segment_id: bytes, deadline: Deadline) -> None:
        """See `Transport.reach`."""
        if not self._is_paused():
            try:
                self._peer(segment_id, b"", deadline)
            except StalledError as error:
                self._pause(error)
                raise

    def read(self, batch: ReadBatch, deadline: Deadline) -> bytearray:
        """See `Transport.read`."""
        if batch.block_bytes > BLOCK_BYTES_MAX or batch.segment_id in self._on_disk or self._is_paused():
            return self._framed.read(batch, deadline)
        seeds = batch.seeds()

        def part(first: int, end: int) -> bytearray:
            return self._read_part(batch, seeds, first, end, deadline)

        try:
            statuses = bytearray().join(self._streams.split(len(batch.destinations), batch.block_bytes, part))
        except OnDiskError:
            self._on_disk.add(batch.segment_id)
            return self._framed.read(batch, deadline)
        return self._read_rest(batch, statuses, deadline)

    def write(self, batches: Iterable[WriteBatch], deadline: Deadline) -> list[bytearray]:
        """See `Transport.write`."""
        batches = list(batches)
        large = any(batch.block_bytes > BLOCK_BYTES_MAX for batch in batches)
        if large or self._is_paused() or not self._is_known(deadline):
            return self._framed.write(batches, deadline)
        statuses = write_prepared(self._connections, batches, partial(self._write_all, batches, deadline), deadline)
        if any(WriteStatus.FAILED in some for some in statuses):
            self._pause("a write over UCX failed")
        return statuses

    def close(self) -> None:
        """See `Transport.close`."""
        self._closed.set()
        self._connections.close()
        self._streams.close()
        self._peers.close()
        self._framed.close()
        self._let_go()

    def _read_part(self, batch: ReadBatch, seeds: list[int], first: int, end: int, deadline: Deadline) -> bytearray:
        statuses = bytearray([ReadStatus.FAILED]) * (end - first)
        step = max(1, LEASE_BYTES_MAX // (pages_of(batch.block_bytes) * PAGE_BYTES))
        try:
            peer, region = self._peer(batch.segment_id, batch.grant, deadline)
            with self._connections.connection(deadline.left_s()) as node:
                for start in range(first, end, step):
                    blocks = range(start, min(start + step, end))
                    found = self._read_some(peer, region, node, batch, seeds, blocks, deadline)
                    statuses[start - first : start - first + len(found)] = found
        except ClosedError:
            raise
        except StaleGrantError:
            return statuses.replace(bytes([ReadStatus.FAILED]), bytes([ReadStatus.REFUSED]))
        except DeadlineError:
            return statuses.replace(bytes([ReadStatus.FAILED]), bytes([ReadStatus.LATE]))
        except (KvpoolError, OSError) as error:
            log.info("a read from %s failed: %s", self._connections.uri, error)
            if isinstance(error, StalledError):
                self._pause(error)
            self._peers.drop(batch.segment_id)  # what had arrived is verified; the next read meets the node anew
        return statuses

    def _read_rest(self, batch: ReadBatch, statuses: bytearray, deadline: Deadline) -> bytearray:
        """Read through frames what UCX did not bring: it may be UCX alone that fails."""
        failed = [i for i, status in enumerate(statuses) if status == ReadStatus.FAILED]
        if failed:
            for i, status in zip(failed, self._framed.read(batch.select(failed), deadline), strict=True):
                statuses[i] = status
        return statuses

    def _is_wanted(self, node: Connection) -> bool:
        """Whether a read under way can still succeed; raises ClosedError after `close`."""
        if self._closed.is_set():
            raise ClosedError("the client was closed")
        return not node.readable(0)

    def _is_paused(self) -> bool:
        return time.monotonic() < self._paused_until_s

    def _pause(self, why: object) -> None:
        """Leave UCX alone for a while: it does not reach the node, or the node's does not reach this process."""
        if self._is_paused():
            return  # by another stream
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, PAUSE_MAX_S)
        self._paused_until_s = time.monotonic() + pause_s
        self._known_life = 0
        self.carrier, self.fell_back = FRAMES, True
        self._peers.drop_all()  # so that the next read meets the node, and what carries that is known
        log.warning("%s is left to frames for %g s: %s", self._connections.uri, pause_s, why)

    def _is_known(self, deadline: Deadline) -> bool:
        """Whether the node can read what is laid out here; asked once in each life of the UCX process."""
        process = self._side.process
        try:
            own = process.region(deadline)
            life = process.starts
            if self._known_life != life:
                with self._connections.connection(deadline.left_s()) as connection:
                    request = RegisterRequest(own.agent, own.address, own.size_bytes)
                    connection.call(request, Done, deadline.part(PATIENCE).left_s())
                self._known_life = life
        except ClosedError:
            raise
        except (KvpoolError, OSError) as error:
            self._pause(error)
            return False
        return True

    def _read_some(
        self,
        peer: Peer,
        region: Region,
        node: Connection,
        batch: ReadBatch,
        seeds: list[int],
        blocks: range,
        deadline: Deadline,
    ) -> bytearray:
        """Read ``blocks`` in one transfer; one `ReadStatus` each."""
        some, pages_each = slice(blocks.start, blocks.stop), pages_of(batch.block_bytes)
        slots = batch.slots[some]
        if int(slots.max()) + pages_each > region.size_bytes // PAGE_BYTES:
            return bytearray([ReadStatus.BAD]) * len(blocks)
        arena, process = self._side.arena, self._side.process
        lease = arena.lease(len(blocks), pages_each, deadline)
        release = partial(arena.release, lease)
        try:
            part = deadline.part(PATIENCE)
            transfer = process.begin(peer, pages_each, lease.slots, slots, deadline)
        except BaseException:
            release()
            raise
        try:
            transfer.wait(part, lambda: self._is_wanted(node))
            self._pause_s = PAUSE_FIRST_S
            found = load_slots(arena.payload, lease.slots, batch.destinations.select(blocks), seeds[some])
        except DeadlineError as error:
            raise _stalled(error, part) from error
        finally:
            transfer.when_ended(release)
        return verdicts(found, batch.checksums[some].tolist())

    def _peer(self, segment_id: bytes, grant: bytes, deadline: Deadline) -> tuple[Peer, Region]:
        """The node's UCX process, met; raises StalledError when it is not in half of the time left."""
        part = deadline.part(PATIENCE)
        try:
            return self._peers.get(segment_id, partial(self._meet, segment_id, grant, part), part)
        except StaleGrantError:
            raise
        except UnavailableError as error:
            raise _stalled(error, part) from error

    def _meet(self, segment_id: bytes, grant: bytes, deadline: Deadline) -> tuple[Peer, Region]:
        with self._connections.connection(deadline.left_s()) as connection:
            region = connection.call(OfferRequest(segment_id, grant), Region, deadline.left_s())
        if region.size_bytes == NOT_MAPPED:
            raise OnDiskError(segment_id.hex())
        peer = self._side.process.meet(region, deadline)
        fell_back_before = self.fell_back
        self.carrier = self._side.process.carrier
        self.fell_back = _fell_back(self.carrier)
        if self.fell_back and not fell_back_before:
            log.warning("UCX reaches %s over TCP alone (%s)", self._connections.uri, self.carrier)
        else:
            log.info("UCX reaches %s over %s", self._connections.uri, self.carrier or "it does not say what")
        return peer, region

    def _forget(self, met: tuple[Peer, Region]) -> None:
        self._side.process.forget(met[0])

    def _write_all(
        self, batches: Sequence[WriteBatch], deadline: Deadline, connection: Connection, prepared: list[Prepared]
    ) -> None:
        """Lay out the blocks step by step and ask the node to pull each: it pulls one while the next is laid out."""
        own = self._side.process.region(deadline)
        connection.post(RegisterRequest(own.agent, own.address, own.size_bytes), deadline.left_s())
        connection.collect(Done, deadline.left_s())
        pulling: deque[tuple[Prepared, list[int], Lease]] = deque()
        try:
            for batch, ready in zip(batches, prepared, strict=True):
                step = max(1, LEASE_BYTES_MAX // (pages_of(batch.block_bytes) * PAGE_BYTES))
                for first in range(0, len(ready.blocks), step):
                    if len(pulling) == 2:
                        self._collect(connection, pulling, deadline)
                    lease = self._lay_out(connection, batch, ready, slice(first, first + step), deadline)
                    pulling.append((ready, ready.blocks[first : first + step], lease))
            while pulling:
                self._collect(connection, pulling, deadline)
        finally:
            # A node that still pulls what was given up here finds other bytes, and their checksums wrong.
            for _, _, lease in pulling:
                self._side.arena.release(lease)

    def _lay_out(
        self, connection: Connection, batch: WriteBatch, ready: Prepared, some: slice, deadline: Deadline
    ) -> Lease:
        blocks, slots, generations = ready.blocks[some], ready.slots[some], ready.generations[some]
        arena = self._side.arena
        lease = arena.lease(len(blocks), pages_of(batch.block_bytes), deadline)
        try:
            seeds = batch.seeds(generations, blocks)
            checksums = store_slots(arena.payload, lease.slots, batch.sources.select(blocks), seeds)
            where = (slots.tobytes(), generations.tobytes(), pack(checksums, "<u8"), lease.slots.tobytes())
            connection.post(PullRequest(batch.segment_id, batch.reservation, *where), deadline.left_s())
        except BaseException:
            arena.release(lease)
            raise
        return lease

    def _collect(
        self, connection: Connection, pulling: deque[tuple[Prepared, list[int], Lease]], deadline: Deadline
    ) -> None:
        answer = connection.collect(Statuses, deadline.left_s()).statuses
        ready, blocks, lease = pulling.popleft()
        self._side.arena.release(lease)
        ready.spread(blocks, unpack("statuses", answer, "u1", len(blocks)).tolist())


def _stalled(error: UnavailableError, part: Deadline) -> UnavailableError:
    """What ``error`` means when UCX had ``part`` of a call's time: too little says nothing of the node."""
    if isinstance(error, DeadlineError) and part.timeout_s < PATIENCE_S:
        return error
    return StalledError(str(error))


def _fell_back(carrier: str) -> bool:
    """Whether UCX moves data over TCP alone, though ``UCX_TLS`` does not ask for TCP."""
    asked = "tcp" in os.environ.get("UCX_TLS", "").split(",")
    return not asked and runs_over_tcp(carrier)
