"""The law of a sampled step on a GPU: temperature, top-k, top-p, min-p by threshold search, and draws from it.

Imported only where CUDA is. The law is sampling.law's: keep the top_k largest scaled logits (ties: the lower index
stays), of those the smallest likeliest set whose share reaches top_p, of those what is at least min_p times as likely
as the likeliest. Thresholds are found digit by digit: a pass counts, or weighs, what lies at or above 32 thresholds at
once, and the next pass goes on inside the digit that was found. Mass is summed in fixed-point integers, which no order
of atomics can change, so the sets are exact and a row's bits are its own.

A law is kept as float32 weights [R, V] (0 outside the sets, the likeliest is 1) and their mass int64 [R].
Letters: R rows, V vocabulary, B splits of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .chain import chained

DIGITS = 32  # thresholds of a pass
CHUNK = 1024  # elements of one program
FIRST = (27, 22, 17, 12, 7, 2, 0)  # shifts of the passes over 32-bit keys of logits
SECOND = (25, 20, 15, 10, 5, 0)  # over the 30 bits of a weight in [0, 1]
PASSES = len(FIRST) + len(SECOND)


def mass_bits(vocab: int) -> int:
    """Fraction bits of the mass: V weights of 1.0 still sum below 2**62 (as sampling.rowwise)."""
    return 62 - max(1, (vocab - 1).bit_length())


@dataclass(frozen=True)
class Law:
    """A law of each of R rows: weights float32 [R, V], masses int64 [R, B] of its parts, total mass int64 [R]."""

    weights: Tensor
    masses: Tensor
    total: Tensor

    @classmethod
    def allocate(cls, rows: int, vocab: int, device: torch.device) -> Law:
        """All of it, zeroed."""
        splits = triton.cdiv(vocab, CHUNK)
        return cls(
            weights=torch.zeros(rows, vocab, dtype=torch.float32, device=device),
            masses=torch.zeros(rows, splits, dtype=torch.int64, device=device),
            total=torch.zeros(rows, dtype=torch.int64, device=device),
        )


@dataclass(frozen=True)
class Space:
    """Scratch for laws of R rows. hits: int64 [PASSES, R, DIGITS]; tops: float32 [R, B]; ties: int32 [2, R, B], ties at
    the edge of top-k and of top-p; above: int64 [R, B], mass over the edge of top-p."""

    hits: Tensor
    tops: Tensor
    ties: Tensor
    above: Tensor

    @classmethod
    def allocate(cls, rows: int, vocab: int, device: torch.device) -> Space:
        """All of it, zeroed."""
        splits = triton.cdiv(vocab, CHUNK)
        return cls(
            hits=torch.zeros(PASSES, rows, DIGITS, dtype=torch.int64, device=device),
            tops=torch.zeros(rows, splits, dtype=torch.float32, device=device),
            ties=torch.zeros(2, rows, splits, dtype=torch.int32, device=device),
            above=torch.zeros(rows, splits, dtype=torch.int64, device=device),
        )


@triton.jit
def _key(x):
    """0 .. 2**32 - 1 in the order of float32 x."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def _unkey(key):
    """The float32 of a key."""
    signed = (key - 2147483648).to(tl.int32)
    return (signed ^ ((signed >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _mass(weight, scale):
    return (weight.to(tl.float64) * scale + 0.5).to(tl.int64)


@triton.jit
def _top(tops, row, B, SPLITS: tl.constexpr):
    part = tl.arange(0, SPLITS)
    return tl.max(tl.load(tops + row * B + part, mask=part < B, other=float("-inf")), axis=0)


@triton.jit
def _edge(hits, row, wanted, R, BEGIN: tl.constexpr, COUNT: tl.constexpr, HIGH: tl.constexpr, DIGITS: tl.constexpr):
    """What COUNT passes from BEGIN on have found: the largest edge at or above which ``wanted`` is reached."""
    digit = tl.arange(0, DIGITS)
    base = wanted * 0
    for j in tl.static_range(COUNT):
        seen = tl.load(hits + ((BEGIN + j) * R + row) * DIGITS + digit)
        found = tl.max(tl.where(seen >= wanted, digit, 0), axis=0).to(tl.int64)
        base += found << max(HIGH - 5 * j, 0)
    return base


@triton.jit
def _kth(hits, row, wanted, V, R, FIRST: tl.constexpr, DIGITS: tl.constexpr):
    """(key of the last logit that top-k keeps, how many of its ties stay); (-1, 0) where top-k is off."""
    on = (wanted > 0) & (wanted < V)
    edge = _edge(hits, row, wanted, R, 0, FIRST, 27, DIGITS)
    digit = tl.arange(0, DIGITS)
    # the last pass asks for base + 0 .. 31 in steps of one, of which 0 .. 3 can be found
    over = (edge & 3) + 1
    seen = tl.load(hits + ((FIRST - 1) * R + row) * DIGITS + digit)
    more = tl.sum(tl.where(digit == over, seen, 0), axis=0)
    return tl.where(on, edge, -1), tl.where(on, wanted - more, 0)


@triton.jit
def _need(hits, row, top_p, R, FIRST: tl.constexpr, DIGITS: tl.constexpr):
    """The least mass that reaches top_p of what top-k left."""
    total = tl.load(hits + (FIRST * R + row) * DIGITS)
    wanted = total.to(tl.float64) * top_p.to(tl.float64)
    need = wanted.to(tl.int64)
    need += (need.to(tl.float64) < wanted).to(tl.int64)
    return tl.maximum(tl.minimum(need, total), 1)


@triton.jit
def _edges(
    hits, tops, row, top_k, top_p, V, R, B, FIRST: tl.constexpr, SECOND: tl.constexpr, SPLITS: tl.constexpr,
    DIGITS: tl.constexpr,
):  # fmt: skip
    """(largest scaled logit; key of the last logit that top-k keeps, how many of its ties stay; least mass that reaches
    top_p, bits of the weight at which it does, -1 where top-p is off), when all passes are over."""
    share = tl.load(top_p)
    edge, stay = _kth(hits, row, tl.load(top_k), V, R, FIRST, DIGITS)
    need = _need(hits, row, share, R, FIRST, DIGITS)
    floor = tl.where(share < 1, _edge(hits, row, need, R, FIRST, SECOND, 25, DIGITS), -1)
    return _top(tops, row, B, SPLITS), edge, stay, need, floor


@triton.jit
def _scaled(logits, row, part, temperature, V, ld, CHUNK: tl.constexpr):
    """(places of a part, its logits over the temperature; -inf beyond V)."""
    at = part * CHUNK + tl.arange(0, CHUNK)
    return at, tl.load(logits + row * ld + at, mask=at < V, other=float("-inf")) / tl.load(temperature)


@triton.jit
def _tops(
    tops, hits, logits, temperature, live, V, ld, B, R, PASSES: tl.constexpr, DIGITS: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if row < tl.load(live):
        _, x = _scaled(logits, row, part, temperature, V, ld, CHUNK)
        tl.store(tops + row * B + part, tl.max(x, axis=0))
        if part == 0:
            digit = tl.arange(0, DIGITS)
            for j in range(PASSES):
                tl.store(hits + (j * R + row) * DIGITS + digit, tl.zeros((DIGITS,), tl.int64))


@triton.jit
def _count(
    hits, logits, temperature, top_k, live, V, ld, R, PASS: tl.constexpr, DIGITS: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One digit of the key of the k-th largest logit."""
    row, part = tl.program_id(0), tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    wanted = tl.load(top_k)
    if (row < tl.load(live)) & (wanted > 0) & (wanted < V):
        base = _edge(hits, row, wanted, R, 0, PASS, 27, DIGITS)
        at, x = _scaled(logits, row, part, temperature, V, ld, CHUNK)
        key = tl.where(at < V, _key(x), -1)
        digit = tl.arange(0, DIGITS)
        threshold = base + (digit.to(tl.int64) << max(27 - 5 * PASS, 0))
        count = tl.sum((key[:, None] >= threshold[None, :]).to(tl.int64), axis=0)
        tl.atomic_add(hits + (PASS * R + row) * DIGITS + digit, count)


@triton.jit
def _weigh(
    hits, tops, logits, temperature, top_k, top_p, live, scale, V, ld, R, B, PASS: tl.constexpr, FIRST: tl.constexpr,
    SPLITS: tl.constexpr, DIGITS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One digit of the weight at which top-p's share is reached, among what top-k left."""
    row, part = tl.program_id(0), tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    share = tl.load(top_p)
    if (row < tl.load(live)) & (share < 1):
        top = _top(tops, row, B, SPLITS)
        edge, stay = _kth(hits, row, tl.load(top_k), V, R, FIRST, DIGITS)
        base = edge * 0
        if PASS > 0:
            base = _edge(hits, row, _need(hits, row, share, R, FIRST, DIGITS), R, FIRST, PASS, 25, DIGITS)
        at, x = _scaled(logits, row, part, temperature, V, ld, CHUNK)
        weight = tl.exp(x - top)
        mass = tl.where((at < V) & (_key(x) > edge), _mass(weight, scale), 0)
        bits = weight.to(tl.int32, bitcast=True).to(tl.int64)
        digit = tl.arange(0, DIGITS)
        threshold = base + (digit.to(tl.int64) << max(25 - 5 * PASS, 0))
        share_of = tl.sum(tl.where(bits[:, None] >= threshold[None, :], mass[:, None], 0), axis=0)
        if part == 0:  # the ties of the k-th, all of one weight
            tie = tl.exp(_unkey(edge) - top)
            tied = tl.where(stay > 0, stay * _mass(tie, scale), 0)
            share_of += tl.where(tie.to(tl.int32, bitcast=True).to(tl.int64) >= threshold, tied, 0)
        tl.atomic_add(hits + ((FIRST + PASS) * R + row) * DIGITS + digit, share_of)


@triton.jit
def _tie(
    ties, above, hits, tops, logits, temperature, top_k, top_p, live, scale, V, ld, R, B, FIRST: tl.constexpr,
    SECOND: tl.constexpr, SPLITS: tl.constexpr, DIGITS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Counts of each part at both edges, and its mass over the second."""
    row, part = tl.program_id(0), tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if row < tl.load(live):
        top, edge, _, _, floor = _edges(hits, tops, row, top_k, top_p, V, R, B, FIRST, SECOND, SPLITS, DIGITS)
        at, x = _scaled(logits, row, part, temperature, V, ld, CHUNK)
        key = tl.where(at < V, _key(x), -2)
        weight = tl.exp(x - top)
        bits = weight.to(tl.int32, bitcast=True).to(tl.int64)
        over = key > edge
        tl.store(ties + row * B + part, tl.sum((key == edge).to(tl.int32), axis=0))
        tl.store(ties + (R + row) * B + part, tl.sum((over & (bits == floor)).to(tl.int32), axis=0))
        tl.store(above + row * B + part, tl.sum(tl.where(over & (bits > floor), _mass(weight, scale), 0), axis=0))


@triton.jit
def _settle(
    weights, masses, ties, above, hits, tops, logits, temperature, top_k, top_p, min_p, live, scale, V, ld, R, B,
    FIRST: tl.constexpr, SECOND: tl.constexpr, SPLITS: tl.constexpr, DIGITS: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Weights of what stays, and the mass of each part."""
    row, part = tl.program_id(0), tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if row < tl.load(live):
        top, edge, stay, need, floor = _edges(hits, tops, row, top_k, top_p, V, R, B, FIRST, SECOND, SPLITS, DIGITS)
        parts = tl.arange(0, SPLITS)
        there = parts < B
        before = there & (parts < part)
        first = tl.load(ties + row * B + parts, mask=before, other=0).to(tl.int64)
        second = tl.load(ties + (R + row) * B + parts, mask=before, other=0).to(tl.int64)
        over_mass = tl.sum(tl.load(above + row * B + parts, mask=there, other=0), axis=0)
        tie = tl.exp(_unkey(edge) - top)
        tie_bits = tie.to(tl.int32, bitcast=True).to(tl.int64)
        over_mass += tl.where((stay > 0) & (tie_bits > floor), stay * _mass(tie, scale), 0)
        at, x = _scaled(logits, row, part, temperature, V, ld, CHUNK)
        key = tl.where(at < V, _key(x), -2)
        weight = tl.exp(x - top)
        bits = weight.to(tl.int32, bitcast=True).to(tl.int64)
        tied = key == edge
        earlier = tl.sum(first, axis=0)
        rank = earlier + tl.cumsum(tied.to(tl.int64), axis=0) - 1
        kept = (key > edge) | (tied & (rank < stay))
        at_floor = kept & (bits == floor)
        joined = tl.where((stay > 0) & (tie_bits == floor), tl.minimum(earlier, stay), 0)
        place = tl.sum(second, axis=0) + joined + tl.cumsum(at_floor.to(tl.int64), axis=0) - 1
        here = (bits > floor) | (at_floor & (over_mass + place * _mass(weight, scale) < need))
        kept = kept & here & (weight >= tl.load(min_p))
        weight = tl.where(kept, weight, 0.0)
        tl.store(weights + row * V + at, weight, mask=at < V)
        tl.store(masses + row * B + part, tl.sum(_mass(weight, scale), axis=0))


@triton.jit
def _sum(total, masses, live, B, SPLITS: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if row < tl.load(live):
        part = tl.arange(0, SPLITS)
        tl.store(total + row, tl.sum(tl.load(masses + row * B + part, mask=part < B, other=0), axis=0))


def distribution(
    law: Law, space: Space, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor,
    live: Tensor, vocab: int,
) -> None:  # fmt: skip
    """law of logits[R, >= vocab] float32; temperature, top_k, top_p, min_p: [1] as in sampling.law.distribution; live:
    int64 [1], rows beyond it are left as they are."""
    rows, splits = law.masses.shape
    scale = float(2 ** mass_bits(vocab))
    wide = triton.next_power_of_2(splits)
    grid, ld = (rows, splits), logits.stride(0)
    common = {"DIGITS": DIGITS, "CHUNK": CHUNK, "PDL": chained(), "num_warps": 4, "launch_pdl": chained()}
    first, second = len(FIRST), len(SECOND)
    _tops[grid](space.tops, space.hits, logits, temperature, live, vocab, ld, splits, rows, PASSES=PASSES, **common)
    for j in range(first):
        _count[grid](space.hits, logits, temperature, top_k, live, vocab, ld, rows, PASS=j, **common)
    given = (space.hits, space.tops, logits, temperature, top_k, top_p)
    sizes = (live, scale, vocab, ld, rows, splits)
    for j in range(second):
        _weigh[grid](*given, *sizes, PASS=j, FIRST=first, SPLITS=wide, **common)
    _tie[grid](space.ties, space.above, *given, *sizes, FIRST=first, SECOND=second, SPLITS=wide, **common)
    _settle[grid](
        law.weights, law.masses, space.ties, space.above, *given, min_p, *sizes, FIRST=first, SECOND=second,
        SPLITS=wide, **common,
    )  # fmt: skip
    _sum[(rows,)](law.total, law.masses, live, splits, SPLITS=wide, PDL=chained(), num_warps=1, launch_pdl=chained())
