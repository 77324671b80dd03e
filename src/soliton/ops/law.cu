// The law of a sampled step, one launch: a cluster of CLUSTER blocks takes a row, each block a run of its logits into
// shared memory once, and all searches go on there. See law.py for what is computed.
//
// An edge is found digit by digit. A pass makes a histogram of one digit in every block, the blocks add them up
// through distributed shared memory, and all of them find the digit at which what lies at or above it reaches what is
// wanted; the next pass looks inside that digit, and there is none where a digit is wanted whole. Top-k counts, over
// 32-bit keys in the order of the logits: digits of 11, 11 and 10 bits. Top-p weighs, over the 30 bits of a weight in
// [0, 1]: three of 10, the last one counted, since all that share it weigh the same.
//
// What a pass costs is instructions: 128 lanes a cycle, so 20480 elements of a block are 160 cycles for each. Where all
// add one to a bin, the hardware does it for equal bins of a warp at once. Mass has 62 bits, and a 64-bit atomic in
// shared memory would be a loop; but weights that share the first digit share their exponent, so their mass is a number
// of 24 bits, summed as two halves of 12 in 32-bit words. Weights too small for top-p to reach make no atomics. Code is
// kept short: it is fetched cold in every step.
//
// Mass is in integers, so no order of sums, atomics or rows matters.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int CLUSTER = 8, THREADS = 1024, WARPS = THREADS / 32;
constexpr int CHUNK = 1024;             // elements of one of the parts whose masses are given
constexpr int PARTS = SOLITON_PARTS;    // most parts of a block
constexpr int WORDS = 2048, HALF = 1024;  // of a histogram: counts, or HALF low and HALF high halves of mass
constexpr int SLICE = WORDS / 2 / CLUSTER;  // pairs of words that a block adds up
constexpr int REST = 1020;              // first of 4 bins that no weight up to 1 falls into: mass that no bin holds
constexpr u32 ALL = 0xffffffffu;

struct Shared {
    u64 hist[2][WORDS / 2];  // of this block, pairs of words; a pass takes one and clears the other
    u64 merged[WORDS / 2];   // of the cluster
    u64 sums[WARPS];         // of find
    u64 masses[PARTS];
    u64 whole[CLUSTER];  // masses of the blocks, in the first one
    u64 tops[CLUSTER];   // largest keys of the blocks
    u64 inside, above;   // of the digit that was found, and of all above it
    u32 digit, top;
    u32 ties[WARPS];
};
static_assert(sizeof(Shared) <= SOLITON_FIXED, "law.py gives too little shared memory");

#ifndef SOLITON_EMULATED  // a test brings its own of these and runs the rest on a CPU
#include "chip.cuh"

extern __shared__ __align__(16) unsigned char memory[];

__device__ __forceinline__ u32 there(const void* p, u32 block) {  // the same place in another block of the cluster
    u32 at;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(smem(p)), "r"(block));
    return at;
}
__device__ __forceinline__ u64 far_load(const u64* p, u32 block) {
    u64 v;
    asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(v) : "r"(there(p, block)) : "memory");
    return v;
}
__device__ __forceinline__ void far_store(u64* p, u32 block, u64 v) {
    asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(there(p, block)), "l"(v) : "memory");
}
__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// A release waits for what the warp has under way; it is set, alike in a warp, where others await something of it.
__device__ __forceinline__ void cluster_arrive(bool release) {
    if (release) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    else asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ void copy_in(u32* to, const float* from) {  // rows need not be aligned to more than this
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(smem(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }
#endif

__device__ __forceinline__ int min_(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ int max_(int a, int b) { return a > b ? a : b; }

// 32 bits in the order of float32 x; -0 and +0 share theirs.
__device__ __forceinline__ u32 key_of(float x) {
    u32 bits = __float_as_uint(x + 0.0f);
    return bits ^ ((u32)((int)bits >> 31) | 0x80000000u);
}
__device__ __forceinline__ float value_of(u32 key) {
    return __uint_as_float(key ^ (~(u32)((int)key >> 31) | 0x80000000u));
}

// A weight of the float32 bits `weight` as `part` << `shift`, in multiples of 2**-bits, halves rounded up; part is
// below 2**24, and weights of one exponent share the shift.
struct Mass {
    u32 part;
    int shift;
    __device__ __forceinline__ u64 whole() const { return (u64)part << shift; }
};
__device__ __forceinline__ int shift_of(u32 weight, int bits) { return max_((int)(weight >> 23) + bits - 150, 0); }
__device__ __forceinline__ Mass mass_of(u32 weight, int bits) {
    // zero and the subnormal are off by their leading one here, and far below half a unit anyway
    u32 digits = (weight & 0x7fffffu) | 0x800000u;
    int down = min_(max_(150 - bits - (int)(weight >> 23), 0), 30);
    return {(2 * digits + (1u << down)) >> (down + 1), shift_of(weight, bits)};
}

// What stays: all from `least` on; where that is split, of what equals it only while the `unit`s before fall short of
// `need`.
struct Edge {
    u32 least;
    bool split;
    u64 need, unit;
};

struct Search {
    Shared& S;
    u32* data;  // keys of this block's logits, later the bits of their weights
    int t, lane, warp, begin, end, bits;  // this warp's elements; fraction bits of mass
    u32 rank;
    int pass;

    __device__ __forceinline__ u32* hist() const { return (u32*)S.hist[pass & 1]; }

    // Counts of a digit of what agrees with `least` above bit `up`.
    __device__ void count(u32 least, int up, int shift, u32 mask) {
        u32* to = hist();
#pragma unroll 4
        for (int i = begin + lane; i < end; i += 32) {
            u32 value = data[i];
            if (((value ^ least) >> up) == 0) atomicAdd(to + (value >> shift & mask), 1u);
        }
    }

    __device__ __forceinline__ void weigh(u32 bin, u32 part) {
        u32* to = hist() + bin;
        atomicAdd(to, part & 0xfffu);
        atomicAdd(to + HALF, part >> 12);
    }

    // The blocks' histograms of this pass as one in each of them. A pair of words is summed as one number: no word
    // overflows, for 2**12 times the longest row is below 2**32.
    __device__ void merge() {
        __syncthreads();
        cluster_arrive(warp == 0);  // for all: the block's writes are before it
        cluster_wait();
        if (t < SLICE) {
            int at = rank * SLICE + t;
            u64 sum = 0, seen[CLUSTER];
#pragma unroll
            for (int b = 0; b < CLUSTER; ++b) seen[b] = far_load(&S.hist[pass & 1][at], b);
#pragma unroll
            for (int b = 0; b < CLUSTER; ++b) sum += seen[b];
#pragma unroll
            for (int b = 0; b < CLUSTER; ++b) far_store(&S.merged[at], b, sum);
        }
        cluster_arrive(t < SLICE);
        cluster_wait();
        ++pass;
        S.hist[pass & 1][t] = 0;  // nobody looks at the one before the last any more
    }

    // S.digit: the largest digit at or above which `need` is reached, where thread t holds what lies in digits 2 t and
    // 2 t + 1; S.inside and S.above. share > 0: need is that share of all, rest included. Returns what is needed of the
    // digit itself.
    __device__ u64 find(u64 low, u64 high, u64 need, double share, u64 rest) {
        u64 own = low + high, above = own;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            u64 next = __shfl_down_sync(ALL, above, d);
            above += lane + d < 32 ? next : 0;
        }
        if (lane == 0) S.sums[warp] = above;
        __syncthreads();
        u64 other = S.sums[lane], later = lane > warp ? other : 0;
#pragma unroll
        for (int d = 16; d; d /= 2) later += __shfl_xor_sync(ALL, later, d);
        if (share > 0) {  // as sampling.law: at least one, at most all
#pragma unroll
            for (int d = 16; d; d /= 2) other += __shfl_xor_sync(ALL, other, d);
            u64 total = other + rest;
            need = (u64)ceil((double)total * share);
            need = need < total ? need : total;
            need = need > 1 ? need : 1;
        }
        above += later - own;
        if (above < need && need <= above + own) {  // one thread, unless a row holds NaN
            bool upper = need <= above + high;
            S.digit = 2 * t + upper;
            S.inside = upper ? high : low;
            S.above = upper ? above : above + high;
        }
        __syncthreads();
        return need - S.above;
    }

    // Takes away the equal ones that do not stay, in the order of their index. `slot`: their word in the last pass's
    // histograms.
    __device__ __forceinline__ void part(const Edge& edge, u32 slot) {
        u32 mine = 0;
        for (int base = begin; base < end; base += 32) {
            int i = base + lane;
            mine += __popc(__ballot_sync(ALL, i < end && data[i] == edge.least));
        }
        if (lane == 0) S.ties[warp] = mine;
        __syncthreads();
        u32 before = lane < warp ? S.ties[lane] : 0;
        if (lane < (int)rank) before += (u32)(far_load(&S.hist[(pass - 1) & 1][slot / 2], lane) >> (slot & 1) * 32);
        __syncthreads();
        before = __reduce_add_sync(ALL, before);
        for (int base = begin; base < end; base += 32) {
            int i = base + lane;
            bool equal = i < end && data[i] == edge.least;
            u32 all = __ballot_sync(ALL, equal), place = before + __popc(all & ((1u << lane) - 1));
            if (equal && place * edge.unit >= edge.need) data[i] = 0;  // below any edge
            before += __popc(all);
        }
    }

    // Key of the last that stays of the `wanted` largest; the first digit has been counted.
    __device__ u32 largest(u64 wanted) {
        Edge edge{0, false, wanted, 1};
        for (int up = 32, shift = 21;; up = shift, shift = shift > 10 ? 10 : 0) {
            if (up < 32) count(edge.least, up, shift, shift ? 2047 : 1023);
            merge();
            u32* merged = (u32*)S.merged;
            edge.need = find(merged[2 * t], merged[2 * t + 1], edge.need, 0, 0);
            edge.least |= S.digit << shift;
            edge.split = S.inside > edge.need;
            if (!edge.split || shift == 0) break;
        }
        if (edge.split) part(edge, S.digit);
        return edge.least;
    }

    // Bits of the least weight that stays of the likeliest whose mass reaches `share`; the first digit has been
    // weighed.
    __device__ u32 likeliest(double share) {
        Edge edge{0, false, 0, 0};
        for (int shift = 20;; shift -= 10) {
            if (shift == 10) {
#pragma unroll 4
                for (int i = begin + lane; i < end; i += 32) {
                    u32 weight = data[i];
                    if (((weight ^ edge.least) >> 20) == 0) weigh(weight >> 10 & 1023, mass_of(weight, bits).part);
                }
            }
            if (shift == 0) count(edge.least, 10, 0, 1023);
            merge();
            u32* merged = (u32*)S.merged;
            u32 least = edge.least | (u32)t << shift;
            u64 held = shift ? (((u64)merged[HALF + t] << 12) + merged[t]) << shift_of(least, bits)
                             : merged[t] * mass_of(least, bits).whole();
            u64 rest = 0;
            if (shift == 20) {
                for (int q = 0; q < 4; ++q) rest += (u64)merged[REST + q] << 16 * q;
                held = t < REST ? held : 0;
            }
            edge.need = find(0, held, edge.need, shift == 20 ? share : 0, rest);
            edge.least |= S.digit / 2 << shift;
            edge.unit = mass_of(edge.least, bits).whole();
            if (shift == 0 || S.inside < 2 * edge.unit) {  // only one is there: it stays
                edge.split = shift == 0 && S.inside >= edge.need + edge.unit;
                break;
            }
        }
        if (edge.split) part(edge, S.digit / 2);
        return edge.least;
    }
};

__device__ __forceinline__ u64 warp_sum(u64 v) {
#pragma unroll
    for (int d = 16; d; d /= 2) v += __shfl_xor_sync(ALL, v, d);
    return v;
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    soliton_law(float* weights, i64* masses, i64* total, const float* logits, const float* temperature,
                const i64* top_k, const float* top_p, const float* min_p, const i64* live, int vocab, int stride,
                int parts, int bits) {
    launch_next();
    Shared& S = *(Shared*)memory;
    u32* data = (u32*)(memory + SOLITON_FIXED);
    int t = threadIdx.x, lane = t % 32, warp = t / 32, row = blockIdx.x / CLUSTER;
    u32 rank = cluster_rank();
    S.hist[0][t] = 0;
    if (t < PARTS) S.masses[t] = 0;
    if (t == 0) S.top = S.digit = 0, S.inside = S.above = 0;
    __syncthreads();
    cluster_arrive(false);
    wait_for_previous();
    i64 rows = load_whole(live), wanted = load_whole(top_k);
    float heat = load_float(temperature), share = load_float(top_p), floor = load_float(min_p);
    cluster_wait();  // the other blocks are there
    if (row >= rows) return;
    bool by_count = wanted > 0 && wanted < vocab, by_mass = share < 1.0f;

    int first = (int)rank * parts * CHUNK, span = parts * 32, here = min_(max_(vocab - first, 0), parts * CHUNK);
    int begin = min_(warp * span, here), end = min_(begin + span, here);  // a warp's elements lie in a row: ties
    const float* from = logits + (i64)row * stride + first;
#pragma unroll 4
    for (int i = begin + lane; i < end; i += 32) copy_in(data + i, from + i);
    copies_done();  // what this thread has asked for, and it looks at nothing else
    u32 top = 0;
#pragma unroll 2
    for (int i = begin + lane; i < end; i += 32) {
        u32 key = key_of(__uint_as_float(data[i]) / heat);
        data[i] = key;
        top = key > top ? key : top;
        if (by_count) atomicAdd((u32*)S.hist[0] + (key >> 21), 1u);
    }
    top = __reduce_max_sync(ALL, top);
    if (lane == 0) atomicMax(&S.top, top);
    __syncthreads();
    if (t < CLUSTER) far_store(&S.tops[rank], t, S.top);

    Search search{S, data, t, lane, warp, begin, end, bits, rank, 0};
    u32 least = 0;
    if (by_count) least = search.largest(wanted);
    else {
        cluster_arrive(warp == 0);
        cluster_wait();
    }
    for (int b = 0; b < CLUSTER; ++b) top = top > (u32)S.tops[b] ? top : (u32)S.tops[b];
    float best = value_of(top);

    // The likeliest weighs 1. All weights below a V-th of (1 - top_p) / 4 are together less than what top-p may leave
    // out, so its edge is not among them: they go into the total only. From `small` on whole bins are kept apart.
    u32 small = __float_as_uint((1.0f - share) * __uint_as_float((u32)(127 + bits - 64) << 23)) & 0xfff00000u;
    u64 rest = 0;
#pragma unroll 2
    for (int i = begin + lane; i < end; i += 32) {
        u32 key = data[i];
        // no more than 1 and no NaN, also of a row that holds NaN
        u32 weight = key >= least ? __float_as_uint(fminf(expf(value_of(key) - best), 1.0f)) : 0;
        data[i] = weight;
        if (by_mass && weight > 0) {
            Mass mass = mass_of(weight, bits);
            if (weight >= small) search.weigh(weight >> 20, mass.part);
            else rest += mass.whole();
        }
    }
    least = 0;
    if (by_mass) {
        rest = warp_sum(rest);
        if (lane < 4) atomicAdd(search.hist() + REST + lane, (u32)(rest >> 16 * lane) & 0xffffu);
        least = search.likeliest(share);
    }

    float* to = weights + (i64)row * vocab + first;
    for (int base = begin; base < end; base = (base / CHUNK + 1) * CHUNK) {
        int stop = min_(end, (base / CHUNK + 1) * CHUNK);
        u64 held = 0;
#pragma unroll 2
        for (int i = base + lane; i < stop; i += 32) {
            u32 weight = data[i];
            weight = weight >= least && __uint_as_float(weight) >= floor ? weight : 0;
            to[i] = __uint_as_float(weight);
            if (weight > 0) held += mass_of(weight, bits).whole();
        }
        held = warp_sum(held);
        if (lane == 0) atomicAdd(&S.masses[base / CHUNK], held);
    }
    __syncthreads();
    if (warp == 0) {
        int count = (vocab + CHUNK - 1) / CHUNK;
        u64 held = 0;
#pragma unroll 1
        for (int q = lane; q < parts; q += 32) {
            int part = (int)rank * parts + q;
            held += S.masses[q];
            if (part < count) masses[(i64)row * count + part] = (i64)S.masses[q];
        }
        held = warp_sum(held);
        if (lane == 0) far_store(&S.whole[rank], 0, held);
    }
    cluster_arrive(warp == 0);
    cluster_wait();  // also: no block goes while another may look at it
    if (rank == 0 && t == 0) {
        u64 sum = 0;
        for (int b = 0; b < CLUSTER; ++b) sum += S.whole[b];
        total[row] = (i64)sum;
    }
}
