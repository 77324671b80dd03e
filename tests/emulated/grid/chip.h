// Enough of CUDA to run sweep.cu on a CPU: a grid of blocks, every thread a fiber that runs until it has to wait for
// others; copies into shared memory land some time later, in any order. One launch at a time.

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <unordered_map>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

struct Place { unsigned x; };
static Place threadIdx, blockIdx, blockDim, gridDim;

namespace emulated {
constexpr int LANES = 32, STACK = 64 * 1024, MEMORY = 227 * 1024;

struct Meeting {  // of threads; the last one opens it
    int arrived = 0;
    uint64_t turn = 0;
};
struct Barrier {  // in shared memory
    int64_t count = 0, pending = 0, bytes = 0;
    uint64_t phase = 0;
};
struct Warp {
    Meeting meeting;
    unsigned char values[2][LANES][64];
    int side[LANES];
};
struct Fiber {
    ucontext_t first;
    jmp_buf state;
    bool begun = false, done = false, spins = false;
    Meeting* waits = nullptr;
    uint64_t turn = 0;
    unsigned block, thread;
};
struct Copy { u8* to; const u8* from; size_t bytes; Barrier* barrier; };

static std::vector<Fiber> fibers;
static std::vector<Warp> warps;
static std::vector<std::unordered_map<int, Meeting>> named;
static std::vector<unsigned char> memory, stacks;
static std::unordered_map<const void*, Barrier> barriers;
static std::vector<Copy> copies;
static std::mt19937 chance;
static jmp_buf home;
static Fiber* now;
static void (*body)();

inline void leave() {
    if (!_setjmp(now->state)) _longjmp(home, 1);
}
inline void wait(Meeting& m, uint64_t turn) {
    while (m.turn == turn) now->waits = &m, now->turn = turn, leave();
    now->waits = nullptr;
}
inline void meet(Meeting& m, int expected) {
    uint64_t turn = m.turn;
    if (++m.arrived == expected) m.arrived = 0, ++m.turn;
    else wait(m, turn);
}
inline int lane() { return (int)(now->thread % LANES); }
inline Warp& warp() { return warps[now->block * (blockDim.x / LANES) + now->thread / LANES]; }
template <class T>
const unsigned char (*exchange(const T& value))[64] {  // what every lane gave; good until the next but one
    Warp& w = warp();
    int side = w.side[lane()] ^= 1;
    memcpy(w.values[side][lane()], &value, sizeof(T));
    meet(w.meeting, LANES);
    return w.values[side];
}
inline unsigned char* block() { return memory.data() + (size_t)now->block * MEMORY; }
inline void complete(Barrier& b) {
    if (b.pending == 0 && b.bytes == 0) ++b.phase, b.pending = b.count;
}
inline void entry() {
    body();
    now->done = true;
    _longjmp(home, 1);
}

// Runs all threads of a launch; false when nobody can go on.
inline bool run(int grid, int threads, unsigned seed) {
    gridDim.x = grid, blockDim.x = threads;
    chance.seed(seed);
    memory.assign((size_t)grid * MEMORY, 0xff);
    stacks.resize((size_t)grid * threads * STACK);
    fibers.assign((size_t)grid * threads, Fiber());
    warps.assign((size_t)grid * threads / LANES, Warp());
    for (Warp& w : warps) memset(w.side, 0, sizeof(w.side));
    named.assign(grid, {});
    barriers.clear(), copies.clear();
    std::vector<unsigned> order(fibers.size());
    for (unsigned i = 0; i < order.size(); ++i) {
        order[i] = i;
        fibers[i].block = i / threads, fibers[i].thread = i % threads;
    }
    size_t left = fibers.size();
    for (int idle = 0; left;) {
        bool moved = false;
        if (chance() % 4 == 0) std::shuffle(order.begin(), order.end(), chance);
        bool all = idle > 0 || chance() % 8 == 0;  // those that only look at a word now and then
        for (unsigned i : order) {
            Fiber& f = fibers[i];
            if (f.done || (f.waits && f.waits->turn == f.turn) || (f.spins && !all)) continue;
            bool span = f.spins;
            f.spins = false;
            now = &f;
            threadIdx.x = f.thread, blockIdx.x = f.block;
            if (!_setjmp(home)) {
                if (f.begun) _longjmp(f.state, 1);
                f.begun = true;
                getcontext(&f.first);
                f.first.uc_stack.ss_sp = stacks.data() + (size_t)i * STACK;
                f.first.uc_stack.ss_size = STACK;
                f.first.uc_link = nullptr;
                makecontext(&f.first, entry, 0);
                setcontext(&f.first);
            }
            left -= f.done;
            moved = moved || f.done || !f.spins || !span;
        }
        for (size_t i = 0; i < copies.size();)
            if (chance() % 3 == 0) {
                Copy c = copies[i];
                memcpy(c.to, c.from, c.bytes);
                c.barrier->bytes -= (int64_t)c.bytes;
                complete(*c.barrier);
                copies[i] = copies.back(), copies.pop_back();
                moved = true;
            } else
                ++i;
        idle = moved || !copies.empty() ? 0 : idle + 1;
        if (idle > 1000) return false;
    }
    return true;
}
}  // namespace emulated

inline u8* block_memory() { return emulated::block(); }
inline u32 dynamic_shared() { return emulated::MEMORY; }
inline u32 smem(const void* p) { return (u32)((const unsigned char*)p - emulated::block()); }
inline float __uint_as_float(u32 v) { float f; memcpy(&f, &v, 4); return f; }
inline u32 __float_as_uint(float v) { u32 u; memcpy(&u, &v, 4); return u; }
inline u32 rounded(float v) {  // to bf16, to nearest even
    u32 u = __float_as_uint(v);
    if (v != v) return 0x7fff;
    return (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
inline u32 pair(float low, float high) { return rounded(low) | rounded(high) << 16; }
inline float __expf(float v) { return expf(v); }
inline float __logf(float v) { return logf(v); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float v) { return 1.0f / sqrtf(v); }
using std::fmaxf;
using std::fminf;
inline i64 min(i64 a, i64 b) { return a < b ? a : b; }
inline int __popc(u32 v) { return __builtin_popcount(v); }
inline int __ffs(u32 v) { return v ? __builtin_ctz(v) + 1 : 0; }
template <class T> T __ldg(const T* p) { T v; memcpy(&v, p, sizeof v); return v; }  // a view may lie anywhere here
inline void __threadfence_block() {}
inline void __trap() { fprintf(stderr, "too little shared memory\n"), abort(); }
inline u32 atomicOr(u32* p, u32 v) { u32 old = *p; *p |= v; return old; }

inline void __syncwarp() { emulated::exchange(0); }
inline void __syncthreads() { emulated::meet(emulated::named[emulated::now->block][0], (int)blockDim.x); }
template <class T> T given(const unsigned char (*all)[64], int i) { T v; memcpy(&v, all[i], sizeof(T)); return v; }
template <class T> T __shfl_sync(u32, T v, int from) { return given<T>(emulated::exchange(v), from & 31); }
template <class T> T __shfl_xor_sync(u32, T v, int by) { return given<T>(emulated::exchange(v), emulated::lane() ^ by); }
template <class T> T __shfl_down_sync(u32, T v, int by) {
    int from = emulated::lane() + by;
    auto all = emulated::exchange(v);
    return given<T>(all, from < 32 ? from : emulated::lane());
}
template <class T> T __shfl_up_sync(u32, T v, int by) {
    int from = emulated::lane() - by;
    auto all = emulated::exchange(v);
    return given<T>(all, from >= 0 ? from : emulated::lane());
}
inline u32 __reduce_max_sync(u32, u32 v) {
    auto all = emulated::exchange(v);
    for (int i = 0; i < 32; ++i) v = std::max(v, given<u32>(all, i));
    return v;
}
inline u32 __reduce_min_sync(u32, u32 v) {
    auto all = emulated::exchange(v);
    for (int i = 0; i < 32; ++i) v = std::min(v, given<u32>(all, i));
    return v;
}

inline void load16(u32* to, const void* from) { memcpy(to, from, 16); }
inline float4 load_floats(const float* from) { float4 v; memcpy(&v, from, 16); return v; }
inline uint2 load8(const u16* from) { uint2 v; memcpy(&v, from, 8); return v; }
inline float load_float(const float* from) { return *from; }
inline u16 load_half(const u16* from) { return *from; }
inline i64 load_whole(const i64* from) { return *from; }

inline void mbar_init(u64* bar, u32 count) { emulated::barriers[bar] = {count, count, 0, 0}; }
inline void mbar_arrive(u64* bar, u32 count) {
    emulated::Barrier& b = emulated::barriers[bar];
    b.pending -= count;
    if (b.pending < 0) fprintf(stderr, "more arrivals than a barrier counts\n"), abort();
    emulated::complete(b);
}
inline void mbar_expect(u64* bar, u32 bytes) {
    emulated::barriers[bar].bytes += bytes;
    mbar_arrive(bar, 1);
}
inline void mbar_wait(u64* bar, u32 parity) {
    emulated::Barrier& b = emulated::barriers[bar];
    while ((b.phase & 1) == parity) emulated::now->spins = true, emulated::leave();
}
inline void copy_in(u32 to, const void* from, u32 bytes, u64* bar) {
    emulated::copies.push_back({emulated::block() + to, (const u8*)from, bytes, &emulated::barriers[bar]});
}
inline void prefetch(const void* from, u32 bytes) {
    volatile u8 sink = ((const u8*)from)[0] ^ ((const u8*)from)[bytes - 1];
    (void)sink;
}
inline void spin() { emulated::now->spins = true, emulated::leave(); }
inline int acquire(const int& word) { return *(const volatile int*)&word; }
inline u64 relaxed(const u64* from) { return *from; }
inline void relaxed(u64* to, u64 word) { *to = word; }
inline u32 relaxed(const u32* from) { return *from; }
inline u32 acquire(const u32* from) { return *from; }
inline void count_up(u32* to, u32 by) { *to += by; }
inline void meet(int number, int threads) { emulated::meet(emulated::named[emulated::now->block][number], threads); }
inline float apart(u32 v, int half) { return __uint_as_float(half ? v & 0xffff0000u : v << 16); }
inline void add(u16* to, u32 values) {
    for (int i = 0; i < 2; ++i) to[i] = (u16)rounded(apart(to[i], 0) + apart(values, i));
}
inline void times(u32& v, u32 by) { v = pair(apart(v, 0) * apart(by, 0), apart(v, 1) * apart(by, 1)); }
inline void product(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    struct Operands { u32 a[4], b[2]; } mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
    auto all = emulated::exchange(mine);
    int lane = emulated::lane();
    for (int i = 0; i < 4; ++i) {
        int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        float sum = 0.f;
        for (int q = 0; q < 4; ++q) {  // lanes that hold columns 2q, 2q + 1 and 2q + 8, 2q + 9
            Operands left = given<Operands>(all, row % 8 * 4 + q), right = given<Operands>(all, column * 4 + q);
            for (int h = 0; h < 2; ++h)
                for (int e = 0; e < 2; ++e) sum += apart(left.a[h * 2 + row / 8], e) * apart(right.b[h], e);
        }
        c[i] += sum;
    }
}
inline void barriers_made() {}
inline void launch_next() {}
inline void wait_for_previous() {}
inline void few_registers() {}
inline void many_registers() {}
