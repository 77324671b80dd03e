"""Kernels for the many rows of a prompt, where no library has one. Imported only where CUDA is.

Letters: T rows, C convolved channels, n heads, V value channels, k experts a row, H hidden.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TAPS = 4


@triton.jit
def _mix(out, proj, tail, weight, T, C, ld_proj, ld_tail, ROWS: tl.constexpr, BLOCK: tl.constexpr, TAPS: tl.constexpr):
    first = tl.program_id(0) * ROWS
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
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
    mixed = acc / (1.0 + tl.exp(-acc))
    where = out + row.to(tl.int64)[:, None] * C + channel[None, :]
    tl.store(where, mixed.to(out.dtype.element_ty), mask=(row < T)[:, None] & inside[None, :])


def mix(out: Tensor, proj: Tensor, tail: Tensor, weight: Tensor) -> None:
    """Causal depthwise convolution + SiLU of a prompt's rows, and the tail they leave.

    out: [T, C]; proj: [T, >= C], its first C columns; tail: [W-1, C], the rows before, replaced by the last ones of
    tail and proj together; weight: [W, C] float32, W = 4. Sums in tap order in float32, one rounding.
    """
    count, channels = out.shape
    assert weight.shape[0] == TAPS
    rows, block = 16, 256
    _mix[(triton.cdiv(count, rows), triton.cdiv(channels, block))](
        out, proj, tail, weight, count, channels, proj.stride(0), tail.stride(0), ROWS=rows, BLOCK=block, TAPS=TAPS,
        num_warps=4,
    )  # fmt: skip
    keep = TAPS - 1
    if count >= keep:
        tail.copy_(proj[count - keep :, :channels])
    else:
        tail[: keep - count] = tail[count:].clone()
        tail[keep - count :] = proj[:, :channels]


@triton.jit
def _gated(out, o, gate, weight, ld_gate, eps, V: tl.constexpr, HEADS: tl.constexpr):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, V)
    value = tl.load(o + (row * HEADS + head) * V + at).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / V + eps)
    opened = 1.0 / (1.0 + tl.exp(-tl.load(gate + row * ld_gate + head * V + at).to(tl.float32)))
    normed = value * scale * tl.load(weight + at) * opened
    tl.store(out + (row * HEADS + head) * V + at, normed.to(out.dtype.element_ty))


def gated_norm(out: Tensor, o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> None:
    """See ops.norm.gated_reference; out and o contiguous [T, n, V], gate [T, n, V] with its heads side by side."""
    count, heads, value = o.shape
    _gated[(count, heads)](out, o, gate, weight, gate.stride(0), eps, V=value, HEADS=heads, num_warps=1)


@triton.jit
def _swiglu(out, both, ld, limit, WIDTH, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    gate = tl.load(both + row * ld + 2 * at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * ld + 2 * at + 1, mask=inside, other=0.0).to(tl.float32)
    gate = gate / (1.0 + tl.exp(-gate))
    if limit > 0:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    tl.store(out + row * WIDTH + at, (gate * up).to(out.dtype.element_ty), mask=inside)


def swiglu(out: Tensor, both: Tensor, limit: float) -> None:
    """out[T, I] = SwiGLU of both[T, 2 I], gate and up columns in turn; see ops.moe.swiglu_reference for the clamp."""
    count, width = out.shape
    _swiglu[(count, triton.cdiv(width, 1024))](out, both, both.stride(0), limit, width, BLOCK=1024, num_warps=4)


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
