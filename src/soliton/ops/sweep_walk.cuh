// Which weights a block takes, in which order; the warp that brings them, and the warp that adds up what came of them.

// Where this block stands in the grid for an instruction, and its share of what there is.
struct Share {
    int place, groups, terms, begin, end;

    __device__ __forceinline__ Share(const Instr& I, const Shared& S) {
        u32 grid = gridDim.x, at = blockIdx.x + I.start;
        if (at >= grid) at -= grid;
        place = (int)at;
        groups = I.n / 8;
        terms = I.kind == UP ? S.chosen : I.kind == DOWN ? S.chosen + (I.w2 != nullptr) : I.terms;
        u32 all = groups * (I.kind == UP || I.split ? terms : 1);
        begin = (int)(all * at / grid);
        end = (int)(all * (at + 1) / grid);
    }
};

// The pieces of this block in order. UP: an equal share of all chosen experts' groups. Else every term over the block's
// own groups, whose sums stay here. With `split` the shares are equal in terms, so a block may begin in the midst of a
// group's terms (its tail) and end in the midst of another's (its head): its groups of a term lie together, with the tail
// from some term on and with the head up to some term. A sum is handed from the block with the head to the block with the
// tail, so terms are always added in one order.
struct Walk {
    const Instr& I;
    const Shared& S;
    int terms, groups;  // of a sum, of a term; UP: chosen experts
    int first, end;     // group with the tail or first whole one; the first that is not whole
    int tail, head;     // the first term of the tail, terms of the head; 0 without
    int term, group, turn, left;

    __device__ Walk(const Instr& I, const Shared& S) : I(I), S(S), term(0), turn(0) {
        Share own(I, S);
        groups = own.groups, terms = own.terms;
        tail = head = left = 0;
        first = own.begin, end = own.end;
        if (I.kind == UP) {
            left = own.end - own.begin;
            term = own.begin / groups;
            group = own.begin - term * groups;
        } else {
            if (I.split) {
                first = own.begin / terms, end = own.end / terms;
                tail = own.begin - first * terms, head = own.end - end * terms;
            }
            group = low();
        }
    }
    __device__ __forceinline__ int low() const { return first + (term < tail); }  // groups of this term
    __device__ __forceinline__ int high() const { return end + (term < head); }
    __device__ __forceinline__ void step(int teams, int by) {
        turn += by;
        while (turn >= teams) turn -= teams;
    }
    // The next of so many groups, equally many for each team; returns how many.
    __device__ __forceinline__ int shared_out(Piece& p, const Shape& shape, int there) {
        int count = min_(shape.per, there), parts = min_(count, shape.teams), span = 1;
        while ((span + 1) * parts <= count) ++span;
        p.group = group, p.term = (short)term, p.turn = (u8)turn;
        p.parts = (u8)parts, p.span = (u8)span;
        step(shape.teams, parts);
        return parts * span;
    }
    __device__ __forceinline__ bool next(Piece& p) {
        p.kept = 0, p.span = 1;
        if (I.kind == UP) {
            if (left <= 0) return false;
            int count = shared_out(p, I.shape, min_(left, groups - group));
            p.flags = 0;
            left -= count;
            if ((group += count) == groups) group = 0, ++term;
            return true;
        }
        while (group >= high()) {
            if (++term >= terms) return false;
            group = low();
            step(I.shape.teams, 1);
        }
        const Shape& shape = term + 1 == terms ? I.last : I.shape;
        int there = high() - group;
        if (terms == 1) {
            group += shared_out(p, shape, there);
            p.flags = LAST;
            return true;
        }
        p.group = group, p.term = (short)term, p.turn = (u8)turn;
        int span = min_(shape.per, there), many = 1, flags = SEVERAL;
        if (term + 1 == terms) {
            if (turn >= shape.teams) p.turn = (u8)(turn = 0);
        } else if (group == low() && span == there) {  // several terms of the same groups
            int until = terms - (I.last.width != I.shape.width);
            if (term < tail) until = min_(until, tail);
            if (term < head) until = min_(until, head);
            many = min_(min_(shape.per / span, shape.teams), until - term);
        }
        int after = term + many;
        if (after == terms) flags |= LAST;
        if (tail > 0 && term == tail && group == first) flags |= ADOPTS;  // its first group is the tail
        if (after == head && group + span > end) flags |= HANDS;          // its last group is the head
        p.kept = (short)(group - first);
        p.parts = (u8)many, p.span = (u8)span, p.flags = (u8)flags;
        term = after - 1;
        group += span;
        if (many > 1) step(shape.teams, many - 1);
        return true;
    }
    // The weights of a term from a group on, and the columns of a row of them.
    __device__ __forceinline__ const u16* weights(int term, int group, int& row) const {
        row = I.k;
        const u16* w = I.w;
        if (I.kind == UP || I.kind == DOWN) {
            if (I.kind == DOWN && term == S.chosen) w = I.w2, row = I.k2;
            else w += (i64)S.expert[term] * I.n * I.k;
        } else
            w += term * I.shape.width;
        return w + (i64)group * 8 * row;
    }
};

// ---- copier --------------------------------------------------------------------------------------------------------

struct Copier {
    Shared& S;
    u8* ring;
    const i64* live;
    i64* trace;
    int size, lane;
    int put, pieces, oldest;  // where the next piece may lie, pieces so far, the oldest that is in the ring
    u32 parity;
    bool known, frozen;

    __device__ void look() {  // whether the step is frozen, as soon as what came before has finished
        if (known) return;
        wait_for_previous();
        known = true;
        frozen = live != nullptr && load_whole(live) <= 0;
    }

    // Room for so many bytes, behind the last piece or at the ring's beginning; the first ring is filled without a wait.
    __device__ __forceinline__ int room(int bytes) {
        while (!frozen) {
            if (oldest == pieces) return 0;
            if (pieces - oldest < MOST) {
                int end = S.queue[oldest % QUEUE].offset;  // what is taken: from there to put
                if (put > end) {
                    if (size - put >= bytes) return put;
                    if (bytes < end) return 0;
                } else if (end - put > bytes)
                    return put;
            }
            look();
            if (frozen) break;
            mbar_wait(&S.empty[oldest % QUEUE], oldest / QUEUE & 1);
            ++oldest;
        }
        return 0;
    }

    __device__ void push(const Walk& walk, Piece& p, const Shape& shape) {
        int width = shape.width;
        u32 rows = p.span * 8, bytes = rows * width * 2;
        put = room(bytes * p.parts);
        if (frozen) return;
        p.offset = put;
        p.share = TURNS / (int)(p.parts * shape.blocks);
        int at = pieces % QUEUE;
        if (lane == 0) {
            S.queue[at] = p;
            __threadfence_block();
            S.issued.set(pieces + 1);
            mbar_expect(&S.full[at], bytes * p.parts);
        }
        __syncwarp();
        u32 to = smem(ring) + put;
        int row;
        if (p.flags & SEVERAL) {
            for (int q = 0; q < p.parts; ++q, to += bytes) {
                const u16* w = walk.weights(p.term + q, p.group, row);
                copy(to, w, row, width, rows, at);
            }
        } else {
            const u16* w = walk.weights(p.term, p.group, row);
            copy(to, w, row, width, rows * p.parts, at);
        }
        put += bytes * p.parts;
        ++pieces;
    }
    __device__ __forceinline__ void copy(u32 to, const u16* w, int row, int width, u32 rows, int at) {
        u32 bytes = width * 2;
        if (row == width) {  // large copies stream faster
            if (lane == 0) copy_in(to, w, rows * bytes, &S.full[at]);
        } else
#pragma unroll 1
            for (u32 r = lane; r < rows; r += 32) copy_in(to + r * bytes, w + (i64)r * row, bytes, &S.full[at]);
    }

    // What this block will take first of a product of the launch after this one, while what lies between leaves the memory
    // idle: at most `experts` bytes of its share.
    __device__ __forceinline__ void foresee(const Instr& I) {
        look();
        if (frozen) return;
        if (pieces > 0) mbar_wait(&S.empty[(pieces - 1) % QUEUE], (pieces - 1) / QUEUE & 1);
        Share own(I, S);
        const u8* from = (const u8*)(I.w + (i64)own.begin * 8 * I.k);
        i64 bytes = min((i64)(own.end - own.begin) * 16 * I.k, (i64)I.experts);
        constexpr int CHUNK_BYTES = 8192;
#pragma unroll 1
        for (i64 at = (i64)lane * CHUNK_BYTES; at < bytes; at += 32 * CHUNK_BYTES)
            prefetch(from + at, (u32)min((i64)CHUNK_BYTES, bytes - at));
    }

    __device__ void run(int count) {
        bool waiting = false;
        int recurs = 0;  // past the last recurrence that nothing was brought for since
        for (int i = 0; i < count && !frozen; ++i) {
            const Instr& I = S.list[i];
            if (I.kind == ROUTE || I.kind == LOAD_ROUTE) waiting = true;
            else if (I.kind == PREFETCH) foresee(I);
            else if (I.kind == KDA) recurs = i + 1;
            else {
                if (recurs) {  // weights on their way would keep its input waiting, and there is time for them behind it
                    look();
                    if (frozen) break;
                    passed(S.landed, recurs - 1);
                    __syncwarp();
                    recurs = 0;
                }
                if (waiting && I.kind != PRODUCT) {
                    look();
                    if (frozen) break;
                    mbar_wait(&S.tables, parity);
                    parity ^= 1;
                    waiting = false;
                }
                Walk walk(I, S);
                Piece p, q;
                int before = pieces;
                for (bool more = walk.next(p); more && !frozen; p = q) {
                    more = walk.next(q);
                    if (!more) p.flags |= FINAL;
                    push(walk, p, p.flags & LAST ? I.last : I.shape);
                    if (pieces == before + 1) MARK(trace, i, 6);
                }
                if (pieces > before) MARK(trace, i, 7);
            }
            if (lane == 0) {
                S.ends[i] = pieces;
                __threadfence_block();
                S.ended.set(i + 1);
            }
        }
        look();
        if (frozen)  // copies in flight must land before the block may end
            for (int i = 0; i < pieces; ++i) mbar_wait(&S.full[i], 0);
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
    bool stale;  // rows have been normed since the scales were made

    // A row's norm is one factor of its sums: made once, of the squares that the multipliers of every block have left.
    __device__ __forceinline__ void scales(const Instr& I) {
        if (lane < rows) {
            float sum = 0.f;
#pragma unroll 1
            for (int b = 0; b < I.shape.blocks; ++b) sum += S.stat[b][lane];
            S.scale[lane] = rsqrtf(sum / (float)I.k + I.eps);
        }
        __syncwarp();
        stale = false;
    }

    // The sum of one row and column over the blocks of a unit.
    __device__ __forceinline__ float blocks_of(int unit, int blocks, int row, int column) {
        const float* from = &S.partial[at][unit][row][column];
        float part[WARPS], sum = 0.f;
#pragma unroll
        for (int b = 0; b < WARPS; ++b) part[b] = b < blocks ? from[b * ROWS * 8] : 0.f;
#pragma unroll
        for (int b = 0; b < WARPS; ++b)
            if (b < blocks) sum += part[b];
        return sum;
    }

    __device__ __forceinline__ bool piece(const Instr& I, int place, u32 sign, int number, int begun) {
        mbar_wait(&S.ready[at], parity);
        STEP(S.grid.trace, number, taken - begun, 10);
        const Piece p = S.queue[taken % QUEUE];
        bool normed = I.prologue == RMS || I.prologue == KEEP, last = p.flags & LAST, several = p.flags & SEVERAL;
        bool adopts = p.flags & ADOPTS;  // its first group
        if (normed && stale) scales(I);
        int blocks = last ? I.last.blocks : I.shape.blocks, groups = several ? p.span : p.parts * p.span;
        // In the midst of the experts' terms only the rows that chose this one have something to add.
        bool few = I.kind == DOWN && rows > 1 && p.parts == 1 && p.term > 0 && p.term < S.chosen && !last && !(p.flags & (ADOPTS | HANDS));
        int per = few ? S.many[p.term] : rows, total = groups * per, column = lane & 7;
        int group = 0, place_of = lane >> 3;  // of this lane's sum
        for (int base = 0; base < total; base += 4, place_of += 4) {
            while (place_of >= per) place_of -= per, ++group;
            int row = few ? S.who[p.term][place_of] : place_of;
            bool there = group < groups;
            float sum = 0.f;
            if (several) {
                float* kept = &S.total[p.kept + (there ? group : 0)][row][column];
                if (adopts && there && group == 0) sum = adopt(S.grid.carry + ((i64)(place - 1) * ROWS + row) * 8 + column);
                else if (p.term) sum = *kept;
#pragma unroll 1
                for (int q = 0; q < p.parts; ++q) {
                    float of = blocks_of((q * p.span + (there ? group : 0)) * blocks, blocks, row, column);
                    if (I.kind == DOWN && p.term + q < S.chosen) {
                        int slot = S.slot[p.term + q][row];
                        if (slot != 255) sum += S.weight[row][slot] * of;
                    } else
                        sum += of;
                }
                if (!last) {
                    if (!there) continue;
                    if ((p.flags & HANDS) && group + 1 == groups) hand(S.grid.carry + ((i64)place * ROWS + row) * 8 + column, sum);
                    else *kept = sum;
                    continue;
                }
            } else
                sum = blocks_of((there ? group : 0) * blocks, blocks, row, column);
            if (normed) sum *= S.scale[row];
            int n = (p.group + group) * 8 + column;
            if (I.kind == UP || I.epilogue == SWIGLU) {
                float rise = __shfl_down_sync(0xffffffffu, sum, 1);
                int slot = I.kind == UP ? S.slot[p.term][row] : 0;
                if (there && column % 2 == 0 && slot != 255)
                    ((u16*)I.out)[(i64)row * I.out_stride + slot * I.slot_stride + n / 2] = half(swiglu(sum, rise, I.limit));
                continue;
            }
            i64 to = (i64)row * I.out_stride + n;
            if (I.epilogue == ADD) {
                float next = __shfl_down_sync(0xffffffffu, sum, 1);
                if (there && column % 2 == 0) add((u16*)I.out + to, pair(sum, next));
            } else if (there) {
                if (I.epilogue == STORE_FLOAT) ((float*)I.out)[to] = sum;
                else if (I.epilogue == STORE_TAGGED) relaxed((u64*)I.out + to, (u64)sign << 32 | __float_as_uint(sum));
                else ((u16*)I.out)[to] = half(sum);
            }
        }
        __syncwarp();
        STEP(S.grid.trace, number, taken - begun, 11);
        ++taken;
        if (lane == 0) S.reduced.set(taken);
        if (++at == BUFFERS) at = 0, parity ^= 1;
        return !(p.flags & FINAL);
    }

    __device__ void run(int count) {
        u32 epoch = *(const volatile u32*)S.grid.epoch;
        for (int i = 0; i < count; ++i) {
            const Instr& I = S.list[i];
            if (I.sync) both_sync();
            if (I.kind == ROUTE || I.kind == LOAD_ROUTE) {
                both_sync();  // the tables are there
                continue;
            }
            if (I.kind == KDA || I.kind == PREFETCH) continue;
            if (I.prologue == RMS) stale = true;
            Share own(I, S);
            int begun = taken;
            if (own.begin < own.end)
                while (piece(I, own.place, epoch + i + 1, i, begun)) {}
        }
    }
};
