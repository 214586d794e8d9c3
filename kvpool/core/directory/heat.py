"""Which blocks are read the most: samples of the slices that readers locate.

A touch is written on the deepest matched block alone, so it says nothing of the blocks above it. A locate names every
block that is about to be read, so a sample of the locates weighs each block by its own reads: no sums over descendants,
no walk up the chain, and what an engine has cached itself, and does not read, counts for nothing. One locate in
`SAMPLE_EVERY` keeps a copy of its row numbers, which the locate has gathered anyway; counting waits for the planner.
"""

from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvpool.core.clock import microseconds

SAMPLE_EVERY = 8
"""Locates for one sample, on the average: the gaps vary, so that callers that take turns are all sampled."""

SAMPLES_MAX = 256
SAMPLE_BLOCKS_MAX = 512
"""Samples kept, and blocks of each: half a megabyte. Clients locate so many blocks at a time."""

WINDOW_S = 10.0
"""Older samples no longer count."""

SAMPLES_MIN = 2
"""A block seen less often is not hot, however short the time."""


@dataclass(frozen=True, slots=True)
class HotRun:
    """Neighbours in a chain that deserve ``copies`` copies each."""

    rows: tuple[int, ...]
    copies: int


@dataclass(frozen=True, slots=True)
class HotHead:
    """Neighbours in a chain that are read about alike, each so many times a second."""

    rows: tuple[int, ...]
    reads_per_s: float


@dataclass(frozen=True, slots=True)
class Demand:
    """What was read lately: sampled slices, and the reads a second that one sample stands for."""

    slices: "tuple[array[int], ...]"
    reads_per_s: float

    def hot_runs(self, threshold_per_s: float, copies_max: int) -> Iterator[HotRun]:
        """Runs with a block read at ``threshold_per_s`` or more: one further copy for each time that it is reached.

        Needs no lock: rows may have changed meanwhile, and who acts on them looks again.
        """
        if not self.slices:
            return
        rows, counts = np.unique(np.concatenate([np.asarray(s) for s in self.slices]), return_counts=True)
        further = np.minimum(counts * self.reads_per_s // threshold_per_s, copies_max - 1).astype(np.int64)
        further[counts < SAMPLES_MIN] = 0
        copies = dict(zip(rows[further > 0].tolist(), (1 + further[further > 0]).tolist(), strict=True))
        for rows_read in self.slices:
            yield from _runs(rows_read, copies)

    def heads(self, most: int) -> list[HotHead]:
        """The ``most`` runs that are read the most, blocks times reads; counts within a factor of 2 are alike.

        Needs no lock, as `hot_runs`.
        """
        if not self.slices:
            return []
        rows, counts = np.unique(np.concatenate([np.asarray(s) for s in self.slices]), return_counts=True)
        seen = dict(zip(rows.tolist(), counts.tolist(), strict=True))
        magnitude = {row: count.bit_length() for row, count in seen.items() if count >= SAMPLES_MIN}
        runs = [run.rows for rows_read in self.slices for run in _runs(rows_read, magnitude)]
        reads = [(sum(seen[row] for row in run), run) for run in runs]
        hottest = sorted(reads, key=lambda read: read[0], reverse=True)[:most]
        return [HotHead(run, count / len(run) * self.reads_per_s) for count, run in hottest]


class Heat:
    """The latest samples."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, array[int]]] = deque(maxlen=SAMPLES_MAX)
        self._random = 1
        self._gap = 1

    def note(self, rows: list[int], now_us: int) -> None:
        """These blocks, neighbours in a chain, were located to be read."""
        self._gap -= 1
        if self._gap or not rows:
            self._gap = max(1, self._gap)
            return
        # Any generator does here; this one needs nothing from outside.
        self._random = (self._random * 1_103_515_245 + 12_345) & 0x7FFF_FFFF
        self._gap = 1 + (self._random >> 16) % (2 * SAMPLE_EVERY - 1)
        self._samples.append((now_us, array("i", rows[:SAMPLE_BLOCKS_MAX])))

    def demand(self, now_us: int) -> Demand:
        """What the samples of the last `WINDOW_S` say."""
        samples, begin_us = self._samples, now_us - microseconds(WINDOW_S)
        while samples and samples[0][0] < begin_us:
            samples.popleft()
        # A full ring covers the time since its oldest sample; another one, all the window.
        covered_us = max(1, now_us - samples[0][0]) if len(samples) == SAMPLES_MAX else now_us - begin_us
        return Demand(tuple(rows for _, rows in samples), SAMPLE_EVERY * 1e6 / covered_us)


def _runs(rows: "array[int]", copies: dict[int, int]) -> Iterator[HotRun]:
    """Runs of equally hot rows; each row is given once, and taken out of ``copies``."""
    run: list[int] = []
    wanted = 0
    for row in (*rows, -1):
        deserved = copies.pop(row, 0)
        if run and deserved != wanted:
            yield HotRun(tuple(run), wanted)
            run = []
        wanted = deserved
        if deserved:
            run.append(row)
