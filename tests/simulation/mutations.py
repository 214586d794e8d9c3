"""Faults of the pool's own, put in on purpose: each must be found by the simulation, or the simulation is blind."""

import sys

import kvpool.transport.shm
import kvpool.transport.tcp
import kvpool.transport.writing
from kvpool.core.directory.chains import Chains
from kvpool.core.directory.directory import Directory
from kvpool.core.directory.outbox import Outbox
from kvpool.core.directory.state import DirectoryState
from kvpool.core.directory.table import BlockState
from kvpool.core.slots import Slots, SlotState
from kvpool.node.store import NodeStore
from kvpool.transport.base import ReadStatus
from kvpool.transport.deadline import Deadline
from kvpool.transport.wire.connection import Connection

from .network import Network


def _believing(read):
    """A reader that takes what arrives for what it asked for."""

    def read_all(*args):
        statuses = read(*args)
        return statuses.replace(bytes([ReadStatus.BAD]), bytes([ReadStatus.OK]))

    return read_all


def shm_reads_are_not_verified():
    begin = kvpool.transport.shm.begin_mapped
    return [(kvpool.transport.shm, "begin_mapped", lambda *args: _believing(begin(*args)))]


def tcp_reads_are_not_verified():
    transport = kvpool.transport.tcp.TcpTransport
    return [(transport, "read", _believing(transport.read))]


def generations_stand_still():
    prepare = Slots.prepare

    def prepare_again(self, *args, **options):
        slots = prepare(self, *args, **options)
        for slot in slots:
            slot.generation = 1
        return slots

    return [(Slots, "prepare", prepare_again)]


def visible_before_all_shards():
    commit = Directory.commit

    def commit_early(self, reservation, segment_id, written):
        state = self._state
        opened = state.reservations.get(reservation)
        statuses = commit(self, reservation, segment_id, written)
        if opened is not None:
            index = state.chains.indexes[opened.namespace]
            for block_hash, *_ in written:
                row = index.get(block_hash, -1)
                if row >= 0:
                    state.chains._set_state(row, BlockState.VISIBLE)
        return statuses

    return [(Directory, "commit", commit_early)]


def children_stay_visible_without_their_parents():
    return [(Chains, "doze", lambda self, row: None)]


def freed_blocks_are_resurrected():
    return [(Outbox, "has_freed", lambda self, *_: False)]


def unwanted_slots_are_kept():
    return [(NodeStore, "apply", lambda self, orders: list(orders) and None)]


def stale_slots_are_kept():
    free = NodeStore._free

    def free_unless_committing(self, page, generation, *, rest):
        if sys._getframe(1).f_code.co_name == "_settle":
            return False
        return free(self, page, generation, rest=rest)

    return [(NodeStore, "_free", free_unless_committing)]


def reservations_never_expire():
    return [(DirectoryState, "expire", lambda self: self.leases.expire(self.now_us()))]


def leases_hold_nothing():
    return [(DirectoryState, "hold", lambda self, row, until_us: None)]


def pins_hold_nothing():
    release = Slots._release

    def release_pinned(self, slot):
        pins, slot.pins = slot.pins, 0
        release(self, slot)
        slot.pins = pins

    return [(Slots, "_release", release_pinned)]


def abandoned_writes_do_not_rest():
    return [(Slots, "_quarantine", lambda self, slot: self._release(slot))]


def owners_never_leave():
    return [(NodeStore, "drop_owner", lambda self, owner: None)]


def deadlines_begin_anew():
    return [(Deadline, "left_s", lambda self: self.timeout_s)]


def greeting_has_a_time_of_its_own():
    call = Connection.call

    def call_longer(self, request, reply_type, timeout_s, payload=()):
        return call(self, request, reply_type, self.timeout_s if hasattr(self, "timeout_s") else timeout_s, payload)

    init = Connection.__init__

    def init_longer(self, uri, principal, timeout_s):
        self.timeout_s = timeout_s
        init(self, uri, principal, timeout_s)
        del self.timeout_s

    return [(Connection, "call", call_longer), (Connection, "__init__", init_longer)]


def half_written_connections_are_kept():
    close = Connection.close

    def close_unless_writing(self):
        if sys._getframe(1).f_code.co_name == "_write_over" and not self.waits:
            return
        close(self)

    return [(Connection, "close", close_unless_writing)]


def silent_hosts_are_never_noticed():
    notice = Network._notice_silence
    return [(Network, "_notice_silence", lambda self, end: notice(self, end) if end.pings else None)]


def late_commits_leave_their_slots():
    return [(Slots, "finish", lambda self, page, generation, owner: None)]


def unanswered_commits_are_forgotten():
    commit = NodeStore._commit

    def commit_and_forget(self, reservation, headers):
        statuses = commit(self, reservation, headers)
        self.in_doubt = False
        return statuses

    return [(NodeStore, "_commit", commit_and_forget)]


def inventories_name_what_is_being_committed():
    return [(NodeStore, "inventory", lambda self: self._headers.scan(SlotState.COMMITTED))]


def orders_are_applied_blindly():
    """A free order ignores the generation it names."""

    def free(self, page, generation, *, rest=False):
        slot = self._slots.get(page)
        return slot is not None and free_exactly(self, page, slot.generation, rest=rest)

    free_exactly = Slots.free
    return [(Slots, "free", free)]


MUTATIONS = [
    shm_reads_are_not_verified,
    tcp_reads_are_not_verified,
    generations_stand_still,
    visible_before_all_shards,
    children_stay_visible_without_their_parents,
    freed_blocks_are_resurrected,
    unwanted_slots_are_kept,
    stale_slots_are_kept,
    reservations_never_expire,
    leases_hold_nothing,
    pins_hold_nothing,
    abandoned_writes_do_not_rest,
    owners_never_leave,
    deadlines_begin_anew,
    greeting_has_a_time_of_its_own,
    half_written_connections_are_kept,
    silent_hosts_are_never_noticed,
    late_commits_leave_their_slots,
    unanswered_commits_are_forgotten,
    inventories_name_what_is_being_committed,
    orders_are_applied_blindly,
]
