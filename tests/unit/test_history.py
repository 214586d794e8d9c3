"""The history checker: it finds what is wrong, and nothing else."""

import pytest

from kvpool.testing import Call, Commit, Get, History, Put, find_attempt, make_payload

KEY, OTHER = "aa/0", "bb/0"
PAGE_BYTES = 64
GOOD = [Put(KEY, 1, 0.0), Commit(KEY, 1, 1.0), Get(KEY, 1, 0.5, 1.5), Call("get", 0.0, 2.0, 1.5)]


def wrong(*records):
    return History(records).violations()


def test_a_history_without_fault_has_no_violations():
    assert wrong(*GOOD) == []


def test_misses_and_killed_clients_are_no_violations():
    assert wrong(Put(KEY, 1, 0.0), Call("put", 0.0, 1.0, None)) == []


def test_what_was_evicted_and_put_again_may_be_read_in_either_form():
    assert wrong(*GOOD, Put(KEY, 2, 2.0), Commit(KEY, 2, 3.0), Get(KEY, 2, 3.0, 4.0), Get(KEY, 1, 1.0, 4.0)) == []


@pytest.mark.parametrize(
    ("record", "shown"),
    [
        (Get(KEY, None, 0.0, 2.0), "bytes of no put"),
        (Get(KEY, 9, 0.0, 2.0), "which nobody made"),
        (Get(OTHER, 1, 0.0, 2.0), "which nobody made"),
        (Get(KEY, 1, 0.0, 0.9), "committed only at 1.000"),
        (Call("get", 0.0, 2.0, 2.5), "0.500 s after its deadline"),
    ],
)
def test_what_must_not_happen_is_found(record, shown):
    [violation] = wrong(*GOOD, record)
    assert shown in violation


def test_what_was_never_committed_must_not_be_read():
    [violation] = wrong(Put(KEY, 1, 0.0), Commit(KEY, None, 0.5), Get(KEY, 1, 0.0, 1.0))
    assert "never committed" in violation


def test_a_history_is_kept_as_json_lines(tmp_path):
    path = tmp_path / "history.jsonl"
    History([*GOOD, Commit(KEY, None, 1.0)]).save(path)
    assert len(path.read_bytes().splitlines()) == 5
    assert History.load(path).records == [*GOOD, Commit(KEY, None, 1.0)]


@pytest.mark.parametrize("size_bytes", [8, PAGE_BYTES, 3 * PAGE_BYTES - 10])
def test_a_payload_tells_which_put_it_is_of(size_bytes):
    payload = make_payload(KEY, 7, size_bytes, PAGE_BYTES)
    assert len(payload) == size_bytes
    assert find_attempt(KEY, payload, PAGE_BYTES) == 7


def test_bytes_of_several_puts_another_key_or_altered_ones_are_of_none():
    first, second = (make_payload(KEY, attempt, 3 * PAGE_BYTES, PAGE_BYTES) for attempt in (1, 2))
    mixture = first[:PAGE_BYTES] + second[PAGE_BYTES:]
    altered = first[:-1] + bytes([first[-1] ^ 1])
    moved = first[PAGE_BYTES:] + first[:PAGE_BYTES]
    for payload in (mixture, altered, moved, make_payload(OTHER, 1, 3 * PAGE_BYTES, PAGE_BYTES), b"", b"short"):
        assert find_attempt(KEY, payload, PAGE_BYTES) is None
