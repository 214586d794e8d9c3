"""Rates are differences of counters over the service's own clock."""

from kvpool.cli.rates import rates_between
from kvpool.client.results import NamespaceStatus, NodeStatus, PoolStatus, RecoveryStatus

RECOVERED = RecoveryStatus(active=False, nodes_reported=1, nodes_expected=1, lasted_s=0.0)


def pool(uptime_s, incarnation=1, moved=None, usage=(), misses=None, **counters):
    node = NodeStatus("n0", "ready", 100, 10, 1, (), None, (), moved_bytes=moved or {})
    return PoolStatus(
        incarnation,
        "0",
        {},
        (node,),
        counters,
        RECOVERED,
        usage=tuple(usage),
        misses=misses or {},
        uptime_s=uptime_s,
    )


def use(asked, matched, read=0, stored=0):
    return NamespaceStatus("aa", 1, 1, asked, matched, read, stored)


def test_a_difference_is_over_the_services_own_time():
    before = pool(10.0, lookups=100, blocks_asked=1000, blocks_matched=500, usage=[use(1000, 500, 10_000, 20_000)])
    now = pool(12.0, lookups=300, blocks_asked=1400, blocks_matched=800, usage=[use(1400, 800, 14_000, 21_000)])

    rates = rates_between(before, now)

    assert (rates.interval_s, rates.lookups_per_s, rates.hit_rate) == (2.0, 100.0, 0.75)
    assert (rates.read_bytes_per_s, rates.stored_bytes_per_s) == (2_000.0, 500.0)
    assert rates.namespaces["aa"].hit_rate == 0.75


def test_the_first_look_and_one_after_a_restart_are_since_the_start():
    now = pool(4.0, incarnation=2, lookups=8)
    later = pool(9.0, incarnation=1, lookups=900)

    assert rates_between(None, now).lookups_per_s == 2.0
    assert rates_between(later, now).lookups_per_s == 2.0


def test_nothing_asked_is_no_hit_rate():
    assert rates_between(None, pool(1.0)).hit_rate is None


def test_a_nodes_count_that_fell_began_anew():
    before, now = pool(1.0, moved={"out tcp": 900, "in tcp": 5}), pool(2.0, moved={"out tcp": 100, "in tcp": 5})

    rates = rates_between(before, now)

    assert rates.moved_bytes_per_s == {"out tcp": 100.0}
    assert rates.nodes == {"n0": {"out tcp": 100.0}}


def test_misses_by_reason():
    rates = rates_between(pool(1.0, misses={"cold": 2, "evicted": 1}), pool(3.0, misses={"cold": 6, "evicted": 1}))

    assert rates.misses_per_s == {"cold": 2.0}
