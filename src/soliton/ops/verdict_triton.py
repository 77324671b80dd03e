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
    drafted: Tensor, stopped: Tensor, turn: Tensor | None, drafts: int, *, pdl: bool = True,
) -> None:  # fmt: skip
    """positions = length ..; tokens[0] = anchor; rows = 1 + drafts if there are any, 0 in a frozen step; turned[R] =
    turn[positions]."""
    width = turn.shape[1] * 2 if turn is not None else 1
    some = tokens  # any pointer where there is none
    _refill[(positions.shape[0],)](
        tokens, positions, rows, turned if turned is not None else some, anchor, length, drafted, stopped,
        turn if turn is not None else some, drafts, WIDTH=width, TURNED=turn is not None, PDL=pdl, num_warps=1,
        launch_pdl=pdl,
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


def greedy(
    values: Tensor, indices: Tensor, logits: Tensor, new_tokens: Tensor, taken: Tensor, reason: Tensor, anchor: Tensor,
    length: Tensor, generated: Tensor, stopped: Tensor, tokens: Tensor, rows: Tensor, limit: Tensor, stop_mask: Tensor,
    vocab: int, rolling: int, *, pdl: bool = True,
) -> None:  # fmt: skip
    """The verdict on a greedy step without processors: accepted drafts, the target's token, the cut at the first event
    and at multiples of ``rolling``, and what the next step starts from. values, indices: scratch [R, SPLITS], float32
    and int32."""
    count = tokens.shape[0]
    chunk = triton.next_power_of_2(triton.cdiv(vocab, SPLITS))
    _best[(count, SPLITS)](
        values, indices, logits, rows, logits.stride(0), vocab, CHUNK=chunk, SPLITS=SPLITS, PDL=pdl, num_warps=4,
        launch_pdl=pdl,
    )  # fmt: skip
    _greedy[(1,)](
        values, indices, new_tokens, taken, reason, anchor, length, generated, stopped, tokens, rows, limit,
        stop_mask.view(torch.uint8), vocab, rolling, COUNT=count, ROWS=max(2, triton.next_power_of_2(count)),
        SPLITS=SPLITS, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _boundary(boundary, hidden, taken, H, BLOCK: tl.constexpr, PDL: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.load(taken) - 1
    if row >= 0:
        value = tl.load(hidden + row * H + at, mask=at < H)
        tl.store(boundary + at, value, mask=at < H)
        tl.store(boundary + H + at, value, mask=at < H)


def commit_boundary(boundary: Tensor, hidden: Tensor, taken: Tensor, *, pdl: bool = True) -> None:
    """boundary[2, H] = the last committed row of hidden[R, H], twice; taken 0 leaves it."""
    size = 1024
    wide = hidden.shape[1]
    _boundary[(triton.cdiv(wide, size),)](
        boundary, hidden, taken, wide, BLOCK=size, PDL=pdl, num_warps=4, launch_pdl=pdl
    )


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
    rows: Tensor, step: Tensor, *, pdl: bool = True,
) -> None:  # fmt: skip
    """Tokens and counts into the ring slot of this step; the step counter moves on."""
    slots, count = ring_tokens.shape
    _publish[(1,)](
        ring_tokens, ring_meta, new_tokens, taken, reason, length, rows, step, slots, COUNT=count,
        ROWS=max(2, triton.next_power_of_2(count)), PDL=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
