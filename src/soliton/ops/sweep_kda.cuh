// Kimi Delta Attention of one step, by the multipliers; see ops/kda_triton.py for the law. An item is 32 value channels of
// a head. What does not depend on this step's projections is on its way before the grid is waited for. Rows are taken in
// chunks of 8: first everything of all of them that does not depend on the state, a warp a row; then the chain.

// The sum over four taps, its silu rounded as the model rounds it.
__device__ __forceinline__ float mixed(float a, float b, float c, float d, float wa, float wb, float wc, float wd) {
    float sum = a * wa;
    sum += b * wb;
    sum += c * wc;
    sum += d * wd;
    return wide(half(__fdividef(sum, 1.0f + __expf(-sum))));
}
__device__ __forceinline__ void spread(float (&to)[4], uint2 v) {
    to[0] = lower(v.x), to[1] = upper(v.x), to[2] = lower(v.y), to[3] = upper(v.y);
}
// A lane's four channels of a head; returns what norms the head.
__device__ __forceinline__ float mix(float (&to)[4], const uint2 (&rows)[TAPS], const float4 (&taps)[TAPS], float eps) {
    float x[TAPS][4], sum = 0.f;
#pragma unroll
    for (int t = 0; t < TAPS; ++t) spread(x[t], rows[t]);
    to[0] = mixed(x[0][0], x[1][0], x[2][0], x[3][0], taps[0].x, taps[1].x, taps[2].x, taps[3].x);
    to[1] = mixed(x[0][1], x[1][1], x[2][1], x[3][1], taps[0].y, taps[1].y, taps[2].y, taps[3].y);
    to[2] = mixed(x[0][2], x[1][2], x[2][2], x[3][2], taps[0].z, taps[1].z, taps[2].z, taps[3].z);
    to[3] = mixed(x[0][3], x[1][3], x[2][3], x[3][3], taps[0].w, taps[1].w, taps[2].w, taps[3].w);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += to[i] * to[i];
#pragma unroll
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    return rsqrtf(sum + eps);
}

// Weights of 8 outputs out of 128 columns, as a product takes them.
__device__ __forceinline__ void lift(uint4 (&w)[4], const u16* from, int lane) {
#pragma unroll
    for (int j = 0; j < 4; ++j) w[j] = __ldg((const uint4*)(from + lane / 4 * HEAD + j * 32 + lane % 4 * 8));
}
// The rows of a chunk that they are multiplied with.
__device__ __forceinline__ void low_rows(u32 (&v)[4][4], const u16* x, i64 x_stride, int count, int lane) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        v[j][0] = v[j][1] = v[j][2] = v[j][3] = 0;
        if (lane / 4 < count) load16(v[j], x + lane / 4 * x_stride + j * 32 + lane % 4 * 8);
    }
}
// Those outputs, rounded.
__device__ __forceinline__ void lifted(float* to, int stride, const uint4 (&w)[4], const u32 (&v)[4][4], int count, int lane) {
    int r = lane / 4;
    float c[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        u32 one[4] = {v[j][0], 0, v[j][1], 0}, two[4] = {v[j][2], 0, v[j][3], 0};
        product(c, one, w[j].x, w[j].y);
        product(c, two, w[j].z, w[j].w);
    }
    if (r < count) *(float2*)(to + r * stride + lane % 4 * 2) = make_float2(wide(half(c[0])), wide(half(c[1])));
}

__device__ __forceinline__ void kda(const Instr& I, Shared& S, int rows, int number) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Delta& D = S.delta;
    float* read = &S.partial[0][0][0][0];  // [2][DELTA_WARPS][READ]: what k, q read of the state, then their product
    int slots = I.experts, current = S.current, items = I.n * (HEAD / TILE);
    bool low = I.up_f != nullptr;
    if (I.sync) grid_arrive(S, number);
    for (int item = blockIdx.x, turn = 0; item < items || turn == 0; item += gridDim.x, ++turn) {
        bool there = item < items;
        int head = item / (HEAD / TILE), first = item % (HEAD / TILE) * TILE;  // first value channel
        int q_at = head * HEAD + lane * 4, k_at = I.n * HEAD + q_at, v_at = 2 * I.n * HEAD + head * HEAD + first;
        // this lane's part of the state: keys key .. + 3 by values value .. + 3
        int key = warp * 16 + lane / 8 * 4, value = lane % 8 * 4;
        i64 place = ((i64)head * HEAD + key) * HEAD + first + value;
        bool chains = there;
        // Set in every case: what is not would be kept for the whole kernel.
        float s[4][4] = {};
        float4 tq[TAPS] = {}, tk[TAPS] = {}, rate = {}, shift = {};
        float tv[TAPS] = {}, norm = 0.f;
        // forget rows of 16 keys a warp; gates of 8 values in the first four
        uint4 w[3][4] = {};
        const u16 *up_f = I.up_f + (i64)(head * HEAD + warp * 16) * HEAD, *up_g = I.up_g + (i64)(head * HEAD + first + warp * 8) * HEAD;
        if (there && low) {
            lift(w[0], up_f, lane), lift(w[1], up_f + 8 * HEAD, lane);
            if (warp < TILE / 8) lift(w[2], up_g, lane);
        }
        if (chains) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float4 f = load_floats(I.weights + (i64)current * I.slot_stride + place + i * HEAD);
                s[i][0] = f.x, s[i][1] = f.y, s[i][2] = f.z, s[i][3] = f.w;
            }
            const float* taps = (const float*)I.w;
#pragma unroll
            for (int t = 0; t < TAPS; ++t) {
                tq[t] = __ldg((const float4*)(taps + (i64)t * I.k + q_at));
                tk[t] = __ldg((const float4*)(taps + (i64)t * I.k + k_at));
                tv[t] = __ldg(taps + (i64)t * I.k + v_at + lane);
            }
            rate = __ldg((const float4*)((const float*)I.norm + q_at)), shift = __ldg((const float4*)(I.bias + q_at));
            norm = I.logits != nullptr ? __ldg(I.logits + first + lane) : 1.f;
        }
        if (turn == 0 && I.sync) grid_wait(S);
        if (turn == 0 && threadIdx.x < 32) MARK(S.grid.trace, number, 2);
        if (!there) break;
#pragma unroll 1
        for (int base = 0; base < rows; base += CHUNK) {
            int count = min_(CHUNK, rows - base);
            // With one row or two, four warps share a row: what makes q, k, the decays, and v with the rest.
            bool whole = rows > 2;
            int mine = whole ? warp : warp / 4, part = whole ? -1 : warp % 4, row = base + mine;
            bool of_q = mine < count && (whole || part == 0), of_k = mine < count && (whole || part == 1);
            bool of_d = mine < count && (whole || part == 2), of_v = mine < count && (whole || part == 3);
            uint2 q2[TAPS] = {}, k2[TAPS] = {}, f2 = {};
            u16 v1[TAPS] = {}, g1 = 0, b1 = 0;
#pragma unroll
            for (int t = 0; t < TAPS; ++t) {
                int at = row + t - (TAPS - 1);
                const u16* from = at < 0 ? I.w2 + (i64)(row + t) * I.x2_stride : I.x + (i64)at * I.x_stride;
                if (of_q) q2[t] = load8(from + q_at);
                if (of_k) k2[t] = load8(from + k_at);
                if (of_v) v1[t] = load_half(from + v_at + lane);
            }
            if (of_d && !low) f2 = load8(I.gate + (i64)row * I.gate_stride + q_at);
            if (of_v) {
                b1 = load_half(I.x2 + (i64)row * I.x_stride + head);
                if (!low && I.g != nullptr) g1 = load_half(I.g + (i64)row * I.g_stride + head * HEAD + first + lane);
            }
            if (low) {
                if (base) {
                    lift(w[0], up_f, lane), lift(w[1], up_f + 8 * HEAD, lane);
                    if (warp < TILE / 8) lift(w[2], up_g, lane);
                }
                u32 f[4][4], g[4][4];  // all on their way before the first is used
                low_rows(f, I.gate + (i64)base * I.gate_stride, I.gate_stride, count, lane);
                low_rows(g, I.g + (i64)base * I.g_stride, I.g_stride, warp < TILE / 8 ? count : 0, lane);
                lifted(&D.d[0][warp * 16], HEAD, w[0], f, count, lane);
                lifted(&D.d[0][warp * 16 + 8], HEAD, w[1], f, count, lane);
                if (warp < TILE / 8) lifted(&D.open[0][warp * 8], TILE, w[2], g, count, lane);
                multipliers_sync();
            }
            if (base == 0 && turn == 0 && warp == 0) MARK(S.grid.trace, number, 3);
            // this step's projections, for the window of the next
            u16* window = (u16*)I.w2 + (i64)(row + TAPS - 1) * I.x2_stride;
            if (of_q) {
                if (first == 0) *(uint2*)(window + q_at) = q2[TAPS - 1];
                float q[4];
                float n = mix(q, q2, tq, I.eps) * I.limit;
                *(float4*)&D.q[mine][lane * 4] = make_float4(q[0] * n, q[1] * n, q[2] * n, q[3] * n);
            }
            if (of_k) {
                if (first == 0) *(uint2*)(window + k_at) = k2[TAPS - 1];
                float q[4];
                float n = mix(q, k2, tk, I.eps);
                *(float4*)&D.k[mine][lane * 4] = make_float4(q[0] * n, q[1] * n, q[2] * n, q[3] * n);
            }
            if (of_d) {
                float f[4], rates[4] = {rate.x, rate.y, rate.z, rate.w}, shifts[4] = {shift.x, shift.y, shift.z, shift.w};
                if (low) {
                    float4 made = *(const float4*)&D.d[mine][lane * 4];
                    f[0] = made.x, f[1] = made.y, f[2] = made.z, f[3] = made.w;
                } else
                    spread(f, f2);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float g = f[i] + shifts[i];
                    if (I.groups) g = I.scaling * sigmoid(rates[i] * g);
                    else g = -rates[i] * (g > 20.0f ? g : __logf(1.0f + __expf(g)));
                    f[i] = __expf(g);
                }
                *(float4*)&D.d[mine][lane * 4] = make_float4(f[0], f[1], f[2], f[3]);
            }
            if (of_v) {
                window[v_at + lane] = v1[TAPS - 1];
                D.v[mine][lane] = mixed(wide(v1[0]), wide(v1[1]), wide(v1[2]), wide(v1[3]), tv[0], tv[1], tv[2], tv[3]);
                float open = 1.f;
                if (I.logits != nullptr) open = norm * sigmoid(low ? D.open[mine][lane] : wide(g1));
                D.open[mine][lane] = open;
                if (lane == 0) D.beta[mine] = sigmoid(wide(b1));
            }
            if (chains) {
                multipliers_sync();
                if (threadIdx.x == 0) S.landed.set(number + 1);  // the copier goes on
                if (base == 0 && turn == 0 && warp == 0) MARK(S.grid.trace, number, 4);
#pragma unroll 1
                for (int r = 0; r < count; ++r) {
                    int row = base + r;
                    float4 q4 = *(const float4*)&D.q[r][key], k4 = *(const float4*)&D.k[r][key], d4 = *(const float4*)&D.d[r][key];
                    float q[4] = {q4.x, q4.y, q4.z, q4.w}, k[4] = {k4.x, k4.y, k4.z, k4.w}, d[4] = {d4.x, d4.y, d4.z, d4.w};
                    float sums[2][4] = {{0.f, 0.f, 0.f, 0.f}, {0.f, 0.f, 0.f, 0.f}};  // k and q against the decayed state
                    float both = q[0] * k[0] + q[1] * k[1] + q[2] * k[2] + q[3] * k[3];
#pragma unroll
                    for (int i = 0; i < 4; ++i)
#pragma unroll
                        for (int j = 0; j < 4; ++j) {
                            s[i][j] *= d[i];
                            sums[0][j] += k[i] * s[i][j];
                            sums[1][j] += q[i] * s[i][j];
                        }
#pragma unroll
                    for (int step = 8; step < 32; step *= 2) {
                        both += __shfl_xor_sync(0xffffffffu, both, step);
#pragma unroll
                        for (int j = 0; j < 4; ++j) {
                            sums[0][j] += __shfl_xor_sync(0xffffffffu, sums[0][j], step);
                            sums[1][j] += __shfl_xor_sync(0xffffffffu, sums[1][j], step);
                        }
                    }
                    float* left = read + ((r & 1) * DELTA_WARPS + warp) * READ;
                    if (lane < 8) {
                        *(float4*)(left + value) = make_float4(sums[0][0], sums[0][1], sums[0][2], sums[0][3]);
                        *(float4*)(left + TILE + value) = make_float4(sums[1][0], sums[1][1], sums[1][2], sums[1][3]);
                    }
                    if (lane == 0) left[2 * TILE] = both;
                    multipliers_sync();
                    float with_k[4] = {0.f, 0.f, 0.f, 0.f}, with_q[4] = {0.f, 0.f, 0.f, 0.f};
                    const float* all = read + (r & 1) * DELTA_WARPS * READ + value;
                    float qk = 0.f;
#pragma unroll
                    for (int u = 0; u < DELTA_WARPS; ++u) {
                        float4 x = *(const float4*)(all + u * READ), y = *(const float4*)(all + u * READ + TILE);
                        qk += all[u * READ + 2 * TILE - value];
                        with_k[0] += x.x, with_k[1] += x.y, with_k[2] += x.z, with_k[3] += x.w;
                        with_q[0] += y.x, with_q[1] += y.y, with_q[2] += y.z, with_q[3] += y.w;
                    }
                    float4 v4 = *(const float4*)&D.v[r][value];
                    float v[4] = {v4.x, v4.y, v4.z, v4.w}, beta = D.beta[r], o[4];
                    int slot = current + 1 + row;
                    if (slot >= slots) slot -= slots;
                    float* to = I.weights + (i64)slot * I.slot_stride + place;
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        float u = (v[j] - with_k[j]) * beta;
                        o[j] = with_q[j] + qk * u;
#pragma unroll
                        for (int i = 0; i < 4; ++i) s[i][j] += k[i] * u;
                    }
#pragma unroll
                    for (int i = 0; i < 4; ++i) *(float4*)(to + i * HEAD) = make_float4(s[i][0], s[i][1], s[i][2], s[i][3]);
                    if (warp == r) {  // every warp knows the outputs
                        float4 open = *(const float4*)&D.open[r][value];
                        float squares = 0.f;
#pragma unroll
                        for (int j = 0; j < 4; ++j) o[j] = wide(half(o[j])), squares += o[j] * o[j];
#pragma unroll
                        for (int step = 1; step < 8; step *= 2) squares += __shfl_xor_sync(0xffffffffu, squares, step);
                        u16* out = (u16*)I.out + (i64)row * I.out_stride + head * HEAD + first + value;
                        if (lane < 8) *(uint2*)out = make_uint2(pair(o[0] * open.x, o[1] * open.y), pair(o[2] * open.z, o[3] * open.w));
                        if (lane == 0 && I.stats != nullptr) I.stats[((i64)row * I.n + head) * 4 + first / TILE] = squares;
                    }
                }
            }
            if (base + CHUNK < rows || item + (int)gridDim.x < items) multipliers_sync();  // the tables are written again
        }
    }
    if (threadIdx.x == 0) S.landed.set(number + 1);
    multipliers_sync();
}
