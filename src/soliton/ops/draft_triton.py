"""A block drafter's small kernels in a step on a GPU, each beside its reference in ops.draft or model.dspark. Only
where CUDA is.

Letters as in ops.draft. The rows of all query heads of one key/value head lie together: row b * G + g of group m is row
b of head m * G + g.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .chain import chained

BLOCK = 64  # positions of a tile
PROGRAMS = 264  # of an attention: two a multiprocessor


@triton.jit
def _turned(x, weight, turn, row, eps, D: tl.constexpr):
    """The two halves of a head's values, normed, weighted and rotated."""
    half = tl.arange(0, D // 2)
    first, second = tl.load(x + half).to(tl.float32), tl.load(x + D // 2 + half).to(tl.float32)
    scale = tl.rsqrt((tl.sum(first * first) + tl.sum(second * second)) / D + eps)
    first = first * scale * tl.load(weight + half)
    second = second * scale * tl.load(weight + D // 2 + half)
    cos = tl.load(turn + row * D + half * 2)
    sin = tl.load(turn + row * D + half * 2 + 1)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _query(out, q, weight, turn, ld, HEADS: tl.constexpr, D: tl.constexpr, eps, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, head = tl.program_id(0), tl.program_id(1)
    half = tl.arange(0, D // 2)
    first, second = _turned(q + row * ld + head * D, weight, turn, row, eps, D)
    to = out + (row * HEADS + head) * D + half
    tl.store(to, first.to(out.dtype.element_ty))
    tl.store(to + D // 2, second.to(out.dtype.element_ty))


def query(out: Tensor, q: Tensor, weight: Tensor, turn: Tensor, eps: float) -> None:
    """See ops.draft.query_reference. out: [R, n, d] contiguous; q: [R, n * d], rows at any stride; d a power of two."""
    rows, heads, width = out.shape
    assert q.stride(1) == 1 and out.is_contiguous() and turn.is_contiguous()
    _query[(rows, heads)](
        out, q, weight, turn, q.stride(0), heads, width, eps, PDL=chained(), num_warps=1, launch_pdl=chained()
    )


@triton.jit
def _store(cache, kv, weight, turn, positions, ld, plane, GROUPS: tl.constexpr, D: tl.constexpr, eps,
           PDL: tl.constexpr):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, group = tl.program_id(0), tl.program_id(1)
    half = tl.arange(0, D // 2)
    first, second = _turned(kv + row * ld + group * D, weight, turn, row, eps, D)
    to = cache + (tl.load(positions + row) * GROUPS + group) * D
    tl.store(to + half, first.to(cache.dtype.element_ty))
    tl.store(to + D // 2 + half, second.to(cache.dtype.element_ty))
    whole = tl.arange(0, D)
    tl.store(to + plane + whole, tl.load(kv + row * ld + (GROUPS + group) * D + whole))


def store(cache: Tensor, kv: Tensor, weight: Tensor, turn: Tensor, positions: Tensor, eps: float) -> None:
    """See ops.draft.store_reference. cache: [2, P, m, d] contiguous; kv: [R, 2 * m * d], rows at any stride."""
    _, _, groups, width = cache.shape
    assert cache.is_contiguous() and kv.stride(1) == 1 and kv.dtype == cache.dtype and turn.is_contiguous()
    _store[(kv.shape[0], groups)](
        cache, kv, weight, turn, positions, kv.stride(0), cache.stride(0), groups, width, eps, PDL=chained(),
        num_warps=1, launch_pdl=chained(),
    )  # fmt: skip


@triton.jit
def _attend(part, level, q, cache, length, plane, scale, B: tl.constexpr, SPLITS: tl.constexpr, G: tl.constexpr,
            GROUPS: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
            PDL: tl.constexpr):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    group, split = tl.program_id(0), tl.program_id(1)
    end = tl.load(length) + B
    span = tl.cdiv(tl.cdiv(end, SPLITS), BLOCK) * BLOCK  # positions of a split
    start = split * span
    stop = tl.minimum(start + span, end)
    rows, cols, places = tl.arange(0, M), tl.arange(0, D), tl.arange(0, BLOCK)
    inside = rows < B * G
    head = (rows // G) * (GROUPS * G) + group * G + rows % G
    asked = tl.load(q + head[:, None] * D + cols[None, :], mask=inside[:, None], other=0.0)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    for at in range(start, stop, BLOCK):
        seen = at + places < stop
        line = ((at + places).to(tl.int64) * GROUPS + group) * D
        keys = tl.load(cache + line[None, :] + cols[:, None], mask=seen[None, :], other=0.0)
        scores = tl.dot(asked, keys, input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        kept = tl.exp(top - higher)
        values = tl.load(cache + plane + line[:, None] + cols[None, :], mask=seen[:, None], other=0.0)
        total = total * kept + tl.sum(weights, 1)
        acc = acc * kept[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        top = higher
    place = (group * SPLITS + split) * M + rows
    tl.store(part + place[:, None] * D + cols[None, :], acc)
    tl.store(level + place * 2, top)
    tl.store(level + place * 2 + 1, total)


@triton.jit
def _combine(out, part, level, SPLITS: tl.constexpr, PARTS: tl.constexpr, G: tl.constexpr, GROUPS: tl.constexpr,
             M: tl.constexpr, D: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, head = tl.program_id(0), tl.program_id(1)
    splits, cols = tl.arange(0, PARTS), tl.arange(0, D)
    there = splits < SPLITS
    place = ((head // G) * SPLITS + splits) * M + row * G + head % G
    top = tl.load(level + place * 2, mask=there, other=float("-inf"))  # of an empty split: -inf
    weight = tl.exp(top - tl.max(top))
    total = tl.sum(weight * tl.load(level + place * 2 + 1, mask=there, other=0.0))
    found = tl.load(part + place[:, None] * D + cols[None, :], mask=there[:, None], other=0.0)
    value = tl.sum(found * weight[:, None], 0) / total
    tl.store(out + (row * GROUPS * G + head) * D + cols, value.to(out.dtype.element_ty))


def scratch(q: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
    """What ``attend`` leaves between its two kernels: sums float32 [m, splits, M, d], and maxima with totals."""
    rows, heads, width = q.shape
    groups = cache.shape[2]
    tall, splits = _tall(rows * heads // groups), _splits(groups, cache.shape[1])
    made = torch.zeros(groups, splits, tall, width, dtype=torch.float32, device=q.device)
    return made, torch.zeros(groups, splits, tall, 2, dtype=torch.float32, device=q.device)


def _tall(rows: int) -> int:
    return max(16, int(triton.next_power_of_2(rows)))


def _splits(groups: int, positions: int) -> int:
    """Splits of the positions: enough programs for all multiprocessors, none without a tile at the longest."""
    return max(1, min(PROGRAMS // groups, triton.cdiv(positions, BLOCK)))


def attend(out: Tensor, q: Tensor, cache: Tensor, length: Tensor, part: Tensor, level: Tensor) -> None:
    """See ops.draft.attend_reference. out, q: [B, n, d] contiguous; cache: [2, P, m, d]; part, level: ``scratch``'s.
    Weights are rounded to the cache's dtype before they meet the values."""
    rows, heads, width = q.shape
    groups, splits, tall = part.shape[:3]
    each = heads // groups
    shape = {"SPLITS": splits, "G": each, "GROUPS": groups, "M": tall, "D": width, "PDL": chained()}
    _attend[(groups, splits)](
        part, level, q, cache, length, cache.stride(0), width**-0.5, B=rows, BLOCK=BLOCK, num_warps=4,
        launch_pdl=chained(), **shape,
    )  # fmt: skip
    _combine[(rows, heads)](
        out, part, level, PARTS=triton.next_power_of_2(splits), num_warps=4, launch_pdl=chained(), **shape
    )


@triton.jit
def _block_rows(ids, positions, turn, tokens, length, table, D: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, cols = tl.program_id(0), tl.arange(0, D)
    place = tl.load(length) + row
    tl.store(positions + row, place)
    tl.store(turn + row * D + cols, tl.load(table + place * D + cols))
    if row == 0:
        tl.store(ids, tl.load(tokens))


def block_rows(ids: Tensor, positions: Tensor, turn: Tensor, tokens: Tensor, length: Tensor, table: Tensor) -> None:
    """ids[0] = tokens[0]; positions[b] = length + b; turn[b] = table[positions[b]]; the other ids stay. ids, positions:
    int64 [B]; turn: float32 [B, d/2, 2]; table: float32 [P, d/2, 2]."""
    _block_rows[(ids.shape[0],)](
        ids, positions, turn, tokens, length, table, D=table[0].numel(), PDL=chained(), num_warps=1,
        launch_pdl=chained(),
    )  # fmt: skip


@triton.jit
def _context_rows(live, drafted, turn, taken, positions, table, D: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, cols = tl.program_id(0), tl.arange(0, D)
    tl.store(turn + row * D + cols, tl.load(table + tl.load(positions + row) * D + cols))
    if row == 0:
        count = tl.load(taken)
        tl.store(live, tl.maximum(count, 1))
        if count > 0:
            tl.store(drafted, 1)


def context_rows(live: Tensor, drafted: Tensor, turn: Tensor, taken: Tensor, positions: Tensor, table: Tensor) -> None:
    """turn[r] = table[positions[r]]; live = max(taken, 1); drafted = 1 where anything was taken."""
    _context_rows[(positions.shape[0],)](
        live, drafted, turn, taken, positions, table, D=table[0].numel(), PDL=chained(), num_warps=1,
        launch_pdl=chained(),
    )  # fmt: skip


@triton.jit
def _confide(out, hidden, w, bias, embedding, tokens, ld, FIRST: tl.constexpr, H: tl.constexpr, R: tl.constexpr,
             HP: tl.constexpr, RP: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot, cols = tl.program_id(0), tl.arange(0, HP)
    inside = cols < H
    row = tl.load(hidden + (slot + FIRST) * ld + cols, mask=inside, other=0.0).to(tl.float32)
    total = tl.sum(row * tl.load(w + cols, mask=inside, other=0.0))
    if R > 0:
        more = tl.arange(0, RP)
        e = tl.load(embedding + tl.load(tokens + slot) * R + more, mask=more < R, other=0.0).to(tl.float32)
        total += tl.sum(e * tl.load(w + H + more, mask=more < R, other=0.0))
    tl.store(out + slot, total + tl.load(bias))


def confide(out: Tensor, hidden: Tensor, w: Tensor, bias: Tensor, embedding: Tensor | None, tokens: Tensor) -> None:
    """See model.dspark.confidence. out: float32 [g]; hidden: [B, H], its last g rows are the drafts'; w: float32 [1, H
    (+ r)]; embedding: [vocab, r] or None; tokens: int64, entry k before draft k."""
    count, width = out.shape[0], hidden.shape[1]
    rank = 0 if embedding is None else embedding.shape[1]
    _confide[(count,)](
        out, hidden, w, bias, out if embedding is None else embedding, tokens, hidden.stride(0),
        FIRST=hidden.shape[0] - count, H=width, R=rank, HP=triton.next_power_of_2(width),
        RP=triton.next_power_of_2(max(rank, 1)), PDL=chained(), num_warps=4, launch_pdl=chained(),
    )  # fmt: skip


@triton.jit
def _schedule(rows, logits, temperatures, cost, threshold, SLOTS: tl.constexpr, MODE: tl.constexpr, EARLY: tl.constexpr,
              PDL: tl.constexpr):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    survival, tokens = 1.0, 1.0
    going = 1
    best = 0
    rate = 1.0
    if MODE == 1:
        rate = 1.0 / tl.load(cost)
    for slot in tl.static_range(SLOTS):
        sure = 1 / (1 + tl.exp(-tl.load(logits + slot) / tl.load(temperatures + slot)))
        if MODE == 0:
            going = tl.where(sure < threshold, 0, going)
            best += going
        else:
            survival *= sure
            tokens += survival
            here = tokens / tl.load(cost + slot + 1)
            if EARLY:
                going = tl.where(here > rate, going, 0)
                best += going
                rate = here
            else:
                best = tl.where(here > rate, slot + 1, best)
                rate = tl.maximum(rate, here)
    tl.store(rows, tl.minimum(tl.load(rows), (best + 1).to(tl.int64)))


def schedule(
    rows: Tensor, logits: Tensor, temperatures: Tensor, cost: Tensor | None, threshold: float, early: bool
) -> None:
    """rows = the fewer of rows and what the confidences call for: with ``cost`` (float32 [g + 1]) by the rate of
    tokens, ``early`` stopping at the first that does not improve; else up to the first below ``threshold``. See
    speculation.schedule; in float32."""
    _schedule[(1,)](
        rows, logits, temperatures, logits if cost is None else cost, threshold, SLOTS=temperatures.shape[0],
        MODE=int(cost is not None), EARLY=early, PDL=chained(), num_warps=1, launch_pdl=chained(),
    )  # fmt: skip
