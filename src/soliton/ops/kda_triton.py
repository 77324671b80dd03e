"""Kimi Delta Attention of one step as one kernel: convolution, norms, gates and the chain of all rows.

Imported only where CUDA is. Letters as in ops.kda: R rows, n heads, K key and V value channels, W = 4 taps.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .chain import chained

TAPS = 4
TILE = 32  # value channels of a program; the K axis is never cut, so the tile plays no part in any bit


@triton.jit
def _tap(proj, window, row, tap, channel, ld_proj, ld_window, TAPS: tl.constexpr, mask):
    """What meets tap ``tap`` of row ``row``: the past's projections, then this step's."""
    at = row + tap - (TAPS - 1)
    if at < 0:
        value = tl.load(window + (row + tap) * ld_window + channel, mask=mask, other=0.0)
    else:
        value = tl.load(proj + at * ld_proj + channel, mask=mask, other=0.0)
    return value.to(tl.float32)


@triton.jit
def _mixed(proj, window, weight, row, channel, C, ld_proj, ld_window, TAPS: tl.constexpr, mask):
    """silu(conv) of some channels of one row, rounded as the model rounds it."""
    acc = tl.load(weight + channel, mask=mask, other=0.0) * _tap(
        proj, window, row, 0, channel, ld_proj, ld_window, TAPS, mask
    )
    for tap in tl.static_range(1, TAPS):
        acc += tl.load(weight + tap * C + channel, mask=mask, other=0.0) * _tap(
            proj, window, row, tap, channel, ld_proj, ld_window, TAPS, mask
        )
    return (acc / (1.0 + tl.exp(-acc))).to(proj.dtype.element_ty).to(tl.float32)


@triton.jit
def _chain(
    out, proj, window, weight, f, b, a, dt_bias, states, current, live,
    n, C, ld_proj, ld_window, ld_f, slot_stride, slots, lower, eps, scale,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, TAPS: tl.constexpr, BOUNDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head, tile = tl.program_id(0), tl.program_id(1)
    keys, values = tl.arange(0, K), tile * BV + tl.arange(0, BV)
    rate = tl.load(a + head * K + keys)
    shift = tl.load(dt_bias + head * K + keys)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    rows = tl.load(live).to(tl.int32)
    at = tl.load(current).to(tl.int32)
    place = (head * K + keys)[:, None] * V + values[None, :]
    q_at, k_at, v_at = head * K + keys, (n + head) * K + keys, 2 * n * K + head * V + values
    yes_k, yes_v = keys >= 0, values >= 0
    if rows > 0:
        state = tl.load(states + at.to(tl.int64) * slot_stride + place)
        for row in range(rows):
            q = _mixed(proj, window, weight, row, q_at, C, ld_proj, ld_window, TAPS, yes_k)
            k = _mixed(proj, window, weight, row, k_at, C, ld_proj, ld_window, TAPS, yes_k)
            v = _mixed(proj, window, weight, row, v_at, C, ld_proj, ld_window, TAPS, yes_v)
            q = q * (tl.rsqrt(tl.sum(q * q) + eps) * scale)
            k = k * tl.rsqrt(tl.sum(k * k) + eps)
            g = tl.load(f + row * ld_f + head * K + keys).to(tl.float32) + shift
            if BOUNDED:
                g = lower / (1.0 + tl.exp(-(rate * g)))
            else:
                g = -rate * tl.where(g > 20.0, g, tl.log(1.0 + tl.exp(g)))
            beta = 1.0 / (1.0 + tl.exp(-tl.load(b + row * ld_proj + head).to(tl.float32)))
            state = state * tl.exp(g)[:, None]
            u = (v - tl.sum(state * k[:, None], axis=0)) * beta
            state += k[:, None] * u[None, :]
            o = tl.sum(state * q[:, None], axis=0)
            tl.store(out + (row * n + head) * V + values, o.to(out.dtype.element_ty))
            slot = (at + 1 + row) % slots
            tl.store(states + slot.to(tl.int64) * slot_stride + place, state)
            # this step's projections, for the window of the next
            tl.store(window + (row + TAPS - 1) * ld_window + v_at, tl.load(proj + row * ld_proj + v_at))
            if tile == 0:
                tl.store(window + (row + TAPS - 1) * ld_window + q_at, tl.load(proj + row * ld_proj + q_at))
                tl.store(window + (row + TAPS - 1) * ld_window + k_at, tl.load(proj + row * ld_proj + k_at))


def step(
    out: Tensor,
    proj: Tensor,
    f: Tensor,
    b: Tensor,
    window: Tensor,
    conv: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    current: Tensor,
    rows: Tensor,
    law: str,
    lower_bound: float,
    eps: float,
) -> None:
    """One step of a layer's recurrence; float32 inside.

    out: [R, n, V]; proj: [R, *], q, k and v of all heads side by side; f: [R, n*K] and b: [R, n], views of proj or of
    another buffer; window: [W-1+R, C], past then room for this step's rows, written here; conv: [W, C] float32; a,
    dt_bias: [n*K] float32; states: float32 [slots, n, K, V]; current: int64 [1], the committed slot, only read: row r
    leaves its state in slot (current + 1 + r) % slots; rows: int64 [1], rows beyond it are left untouched.
    """
    slots, n, key, value = states.shape
    assert conv.shape[0] == TAPS and key & (key - 1) == 0 and value % TILE == 0, "K by powers of two, V by 32, 4 taps"
    grid = (n, value // TILE)
    _chain[grid](
        out, proj, window, conv, f, b, a, dt_bias, states, current, rows,
        n, conv.shape[1], proj.stride(0), window.stride(0), f.stride(0), states.stride(0), slots, lower_bound, eps,
        key**-0.5,
        K=key, V=value, BV=TILE, TAPS=TAPS, BOUNDED=law == "bounded", PDL=chained(), num_warps=4, launch_pdl=chained(),
    )  # fmt: skip


@triton.jit
def _commit_window(windows, taken, layer_stride, row_stride, C, TAPS: tl.constexpr, BLOCK: tl.constexpr):
    layer = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < C
    gdc_wait()
    gdc_launch_dependents()
    count = tl.load(taken).to(tl.int32)
    base = windows + layer * layer_stride + channel
    if count > 0:
        first = tl.load(base + count * row_stride, mask=inside)
        second = tl.load(base + (count + 1) * row_stride, mask=inside)
        third = tl.load(base + (count + 2) * row_stride, mask=inside)
        tl.store(base, first, mask=inside)
        tl.store(base + row_stride, second, mask=inside)
        tl.store(base + 2 * row_stride, third, mask=inside)


@triton.jit
def _advance(current, taken, slots):
    gdc_wait()
    gdc_launch_dependents()
    tl.store(current, (tl.load(current) + tl.load(taken)) % slots)


def commit(states: Tensor, windows: Tensor, taken: Tensor, current: Tensor) -> None:
    """Make the state after ``taken`` rows the committed one, for all layers, by moving ``current`` (int64 [1]) along
    the slots of ``states``; no state is copied. windows: [W-1+R, layers, C], its first W-1 rows become the tail."""
    size = 1024
    _, layers, width = windows.shape
    if layers:
        _commit_window[(layers, triton.cdiv(width, size))](
            windows, taken, windows.stride(1), windows.stride(0), width, TAPS=TAPS, BLOCK=size, launch_pdl=chained()
        )
    _advance[(1,)](current, taken, states.shape[0], num_warps=1, launch_pdl=chained())


@triton.jit
def _keep(out, source, length, taken, current, rolling, slot_stride, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if (tl.load(taken) > 0) & (tl.load(length) % rolling == 0):
        source += tl.load(current) * slot_stride
        at = tl.program_id(0) * BLOCK
        while at < count:
            where = at + tl.arange(0, BLOCK)
            tl.store(out + where, tl.load(source + where, mask=where < count), mask=where < count)
            at += tl.num_programs(0) * BLOCK


def mark(
    marks: tuple[Tensor, Tensor, Tensor], states: Tensor, windows: Tensor, boundary: Tensor, length: Tensor,
    taken: Tensor, current: Tensor, none: Tensor, rolling: int,
) -> None:  # fmt: skip
    """Where a step ends at a multiple of ``rolling`` tokens, copy the committed state, the conv tail and the boundary
    hidden into ``marks``, for the host to keep when it reads the step. states: [slots, layers, n, K, V]; windows:
    [W-1+R, layers, C]; none: int64 [1], zero."""
    state, tail, edge = marks
    for out, source, slot in ((state, states, current), (tail, windows, none), (edge, boundary, none)):
        if out.numel():
            grid = min(256, triton.cdiv(out.numel(), 4096))
            _keep[(grid,)](
                out, source, length, taken, slot, rolling, source.stride(0), out.numel(), BLOCK=4096, PDL=chained(),
                num_warps=8, launch_pdl=chained(),
            )  # fmt: skip
