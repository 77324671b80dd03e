"""Draws from a law on a GPU, and the lossless verdict on a chain of drafts. Imported only where CUDA is.

Every function agrees with sampling.law, sampling.accept and sampling.philox; laws are ops.law's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .chain import chained
from .law import CHUNK, Law, mass_bits
from .verdict_triton import _close


@triton.jit
def _mass(weight, scale):
    """As law.cu rounds it: to the nearest unit, halves up."""
    return (weight.to(tl.float64) * scale + 0.5).to(tl.int64)


@triton.jit
def _uniform(seed, position, stream):
    """float32 in [0, 1): sampling.philox.uniform, lane 0."""
    mask = 0xFFFFFFFF
    w0, w1 = (position & mask).to(tl.uint64), ((position >> 32) & mask).to(tl.uint64)
    w2, w3 = w0 * 0 + stream, w0 * 0
    k0, k1 = (seed & mask).to(tl.uint64), ((seed >> 32) & mask).to(tl.uint64)
    for _ in tl.static_range(10):
        a, b = w0 * 0xD2511F53, w2 * 0xCD9E8D57
        w0, w1, w2, w3 = (b >> 32) ^ w1 ^ k0, b & mask, (a >> 32) ^ w3 ^ k1, a & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return (w0 >> 8).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def _probability(weights, total, row, token, scale, V, mask):
    """float64 of the float32 probability of tokens under a row's law, 0 outside mask."""
    weight = tl.load(weights + row * V + token, mask=mask, other=0.0).to(tl.float64)
    return (weight / (tl.load(total + row).to(tl.float64) / scale)).to(tl.float32).to(tl.float64)


@triton.jit
def _place(masses, uniform, B, SPLITS: tl.constexpr):
    """(part, mass before it, mass that is looked for) of a draw over the masses of B parts."""
    part = tl.arange(0, SPLITS)
    mass = tl.load(masses + part, mask=part < B, other=0)
    whole = tl.sum(mass, axis=0)
    at = (uniform.to(tl.float64) * whole.to(tl.float64)).to(tl.int64)
    at = tl.minimum(at, whole - 1)
    summed = tl.cumsum(mass, axis=0)
    which = tl.sum((summed <= at).to(tl.int32), axis=0)
    which = tl.minimum(which, B - 1)
    return which, tl.sum(tl.where(part < which, mass, 0), axis=0), at


@triton.jit
def _token(which, before, at, mass, V, CHUNK: tl.constexpr):
    """The token of part ``which``, whose elements weigh ``mass``, at which the summed mass passes ``at``."""
    passed = tl.sum((before + tl.cumsum(mass, axis=0) <= at).to(tl.int32), axis=0)
    return tl.minimum(which * CHUNK + passed, V - 1).to(tl.int64)


@triton.jit
def _draft(
    tokens, weights, masses, length, seed, scale, place, stream, V, B, SPLITS: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    u = _uniform(tl.load(seed), tl.load(length) + place, stream)
    which, before, at = _place(masses, u, B, SPLITS)
    index = which * CHUNK + tl.arange(0, CHUNK)
    mass = _mass(tl.load(weights + index, mask=index < V, other=0.0), scale)
    tl.store(tokens + place, _token(which, before, at, mass, V, CHUNK))


def draft(tokens: Tensor, law: Law, length: Tensor, seed: Tensor, place: int, stream: int) -> None:
    """tokens[place] drawn from a law of one row, with the uniform of position length + place."""
    vocab, splits = law.weights.shape[1], law.masses.shape[1]
    _draft[(1,)](
        tokens, law.weights, law.masses, length, seed, float(2 ** mass_bits(vocab)), place, stream, vocab, splits,
        SPLITS=triton.next_power_of_2(splits), CHUNK=CHUNK, PDL=chained(), num_warps=4, launch_pdl=chained(),
    )  # fmt: skip


@triton.jit
def _judge(
    weights, total, drafts, draft_total, tokens, positions, rows, seed, scale, stream, V, COUNT: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """(how many drafts are accepted, 1 where one is refused behind them)."""
    i = tl.arange(0, ROWS)
    last = tl.load(rows).to(tl.int32) - 1
    there = i < last
    token = tl.load(tokens + i + 1, mask=there & (i + 1 < COUNT), other=0)
    row = tl.where(there, i, 0)
    p = _probability(weights, total, row, token, scale, V, there)
    q = _probability(drafts, draft_total, row, token, scale, V, there)
    place = tl.load(positions + i, mask=there, other=0) + 1
    u = _uniform(tl.load(seed), place, stream)
    good = there & (u.to(tl.float64) * q < p)
    accepted = tl.min(tl.where(good, ROWS, i), axis=0)
    return accepted.to(tl.int64), (accepted < last).to(tl.int64)


@triton.jit
def _residual(
    rest, verdict, weights, masses, total, drafts, draft_total, tokens, positions, rows, seed, scale, stream, V, B,
    COUNT: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Which drafts stay, the same in every program, and the mass of each part of max(p - q, 0) at the first refusal, of
    p where nothing was refused."""
    part = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, refused = _judge(
        weights, total, drafts, draft_total, tokens, positions, rows, seed, scale, stream, V, COUNT, ROWS
    )
    if part == 0:
        tl.store(verdict, row)
        tl.store(verdict + 1, refused)
    if tl.load(rows) > 0:
        if refused > 0:
            at = part * CHUNK + tl.arange(0, CHUNK)
            left = _left(weights, total, drafts, draft_total, row, at, scale, V)
            tl.store(rest + part, tl.sum(_mass(left, scale), axis=0))
        else:
            tl.store(rest + part, tl.load(masses + row * B + part))


@triton.jit
def _left(weights, total, drafts, draft_total, row, at, scale, V):
    p = _probability(weights, total, row, at, scale, V, at < V)
    q = _probability(drafts, draft_total, row, at, scale, V, at < V)
    return tl.maximum(p - q, 0.0)


@triton.jit
def _settle_verdict(
    new_tokens, taken_to, reason, anchor, length, generated, stopped, limit, stop_mask, rolling, verdict, rest, weights,
    masses, total, drafts, draft_total, tokens, positions, rows, seed, scale, stream, V, B, COUNT: tl.constexpr,
    ROWS: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr, DRAFTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.arange(0, ROWS)
    live = tl.load(rows)
    accepted, final = live * 0, live * 0
    if DRAFTED:
        accepted = tl.load(verdict)
    if live > 0:
        part = tl.arange(0, SPLITS)
        u = _uniform(tl.load(seed), tl.load(positions + accepted) + 1, stream)
        if DRAFTED:
            refused = tl.load(verdict + 1) > 0
            spare = tl.sum(tl.load(rest + part, mask=part < B, other=0), axis=0)
        else:
            refused, spare = live < 0, live * 0
        if refused & (spare > 0):
            which, before, at = _place(rest, u, B, SPLITS)
            index = which * CHUNK + tl.arange(0, CHUNK)
            mass = _mass(_left(weights, total, drafts, draft_total, accepted, index, scale, V), scale)
            final = _token(which, before, at, mass, V, CHUNK)
        else:
            which, before, at = _place(masses + accepted * B, u, B, SPLITS)
            index = which * CHUNK + tl.arange(0, CHUNK)
            mass = _mass(tl.load(weights + accepted * V + index, mask=index < V, other=0.0), scale)
            final = _token(which, before, at, mass, V, CHUNK)
    drafted = tl.load(tokens + i + 1, mask=i + 1 < COUNT, other=-1).to(tl.int32)
    _close(
        new_tokens, taken_to, reason, anchor, length, generated, stopped, limit, stop_mask, rolling, i, drafted,
        accepted.to(tl.int32), final.to(tl.int32), COUNT, ROWS,
    )  # fmt: skip


def sampled(
    scratch: Tensor, rest: Tensor, law: Law, drafts: Law | None, new_tokens: Tensor, taken: Tensor, reason: Tensor,
    anchor: Tensor, length: Tensor, generated: Tensor, stopped: Tensor, tokens: Tensor, positions: Tensor, rows: Tensor,
    seed: Tensor, limit: Tensor, stop_mask: Tensor, streams: tuple[int, int], rolling: int,
) -> None:  # fmt: skip
    """The lossless verdict; see sampling.accept.sampled_chain and verdict_triton.greedy. law: of the R rows; drafts: of
    the R - 1 drafts, None without any; scratch: int64 [2]; rest: int64 [B]; streams: of accepting, of final draws."""
    count, vocab, splits = tokens.shape[0], law.weights.shape[1], law.masses.shape[1]
    scale = float(2 ** mass_bits(vocab))
    q = drafts if drafts is not None else law
    rows_up = max(2, triton.next_power_of_2(count))
    if drafts is not None:
        _residual[(splits,)](
            rest, scratch, law.weights, law.masses, law.total, q.weights, q.total, tokens, positions, rows, seed, scale,
            streams[0], vocab, splits, COUNT=count, ROWS=rows_up, CHUNK=CHUNK, PDL=chained(), num_warps=4,
            launch_pdl=chained(),
        )  # fmt: skip
    _settle_verdict[(1,)](
        new_tokens, taken, reason, anchor, length, generated, stopped, limit, stop_mask.view(torch.uint8), rolling,
        scratch, rest, law.weights, law.masses, law.total, q.weights, q.total, tokens, positions, rows, seed, scale,
        streams[1], vocab, splits, COUNT=count, ROWS=rows_up, SPLITS=triton.next_power_of_2(splits), CHUNK=CHUNK,
        DRAFTED=drafts is not None, PDL=chained(), num_warps=4, launch_pdl=chained(),
    )  # fmt: skip
