"""Plans saves, holds their blocks, and sees each through: reserved, written by all ranks, let go."""

import queue
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvpool import Want
from kvpool.core.limits import HASH_BYTES, MATCH_BLOCKS_MAX
from kvpool_connector.vllm.calls import PoolCalls, Reserved
from kvpool_connector.vllm.jobs import SaveJob, SaveReport
from kvpool_connector.vllm.requests import RequestBook
from kvpool_connector.vllm.saves import SaveBook, Saving, wanted_blocks

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

CROWDED_TRIES = 5
"""Further tries when a node's free pages are too scattered, as of the client's own `store`."""

Count = Callable[[str, int], None]


class Saver:
    """The saving part of the scheduler's half. Not thread-safe.

    Args:
        requests: How far each request is saved.
        book: Saves that have not ended.
        count: Adds to a counter of `metrics.COUNTERS`.
    """

    def __init__(self, requests: RequestBook, book: SaveBook, count: Count) -> None:
        self.book = book
        self.job_blocks = 1
        """Blocks of one job: they are gathered, written and let go together, several jobs side by side."""
        self._requests = requests
        self._count = count
        self._pool: BlockPool | None = None
        self._ready: list[SaveJob] = []

    def bind(self, pool: "BlockPool") -> None:
        """The engine's blocks: a save references those that it reads."""
        self._pool = pool

    def save(
        self, calls: PoolCalls, chain: Sequence[bytes], request_id: str, table: Sequence[int], *, last: bool = False
    ) -> None:
        """Begin to save what is not saved of a chain whose blocks are computed.

        Without room, or without a pool, they stay unsaved until the next step; with ``last`` there is none.
        """
        unsaved = self._requests.unsaved(request_id, min(len(chain), len(table), MATCH_BLOCKS_MAX))
        while unsaved:
            some = unsaved[: min(self.job_blocks, self.book.room())]
            if not some or not calls.available(queued=True):
                if last:
                    self._count("save_dropped_blocks", len(unsaved))
                return
            hashes = b"".join(chain[: some.stop])
            self._begin(calls, request_id, hashes, some.start, table[some.start : some.stop])
            self._requests.saving(request_id, some.stop)
            unsaved = unsaved[len(some) :]

    def take_reservations(self, calls: PoolCalls, table_of: Callable[[str], Sequence[int]]) -> None:
        """Handle every reservation that has been answered; ``table_of`` gives a running request's computed blocks."""
        while True:
            try:
                self._reserved(calls, calls.reservations.get_nowait(), table_of)
            except queue.Empty:
                return

    def take_ready(self) -> list[SaveJob]:
        """Jobs that the workers can begin."""
        ready, self._ready = self._ready, []
        return ready

    def reported(self, calls: PoolCalls | None, number: int, report: SaveReport, ranks: int) -> None:
        """Some ranks have ended a job; with the last one its blocks are let go, and what failed is aborted for all."""
        saving = self.book.reported(number, report, ranks)
        if saving is None or saving.report is None or saving.reservation is None:
            return
        failed = saving.report.failed
        if failed and calls is not None:
            calls.abort(saving.reservation, sorted(failed), crowded=saving.report.crowded)
        self._count("save_blocks", wanted_blocks(saving.reservation) - len(failed))
        if failed and calls is not None and saving.report.crowded and saving.tries < CROWDED_TRIES:
            # The abort has the directory make a hole; what is written already exists by then.
            first = min(failed)
            tries = saving.tries + 1
            some = saving.blocks[first:]
            self._begin(calls, saving.request_id, saving.hashes, saving.first + first, some, tries=tries)
        else:
            self._count("save_dropped_blocks", len(failed))
        self._end(saving)

    def drop_unsent(self) -> None:
        """Saves that no rank has been given end here: whoever would answer for them is gone."""
        ready, self._ready = {job.number for job in self._ready}, []
        for saving in self.book.unsent(ready):
            self._count("save_dropped_blocks", len(saving.blocks))
            self._end(saving)

    def _begin(
        self,
        calls: PoolCalls,
        request_id: str,
        hashes: bytes,
        first: int,
        table: Sequence[int],
        *,
        tries: int = 0,
    ) -> None:
        assert self._pool is not None
        self._pool.touch([self._pool.blocks[block] for block in table])
        number = self._requests.number()
        self.book.planned(number, request_id, hashes, first, list(table), tries=tries)
        calls.reserve(number, hashes, first)

    def _reserved(self, calls: PoolCalls, answer: Reserved, table_of: Callable[[str], Sequence[int]]) -> None:
        saving = self.book.find(answer.number)
        if saving is None:
            return
        reservation = answer.reservation
        if reservation is None:
            self._count("save_dropped_blocks", len(saving.blocks))
            self._end(saving)
        elif reservation.missing_from is not None:
            self._replan(calls, saving, reservation.missing_from, table_of(saving.request_id))
        else:
            self._count("save_existing_blocks", sum(map(reservation.wants.count, (Want.EXISTS, Want.IN_FLIGHT))))
            self._count("save_dropped_blocks", reservation.wants.count(Want.NO_ROOM))
            if wanted_blocks(reservation):
                self._ready.append(self.book.reserved(saving, reservation))
            else:
                self._end(saving)

    def _replan(self, calls: PoolCalls, saving: Saving, missing_from: int, table: Sequence[int]) -> None:
        """An ancestor has left the pool: save from there while the request has its blocks, else give up."""
        owned = 0 <= missing_from < saving.first and saving.end <= len(table)
        room = saving.end - missing_from <= self.book.room() + len(saving.blocks)
        if owned and room and not saving.tries:
            self._count("save_replans", 1)
            hashes = saving.hashes[: saving.end * HASH_BYTES]
            some = table[missing_from : saving.end]
            self._begin(calls, saving.request_id, hashes, missing_from, some, tries=1)
        else:
            self._count("save_dropped_blocks", len(saving.blocks))
        self._end(saving)

    def _end(self, saving: Saving) -> None:
        assert self._pool is not None
        blocks = self.book.ended(saving.number)
        self._pool.free_blocks(self._pool.blocks[block] for block in reversed(blocks))
