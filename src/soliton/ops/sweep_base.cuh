// Words of the persistent kernel in sweep.cu: the instruction, what a block shares, the grid's barrier.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#if SOLITON_EMULATED
#include <chip.h>
#else
#include "sweep_chip.cuh"
#endif

constexpr int HALVES = SOLITON_HALVES;  // most rows over 8
constexpr int ROWS = HALVES * 8, TILES = (HALVES + 1) / 2;
constexpr int WARPS = 8, BLOCK = 320, PARTS = BLOCK / 32, HEAD = 128;
constexpr int UNITS = 16;  // sums of 8 weight rows and a warp's block that a piece leaves at most
constexpr int THREADS = (WARPS + 4) * 32;  // two warpgroups that multiply, one for the other roles
constexpr int MULTIPLIERS = WARPS * 32;
constexpr int BUFFERS = HALVES <= 2 ? 3 : 2;  // of partial sums
constexpr int QUEUE = 32;   // pieces described ahead; no warp that reads them is so far behind
constexpr int MOST = 16;    // pieces in the ring
constexpr int TURNS = 840;  // what a piece's barriers count to: the warps that had a part in it share it evenly
constexpr int GROUPS = 6;       // most groups that one block sums over several terms
constexpr int TOPK = 8, CHOSEN = ROWS * TOPK, LIST = 32;
constexpr int TILE = 32, TAPS = 4, CHUNK = 8, DELTA_WARPS = WARPS;  // of a recurrence: values of an item, rows at once

enum Kind { PRODUCT, ROUTE, LOAD_ROUTE, UP, DOWN, KDA, PREFETCH };
enum Prologue { PLAIN, RMS, SCALED, KEEP };
enum Epilogue { STORE, STORE_FLOAT, ADD, SWIGLU, STORE_TAGGED };

// How a term of `width` columns lies among the warps: blocks of `size` columns, teams of so many warps, and at most `per`
// groups of 8 weight rows in a piece. Reckoned by the host: divisions are slow.
struct Shape {
    short width, size;
    u8 blocks, teams, per, spare;
};

struct Instr {
    const u16* w;       // [N, K], or [E, N, K]
    const u16* x;       // activations, bf16
    void* out;
    const void* norm;  // [K] bf16
    const u16* gate;
    const u16* w2;      // DOWN: the shared expert's [N, K2], and its activations
    const u16* x2;
    i64* ids;        // [rows, topk]
    float* weights;  // [rows, topk]
    const float* bias;
    const float* logits;  // ROUTE: [rows, x_stride]; tagged: words of a float and its launch's sign, as STORE_TAGGED leaves them
    float* stats;         // SCALED: sums of squares [rows, K / 128, 4]
    const u16* g;
    const u16* up_f;
    const u16* up_g;
    int kind, prologue, epilogue, sync;
    int n, k, k2, x_stride, x2_stride, out_stride, gate_stride, slot_stride;
    int experts, topk, groups, top_groups, renormalize, start, terms, split;
    Shape shape, last;  // of every term, of the last one
    int g_stride, tagged;
    float eps, scaling, limit, spare2;
    // KDA reads them otherwise: x projections, gate forget rows, g output gates, x2 beta rows, w2 window (written too,
    // x2_stride a row), w convolution (float), norm a, bias dt_bias, weights states (written too, slot_stride a slot), ids
    // committed slot, logits the output norm [128], stats as SCALED reads them; up_f, up_g: weights [n * 128, 128] that make
    // forget rows and gates of `gate` and `g`, or null; n heads, k convolved channels, experts slots, groups 1 for the
    // bounded law, scaling its bound, limit the q scale.
};

struct Delta {  // rows of a chunk of one KDA item
    float q[CHUNK][HEAD], k[CHUNK][HEAD], d[CHUNK][HEAD];  // d: decays; forget rows before
    float v[CHUNK][TILE], open[CHUNK][TILE];               // open: what the output is multiplied by; gates before
    float beta[CHUNK];
};

// All that the blocks have in common outside the list.
struct Grid {
    u32 *counter, *epoch;  // epoch: grows by LIST with every launch
    u64* carry;  // [blocks, ROWS, 8]: a group's sum so far, for the block that goes on with it; upper word 1 if it is there
    i64* trace;
};

// What the copier says of a piece before its weights arrive: `parts` times `span` groups of one term, `span` for a team; or,
// where sums are over several terms, the same `span` groups of `parts` terms, a term for a team.
struct Piece {
    int group, offset;       // the first group; where its weights lie in the ring
    short term, kept;        // of a sum, or which chosen expert (UP); where the first group's sum over terms is kept
    u8 parts, span, turn, flags;  // turn: the first part's team
    int share, spare[3];          // of TURNS: a warp's
};
enum Flag { FINAL = 1, LAST = 2, SEVERAL = 4, ADOPTS = 8, HANDS = 16 };

// A word of shared memory that one warp counts up and others wait for, with `passed` alone: what is read behind a plain or
// volatile read of it may be read before it.
struct Count {
    __device__ __forceinline__ void set(int to) { *(volatile int*)&word = to; }
    int word;
};

struct Shared {
    Grid grid;
    u64 full[QUEUE], empty[QUEUE], ready[BUFFERS], tables;
    u32 phase;  // of the grid's barrier; thread 0's
    Piece queue[QUEUE];
    int ends[LIST];  // pieces up to the end of each instruction
    int current;     // the committed slot of the recurrences' states
    __align__(16) Instr list[LIST];
    __align__(16) float partial[BUFFERS][UNITS][ROWS][8];  // in a recurrence: sums of its warps
    float total[GROUPS][ROWS][8];
    float stat[WARPS][ROWS], scale[ROWS];
    union {
        __align__(16) Delta delta;
        uint4 norm[WARPS][BLOCK / 8];  // of each warp: its columns of the norm's weights
    };
    float weight[ROWS][TOPK];
    int id[ROWS][TOPK];
    u32 bits[32];
    u16 expert[CHOSEN];
    u8 slot[CHOSEN][ROWS];  // of an expert in a row's choice; 255: not chosen
    u8 who[CHOSEN][ROWS], many[CHOSEN];  // the rows that chose an expert, ascending, and how many; with several rows
    int chosen;
    Count landed;         // instructions up to the last recurrence whose input is there
    Count issued, ended;  // pieces that are in the queue, instructions whose pieces all are
    Count reduced;        // pieces whose partial sums have been read
};
constexpr int READ = 2 * TILE + 4;  // floats that a warp of a recurrence leaves for a row
static_assert(BUFFERS * UNITS * ROWS * 8 >= 2 * DELTA_WARPS * READ, "sums of a recurrence");

// Times of one launch, for benchmarks/sweep_trace.py: [block][LIST][MARKS] clock cycles of the block's multiprocessor.
#if SOLITON_TRACE
constexpr int MARKS = 8;
#define MARK(trace, i, n) \
    if (threadIdx.x % 32 == 0 && (trace) != nullptr) (trace)[((i64)blockIdx.x * LIST + (i)) * MARKS + (n)] = clock64()
// The multiprocessor of a block: where a last instruction's last time would be.
#define WHERE(trace) \
    if (threadIdx.x == 0 && (trace) != nullptr) (trace)[((i64)blockIdx.x * LIST + LIST - 1) * MARKS + MARKS - 1] = processor()
#else
#define MARK(trace, i, n)
#define WHERE(trace)
#endif
// With 2 also those of each piece, behind them: [block][LIST][PIECES][STEPS], by two multipliers of 5 and the reducer.
constexpr int PIECES = 32, STEPS = 12;
#if SOLITON_TRACE > 1
#define STEP(trace, i, piece, n) \
    if (threadIdx.x % 32 == 0 && (trace) != nullptr && (piece) < PIECES) \
    (trace)[(i64)gridDim.x * LIST * MARKS + (((i64)blockIdx.x * LIST + (i)) * PIECES + (piece)) * STEPS + (n)] = clock64()
#else
#define STEP(trace, i, piece, n) (void)(piece)
#endif

__device__ __forceinline__ int min_(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ float lower(u32 v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float upper(u32 v) { return __uint_as_float(v & 0xffff0000u); }
__device__ __forceinline__ u16 half(float v) { return (u16)(pair(v, 0.f) & 0xffff); }
__device__ __forceinline__ float wide(u16 v) { return __uint_as_float((u32)v << 16); }
__device__ __forceinline__ float sigmoid(float v) { return __fdividef(1.0f, 1.0f + __expf(-v)); }

// A float on its way to another block, in one word with the sign that it is there: no fence, no second round trip.
__device__ __forceinline__ void hand(u64* to, float value) {
    relaxed(to, 1ull << 32 | __float_as_uint(value));
}
__device__ __forceinline__ float adopt(u64* from) {  // and make room for the next; a barrier lies between
    u64 word;
    while ((word = relaxed(from)) >> 32 == 0) spin();
    relaxed(from, 0);
    return __uint_as_float((u32)word);
}
// Waits until it has passed `count`.
__device__ __forceinline__ void passed(const Count& c, int count) {
    while (acquire(c.word) <= count) spin();
}
// Named barriers: 1 the multipliers, 2 with the reducer.
__device__ __forceinline__ void multipliers_sync() { meet(1, MULTIPLIERS); }
__device__ __forceinline__ void both_sync() { meet(2, MULTIPLIERS + 32); }
// The grid's barrier, by the multipliers: first all that this block wrote before is out, later all that others wrote is
// there. Between them belongs whatever does not depend on the others. The counter's upper bit turns when all blocks are
// there: one of them adds what the others lack.
__device__ __forceinline__ void grid_arrive(Shared& S, int i) {
    both_sync();
    if (threadIdx.x < 32) MARK(S.grid.trace, i, 1);
    if (threadIdx.x == 0) {
        u32 part = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1;
        count_up(S.grid.counter, part);
    }
}
__device__ __forceinline__ void grid_wait(Shared& S) {
    if (threadIdx.x == 0) {
        while (acquire(S.grid.counter) >> 31 == S.phase) spin();
        S.phase ^= 1;
    }
    multipliers_sync();
}

// How the warps share pieces of some shape.
struct Lie {
    int blocks, teams, team, block, first, parts;  // first column of this warp's block, its 32-column parts

    __device__ __forceinline__ void set(const Shape& s, int warp) {
        blocks = s.blocks, teams = s.teams;
        team = 0, block = warp;
        while (block >= blocks) block -= blocks, ++team;
        first = block * s.size;
        parts = min_(s.size, s.width - first) / 32;
    }
};
