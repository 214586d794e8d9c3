"""How much a block is worth keeping: learned from when blocks of its kind were used again.

Of the last `RECORDS` uses of the ends of chains it is remembered when each was used again, if it was; whether the block
was evicted meanwhile plays no part, so that what is learned does not depend on what was kept. That gives for each kind
the chance that a block unused for so long is used again within the next while (Kaplan and Meier's estimate: what has
not come back yet counts as long as it was watched). A block's *worth* is the best ratio, over all times to come, of
that chance to the time that it would take up its place: the Gittins index of keeping it.

Kinds seen rarely borrow from all blocks of their tier, tiers from all blocks. What was never seen is expected to come
back by the same chance in each doubling of its age: then the oldest is worth least, as LRU has it.
"""

from array import array
from collections.abc import Sequence
from math import log2
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.core.eviction.use import GAPS, KINDS, SIZES, TIERS, kind_of

RECORDS = 32_768
BINS = 80
BINS_PER_DOUBLING = 3
"""Ages are told apart in steps of a quarter, from `AGE_MIN_US` to 29 hours."""

AGE_MIN_US = 1_000
PRIOR = 32.0
"""Blocks of a kind that count as much as what all others say of it."""

PRIOR_ALL = 8.0
"""The same for `PRIOR_CHANCE`, which is soon forgotten."""

PRIOR_CHANCE = 0.02
"""Chance to be used again in a bin, before anything was seen."""

FIT_EVERY = 32
"""Refitted when so many times fewer uses than are remembered are new: a fit takes milliseconds."""

FIT_USES_MIN = 16

_PENDING, _VOID = -1, -2
_EDGES_US = AGE_MIN_US * 2.0 ** (np.arange(BINS + 1) / BINS_PER_DOUBLING)

Floats = NDArray[np.float64]


class Worth:
    """What the ends of chains were worth, and are."""

    def __init__(self) -> None:
        self._record_of: dict[bytes, int] = {}
        self._hashes: list[bytes] = []
        self._kind = array("H")
        self._at_us = array("q")
        self._age_us = array("q")
        """When it was used again, counted from `_at_us`; or `_PENDING`, or `_VOID`: it says nothing."""
        self._next = 0
        self._new = 0
        self.fits = 0
        """Times that the worths changed."""
        self._table = _worths(np.zeros((TIERS, GAPS, SIZES, BINS)), np.zeros((TIERS, GAPS, SIZES, BINS))).tolist()

    def of(self, kind: int, age_us: int) -> float:
        """Worth of a block of ``kind`` that was last used ``age_us`` ago; per microsecond."""
        row = self._table[kind]
        if age_us <= AGE_MIN_US:
            return float(row[0])
        place = log2(age_us / AGE_MIN_US) * BINS_PER_DOUBLING
        step = min(int(place), BINS - 2)
        part = min(place - step, 1.0)
        return float(row[step] + (row[step + 1] - row[step]) * part)

    def note(self, block_hash: bytes, use: int, now_us: int, instead_of: bytes = b"") -> None:
        """A block ends a chain that is used now, perhaps instead of another one above it in the same use.

        What was open of either says nothing any more.
        """
        i = self._record_of.pop(instead_of, None)
        self.forget(block_hash)
        if i is None:
            i = self._oldest_record()
        self._new += 1
        self._record_of[block_hash] = i
        self._hashes[i] = block_hash
        self._kind[i], self._at_us[i], self._age_us[i] = kind_of(use), now_us, _PENDING

    def _oldest_record(self) -> int:
        """The place of a new record, or of the oldest, which is forgotten."""
        if len(self._hashes) < RECORDS:
            self._hashes.append(b"")
            for column in (self._kind, self._at_us, self._age_us):
                column.append(0)
            return len(self._hashes) - 1
        i = self._next
        self._next = (i + 1) % RECORDS
        self._record_of.pop(self._hashes[i], None)
        return i

    def forget(self, block_hash: bytes) -> None:
        """The block no longer ends its chain."""
        i = self._record_of.pop(block_hash, None)
        if i is not None:
            self._age_us[i] = _VOID
            self._hashes[i] = b""

    def again(self, block_hash: bytes, now_us: int) -> tuple[int, int] | None:
        """A remembered block is used again: its kind and how long after, in microseconds; None if it is not known."""
        i = self._record_of.pop(block_hash, None)
        if i is None:
            return None
        age_us = self._age_us[i] = max(0, now_us - self._at_us[i])
        self._hashes[i] = b""
        return self._kind[i], age_us

    def deepest(self, hashes: Sequence[bytes]) -> int:
        """Index of the last of ``hashes`` that is remembered, or -1."""
        if self._record_of.keys().isdisjoint(hashes):
            return -1
        return next(i for i in range(len(hashes) - 1, -1, -1) if hashes[i] in self._record_of)

    def refit(self, now_us: int) -> None:
        """Learn what is new, if it is enough."""
        if self._new < max(FIT_USES_MIN, len(self._hashes) // FIT_EVERY):
            return
        self._new = 0
        self.fits += 1
        self._table = _worths(*self._counts(now_us)).tolist()

    def _counts(self, now_us: int) -> tuple[Floats, Floats]:
        """By kind and bin of age: blocks that were used again, and blocks that were watched at least so long."""
        kind, age = (np.frombuffer(column, column.typecode) for column in (self._kind, self._age_us))
        at = np.frombuffer(self._at_us, self._at_us.typecode)
        is_again = age >= 0
        shown = age != _VOID
        ages = np.where(is_again, age, np.maximum(now_us - at, 0))
        bins = np.log2(np.maximum(ages, AGE_MIN_US) / AGE_MIN_US) * BINS_PER_DOUBLING
        bins = np.minimum(bins.astype(np.int64), BINS - 1)
        cells = kind.astype(np.int64) * BINS + bins
        again = np.bincount(cells[is_again], minlength=KINDS * BINS)
        # What is still out was watched through the bins below its age, not yet through its own.
        out = np.bincount(cells[shown & ~is_again & (bins > 0)] - 1, minlength=KINDS * BINS)
        shape = (TIERS, GAPS, SIZES, BINS)
        watched = np.cumsum((again + out).reshape(shape)[..., ::-1], axis=-1)[..., ::-1]
        return again.reshape(shape).astype(np.float64), watched.astype(np.float64)


def _worths(again: Floats, watched: Floats) -> NDArray[Any]:
    """Worth by kind and bin: the effects of gap and size on the chance within a tier multiply."""
    chance_all = _chance(again.sum((0, 1, 2)), watched.sum((0, 1, 2)), np.full(BINS, PRIOR_CHANCE), PRIOR_ALL)
    tier = _chance(again.sum((1, 2)), watched.sum((1, 2)), chance_all)[:, None, None]
    by_gap = _chance(again.sum(2, keepdims=True), watched.sum(2, keepdims=True), tier)
    by_size = _chance(again.sum(1, keepdims=True), watched.sum(1, keepdims=True), tier)
    chance = np.minimum(by_gap * by_size / tier, 1.0).reshape(KINDS, BINS)
    left = np.concatenate([np.ones((KINDS, 1)), np.cumprod(1.0 - chance, axis=1)], axis=1)
    held = (left[:, :-1] + left[:, 1:]) / 2 * np.diff(_EDGES_US)
    spent = np.concatenate([np.zeros((KINDS, 1)), np.cumsum(held, axis=1)], axis=1)
    worths = np.zeros((KINDS, BINS))
    for i in range(BINS):
        gain = left[:, i : i + 1] - left[:, i + 1 :]
        cost = spent[:, i + 1 :] - spent[:, i : i + 1]
        worths[:, i] = np.divide(gain, cost, out=np.zeros_like(gain), where=cost > 0).max(1)
    return worths


def _chance(again: Floats, watched: Floats, otherwise: Floats, prior: float = PRIOR) -> Floats:
    chance: Floats = (again + prior * otherwise) / (watched + prior)
    return chance
