"""One KDA block over a few rows (decode) or a block of a prompt (prefill)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.tape import Tape
from .spec import KdaSpec
from .weights import KdaWeights


def channels(spec: KdaSpec) -> int:
    """Convolved channels: q, k and v side by side."""
    return spec.heads * (2 * spec.key_dim + spec.value_dim)


def kda(
    tape: Tape,
    w: KdaWeights,
    spec: KdaSpec,
    x: Tensor,
    window: Tensor,
    states: Tensor,
    rows: Tensor | None,
    current: Tensor | None = None,
) -> Tensor:
    """What the block adds to the residual, [R, hidden].

    x: [R, hidden], normed; window: [W-1+R, channels], its first W-1 rows the past's projections, the rest filled
    here. Decode (``rows`` int64 [1]): states [R+1, n, K, V], row r reads slot r and leaves slot r+1. Prefill (None):
    states [n, K, V], updated in place. A step recorded for a GPU: the committed state is slot ``current`` (int64
    [1]); a prompt there: window is its first W-1 rows alone, replaced.
    """
    count, heads = x.shape[0], spec.heads
    keys, values = heads * spec.key_dim, heads * spec.value_dim
    proj = tape.new(count, w.into.padded)
    tape.call("linear", proj, x, w.into)
    mixed_width = 2 * keys + values
    gate_in = spec.gate_rank or keys
    gate_out = spec.gate_rank or values
    f = proj[:, mixed_width : mixed_width + gate_in]
    g = proj[:, mixed_width + gate_in : mixed_width + gate_in + gate_out]
    b = proj[:, mixed_width + gate_in + gate_out : w.into.outputs]
    if w.f_up is not None and w.g_up is not None:
        f_low, g_low = f, g
        f, g = tape.new(count, w.f_up.padded), tape.new(count, w.g_up.padded)
        tape.call("linear", f, f_low, w.f_up)
        tape.call("linear", g, g_low, w.g_up)

    if tape.fused:
        assert rows is not None and current is not None
        o = tape.new(count, heads, spec.value_dim)
        memory = (window, w.conv, w.a, w.dt_bias, states, current, rows)
        tape.call("kda.step", o, proj, f[:, :keys], b, *memory, spec.gate, spec.lower_bound, spec.qk_eps)
        return _leave(tape, w, spec, o, g[:, :values])
    if tape.bulk:
        apart = (tape.new(count, keys), tape.new(count, keys), tape.new(count, values))
        tape.call("kda.mix", *apart, proj, window, w.conv)
        o = tape.new(count, heads, spec.value_dim)
        gates = (f[:, :keys], b, w.a, w.dt_bias, states, spec.gate, spec.lower_bound, spec.qk_eps)
        tape.call("kda.recurrence", o, *apart, *gates)
        return _leave(tape, w, spec, o, g[:, :values])
    past = spec.conv_width - 1
    tape.call("copy", window[past : past + count], proj[:, :mixed_width])
    mixed = tape.new(count, mixed_width)
    tape.call("kda.conv", mixed, window[: past + count], w.conv)

    full = torch.float32
    qk = tape.new(count, 2 * heads, spec.key_dim, dtype=full)
    tape.call("kda.l2norm", qk, mixed[:, : 2 * keys].view(count, 2 * heads, -1), spec.qk_eps, spec.key_dim**-0.5)
    v = mixed[:, 2 * keys :].view(count, heads, -1)
    if v.dtype != full:
        v, v_low = tape.new(count, heads, spec.value_dim, dtype=full), v
        tape.call("copy", v, v_low)
    decay, beta = tape.new(count, keys, dtype=full), tape.new(count, heads, dtype=full)
    tape.call("kda.gates", decay, beta, f[:, :keys], b, w.a, w.dt_bias, spec.gate, spec.lower_bound)
    o = tape.new(count, heads, spec.value_dim, dtype=full)
    operands = (o, qk[:, :heads], qk[:, heads:], v, decay.view(count, heads, -1), beta, states)
    if rows is None:
        tape.call("kda.prefill", *operands)
    else:
        tape.call("kda.chain", *operands, rows)
    if tape.dtype != full:  # the checkpoint owner rounds the recurrence's output before the norm
        o, o_full = tape.new(count, heads, spec.value_dim), o
        tape.call("copy", o, o_full)
    return _leave(tape, w, spec, o, g[:, :values])


def _leave(tape: Tape, w: KdaWeights, spec: KdaSpec, o: Tensor, gate: Tensor) -> Tensor:
    """The gated norm and the output projection. o: [R, n, V]; gate: [R, n*V]."""
    count, heads = o.shape[:2]
    y = tape.new(count, gate.shape[1])
    tape.call("kda.norm", y.view(count, heads, -1), o, gate.unflatten(1, (heads, -1)), w.norm, spec.eps)
    out = tape.new(count, w.out.padded)
    tape.call("linear", out, y, w.out)
    return out[:, : w.out.outputs]
