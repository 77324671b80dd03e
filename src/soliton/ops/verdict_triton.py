"""The small parts of a step between the products, each as one kernel: refill, the greedy verdict, commit, publish.

Imported only where CUDA is. Every function does what speculation.verify does with torch calls, on the same tensors, bit
for bit. R: rows of the step's buffers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .chain import chained

SPLITS = 64  # parts in which a row of logits is searched


@triton.jit
def _refill(
    tokens, positions, rows, turned, anchor, length, drafted, stopped, turn, drafts,
    WIDTH: tl.constexpr, TURNED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    place = tl.load(length) + row
    tl.store(positions + row, place)
    if row == 0:
        tl.store(tokens, tl.load(anchor))
        tl.store(rows, (tl.load(drafted) * drafts + 1) * (1 - tl.load(stopped)))
    if TURNED:
        at = tl.arange(0, WIDTH)
        tl.store(turned + row * WIDTH + at, tl.load(turn + place * WIDTH + at))


def refill(
    tokens: Tensor, positions: Tensor, rows: Tensor, turned: Tensor | None, anchor: Tensor, length: Tensor,
    drafted: Tensor, stopped: Tensor, turn: Tensor | None, drafts: int,
) -> None:  # fmt: skip
    """positions = length ..; tokens[0] = anchor; rows = 1 + drafts if there are any, 0 in a frozen step; turned[R] =
    turn[positions]."""
    width = turn.shape[1] * 2 if turn is not None else 1
    some = tokens  # any pointer where there is none
    _refill[(positions.shape[0],)](
        tokens, positions, rows, turned if turned is not None else some, anchor, length, drafted, stopped,
        turn if turn is not None else some, drafts, WIDTH=width, TURNED=turn is not None, PDL=chained(), num_warps=1,
        launch_pdl=chained(),
    )  # fmt: skip


@triton.jit
def _best(values, indices, logits, live, ld, V, CHUNK: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr):
    row, part = tl.program_id(0), tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if row < tl.load(live).to(tl.int32):
        at = part * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits + row * ld + at, mask=at < V, other=float("-inf"))
        best, index = tl.max(x, axis=0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(values + row * SPLITS + part, best)
        tl.store(indices + row * SPLITS + part, part * CHUNK + index)


@triton.jit
def _close(
    new_tokens, taken_to, reason, anchor, length, generated, stopped, limit, stop_mask, rolling, i, draft, accepted,
    final, COUNT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The end of any verdict: ``accepted`` of the drafts draft[i] and ``final`` behind them, cut at the first event."""
    new = tl.where(i < accepted, draft, tl.where(i == accepted, final, -1))
    at, made, running = tl.load(length), tl.load(generated), 1 - tl.load(stopped)
    offered = tl.minimum((accepted + 1).to(tl.int64), rolling - at % rolling)
    stops = tl.load(stop_mask + tl.maximum(new, 0), mask=i < COUNT, other=0) != 0
    event = (stops | (made + i + 1 >= tl.load(limit))) & (i < offered)
    first = tl.min(tl.where(event, i, ROWS), axis=0)
    found = first < ROWS
    taken = tl.where(found, (first + 1).to(tl.int64), offered) * running
    stopping = tl.max(tl.where((i == first) & stops, 1, 0), axis=0)
    code = tl.where(found, tl.where(stopping == 1, 1, 2), 0).to(tl.int64) * running
    new = tl.where(i < taken, new, -1)
    tl.store(new_tokens + i, new.to(tl.int64), mask=i < COUNT)
    last = tl.sum(tl.where(i == taken - 1, new, 0), axis=0).to(tl.int64)
    tl.store(anchor, tl.where(taken > 0, last, tl.load(anchor)))
    tl.store(taken_to, taken)
    tl.store(reason, code)
    tl.store(length, at + taken)
    tl.store(generated, made + taken)
    tl.store(stopped, tl.maximum(1 - running, (code > 0).to(tl.int64)))


@triton.jit
def _greedy(
    values, indices, new_tokens, taken_to, reason, anchor, length, generated, stopped, tokens, rows, limit, stop_mask,
    V, rolling, COUNT: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i, part = tl.arange(0, ROWS), tl.arange(0, SPLITS)
    live = tl.load(rows).to(tl.int32)
    there = i < live
    parts = i[:, None] * SPLITS + part[None, :]
    value = tl.load(values + parts, mask=there[:, None], other=float("-inf"))
    index = tl.load(indices + parts, mask=there[:, None], other=0)
    top = tl.max(value, axis=1)
    best = tl.min(tl.where(value == top[:, None], index, 2147483647), axis=1)
    best = tl.where(there, best, 0)
    draft = tl.load(tokens + i + 1, mask=i + 1 < COUNT, other=-1).to(tl.int32)
    match = (draft == best) & (i < live - 1)
    accepted = tl.min(tl.where(match, ROWS, i), axis=0)
    final = tl.sum(tl.where(i == accepted, best, 0), axis=0)
    _close(
        new_tokens, taken_to, reason, anchor, length, generated, stopped, limit, stop_mask, rolling, i, draft, accepted,
        final, COUNT, ROWS,
    )  # fmt: skip


def greedy(
    values: Tensor, indices: Tensor, logits: Tensor, new_tokens: Tensor, taken: Tensor, reason: Tensor, anchor: Tensor,
    length: Tensor, generated: Tensor, stopped: Tensor, tokens: Tensor, rows: Tensor, limit: Tensor, stop_mask: Tensor,
    vocab: int, rolling: int,
) -> None:  # fmt: skip
    """The verdict on a greedy step without processors: accepted drafts, the target's token, the cut at the first event
    and at multiples of ``rolling``, and what the next step starts from. values, indices: scratch [R, SPLITS], float32
    and int32."""
    count = tokens.shape[0]
    chunk = triton.next_power_of_2(triton.cdiv(vocab, SPLITS))
    _best[(count, SPLITS)](
        values, indices, logits, rows, logits.stride(0), vocab, CHUNK=chunk, SPLITS=SPLITS, PDL=chained(), num_warps=4,
        launch_pdl=chained(),
    )  # fmt: skip
    _greedy[(1,)](
        values, indices, new_tokens, taken, reason, anchor, length, generated, stopped, tokens, rows, limit,
        stop_mask.view(torch.uint8), vocab, rolling, COUNT=count, ROWS=max(2, triton.next_power_of_2(count)),
        SPLITS=SPLITS, PDL=chained(), num_warps=4, launch_pdl=chained(),
    )  # fmt: skip


@triton.jit
def _keep_row(to, rows, taken, flag, H, FLAGGED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.load(taken) - 1
    if row >= 0:
        value = tl.load(rows + row * H + at, mask=at < H)
        tl.store(to + at, value, mask=at < H)
        tl.store(to + H + at, value, mask=at < H)
        if FLAGGED:
            tl.store(flag, row * 0 + 1, mask=tl.program_id(0) == 0)


def _keep(to: Tensor, rows: Tensor, taken: Tensor, flag: Tensor | None) -> None:
    wide = rows.shape[1]
    _keep_row[(triton.cdiv(wide, 1024),)](
        to, rows, taken, flag if flag is not None else taken, wide, FLAGGED=flag is not None, BLOCK=1024,
        PDL=chained(), num_warps=4, launch_pdl=chained(),
    )  # fmt: skip


def commit_boundary(boundary: Tensor, hidden: Tensor, taken: Tensor) -> None:
    """boundary[2, H] = the last committed row of hidden[R, H], twice; taken 0 leaves it."""
    _keep(boundary, hidden, taken, None)


def keep_seed(seed: Tensor, drafted: Tensor, out: Tensor, taken: Tensor) -> None:
    """seed[2, H] = the last committed row of the MTP's out[R, H], twice, and drafted = 1; taken 0 leaves both."""
    _keep(seed, out, taken, drafted)


@triton.jit
def _publish(
    ring_tokens, ring_meta, new_tokens, taken, reason, length, rows, step, slots, COUNT: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, ROWS)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    now = tl.load(step)
    slot = now % slots
    tl.store(ring_tokens + slot * COUNT + i, tl.load(new_tokens + i, mask=i < COUNT), mask=i < COUNT)
    tl.store(ring_meta + slot * 4, tl.load(taken))
    tl.store(ring_meta + slot * 4 + 1, tl.load(reason))
    tl.store(ring_meta + slot * 4 + 2, tl.load(length))
    tl.store(ring_meta + slot * 4 + 3, tl.load(rows))
    tl.store(step, now + 1)


def publish(
    ring_tokens: Tensor, ring_meta: Tensor, new_tokens: Tensor, taken: Tensor, reason: Tensor, length: Tensor,
    rows: Tensor, step: Tensor,
) -> None:  # fmt: skip
    """Tokens and counts into the ring slot of this step; the step counter moves on."""
    slots, count = ring_tokens.shape
    _publish[(1,)](
        ring_tokens, ring_meta, new_tokens, taken, reason, length, rows, step, slots, COUNT=count,
        ROWS=max(2, triton.next_power_of_2(count)), PDL=chained(), num_warps=1, launch_pdl=chained(),
    )  # fmt: skip


# -- between the forwards of a chain -----------------------------------------------------------------------------------


@triton.jit
def _choose(tokens, values, indices, place, SPLITS: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    part = tl.arange(0, SPLITS)
    value, index = tl.load(values + part), tl.load(indices + part)
    best = tl.min(tl.where(value == tl.max(value, axis=0), index, 2147483647), axis=0)
    tl.store(tokens + place, best.to(tl.int64))


def choose(
    tokens: Tensor, values: Tensor, indices: Tensor, logits: Tensor, one: Tensor, place: int, vocab: int,
) -> None:  # fmt: skip
    """tokens[place] = the likeliest of logits[0], the lower index of equals. one: int64 [1], 1; values, indices:
    scratch [1, SPLITS]."""
    chunk = triton.next_power_of_2(triton.cdiv(vocab, SPLITS))
    _best[(1, SPLITS)](
        values, indices, logits, one, logits.stride(0), vocab, CHUNK=chunk, SPLITS=SPLITS, PDL=chained(), num_warps=4,
        launch_pdl=chained(),
    )  # fmt: skip
    _choose[(1,)](tokens, values, indices, place, SPLITS=SPLITS, PDL=chained(), num_warps=1, launch_pdl=chained())


@triton.jit
def _process(
    out, logits, counts, prompt_seen, bias, presence, frequency, repetition, generated, min_tokens, stop_mask, tokens,
    live, offset, V, ld, DRAFTS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = at < V
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if row < tl.load(live):
        x = tl.load(logits + row * ld + at, mask=inside, other=0.0)
        count = tl.load(counts + at, mask=inside, other=0)
        for i in tl.static_range(DRAFTS):
            count += ((i < row) & (tl.load(tokens + i) == at)).to(tl.int32)
        made = count > 0
        seen = made | (tl.load(prompt_seen + at, mask=inside, other=0) != 0)
        again = tl.load(repetition)
        value = tl.where(seen, tl.where(x > 0, x / again, x * again), x)
        lowered = value - tl.load(frequency) * count.to(tl.float32) - tl.load(presence)
        value = tl.where(made, lowered, value)
        more = tl.load(bias + at, mask=inside, other=0.0)
        value = tl.where(more != 0, value + more, value)
        early = tl.load(generated) + row + offset < tl.load(min_tokens)
        ends = tl.load(stop_mask + at, mask=inside, other=0) != 0
        value = tl.where(ends & (tl.zeros_like(at) + early.to(tl.int32) > 0), float("-inf"), value)
        tl.store(out + row * V + at, value, mask=inside)


def process(
    out: Tensor, logits: Tensor, counts: Tensor, prompt_seen: Tensor, bias: Tensor, presence: Tensor,
    frequency: Tensor, repetition: Tensor, generated: Tensor, min_tokens: Tensor, stop_mask: Tensor, tokens: Tensor,
    live: Tensor, offset: int,
) -> None:  # fmt: skip
    """out[R, V] float32: the processors of sampling.penalties.process on logits[R, >= V]. tokens: the drafts, row i
    sees the first i; offset: added to ``generated``, for a row that stands behind others."""
    rows, vocab = out.shape
    _process[(rows, triton.cdiv(vocab, 2048))](
        out, logits, counts, prompt_seen.view(torch.uint8), bias, presence, frequency, repetition, generated,
        min_tokens, stop_mask.view(torch.uint8), tokens, live, offset, vocab, logits.stride(0),
        DRAFTS=min(tokens.shape[0], rows - 1), CHUNK=2048, PDL=chained(), num_warps=4, launch_pdl=chained(),
    )  # fmt: skip


@triton.jit
def _restrict(out, logits, masks, live, V, ld, to, W, CHUNK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = at < V
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if row < tl.load(live):
        x = tl.load(logits + row * ld + at, mask=inside, other=0.0)
        word = tl.load(masks + row * W + at // 32, mask=inside, other=0)
        tl.store(out + row * to + at, tl.where((word >> at % 32) & 1 != 0, x, float("-inf")), mask=inside)


def restrict(out: Tensor, logits: Tensor, masks: Tensor, live: Tensor) -> None:
    """out[R, V] float32: sampling.penalties.restrict of logits[R, >= V], which out may be, to masks int32
    [R, ceil(V / 32)]. live: int64 [1], rows beyond it are left as they are."""
    rows, vocab = out.shape
    _restrict[(rows, triton.cdiv(vocab, 2048))](
        out, logits, masks, live, vocab, logits.stride(0), out.stride(0), masks.stride(0), CHUNK=2048, PDL=chained(),
        num_warps=4, launch_pdl=chained(),
    )  # fmt: skip


@triton.jit
def _chain_row(
    ids, positions, turned, tokens, length, turn, j, WIDTH: tl.constexpr, TURNED: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    place = tl.load(length) + (j - 1)
    tl.store(ids + row, tl.load(tokens + j))
    tl.store(positions + row, place)
    if TURNED:
        at = tl.arange(0, WIDTH)
        tl.store(turned + row * WIDTH + at, tl.load(turn + place * WIDTH + at))


def draft_row(
    ids: Tensor, positions: Tensor, turned: Tensor | None, tokens: Tensor, length: Tensor, turn: Tensor | None, j: int,
) -> None:  # fmt: skip
    """Inputs of the chain's forward j, one row twice: draft j at position length + j - 1."""
    width = turn.shape[1] * 2 if turn is not None else 1
    _chain_row[(2,)](
        ids, positions, turned if turned is not None else ids, tokens, length, turn if turn is not None else ids, j,
        WIDTH=width, TURNED=turn is not None, PDL=chained(), num_warps=1, launch_pdl=chained(),
    )  # fmt: skip


@triton.jit
def _extend(ids, live, new_tokens, taken, COUNT: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr):
    i = tl.arange(0, ROWS)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tl.store(ids + i, tl.maximum(tl.load(new_tokens + i, mask=i < COUNT, other=0), 0), mask=i < COUNT)
    tl.store(live, tl.load(taken))


def extend_rows(ids: Tensor, live: Tensor, new_tokens: Tensor, taken: Tensor) -> None:
    """ids[R] = the new tokens, 0 behind them; live = how many: none in a frozen step."""
    count = ids.shape[0]
    _extend[(1,)](
        ids, live, new_tokens, taken, COUNT=count, ROWS=max(2, triton.next_power_of_2(count)), PDL=chained(),
        num_warps=1, launch_pdl=chained(),
    )  # fmt: skip
