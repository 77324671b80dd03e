"""The target: embedding, layers, final norm, head, over rows that continue one sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.rope import inverse_frequencies, table
from ..ops.tape import Tape
from .kda import kda
from .mla import mla
from .moe import mlp
from .spec import KdaSpec, LayerSpec, MlaSpec, ModelSpec
from .weights import KdaWeights, LayerWeights, MlaWeights, ModelWeights


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What layers read and write, by layer index. windows and states: KDA layers (shapes in model.kda); caches: MLA."""

    windows: Mapping[int, Tensor]
    states: Mapping[int, Tensor]
    caches: Mapping[int, Tensor]
    current: Tensor | None = None  # int64 [1], the committed slot of ``states`` in a step on a GPU


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Which rows these are. positions: int64 [R]; live: int64 [1]; turn: float32 [R, rope/2, 2] or None; decode:
    whether KDA states are staged by row (True) or updated in place (False); start: the first position of a prompt's."""

    positions: Tensor
    live: Tensor
    turn: Tensor | None
    decode: bool
    start: int = 0


def turn_table(spec: ModelSpec, positions: int, device: torch.device) -> Tensor | None:
    """float32 [positions, rope/2, 2], or None for a model without rotation. All MLA layers share one law."""
    layers = [*spec.layers, *([spec.mtp] if spec.mtp else [])]
    ropes = {layer.mixer.rope for layer in layers if isinstance(layer.mixer, MlaSpec)}
    assert len(ropes) <= 1, "all MLA layers share one rotary law"
    rope = ropes.pop() if ropes else None
    if rope is None:
        return None
    inverse = inverse_frequencies(
        rope.dim, rope.theta, rope.factor, rope.original_max_position, rope.beta_fast, rope.beta_slow
    )
    return table(positions, inverse, rope.mscale, device)


def layer_forward(
    tape: Tape, w: LayerWeights, layer: LayerSpec, x: Tensor, memory: Memory, rows: Rows, eps: float
) -> None:
    """One layer, added into the residual x[R, hidden] in place."""
    index = tape.scope = layer.index
    normed = tape.new(*x.shape)
    tape.call("norm", normed, x, w.input_norm, eps)
    live = rows.live if rows.decode else None
    if isinstance(layer.mixer, KdaSpec):
        assert isinstance(w.mixer, KdaWeights)
        delta = kda(
            tape, w.mixer, layer.mixer, normed, memory.windows[index], memory.states[index], live, memory.current
        )
    else:
        assert isinstance(w.mixer, MlaWeights)
        cache = memory.caches[index]
        delta = mla(tape, w.mixer, layer.mixer, normed, cache, rows.positions, rows.live, rows.turn, rows.start)
    tape.note("attn", delta)
    tape.call("add", x, delta)
    normed = tape.new(*x.shape)
    tape.call("norm", normed, x, w.post_norm, eps)
    delta = mlp(tape, w.mlp, layer.mlp, normed, live)
    tape.note("mlp", delta)
    tape.call("add", x, delta)
    tape.note("resid", x)


def decoder(
    tape: Tape,
    w: ModelWeights,
    spec: ModelSpec,
    ids: Tensor,
    memory: Memory,
    rows: Rows,
    taps: Mapping[int, Tensor] | None = None,
) -> Tensor:
    """The hidden states after the final norm, [R, hidden]: input of the head and of the MTP layer.

    ids: int64 [R]. ``taps``: layer index -> buffer [R, hidden] that receives the residual after that layer (what a
    block drafter reads).
    """
    x = tape.new(ids.shape[0], spec.hidden)
    tape.call("embed", x, ids, w.embed)
    tape.note("embed", x)
    for layer, weights in zip(spec.layers, w.layers, strict=True):
        layer_forward(tape, weights, layer, x, memory, rows, spec.eps)
        if taps and layer.index in taps:
            tape.call("copy", taps[layer.index], x)
    hidden = tape.new(*x.shape)
    tape.call("norm", hidden, x, w.norm, spec.eps)
    return hidden


def head(tape: Tape, w: ModelWeights, hidden: Tensor) -> Tensor:
    """Logits float32 [R, vocab padded] of hidden[R, hidden]; columns beyond the vocabulary are zero: slice them off."""
    logits = tape.new(hidden.shape[0], w.head.padded, dtype=torch.float32)
    tape.call("linear", logits, hidden, w.head)
    return logits
