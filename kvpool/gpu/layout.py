"""Where the pages of a paged KV cache lie."""

from dataclasses import dataclass

from kvpool.core.errors import InvalidBufferError
from kvpool.core.limits import BLOCK_BYTES_MAX

WORDS_BYTES = 16
"""The kernels read and write so many bytes at a time."""

STRIPE_BYTES = 64
BLOCK_BYTES_MIN = 256
"""XXH3 takes inputs of more than 240 bytes in stripes of 64; shorter ones it hashes in other ways."""


@dataclass(frozen=True, slots=True)
class PageRuns:
    """Where the pages lie in one allocation, in bytes.

    Attributes:
        offsets: Where each run of pages begins, one a layer; a single one when a block's layers are neighbours.
        stride: From one block to the next.
        size_bytes: Of one page.
        blocks: Blocks in the cache.
    """

    offsets: tuple[int, ...]
    stride: int
    size_bytes: int
    blocks: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one stored block."""
        return len(self.offsets) * self.size_bytes

    @property
    def layer_stride(self) -> int | None:
        """From one layer to the next, where that is the same for all."""
        steps = {b - a for a, b in zip(self.offsets, self.offsets[1:], strict=False)}
        if len(steps) > 1:
            return None
        return steps.pop() if steps else 0

    @property
    def end(self) -> int:
        """Bytes from the allocation's begin to the end of the last page."""
        return max(self.offsets) + (self.blocks - 1) * self.stride + self.size_bytes


def check_for_gpu(runs: PageRuns, address: int) -> None:
    """Raises InvalidBufferError for pages that the kernels cannot move."""
    for name, value, unit in (
        ("the cache's address", address, WORDS_BYTES),
        ("the bytes of a page", runs.size_bytes, WORDS_BYTES),
        ("the bytes from one block to the next", runs.stride, WORDS_BYTES),
        ("the bytes of a block", runs.block_bytes, STRIPE_BYTES),
        *(("where a layer begins", offset, WORDS_BYTES) for offset in runs.offsets),
    ):
        if value < 0 or value % unit:
            raise InvalidBufferError(f"{name} ({value}) must be a multiple of {unit} to be moved by a GPU kernel")
    if not BLOCK_BYTES_MIN <= runs.block_bytes <= BLOCK_BYTES_MAX:
        raise InvalidBufferError(
            f"blocks have {runs.block_bytes} bytes; a GPU kernel moves from {BLOCK_BYTES_MIN} to {BLOCK_BYTES_MAX}"
        )
