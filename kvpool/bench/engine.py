"""The reference engine: a paged KV buffer, a prefix cache of limited size, and the pool behind it.

It shows, in the order in which an LLM engine does it, what a connector does for each request: local prefix,
pool match, allocation, load, computation, store. "Computing" a block fills its page with bytes that are a
function of the block's chained hash; so every byte a load delivers is compared with what it has to be.
"""

import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvpool.bench.workload import Request
from kvpool.core.errors import UsageError
from kvpool.core.limits import BLOCK_BYTES_MAX, RESERVE_BLOCKS_MAX

BATCH_BLOCKS = min(1_024, RESERVE_BLOCKS_MAX)
"""Blocks in one load or store: enough to spread a call's cost, few enough that a deadline fits any chain."""

BLOCK_BYTES_UNIT = 16
"""A block is a K and a V half of whole 8-byte words."""

LEASE_S = 0.0
"""No lease: a replay squeezes an hour into seconds, so that leases of any useful length would pin most of a small pool
(over 1,280 blocks the 512-token agent trace then hits 36 % of its tokens and not 87 %). Loads begin at once; what is
evicted all the same is a miss."""

_GROUP_BLOCKS = 32
"""Blocks computed or compared at once: one at a time, four threads spend their time passing the interpreter
lock (they compare 1.3 GB/s together, against 10.8 in groups)."""

_PATTERN_SEED = 0x6B76706F6F6C


class Matched(Protocol):
    """What the engine reads of a pool's answer to `Pool.match`."""

    @property
    def blocks(self) -> int:
        """Leading blocks of the chain that the pool holds."""


class Loaded(Protocol):
    """What the engine reads of a pool's answer to `Pool.load`."""

    @property
    def loaded(self) -> int:
        """Leading blocks that arrived."""


class Stored(Protocol):
    """What the engine reads of a pool's answer to `Pool.store`."""

    @property
    def stored(self) -> int:
        """Blocks newly stored by this call."""

    @property
    def refused(self) -> int:
        """Blocks the pool had no room for."""

    @property
    def missing_from(self) -> int | None:
        """First block of the chain that the pool lacks and the call did not bring; None if there is none."""


Buffers = Sequence[Sequence[memoryview]]
"""For each block its pieces, in order."""


class Pool(Protocol):
    """The part of a kvpool namespace handle that an engine needs; ``hashes`` is the chain from its root."""

    def match(self, hashes: bytes, *, lease_s: float) -> Matched:
        """How many leading blocks the pool holds, kept for ``lease_s``."""

    def load(self, hashes: bytes, buffers: Buffers, *, first: int) -> Loaded:
        """Fill ``buffers`` with blocks ``first`` and following."""

    def store(self, hashes: bytes, buffers: Buffers, *, first: int) -> Stored:
        """Offer blocks ``first`` and following; when it returns, what was stored can be matched."""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of one engine, or the sum of several; seconds are those spent inside the pool's calls."""

    requests: int = 0
    input_tokens: int = 0
    local_tokens: int = 0
    pool_tokens: int = 0
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0
    stored_blocks: int = 0
    stored_bytes: int = 0
    store_s: float = 0.0
    mismatches: int = 0
    undelivered_blocks: int = 0
    refused_blocks: int = 0

    def __add__(self, other: "EngineStats") -> "EngineStats":
        mine, others = msgspec.structs.asdict(self), msgspec.structs.asdict(other)
        return EngineStats(**{name: mine[name] + others[name] for name in mine})

    @property
    def computed_tokens(self) -> int:
        """Input tokens that neither the local cache nor the pool saved."""
        return self.input_tokens - self.local_tokens - self.pool_tokens

    @property
    def hit_rate(self) -> float:
        """Share of the input tokens that were not computed."""
        return (self.local_tokens + self.pool_tokens) / self.input_tokens if self.input_tokens else 0.0


def engine_of(index: int, engines: int) -> int:
    """The engine that request ``index`` goes to: round robin, as a balancer blind to caches does."""
    return index % engines


class PageCache:
    """Which block is in which page: pages of finished requests stay as a prefix cache until others need them.

    Least recently used goes first, leaves before their parents: a request touches its last block first and
    its root last, so nothing in the order comes before its own descendants. One request at a time, so no
    page is ever taken from under one.
    """

    def __init__(self, pages: int) -> None:
        self._pages = pages
        self._free = list(range(pages))
        self._page_of: OrderedDict[bytes, int] = OrderedDict()

    def match(self, hashes: Sequence[bytes]) -> int:
        """Longest leading run of resident blocks."""
        for i, block in enumerate(hashes):
            if block not in self._page_of:
                return i
        return len(hashes)

    def admit(self, hashes: Sequence[bytes]) -> list[int]:
        """Pages for the whole chain; the caller must fill all but the leading ones that `match` counts.

        Needs at least as many pages in all as the chain has blocks.
        """
        resident = self.match(hashes)
        pages = [self._page_of.pop(block) for block in hashes[:resident]]
        missing = len(hashes) - resident
        while len(self._free) < missing:
            self._free.append(self._page_of.popitem(last=False)[1])
        pages += [self._free.pop() for _ in range(missing)]
        self._page_of.update(zip(reversed(hashes), reversed(pages), strict=True))
        return pages

    def check_integrity(self) -> None:
        """Assert that every page is either free or holds one block."""
        pages = sorted([*self._free, *self._page_of.values()])
        assert pages == list(range(self._pages)), "a page is lost or used twice"


class NoCache:
    """No prefix cache: every request finds nothing and takes the first pages. For engines that show the pool alone."""

    def match(self, hashes: Sequence[bytes]) -> int:  # noqa: ARG002 - as a cache that holds nothing
        """Nothing is resident."""
        return 0

    def admit(self, hashes: Sequence[bytes]) -> list[int]:
        """Pages for the whole chain, whatever the request before had in them."""
        return list(range(len(hashes)))


class PagedBuffer:
    """The KV memory: a K and a V plane of pages, so that a block is two pieces that do not touch."""

    def __init__(self, pages: int, block_bytes: int) -> None:
        check_block_bytes(block_bytes)
        words = block_bytes // BLOCK_BYTES_UNIT
        self._planes = np.zeros((2, pages, words), np.uint64)
        self._pattern = np.random.default_rng(_PATTERN_SEED).integers(0, 1 << 63, (2, words), np.uint64)
        self._pieces = [[memoryview(plane[page]).cast("B") for plane in self._planes] for page in range(pages)]

    def pieces(self, pages: Sequence[int]) -> Buffers:
        """The memory of ``pages``, writable; it stays the buffer's."""
        return [self._pieces[page] for page in pages]

    def compute(self, pages: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Write the bytes that the blocks must have: a fixed pattern, mixed with each block's hash."""
        for start in range(0, len(pages), _GROUP_BLOCKS):
            group = slice(start, start + _GROUP_BLOCKS)
            self._planes[:, pages[group]] = self._expected(hashes[group])

    def wrong(self, pages: Sequence[int], hashes: Sequence[bytes]) -> list[int]:
        """Indexes of the blocks whose pages differ in any byte from what `compute` would write."""
        found: list[int] = []
        for start in range(0, len(pages), _GROUP_BLOCKS):
            group = slice(start, start + _GROUP_BLOCKS)
            actual, expected = self._planes[:, pages[group]], self._expected(hashes[group])
            if not np.array_equal(actual, expected):
                found += (start + np.flatnonzero((actual != expected).any(axis=(0, 2)))).tolist()
        return found

    def _expected(self, hashes: Sequence[bytes]) -> NDArray[np.uint64]:
        """Planes of the blocks' bytes; each plane takes its own word of the hash."""
        words = np.frombuffer(b"".join(hashes), np.uint64).reshape(len(hashes), -1)
        return self._pattern[:, np.newaxis] ^ words[:, : len(self._pattern)].T[:, :, np.newaxis]


class Engine:
    """Serves one request at a time, from one thread; owns its pages, shares only the pool with others.

    Args:
        pages: Blocks that its memory holds.
        block_bytes: Bytes of a block.
        block_tokens: Tokens of a block.
        pool: Where it loads from and saves to.
        keeps: Whether pages of finished requests stay as a prefix cache of its own.
    """

    def __init__(self, pages: int, block_bytes: int, block_tokens: int, pool: Pool, *, keeps: bool = True) -> None:
        self._cache = PageCache(pages) if keeps else NoCache()
        self._buffer = PagedBuffer(pages, block_bytes)
        self._pages = pages
        self._block_bytes = block_bytes
        self._block_tokens = block_tokens
        self._pool = pool
        self._stats = EngineStats()

    def stats(self) -> EngineStats:
        """Counters so far."""
        return self._stats

    def serve(self, request: Request) -> None:
        """Find, load, compute and save one prompt's blocks.

        Raises:
            UsageError: A prompt longer than the engine's memory.
        """
        hashes = request.hashes
        if len(hashes) > self._pages:
            raise UsageError(f"a prompt of {len(hashes)} blocks needs as many pages; the engine has {self._pages}")
        local = reused = self._cache.match(hashes)
        if hashes:
            chain = b"".join(hashes)
            offered = self._pool.match(chain, lease_s=LEASE_S).blocks
            pages = self._cache.admit(hashes)
            reused = self._load(chain, hashes, pages, local, offered)
            self._buffer.compute(pages[reused:], hashes[reused:])
            self._save(chain, pages, reused)
        self._stats += EngineStats(
            requests=1,
            input_tokens=request.input_tokens,
            local_tokens=local * self._block_tokens,
            pool_tokens=(reused - local) * self._block_tokens,
        )

    def _load(self, chain: bytes, hashes: Sequence[bytes], pages: Sequence[int], first: int, offered: int) -> int:
        """Load what the pool offers beyond ``first``; returns the end of the run that arrived intact."""
        for start, stop in _batches(first, offered):
            began_s = time.perf_counter()
            loaded = self._pool.load(chain, self._buffer.pieces(pages[start:stop]), first=start).loaded
            load_s = time.perf_counter() - began_s
            arrived = start + loaded
            wrong = self._buffer.wrong(pages[start:arrived], hashes[start:arrived])
            ended = bool(wrong) or loaded < stop - start
            self._stats += EngineStats(
                loaded_blocks=loaded,
                loaded_bytes=loaded * self._block_bytes,
                load_s=load_s,
                mismatches=len(wrong),
                undelivered_blocks=offered - arrived if ended else 0,
            )
            if ended:
                return start + min(wrong, default=loaded)
        return max(first, offered)

    def _save(self, chain: bytes, pages: Sequence[int], first: int) -> None:
        """Offer the blocks from ``first`` on."""
        for start, stop in _batches(first, len(pages)):
            missing_from = self._store(chain, pages, start, stop)
            # The pool may have dropped ancestors that are still in this engine's cache: without them it
            # cannot take the rest. Once is enough: a pool too full to take them now will not take them a
            # moment later.
            if missing_from is not None and missing_from < start:
                for again, until in _batches(missing_from, stop):
                    self._store(chain, pages, again, until)

    def _store(self, chain: bytes, pages: Sequence[int], start: int, stop: int) -> int | None:
        began_s = time.perf_counter()
        answer = self._pool.store(chain, self._buffer.pieces(pages[start:stop]), first=start)
        self._stats += EngineStats(
            stored_blocks=answer.stored,
            stored_bytes=answer.stored * self._block_bytes,
            store_s=time.perf_counter() - began_s,
            refused_blocks=answer.refused,
        )
        return answer.missing_from


def check_block_bytes(block_bytes: int) -> None:
    """Refuse a block that cannot be a K and a V half of whole words; raises UsageError."""
    if not BLOCK_BYTES_UNIT <= block_bytes <= BLOCK_BYTES_MAX or block_bytes % BLOCK_BYTES_UNIT:
        raise UsageError(
            f"block bytes are {block_bytes}; they must be a multiple of {BLOCK_BYTES_UNIT} up to {BLOCK_BYTES_MAX}"
        )


def _batches(first: int, end: int) -> Iterator[tuple[int, int]]:
    for start in range(first, end, BATCH_BLOCKS):
        yield start, min(start + BATCH_BLOCKS, end)
