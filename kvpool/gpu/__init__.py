"""Blocks in GPU memory: a paged KV cache as the source and destination of stores and loads.

`layout` says where the pages of a cache lie, `cache` is what a caller uses, `lanes` moves the bytes, `kernels` has the
CUDA code, `copies` lists copies for the copy engine, `pinning` page-locks the pool's shared memory. Importing this
needs neither CUDA nor CuPy; making a `GpuCache` does.
"""

from kvpool.gpu.cache import GpuBlocks, GpuCache
from kvpool.gpu.layout import PageRuns
from kvpool.gpu.need import require_gpu

__all__ = ["GpuBlocks", "GpuCache", "PageRuns", "require_gpu"]
