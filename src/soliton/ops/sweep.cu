// A run of skinny products as one persistent kernel: weights stream through shared memory without a pause while the
// activations pass from product to product through grid barriers. See sweep.py for the instruction list.
//
// One block a multiprocessor: WARPS multiplying warps, one warp that adds up and stores, one that copies. Weights are
// [N, K] bf16, K contiguous. The copier brings pieces (G groups of 8 weight rows, at most SLAB columns) into a ring of
// slots, ahead of everything that waits for activations, because weights never depend on them (routed experts excepted).
// A multiplier owns one 256-column block of K: its part of the activations lives in registers as the A operand of
// m16n8k16 products, the weights are the B operand. Where K is short the multipliers form teams that take pieces in turn.
// All roles walk the same pieces in the same order. What limits this kernel besides memory is instructions: how many are
// issued for each weight, and how much code is fetched cold between two barriers.
//
// Order of sums, the same for every number of rows, grid and list: within a 256-column block the tensor core's, over
// 16 products of 16 columns; blocks ascending, one after the other, in float32; slabs ascending; experts ascending by
// index, the shared expert last.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int TILES = SOLITON_TILES;  // most rows over 16
constexpr int SLOTS = SOLITON_SLOTS;
constexpr int WARPS = 10, BLOCK = 256, PARTS = BLOCK / 32, HEAD = 128, SLAB = WARPS * BLOCK;
constexpr int MULTIPLIERS = WARPS * 32;
constexpr int BUFFERS = 2;  // of partial sums; fewer than SLOTS
constexpr int AHEAD = 2;    // rows of activations on their way at once
constexpr int ROWS = TILES * 16;
constexpr int SLOT = 8 * SLAB * 2;
constexpr int GROUPS = 4;  // most groups that one block sums over several terms
constexpr int TOPK = 8, CHOSEN = ROWS * TOPK, LIST = 16;

enum Kind { PRODUCT, ROUTE, LOAD_ROUTE, UP, DOWN, KDA };
enum Prologue { PLAIN, RMS, GATED, KEEP };
enum Epilogue { STORE, STORE_FLOAT, ADD, SWIGLU };

struct Instr {
    const u16* w;      // [N, K], or [E, N, K]
    const u16* x;      // activations, bf16
    void* out;
    const float* norm;  // [K], or [HEAD] for GATED
    const u16* gate;    // GATED: as x
    const u16* w2;      // DOWN: the shared expert's [N, K2], and its activations
    const u16* x2;
    i64* ids;        // [rows, topk]
    float* weights;  // [rows, topk]
    const float* bias;
    const float* logits;  // ROUTE: [rows, x_stride]
    int kind, prologue, epilogue, sync;
    int n, k, k2, x_stride, x2_stride, out_stride, gate_stride, slot_stride;
    int experts, topk, groups, top_groups, renormalize, start, spare0, spare1;
    float eps, scaling, limit, spare2;
    // KDA reads them otherwise: x projections, gate forget rows, x2 beta rows, w2 window (written too, x2_stride a row),
    // w convolution (float), norm a, bias dt_bias, weights states (written too, slot_stride a slot), ids committed slot;
    // n heads, k convolved channels, experts slots, groups 1 for the bounded law, scaling its bound, limit the q scale.
};

struct Shared {
    u64 full[SLOTS], empty[SLOTS], ready[BUFFERS], tables;
    Instr list[LIST];
    float partial[BUFFERS][WARPS][ROWS][8];
    float total[GROUPS][ROWS][8];
    float stat[WARPS][ROWS];
    __align__(16) u32 stage[WARPS][BLOCK / 2];
    float weight[ROWS][TOPK];
    int id[ROWS][TOPK];
    u32 bits[32];
    u16 expert[CHOSEN];
    u8 slot[CHOSEN][ROWS];  // of an expert in a row's choice; 255: not chosen
    int chosen;
    volatile int reduced;  // pieces whose partial sums have been read
};

__device__ __forceinline__ u32 smem(const void* p) { return (u32)__cvta_generic_to_shared(p); }
// a == b, in a form that the compiler cannot turn into an indexed store, which would move an array out of registers.
__device__ __forceinline__ bool same(int a, int b) {
    int out;
    asm("{\n.reg .pred p;\nsetp.eq.s32 p, %1, %2;\nselp.s32 %0, 1, 0, p;\n}" : "=r"(out) : "r"(a), "r"(b));
    return out != 0;
}
__device__ __forceinline__ int min_(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ float lower(u32 v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float upper(u32 v) { return __uint_as_float(v & 0xffff0000u); }
__device__ __forceinline__ u32 pair(float low, float high) {
    u32 out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}
__device__ __forceinline__ u16 half(float v) { return (u16)(pair(v, 0.f) & 0xffff); }
__device__ __forceinline__ float wide(u16 v) { return __uint_as_float((u32)v << 16); }
__device__ __forceinline__ float sigmoid(float v) { return __fdividef(1.0f, 1.0f + __expf(-v)); }

// Activations are written by other multiprocessors during the kernel: read them where those writes arrive, in L2.
__device__ __forceinline__ void load16(u32* to, const void* from) {
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "l"(from) : "memory");
}
__device__ __forceinline__ float load_float(const float* from) {
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(from) : "memory");
    return v;
}
__device__ __forceinline__ u16 load_half(const u16* from) {
    u16 v;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(from) : "memory");
    return v;
}
__device__ __forceinline__ i64 load_whole(const i64* from) {
    i64 v;
    asm volatile("ld.global.cg.s64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
    return v;
}

__device__ __forceinline__ void mbar_init(u64* bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem(bar)), "r"(count) : "memory");
}
__device__ __forceinline__ void mbar_arrive(u64* bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem(bar)) : "memory");
}
__device__ __forceinline__ void mbar_expect(u64* bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem(bar)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbar_wait(u64* bar, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, 0x989680;\n@!done bra again;\n}" ::"r"(smem(bar)), "r"(parity)
        : "memory");
}
__device__ __forceinline__ void copy_in(u32 to, const void* from, u32 bytes, u64* bar) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            to), "l"(from), "r"(bytes), "r"(smem(bar)), "l"(0x12F0000000000000ull)  // evict first: read once a step
        : "memory");
}
__device__ __forceinline__ void multipliers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(MULTIPLIERS) : "memory"); }
__device__ __forceinline__ void both_sync() { asm volatile("bar.sync 2, %0;" ::"n"(MULTIPLIERS + 32) : "memory"); }
__device__ __forceinline__ void product(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// How a slab of `width` columns is cut: blocks of 256 columns, groups of 8 weight rows in a slot.
__device__ __forceinline__ int blocks_of(int width) { return (width + BLOCK - 1) / BLOCK; }
__device__ __forceinline__ int groups_of(int width) {
    return min_(WARPS / blocks_of(width), SLOT / (16 * width));
}

struct Range {
    int begin, end;
};
// This block's share of `count` groups, block number `start` first.
__device__ __forceinline__ Range share(int count, int start) {
    int grid = gridDim.x, at = (int)((blockIdx.x + start) % grid);
    return {(int)((i64)count * at / grid), (int)((i64)count * (at + 1) / grid)};
}

struct Term {  // one slab, or one expert
    const u16* w;
    int row, width;  // columns of a weight row, columns taken
};
__device__ __forceinline__ int terms_of(const Instr& I, const Shared& S) {
    if (I.kind == DOWN) return S.chosen + (I.w2 != nullptr);
    return (I.k + SLAB - 1) / SLAB;
}
__device__ __forceinline__ Term term_of(const Instr& I, const Shared& S, int t) {
    if (I.kind == DOWN) {
        if (t == S.chosen) return {I.w2, I.k2, I.k2};
        return {I.w + (i64)S.expert[t] * I.n * I.k, I.k, I.k};
    }
    return {I.w + t * SLAB, I.k, min_(SLAB, I.k - t * SLAB)};
}

struct Piece {
    const u16* w;
    int row, width, count;  // columns of a weight row, columns taken, groups
    int term, group, turn;  // term of a sum, or which chosen expert (UP); first group; whose turn it is, modulo teams
};

// The pieces of this block in order: of every chosen expert's share (UP), or of every term over the block's own groups,
// whose sums stay here.
struct Walk {
    const Instr& I;
    const Shared& S;
    Range own;
    int at, terms, groups, term, turn;

    __device__ Walk(const Instr& I, const Shared& S) : I(I), S(S), term(0), turn(0) {
        groups = I.n / 8;
        terms = I.kind == UP ? S.chosen : terms_of(I, S);
        own = share(I.kind == UP ? terms * groups : groups, I.start);
        at = own.begin;
        if (I.kind == UP) {
            term = at / groups;
            at -= term * groups;
            own.end -= term * groups;
        }
    }
    __device__ __forceinline__ bool next(Piece& p) {
        if (at >= own.end) {
            if (I.kind == UP || own.begin >= own.end || ++term >= terms) return false;
            at = own.begin;
        }
        if (I.kind == UP) {
            if (at >= groups) at -= groups, own.end -= groups, ++term;
            p.w = I.w + ((i64)S.expert[term] * I.n + at * 8) * I.k;
            p.row = p.width = I.k;
            p.count = min_(min_(groups_of(I.k), own.end - at), groups - at);
        } else {
            if (term >= terms) return false;
            Term t = term_of(I, S, term);
            p.w = t.w + (i64)at * 8 * t.row;
            p.row = t.row, p.width = t.width;
            p.count = min_(groups_of(t.width), own.end - at);
        }
        p.term = term;
        p.group = at;
        p.turn = I.kind != UP && terms > 1 ? term : turn++;
        at += p.count;
        return true;
    }
};

// ---- copier --------------------------------------------------------------------------------------------------------

struct Copier {
    Shared& S;
    u8* ring;
    const i64* live;
    int lane, issued;
    u32 parity;
    bool known, frozen;

    __device__ void look() {  // whether the step is frozen, as soon as what came before has finished
        if (known) return;
        asm volatile("griddepcontrol.wait;" ::: "memory");
        known = true;
        frozen = live != nullptr && load_whole(live) <= 0;
    }

    __device__ void push(const Piece& p) {
        if (issued == SLOTS) look();  // the first ring is filled before that
        if (frozen) return;
        int at = issued % SLOTS;
        if (issued >= SLOTS) mbar_wait(&S.empty[at], (issued / SLOTS - 1) & 1);
        if (lane == 0) mbar_expect(&S.full[at], (u32)(p.count * 8 * p.width * 2));
        __syncwarp();
        u32 base = smem(ring + at * SLOT);
        if (p.row == p.width) {  // large copies stream faster
            if (lane == 0) copy_in(base, p.w, p.count * 16 * p.width, &S.full[at]);
        } else
            for (int r = lane; r < p.count * 8; r += 32)
                copy_in(base + r * p.width * 2, p.w + (i64)r * p.row, p.width * 2, &S.full[at]);
        ++issued;
    }

    __device__ void run(int count) {
        bool waiting = false;
        for (int i = 0; i < count && !frozen; ++i) {
            const Instr& I = S.list[i];
            if (I.kind == ROUTE || I.kind == LOAD_ROUTE) {
                waiting = true;
                continue;
            }
            if (I.kind == KDA) continue;
            if (waiting && I.kind != PRODUCT) {
                look();
                if (frozen) break;
                mbar_wait(&S.tables, parity);
                parity ^= 1;
                waiting = false;
            }
            Walk walk(I, S);
            for (Piece p; walk.next(p);) push(p);
        }
        look();
        if (frozen)  // copies in flight must land before the block may end
            for (int i = 0; i < min_(issued, SLOTS); ++i) mbar_wait(&S.full[i], 0);
    }
};

// ---- reducer -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float swiglu(float gate, float rise, float limit) {
    float g = gate / (1.0f + expf(-gate));
    if (limit > 0.f) {
        g = fminf(g, limit);
        rise = fminf(fmaxf(rise, -limit), limit);
    }
    return g * rise;
}

struct Reducer {
    Shared& S;
    int lane, rows, at, taken;
    u32 parity;

    __device__ void piece(const Instr& I, const Piece& p, int terms, int first) {
        mbar_wait(&S.ready[at], parity);
        int blocks = blocks_of(p.width), total = p.count * rows, column = lane & 7;
        int group = 0, row = lane >> 3;  // of this lane's sum
        for (int base = 0; base < total; base += 4, row += 4) {
            while (row >= rows) row -= rows, ++group;
            bool there = group < p.count;
            const float* from = &S.partial[at][there ? group * blocks : 0][row][column];
            float part[WARPS], sum = 0.f;
#pragma unroll
            for (int b = 0; b < WARPS; ++b) part[b] = b < blocks ? from[b * ROWS * 8] : 0.f;
#pragma unroll
            for (int b = 0; b < WARPS; ++b)
                if (b < blocks) sum += part[b];
            int n = (p.group + group) * 8 + column;
            if (I.kind == UP) {
                float rise = __shfl_down_sync(0xffffffffu, sum, 1);
                int slot = S.slot[p.term][row];
                if (there && column % 2 == 0 && slot != 255)
                    ((u16*)I.out)[(i64)row * I.out_stride + slot * I.slot_stride + n / 2] = half(swiglu(sum, rise, I.limit));
                continue;
            }
            if (terms > 1 && there) {
                float* kept = &S.total[p.group - first + group][row][column];
                float before = p.term ? *kept : 0.f;
                if (I.kind == DOWN && p.term < S.chosen) {
                    int slot = S.slot[p.term][row];
                    sum = slot == 255 ? before : before + S.weight[row][slot] * sum;
                } else
                    sum = before + sum;
                if (p.term + 1 < terms) *kept = sum;
            }
            if (terms > 1 && p.term + 1 < terms) continue;
            i64 to = (i64)row * I.out_stride + n;
            if (I.epilogue == SWIGLU) {
                float rise = __shfl_down_sync(0xffffffffu, sum, 1);
                if (there && column % 2 == 0)
                    ((u16*)I.out)[(i64)row * I.out_stride + n / 2] = half(swiglu(sum, rise, I.limit));
            } else if (there) {
                if (I.epilogue == STORE_FLOAT) ((float*)I.out)[to] = sum;
                else if (I.epilogue == STORE) ((u16*)I.out)[to] = half(sum);
                else ((u16*)I.out)[to] = half(wide(load_half((u16*)I.out + to)) + wide(half(sum)));
            }
        }
        __syncwarp();
        if (lane == 0) S.reduced = ++taken;
        if (++at == BUFFERS) at = 0, parity ^= 1;
    }

    __device__ void run(int count) {
        for (int i = 0; i < count; ++i) {
            const Instr& I = S.list[i];
            if (I.sync) both_sync();
            if (I.kind == ROUTE || I.kind == LOAD_ROUTE) {
                both_sync();  // the tables are there
                continue;
            }
            if (I.kind == KDA) continue;
            Walk walk(I, S);
            for (Piece p; walk.next(p);) piece(I, p, I.kind == UP ? 1 : walk.terms, walk.own.begin);
        }
    }
};

// ---- the choice of experts, by the multipliers ---------------------------------------------------------------------

// A row's choice by one warp. Lane l owns experts l * PER .. + PER - 1; the lanes of a group are neighbours.
template <int PER>
__device__ __noinline__ void choose(const Instr& I, Shared& S, int row, int lane) {
    const float lowest = __uint_as_float(0xff800000u);
    int first = lane * PER;
    float score[PER], choice[PER];
#pragma unroll
    for (int i = 0; i < PER; ++i) {
        bool there = first + i < I.experts;
        score[i] = there ? load_float(I.logits + (i64)row * I.x_stride + first + i) : 0.f;
        choice[i] = there ? __ldg(I.bias + first + i) : lowest;
    }
#pragma unroll
    for (int i = 0; i < PER; ++i) {
        score[i] = sigmoid(score[i]);
        choice[i] += score[i];
    }
    if (I.groups > 1) {
        int span = I.experts / I.groups / PER;  // lanes of a group
        float best = lowest, second = lowest;
#pragma unroll
        for (int i = 0; i < PER; ++i) {
            second = fmaxf(second, fminf(best, choice[i]));
            best = fmaxf(best, choice[i]);
        }
        for (int step = 1; step < span; step *= 2) {
            float b = __shfl_xor_sync(0xffffffffu, best, step), s = __shfl_xor_sync(0xffffffffu, second, step);
            second = fmaxf(fminf(best, b), fmaxf(second, s));
            best = fmaxf(best, b);
        }
        float worth = best + second;
        int mine = lane / span, rank = 0;
        for (int g = 0; g < I.groups; ++g) {
            float other = __shfl_sync(0xffffffffu, worth, g * span);
            rank += other > worth || (other == worth && g < mine);
        }
        if (rank >= I.top_groups)
#pragma unroll
            for (int i = 0; i < PER; ++i) choice[i] = lowest;
    }
    // slot s is kept by lane s
    int which = 0;
    float got = 0.f, sum = 0.f;
    for (int slot = 0; slot < I.topk; ++slot) {
        float best = lowest, value = 0.f;
        int index = 0;
#pragma unroll
        for (int i = PER - 1; i >= 0; --i)
            if (choice[i] >= best) best = choice[i], index = i, value = score[i];
        u32 bits = __float_as_uint(best + 0.0f), key = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
        u32 top = __reduce_max_sync(0xffffffffu, key);
        int owner = __ffs(__ballot_sync(0xffffffffu, key == top)) - 1;
        int expert = __shfl_sync(0xffffffffu, first + index, owner);
        value = __shfl_sync(0xffffffffu, value, owner);
        sum += value;
        if (lane == slot) which = expert, got = value;
#pragma unroll
        for (int i = 0; i < PER; ++i)
            if (lane == owner && i == index) choice[i] = lowest;
    }
    if (lane < I.topk) {
        if (I.renormalize) got = got / (sum + 1e-20f);
        got *= I.scaling;
        S.id[row][lane] = min_(which, I.experts - 1);
        S.weight[row][lane] = got;
        if (blockIdx.x == 0) {
            I.ids[row * I.topk + lane] = which;
            I.weights[row * I.topk + lane] = got;
        }
    }
}

// Fills the tables: the rows' choices, the distinct experts in ascending order, and each one's slot in each row.
__device__ __noinline__ void route(const Instr& I, Shared& S, int rows) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int row = warp; row < rows; row += WARPS) {
        if (I.kind == LOAD_ROUTE) {
            if (lane < I.topk) {
                S.id[row][lane] = (int)load_whole(I.ids + row * I.topk + lane);
                S.weight[row][lane] = load_float(I.weights + row * I.topk + lane);
            }
        } else if (I.experts <= 128) choose<4>(I, S, row, lane);
        else if (I.experts <= 256) choose<8>(I, S, row, lane);
        else choose<16>(I, S, row, lane);
    }
    multipliers_sync();
    if (warp == 0) {
        S.bits[lane] = 0;
        __syncwarp();
#pragma unroll 1
        for (int row = lane / TOPK; row < rows; row += 32 / TOPK)
            if (lane % TOPK < I.topk) atomicOr(&S.bits[S.id[row][lane % TOPK] / 32], 1u << (S.id[row][lane % TOPK] % 32));
        __syncwarp();
        u32 mine = S.bits[lane];
        int count = __popc(mine), before = count;
        for (int step = 1; step < 32; step *= 2) {
            int other = __shfl_up_sync(0xffffffffu, before, step);
            if (lane >= step) before += other;
        }
        if (lane == 31) S.chosen = before;
#pragma unroll 1
        for (before -= count; mine; mine &= mine - 1) S.expert[before++] = (u16)(lane * 32 + __ffs(mine) - 1);
    }
    multipliers_sync();
    if (lane < rows)
#pragma unroll 1
        for (int u = warp; u < S.chosen; u += WARPS) {
            int slot = 255, expert = S.expert[u];
#pragma unroll 1
            for (int s = 0; s < I.topk; ++s)
                if (S.id[lane][s] == expert) slot = s;
            S.slot[u][lane] = (u8)slot;
        }
    both_sync();  // the reducer reads the tables too
    if (threadIdx.x == 0) mbar_arrive(&S.tables);
}

// ---- Kimi Delta Attention, by the multipliers ----------------------------------------------------------------------

constexpr int TILE = 32, TAPS = 4;  // value channels of one block's item; four a warp, eight warps

__device__ __forceinline__ uint2 load8(const u16* from) {
    uint2 v;
    asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from) : "memory");
    return v;
}
__device__ __forceinline__ void spread(float (&to)[4], uint2 v) {
    to[0] = lower(v.x), to[1] = upper(v.x), to[2] = lower(v.y), to[3] = upper(v.y);
}

// A group of four channels of one of q, k, v: the inputs of the last three rows, the taps.
struct Convolved {
    float past[TAPS - 1][4], tap[TAPS][4];

    __device__ __forceinline__ void begin(const Instr& I, int channel) {
#pragma unroll
        for (int t = 0; t < TAPS - 1; ++t) spread(past[t], load8(I.w2 + (i64)t * I.x2_stride + channel));
#pragma unroll
        for (int t = 0; t < TAPS; ++t) {
            float4 w = __ldg((const float4*)((const float*)I.w + (i64)t * I.k + channel));
            tap[t][0] = w.x, tap[t][1] = w.y, tap[t][2] = w.z, tap[t][3] = w.w;
        }
    }
    // silu of the convolution at the row whose projections are `now`, rounded as the model rounds it
    __device__ __forceinline__ void next(float (&out)[4], uint2 now) {
        float fresh[4];
        spread(fresh, now);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float sum = past[0][i] * tap[0][i];
            sum += past[1][i] * tap[1][i];
            sum += past[2][i] * tap[2][i];
            sum += fresh[i] * tap[3][i];
            out[i] = wide(half(sum / (1.0f + expf(-sum))));
            past[0][i] = past[1][i], past[1][i] = past[2][i], past[2][i] = fresh[i];
        }
    }
};

// One step of a layer's recurrence: see ops/kda_triton.py. A lane holds 4 keys by 4 values of the state.
__device__ __noinline__ void kda(const Instr& I, int rows, int warp, int lane) {
    if (warp >= TILE / 4) return;
    int slots = I.experts, current = (int)load_whole(I.ids);
    float* states = I.weights;
    for (int item = blockIdx.x; item < I.n * (HEAD / TILE); item += gridDim.x) {
        int head = item / (HEAD / TILE), value = item % (HEAD / TILE) * TILE + warp * 4, key = lane * 4;
        int q_at = head * HEAD + key, k_at = I.n * HEAD + q_at, v_at = 2 * I.n * HEAD + head * HEAD + value;
        i64 place = ((i64)head * HEAD + key) * HEAD + value;
        float s[4][4], rate[4], shift[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 v[4];
            load16(v, states + (i64)current * I.slot_stride + place + i * HEAD);
#pragma unroll
            for (int j = 0; j < 4; ++j) s[i][j] = __uint_as_float(v[j]);
        }
        float4 a4 = __ldg((const float4*)(I.norm + q_at)), b4 = __ldg((const float4*)(I.bias + q_at));
        rate[0] = a4.x, rate[1] = a4.y, rate[2] = a4.z, rate[3] = a4.w;
        shift[0] = b4.x, shift[1] = b4.y, shift[2] = b4.z, shift[3] = b4.w;
        Convolved cq, ck, cv;
        cq.begin(I, q_at), ck.begin(I, k_at), cv.begin(I, v_at);
        uint2 q2 = load8(I.x + q_at), k2 = load8(I.x + k_at), v2 = load8(I.x + v_at), f2 = load8(I.gate + q_at);
        u16 b2 = load_half(I.x2 + head);
#pragma unroll 1
        for (int row = 0; row < rows; ++row) {
            // this step's projections, for the window of the next
            u16* window = (u16*)I.w2 + (i64)(row + TAPS - 1) * I.x2_stride;
            if (item % (HEAD / TILE) == 0 && warp == 0) *(uint2*)(window + q_at) = q2, *(uint2*)(window + k_at) = k2;
            if (lane == 0) *(uint2*)(window + v_at) = v2;
            float q[4], k[4], v[4], f[4], d[4], beta = sigmoid(wide(b2));
            cq.next(q, q2), ck.next(k, k2), cv.next(v, v2), spread(f, f2);
            if (row + 1 < rows) {  // underway while this row is worked on
                const u16* x = I.x + (i64)(row + 1) * I.x_stride;
                q2 = load8(x + q_at), k2 = load8(x + k_at), v2 = load8(x + v_at);
                f2 = load8(I.gate + (i64)(row + 1) * I.gate_stride + q_at);
                b2 = load_half(I.x2 + (i64)(row + 1) * I.x_stride + head);
            }
            float sums[3] = {0.f, 0.f, 0.f};  // q.q, k.k, q.k
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sums[0] += q[i] * q[i], sums[1] += k[i] * k[i], sums[2] += q[i] * k[i];
                float g = f[i] + shift[i];
                if (I.groups) g = I.scaling / (1.0f + expf(-(rate[i] * g)));
                else g = -rate[i] * (g > 20.0f ? g : log1pf(expf(g)));
                d[i] = expf(g);
            }
#pragma unroll
            for (int step = 16; step; step /= 2)
#pragma unroll
                for (int i = 0; i < 3; ++i) sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], step);
            float nq = rsqrtf(sums[0] + I.eps) * I.limit, nk = rsqrtf(sums[1] + I.eps), qk = sums[2] * nq * nk;
            float read[2][4] = {{0.f, 0.f, 0.f, 0.f}, {0.f, 0.f, 0.f, 0.f}};  // k and q against the decayed state
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                q[i] *= nq, k[i] *= nk;
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    s[i][j] *= d[i];
                    read[0][j] += k[i] * s[i][j];
                    read[1][j] += q[i] * s[i][j];
                }
            }
#pragma unroll
            for (int step = 16; step; step /= 2)
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    read[0][j] += __shfl_xor_sync(0xffffffffu, read[0][j], step);
                    read[1][j] += __shfl_xor_sync(0xffffffffu, read[1][j], step);
                }
            float o[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float u = (v[j] - read[0][j]) * beta;
                o[j] = read[1][j] + qk * u;
#pragma unroll
                for (int i = 0; i < 4; ++i) s[i][j] += k[i] * u;
            }
            if (lane == 0)
                *(uint2*)((u16*)I.out + (i64)row * I.out_stride + head * HEAD + value) = make_uint2(pair(o[0], o[1]), pair(o[2], o[3]));
            int slot = current + 1 + row;
            if (slot >= slots) slot -= slots;
            float* to = states + (i64)slot * I.slot_stride + place;
#pragma unroll
            for (int i = 0; i < 4; ++i) *(float4*)(to + i * HEAD) = make_float4(s[i][0], s[i][1], s[i][2], s[i][3]);
        }
    }
}

// ---- multipliers ---------------------------------------------------------------------------------------------------

// How the warps share pieces of some width.
struct Lie {
    int width, blocks, teams, team, block, parts;  // parts: 32-column parts of this warp's block

    __device__ __forceinline__ void set(int columns, int warp) {
        if (columns == width) return;
        width = columns;
        blocks = blocks_of(columns);
        teams = WARPS / blocks;
        team = warp / blocks;
        block = warp - team * blocks;
        parts = min_(PARTS, (columns - block * BLOCK) / 32);
    }
};

// Where the rows of one term's activations begin, and those of their gates.
struct Source {
    const u16 *x, *gate;
    int stride, gate_stride, slot_stride;
    const u8* slot;  // of each row among its chosen experts' activations; null: rows of x themselves
};

// Columns lane * 8 .. + 7 of the warp's block, of AHEAD rows, as they were loaded.
struct Raw {
    u32 x[AHEAD][4], gate[AHEAD][4];
};

struct Multiplier {
    Shared& S;
    u8* ring;
    u64* counter;
    u64 target;
    int warp, lane, rows;
    int piece, slot, buffer;  // number of the next piece; where it lies, where its sums go
    u32 full;                 // parity of its arrival
    // The block of activations as the product takes it: [16-row tile][32 columns][first or second product][a0 a1 a2 a3].
    // A lane holds columns 32 j + 8 c .. + 7 (c = lane % 4) of rows lane / 4 and lane / 4 + 8.
    u32 a[TILES][PARTS][2][4];

    __device__ __noinline__ static void arrive_and_wait(u64* counter, u64 target) {
        asm volatile("red.release.gpu.global.add.u64 [%0], 1;" ::"l"(counter) : "memory");
        u64 seen;
        do {
            asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(counter) : "memory");
        } while (seen < target);
    }
    __device__ __forceinline__ void forget() {
#pragma unroll
        for (int m = 0; m < TILES; ++m)
#pragma unroll
            for (int j = 0; j < PARTS; ++j)
#pragma unroll
                for (int i = 0; i < 8; ++i) a[m][j][i / 4][i % 4] = 0;
    }
    __device__ __forceinline__ void grid_sync() {
        both_sync();
        if (threadIdx.x == 0) arrive_and_wait(counter, target += gridDim.x);
        multipliers_sync();
    }

    __device__ __forceinline__ Source source(const Instr& I, int t) {
        if (I.kind == DOWN && t < S.chosen) return {I.x, nullptr, I.x_stride, 0, I.slot_stride, S.slot[t]};
        if (I.kind == DOWN) return {I.x2, nullptr, I.x2_stride, 0, 0, nullptr};
        int first = I.kind == UP ? 0 : t * SLAB;
        return {I.x + first, I.prologue == GATED ? I.gate + first : nullptr, I.x_stride, I.gate_stride, 0, nullptr};
    }

    __device__ __forceinline__ void look(Raw& raw, const Source& s, const Lie& lie, int row) {
        int column = lie.block * BLOCK + lane * 8;
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
#pragma unroll
            for (int q = 0; q < 4; ++q) raw.x[i][q] = raw.gate[i][q] = 0;
            int r = row + i, at = 0;
            if (r < rows && lane * 8 < lie.parts * 32) {
                if (s.slot != nullptr) at = s.slot[r] == 255 ? -1 : s.slot[r] * s.slot_stride;
                if (at >= 0) load16(raw.x[i], s.x + (i64)r * s.stride + at + column);
                if (s.gate != nullptr) load16(raw.gate[i], s.gate + (i64)r * s.gate_stride + column);
            }
        }
    }

    static __device__ __forceinline__ float squares(const u32 (&v)[4]) {
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float p = lower(v[i]), q = upper(v[i]);
            sum += p * p;
            sum += q * q;
        }
        return sum;
    }

    // The warp's block of the term's rows into `a`, row by row through a stage in shared memory, because a lane's own
    // columns lie apart; normed on the way. raw: its first rows, looked at before. Rolled loops: between two barriers this
    // code runs once, cold.
    __device__ __forceinline__ void fetch(const Instr& I, const Source& s, const Lie& lie, Raw& raw) {
        bool rms = I.prologue == RMS, gated = I.prologue == GATED;
        float w[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        if ((rms || gated) && lane * 8 < lie.parts * 32) {
            const float4* from = (const float4*)(I.norm + (rms ? lie.block * BLOCK + lane * 8 : lane % 16 * 8));
            float4 low = __ldg(from), high = __ldg(from + 1);
            w[0] = low.x, w[1] = low.y, w[2] = low.z, w[3] = low.w, w[4] = high.x, w[5] = high.y, w[6] = high.z, w[7] = high.w;
        }
        if (rms) {
            Raw other = raw;
#pragma unroll 1
            for (int row = 0; row < rows; row += AHEAD) {
                if (row) look(other, s, lie, row);
#pragma unroll
                for (int i = 0; i < AHEAD; ++i) {
                    float sum = squares(other.x[i]);
#pragma unroll
                    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
                    if (lie.team == 0 && lane == 0 && row + i < rows) S.stat[warp][row + i] = sum;
                }
            }
            multipliers_sync();
        }
        forget();
        u32* stage = S.stage[warp];
#pragma unroll 1
        for (int row = 0; row < rows; row += AHEAD) {
            if (row) look(raw, s, lie, row);
            int count = min_(AHEAD, rows - row);
#pragma unroll 1
            for (int i = 0; i < count; ++i) {
                u32 v[4], g[4];
#pragma unroll
                for (int q = 0; q < 4; ++q) v[q] = i ? raw.x[1][q] : raw.x[0][q], g[q] = i ? raw.gate[1][q] : raw.gate[0][q];
                int r = row + i;
                if (rms || gated) {
                    float sum = 0.f;
                    if (rms) {
#pragma unroll 1
                        for (int b = 0; b < lie.blocks; ++b) sum += S.stat[b][r];
                    } else {
                        sum = squares(v);  // over HEAD columns: 16 lanes
#pragma unroll
                        for (int step = 8; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
                    }
                    float scale = rsqrtf(sum / (float)(rms ? I.k : HEAD) + I.eps);
#pragma unroll
                    for (int q = 0; q < 4; ++q) {
                        float low = lower(v[q]) * scale * w[2 * q], high = upper(v[q]) * scale * w[2 * q + 1];
                        if (gated) low *= sigmoid(lower(g[q])), high *= sigmoid(upper(g[q]));
                        v[q] = pair(low, high);
                    }
                }
                *(uint4*)(stage + lane * 4) = make_uint4(v[0], v[1], v[2], v[3]);
                __syncwarp();
                if (lane / 4 == r % 8)
#pragma unroll
                    for (int j = 0; j < PARTS; ++j) {
                        uint4 q = *(const uint4*)(stage + j * 16 + lane % 4 * 4);
#pragma unroll
                        for (int o = 0; o < TILES * 2; ++o)
                            if (same(r / 8, o)) {
                                a[o / 2][j][0][o % 2] = q.x;
                                a[o / 2][j][0][2 + o % 2] = q.y;
                                a[o / 2][j][1][o % 2] = q.z;
                                a[o / 2][j][1][2 + o % 2] = q.w;
                            }
                    }
                __syncwarp();
            }
        }
        if (rms) multipliers_sync();  // the sums may be written again
    }

    __device__ __forceinline__ void group(int g, const u8* from, int parts, int odd) {
        uint4 b[PARTS];
#pragma unroll
        for (int j = 0; j < PARTS; ++j) {
            int k = j ^ odd;
            b[j] = make_uint4(0, 0, 0, 0);
            if (k < parts) b[j] = *(const uint4*)(from + k * 64);
        }
        float c[2][TILES][4];
#pragma unroll
        for (int m = 0; m < TILES; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) c[0][m][i] = c[1][m][i] = 0.f;
#pragma unroll
        for (int j = 0; j < PARTS; j += 2) {
            uint4 even = odd ? b[j + 1] : b[j], other = odd ? b[j] : b[j + 1];
#pragma unroll
            for (int m = 0; m < TILES; ++m) {
                product(c[0][m], a[m][j][0], even.x, even.y);
                product(c[1][m], a[m][j + 1][0], other.x, other.y);
                product(c[0][m], a[m][j][1], even.z, even.w);
                product(c[1][m], a[m][j + 1][1], other.z, other.w);
            }
        }
#pragma unroll
        for (int m = 0; m < TILES; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                int row = m * 16 + h * 8 + lane / 4;
                if (row < rows)
                    *(float2*)&S.partial[buffer][g][row][lane % 4 * 2] =
                        make_float2(c[0][m][h * 2] + c[1][m][h * 2], c[0][m][h * 2 + 1] + c[1][m][h * 2 + 1]);
            }
    }

    __device__ __forceinline__ void multiply(const Instr& I, Lie& lie) {
        Walk walk(I, S);
        bool rms = I.prologue == RMS, keeps = I.prologue == KEEP || rms, sums = I.kind != UP && walk.terms > 1;
        int have = keeps ? 0 : -1, ahead = -1;  // the term in `a`, the term in `raw`
        bool first = rms;  // a norm over the whole row is made by all warps together, also in a block without a piece
        Raw raw;
        Piece p;
        p.width = I.k, p.term = 0;
        for (;;) {
            if (!first && !walk.next(p)) break;
            lie.set(p.width, warp);
            int term = sums ? p.term : 0;
            bool own = !first && p.turn % lie.teams == lie.team;
            if (first || (own && have != term)) {
                Source s = source(I, term);
                if (ahead != term) look(raw, s, lie, 0);
                fetch(I, s, lie, raw);
                have = term;
                int after = term + lie.teams;
                if (sums && after < walk.terms) {  // underway while this term's pieces are multiplied
                    Lie then = lie;
                    then.set(term_of(I, S, after).width, warp);
                    if (then.teams == lie.teams) look(raw, source(I, after), then, 0), ahead = after;
                }
            }
            if (first) {
                first = false;
                continue;
            }
            if (own) {
                // First the buffer, then the slot: pieces up to piece - BUFFERS were here, so the slot's arrival before
                // this one is past, and the parity can only mean this piece.
                while (S.reduced < piece - BUFFERS + 1) {}
                asm volatile("" ::: "memory");
                mbar_wait(&S.full[slot], full);
                // Rows of whole 128 bytes: an odd row takes its 64-byte halves in the other order, or it would meet the
                // even row before it in the same banks.
                int odd = p.width % 64 == 0 ? lane / 4 & 1 : 0;
                const u8* from = ring + slot * SLOT + lane / 4 * p.width * 2 + lie.block * BLOCK * 2 + lane % 4 * 16;
                for (int g = 0; g < p.count; ++g, from += p.width * 16) group(g * lie.blocks + lie.block, from, lie.parts, odd);
                if (lie.blocks > 1) asm volatile("bar.sync %0, %1;" ::"r"(3 + lie.team), "r"(lie.blocks * 32) : "memory");
                else __syncwarp();
                if (lie.block == 0 && lane == 0) {
                    mbar_arrive(&S.empty[slot]);
                    mbar_arrive(&S.ready[buffer]);
                }
            }
            ++piece;
            if (++slot == SLOTS) slot = 0, full ^= 1;
            if (++buffer == BUFFERS) buffer = 0;
        }
    }
};

extern "C" __global__ void __launch_bounds__((WARPS + 2) * 32, 1)
    soliton_sweep(const Instr* list, int count, const i64* live, int rows, u64* counter) {
    extern __shared__ __align__(128) u8 memory[];
    Shared& S = *(Shared*)(memory + SLOTS * SLOT);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 have;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(have));
    if (have < SLOTS * SLOT + sizeof(Shared)) __trap();
    for (int i = threadIdx.x; i < count * (int)(sizeof(Instr) / 8); i += blockDim.x)
        ((u64*)S.list)[i] = __ldg((const u64*)list + i);
    if (threadIdx.x == 0) {
        for (int i = 0; i < SLOTS; ++i) mbar_init(&S.full[i], 1), mbar_init(&S.empty[i], 1);
        for (int i = 0; i < BUFFERS; ++i) mbar_init(&S.ready[i], 1);
        S.reduced = 0;
        mbar_init(&S.tables, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    if (warp == WARPS + 1) {
        Copier copier{S, memory, live, lane, 0, 0, false, false};
        copier.run(count);
        return;
    }
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (live != nullptr) rows = (int)min((i64)rows, load_whole(live));
    if (rows <= 0) return;
    if (warp == WARPS) {
        Reducer reducer{S, lane, rows, 0, 0, 0};
        reducer.run(count);
        return;
    }
    Multiplier m{S, memory, counter};
    m.warp = warp, m.lane = lane, m.rows = rows, m.piece = m.slot = m.buffer = 0, m.full = 0;
    Lie lie;
    lie.width = 0;
    if (threadIdx.x == 0) {
        u64 seen;
        asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(counter) : "memory");
        m.target = seen / gridDim.x * gridDim.x;
    }
    for (int i = 0; i < count; ++i) {
        const Instr& I = S.list[i];
        if (I.sync) m.grid_sync();
        if (I.kind == ROUTE || I.kind == LOAD_ROUTE) route(I, S, rows);
        else if (I.kind == KDA) {
            kda(I, rows, warp, lane);
            m.forget();  // nothing has to be kept in registers meanwhile
        } else m.multiply(I, lie);
    }
}
