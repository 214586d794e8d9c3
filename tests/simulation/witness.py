"""What is seen from inside while a schedule runs: commits as they happen, and whether the state machines hold."""

from kvpool.core.directory import CommitStatus
from kvpool.core.directory.table import NIL, NO_SLOT
from kvpool.core.limits import PAGE_BYTES
from kvpool.core.slots import SlotState
from kvpool.testing.history import Commit

from .scheduler import current
from .workload import NAMESPACE_OF, identify, key_of


class Witness:
    """Records commits in the history; the service calls the real directory through it."""

    def __init__(self, history, validate):
        self.validate = validate
        self.history = history
        self.cluster = None
        self.violations = []
        self.commits = 0

    def service(self, service):
        """Watch the directory of ``service``."""
        directory = service._directory
        commit = directory.commit

        def watched(reservation, segment_id, written):
            copies = {i: _committed_copies(directory, h, shard) for i, (h, shard, *_) in enumerate(written)}
            is_copy = directory.copy(reservation) is not None
            statuses = commit(reservation, segment_id, written)
            for i, status in enumerate(statuses):
                if status == CommitStatus.COMMITTED:
                    block_hash, shard, slot, _, _ = written[i]
                    self._committed(segment_id, block_hash, shard, slot)
                    self.commits += 1
                    if copies[i] and not is_copy:
                        self.violations.append(f"{block_hash.hex()[:8]}/{shard} was committed beside another copy")
            self._check(directory)
            return statuses

        directory.commit = watched
        announce = directory.announce

        def watched_announce(segment_id, namespace_id, part):
            wanted = announce(segment_id, namespace_id, part)
            for i in wanted.nonzero()[0].tolist():
                self._committed(segment_id, part.hashes[i], int(part.shards[i]), int(part.slots[i]))
            self._check(directory)
            return wanted

        directory.announce = watched_announce

    def copied(self, destination):
        """A client copied a piece to ``destination``; into a node's memory only while it may write there."""
        address = destination.__array_interface__["data"][0]
        for node in self.cluster.nodes:
            offset = address - node.memory.address
            if 0 <= offset < node.memory.size_bytes and node.starts == 1:
                page = offset // PAGE_BYTES
                holder = next((slot for slot in node.slots if slot.page <= page < slot.page + slot.pages), None)
                if holder is None or holder.state == SlotState.COMMITTED:
                    self.violations.append(f"{current().task.process} wrote into {node.name} page {page}: {holder}")

    def _check(self, directory):
        if self.validate:
            directory.check_integrity()
            for node in self.cluster.nodes:
                if node.slots is not None:
                    node.slots.check_integrity()

    def _committed(self, segment_id, block_hash, shard, slot):
        namespace = NAMESPACE_OF[block_hash]
        payload = self.cluster.node_of_segment(segment_id).memory.payload
        start = slot * PAGE_BYTES
        attempt = identify(block_hash, shard, payload[start : start + namespace.block_bytes])
        self.history.add(Commit(key_of(block_hash, shard), attempt, current().now_s))


def _committed_copies(directory, block_hash, shard):
    state = directory._state
    entry = state.namespaces.get(NAMESPACE_OF[block_hash].id)
    row = state.chains.indexes[entry.number].get(block_hash, NIL) if entry else NIL
    rows = state.placements.rows
    placements = state.placements.of_block(row) if row != NIL else ()
    return sum(rows.shard[p] == shard and rows.slot[p] != NO_SLOT for p in placements)
