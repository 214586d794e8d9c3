"""What must hold when everything is mended and every time-out has passed."""

from kvpool.core.checksum import block_seeds, payload_checksum
from kvpool.core.directory import BlockState
from kvpool.core.limits import PAGE_BYTES
from kvpool.core.members import MemberState
from kvpool.core.slots import SlotState

from .workload import NAMESPACE_OF


def check_quiescent(cluster, fates):
    """What is left that should not be; sentences."""
    service = cluster.meta.service
    service.check_integrity()
    found = _check_service(service, cluster)
    placed = _placements(service._directory)
    for node in cluster.nodes:
        node.slots.check_integrity()
        mine = {slot: what for (segment_id, slot), what in placed.items() if segment_id == node.memory.segment_id}
        found += _check_node(node, mine)
        if not fates.spoiled:
            found += _check_payloads(node, mine)
    return found


def _check_service(service, cluster):
    stats = service._directory.stats()
    left = {name: getattr(stats, name) for name in ("reservations", "leases", "leased_bytes", "orders_pending")}
    found = [f"the directory still has {count} {name}" for name, count in left.items() if count]
    if service.status().recovery.active:
        found.append("the service is still recovering")
    states = {member.node_id: member.state for member in service._members}
    found += [f"{n.name} is {states.get(n.name)}" for n in cluster.nodes if states.get(n.name) != MemberState.READY]
    state = service._directory._state
    flying = [
        h.hex()[:8]
        for index in state.chains.indexes
        for h, row in index.items()
        if state.blocks.state[row] == BlockState.IN_FLIGHT
    ]
    return found + ([f"blocks are still in flight: {flying}"] if flying else [])


def _placements(directory):
    """(segment id, slot) -> (hash, shard, generation, checksum) of everything the directory names."""
    state = directory._state
    rows, placed = state.placements.rows, {}
    for index in state.chains.indexes:
        for block_hash, row in index.items():
            for p in state.placements.of_block(row):
                segment = state.placements.segments[rows.segment[p]]
                place = (segment.segment_id, rows.slot[p])
                assert place not in placed, f"two placements in one slot: {place}"
                placed[place] = (block_hash, rows.shard[p], rows.generation[p], rows.checksum[p])
    return placed


def _check_node(node, placed):
    left = [slot for slot in node.slots if slot.state != SlotState.COMMITTED or slot.pins or slot.doomed]
    found = [f"{node.name} has a slot left over: {slot}" for slot in left]
    headers = node.store.inventory()
    held = {}
    for page, record in zip(headers.pages.tolist(), headers.records, strict=True):
        held[page] = (
            record["hash"].tobytes(),
            int(record["shard"]),
            int(record["generation"]),
            int(record["checksum"]),
        )
    committed = {slot.page: slot.generation for slot in node.slots if slot.state == SlotState.COMMITTED}
    if {where: what[2] for where, what in held.items()} != committed:
        found.append(f"{node.name}: headers and slots disagree")
    for where, what in placed.items():
        if held.get(where) != what:
            found.append(f"the directory names {node.name} {where} {_show(what)}, there is {_show(held.get(where))}")
    unknown = sorted(held.keys() - placed.keys())
    return found + [f"{node.name} keeps {w} {_show(held[w])}, which the directory does not name" for w in unknown]


def _check_payloads(node, placed):
    """Without bit flips and restarts, every slot has the bytes that its checksum is of."""
    found = []
    for slot, what in placed.items():
        block_hash, shard, generation, checksum = what
        namespace, start = NAMESPACE_OF[block_hash], slot * PAGE_BYTES
        [seed] = block_seeds(namespace.seed, block_hash, shard, [generation], namespace.block_bytes)
        if payload_checksum(node.memory.payload[start : start + namespace.block_bytes].data, seed) != checksum:
            found.append(f"{node.name} slot {slot} has other bytes than those of {_show(what)}")
    return found


def _show(what):
    return what and f"{what[0].hex()[:8]}/{what[1]} generation {what[2]}"
