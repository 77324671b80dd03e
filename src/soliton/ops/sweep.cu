// A run of skinny products as one persistent kernel: weights stream through shared memory without a pause while the
// activations pass from product to product through grid barriers. See sweep.py for the instruction list.
//
// One block a multiprocessor: WARPS multiplying warps, one warp that adds up and stores, one that copies. Weights are
// [N, K] bf16, K contiguous. The copier brings pieces (groups of 8 weight rows) into a ring of slots, ahead of everything
// that waits for activations, because weights never depend on them (routed experts excepted). A multiplier owns one
// block of K, at most 320 columns: its part of the activations lives in registers as the A operand of m16n8k16 products, the
// weights are the B operand. Where K is short the multipliers form teams that take pieces in turn. All roles walk the same
// pieces in the same order. What limits this kernel besides memory is the way from one product to the next: whatever does
// not depend on activations is reckoned or loaded before the grid is waited for.
//
// Order of sums, the same for every number of rows, grid and list: within a block four sums of the tensor core's, each
// over every fourth 16 columns; blocks ascending, one after the other, in float32; terms ascending: slabs of columns, or
// experts by index with the shared expert last. A norm over the input is its weights' product with the rows, rounded to
// bf16, and one factor of the sums.

#include "sweep_base.cuh"
#include "sweep_walk.cuh"
#include "sweep_route.cuh"
#include "sweep_kda.cuh"

constexpr int HEADS = BLOCK / HEAD + 2;  // that a block can touch

// Where the rows of one term's activations begin.
struct Source {
    const u16* x;
    int stride, slot_stride;
    const u8* slot;  // of each row among its chosen experts' activations; null: rows of x themselves
};

struct Raw {  // as `a` below, by rows; with one half also the squares of the heads that the block touches
    u32 x[HALVES][PARTS][4];
    float4 squares[HEADS];
};

struct Multiplier {
    Shared& S;
    u8* ring;
    int warp, lane, rows;
    int piece, buffer;  // number of the next piece, where its sums go
    // The block of activations as the product takes it: [16 rows][32 columns][first or second product][a0 a1 a2 a3]. A
    // lane holds columns 32 j + 8 c .. + 7 (c = lane % 4) of rows lane / 4 and lane / 4 + 8.
    u32 a[TILES][PARTS][2][4];

    __device__ __forceinline__ void forget() {
#pragma unroll
        for (int m = 0; m < TILES; ++m)
#pragma unroll
            for (int j = 0; j < PARTS; ++j)
#pragma unroll
                for (int i = 0; i < 8; ++i) a[m][j][i / 4][i % 4] = 0;
    }

    __device__ __forceinline__ Source source(const Instr& I, int t) {
        if (I.kind == DOWN && t < S.chosen) return {I.x, I.x_stride, I.slot_stride, S.slot[t]};
        if (I.kind == DOWN) return {I.x2, I.x2_stride, 0, nullptr};
        return {I.x + (I.kind == UP ? 0 : t * I.shape.width), I.x_stride, 0, nullptr};
    }

    // The warp's block of a term's rows, on its way.
    __device__ __forceinline__ void look(Raw& raw, const Instr& I, const Lie& lie, int t) {
        Source s = source(I, t);
#pragma unroll
        for (int h = 0; h < HALVES; ++h) {
            int row = h * 8 + lane / 4, place = 0;
            if (row < rows && s.slot != nullptr) place = s.slot[row] == 255 ? -1 : s.slot[row] * s.slot_stride;
            const u16* from = s.x + (i64)row * s.stride + place + lie.first + lane % 4 * 8;
#pragma unroll
            for (int j = 0; j < PARTS; ++j) {
                raw.x[h][j][0] = raw.x[h][j][1] = raw.x[h][j][2] = raw.x[h][j][3] = 0;
                if (row < rows && place >= 0 && j < lie.parts) load16(raw.x[h][j], from + j * 32);
            }
        }
        if (HALVES == 1 && I.prologue == SCALED)
#pragma unroll
            for (int i = 0; i < HEADS; ++i) raw.squares[i] = squares(I, lie, t, lane / 4, i);
    }
    // Sums of squares, in parts, of the block's i-th head; zero where there is none.
    __device__ __forceinline__ float4 squares(const Instr& I, const Lie& lie, int t, int row, int i) {
        int left = t * I.shape.width + lie.first, head = left / HEAD + i, heads = I.k / HEAD;
        bool there = row < rows && head < heads && head * HEAD < left + lie.parts * 32;
        return there ? load_floats(I.stats + ((i64)row * heads + head) * 4) : make_float4(0.f, 0.f, 0.f, 0.f);
    }

    // Leaves the rows' sums of squares, and multiplies by the norm's weights.
    __device__ __forceinline__ void norm(Raw& raw, const Lie& lie) {
        float sums[HALVES];
#pragma unroll
        for (int h = 0; h < HALVES; ++h) sums[h] = 0.f;
#pragma unroll
        for (int j = 0; j < PARTS; ++j) {
            uint4 w4 = S.norm[warp][j * 4 + lane % 4];
            u32 w[4] = {w4.x, w4.y, w4.z, w4.w};
#pragma unroll
            for (int h = 0; h < HALVES; ++h)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    u32& v = raw.x[h][j][i];
                    sums[h] += lower(v) * lower(v);
                    sums[h] += upper(v) * upper(v);
                    times(v, w[i]);
                }
        }
#pragma unroll
        for (int h = 0; h < HALVES; ++h) {
            sums[h] += __shfl_xor_sync(0xffffffffu, sums[h], 1);
            sums[h] += __shfl_xor_sync(0xffffffffu, sums[h], 2);
            if (lie.team == 0 && lane % 4 == 0) S.stat[lie.block][h * 8 + lane / 4] = sums[h];
        }
    }

    // Scales each head's 128 columns by their norm, whose squares lie beside them.
    __device__ __forceinline__ void scale(Raw& raw, const Instr& I, const Lie& lie, int t) {
        int before = (t * I.shape.width + lie.first) % HEAD / 32;  // parts of the first head left of the block
#pragma unroll
        for (int h = 0; h < HALVES; ++h) {
            float by[HEADS];
#pragma unroll
            for (int i = 0; i < HEADS; ++i) {
                float4 p = HALVES == 1 ? raw.squares[i] : squares(I, lie, t, h * 8 + lane / 4, i);
                by[i] = rsqrtf((p.x + p.y + p.z + p.w) / (float)HEAD + I.eps);
            }
#pragma unroll
            for (int j = 0; j < PARTS; ++j) {
                float factor = j % 4 + before < 4 ? by[j / 4] : by[j / 4 + 1];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    u32& v = raw.x[h][j][i];
                    v = pair(lower(v) * factor, upper(v) * factor);
                }
            }
        }
    }

    // Into `a`. The compiler would rather keep them as they were loaded and gather four for every product: what it cannot
    // see through, it computes once.
    __device__ __forceinline__ void keep(const Raw& raw) {
        u32 none = (u32)rows >> 16;
#pragma unroll
        for (int j = 0; j < PARTS; ++j)
#pragma unroll
            for (int m = 0; m < TILES; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    a[m][j][i / 2][i % 2 * 2] = raw.x[2 * m][j][i] ^ none;
                    a[m][j][i / 2][i % 2 * 2 + 1] = HALVES == 1 ? raw.x[0][j][i] & none : raw.x[(2 * m + 1) % HALVES][j][i] ^ none;
                }
    }

    __device__ __forceinline__ void part(float (&c)[4][TILES][4], int j, uint4 b) {
#pragma unroll
        for (int m = 0; m < TILES; ++m) {
            product(c[j % 2 * 2][m], a[m][j][0], b.x, b.y);
            product(c[j % 2 * 2 + 1][m], a[m][j][1], b.z, b.w);
        }
    }
    // One group of 8 weight rows; N: how many parts the block has, 0: any number. In rows of whole 128 bytes an odd row
    // takes its 64-byte parts in the other order, or it would meet the even row before it in the same banks.
    template <int N>
    __device__ __forceinline__ void group(int at, const u8* from, int parts, int odd) {
        float c[4][TILES][4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int m = 0; m < TILES; ++m) c[i][m][0] = c[i][m][1] = c[i][m][2] = c[i][m][3] = 0.f;
        const u8 *one = from + odd * 64, *two = from + 64 - odd * 64;
#pragma unroll
        for (int j = 0; j + 1 < (N ? N : PARTS); j += 2) {
            if (N == 0 && j + 1 >= parts) break;
            uint4 b0 = *(const uint4*)(one + j * 64), b1 = *(const uint4*)(two + j * 64);
            part(c, j, make_uint4(odd ? b1.x : b0.x, odd ? b1.y : b0.y, odd ? b1.z : b0.z, odd ? b1.w : b0.w));
            part(c, j + 1, make_uint4(odd ? b0.x : b1.x, odd ? b0.y : b1.y, odd ? b0.z : b1.z, odd ? b0.w : b1.w));
        }
        if (N % 2) part(c, N - 1, *(const uint4*)(from + (N - 1) * 64));
        if (N == 0 && parts % 2)
#pragma unroll
            for (int j = 0; j < PARTS; j += 2)
                if (j + 1 == parts) part(c, j, *(const uint4*)(from + j * 64));
#pragma unroll
        for (int h = 0; h < HALVES; ++h) {
            int row = h * 8 + lane / 4, m = h / 2, i = h % 2 * 2;
            if (row < rows)
                *(float2*)&S.partial[buffer][at][row][lane % 4 * 2] = make_float2((c[0][m][i] + c[1][m][i]) + (c[2][m][i] + c[3][m][i]),
                    (c[0][m][i + 1] + c[1][m][i + 1]) + (c[2][m][i + 1] + c[3][m][i + 1]));
        }
    }

    __device__ __forceinline__ void multiply(const Instr& I, int number) {
        bool rms = I.prologue == RMS;
        if (I.sync) grid_arrive(S, number);
        Share own(I, S);
        Lie lie;
        lie.set(I.shape, warp);
        if (rms) {  // the warp's columns of the norm's weights
            for (int i = lane; i < lie.parts * 4; i += 32)
                S.norm[warp][i] = __ldg((const uint4*)((const u16*)I.norm + lie.first) + i);
            __syncwarp();
        }
        if (I.sync) grid_wait(S);
        if (warp == 0) MARK(S.grid.trace, number, 2);
        int begun = piece, role = warp == 0 ? 0 : warp == 4 ? 5 : PIECES * STEPS;
        auto step = [&](int n) { if (role < PIECES) STEP(S.grid.trace, number, piece - begun, role + n); };
        bool first = rms, any = own.begin < own.end, fresh = true, shared = I.kind != UP && own.terms == 1;
        if (warp >= I.shape.blocks * I.shape.teams && warp >= I.last.blocks * I.last.teams) {  // in no team
            passed(S.ended, number);
            piece = S.ends[number];
            buffer = piece % BUFFERS;
            return;
        }
        int have = I.prologue == KEEP ? 0 : -1, ahead = -1;  // the term in `a`, the one on its way
        Raw raw = {};
        auto foresee = [&](int t) {  // the term that comes next for this team, if nothing has to be done otherwise for it
            bool there = t < own.terms - (I.last.width != I.shape.width);
            ahead = HALVES < 4 && there && own.terms > 1 && I.kind != UP ? t : -1;
            if (ahead >= 0) look(raw, I, lie, t);
        };
        if (have < 0) foresee(lie.team);
#pragma unroll 1
        for (bool more = first || any; more;) {
            Piece p = {};
            int part = 0, term = 0;
            if (!first) {
                passed(S.issued, piece);
                p = S.queue[piece % QUEUE];
                more = !(p.flags & FINAL);
                bool last = p.flags & LAST;
                if (last != shared) lie.set(last ? I.last : I.shape, warp), shared = last;
                part = lie.team - p.turn;
                if (part < 0) part += lie.teams;
                if (part >= p.parts || lie.team >= lie.teams) part = -1;
                if (p.flags & SEVERAL) term = p.term + part;
            }
            if (part >= 0) {
                if (!first) step(0);
                if (have != term) {
                    if (ahead != term) look(raw, I, lie, term);
                    if (rms) norm(raw, lie);  // in all blocks: what comes next may keep it
                    if (I.prologue == SCALED) scale(raw, I, lie, term);
                    keep(raw);
                    if (have < 0 && warp == 0) MARK(S.grid.trace, number, 3);
                    have = term;
                    foresee(term + lie.teams);
                }
                if (first) {
                    first = false, more = any;
                    continue;
                }
                step(1);
                passed(S.reduced, piece - BUFFERS);
                mbar_wait(&S.full[piece % QUEUE], piece / QUEUE & 1);
                if (fresh && warp == 0) MARK(S.grid.trace, number, 4);
                step(2);
                fresh = false;
                int width = shared ? I.last.width : I.shape.width, odd = width % 64 == 0 ? lane / 4 & 1 : 0;
                const u8* from = ring + p.offset + part * p.span * width * 16 + lane / 4 * width * 2 + lie.first * 2 + lane % 4 * 16;
                int to = part * p.span * lie.blocks + lie.block;
#pragma unroll 1
                for (int g = 0; g < p.span; ++g, from += width * 16, to += lie.blocks) {
                    if (lie.parts == 8) group<8>(to, from, 8, odd);
                    else if (lie.parts == 9) group<9>(to, from, 9, odd);
                    else if (lie.parts == 10) group<10>(to, from, 10, odd);
                    else if (lie.parts == 6) group<6>(to, from, 6, odd);
                    else group<0>(to, from, lie.parts, odd);
                }
                step(3);
                __syncwarp();
                step(4);
                if (lane == 0) {
                    mbar_arrive(&S.empty[piece % QUEUE], p.share);
                    mbar_arrive(&S.ready[buffer], p.share);
                }
            }
            ++piece;
            if (++buffer == BUFFERS) buffer = 0;
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    soliton_sweep(const Instr* list, int count, const i64* live, int rows, u32* counter, u64* carry, i64* trace,
                  int size) {
#if SOLITON_EMULATED
    u8* memory = block_memory();
#else
    extern __shared__ __align__(128) u8 memory[];
#endif
    Shared& S = *(Shared*)(memory + size);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (dynamic_shared() < size + sizeof(Shared)) __trap();
    for (int i = threadIdx.x; i < count * (int)(sizeof(Instr) / 16); i += blockDim.x)
        ((uint4*)S.list)[i] = __ldg((const uint4*)list + i);
    if (threadIdx.x == 0) {
#pragma unroll 1
        for (int i = 0; i < QUEUE; ++i) mbar_init(&S.full[i], 1), mbar_init(&S.empty[i], TURNS);
        for (int i = 0; i < BUFFERS; ++i) mbar_init(&S.ready[i], TURNS);
        S.reduced.set(0), S.issued.set(0), S.ended.set(0), S.landed.set(0);
        S.grid = {counter, counter + 1, carry, trace};
        mbar_init(&S.tables, 1);
        barriers_made();
    }
    __syncthreads();
    WHERE(trace);
    launch_next();
    // A multiplier holds its block of activations: the registers that the other roles do not need are theirs.
    if (warp >= WARPS) {
        few_registers();
        if (warp == WARPS + 1) {
            Copier copier{S, memory, live, trace, size, lane, 0, 0, 0, 0, false, false};
            copier.run(count);
        } else if (warp == WARPS) {
            wait_for_previous();
            if (live != nullptr) rows = (int)min((i64)rows, load_whole(live));
            if (rows > 0) {
                Reducer reducer{S, lane, rows, 0, 0, 0, false};
                reducer.run(count);
            }
        }
    } else {
        many_registers();
        wait_for_previous();
        i64 current = 0;
        if (warp == 0 && lane < count && S.list[lane].kind == KDA) current = load_whole(S.list[lane].ids);
        if (live != nullptr) rows = (int)min((i64)rows, load_whole(live));
        if (rows > 0) {
            Multiplier m{S, memory, warp, lane, rows, 0, 0};
            u32 epoch = *(volatile u32*)(counter + 1);
            bool synced = false;
            if (threadIdx.x == 0) {
                S.phase = relaxed(counter) >> 31;  // it stays until this block arrives
            }
            if (warp == 0 && lane < count && S.list[lane].kind == KDA) S.current = (int)current;  // one for all layers
            multipliers_sync();
#pragma unroll 1
            for (int i = 0; i < count; ++i) {
                const Instr& I = S.list[i];
                synced = synced || I.sync;
                if (warp == 0) MARK(trace, i, 0);
                if (I.kind == ROUTE || I.kind == LOAD_ROUTE) {
                    route(I, S, rows, i, epoch + i + 1 - I.tagged);
                } else if (I.kind == KDA) {
                    kda(I, S, rows, i);
                    m.forget();  // nothing has to be kept in registers meanwhile
                } else if (I.kind != PREFETCH) m.multiply(I, i);
                if (warp == 0) MARK(trace, i, 5);
            }
            // All blocks have read it: they were at a barrier since.
            if (synced && blockIdx.x == 0 && threadIdx.x == 0) *(volatile u32*)(counter + 1) = epoch + LIST;
        }
    }
}
