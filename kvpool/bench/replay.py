"""A workload replayed against the directory alone, with nodes that write whatever is reserved at once."""

from kvpool.bench.workload import Request
from kvpool.core.directory import Directory, DirectoryConfig, ReserveResult
from kvpool.core.keys import split_hashes
from kvpool.core.limits import HASH_BYTES, PAGE_BYTES, RESERVE_BLOCKS_MAX, SEGMENT_ID_BYTES
from kvpool.core.namespace import Namespace
from kvpool.testing import ManualClock

REQUEST_S = 0.1
"""Time between two requests of a workload that does not say when they arrived."""

SAME_TIME_S = 0.001
"""Time between two requests that arrived at once, so that they keep their order."""

NAMESPACE = Namespace(model="kvpool-bench-replay", block_tokens=1, block_bytes=PAGE_BYTES)


class Replay:
    """A directory and its nodes, which have no memory; a block is one page.

    Its clock is the workload's: it moves with the requests' own arrivals.

    Args:
        config: How the directory decides.

    Attributes:
        stored: Blocks that were written.
    """

    def __init__(self, config: DirectoryConfig | None = None) -> None:
        self._clock = ManualClock()
        self._start_s = self._clock()
        self._directory = Directory(self._clock, config)
        self._directory.open_namespace(NAMESPACE)
        self._generation = 0
        self._ids: dict[int, bytes] = {}
        self.stored = 0

    def add_segment(self, node: int, blocks: int, medium: str = "shm") -> int:
        """Give a node a segment; its number."""
        segment_id = len(self._ids).to_bytes(SEGMENT_ID_BYTES, "little")
        number = self._directory.add_segment(segment_id, f"node-{node}", blocks * PAGE_BYTES, medium)
        self._ids[number] = segment_id
        return number

    def serve(self, request: Request) -> int:
        """Match, read what is there, and store what is missing; the hits."""
        self._clock.advance(self._wait_s(request))
        if not request.hashes:
            return 0
        packed = b"".join(request.hashes)
        matched = self._directory.match(NAMESPACE.id, packed).blocks
        if matched:
            self._read(packed[: matched * HASH_BYTES])
        for first in range(matched, len(request.hashes), RESERVE_BLOCKS_MAX):
            upto = packed[: (first + RESERVE_BLOCKS_MAX) * HASH_BYTES]
            self._write(self._directory.reserve(NAMESPACE.id, upto, first), split_hashes(upto[first * HASH_BYTES :]))
        return matched

    def _wait_s(self, request: Request) -> float:
        if request.arrival_s is None:
            return REQUEST_S
        return max(SAME_TIME_S, self._start_s + request.arrival_s - self._clock())

    def _read(self, packed: bytes) -> None:
        """Read the blocks of a chain that were matched; by itself this asks for nothing."""

    def _write(self, reserved: ReserveResult, hashes: list[bytes]) -> None:
        for (number, _), share in reserved.shares.items():
            self.stored += len(share.indexes)
            self._commit(reserved.reservation, number, [hashes[index] for index in share.indexes])

    def _commit(self, number: int, segment: int, hashes: list[bytes]) -> None:
        """Say that blocks of a reservation or a copy are written to a segment."""
        first = self._generation + 1
        self._generation += len(hashes)
        written = [(h, 0, (first + i) & 0x7FFF_FFFF, first + i, 0) for i, h in enumerate(hashes)]
        self._directory.commit(number, self._ids[segment], written)
