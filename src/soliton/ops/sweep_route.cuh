// The choice of experts, made by every block for itself.

// A row's choice by one warp. Lane l owns experts l * PER .. + PER - 1; the lanes of a group are neighbours. Ties go to
// the lower index.
template <int PER>
__device__ __forceinline__ void choose(const Instr& I, Shared& S, int row, int lane, const float (&bias)[PER], u32 sign) {
    const float lowest = __uint_as_float(0xff800000u);
    int first = lane * PER;
    float score[PER], choice[PER];
    if (I.tagged) {  // no barrier is waited for: each one comes with the sign that it is of this launch
        const u64* from = (const u64*)I.logits + (i64)row * I.x_stride + first;
        bool all;
        do {
            u64 word[PER];
#pragma unroll
            for (int i = 0; i < PER; ++i) word[i] = first + i < I.experts ? relaxed(from + i) : (u64)sign << 32;
            all = true;
#pragma unroll
            for (int i = 0; i < PER; ++i) all = all && (u32)(word[i] >> 32) == sign, score[i] = __uint_as_float((u32)word[i]);
            if (!all) spin();
        } while (!all);
        __syncwarp();
    } else
#pragma unroll
    for (int i = 0; i < PER; i += 4) {  // rows of logits are padded to whole eights
        float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
        if (first + i < I.experts) v = load_floats(I.logits + (i64)row * I.x_stride + first + i);
        score[i] = v.x, score[i + 1] = v.y, score[i + 2] = v.z, score[i + 3] = v.w;
    }
#pragma unroll
    for (int i = 0; i < PER; ++i) {
        score[i] = sigmoid(score[i]);
        choice[i] = score[i] + bias[i];
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
#pragma unroll 1
    for (int slot = 0; slot < I.topk; ++slot) {
        float best = lowest, value = 0.f;
        int index = 0;
#pragma unroll
        for (int i = PER - 1; i >= 0; --i)
            if (choice[i] >= best) best = choice[i], index = i, value = score[i];
        u32 bits = __float_as_uint(best + 0.0f), key = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
        u32 top = __reduce_max_sync(0xffffffffu, key);
        int expert = (int)__reduce_min_sync(0xffffffffu, key == top ? (u32)(first + index) : 0xffffu);
        int owner = expert / PER;
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

template <int PER>
__device__ __forceinline__ void choose_all(const Instr& I, Shared& S, int rows, int warp, int lane, u32 sign) {
    float bias[PER];
#pragma unroll
    for (int i = 0; i < PER; ++i)
        bias[i] = lane * PER + i < I.experts ? __ldg(I.bias + lane * PER + i) : __uint_as_float(0xff800000u);
    if (I.sync) grid_wait(S);
    for (int row = warp; row < rows; row += WARPS) choose<PER>(I, S, row, lane, bias, sign);
}

// Fills the tables: the rows' choices, the distinct experts in ascending order, and each one's slot in each row.
__device__ __forceinline__ void route(const Instr& I, Shared& S, int rows, int number, u32 sign) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (I.sync) grid_arrive(S, number);
    for (int i = threadIdx.x; i < CHOSEN * ROWS / 4; i += MULTIPLIERS) ((u32*)S.slot)[i] = 0xffffffffu;
    if (I.kind == LOAD_ROUTE) {
        if (I.sync) grid_wait(S);
        for (int row = warp; row < rows; row += WARPS)
            if (lane < I.topk) {
                S.id[row][lane] = (int)load_whole(I.ids + row * I.topk + lane);
                S.weight[row][lane] = load_float(I.weights + row * I.topk + lane);
            }
    } else if (I.experts <= 128) choose_all<4>(I, S, rows, warp, lane, sign);
    else if (I.experts <= 256) choose_all<8>(I, S, rows, warp, lane, sign);
    else choose_all<16>(I, S, rows, warp, lane, sign);
    if (warp == 0) MARK(S.grid.trace, number, 4);
    if (rows == 1) {  // a row's experts are distinct: each one's place is how many are before it
        if (warp == 0) {
            __syncwarp();
            int mine = lane < I.topk ? S.id[0][lane] : 0xffff, place = 0;
#pragma unroll
            for (int s = 0; s < TOPK; ++s) place += __shfl_sync(0xffffffffu, mine, s) < mine;
            if (lane < I.topk) S.expert[place] = (u16)mine, S.slot[place][0] = (u8)lane;
            if (lane == 0) S.chosen = I.topk;
            __syncwarp();
            if (lane == 0) mbar_arrive(&S.tables, 1);
        }
        both_sync();
        return;
    }
    multipliers_sync();
    if (warp == 0) {
        int pairs = rows * TOPK;
        S.bits[lane] = 0;
        __syncwarp();
#pragma unroll 1
        for (int p = lane; p < pairs; p += 32)
            if (p % TOPK < I.topk) atomicOr(&S.bits[S.id[p / TOPK][p % TOPK] / 32], 1u << (S.id[p / TOPK][p % TOPK] % 32));
        __syncwarp();
        u32 mine = S.bits[lane];
        int count = __popc(mine), before = count;
        for (int step = 1; step < 32; step *= 2) {
            int other = __shfl_up_sync(0xffffffffu, before, step);
            if (lane >= step) before += other;
        }
        if (lane == 31) S.chosen = before;
        before -= count;
        u32 rest = mine;
#pragma unroll 1
        for (int at = before; rest; rest &= rest - 1) S.expert[at++] = (u16)(lane * 32 + __ffs(rest) - 1);
        __syncwarp();
        if (lane == 0) mbar_arrive(&S.tables, 1);  // the copier needs no more
#pragma unroll 1
        for (int p = lane; p - lane < pairs; p += 32) {
            int row = p / TOPK, slot = p % TOPK;
            bool there = p < pairs && slot < I.topk;
            int expert = there ? S.id[row][slot] : 0;
            int rank = __shfl_sync(0xffffffffu, before, expert / 32);
            u32 lower_ones = __shfl_sync(0xffffffffu, mine, expert / 32) & ((1u << (expert % 32)) - 1);
            if (there) S.slot[rank + __popc(lower_ones)][row] = (u8)slot;
        }
    }
    multipliers_sync();
    for (int u = threadIdx.x; u < S.chosen; u += MULTIPLIERS) {
        int many = 0;
#pragma unroll 1
        for (int row = 0; row < rows; ++row)
            if (S.slot[u][row] != 255) S.who[u][many++] = (u8)row;
        S.many[u] = (u8)many;
    }
    both_sync();  // the reducer reads the tables too
}
