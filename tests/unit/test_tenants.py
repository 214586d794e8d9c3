"""Tenants in the directory: whose blocks go when the pool is full, and what quotas, pins and rates let each have."""

import numpy as np
import pytest
from fake_node import SmallPool, chain
from msgspec import structs

from kvpool.core.directory import DirectoryConfig, HotRun, MissReason, Want
from kvpool.core.directory.tenants import NAMED_MAX, Tenants
from kvpool.core.errors import CapacityError, QuotaError, UsageError
from kvpool.core.limits import PAGE_BYTES
from kvpool.core.namespace import Namespace
from kvpool.core.rates import TokenBucket
from kvpool.core.tenants import UNLIMITED, TenantLimits
from kvpool.testing import ManualClock

QUIET, NOISY = (Namespace(model="demo", block_tokens=1, block_bytes=PAGE_BYTES, tenant=t) for t in ("quiet", "noisy"))


def make_pool(*pages, policy="lru", **limits):
    """Two tenants, and their limits by name."""
    config = DirectoryConfig(age_slack=0.0, policy=policy, tenants=limits)
    return SmallPool(*pages, namespaces=(QUIET, NOISY), config=config)


def store(pool, namespace, *tokens):
    """Store a chain, a second after whatever came before; what `reserve` said of each block."""
    pool.clock.advance(1.0)
    return list(pool.store(chain(*tokens), namespace).wants)


def stored(pool, namespace, tokens):
    """How many of the roots are there."""
    return sum(pool.visible([chain(token)[0] for token in tokens], namespace))


def match(pool, namespace, *tokens, **options):
    return pool.directory.match(namespace.id, b"".join(chain(*tokens)), **options)


def stats(pool, namespace):
    pool.directory.check_integrity()
    return next(tenant for tenant in pool.directory.tenants() if tenant.name == namespace.tenant)


def flood(pool, namespace, blocks):
    for token in range(100, 100 + blocks):
        store(pool, namespace, token)


# Fair eviction


@pytest.mark.parametrize("policy", ["lru", "default"])
def test_a_noisy_tenant_evicts_its_own_and_the_quiet_one_keeps_older_blocks(policy):
    pool = make_pool(5, 5, policy=policy)
    for token in range(4):
        store(pool, QUIET, token)

    flood(pool, NOISY, 50)

    assert stored(pool, QUIET, range(4)) == 4
    assert (stats(pool, QUIET).used_bytes, stats(pool, NOISY).used_bytes) == (4 * PAGE_BYTES, 6 * PAGE_BYTES)


@pytest.mark.parametrize(("share", "pages"), [(1.0, 5), (4.0, 8), (0.25, 2)])
def test_tenants_that_compete_end_with_bytes_in_proportion_to_their_shares(share, pages):
    pool = make_pool(10, quiet=TenantLimits(share=share))

    for token in range(40):
        store(pool, NOISY, 100 + token)
        store(pool, QUIET, token)

    assert stats(pool, QUIET).used_bytes == stats(pool, QUIET).fair_bytes == pages * PAGE_BYTES
    assert stored(pool, QUIET, range(40 - pages, 40)) == pages, "each gives its oldest"


def test_what_one_does_not_use_is_the_others_until_it_comes():
    pool = make_pool(10)
    flood(pool, NOISY, 10)

    wants = [store(pool, QUIET, token) for token in range(5)]

    assert wants == [[Want.WANTED]] * 5
    assert stored(pool, NOISY, range(100, 105)) == 0, "the oldest of who has the most went"
    assert stats(pool, NOISY).used_bytes == 5 * PAGE_BYTES


def test_a_tenant_above_its_share_that_holds_all_it_has_takes_nothing_from_one_below():
    pool = make_pool(10)
    for token in range(4):
        store(pool, QUIET, token)
    flood(pool, NOISY, 6)
    for token in range(100, 106):
        assert pool.directory.pin(NOISY.id, chain(token)[0])

    assert store(pool, NOISY, 200) == [Want.NO_ROOM]
    assert stored(pool, QUIET, range(4)) == 4
    assert store(pool, QUIET, 5) == [Want.WANTED], "it may still change its own"
    assert stored(pool, QUIET, range(4)) == 3


def test_dormant_blocks_of_another_tenant_stay_for_their_return():
    pool = make_pool(4, 4)
    store(pool, QUIET, 1, 2, 3)
    pool.lose_block(chain(1)[0])
    assert pool.directory.explain(QUIET.id, chain(1, 2)[1]) == MissReason.PARENT_MISSING

    flood(pool, NOISY, 20)

    assert stats(pool, QUIET).used_bytes == 2 * PAGE_BYTES
    store(pool, QUIET, 1)
    assert match(pool, QUIET, 1, 2, 3).blocks == 3


def test_further_copies_count_and_their_own_tenant_gives_them_first():
    pool = make_pool(4, 4, quiet=TenantLimits(bytes=4 * PAGE_BYTES))
    store(pool, QUIET, 1, 2)
    copy_all(pool, QUIET, chain(1, 2))
    assert stats(pool, QUIET).used_bytes == 4 * PAGE_BYTES

    assert store(pool, QUIET, 3) == [Want.WANTED]

    assert stats(pool, QUIET).used_bytes == 4 * PAGE_BYTES
    assert match(pool, QUIET, 1, 2).blocks == 2, "a copy went, no block"
    assert pool.directory.stats().reclaimed_copies == 1


def test_no_further_copies_are_made_beyond_the_quota():
    pool = make_pool(8, 8, quiet=TenantLimits(bytes=3 * PAGE_BYTES))
    store(pool, QUIET, 1, 2)

    copy_all(pool, QUIET, chain(1, 2))

    assert stats(pool, QUIET).used_bytes == 3 * PAGE_BYTES


def copy_all(pool, namespace, hashes):
    """Order a second copy of each block, and let the nodes fetch them."""

    index = pool.directory._state.chains.indexes[pool.namespaces.index(namespace)]
    run = HotRun(tuple(index[h] for h in hashes), 2)
    while pool.directory.replicate(run, 30.0):
        for copy in pool.copies():
            pool.fetch(copy)


def test_who_gives_is_found_among_many_tenants_and_in_order():
    tenants = Tenants(ManualClock(), {"t2": TenantLimits(share=10)}, UNLIMITED)
    for number, used in enumerate((50, 40, 90, 50, 0)):
        assert tenants.account(f"t{number}").number == number
        tenants.memory[number] = used

    assert list(tenants.givers(tenants.memory, 4, 10)) == [0, 3, 1, 4], "t2 has 9 for its share"
    assert list(tenants.givers(tenants.memory, 1, 10)) == [1], "with ten more it has as much as the others"


# Quotas


@pytest.mark.parametrize("policy", ["lru", "default"])
def test_over_its_quota_a_tenant_evicts_its_oldest_leaves_though_the_pool_has_room(policy):
    pool = make_pool(50, policy=policy, noisy=TenantLimits(bytes=3 * PAGE_BYTES))
    store(pool, QUIET, 1)

    flood(pool, NOISY, 10)

    assert stored(pool, NOISY, range(100, 110)) == stored(pool, NOISY, range(107, 110)) == 3
    assert stored(pool, QUIET, [1]) == 1
    assert pool.directory.explain_block(NOISY.id, chain(100)[0]).cause == "quota"
    assert stats(pool, NOISY).refused["bytes"] == 0


def test_blocks_that_cannot_fit_the_quota_find_no_room_and_are_counted():
    pool = make_pool(50, noisy=TenantLimits(bytes=3 * PAGE_BYTES))

    assert store(pool, NOISY, 1, 2, 3, 4, 5) == [Want.WANTED] * 3 + [Want.NO_ROOM] * 2
    assert match(pool, NOISY, 1, 2, 3, lease_s=10.0).blocks == 3
    assert store(pool, NOISY, 9) == [Want.NO_ROOM], "a leased block is not given up"

    assert stats(pool, NOISY).refused["bytes"] == 3
    assert pool.directory.stats().refused_blocks == 0, "the pool had room"


def test_a_lowered_quota_is_brought_about_in_slices():
    pool = make_pool(50)
    flood(pool, NOISY, 10)

    pool.directory.set_limits("noisy", TenantLimits(bytes=4 * PAGE_BYTES))

    assert pool.directory.trim(5)
    assert stats(pool, NOISY).used_bytes == 5 * PAGE_BYTES
    assert not pool.directory.trim(5)
    assert stored(pool, NOISY, range(106, 110)) == 4
    pool.directory.set_limits("noisy", UNLIMITED)
    flood(pool, NOISY, 20)
    assert stats(pool, NOISY).used_bytes == 20 * PAGE_BYTES


def test_trimming_ends_at_what_is_held():
    pool = make_pool(50)
    flood(pool, NOISY, 3)
    match(pool, NOISY, 101, lease_s=10.0)
    pool.directory.set_limits("noisy", TenantLimits(bytes=PAGE_BYTES))

    assert not pool.directory.trim(100)
    assert stored(pool, NOISY, [101]) == 1
    pool.directory.set_limits("noisy", TenantLimits(bytes=2 * PAGE_BYTES))


def test_tenants_without_limits_of_their_own_have_the_default():
    config = DirectoryConfig(tenant_default=TenantLimits(bytes=2 * PAGE_BYTES), tenants={"quiet": UNLIMITED})
    pool = SmallPool(50, namespaces=(QUIET, NOISY), config=config)

    flood(pool, NOISY, 5)
    flood(pool, QUIET, 5)

    assert (stats(pool, NOISY).used_bytes, stats(pool, QUIET).used_bytes) == (2 * PAGE_BYTES, 5 * PAGE_BYTES)


def test_so_many_tenants_may_have_limits_of_their_own():
    pool = make_pool(10)
    for number in range(NAMED_MAX):
        pool.directory.set_limits(f"t{number}", UNLIMITED)

    with pytest.raises(CapacityError, match=f"{NAMED_MAX} tenants"):
        pool.directory.set_limits("one more", UNLIMITED)
    pool.directory.set_limits("t0", TenantLimits(pins=1))


# Pins


def test_pins_over_the_quota_are_refused_with_its_name_and_the_fix():
    pool = make_pool(10, noisy=TenantLimits(pins=2))
    store(pool, NOISY, 1, 2, 3)
    store(pool, QUIET, 1)
    one, two, three = chain(1, 2, 3)
    assert pool.directory.pin(NOISY.id, one)
    assert pool.directory.pin(NOISY.id, two, ttl_s=5.0)

    with pytest.raises(QuotaError, match=r"'noisy' has 2 blocks pinned.*kvpool quota noisy --pins 3"):
        pool.directory.pin(NOISY.id, three)

    assert pool.directory.pin(NOISY.id, two, ttl_s=5.0), "a pin may be renewed"
    assert pool.directory.pin(QUIET.id, chain(1)[0])
    assert stats(pool, NOISY).refused["pins"] == 1
    pool.clock.advance(6.0)
    assert pool.directory.pin(NOISY.id, three), "one ran out"
    assert stats(pool, NOISY).pins == 2


@pytest.mark.parametrize("ends", ["unpinned", "lost", "run out"])
def test_a_pin_that_ends_is_not_counted(ends):
    pool = make_pool(10)
    store(pool, NOISY, 1)
    pool.directory.pin(NOISY.id, chain(1)[0], ttl_s=5.0)
    assert stats(pool, NOISY).pins == 1

    if ends == "unpinned":
        assert pool.directory.unpin(NOISY.id, chain(1)[0])
    elif ends == "lost":
        pool.lose_block(chain(1)[0])
    else:
        pool.clock.advance(5.0)
        pool.directory.expire()

    assert stats(pool, NOISY).pins == 0
    assert not pool.directory.unpin(NOISY.id, chain(1)[0])


# Rates


def test_lookups_over_the_rate_are_misses_and_nobody_elses():
    pool = make_pool(10, noisy=TenantLimits(lookups_per_s=2))
    store(pool, NOISY, 1)
    store(pool, QUIET, 1)

    found = [match(pool, NOISY, 1) for _ in range(3)]

    assert [(m.blocks, m.reason) for m in found] == [(1, None), (1, None), (0, MissReason.QUOTA)]
    assert match(pool, QUIET, 1).blocks == 1
    assert stats(pool, NOISY).refused["lookups"] == 1
    assert pool.directory.lookup_stats().misses[MissReason.QUOTA] == 1
    pool.clock.advance(0.5)
    assert match(pool, NOISY, 1).blocks == 1


def test_what_a_match_promised_is_located_over_the_rate_but_not_without_end():
    pool = make_pool(10, noisy=TenantLimits(lookups_per_s=2))
    store(pool, NOISY, 1)
    hashes = chain(1)[0]
    while match(pool, NOISY, 1).blocks:
        pass

    located = [pool.directory.locate(NOISY.id, hashes) for _ in range(3)]

    assert [(found.blocks, found.reason) for found in located] == [(1, None), (1, None), (0, MissReason.QUOTA)]


def test_blocks_over_the_rate_of_writes_are_not_wanted():
    pool = make_pool(20, noisy=TenantLimits(writes_per_s=3))

    assert store(pool, NOISY, 1, 2, 3, 4, 5) == [Want.WANTED] * 3 + [Want.NO_ROOM] * 2
    assert pool.reserve(chain(1, 2, 3, 4), NOISY).wants == bytes([Want.EXISTS] * 3 + [Want.NO_ROOM])
    assert store(pool, NOISY, 1, 2, 3, 4, 5) == [Want.EXISTS] * 3 + [Want.WANTED] * 2, "what is there costs nothing"
    assert stats(pool, NOISY).refused == {"bytes": 0, "pins": 0, "lookups": 0, "writes": 3}


def test_a_bucket_fills_at_its_rate_up_to_a_second():
    clock = ManualClock()
    bucket = TokenBucket(4.0, clock)
    assert [bucket.take() for _ in range(5)] == [True] * 4 + [False]

    clock.advance(0.5)
    assert bucket.whole == 2
    assert bucket.take(6, in_advance=True)
    assert bucket.whole == -4
    assert not bucket.take(1, in_advance=True)
    clock.advance(100.0)
    assert bucket.whole == 4


def test_a_slow_bucket_holds_one_token():
    clock = ManualClock()
    bucket = TokenBucket(0.1, clock)

    assert [bucket.take(), bucket.take()] == [True, False]
    clock.advance(10.0)
    assert bucket.take()


# Values that cannot be


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        ({"bytes": 0}, "bytes is 0; write one page or more"),
        ({"bytes": PAGE_BYTES - 1}, f"bytes is {PAGE_BYTES - 1}"),
        ({"pins": -1}, "pins is -1"),
        ({"share": 0}, "share is 0"),
        ({"share": np.nan}, "share is nan"),
        ({"lookups_per_s": 0.0}, r"lookups_per_s is 0\.0; write a rate above 0"),
        ({"writes_per_s": np.inf}, "writes_per_s is inf"),
    ],
)
def test_a_limit_that_cannot_be_is_named_with_its_fix(limits, says):
    with pytest.raises(UsageError, match=says):
        TenantLimits(**limits)


def test_the_one_tenant_of_most_pools_has_all_of_it():
    pool = SmallPool(4, 4, namespaces=(structs.replace(QUIET, tenant="default"),))

    (tenant,) = pool.directory.tenants()

    assert (tenant.name, tenant.fair_bytes, tenant.limits) == ("default", 8 * PAGE_BYTES, UNLIMITED)
