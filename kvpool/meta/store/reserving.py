"""Reserving in Redis: room is made in other namespaces first, where older leaves are, then the blocks are placed."""

from dataclasses import dataclass

import numpy as np

from kvpool.core.directory import ReserveResult, Share, Want
from kvpool.core.errors import InvalidHashError, NamespaceMismatchError
from kvpool.core.keys import count_hashes, split_hashes
from kvpool.core.limits import HASH_BYTES, MATCH_BLOCKS_MAX, RESERVE_BLOCKS_MAX
from kvpool.meta.store.pool import Known, Pool, SegmentRecord
from kvpool.meta.store.usage import Freed, Usage, freed_of

NUMBER_BITS = 51
"""Bits of a reservation or lease below those of its namespace's number: Lua counts in doubles."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a writer asks for; see `Directory.reserve`."""

    hashes: bytes
    first: int
    parent: bytes
    owner: str
    ttl_us: int
    age_slack: float


def number_of(known: Known, inner: int) -> int:
    """A namespace's own number of a reservation or lease, as the pool knows it; 0 stays 0."""
    return known.number << NUMBER_BITS | inner if inner else 0


def number_within(number: int) -> int:
    """What its namespace calls it."""
    return number & ((1 << NUMBER_BITS) - 1)


def reserve(pool: Pool, usage: Usage, known: Known, wanted: Wanted) -> ReserveResult:
    """See `Directory.reserve`."""
    blocks = count_hashes(wanted.hashes, MATCH_BLOCKS_MAX)
    if not 0 <= wanted.first < blocks or blocks - wanted.first > RESERVE_BLOCKS_MAX:
        raise InvalidHashError(
            f"first is {wanted.first} of {blocks} hashes; reserve from 1 to {RESERVE_BLOCKS_MAX} blocks at a time"
        )
    chain = split_hashes(wanted.hashes[wanted.first * HASH_BYTES :])
    if len(set(chain)) != len(chain):
        raise InvalidHashError("a hash stands twice in the chain; each block has its own")
    records = {number: record for number, record in pool.segments().items() if record.open}
    freed = usage.make_room(known, records, wanted.hashes, wanted.first)
    result = _place(pool, usage, known, records, wanted, freed)
    refused = result.wants.count(Want.NO_ROOM)
    if not refused or not (more := usage.let_others_give(known, records, refused)):
        return result
    prefix = pool.epoch.prefix(known.namespace.id)
    if result.reservation:
        pool.link.call(prefix, "abort", number_within(result.reservation), b"", 0)
    return _place(pool, usage, known, records, wanted, [*freed, *more])


def _place(
    pool: Pool, usage: Usage, known: Known, records: dict[int, SegmentRecord], wanted: Wanted, freed: list[Freed]
) -> ReserveResult:
    """One try; what ``freed`` names is for the grants, and what it frees itself is added there."""
    choices = usage.choices(known.namespace.id, records)
    asked = (wanted.hashes, wanted.first, wanted.parent, wanted.owner, wanted.ttl_us, choices, wanted.age_slack)
    answer = pool.link.call(pool.epoch.prefix(known.namespace.id), "reserve", *asked)
    kind = answer[0]
    if kind == b"missing":
        return ReserveResult(0, b"", {}, answer[1])
    if kind == b"loop":
        raise NamespaceMismatchError("the chain's parent is stored below the chain: give the hashes from their root")
    if kind == b"chain":
        raise NamespaceMismatchError(
            f"hashes[{answer[1]}] is stored below another parent: the hashes are not one chain; give them from the root"
        )
    _, number, wants, shares, victims = answer
    freed += freed_of(victims, records)
    return _reserved(number_of(known, int(number)), wants, shares, freed)


def _reserved(number: int, wants: bytes, packed: list[bytes], freed: list[Freed]) -> ReserveResult:
    shares: dict[tuple[int, int], Share] = {}
    for key, indexes in zip(packed[::2], packed[1::2], strict=True):
        segment, shard = np.frombuffer(key, "<u2").tolist()
        shares[segment, shard] = Share(np.frombuffer(indexes, "<u4").tolist())
    for segment, orders in freed:
        ranks = [share for (at, _), share in shares.items() if at == segment]
        for i, order in enumerate(orders if ranks else ()):
            ranks[i % len(ranks)].victims.append(order)
    return ReserveResult(number, wants, shares, None)
