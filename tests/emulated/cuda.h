// Enough of CUDA to run law.cu on a CPU: every thread of a cluster is a fiber, a barrier or an exchange within a warp
// is a place where fibers wait for each other. One cluster at a time. Included in front of the source.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

using std::ceil;
using std::fminf;

#define SOLITON_EMULATED 1
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)

struct Place {
    int x;
};
static Place threadIdx, blockIdx;

namespace emulated {
constexpr int BLOCKS = 8, THREADS = 1024, LANES = 32, STACK = 32 * 1024, MEMORY = 227 * 1024;

struct Meeting {
    int expected, arrived = 0;
    uint64_t turn = 0;
    uint64_t values[LANES];
};
struct Fiber {
    ucontext_t context;
    int block, thread;
    Meeting* waits = nullptr;
    uint64_t turn = 0;
    uint64_t arrival = 0;  // of the cluster's barrier
    bool done = false;
};

static std::vector<Fiber> fibers;
static std::vector<Meeting> warps, blocks;
static Meeting cluster;
static std::vector<unsigned char> memory, stacks;
static ucontext_t home;
static Fiber* now;
static int row;
static void (*body)();

inline void wait(Meeting& m, uint64_t turn) {
    while (m.turn == turn) {
        now->waits = &m, now->turn = turn;
        swapcontext(&now->context, &home);
    }
}
inline uint64_t arrive(Meeting& m) {
    uint64_t turn = m.turn;
    if (++m.arrived == m.expected) m.arrived = 0, ++m.turn;
    return turn;
}
inline void meet(Meeting& m) { wait(m, arrive(m)); }
inline Meeting& warp() { return warps[(now->block * THREADS + now->thread) / LANES]; }
inline int lane() { return now->thread % LANES; }

template <class T>
void exchange(T value, T (&all)[LANES]) {
    Meeting& m = warp();
    memcpy(&m.values[lane()], &value, sizeof(T));
    meet(m);
    for (int i = 0; i < LANES; ++i) memcpy(&all[i], &m.values[i], sizeof(T));
    meet(m);  // before anybody writes again
}

inline void* far(const void* p, uint32_t block) {
    auto at = (unsigned char*)p - memory.data();
    if (at < 0 || at / MEMORY != now->block) abort();
    return memory.data() + at % MEMORY + (size_t)block * MEMORY;
}
inline void enter() {
    body();
    now->done = true;
    swapcontext(&now->context, &home);
}
inline void run(int which, void (*what)()) {
    row = which, body = what;
    int count = BLOCKS * THREADS;
    memory.assign((size_t)BLOCKS * MEMORY, 0xa5);
    stacks.resize((size_t)count * STACK);
    fibers.assign(count, Fiber{});
    warps.assign(count / LANES, Meeting{LANES});
    blocks.assign(BLOCKS, Meeting{THREADS});
    cluster = Meeting{count};
    for (int i = 0; i < count; ++i) {
        Fiber& f = fibers[i];
        f.block = i / THREADS, f.thread = i % THREADS;
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = stacks.data() + (size_t)i * STACK;
        f.context.uc_stack.ss_size = STACK;
        f.context.uc_link = nullptr;
        makecontext(&f.context, enter, 0);
    }
    for (int left = count; left;) {
        bool moved = false;
        for (Fiber& f : fibers) {
            if (f.done || (f.waits && f.waits->turn == f.turn)) continue;
            f.waits = nullptr, now = &f, moved = true;
            threadIdx.x = f.thread, blockIdx.x = row * BLOCKS + f.block;
            swapcontext(&home, &f.context);
            left -= f.done;
        }
        if (!moved) abort();  // all wait for each other
    }
}
}  // namespace emulated

#define memory (emulated::memory.data() + (size_t)emulated::now->block * emulated::MEMORY)

inline float __uint_as_float(uint32_t v) {
    float f;
    memcpy(&f, &v, 4);
    return f;
}
inline uint32_t __float_as_uint(float f) {
    uint32_t v;
    memcpy(&v, &f, 4);
    return v;
}
inline int __popc(uint32_t v) { return __builtin_popcount(v); }
template <class T>
T __shfl_xor_sync(uint32_t, T v, int d) {
    T all[32];
    emulated::exchange(v, all);
    return all[emulated::lane() ^ d];
}
template <class T>
T __shfl_down_sync(uint32_t, T v, int d) {
    T all[32];
    emulated::exchange(v, all);
    return all[std::min(emulated::lane() + d, 31)];
}
inline uint32_t __ballot_sync(uint32_t, bool v) {
    bool all[32];
    emulated::exchange(v, all);
    uint32_t out = 0;
    for (int i = 0; i < 32; ++i) out |= (uint32_t)all[i] << i;
    return out;
}
inline uint32_t __reduce_add_sync(uint32_t, uint32_t v) {
    uint32_t all[32], out = 0;
    emulated::exchange(v, all);
    for (uint32_t other : all) out += other;
    return out;
}
inline uint32_t __reduce_max_sync(uint32_t, uint32_t v) {
    uint32_t all[32], out = 0;
    emulated::exchange(v, all);
    for (uint32_t other : all) out = std::max(out, other);
    return out;
}
template <class T>
void atomicAdd(T* to, T v) { *to += v; }
inline void atomicMax(uint32_t* to, uint32_t v) { *to = std::max(*to, v); }
inline void __syncthreads() { emulated::meet(emulated::blocks[emulated::now->block]); }

inline unsigned long long far_load(const unsigned long long* p, uint32_t block) {
    return *(unsigned long long*)emulated::far(p, block);
}
inline void far_store(unsigned long long* p, uint32_t block, unsigned long long v) {
    *(unsigned long long*)emulated::far(p, block) = v;
}
inline uint32_t cluster_rank() { return emulated::now->block; }
inline void cluster_arrive(bool) { emulated::now->arrival = emulated::arrive(emulated::cluster); }
inline void cluster_wait() { emulated::wait(emulated::cluster, emulated::now->arrival); }
inline void launch_next() {}
inline void wait_for_previous() {}
inline float load_float(const float* p) { return *p; }
inline long long load_whole(const long long* p) { return *p; }
inline void copy_in(uint32_t* to, const float* from) { memcpy(to, from, 4); }
inline void copies_done() {}
