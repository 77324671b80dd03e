"""One MLA block in absorbed form: queries meet the latent cache directly, in decode and in prefill."""

from __future__ import annotations

from torch import Tensor

from ..ops.tape import Tape
from .spec import MlaSpec
from .weights import MlaWeights


def mla(
    tape: Tape,
    w: MlaWeights,
    spec: MlaSpec,
    x: Tensor,
    cache: Tensor,
    positions: Tensor,
    rows: Tensor,
    turn: Tensor | None,
    start: int = 0,
) -> Tensor:
    """What the block adds to the residual, [R, hidden]; the rows' own cache entries are written first.

    x: [R, hidden], normed; cache: [max_len, kv_rank + rope_dim] (normed latent, then the rotated shared key);
    positions: int64 [R]; rows: int64 [1] live rows; turn: float32 [R, rope/2, 2] or None (NoPE);
    start: the first position, where the host knows it (prompts).
    """
    count, heads, latent = x.shape[0], spec.heads, spec.kv_rank
    q_width = heads * (spec.nope_dim + spec.rope_dim)
    proj = tape.new(count, w.into.padded)
    tape.call("linear", proj, x, w.into)
    if w.q_up is not None and w.q_norm is not None:
        first = w.q_norm.shape[0]
        low = tape.new(count, first)
        tape.call("norm", low, proj[:, :first], w.q_norm, spec.eps)
        q_all = tape.new(count, w.q_up.padded)
        tape.call("linear", q_all, low, w.q_up)
    else:
        first, q_all = q_width, proj
    q = q_all[:, :q_width].unflatten(1, (heads, -1))
    kv = proj[:, first : first + latent + spec.rope_dim]
    gate = proj[:, first + latent + spec.rope_dim : w.into.outputs]

    if tape.fused:
        query = tape.new(count, heads, latent + spec.rope_dim)
        tape.call("mla.enter", query, q, w.k_up, cache, kv, w.kv_norm, turn, positions, rows, spec.eps)
        context = tape.new(count, heads, latent)
        tape.call("mla.attend", context, query, cache, positions, rows, spec.scale)
        o = tape.new(count, heads, spec.value_dim)
        tape.call("mla.heads", o, context, w.v_up, rows, gate if spec.head_gate else None)
        out = tape.new(count, w.out.padded)
        tape.call("linear", out, o.view(count, -1), w.out)
        return out[:, : w.out.outputs]
    c = tape.new(count, latent)
    tape.call("norm", c, kv[:, :latent], w.kv_norm, spec.eps)
    key = tape.new(count, 1, spec.rope_dim)
    tape.call("rope", key, kv[:, latent:].unsqueeze(1), turn)
    tape.call("mla.store", cache, c, key[:, 0], positions)
    tape.note("mla_latent", c)
    tape.note("mla_krope", key[:, 0])

    if tape.bulk:
        turned = tape.new(count, heads, spec.nope_dim + spec.rope_dim)
        tape.call("copy", turned[..., : spec.nope_dim], q[..., : spec.nope_dim])
        tape.call("rope", turned[..., spec.nope_dim :], q[..., spec.nope_dim :], turn)
        o = tape.new(count, heads, spec.value_dim)
        tape.call("mla.read", o, turned, cache, start, w.k_up, w.v_up, spec.scale)
        return _leave(tape, w, spec, o, gate)
    absorbed = tape.new(count, heads, latent + spec.rope_dim)
    tape.call("linear.heads", absorbed[..., :latent], q[..., : spec.nope_dim], w.k_up)
    tape.call("rope", absorbed[..., latent:], q[..., spec.nope_dim :], turn)
    context = tape.new(count, heads, latent)
    tape.call("mla.attend", context, absorbed, cache, positions, rows, spec.scale)
    o = tape.new(count, heads, spec.value_dim)
    tape.call("linear.heads", o, context, w.v_up)
    return _leave(tape, w, spec, o, gate)


def _leave(tape: Tape, w: MlaWeights, spec: MlaSpec, o: Tensor, gate: Tensor) -> Tensor:
    """The head gate and the output projection. o: [R, n, V]; gate: [R, n]."""
    if spec.head_gate:
        tape.call("mla.gate", o, o, gate)
    out = tape.new(o.shape[0], w.out.padded)
    tape.call("linear", out, o.view(o.shape[0], -1), w.out)
    return out[:, : w.out.outputs]
