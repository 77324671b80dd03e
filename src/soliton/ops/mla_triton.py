"""Absorbed attention of one step over the latent cache: the queries' way in, split attention, the way out.

Imported only where CUDA is. Letters as in ops.mla: R rows, n heads, C latent width, D = C + rope width. The cache is
read in absolute splits of a fixed size, each walked in absolute blocks; a row's splits are combined in order. So a
row's sums have one order whatever the other rows and the length of the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .chain import chained

TILE = 32  # (row, head) pairs of one attention program
BLOCK = 64  # positions at once
MOST_SPLITS = 64


@triton.jit
def _heads(out, x, w, gate, ld_out, ld_x, head_out, head_x, ld_gate, R, live, K: tl.constexpr, N: tl.constexpr,
           BR: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr):  # fmt: skip
    head, part = tl.program_id(0), tl.program_id(1)
    rows, cols = tl.arange(0, BR), part * BN + tl.arange(0, BN)
    gdc_launch_dependents()
    gdc_wait()
    count = tl.minimum(tl.load(live).to(tl.int32), R)
    inside = rows < count
    acc = tl.zeros((BR, BN), dtype=tl.float32)
    for at in range(0, K, BK):
        ks = at + tl.arange(0, BK)
        left = tl.load(x + rows[:, None] * ld_x + head * head_x + ks[None, :], mask=inside[:, None], other=0.0)
        right = tl.load(w + (head * K + ks)[:, None] * N + cols[None, :])
        acc = tl.dot(left, right, acc)
    value = acc.to(out.dtype.element_ty)
    if GATED:
        opened = 1.0 / (1.0 + tl.exp(-tl.load(gate + rows * ld_gate + head, mask=inside, other=0.0).to(tl.float32)))
        value = (value.to(tl.float32) * opened[:, None]).to(out.dtype.element_ty)
    tl.store(out + rows[:, None] * ld_out + head * head_out + cols[None, :], value, mask=inside[:, None])


def heads(out: Tensor, x: Tensor, w: Tensor, rows: Tensor, gate: Tensor | None = None) -> None:
    """out[R, n, N] = x[R, n, K] @ w[n, K, N], times sigmoid(gate[R, n]) if given; float32 sums, rounded before the gate
    and after it. rows: int64 [1] live rows."""
    count, n, inner = x.shape
    outer = w.shape[2]
    tall, wide = (16 if count <= 16 else 32), min(64, outer)
    assert inner % 64 == 0 and outer % wide == 0 and w.is_contiguous()
    _heads[(n, outer // wide)](
        out, x, w, gate if gate is not None else x, out.stride(0), x.stride(0), out.stride(1), x.stride(1),
        gate.stride(0) if gate is not None else 0, count, rows,
        K=inner, N=outer, BR=tall, BN=wide, BK=min(128, inner), GATED=gate is not None, num_warps=4,
        launch_pdl=chained(),
    )  # fmt: skip


@triton.jit
def _enter(query, cache, q, kv, norm, turn, positions, live, ld_q, head_q, ld_query, ld_kv, ld_cache, R, eps, n,
           NOPE: tl.constexpr, C: tl.constexpr, ROPE: tl.constexpr, TURNED: tl.constexpr):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    gdc_launch_dependents()
    gdc_wait()
    if row < tl.load(live).to(tl.int32):
        pairs = tl.arange(0, ROPE // 2)
        if head < n:
            source = q + row * ld_q + head * head_q + NOPE
            target = query + row * ld_query + head * (C + ROPE) + C
        else:
            place = tl.load(positions + row)
            source = kv + row * ld_kv + C
            target = cache + place * ld_cache + C
            cols = tl.arange(0, C)
            latent = tl.load(kv + row * ld_kv + cols).to(tl.float32)
            scale = tl.rsqrt(tl.sum(latent * latent) / C + eps)
            normed = latent * scale * tl.load(norm + cols)
            tl.store(cache + place * ld_cache + cols, normed.to(cache.dtype.element_ty))
        first = tl.load(source + 2 * pairs).to(tl.float32)
        second = tl.load(source + 2 * pairs + 1).to(tl.float32)
        if TURNED:
            cos = tl.load(turn + (row * (ROPE // 2) + pairs) * 2)
            sin = tl.load(turn + (row * (ROPE // 2) + pairs) * 2 + 1)
            first, second = first * cos - second * sin, second * cos + first * sin
        tl.store(target + 2 * pairs, first.to(query.dtype.element_ty))
        tl.store(target + 2 * pairs + 1, second.to(query.dtype.element_ty))


def enter(
    query: Tensor, cache: Tensor, q: Tensor, kv: Tensor, norm: Tensor, turn: Tensor | None, positions: Tensor,
    rows: Tensor, eps: float,
) -> None:  # fmt: skip
    """The rotated channels of the queries into query[R, n, C:], and the rows' own entries into the cache.

    query: [R, n, D]; cache: [max_len, D]; q: [R, n, nope + rope]; kv: [R, D], the latent before its norm and the shared
    key; norm: [C] float32; turn: float32 [R, rope/2, 2] or None; positions: int64 [R].
    """
    count, n, wide = query.shape
    latent = norm.shape[0]
    _enter[(count, n + 1)](
        query, cache, q, kv, norm, turn if turn is not None else norm, positions, rows,
        q.stride(0), q.stride(1), query.stride(0), kv.stride(0), cache.stride(0), count, eps, n,
        NOPE=q.shape[2] - (wide - latent), C=latent, ROPE=wide - latent, TURNED=turn is not None, num_warps=4,
        launch_pdl=chained(),
    )  # fmt: skip


@triton.jit
def _attend(part, level, query, cache, positions, live, ld_cache, n, R, scale, split,
            C: tl.constexpr, ROPE: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    which, tile = tl.program_id(0), tl.program_id(1)
    gdc_launch_dependents()
    gdc_wait()
    count = tl.minimum(tl.load(live).to(tl.int32), R)
    start = which * split
    pairs = tile * TILE + tl.arange(0, TILE)
    if (count > 0) & (tile * TILE < count * n):
        last = tl.load(positions + count - 1)
        if start <= last:
            inside = pairs < count * n
            row = pairs // n
            limit = tl.load(positions + row, mask=inside, other=-1)
            cols, ropes = tl.arange(0, C), tl.arange(0, ROPE)
            q = tl.load(query + pairs[:, None] * (C + ROPE) + cols[None, :], mask=inside[:, None], other=0.0)
            qr = tl.load(query + pairs[:, None] * (C + ROPE) + C + ropes[None, :], mask=inside[:, None], other=0.0)
            top = tl.full((TILE,), float("-inf"), tl.float32)
            total = tl.zeros((TILE,), tl.float32)
            acc = tl.zeros((TILE, C), tl.float32)
            end = tl.minimum(start + split, last + 1)
            for at in range(start, end, BLOCK):
                place = at + tl.arange(0, BLOCK)
                there = place <= last
                base = cache + place.to(tl.int64)[:, None] * ld_cache
                c = tl.load(base + cols[None, :], mask=there[:, None], other=0.0)
                r = tl.load(base + C + ropes[None, :], mask=there[:, None], other=0.0)
                score = tl.dot(q, tl.trans(c))
                score = tl.dot(qr, tl.trans(r), score) * scale
                score = tl.where(place[None, :] <= limit[:, None], score, float("-inf"))
                new = tl.maximum(top, tl.max(score, 1))
                safe = tl.where(new == float("-inf"), 0.0, new)
                weight = tl.exp(score - safe[:, None])
                keep = tl.exp(top - safe)
                total = total * keep + tl.sum(weight, 1)
                acc = acc * keep[:, None]
                acc = tl.dot(weight.to(c.dtype), c, acc)
                top = new
            at = (which * R * n + pairs).to(tl.int64)
            tl.store(part + at[:, None] * C + cols[None, :], acc, mask=inside[:, None])
            tl.store(level + at * 2, top, mask=inside)
            tl.store(level + at * 2 + 1, total, mask=inside)


@triton.jit
def _combine(out, part, level, positions, live, n, R, split, C: tl.constexpr):
    pair = tl.program_id(0)
    row = pair // n
    gdc_launch_dependents()
    gdc_wait()
    if row < tl.load(live).to(tl.int32):
        cols = tl.arange(0, C)
        splits = (tl.load(positions + row) // split + 1).to(tl.int32)
        top = float("-inf")
        for s in range(splits):
            top = tl.maximum(top, tl.load(level + (s * R * n + pair) * 2))
        acc = tl.zeros((C,), tl.float32)
        total = 0.0
        for s in range(splits):
            at = (s * R * n + pair).to(tl.int64)
            weight = tl.exp(tl.load(level + at * 2) - top)
            total += weight * tl.load(level + at * 2 + 1)
            acc += weight * tl.load(part + at * C + cols)
        tl.store(out + pair * C + cols, (acc / total).to(out.dtype.element_ty))


def split_of(positions: int) -> int:
    """Positions of a split for a cache of so many: a multiple of BLOCK that makes at most MOST_SPLITS."""
    return -(-positions // (MOST_SPLITS * BLOCK)) * BLOCK


def attend(
    out: Tensor, query: Tensor, cache: Tensor, positions: Tensor, rows: Tensor, scale: float, part: Tensor,
    level: Tensor,
) -> None:  # fmt: skip
    """out[R, n, C]; see ops.mla.attend_reference. The weights are rounded to the cache's type before they meet it.

    part: float32 [splits, R * n, C] and level: float32 [splits, R * n, 2] (largest score, sum) are scratch.
    """
    count, n, wide = query.shape
    latent = out.shape[2]
    split = split_of(cache.shape[0])
    splits = triton.cdiv(cache.shape[0], split)
    _attend[(splits, triton.cdiv(count * n, TILE))](
        part, level, query, cache, positions, rows, cache.stride(0), n, count, scale, split,
        C=latent, ROPE=wide - latent, TILE=TILE, BLOCK=BLOCK, num_warps=8, num_stages=1, launch_pdl=chained(),
    )  # fmt: skip
    _combine[(count * n,)](
        out, part, level, positions, rows, n, count, split, C=latent, num_warps=4, launch_pdl=chained()
    )


def scratch(rows: int, heads: int, latent: int, cache: Tensor) -> tuple[Tensor, Tensor]:
    """``part`` and ``level`` of ``attend``."""
    splits = triton.cdiv(cache.shape[0], split_of(cache.shape[0]))
    part = torch.zeros(splits, rows * heads, latent, dtype=torch.float32, device=cache.device)
    return part, torch.zeros(splits, rows * heads, 2, dtype=torch.float32, device=cache.device)
