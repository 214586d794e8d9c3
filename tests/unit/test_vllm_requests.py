"""The connector's request bookkeeping: lookups, offers, loads, how far is saved. No vLLM, no I/O."""

import pytest
from kvpool_connector.vllm.jobs import LoadReport
from kvpool_connector.vllm.requests import NEGATIVE_S, RequestBook, Wait

from kvpool.testing import ManualClock

CHAIN = [bytes([i]) * 32 for i in range(1, 9)]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def book(clock: ManualClock) -> RequestBook:
    return RequestBook(clock, lookup_timeout_s=0.2, lease_s=4)


def ask(book: RequestBook, request_id: str, matched: int, lease: int = 1, chain: list[bytes] = CHAIN) -> None:
    book.added(request_id)
    lookup, _ = book.asked_pool(request_id, chain)
    assert book.pool_answered(request_id, lookup.number, matched, lease) == 0


def load(book: RequestBook, request_id: str, blocks: int, first: int = 0, ranks: int = 1):
    assert blocks == book.offer(request_id, CHAIN, first)
    return book.allocated(request_id, CHAIN, list(range(100, 108)), blocks, ranks)


def report(failed_from: int | None = None) -> LoadReport:
    return LoadReport(failed_from, "evicted", 0, 0.1)


def test_an_unanswered_lookup_is_waited_for_until_its_deadline(book: RequestBook, clock: ManualClock) -> None:
    book.added("r")
    number = book.asked_pool("r", CHAIN)[0].number

    assert Wait.LOOKUP is book.offer("r", CHAIN, 0)
    clock.advance(0.3)
    assert book.offer("r", CHAIN, 0) == 0
    assert book.late_lookups == 1
    assert book.pool_answered("r", number, 4, lease=7) == 7, "the late answer's lease is released"
    assert book.offer("r", CHAIN, 0) == 0


def test_asking_again_gives_the_same_offer(book: RequestBook) -> None:
    ask(book, "r", 5)
    assert [book.offer("r", CHAIN, 0) for _ in range(3)] == [5, 5, 5]
    assert book.loads == 0


def test_only_blocks_beyond_the_local_hit_are_offered(book: RequestBook) -> None:
    ask(book, "r", 5)
    assert book.offer("r", CHAIN, 2) == 3
    assert book.offer("r", CHAIN, 5) == 0
    assert book.offer("r", CHAIN, 8) == 0


def test_a_match_longer_than_the_chain_is_cut(book: RequestBook) -> None:
    ask(book, "r", 99)
    assert len(CHAIN) == book.offer("r", CHAIN, 0)


def test_a_chain_is_asked_for_once_and_again_when_it_grew_or_its_lease_is_half_over(
    book: RequestBook, clock: ManualClock
) -> None:
    book.added("r")
    assert book.wants_lookup("r", CHAIN[:4])
    ask(book, "r", 4, chain=CHAIN[:4])
    assert not book.wants_lookup("r", CHAIN[:4])
    assert book.wants_lookup("r", CHAIN[:5])
    clock.advance(2.1)
    assert book.wants_lookup("r", CHAIN[:4])


def test_a_new_lookup_gives_back_the_old_lease_and_ignores_the_old_answer(book: RequestBook) -> None:
    book.added("r")
    old, _ = book.asked_pool("r", CHAIN[:4])
    assert book.pool_answered("r", old.number, 4, lease=11) == 0
    new, superseded = book.asked_pool("r", CHAIN)
    assert superseded == 11
    assert book.pool_answered("r", old.number, 4, lease=12) == 12
    assert book.pool_answered("r", new.number, 6, lease=13) == 0
    assert book.offer("r", CHAIN, 0) == 6


def test_an_allocated_offer_becomes_a_load_of_exactly_its_blocks(book: RequestBook) -> None:
    ask(book, "r", 6)
    job = load(book, "r", 4, first=2)

    assert (job.first, job.blocks) == (2, [102, 103, 104, 105])
    assert b"".join(CHAIN[:6]) == job.hashes
    assert book.allocated("r", CHAIN, [1, 2], 0, 1) is None, "the second call loads nothing (V22)"


def test_nothing_is_loaded_when_another_connector_was_chosen(book: RequestBook) -> None:
    ask(book, "r", 6, lease=5)
    book.offer("r", CHAIN, 0)

    assert book.allocated("r", CHAIN, list(range(8)), 0, 1) is None  # V18: real blocks, and 0
    assert book.take_lease("r") == 5
    assert book.finished("r") == 0


def test_tokens_to_load_without_a_plan_fail_instead_of_waiting_for_ever(book: RequestBook) -> None:
    job = book.allocated("r", CHAIN, [1, 2, 3], 3, 1)
    assert (job.hashes, job.blocks) == (b"", [1, 2, 3])


def test_a_load_ends_with_its_last_rank_and_fails_with_its_worst(book: RequestBook) -> None:
    ask(book, "r", 6, lease=3)
    job = load(book, "r", 6, ranks=3)

    assert book.load_reported(job.number, report()) is None
    assert book.load_reported(job.number, report(4)) is None
    loading = book.load_reported(job.number, report(5))
    assert (loading.failed_from, loading.lease) == (4, 3)
    assert book.load_reported(job.number, report()) is None, "reported once too often (V40)"
    book.check_integrity()


def test_after_a_failed_load_the_request_is_offered_nothing_more(book: RequestBook) -> None:
    ask(book, "r", 6)
    job = load(book, "r", 6)
    book.load_reported(job.number, report(0))

    assert not book.wants_lookup("r", CHAIN)
    assert book.offer("r", CHAIN, 0) == 0  # V7: or it would be asked, fail and be asked for ever


def test_other_requests_do_not_get_the_bad_block_for_a_while(book: RequestBook, clock: ManualClock) -> None:
    ask(book, "r", 6)
    job = load(book, "r", 6)
    book.load_reported(job.number, report(3))
    ask(book, "s", 6)

    assert book.offer("s", CHAIN, 0) == 3
    clock.advance(NEGATIVE_S)
    ask(book, "s", 6)
    assert book.offer("s", CHAIN, 0) == 6


def test_what_failed_to_load_is_saved_again(book: RequestBook) -> None:
    ask(book, "r", 6)
    job = load(book, "r", 6)
    assert range(0) == book.unsaved("r", 8), "nothing is computed while it loads"
    book.load_reported(job.number, report(3))
    assert range(3, 8) == book.unsaved("r", 8)


def test_requests_with_one_prefix_load_it_once(book: RequestBook) -> None:
    for request_id in ("r", "s", "t"):
        ask(book, request_id, 6)
    job = load(book, "r", 6)

    assert [book.offer(i, CHAIN, 0) for i in ("s", "t")] == [Wait.LOAD, Wait.LOAD]  # V14
    book.load_reported(job.number, report())
    assert book.offer("s", CHAIN, 6) == 0, "it is a local hit now"
    assert book.offer("t", CHAIN, 0) == 6, "or has been evicted here: it may load"


def test_what_the_pool_holds_is_not_saved_again(book: RequestBook) -> None:
    ask(book, "r", 5)
    book.allocated("r", CHAIN, list(range(8)), 0, 1)
    assert range(5, 7) == book.unsaved("r", 7)
    book.saving("r", 7)
    assert range(7, 7) == book.unsaved("r", 7)
    assert range(7, 8) == book.unsaved("r", 8)


def test_a_request_may_finish_before_during_and_after_its_load(book: RequestBook) -> None:
    ask(book, "r", 6, lease=9)
    assert book.finished("r") == 9  # V38: asked, never allocated
    ask(book, "s", 6, lease=10)
    job = load(book, "s", 6)
    assert book.finished("s") == 0, "the load still needs its lease"
    assert book.load_reported(job.number, report()).lease == 10
    assert book.finished("s") == 0
    assert len(book) == 0
    book.check_integrity()


def test_a_new_namespace_forgets_what_was_found_and_saved(book: RequestBook) -> None:
    ask(book, "r", 6)
    book.saving("r", 6)
    book.forget_lookups()
    assert book.wants_lookup("r", CHAIN)
    assert book.offer("r", CHAIN, 0) == 0
    assert range(8) == book.unsaved("r", 8)
