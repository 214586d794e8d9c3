// Moves blocks between a paged KV cache and memory where each is in one piece, and computes their XXH3-64 on the way.
//
// That memory is a staging buffer of our own, with the blocks side by side; or a store node's, on this GPU or another,
// where block `b` begins at packed + places[b].
//
// Compiled for one layout: PAGE_BYTES is a page's length, a multiple of 16; BLOCK_BYTES is a block's, a multiple of 64
// and of PAGE_BYTES, above 240. A block is its layers' pages side by side; page `layer` of block `b` begins at
// cache + offsets[layer] + ids[b] * stride.
//
// XXH3 of a long input adds products of its words to eight accumulators, and mixes ("scrambles") them after every KiB.
// Within a KiB the order does not matter, so each is summed by threads of its own while it is moved (`scatter`,
// `gather`, `pull`, `push`, `sum`: four threads a KiB, each two accumulators). What must be done in order is one addition and one
// scramble a KiB, and eight accumulators of all blocks do it side by side (`fold`). `merge` makes the final value.
//
// Plain C++ but for the launch: tests compile it for the CPU.

typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(16) Words {
    u64 even, odd;
};

static const u64 KIB = 1024, STRIPE = 64, PART = 16, STRIPES_PER_KIB = 16, AT_ONCE = 8, AHEAD = 32;
static const u64 STRIPES = BLOCK_BYTES / STRIPE;
static const u64 KIBS = (BLOCK_BYTES + KIB - 1) / KIB;

static const u64 PRIME32_1 = 0x9E3779B1u, PRIME32_2 = 0x85EBCA77u, PRIME32_3 = 0xC2B2AE3Du;
static const u64 PRIME64_1 = 0x9E3779B185EBCA87ull, PRIME64_2 = 0xC2B2AE3D27D4EB4Full, PRIME64_3 = 0x165667B19E3779F9ull;
static const u64 PRIME64_4 = 0x85EBCA77C2B2AE63ull, PRIME64_5 = 0x27D4EB2F165667C5ull, PRIME_MX1 = 0x165667919E3779F9ull;

__constant__ u64 SECRET[24] = {
    0xbe4ba423396cfeb8ull, 0x1cad21f72c81017cull, 0xdb979083e96dd4deull, 0x1f67b3b7a4a44072ull, 0x78e5c0cc4ee679cbull,
    0x2172ffcc7dd05a82ull, 0x8e2443f7744608b8ull, 0x4c263a81e69035e0ull, 0xcb00c391bb52283cull, 0xa32e531b8b65d088ull,
    0x4ef90da297486471ull, 0xd8acdea946ef1938ull, 0x3f349ce33f76faa8ull, 0x1d4f0bc7c7bbdcf9ull, 0x3159b4cd4be0518aull,
    0x647378d9c97e9fc8ull, 0xc3ebd33483acc5eaull, 0xeb6313faffa081c5ull, 0x49daf0b751dd0d17ull, 0x9e68d429265516d3ull,
    0xfca1477d58be162bull, 0xce31d07ad1b8f88full, 0x280416958f3acb45ull, 0x7e404bbbcafbd7afull};

__constant__ u64 START[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};

// Word `i` of the secret that XXH3 derives from a seed.
__device__ inline u64 secret(u64 i, u64 seed) { return i % 2 ? SECRET[i] - seed : SECRET[i] + seed; }

// The secret's eight bytes that begin `bits` bits into word `i`; bits is not 0.
__device__ inline u64 secret_within(u64 i, int bits, u64 seed) {
    return secret(i, seed) >> bits | secret(i + 1, seed) << (64 - bits);
}

__device__ inline u64 product(u64 keyed) { return (keyed & 0xffffffffu) * (keyed >> 32); }

__device__ inline u64 scrambled(u64 accumulator, u64 key) {
    const u64 mixed = accumulator ^ accumulator >> 47 ^ key;
    return (mixed & 0xffffffffu) * PRIME32_1 + ((mixed >> 32) * PRIME32_1 << 32);
}

// Where byte `at` of a block lies in the cache; `begin` is ids[b] * stride.
__device__ inline char *page_at(char *cache, const u64 *offsets, u64 begin, u64 at) {
    return cache + offsets[at / PAGE_BYTES] + begin + at % PAGE_BYTES;
}

// Words that may change meanwhile, as a slot may that is given to another block: what is summed must be what is moved,
// so they are read from memory once, whatever the compiler would like.
__device__ inline Words read_once(const char *at) {
#ifdef __CUDA_ARCH__
    Words words;
    asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];" : "=l"(words.even), "=l"(words.odd) : "l"(at));
    return words;
#else
    return *(const Words *)at;
#endif
}

enum Way { SCATTER, GATHER, SUM, PULL, PUSH };

// Move the blocks, and write for each KiB of each block what it adds to the eight accumulators.
template <Way WAY>
__device__ inline void move(char *cache, const u64 *offsets, u64 stride, const u64 *ids, char *packed,
                            const u64 *places, const u64 *seeds, u64 *sums, u64 blocks) {
    const u64 threads = (u64)gridDim.x * blockDim.x, end = blocks * KIBS * 4;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < end; i += threads) {
        const u64 part = i % 4, kib = i / 4 % KIBS, block = i / 4 / KIBS;
        const u64 begin = ids[block] * stride, first = kib * KIB + part * PART, seed = seeds[block];
        char *run = packed + (WAY == PULL || WAY == PUSH ? places[block] : block * BLOCK_BYTES) + first;
        char *page = page_at(cache, offsets, begin, first);
        u64 even = 0, odd = 0, key = secret(part * 2, seed);
        for (u64 from = 0; from < STRIPES_PER_KIB; from += AT_ONCE) {
            Words words[AT_ONCE];
#pragma unroll
            for (u64 n = 0; n < AT_ONCE; n++) {
                const u64 ahead = (from + n) * STRIPE, at = first + ahead;
                if (BLOCK_BYTES % KIB && at >= BLOCK_BYTES) continue;
                if (PAGE_BYTES % KIB) page = page_at(cache, offsets, begin, at) - ahead;
                if (WAY == PULL)
                    words[n] = read_once(run + ahead);
                else
                    words[n] = *(const Words *)((WAY == SCATTER ? run : page) + ahead);
            }
#pragma unroll
            for (u64 n = 0; n < AT_ONCE; n++) {
                const u64 stripe = from + n, ahead = stripe * STRIPE, at = first + ahead;
                if (BLOCK_BYTES % KIB && at >= BLOCK_BYTES) continue;
                if (PAGE_BYTES % KIB) page = page_at(cache, offsets, begin, at) - ahead;
                if (WAY != SUM) *(Words *)((WAY == SCATTER || WAY == PULL ? page : run) + ahead) = words[n];
                u64 next = secret(stripe + part * 2 + 1, seed), keys[2] = {key, next};
                key = next;
                if (kib * STRIPES_PER_KIB + stripe == STRIPES - 1) {  // the last one's keys are 7 bytes further back
                    keys[0] = secret_within(15 + part * 2, 8, seed);
                    keys[1] = secret_within(16 + part * 2, 8, seed);
                }
                even += words[n].odd + product(words[n].even ^ keys[0]);
                odd += words[n].even + product(words[n].odd ^ keys[1]);
            }
        }
        *(Words *)(sums + i * 2) = Words{even, odd};
    }
}

// Ids, seeds and places of `blocks` blocks, a row each of `capacity`, out of page-locked host memory: a copy of them
// would wait in the copy engine behind all that is on its way.
extern "C" __global__ void fetch(u64 *table, const u64 *host, u64 capacity, u64 blocks) {
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < 3 * blocks) table[i / blocks * capacity + i % blocks] = host[i / blocks * capacity + i % blocks];
}

// Contiguous blocks to their pages.
extern "C" __global__ void scatter(char *cache, const u64 *offsets, u64 stride, const u64 *ids, char *packed,
                                   const u64 *places, const u64 *seeds, u64 *sums, u64 blocks) {
    move<SCATTER>(cache, offsets, stride, ids, packed, places, seeds, sums, blocks);
}

// Pages to contiguous blocks.
extern "C" __global__ void gather(char *cache, const u64 *offsets, u64 stride, const u64 *ids, char *packed,
                                  const u64 *places, const u64 *seeds, u64 *sums, u64 blocks) {
    move<GATHER>(cache, offsets, stride, ids, packed, places, seeds, sums, blocks);
}

// A store node's slots to their pages.
extern "C" __global__ void pull(char *cache, const u64 *offsets, u64 stride, const u64 *ids, char *packed,
                                const u64 *places, const u64 *seeds, u64 *sums, u64 blocks) {
    move<PULL>(cache, offsets, stride, ids, packed, places, seeds, sums, blocks);
}

// Pages to a store node's slots.
extern "C" __global__ void push(char *cache, const u64 *offsets, u64 stride, const u64 *ids, char *packed,
                                const u64 *places, const u64 *seeds, u64 *sums, u64 blocks) {
    move<PUSH>(cache, offsets, stride, ids, packed, places, seeds, sums, blocks);
}

// Only sums: the blocks lie in their pages already.
extern "C" __global__ void sum(char *cache, const u64 *offsets, u64 stride, const u64 *ids, char *packed,
                               const u64 *places, const u64 *seeds, u64 *sums, u64 blocks) {
    move<SUM>(cache, offsets, stride, ids, packed, places, seeds, sums, blocks);
}

// The accumulators of each block, eight threads a block: a chain of additions and scrambles. Sums are read before they
// are folded, since memory takes longer to answer than some links of the chain take; prefetching them was slower.
extern "C" __global__ void fold(const u64 *sums, const u64 *seeds, u64 *accumulators, u64 blocks) {
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x, block = i / 8, lane = i % 8;
    if (block >= blocks) return;
    const u64 key = secret(16 + lane, seeds[block]);
    const u64 *sum = sums + block * KIBS * 8 + lane;
    u64 accumulator = START[lane], ahead[AHEAD], kib = 0;
    if (KIBS > AHEAD) {
#pragma unroll
        for (u64 n = 0; n < AHEAD; n++) ahead[n] = sum[n * 8];
        for (; kib + 2 * AHEAD < KIBS; kib += AHEAD) {
#pragma unroll
            for (u64 n = 0; n < AHEAD; n++) {
                accumulator = scrambled(accumulator + ahead[n], key);
                ahead[n] = sum[(kib + AHEAD + n) * 8];
            }
        }
    }
    for (; kib + 1 < KIBS; kib++) accumulator = scrambled(accumulator + sum[kib * 8], key);
    accumulators[i] = accumulator + sum[kib * 8];
}

// The checksum of each block, a thread each.
extern "C" __global__ void merge(const u64 *accumulators, const u64 *seeds, u64 *checksums, u64 blocks) {
    const u64 block = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (block >= blocks) return;
    const u64 *lanes = accumulators + block * 8, seed = seeds[block];
    u64 hash = BLOCK_BYTES * PRIME64_1;
    for (u64 n = 0; n < 8; n += 2) {
        const u64 a = lanes[n] ^ secret_within(1 + n, 24, seed), b = lanes[n + 1] ^ secret_within(2 + n, 24, seed);
        hash += a * b ^ __umul64hi(a, b);
    }
    hash = (hash ^ hash >> 37) * PRIME_MX1;
    checksums[block] = hash ^ hash >> 32;
}
