"""The policy that learns what comes back: LRU until it knows better, then what is worth least goes."""

import pytest
from fake_node import SmallPool, chain

from kvpool.core.directory import DirectoryConfig, Want
from kvpool.core.directory.table import BlockTable
from kvpool.core.eviction import create_policy
from kvpool.core.eviction.use import KINDS, branched, continued, inherited, is_matched, kind_of, tier_of, written
from kvpool.core.eviction.worth import RECORDS, Worth

SECOND_US = 1_000_000
LEARNING = DirectoryConfig(policy="default", age_slack=0.0)


def ask(pool, *tokens, after_s=1.0):
    """Look a chain up and store what is missing, as an engine does; the blocks that were there."""
    pool.clock.advance(after_s)
    hashes = chain(*tokens)
    matched = pool.directory.match(pool.namespace.id, b"".join(hashes)).blocks
    if matched < len(tokens):
        pool.store(hashes)
    return matched


def hit_part(policy, capacity, requests):
    pool = SmallPool(capacity, config=DirectoryConfig(policy=policy))
    hits = sum(ask(pool, *tokens) for tokens in requests)
    pool.directory.check_integrity()
    return hits / sum(map(len, requests))


# What the past of a block is


def test_a_chain_rises_with_each_turn_up_to_the_third():
    use = written(0, 0, 5)
    tiers = [tier_of(use)]
    for _ in range(4):
        use = continued(use, 8 * SECOND_US)
        tiers.append(tier_of(use))

    assert tiers == [0, 1, 2, 3, 3]
    assert is_matched(use)


def test_a_branching_block_is_told_by_how_often_it_was_matched():
    use, tiers = written(2, SECOND_US, 5), []
    for _ in range(20):
        use = branched(use, SECOND_US)
        tiers.append(tier_of(use))

    assert tiers[:8] == [4, 5, 5, 6, 6, 6, 6, 7]
    assert {7} == set(tiers[8:])


@pytest.mark.parametrize("gap_us", [0, 1, SECOND_US, 10**15])
@pytest.mark.parametrize("blocks", [0, 1, 100, 10**9])
def test_every_use_has_a_kind(gap_us, blocks):
    for use in (written(3, gap_us, blocks), continued(written(3, gap_us, blocks), gap_us), branched(0, gap_us)):
        assert 0 <= kind_of(use) < KINDS
        assert use < 1 << 16


def test_a_block_that_branches_keeps_its_past_when_what_is_below_it_goes():
    shared, turn = branched(0, SECOND_US), written(1, SECOND_US, 3)

    assert shared == inherited(shared, turn)
    assert turn == inherited(written(0, 0, 9), turn)


# What is learned


def test_knowing_nothing_the_oldest_is_worth_least():
    worth = Worth()
    ages_us = [SECOND_US // 1_000, SECOND_US, 60 * SECOND_US, 3_600 * SECOND_US, 10**15]

    worths = [worth.of(0, age_us) for age_us in ages_us]

    assert sorted(worths, reverse=True) == worths
    assert all(value > 0 for value in worths)


def test_what_comes_back_is_worth_more_than_what_does_not():
    worth = Worth()
    back, gone = written(1, SECOND_US, 5), written(0, 0, 5)
    now_us = 0
    for i in range(400):
        now_us += SECOND_US
        worth.note(b"back%d" % i, back, now_us)
        worth.note(b"gone%d" % i, gone, now_us)
        if i >= 10:
            assert worth.again(b"back%d" % (i - 10), now_us) == (kind_of(back), 10 * SECOND_US)
    worth.refit(now_us)

    assert worth.of(kind_of(back), SECOND_US) > 10 * worth.of(kind_of(gone), SECOND_US)
    # All came back after 10 s: what is nearly so old is worth more than what is new, and what is older is not.
    assert worth.of(kind_of(back), 9 * SECOND_US) > worth.of(kind_of(back), 0) > worth.of(kind_of(back), 60 * SECOND_US)


def test_what_is_remembered_is_bounded_and_the_oldest_goes():
    worth = Worth()
    for i in range(RECORDS + 100):
        worth.note(b"%d" % i, 0, i)

    assert worth.again(b"99", RECORDS) is None
    assert worth.again(b"100", RECORDS + 100) == (0, RECORDS)
    assert len(worth._record_of) == len(worth._hashes) - 1 == RECORDS - 1


def test_a_forgotten_end_says_nothing():
    worth = Worth()
    worth.note(b"a", 0, 0)
    worth.forget(b"a")
    worth.forget(b"b")

    assert worth.again(b"a", 1) is None
    assert worth.deepest([b"a", b"b"]) == -1


# What goes


def test_before_it_learned_anything_the_oldest_leaf_of_the_pool_goes():
    pool = SmallPool(3, 3, config=LEARNING)
    for token in range(6):
        ask(pool, token)
    ask(pool, 0)

    for token in range(10, 15):
        assert list(pool.store(chain(token)).wants) == [Want.WANTED]

    assert pool.visible([chain(token)[0] for token in range(6)]) == [True] + [False] * 5


def test_a_loop_larger_than_the_pool_keeps_a_part_of_itself():
    requests = [(loop, 1, 2) for _ in range(40) for loop in range(20)]

    assert hit_part("lru", 40, requests) < 0.05
    assert hit_part("default", 40, requests) > 0.35


def test_a_scan_leaves_conversations_alone():
    conversations = [[(c, *range(turn)) for turn in range(1, 30)] for c in range(4)]
    requests = []
    for turn in range(29):
        for c in range(4):
            requests.append(conversations[c][turn])
            requests += [(1_000 + len(requests) + i, 1, 2, 3, 4, 5, 6, 7) for i in range(3)]

    assert hit_part("default", 150, requests) > hit_part("lru", 150, requests) + 0.05


def test_what_is_asked_for_often_stays():
    requests = [(i * i % 7, 1) if i % 2 else (100 + i, 1) for i in range(800)]

    assert hit_part("default", 16, requests) >= hit_part("lru", 16, requests) + 0.05


def test_a_scheduler_that_asks_again_while_it_holds_a_lease_is_one_use():
    pool = SmallPool(8, config=DirectoryConfig(policy="default", lease_cap=1.0))
    pool.store(chain(1, 2))
    for _ in range(5):
        pool.clock.advance(1.0)
        pool.directory.match(pool.namespace.id, b"".join(chain(1, 2)), lease_s=30.0)
    pool.store(chain(9))
    state = pool.directory._state

    [row] = [row for row, block_hash in enumerate(state.blocks.hash) if block_hash == chain(1, 2)[1]]

    assert tier_of(state.blocks.use[row]) == 1


def test_a_writer_that_goes_on_is_no_further_turn():
    pool = SmallPool(8, config=LEARNING)
    for end in range(1, 6):
        pool.store(chain(*range(end)))
    state = pool.directory._state

    assert {0} == {tier_of(use) for use in state.blocks.use}


def test_an_empty_policy_offers_nothing():
    assert create_policy("default", BlockTable()).first(0, 0, now_us=0) is None
