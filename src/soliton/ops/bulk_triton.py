"""Kernels for the many rows of a prompt, where no library has one. Imported only where CUDA is.

Letters: T rows, C convolved channels, n heads, V value channels, E experts, k of them a row, H hidden. A kernel is not
made anew for another T: what depends on it is no constant, and not looked at for divisors.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TAPS = 4


@triton.jit(do_not_specialize=["T"])
def _mix(q, k, v, proj, tail, weight, T, KEYS, VALUES, ld_proj, ld_tail, ROWS: tl.constexpr, BLOCK: tl.constexpr,
         TAPS: tl.constexpr):  # fmt: skip
    first = tl.program_id(0) * ROWS
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    C = 2 * KEYS + VALUES
    inside = channel < C
    row = first + tl.arange(0, ROWS)
    acc = tl.zeros((ROWS, BLOCK), tl.float32)
    for tap in tl.static_range(TAPS):
        at = row + tap - (TAPS - 1)
        here = (at >= 0) & (row < T)
        value = tl.load(
            proj + at.to(tl.int64)[:, None] * ld_proj + channel[None, :],
            mask=here[:, None] & inside[None, :],
            other=0.0,
        )
        past = tl.load(
            tail + (at + TAPS - 1)[:, None] * ld_tail + channel[None, :],
            mask=(at < 0)[:, None] & (row < T)[:, None] & inside[None, :],
            other=0.0,
        )
        acc += tl.load(weight + tap * C + channel, mask=inside, other=0.0)[None, :] * (
            value.to(tl.float32) + past.to(tl.float32)
        )
    mixed = (acc / (1.0 + tl.exp(-acc))).to(q.dtype.element_ty)
    line, live, at = row.to(tl.int64)[:, None], (row < T)[:, None], channel[None, :]
    tl.store(q + line * KEYS + at, mixed, mask=live & (at < KEYS))
    tl.store(k + line * KEYS + (at - KEYS), mixed, mask=live & (at >= KEYS) & (at < 2 * KEYS))
    tl.store(v + line * VALUES + (at - 2 * KEYS), mixed, mask=live & (at >= 2 * KEYS) & (at < C))


def mix(q: Tensor, k: Tensor, v: Tensor, proj: Tensor, tail: Tensor, weight: Tensor) -> None:
    """Causal depthwise convolution + SiLU of a prompt's rows, and the tail they leave.

    q, k, v: contiguous [T, .], together C channels, each apart because the recurrence wants them so; proj: [T, >= C],
    its first C columns; tail: [W-1, C], the rows before, replaced by the last ones of tail and proj together; weight:
    [W, C] float32, W = 4. Sums in tap order in float32, one rounding.
    """
    count, keys = q.shape
    values = v.shape[1]
    channels = 2 * keys + values
    assert weight.shape == (TAPS, channels)
    rows, block = 16, 256
    _mix[(triton.cdiv(count, rows), triton.cdiv(channels, block))](
        q, k, v, proj, tail, weight, count, keys, values, proj.stride(0), tail.stride(0), ROWS=rows, BLOCK=block,
        TAPS=TAPS, num_warps=4,
    )  # fmt: skip
    keep = TAPS - 1
    if count >= keep:
        tail.copy_(proj[count - keep :, :channels])
    else:
        tail[: keep - count] = tail[count:].clone()
        tail[keep - count :] = proj[:, :channels]


@triton.jit(do_not_specialize=["PAIRS"])
def _gated(out, o, gate, weight, ld_gate, PAIRS, eps, V: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # of a row and a head
    row, head = (pair // HEADS).to(tl.int64)[:, None], (pair % HEADS)[:, None]
    live, at = (pair < PAIRS)[:, None], tl.arange(0, V)[None, :]
    flat = pair.to(tl.int64)[:, None] * V + at
    value = tl.load(o + flat, mask=live, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1) / V + eps)[:, None]
    gates = tl.load(gate + row * ld_gate + head * V + at, mask=live, other=0.0).to(tl.float32)
    normed = value * scale * tl.load(weight + at) * (1.0 / (1.0 + tl.exp(-gates)))
    tl.store(out + flat, normed.to(out.dtype.element_ty), mask=live)


def gated_norm(out: Tensor, o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> None:
    """See ops.norm.gated_reference; out and o contiguous [T, n, V], gate [T, n, V] with its heads side by side."""
    count, heads, value = o.shape
    block = 16
    _gated[(triton.cdiv(count * heads, block),)](
        out, o, gate, weight, gate.stride(0), count * heads, eps, V=value, HEADS=heads, BLOCK=block, num_warps=4
    )


@triton.jit
def _swiglu(out, both, ld, limit, WIDTH, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    twice = tl.program_id(1) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
    pair = tl.load(both + row * ld + twice, mask=twice < 2 * WIDTH, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(pair, (BLOCK, 2)))
    gate = gate / (1.0 + tl.exp(-gate))
    if limit > 0:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    tl.store(out + row * WIDTH + at, (gate * up).to(out.dtype.element_ty), mask=at < WIDTH)


def swiglu(out: Tensor, both: Tensor, limit: float) -> None:
    """out[T, I] = SwiGLU of both[T, 2 I], gate and up columns in turn; see ops.moe.swiglu_reference for the clamp.

    Of ``both`` the address and the distance of its rows count, so its even columns (the gates) stand for it too.
    """
    count, width = out.shape
    block = min(triton.next_power_of_2(width), 1024)
    _swiglu[(count, triton.cdiv(width, block))](out, both, both.stride(0), limit, width, BLOCK=block, num_warps=4)


@triton.jit
def _route(ids, weights, logits, bias, ld, scaling, E: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
           K: tl.constexpr, SHARE: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside, out_of_play = at < E, float("-inf")
    score = 1.0 / (1.0 + tl.exp(-tl.load(logits + row * ld + at, mask=inside, other=0.0)))
    choice = tl.where(inside, score + tl.load(bias + at, mask=inside, other=0.0), out_of_play)
    if GROUPS > 1:
        group = at // (E // GROUPS)
        worth = tl.full((BLOCK,), out_of_play, tl.float32)  # of each expert's group
        for g in tl.static_range(GROUPS):
            mine = tl.where(group == g, choice, out_of_play)
            both = tl.max(mine, 0)
            if E // GROUPS > 1:
                both += tl.max(tl.where(at == tl.argmax(mine, 0), out_of_play, mine), 0)
            worth = tl.where(group == g, both, worth)
        kept = at < 0
        for _ in tl.static_range(KEPT):
            best = group == tl.argmax(worth, 0) // (E // GROUPS)
            kept = kept | best
            worth = tl.where(best, out_of_play, worth)
        choice = tl.where(kept, choice, out_of_play)
    slot = tl.arange(0, SLOTS)
    chosen, share, total = tl.zeros((SLOTS,), tl.int32), tl.zeros((SLOTS,), tl.float32), 0.0
    for i in tl.static_range(K):
        best = tl.minimum(tl.argmax(choice, 0), E - 1)  # the lowest of several
        value = tl.sum(tl.where(at == best, score, 0.0), 0)
        chosen, share = tl.where(slot == i, best, chosen), tl.where(slot == i, value, share)
        total += value
        choice = tl.where(at == best, out_of_play, choice)
    if SHARE:
        share = share / (total + 1e-20)
    tl.store(ids + row * K + slot, chosen.to(tl.int64), mask=slot < K)
    tl.store(weights + row * K + slot, share * scaling, mask=slot < K)


def route(
    ids: Tensor, weights: Tensor, logits: Tensor, bias: Tensor, groups: int, top_groups: int, renormalize: bool,
    scaling: float,
) -> None:  # fmt: skip
    """See ops.router.reference; logits are left alone, ids and weights contiguous."""
    count, k = ids.shape
    experts = bias.shape[0]
    _route[(count,)](
        ids, weights, logits, bias, logits.stride(0), scaling, E=experts, GROUPS=groups, KEPT=top_groups, K=k,
        SHARE=renormalize, BLOCK=triton.next_power_of_2(experts), SLOTS=triton.next_power_of_2(k), num_warps=1,
    )  # fmt: skip


@triton.jit
def _spread(out, place, x, order, ld, H, K: tl.constexpr, BLOCK: tl.constexpr):
    pair = tl.program_id(0).to(tl.int64)
    source = tl.load(order + pair)
    at = tl.arange(0, BLOCK)
    value = tl.load(x + (source // K) * ld + at, mask=at < H, other=0.0)
    tl.store(out + pair * H + at, value, mask=at < H)
    tl.store(place + source, pair)


def spread(out: Tensor, place: Tensor, x: Tensor, order: Tensor, k: int) -> None:
    """out[i] = x[order[i] // k], a row for each pair of a row and a slot in the order of the experts, and
    place[order[i]] = i, where each pair went. out: [T k, H]; place, order: int64 [T k]; x: [T, H]."""
    count, hidden = out.shape
    _spread[(count,)](out, place, x, order, x.stride(0), hidden, K=k, BLOCK=triton.next_power_of_2(hidden), num_warps=4)


@triton.jit
def _combine(out, shared, pairs, place, weights, H, K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < H
    total = tl.load(shared + row * H + at, mask=inside, other=0.0).to(tl.float32)
    for slot in tl.static_range(K):
        where = tl.load(place + row * K + slot)
        value = tl.load(pairs + where * H + at, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(weights + row * K + slot) * value
    tl.store(out + row * H + at, total.to(out.dtype.element_ty), mask=inside)


def combine(out: Tensor, shared: Tensor, pairs: Tensor, place: Tensor, weights: Tensor) -> None:
    """out[T, H] = shared[T, H] + sum over slots of weights[T, k] * pairs[place[T, k]], slots in order, float32."""
    count, hidden = out.shape
    _combine[(count, triton.cdiv(hidden, 1024))](
        out, shared, pairs, place, weights, hidden, K=place.shape[1], BLOCK=1024, num_warps=4
    )
