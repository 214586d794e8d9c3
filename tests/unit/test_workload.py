"""The built-in workload: multi-turn conversations that share prefixes, the same for the same seed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.bench.hitrate import ideal_hit_rate, private_hit_rate
from kvpool.bench.workload import AgentSettings, Request, Workload, agent_workload
from kvpool.core.errors import UsageError
from kvpool.core.limits import HASH_BYTES

SMALL = AgentSettings(agents=2, conversations=6, turns=4, system_tokens=100, turn_tokens=50, block_tokens=16, seed=3)


def test_same_seed_gives_the_same_requests_and_another_seed_others():
    assert agent_workload(SMALL) == agent_workload(SMALL)
    other = AgentSettings(
        agents=2, conversations=6, turns=4, system_tokens=100, turn_tokens=50, block_tokens=16, seed=4
    )
    assert agent_workload(SMALL).requests != agent_workload(other).requests


def test_every_conversation_has_all_its_turns_in_order_and_each_extends_the_one_before():
    workload = agent_workload(SMALL)

    # Each chain is extended by the next one of its conversation: six remain that none extends.
    open_chains: list[Request] = []
    for request in workload.requests:
        extended = [c for c in open_chains if len(c.hashes) > 7 and request.hashes[: len(c.hashes)] == c.hashes]
        assert len(extended) <= 1
        open_chains = [c for c in open_chains if c not in extended] + [request]

    assert len(workload.requests) == 24
    assert len(open_chains) == 6


def test_conversations_of_one_agent_share_its_system_prompt_and_no_others_do():
    workload = agent_workload(SMALL)

    roots = {request.hashes[0] for request in workload.requests}
    system_ends = {request.hashes[100 // 16 - 1] for request in workload.requests}

    assert len(roots) == 2
    assert len(system_ends) == 2


@given(
    system=st.integers(1, 200),
    turn=st.integers(1, 60),
    block=st.integers(1, 64),
    seed=st.integers(0, 1 << 30),
)
def test_a_request_names_exactly_its_full_blocks(system, turn, block, seed):
    settings = AgentSettings(
        agents=1,
        conversations=2,
        turns=3,
        system_tokens=system,
        turn_tokens=turn,
        block_tokens=block,
        seed=seed,
    )
    for request in agent_workload(settings).requests:
        assert request.input_tokens // block == len(request.hashes)
        assert all(len(block_hash) == HASH_BYTES for block_hash in request.hashes)


def test_default_workload_leaves_private_caches_well_below_the_ideal():
    workload = agent_workload(AgentSettings())

    private = private_hit_rate(workload, 4, 2 * workload.longest_blocks)

    assert ideal_hit_rate(workload) > 0.85
    assert private < ideal_hit_rate(workload) - 0.3


def test_hit_rates_count_leading_blocks_by_tokens_and_leave_the_tail_out():
    # given a prompt of two full blocks and a tail of 5 tokens, then the same with another second block
    first, second = Request(37, (b"a" * 32, b"ab" * 16)), Request(37, (b"a" * 32, b"ac" * 16))
    workload = Workload("hand-made", 16, (first, first, second))

    # then the repeat hits two blocks of 16 tokens and the variant one
    assert ideal_hit_rate(workload) == pytest.approx(48 / 111)
    assert private_hit_rate(workload, 1, 2) == pytest.approx(48 / 111)
    assert private_hit_rate(workload, 3, 2) == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("conversations", 0),
        ("turns", 1_001),
        ("system_tokens", 0),
        ("turn_tokens", 300_000),
        ("block_tokens", 0),
    ],
)
def test_impossible_settings_are_refused_by_name(field, value):
    with pytest.raises(UsageError, match=f"{field} is {value}"):
        AgentSettings(**{field: value})
