"""The policies that `kvpool simulate` compares with, against what their papers say of small sequences."""

import pytest

from kvpool.bench.policies import REFERENCES, block_hits, optimal_hits
from kvpool.bench.policies.arc import Arc
from kvpool.bench.policies.fifo import S3Fifo, Sieve, TwoQueues
from kvpool.bench.workload import Request


def use(cache, text):
    """Use single blocks, one a character; which of them were there."""
    hits = ""
    for block in text:
        hits += block if block.encode() in cache else "."
        cache.use(block.encode())
    return hits


def held(cache, text):
    return "".join(block for block in text if block.encode() in cache)


def requests(*chains):
    return [Request(len(chain), tuple(chain[: i + 1].encode() for i in range(len(chain)))) for chain in chains]


@pytest.mark.parametrize("name", REFERENCES)
def test_a_cache_holds_as_many_blocks_as_it_may(name):
    cache = REFERENCES[name](4)

    for i in range(100):
        cache.use(b"%d" % (i * i % 13))
        assert sum(b"%d" % block in cache for block in range(13)) <= 4


@pytest.mark.parametrize("name", REFERENCES)
def test_what_fits_always_hits(name):
    cache = REFERENCES[name](3)

    use(cache, "abc")

    assert use(cache, "abcabccba") == "abcabccba"


def test_sieve_spares_what_was_used_and_keeps_its_place():
    cache = Sieve(3)
    use(cache, "abca")

    assert use(cache, "d") == "."
    assert held(cache, "abcd") == "acd"
    use(cache, "e")
    assert held(cache, "abcde") == "ade"


def test_a_scan_leaves_the_main_queue_of_s3fifo_alone():
    cache = S3Fifo(10, small=0.1, promote=1)
    use(cache, "aabb")

    use(cache, "0123456789uvwxyz")

    assert held(cache, "ab") == "ab"


def test_s3fifo_lets_what_its_ghost_remembers_into_the_main_queue():
    cache = S3Fifo(4, small=0.25, promote=2)
    use(cache, "abcde")
    assert held(cache, "a") == ""

    use(cache, "a" + "uvwxyz")

    assert held(cache, "a") == "a"


def test_a_scan_leaves_what_came_back_to_2q_alone():
    cache = TwoQueues(4, window=0.25)
    use(cache, "abcde" + "a")

    use(cache, "uvwxyz")

    assert held(cache, "a") == "a"


def test_a_scan_leaves_what_arc_saw_twice_alone():
    cache = Arc(4)
    use(cache, "abab")

    use(cache, "0123456789")

    assert held(cache, "ab") == "ab"


def test_arc_gives_the_recent_more_room_when_they_come_back():
    cache = Arc(4)
    use(cache, "abab" + "cdef")  # c and d went from the recent part, and are remembered

    use(cache, "cdcd" + "efef")

    assert held(cache, "ab") == ""


def test_the_optimum_keeps_what_is_used_next_and_lets_pass_what_is_not():
    hits = list(optimal_hits(requests("a", "b", "c", "a", "b", "c"), 2))

    assert hits == [0, 0, 0, 1, 1, 0]


def test_the_optimum_of_a_chain_keeps_its_head():
    assert list(optimal_hits(requests("abcd", "x", "abcd"), 2)) == [0, 0, 2]


def test_a_request_hits_its_leading_run_and_uses_its_tail_first():
    cache = TwoQueues(2, window=1.0)

    assert list(block_hits(cache, requests("abc", "abc"))) == [0, 2]
