"""Absorbed attention of one step over the latent cache: the queries' way in, split attention, the way out.

Imported only where CUDA is. Letters as in ops.mla: R rows, n heads, C latent width, D = C + rope width. A pair is a
row and a head.

The order of a row's sums, whatever the other rows and the length of the cache: blocks of BLOCK absolute positions, each
with its own largest score; the blocks of an absolute group merged one after the other; the groups weighed against the
row's largest score and added up, TOGETHER at a time. Few pairs have a program for every block, and the merging is left
to the kernel that combines; many pairs have a program for every group, which writes less. Both merge by the same
operations in the same order: those kernels are compiled without contraction of products and sums, and where a fused one
is meant it is written so.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .chain import chained

TILE = 64  # most pairs of one attention program
# Fewest where a program has one block. There the weights lie in shared memory where the rope keys were. With 64 pairs
# both are swizzled alike; with 16 ptxas 12.8 loses the address when it makes the second kind of descriptor from it, and
# all positions of a block but the first 16 get weights from elsewhere. In the loop over a group no place has two uses.
LEAST = 64
BLOCK = 64  # positions at once: with TILE pairs, what two stages of the pipeline leave room for in shared memory
GROUP = 5  # blocks of a group: 9 rows of 32 heads over 8192 positions are 130 programs, and an H200 has 132 processors
MOST_GROUPS = 128  # beyond, groups grow with the cache's capacity
MOST_BLOCKS = 256  # of a cache whose blocks may have programs of their own
ROWS = 32  # most rows of a step
TOGETHER = 32  # groups at once when they are added up
COLUMNS = 32  # of a combining program
EMPTY = tl.constexpr(0xFF800000)  # a level of nothing: no score, and no sum


@triton.jit
def _product(out, x, right, gate, head, cols, ld_out, ld_x, head_out, head_x, ld_gate, R, live,
             K: tl.constexpr, BR: tl.constexpr, GATED: tl.constexpr):  # fmt: skip
    """Some columns of one head for all rows. Rows beyond the live ones are read, but they stay in their own sums: so
    nothing has to wait for the count but the store."""
    rows, ks = tl.arange(0, BR), tl.arange(0, K)
    count = tl.minimum(tl.load(live).to(tl.int32), R)
    left = tl.load(x + rows[:, None] * ld_x + head * head_x + ks[None, :], mask=rows[:, None] < R, other=0.0)
    if GATED:
        opened = 1.0 / (1.0 + tl.exp(-tl.load(gate + rows * ld_gate + head, mask=rows < R, other=0.0).to(tl.float32)))
    value = tl.dot(left, right).to(out.dtype.element_ty)
    if GATED:
        value = (value.to(tl.float32) * opened[:, None]).to(out.dtype.element_ty)
    tl.store(out + rows[:, None] * ld_out + head * head_out + cols[None, :], value, mask=rows[:, None] < count)


@triton.jit
def _heads(out, x, w, gate, ld_out, ld_x, head_out, head_x, ld_gate, R, live, K: tl.constexpr, N: tl.constexpr,
           BR: tl.constexpr, BN: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    head, cols = tl.program_id(0), tl.program_id(1) * BN + tl.arange(0, BN)
    if PDL:
        gdc_launch_dependents()
    right = tl.load(w + (head * K + tl.arange(0, K))[:, None] * N + cols[None, :])  # nothing in a step writes weights
    if PDL:
        gdc_wait()
    _product(out, x, right, gate, head, cols, ld_out, ld_x, head_out, head_x, ld_gate, R, live, K, BR, GATED)


def heads(out: Tensor, x: Tensor, w: Tensor, rows: Tensor, gate: Tensor | None = None) -> None:
    """out[R, n, N] = x[R, n, K] @ w[n, K, N], times sigmoid(gate[R, n]) if given; float32 sums, rounded before the gate
    and after it. rows: int64 [1] live rows."""
    count, n, inner = x.shape
    outer = w.shape[2]
    wide = min(32, outer)
    assert inner & (inner - 1) == 0 and outer % wide == 0 and w.is_contiguous()
    _heads[(n, outer // wide)](
        out, x, w, gate if gate is not None else x, out.stride(0), x.stride(0), out.stride(1), x.stride(1),
        gate.stride(0) if gate is not None else 0, count, rows, K=inner, N=outer, BR=_tall(count), BN=wide,
        GATED=gate is not None, PDL=chained(), num_warps=4, launch_pdl=chained(),
    )  # fmt: skip


def _tall(rows: int) -> int:
    assert rows <= ROWS
    return 16 if rows <= 16 else 32


@triton.jit
def _turn(target, source, turn, row, pairs, inside, ROPE: tl.constexpr, TURNED: tl.constexpr):
    """Channels 2 * pairs and 2 * pairs + 1 of ``source``, rotated for the row where the model rotates."""
    first = tl.load(source + 2 * pairs, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + 2 * pairs + 1, mask=inside, other=0.0).to(tl.float32)
    if TURNED:
        cos = tl.load(turn + (row * (ROPE // 2) + pairs) * 2)
        sin = tl.load(turn + (row * (ROPE // 2) + pairs) * 2 + 1)
        first, second = first * cos - second * sin, second * cos + first * sin
    tl.store(target + 2 * pairs, first.to(target.dtype.element_ty), mask=inside)
    tl.store(target + 2 * pairs + 1, second.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _enter(query, q, w, cache, kv, norm, turn, positions, live, ld_q, head_q, ld_kv, ld_cache, R, eps,
           n: tl.constexpr, HEADS: tl.constexpr, NOPE: tl.constexpr, C: tl.constexpr, ROPE: tl.constexpr,
           TURNED: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    wide: tl.constexpr = C + ROPE
    which = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
    if which < n * (C // BN):  # a head's columns
        head, cols = which // (C // BN), which % (C // BN) * BN + tl.arange(0, BN)
        right = tl.load(w + (head * NOPE + tl.arange(0, NOPE))[:, None] * C + cols[None, :])  # as in _heads
        if PDL:
            gdc_wait()
        _product(query, q, right, q, head, cols, n * wide, ld_q, wide, head_q, 0, R, live, NOPE, BR, False)
    else:  # a row's rotated channels of all heads, or its entry in the cache
        if PDL:
            gdc_wait()
        left = which - n * (C // BN)
        row, pairs = left // 2, tl.arange(0, ROPE // 2)
        count, place = tl.load(live), tl.load(positions + row)
        if row < count:
            if left % 2 == 0:
                head = tl.arange(0, HEADS)[:, None]
                inside = head < n
                source = q + row * ld_q + head * head_q + NOPE
                _turn(query + (row * n + head) * wide + C, source, turn, row, pairs[None, :], inside, ROPE, TURNED)
            else:
                target, cols = cache + place * ld_cache, tl.arange(0, C)
                _turn(target + C, kv + row * ld_kv + C, turn, row, pairs, pairs < ROPE, ROPE, TURNED)
                latent = tl.load(kv + row * ld_kv + cols).to(tl.float32)
                scale = tl.rsqrt(tl.sum(latent * latent) / C + eps)
                normed = latent * scale * tl.load(norm + cols)
                tl.store(target + cols, normed.to(cache.dtype.element_ty))


def enter(
    query: Tensor, q: Tensor, w: Tensor, cache: Tensor, kv: Tensor, norm: Tensor, turn: Tensor | None,
    positions: Tensor, rows: Tensor, eps: float,
) -> None:  # fmt: skip
    """Absorbed queries and the rows' own cache entries: query[R, n, :C] = q[R, n, :nope] @ w[n, nope, C] (float32 sums,
    one rounding), query[R, n, C:] = the rotated rest of q, cache[positions[R]] = the normed latent and the rotated key.

    query: [R, n, D], contiguous; q: [R, n, nope + rope]; cache: [max_len, D]; kv: [R, D], the latent before its norm
    and the shared key; norm: [C] float32; turn: float32 [R, rope/2, 2] or None; positions: int64 [R]; rows: int64 [1].
    """
    count, n, wide = query.shape
    _, nope, latent = w.shape
    assert query.is_contiguous() and w.is_contiguous() and latent % 64 == 0 and nope & (nope - 1) == 0
    _enter[(n * (latent // 64) + 2 * count,)](
        query, q, w, cache, kv, norm, turn if turn is not None else norm, positions, rows,
        q.stride(0), q.stride(1), kv.stride(0), cache.stride(0), count, eps,
        n=n, HEADS=triton.next_power_of_2(n), NOPE=nope, C=latent, ROPE=wide - latent, TURNED=turn is not None,
        BR=_tall(count), BN=64, PDL=chained(), num_warps=4, launch_pdl=chained(),
    )  # fmt: skip


@triton.jit
def _merge(top, total, other, more):
    """Two parts of a softmax brought to one largest score: that score, the sum, the factors of either part's values."""
    new = tl.maximum(top, other)
    safe = tl.where(new == float("-inf"), 0.0, new)
    keep, add = tl.exp(top - safe), tl.exp(other - safe)
    return new, tl.fma(total, keep, more * add), keep, add


@triton.jit
def _quarters(line, mask, C: tl.constexpr, ROPE: tl.constexpr):
    """Lines of width D as the latent's four quarters and the rest."""
    cols = tl.arange(0, C // 4)[None, :]
    a = tl.load(line + cols, mask=mask, other=0.0)
    b = tl.load(line + C // 4 + cols, mask=mask, other=0.0)
    c = tl.load(line + C // 2 + cols, mask=mask, other=0.0)
    d = tl.load(line + C // 4 * 3 + cols, mask=mask, other=0.0)
    return a, b, c, d, tl.load(line + C + tl.arange(0, ROPE)[None, :], mask=mask, other=0.0)


@triton.jit
def _weigh(c, q, at, limit, first, scale, BLOCK: tl.constexpr):
    """The block at ``at``: its largest scores and its sums, [TILE], and its rounded weights, [BLOCK, TILE].

    Pairs stand in the columns, since they may be few and the tensor cores take 64 rows at least. A sum of products
    that each begin at zero: chained ones would be done twice, by either half of the warps.
    """
    score = tl.dot(c[4], tl.trans(q[4])) * scale
    score = tl.fma(tl.dot(c[3], tl.trans(q[3])), scale, score)
    score = tl.fma(tl.dot(c[2], tl.trans(q[2])), scale, score)
    score = tl.fma(tl.dot(c[1], tl.trans(q[1])), scale, score)
    score = tl.fma(tl.dot(c[0], tl.trans(q[0])), scale, score)
    if at + BLOCK - 1 > first:  # else every row sees the whole block
        score = tl.where((at + tl.arange(0, BLOCK))[:, None] <= limit[None, :], score, float("-inf"))
    high = tl.max(score, 0)
    weight = tl.exp(score - tl.where(high == float("-inf"), 0.0, high)[None, :])
    return high, tl.sum(weight, 0), weight.to(c[0].dtype)


@triton.jit
def _attend(part, level, query, cache, positions, live, ld_cache, R, scale, span, slots,
            n: tl.constexpr, C: tl.constexpr, ROPE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
            BLOCK: tl.constexpr, GROUPED: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    # programs that read the same part of the cache follow one another, so that it comes from memory once
    tile, which = tl.program_id(0), tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    rows, pairs = tl.arange(0, ROWS), tile * TILE + tl.arange(0, TILE)
    count = tl.minimum(tl.load(live).to(tl.int32), R)
    known = tl.load(positions + rows, mask=rows < R, other=-1).to(tl.int32)
    limit = tl.load(positions + pairs // n, mask=pairs < R * n, other=-1).to(tl.int32)
    first = tl.load(positions + tile * TILE // n).to(tl.int32)  # positions ascend
    last = tl.max(tl.where(rows < count, known, -1))
    start = which * span
    if (tile * TILE < count * n) & (start <= last):
        inside, cols, lines = pairs < count * n, tl.arange(0, C // 4), tl.arange(0, BLOCK)
        # a dead row's query stays in its own column
        q = _quarters(query + pairs[:, None] * (C + ROPE), (pairs < R * n)[:, None], C, ROPE)
        block = cache + start.to(tl.int64) * ld_cache + (lines * ld_cache)[:, None]
        if GROUPED:
            top, total = tl.full((TILE,), float("-inf"), tl.float32), tl.zeros((TILE,), tl.float32)
            a0 = tl.zeros((C // 4, TILE), tl.float32)
            a1 = tl.zeros((C // 4, TILE), tl.float32)
            a2 = tl.zeros((C // 4, TILE), tl.float32)
            a3 = tl.zeros((C // 4, TILE), tl.float32)
            for at in range(start, tl.minimum(start + span, last + 1), BLOCK):
                c = _quarters(block + (at - start) * ld_cache, (lines <= last - at)[:, None], C, ROPE)
                high, amount, weight = _weigh(c, q, at, limit, first, scale, BLOCK)
                top, total, keep, add = _merge(top, total, high, amount)
                keep, add = keep[None, :], add[None, :]
                a0 = tl.fma(a0, keep, tl.dot(tl.trans(c[0]), weight) * add)
                a1 = tl.fma(a1, keep, tl.dot(tl.trans(c[1]), weight) * add)
                a2 = tl.fma(a2, keep, tl.dot(tl.trans(c[2]), weight) * add)
                a3 = tl.fma(a3, keep, tl.dot(tl.trans(c[3]), weight) * add)
        else:
            c = _quarters(block, (lines <= last - start)[:, None], C, ROPE)
            top, total, weight = _weigh(c, q, start, limit, first, scale, BLOCK)
            a0, a1 = tl.dot(tl.trans(c[0]), weight), tl.dot(tl.trans(c[1]), weight)
            a2, a3 = tl.dot(tl.trans(c[2]), weight), tl.dot(tl.trans(c[3]), weight)
        at = (which * R * n + pairs).to(tl.int64)
        target = part + at[None, :] * C + cols[:, None]
        tl.store(target, a0, mask=inside[None, :])
        tl.store(target + C // 4, a1, mask=inside[None, :])
        tl.store(target + C // 2, a2, mask=inside[None, :])
        tl.store(target + C // 4 * 3, a3, mask=inside[None, :])
        own = level + (pairs * slots + which) * 2  # a pair's lie together for the kernel that combines
        tl.store(own, top, mask=inside)
        tl.store(own + 1, total, mask=inside)


@triton.jit
def _level(packed):
    """A largest score and a sum that were loaded as one."""
    return packed.to(tl.int32).to(tl.float32, bitcast=True), (packed >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _combine(out, part, level, positions, live, R, n: tl.constexpr, C: tl.constexpr, SPAN: tl.constexpr,
             SLOTS: tl.constexpr, STEPS: tl.constexpr, TOGETHER: tl.constexpr, COLUMNS: tl.constexpr,
             PDL: tl.constexpr):  # fmt: skip
    """Some columns of a pair. All that is read of a round is under way at once, and waits for the position alone."""
    pair, cols = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row, groups = pair // n, tl.arange(0, TOGETHER) * STEPS
    ahead = R * n * C  # from a part to the next
    levels = level + pair * SLOTS
    line = part + pair * C + cols[None, :] + (groups * ahead)[:, None]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    count, place = tl.load(live), tl.load(positions + row).to(tl.int32)
    # parts that this row sees; later ones are left out, or zero in a group
    held = tl.where(row < count, place // SPAN + 1, 0)
    top = float("-inf")
    if SLOTS > TOGETHER * STEPS:
        for begin in tl.static_range(0, SLOTS, TOGETHER * STEPS):
            for step in tl.static_range(STEPS):
                known = tl.load(levels + groups + (begin + step), mask=groups < held - (begin + step), other=EMPTY)
                top = tl.maximum(top, tl.max(_level(known)[0]))
    acc, total = tl.zeros((COLUMNS,), tl.float32), 0.0
    for begin in tl.static_range(0, SLOTS, TOGETHER * STEPS):
        packed, values = (), ()
        for step in tl.static_range(STEPS):
            packed += (tl.load(levels + groups + (begin + step), mask=groups < held - (begin + step), other=EMPTY),)
        for step in tl.static_range(STEPS):
            seen = (groups < held - (begin + step))[:, None]
            values += (tl.load(line + (begin + step) * ahead, mask=seen, other=0.0),)
        if begin < held:  # a block of its own, or ptxas moves loads down to their uses to save registers
            high = tl.full((TOGETHER,), float("-inf"), tl.float32)
            amount = tl.zeros((TOGETHER,), tl.float32)
            sums = tl.zeros((TOGETHER, COLUMNS), tl.float32)
            for step in tl.static_range(STEPS):
                other, more = _level(packed[step])
                if STEPS == 1:  # groups, merged where they were made
                    high, amount, sums = other, more, values[step]
                else:
                    high, amount, keep, add = _merge(high, amount, other, more)
                    sums = tl.fma(sums, keep[:, None], values[step] * add[:, None])
            weight = tl.exp(high - (tl.max(high) if SLOTS == TOGETHER * STEPS else top))
            # sums of the same shapes in either form, for the order of a sum comes with the shape
            acc += tl.sum(sums * weight[:, None], 0)
            total += tl.sum(amount * weight)
    tl.store(out + pair * C + cols, (acc / total).to(out.dtype.element_ty), mask=cols < tl.where(row < count, C, 0))


def parts_of(pairs: int, capacity: int) -> tuple[int, int, int]:
    """For so many pairs over a cache of ``capacity`` positions: blocks of a part, parts, parts of a group."""
    blocks = triton.cdiv(capacity, BLOCK)
    group = max(GROUP, triton.cdiv(blocks, MOST_GROUPS))
    if pairs <= TILE and blocks <= MOST_BLOCKS:
        return 1, blocks, group
    return group, triton.cdiv(blocks, group), 1


def attend(
    out: Tensor, query: Tensor, cache: Tensor, positions: Tensor, rows: Tensor, scale: float, part: Tensor,
    level: Tensor,
) -> None:  # fmt: skip
    """out[R, n, C]; see ops.mla.attend_reference. The weights are rounded to the cache's type before they meet it.

    part: float32 [parts, R * n, C] and level: float32 [R * n, whole rounds of parts, 2] (largest score, sum) are
    scratch; see ``scratch``.
    """
    count, n, wide = query.shape
    latent, pairs = out.shape[2], count * n
    held, parts, steps = parts_of(pairs, cache.shape[0])
    tile = min(TILE, max(16 if held > 1 else LEAST, triton.next_power_of_2(pairs)))
    assert count <= ROWS and latent % COLUMNS == 0 and out.is_contiguous() and query.is_contiguous()
    _attend[(triton.cdiv(pairs, tile), parts)](
        part, level, query, cache, positions, rows, cache.stride(0), count, scale, held * BLOCK, level.shape[1],
        n=n, C=latent, ROPE=wide - latent, ROWS=ROWS, TILE=tile, BLOCK=BLOCK, GROUPED=held > 1, PDL=chained(),
        num_warps=8, num_stages=2, enable_fp_fusion=False, launch_pdl=chained(),
    )  # fmt: skip
    _combine[(pairs, latent // COLUMNS)](
        out, part, level.view(torch.int64), positions, rows, count, n=n, C=latent, SPAN=held * BLOCK,
        SLOTS=level.shape[1], STEPS=steps, TOGETHER=TOGETHER, COLUMNS=COLUMNS, PDL=chained(),
        num_warps=4, num_stages=1, enable_fp_fusion=False, launch_pdl=chained(),
    )  # fmt: skip


def scratch(rows: int, heads: int, latent: int, cache: Tensor) -> tuple[Tensor, Tensor]:
    """``part`` and ``level`` of ``attend``."""
    pairs = rows * heads
    _, parts, steps = parts_of(pairs, cache.shape[0])
    slots = triton.cdiv(parts, TOGETHER * steps) * TOGETHER * steps
    part = torch.zeros(parts, pairs, latent, dtype=torch.float32, device=cache.device)
    return part, torch.zeros(pairs, slots, 2, dtype=torch.float32, device=cache.device)
