"""Feed-forward blocks: dense SwiGLU and the routed experts with their shared one."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.moe import halves
from ..ops.tape import Tape
from ..ops.weight import Weight
from .spec import DenseSpec, MoeSpec
from .weights import DenseWeights, MoeWeights


def mlp(tape: Tape, w: DenseWeights | MoeWeights, spec: DenseSpec | MoeSpec, x: Tensor, rows: Tensor | None) -> Tensor:
    """What the block adds to the residual, [R, hidden]. x: [R, hidden], normed; rows: int64 [1] live rows or None."""
    if isinstance(spec, DenseSpec):
        assert isinstance(w, DenseWeights)
        return _dense(tape, w, spec, x)
    assert isinstance(w, MoeWeights)
    return _moe(tape, w, spec, x, rows)


def _dense(tape: Tape, w: DenseWeights, spec: DenseSpec, x: Tensor) -> Tensor:
    both = tape.new(x.shape[0], w.up.padded)
    tape.call("linear", both, x, w.up)
    act = tape.new(x.shape[0], spec.width)
    tape.call("swiglu", act, *halves(both, w.up, spec.width), 0.0)
    out = tape.new(x.shape[0], w.down.padded)
    tape.call("linear", out, act, w.down)
    return out[:, : w.down.outputs]


def _moe(tape: Tape, w: MoeWeights, spec: MoeSpec, x: Tensor, rows: Tensor | None) -> Tensor:
    count = x.shape[0]
    logits = tape.new(count, w.router.padded, dtype=torch.float32)
    tape.call("linear", logits, x, w.router)
    ids = tape.new(count, spec.top_k, dtype=torch.int64)
    weights = tape.new(count, spec.top_k, dtype=torch.float32)
    tape.call("router", ids, weights, logits, w.bias, spec.groups, spec.top_groups, spec.renormalize, spec.scaling)
    tape.note("router_experts", ids)
    tape.note("router_weights", weights)
    if isinstance(w.up, Weight) and isinstance(w.down, Weight):
        out = tape.new(count, w.down.padded)
        sizes = (spec.experts, spec.width, spec.limit, spec.shared_limit)
        tape.call("moe", out, x, ids, weights, w.up, w.down, *sizes, rows)
    else:
        out = tape.new(count, x.shape[1])
        shared = (w.shared_up, w.shared_down, spec.limit, spec.shared_limit)
        scratch: tuple[Tensor, ...] = ()
        if tape.fused:
            assert isinstance(w.up, Tensor)
            scratch = (tape.new(count, spec.top_k, spec.width), tape.new(count, spec.shared_width))
        tape.call("moe", out, x, ids, weights, w.up, w.down, *shared, rows, *scratch)
    return out[:, : x.shape[1]]
