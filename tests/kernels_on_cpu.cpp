// kvpool/gpu/kernels.cu for the CPU: its threads one after the other. None waits for another, so any order will do.
#include <cstring>

#define __global__
#define __device__
#define __constant__ static const

struct Index {
    unsigned long long x;
};
static Index gridDim, blockDim, blockIdx, threadIdx;

static unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}

#include KERNELS

template <typename Call>
static void launch(u64 grid, u64 threads, Call call) {
    gridDim.x = grid, blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++) call();
}

extern "C" void run_fetch(u64 *table, const u64 *host, u64 capacity, u64 blocks) {
    launch((3 * blocks + 63) / 64, 64, [&] { fetch(table, host, capacity, blocks); });
}

extern "C" void run(const char *kernel, char *cache, const u64 *offsets, u64 stride, const u64 *ids, char *packed,
                    const u64 *places, const u64 *seeds, u64 *sums, u64 *accumulators, u64 *checksums, u64 blocks) {
    auto *move = !strcmp(kernel, "scatter")  ? scatter
                 : !strcmp(kernel, "gather") ? gather
                 : !strcmp(kernel, "pull")   ? pull
                 : !strcmp(kernel, "push")   ? push
                                             : sum;
    launch(3, 64, [&] { move(cache, offsets, stride, ids, packed, places, seeds, sums, blocks); });
    launch((blocks * 8 + 31) / 32, 32, [&] { fold(sums, seeds, accumulators, blocks); });
    launch((blocks + 31) / 32, 32, [&] { merge(accumulators, seeds, checksums, blocks); });
}
