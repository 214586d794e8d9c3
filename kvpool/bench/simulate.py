"""How large a pool a workload needs: replayed against the directory alone, at several capacities and policies.

Nothing is approximated: each row of a policy that a pool can run is one pass of the real directory on the workload's
own clock, with one segment. Reference policies (`kvpool.bench.policies`) are caches of single blocks.
"""

from collections.abc import Callable, Iterator, Sequence

import msgspec

from kvpool.bench.hitrate import hit_rate, ideal_hit_rate
from kvpool.bench.measure import at_least, rounded
from kvpool.bench.policies import REFERENCES, block_hits, optimal_hits
from kvpool.bench.replay import Replay
from kvpool.bench.workload import Request, Workload
from kvpool.core.directory import DirectoryConfig
from kvpool.core.errors import UsageError
from kvpool.core.eviction import POLICIES as DIRECTORY_POLICIES
from kvpool.core.units import parse_size

OPTIMAL = "optimal"
"""Knows the future."""

POLICIES = (*DIRECTORY_POLICIES, *REFERENCES, OPTIMAL)
CAPACITIES = "1%,2%,5%,10%,15%,20%,25%,50%,75%,100%"
CAPACITIES_MAX = 100
ENGINES_MAX = 1_024
PERCENT_MAX = 1_000
NEAR_IDEAL = 0.95
"""The advice: the capacity from which on so much of what an infinite cache would hit is hit."""


class SimulateRow(msgspec.Struct, frozen=True, kw_only=True):
    """Hit rate of one policy at one capacity, as `kvpool.bench.hitrate.DEFINITION` says.

    Attributes:
        policy: Name of the eviction policy.
        capacity: Part of the workload's unique blocks that the pool may hold, as it was asked for.
        hit_rate: Of all engines on one shared pool.
        private_hit_rate: Of ``engines`` caches of an equal part of the capacity each, round robin; None for one.
        ideal_hit_rate: Of an infinite cache.
        capacity_blocks: The capacity in blocks.
        capacity_bytes: The same in bytes; None if nobody said how many bytes a token takes.
        engines: Engines that take the requests in turn.
    """

    policy: str
    capacity: float
    hit_rate: float
    private_hit_rate: float | None
    ideal_hit_rate: float
    capacity_blocks: int
    capacity_bytes: int | None
    engines: int


class SimulateSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What is simulated.

    Attributes:
        policies: Names in `POLICIES`.
        capacities: Percentages of the unique blocks (``10%``) or sizes (``64GiB``).
        engines: Engines; with more than one, private caches are simulated too.
        bytes_per_token: KV bytes of a token in all layers, all ranks together; needed for sizes.

    Raises:
        UsageError: A name, number or size is not valid.
    """

    policies: tuple[str, ...] = ("default",)
    capacities: tuple[str, ...] = tuple(CAPACITIES.split(","))
    engines: int = 1
    bytes_per_token: int | None = None

    def __post_init__(self) -> None:
        for what, words in (("policy", self.policies), ("capacity", self.capacities)):
            if not words:
                raise UsageError(f"no {what} was given; name one or more, separated by commas")
        for name in self.policies:
            if name not in POLICIES:
                raise UsageError(f"policy {name!r} is not known; use one or more of {','.join(POLICIES)}")
        if not 1 <= self.engines <= ENGINES_MAX:
            raise UsageError(f"engines are {self.engines}; they must be from 1 to {ENGINES_MAX}")
        if len(self.capacities) > CAPACITIES_MAX:
            raise UsageError(f"{len(self.capacities)} capacities are more than {CAPACITIES_MAX}; give fewer")
        if self.bytes_per_token is not None:
            at_least("bytes-per-token", self.bytes_per_token)

    def part_and_blocks(self, capacity: str, workload: Workload) -> tuple[float, int]:
        """What part of the unique blocks of ``workload`` a ``capacity`` is, and how many blocks it holds.

        Raises:
            UsageError: It is no percentage above 0 and no size, or holds no block.
        """
        unique_blocks = max(1, workload.unique_blocks())
        if capacity.endswith("%"):
            part = _percentage(capacity) / 100
            blocks = int(part * unique_blocks)
        elif self.bytes_per_token is None:
            raise UsageError(f"capacity {capacity!r} is a size: say with --bytes-per-token how much KV a token takes")
        else:
            blocks = parse_size(capacity) // (self.bytes_per_token * workload.block_tokens)
            part = blocks / unique_blocks
        if blocks < self.engines:
            raise UsageError(f"capacity {capacity!r} is {blocks} blocks for {self.engines} engines; give more")
        return part, blocks


def simulate(
    workload: Workload, settings: SimulateSettings, on_request: Callable[[], None] = lambda: None
) -> Iterator[SimulateRow]:
    """Each capacity with each policy; ``on_request`` is called once for each request of each row.

    Raises:
        UsageError: A capacity is not valid; nothing was simulated then.
    """
    capacities = [settings.part_and_blocks(capacity, workload) for capacity in settings.capacities]
    ideal = ideal_hit_rate(workload)
    block_bytes = settings.bytes_per_token and settings.bytes_per_token * workload.block_tokens
    for policy in settings.policies:
        for part, blocks in capacities:
            shared = _rate(workload, policy, blocks, 1, on_request)
            private = _rate(workload, policy, blocks, settings.engines) if settings.engines > 1 else None
            yield SimulateRow(
                policy=policy,
                capacity=rounded(part),
                hit_rate=rounded(shared),
                private_hit_rate=None if private is None else rounded(private),
                ideal_hit_rate=rounded(ideal),
                capacity_blocks=blocks,
                capacity_bytes=None if block_bytes is None else blocks * block_bytes,
                engines=settings.engines,
            )


def advice(rows: Sequence[SimulateRow], policy: str) -> SimulateRow | None:
    """The smallest capacity at which ``policy`` hits `NEAR_IDEAL` of what an infinite cache would, if there is one."""
    enough = [row for row in rows if row.policy == policy and row.hit_rate >= NEAR_IDEAL * row.ideal_hit_rate]
    return min(enough, key=lambda row: row.capacity_blocks, default=None)


def _rate(
    workload: Workload, policy: str, blocks: int, engines: int, on_request: Callable[[], None] = lambda: None
) -> float:
    """Hit rate of ``engines`` pools of equal parts of ``blocks``, which take the requests in turn."""
    hit_blocks = 0
    for engine in range(engines):
        for hits in _hits(workload.requests[engine::engines], policy, blocks // engines):
            hit_blocks += hits
            on_request()
    return hit_rate(hit_blocks, workload)


def _hits(requests: Sequence[Request], policy: str, blocks: int) -> Iterator[int]:
    """Leading blocks of each request that are there."""
    if policy == OPTIMAL:
        return optimal_hits(requests, blocks)
    if policy in REFERENCES:
        return block_hits(REFERENCES[policy](blocks), requests)
    replay = Replay(DirectoryConfig(policy=policy, tombstones=0))
    replay.add_segment(0, blocks)
    return map(replay.serve, requests)


def _percentage(text: str) -> float:
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = 0.0
    if not 0 < value <= PERCENT_MAX:
        raise UsageError(f"capacity {text!r} must be above 0% and at most {PERCENT_MAX}%, such as 10%")
    return value
