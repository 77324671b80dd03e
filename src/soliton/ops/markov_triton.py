"""Markov heads of block drafters in a step on a GPU, each kernel beside its reference in model.dspark: logits of a row,
the state of a recurrent head, greedy chains. Only where CUDA is."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .chain import chained

BLOCK = 64  # logits of a tile


@triton.jit
def _previous(tokens, values, indices, place, V, P: tl.constexpr, CHOSEN: tl.constexpr):
    """The token at ``place``: chosen here of the last row's P parts, and written by the first program, or read."""
    if CHOSEN:
        part = tl.arange(0, P)
        value = tl.load(values + part)
        best = tl.min(tl.where(value == tl.max(value, axis=0), tl.load(indices + part), V - 1), axis=0).to(tl.int64)
        if tl.program_id(0) == 0:
            tl.store(tokens + place, best)
    else:
        best = tl.load(tokens + place)
    return best


@triton.jit
def _mix_row(w, rows, s, e, h, cols, wide, ld, R: tl.constexpr, H: tl.constexpr, RNN: tl.constexpr):
    """Inner products of rows of w with the joint input: [state, embedding, hidden], or [hidden, embedding]."""
    line = w + rows[:, None] * ld
    at = tl.load(line + (2 * R if RNN else 0) + wide[None, :], mask=(wide < H)[None, :], other=0.0)
    total = tl.sum(at * h[None, :], 1) + tl.sum(tl.load(line + (R if RNN else H) + cols[None, :]) * e[None, :], 1)
    if RNN:
        total += tl.sum(tl.load(line + cols[None, :]) * s[None, :], 1)
    return total


@triton.jit
def _mix(out, after, before, embedding, hidden, w, bias, tokens, values, indices, place, at, ld_hidden, ld, V,
         R: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, BLOCK: tl.constexpr, RNN: tl.constexpr,
         FIRST: tl.constexpr, P: tl.constexpr, CHOSEN: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    rows, cols, wide = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, R), tl.arange(0, HP)
    token = embedding + _previous(tokens, values, indices, place, V, P, CHOSEN) * R
    e = tl.load(token + cols).to(tl.float32)
    h = tl.load(hidden + at * ld_hidden + wide, mask=wide < H, other=0.0).to(tl.float32)
    s = tl.zeros([R], tl.float32)
    if RNN and not FIRST:
        s = tl.load(before + cols)
    gate = 1 / (1 + tl.exp(-(_mix_row(w, rows, s, e, h, cols, wide, ld, R, H, RNN) + tl.load(bias + rows))))
    if RNN:
        new = _mix_row(w, rows + R, s, e, h, cols, wide, ld, R, H, RNN) + tl.load(bias + R + rows)
        result = _mix_row(w, rows + 2 * R, s, e, h, cols, wide, ld, R, H, RNN) + tl.load(bias + 2 * R + rows)
        old = tl.zeros([BLOCK], tl.float32)
        if not FIRST:
            old = tl.load(before + rows)
        tl.store(after + rows, gate * old + (1 - gate) * (2 / (1 + tl.exp(-2 * new)) - 1))
        tl.store(out + rows, 2 / (1 + tl.exp(-2 * result)) - 1)
    else:
        tl.store(out + rows, gate * tl.load(token + rows).to(tl.float32))


def mix(
    out: Tensor, after: Tensor, before: Tensor, embedding: Tensor, hidden: Tensor, w: Tensor, bias: Tensor,
    tokens: Tensor, place: int, at: int, last: tuple[Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """See model.dspark._markov_in, of a gated head (w: [r, H + r]) or a recurrent one (w: [3 r, 2 r + H]): out[r] is
    what its last product takes, after[r] the state that becomes of before[r], which is 0 at place 0; the two are
    different buffers. All float32 but embedding [vocab, r] and hidden [B, H]; r a power of two, 8 at least. last: as in
    ``chain``."""
    rank, width = embedding.shape[1], hidden.shape[1]
    assert w.is_contiguous() and embedding.is_contiguous() and hidden.stride(1) == 1 and rank >= 8
    values, indices = last or (bias, tokens)
    _mix[(rank // 8,)](
        out, after, before, embedding, hidden, w, bias, tokens, values, indices, place, at, hidden.stride(0),
        w.stride(0), embedding.shape[0], R=rank, H=width, HP=triton.next_power_of_2(width), BLOCK=8,
        RNN=w.shape[0] == 3 * rank, FIRST=place == 0, P=values.numel() if last else 1, CHOSEN=last is not None,
        PDL=chained(), num_warps=4, launch_pdl=chained(),
    )  # fmt: skip


@triton.jit
def _tile(out, base, line, e, outputs, N, V):
    """(the largest logit of a tile, its lowest index)."""
    value = tl.load(base + outputs, mask=outputs < N, other=0.0)
    value += tl.sum(line.to(tl.float32) * e.to(tl.float32)[None, :], 1)
    tl.store(out + outputs, value, mask=outputs < N)
    value = tl.where(outputs < V, value, float("-inf"))
    top = tl.max(value, axis=0)
    return top, tl.min(tl.where((value == top) & (outputs < V), outputs, V - 1), axis=0)


@triton.jit
def _chain(out, values, indices, last_values, last_indices, base, embedding, w, tokens, place, at, ld_base, ld_w, N, V,
           R: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr, P: tl.constexpr, CHOSEN: tl.constexpr,
           PDL: tl.constexpr):  # fmt: skip
    part, cols = tl.program_id(0), tl.arange(0, R)
    start = part * TILES * BLOCK
    outputs = start + tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
    # the weights do not depend on what is in front
    line = tl.load(w + outputs[:, None].to(tl.int64) * ld_w + cols[None, :], mask=(outputs < N)[:, None], other=0.0)
    if PDL:
        gdc_wait()
    e = tl.load(embedding + _previous(tokens, last_values, last_indices, place, V, P, CHOSEN) * R + cols)
    top, which = _tile(out, base + at * ld_base, line, e, outputs, N, V)
    for tile in range(1, TILES):
        outputs = start + tile * BLOCK + tl.arange(0, BLOCK)
        at_w = w + outputs[:, None].to(tl.int64) * ld_w + cols[None, :]
        line = tl.load(at_w, mask=(outputs < N)[:, None], other=0.0)
        here, index = _tile(out, base + at * ld_base, line, e, outputs, N, V)
        which = tl.where(here > top, index, which)
        top = tl.maximum(here, top)
    tl.store(values + part, top)
    tl.store(indices + part, which)


def chain(
    out: Tensor, base: Tensor, embedding: Tensor, w: Tensor, tokens: Tensor, place: int, at: int, vocab: int,
    found: tuple[Tensor, Tensor], last: tuple[Tensor, Tensor] | None,
) -> None:  # fmt: skip
    """out[0] = base[at] + w^T embedding[tokens[place]]: a Markov head's logits, and found[p] = (the largest of part p
    of the vocabulary, float32; its index, the lowest of equals, int32) for P parts. out: float32 [*, N]; base: float32
    [B, N]; embedding: [vocab, r]; w: [r, N], the transposed view of contiguous [N, r]; r a power of two; products and
    sums in float32. last: what the row before found, of which tokens[place] is chosen and written here; None: it is
    there already."""
    rank, count = embedding.shape[1], w.shape[1]
    values, indices = found
    assert w.stride(0) == 1 and embedding.is_contiguous() and out.stride(1) == base.stride(1) == 1
    parts = values.numel()
    last_values, last_indices = last or found
    _chain[(parts,)](
        out, values, indices, last_values, last_indices, base, embedding, w, tokens, place, at, base.stride(0),
        w.stride(1), count, vocab, R=rank, TILES=triton.cdiv(count, parts * BLOCK), BLOCK=BLOCK, P=parts,
        CHOSEN=last is not None, PDL=chained(), num_warps=4, launch_pdl=chained(),
    )  # fmt: skip


def parts_of(count: int) -> int:
    """Parts in which ``chain`` looks through ``count`` logits: a power of two, most of them with work."""
    return min(triton.next_power_of_2(triton.cdiv(count, BLOCK)), 512)


@triton.jit
def _chosen(tokens, values, indices, place, V, P: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    _previous(tokens, values, indices, place, V, P, True)


def chosen(tokens: Tensor, last: tuple[Tensor, Tensor], place: int, vocab: int) -> None:
    """tokens[place] = the best of what ``chain`` found."""
    _chosen[(1,)](
        tokens, *last, place, vocab, P=last[0].numel(), PDL=chained(), num_warps=1, launch_pdl=chained()
    )  # fmt: skip
