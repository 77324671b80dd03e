// A run of skinny products as one persistent kernel: weights stream through shared memory without a pause while the
// activations pass from product to product through grid barriers. See sweep.py for the instruction list.
//
// One block a multiprocessor: WARPS multiplying warps, REDUCERS warps that add up and store, one copying warp. Weights
// are [N, K] bf16, K contiguous. The copier brings pieces (G groups of 8 weight rows, at most SLAB columns) into a ring
// of slots, ahead of everything that waits for activations, because weights never depend on them (routed experts
// excepted). A multiplier owns one 256-column block of K: its part of the activations lives in registers as the A operand
// of m16n8k16 products, the weights are the B operand. All roles walk the same pieces in the same order. Few warps with
// large blocks, because what limits a multiplier is how many instructions it issues for each weight.
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
constexpr int BUFFERS = 3;  // of partial sums
constexpr int ROWS = TILES * 16;
constexpr int SLOT = 8 * SLAB * 2;
constexpr int GROUPS = 8;  // most groups that one block sums over several terms
constexpr int TOPK = 8, CHOSEN = ROWS * TOPK, LIST = 16;

enum Kind { PRODUCT, ROUTE, LOAD_ROUTE, UP, DOWN };
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
};

struct Shared {
    u64 full[SLOTS], empty[SLOTS], ready[BUFFERS], free[BUFFERS], tables;
    Instr list[LIST];
    float partial[BUFFERS][WARPS][ROWS][8];
    float total[GROUPS][ROWS][8];
    float stat[WARPS][ROWS];
    float weight[ROWS][TOPK];
    int id[ROWS][TOPK];
    u32 bits[32];
    u16 expert[CHOSEN];
    u8 slot[CHOSEN][ROWS];  // of an expert in a row's choice; 255: not chosen
    int chosen;
};

__device__ __forceinline__ u32 smem(const void* p) { return (u32)__cvta_generic_to_shared(p); }
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
__device__ __forceinline__ float sigmoid(float v) { return 1.0f / (1.0f + expf(-v)); }

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
__device__ __forceinline__ void product(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
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
    int term, unit, group;  // term of a sum; which chosen expert (UP); first group
    bool opens;             // the first piece of its term
};
template <class Visit>
__device__ __forceinline__ void walk(const Instr& I, const Shared& S, Visit visit) {
    int groups = I.n / 8;
    if (I.kind == UP) {
        int size = groups_of(I.k);
        Range own = share(S.chosen * groups, I.start);
        int u = own.begin / groups, g = own.begin - u * groups;
        for (int at = own.begin; at < own.end;) {
            int take = min_(min_(size, own.end - at), groups - g);
            visit(Piece{I.w + ((i64)S.expert[u] * I.n + g * 8) * I.k, I.k, I.k, take, 0, u, g, at == own.begin});
            at += take;
            g += take;
            if (g == groups) g = 0, ++u;
        }
        return;
    }
    Range own = share(groups, I.start);
    int terms = terms_of(I, S);
    for (int t = 0; t < terms; ++t) {
        Term term = term_of(I, S, t);
        int size = groups_of(term.width);
        for (int g = own.begin; g < own.end; g += size)
            visit(Piece{term.w + (i64)g * 8 * term.row, term.row, term.width, min_(size, own.end - g), t, 0, g, g == own.begin});
    }
}

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
            if (waiting && I.kind != PRODUCT) {
                look();
                if (frozen) break;
                mbar_wait(&S.tables, parity);
                parity ^= 1;
                waiting = false;
            }
            walk(I, S, [&](const Piece& p) { push(p); });
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
    int lane, rows, at;
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
                int slot = S.slot[p.unit][row];
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
            if (p.term + 1 < terms) continue;
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
        if (lane == 0) mbar_arrive(&S.free[at]);
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
            int terms = I.kind == UP ? 1 : terms_of(I, S), first = share(I.n / 8, I.start).begin;
            walk(I, S, [&](const Piece& p) { piece(I, p, terms, first); });
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

__device__ __noinline__ void route(const Instr& I, Shared& S, int rows) {
    int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    if (I.kind == ROUTE) {
        for (int row = warp; row < rows; row += WARPS) {
            if (I.experts <= 32) choose<1>(I, S, row, lane);
            else if (I.experts <= 128) choose<4>(I, S, row, lane);
            else if (I.experts <= 256) choose<8>(I, S, row, lane);
            else choose<16>(I, S, row, lane);
        }
    } else {
        for (int i = tid; i < rows * I.topk; i += MULTIPLIERS) {
            S.id[i / I.topk][i % I.topk] = (int)load_whole(I.ids + i);
            S.weight[i / I.topk][i % I.topk] = load_float(I.weights + i);
        }
    }
    if (tid < 32) S.bits[tid] = 0;
    multipliers_sync();
    for (int i = tid; i < rows * I.topk; i += MULTIPLIERS) {
        int e = S.id[i / I.topk][i % I.topk];
        atomicOr(&S.bits[e / 32], 1u << (e % 32));
    }
    multipliers_sync();
    if (warp == 0) {  // distinct experts, ascending
        u32 mine = S.bits[lane];
        int count = __popc(mine), before = count;
        for (int step = 1; step < 32; step *= 2) {
            int other = __shfl_up_sync(0xffffffffu, before, step);
            if (lane >= step) before += other;
        }
        if (lane == 31) S.chosen = before;
        for (before -= count; mine; mine &= mine - 1) S.expert[before++] = (u16)(lane * 32 + __ffs(mine) - 1);
    }
    multipliers_sync();
    for (int i = tid; i < S.chosen * rows; i += MULTIPLIERS) {
        int u = i / rows, row = i % rows, slot = 255;
        for (int s = 0; s < I.topk; ++s)
            if (S.id[row][s] == S.expert[u]) slot = s;
        S.slot[u][row] = (u8)slot;
    }
    both_sync();  // the reducers read the tables too
    if (tid == 0) mbar_arrive(&S.tables);
}

// ---- multipliers ---------------------------------------------------------------------------------------------------

// A warp's block of activations, as the product takes it: [16-row tile][32 columns][row half + 2 * pair of registers]. A
// lane holds columns 32 j + 8 c .. + 7 (c = lane % 4) of rows lane / 4 and lane / 4 + 8.
struct Fragment {
    u32 v[TILES][PARTS][2][4];  // [..][first or second product][a0 a1 a2 a3]
    __device__ __forceinline__ u32& at(int m, int j, int half, int word) { return v[m][j][word / 2][word % 2 * 2 + half]; }
};

struct Multiplier {
    Shared& S;
    u8* ring;
    u64* counter;
    u64 target;
    int warp, lane, rows;
    int slot, buffer;  // of the next piece
    u32 full, free;    // their parities
    int group, column;  // of this warp in a piece of the current width, column of the lane
    u32 offset;         // in a slot
    int parts, odd;
    Fragment a;

    __device__ void grid_sync() {
        both_sync();
        if (threadIdx.x == 0) {
            target += gridDim.x;
            asm volatile("red.release.gpu.global.add.u64 [%0], 1;" ::"l"(counter) : "memory");
            u64 seen;
            do {
                asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(counter) : "memory");
            } while (seen < target);
        }
        multipliers_sync();
    }

    // Where this warp lies in pieces of `width` columns.
    __device__ void lie(int width) {
        int blocks = blocks_of(width), block;
        group = warp / blocks;
        block = warp - group * blocks;
        column = block * BLOCK + lane % 4 * 8;
        parts = min_(PARTS, (width - block * BLOCK) / 32);
        // Rows of whole 128 bytes: an odd row takes its 64-byte halves in the other order, or it would meet the even row
        // before it in the same banks.
        odd = width % 64 == 0 ? lane / 4 & 1 : 0;
        offset = (group * 8 + lane / 4) * width * 2 + block * BLOCK * 2 + lane % 4 * 16;
    }

    // x[row, first + column] of the warp's block; absent rows (first < 0) and columns are 0.
    template <class First>
    __device__ __forceinline__ void fetch(Fragment& to, const u16* x, int stride, First first) {
#pragma unroll
        for (int m = 0; m < TILES; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                int row = m * 16 + h * 8 + lane / 4, from = row < rows ? first(row) : -1;
                const u16* at = x + (i64)row * stride + from + column;
#pragma unroll
                for (int j = 0; j < PARTS; ++j) {
                    u32 v[4] = {0, 0, 0, 0};
                    if (from >= 0 && j < parts) load16(v, at + j * 32);
#pragma unroll
                    for (int w = 0; w < 4; ++w) to.at(m, j, h, w) = v[w];
                }
            }
    }
    __device__ __forceinline__ void fetch_term(Fragment& to, const Instr& I, int t) {
        if (I.kind == DOWN && t < S.chosen)
            fetch(to, I.x, I.x_stride, [&](int row) { return S.slot[t][row] == 255 ? -1 : S.slot[t][row] * I.slot_stride; });
        else if (I.kind == DOWN)
            fetch(to, I.x2, I.x2_stride, [](int) { return 0; });
        else
            fetch(to, I.x, I.x_stride, [&](int) { return t * SLAB; });
    }

    // Sum of squares of one row over four parts (128 columns), the same in the four lanes of a row.
    __device__ __forceinline__ float squares(int m, int h, int from) {
        float sum = 0.f;
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                float p = lower(a.at(m, from + j, h, w)), q = upper(a.at(m, from + j, h, w));
                sum += p * p;
                sum += q * q;
            }
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        return sum;
    }

    __device__ void rms(const Instr& I) {
        int blocks = blocks_of(I.k);
#pragma unroll
        for (int m = 0; m < TILES; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float sum = squares(m, h, 0) + squares(m, h, 4);
                if (warp < blocks && lane % 4 == 0) S.stat[warp][m * 16 + h * 8 + lane / 4] = sum;
            }
        multipliers_sync();
        float scale[TILES][2];
#pragma unroll
        for (int m = 0; m < TILES; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float sum = 0.f;
#pragma unroll
                for (int b = 0; b < WARPS; ++b)
                    if (b < blocks) sum += S.stat[b][m * 16 + h * 8 + lane / 4];
                scale[m][h] = rsqrtf(sum / (float)I.k + I.eps);
            }
#pragma unroll
        for (int j = 0; j < PARTS; ++j) {
            if (j >= parts) break;
            const float4* w = (const float4*)(I.norm + column + j * 32);
            float4 low = __ldg(w), high = __ldg(w + 1);
            float v[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int m = 0; m < TILES; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        u32& x = a.at(m, j, h, i);
                        x = pair(lower(x) * scale[m][h] * v[2 * i], upper(x) * scale[m][h] * v[2 * i + 1]);
                    }
        }
        multipliers_sync();  // the sums may be written again
    }

    // x normed in blocks of HEAD columns, times sigmoid of the gate at column `first`.
    __device__ __forceinline__ void gated(const Instr& I, int first) {
#pragma unroll
        for (int m = 0; m < TILES; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                int row = m * 16 + h * 8 + lane / 4;
                const u16* gate = I.gate + (i64)row * I.gate_stride + first + column;
                float scale[2] = {rsqrtf(squares(m, h, 0) / (float)HEAD + I.eps), rsqrtf(squares(m, h, 4) / (float)HEAD + I.eps)};
#pragma unroll
                for (int j = 0; j < PARTS; ++j) {
                    u32 g[4] = {0, 0, 0, 0};
                    if (row < rows && j < parts) load16(g, gate + j * 32);
                    const float4* w = (const float4*)(I.norm + (column + j * 32) % HEAD);
                    float4 low = __ldg(w), high = __ldg(w + 1);
                    float v[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        u32& x = a.at(m, j, h, i);
                        x = pair(lower(x) * scale[j / 4] * v[2 * i] * sigmoid(lower(g[i])),
                                 upper(x) * scale[j / 4] * v[2 * i + 1] * sigmoid(upper(g[i])));
                    }
                }
            }
    }

    __device__ __forceinline__ void piece(int count) {
        mbar_wait(&S.full[slot], full);
        // also a warp without a part in this piece, or it would be counted for the next use of the buffer
        mbar_wait(&S.free[buffer], free ^ 1);
        if (group < count) {
            float c[TILES][4];
#pragma unroll
            for (int m = 0; m < TILES; ++m) c[m][0] = c[m][1] = c[m][2] = c[m][3] = 0.f;
            u32 from = smem(ring + slot * SLOT) + offset;
#pragma unroll
            for (int j = 0; j < PARTS; j += 2) {
                u32 b[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    int k = j + (i ^ odd);
                    if (k < parts)
                        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                                     : "=r"(b[i][0]), "=r"(b[i][1]), "=r"(b[i][2]), "=r"(b[i][3]) : "r"(from + k * 64));
                }
#pragma unroll
                for (int q = 0; q < 4; ++q) {
                    u32 v = odd ? b[1][q] : b[0][q];
                    b[1][q] = odd ? b[0][q] : b[1][q];
                    b[0][q] = v;
                }
#pragma unroll
                for (int i = 0; i < 2; ++i)
#pragma unroll
                    for (int m = 0; m < TILES; ++m)
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            const u32* x = a.v[m][j + i][half];
                            product(c[m], x[0], x[1], x[2], x[3], b[i][half * 2], b[i][half * 2 + 1]);
                        }
            }
#pragma unroll
            for (int m = 0; m < TILES; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    int row = m * 16 + h * 8 + lane / 4;
                    if (row < rows) *(float2*)&S.partial[buffer][warp][row][lane % 4 * 2] = make_float2(c[m][h * 2], c[m][h * 2 + 1]);
                }
        }
        __syncwarp();
        if (lane == 0) {
            mbar_arrive(&S.empty[slot]);
            mbar_arrive(&S.ready[buffer]);
        }
        if (++slot == SLOTS) slot = 0, full ^= 1;
        if (++buffer == BUFFERS) buffer = 0, free ^= 1;
    }

    __device__ void multiply(const Instr& I) {
        int terms = I.kind == UP ? 1 : terms_of(I, S);
        Fragment next;
        if (I.prologue == RMS) {  // all warps, also of a block without a piece, because they wait for each other
            lie(I.k);
            fetch(a, I.x, I.x_stride, [](int) { return 0; });
            rms(I);
        }
        walk(I, S, [&](const Piece& p) {
            if (p.opens) {
                int t = p.term;
                lie(p.width);
                if (I.prologue == PLAIN || I.prologue == GATED) {
                    if (TILES > 1 || t == 0) fetch_term(a, I, t);
                    else a = next;
                    if (I.prologue == GATED) gated(I, t * SLAB);
                    if (TILES == 1 && t + 1 < terms) {  // underway while this term's pieces are multiplied
                        Term after = term_of(I, S, t + 1);
                        if (after.width != p.width) lie(after.width);
                        fetch_term(next, I, t + 1);
                        if (after.width != p.width) lie(p.width);
                    }
                }
            }
            piece(p.count);
        });
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
        for (int i = 0; i < SLOTS; ++i) mbar_init(&S.full[i], 1), mbar_init(&S.empty[i], WARPS);
        for (int i = 0; i < BUFFERS; ++i) mbar_init(&S.ready[i], WARPS), mbar_init(&S.free[i], 1);
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
        Reducer reducer{S, lane, rows, 0, 0};
        reducer.run(count);
        return;
    }
    Multiplier m{S, memory, counter};
    m.warp = warp, m.lane = lane, m.rows = rows, m.slot = m.buffer = 0, m.full = m.free = 0;
    if (threadIdx.x == 0) {
        u64 seen;
        asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(counter) : "memory");
        m.target = seen / gridDim.x * gridDim.x;
    }
    for (int i = 0; i < count; ++i) {
        const Instr& I = S.list[i];
        if (I.sync) m.grid_sync();
        if (I.kind == ROUTE || I.kind == LOAD_ROUTE) route(I, S, rows);
        else m.multiply(I);
    }
}
