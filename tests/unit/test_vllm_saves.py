"""The connector's saves: references, ranks, and when an idle engine may sleep."""

import pytest
from kvpool_connector.vllm.jobs import LoadReport, SaveReport, WorkerReport
from kvpool_connector.vllm.saves import ORPHANED_TIMEOUTS, SaveBook, wanted_blocks

from kvpool import Reservation, Want
from kvpool.testing import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def book(clock: ManualClock) -> SaveBook:
    return SaveBook(clock, pinned_max=10, timeout_s=5)


def rank(failed: tuple[int, ...] = (), *, crowded: bool = False) -> SaveReport:
    return SaveReport(1, frozenset(failed), crowded, 100, 0.1)


def test_blocks_are_referenced_until_the_save_ends(book: SaveBook) -> None:
    book.planned(1, "r", b"", 0, [4, 5, 6])
    book.planned(2, "r", b"", 3, [7])  # V3: one request, two jobs
    assert (book.pinned_blocks, book.room()) == (4, 6)
    assert book.ended(2) == [7]
    assert book.ended(1) == [4, 5, 6]
    assert (book.pinned_blocks, book.room(), len(book)) == (0, 10, 0)
    book.check_integrity()


def test_a_save_ends_with_its_last_rank_and_drops_what_any_rank_dropped(book: SaveBook) -> None:
    book.planned(1, "r", b"", 0, [4, 5, 6])
    assert book.reported(1, rank((0,)), ranks=3) is None
    assert book.reported(1, rank((2,), crowded=True), ranks=3) is None
    saving = book.reported(1, rank(), ranks=3)
    assert (frozenset({0, 2}), True, 300) == (saving.report.failed, saving.report.crowded, saving.report.size_bytes)


def test_reports_of_unknown_saves_are_ignored(book: SaveBook) -> None:
    assert book.reported(99, rank(), ranks=1) is None


def test_a_save_that_nobody_reports_lets_the_engine_sleep_at_last(book: SaveBook, clock: ManualClock) -> None:
    book.planned(1, "r", b"", 0, [4])
    assert book.pending()
    assert book.younger_than(1)
    clock.advance(2)
    assert not book.younger_than(1)  # V39
    clock.advance(5 * ORPHANED_TIMEOUTS)
    assert not book.pending()
    assert book.pinned_blocks == 1, "its blocks may still be read"


def test_only_wanted_blocks_count() -> None:
    wants = bytes([Want.EXISTS, Want.WANTED, Want.IN_FLIGHT, Want.WANTED, Want.NO_ROOM])
    assert wanted_blocks(Reservation(b"", 1, 0, b"", wants, None, [])) == 2


def test_reports_of_several_workers_and_steps_add_up() -> None:
    ended = LoadReport(None, "", 10, 0.1)
    left = WorkerReport({1: [ended]}, {7: rank((1,))}, timed_step=3)
    right = WorkerReport({1: [ended], 2: [ended]}, {7: rank(), 8: rank()})
    merged = left.merge(right)
    assert ({n: len(r) for n, r in merged.loads.items()}, merged.timed_step) == ({1: 2, 2: 1}, 3)
    assert (2, frozenset({1})) == (merged.saves[7].ranks, merged.saves[7].failed)
    assert merged
    assert not WorkerReport()
