"""A node's store over real shared memory, with a real directory behind it, and what a writer does to it."""

from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from kvpool.core.checksum import block_seeds, payload_checksum
from kvpool.core.errors import UnavailableError
from kvpool.core.keys import chain_hashes
from kvpool.core.limits import PAGE_BYTES
from kvpool.core.members import MemberSegment
from kvpool.core.namespace import Namespace
from kvpool.core.slots import Slots, SlotState
from kvpool.meta.service import MetaService
from kvpool.node.headers import HeaderFile
from kvpool.node.namespaces import NamespaceBook
from kvpool.node.records import NodeSession
from kvpool.node.segment import ShmSegment
from kvpool.node.server import restore_slots
from kvpool.node.store import NodeStore
from kvpool.ops.settings import MetaSettings
from kvpool.transport.base import WriteStatus

SEGMENT_ID = b"s" * 16
PAGES = 8
NAMESPACE = Namespace(model="demo", block_tokens=1, block_bytes=2 * PAGE_BYTES - 100)
CHAIN = chain_hashes(range(6), 1)
QUARANTINE_S = 30.0
WRITER, OTHER = 1, 2
COMMITTED, STALE, FAILED = WriteStatus.COMMITTED, WriteStatus.STALE, WriteStatus.FAILED


class ServiceLink:
    """The directory of a metadata service in this process, which can be cut off."""

    def __init__(self, service):
        self.service = service
        self.session = 0
        self.cut = False

    def commit(self, segment_id, reservation, headers) -> NDArray[np.uint8]:
        if self.cut:
            raise UnavailableError("cut off")
        columns = (headers.records[name].tolist() for name in ("hash", "shard", "generation", "checksum"))
        hashes, shards, generations, checksums = columns
        written = zip(hashes, shards, headers.pages.tolist(), generations, checksums, strict=True)
        return np.array(self.service.commit(self.session, segment_id, reservation, list(written)), np.uint8)

    def abort(self, reservation, hashes) -> None:
        self.service.abort(reservation, hashes)

    def gone(self, segment_id, headers) -> None:
        columns = zip(headers.records["hash"].tolist(), *zip(*headers.named(), strict=True), strict=True)
        namespace_id = headers.records["namespace"][0].tobytes()
        self.service.gone(self.session, segment_id, namespace_id, list(columns), bad=True)

    def describe(self, namespace_id) -> bytes:
        return self.service.namespace(namespace_id).document


class Node:
    """A store with its segment, headers and directory, as a node has them."""

    def __init__(self, directory, clock, *, restarted=False):
        self.service = MetaService(MetaSettings(), clock, lambda count: b"\x5a" * count)
        self.service.open_namespace(NAMESPACE.document)
        self.link = ServiceLink(self.service)
        self.segment = ShmSegment(directory / "payload", SEGMENT_ID, PAGES * PAGE_BYTES, "off")
        self.headers = HeaderFile(directory / "headers", SEGMENT_ID, PAGES)
        fresh = Slots(PAGES, clock, self.headers.next_generation, QUARANTINE_S)
        self.slots = restore_slots(self.headers, PAGES) if restarted else fresh
        book = NamespaceBook(directory / "namespaces", self.link.describe)
        self.store = NodeStore(self.segment, self.headers, self.slots, book, self.link, incarnation=1)
        self.join()

    def join(self):
        segment = MemberSegment(SEGMENT_ID, "shm", PAGES * PAGE_BYTES)
        self.member = self.service.join("n0", 1, (), (segment,))
        self.service.ready(self.member)
        self.link.session = self.member.session
        self.store.session = NodeSession(self.service.incarnation, self.member.session, self.member.key)

    def close(self):
        self.headers.close()
        self.segment.close()

    def reserve(self, blocks=1, first=0):
        """(reservation, sealed grant) for blocks of the chain."""
        packed = b"".join(CHAIN[: first + blocks])
        reserved = self.service.reserve(NAMESPACE.id, packed, first, b"", "writer", 0.0)
        [grant] = reserved.grants
        return reserved.result.reservation, grant.grant

    def fill(self, page, generation, block):
        """Write a block's bytes into its slot, as a writer that maps the segment does; their checksum."""
        payload = bytes([block]) * NAMESPACE.block_bytes
        self.segment.payload[page * PAGE_BYTES :][: len(payload)] = np.frombuffer(payload, np.uint8)
        return checksum_of(payload, CHAIN[block], generation)

    def write(self, blocks=1, first=0, owner=WRITER):
        """Do all that a writer does; (slots, generations)."""
        reservation, grant = self.reserve(blocks, first)
        slots, generations = self.store.prepare(grant, owner)
        named = zip(slots.tolist(), generations.tolist(), strict=True)
        checksums = [self.fill(*name, first + i) for i, name in enumerate(named)]
        statuses = self.commit_slots(reservation, slots, generations, checksums, owner)
        assert statuses == [COMMITTED] * blocks
        return slots.tolist(), generations.tolist()

    def commit_slots(self, reservation, slots, generations, checksums=None, owner=WRITER):
        checksums = np.zeros(len(slots), np.uint64) if checksums is None else np.array(checksums, np.uint64)
        return list(self.store.commit_slots(SEGMENT_ID, reservation, owner, slots, generations, checksums))

    def visible(self):
        return self.service.match(NAMESPACE.id, b"".join(CHAIN), 0, 0.0).blocks

    def in_use(self):
        """(slots, bytes used) of the node, which must agree with its headers."""
        self.slots.check_integrity()
        self.service.check_integrity()
        for state in (SlotState.WRITING, SlotState.COMMITTED):
            described = [(slot.page, slot.generation) for slot in self.slots if slot.state == state and not slot.doomed]
            assert self.headers.scan(state).named() == sorted(described)
        return self.store.stats().slots, self.store.stats().used_bytes


@contextmanager
def no_change(node):
    before = node.in_use()
    yield
    assert node.in_use() == before


def checksum_of(payload, block_hash, generation, shard=0):
    [seed] = block_seeds(NAMESPACE.seed, block_hash, shard, [generation], NAMESPACE.block_bytes)
    return payload_checksum(payload, seed)
