"""What a sweep can do, one function a kind: products with what folds into them, the choice of experts, the experts'
two products, the recurrence. Each makes an Instruction over fixed buffers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .sweep import (
    ADD,
    DOWN,
    HEAD,
    KDA,
    LOAD_ROUTE,
    PRODUCT,
    RMS,
    ROUTE,
    SCALED,
    SLAB,
    STORE,
    STORE_FLOAT,
    STORE_TAGGED,
    SWIGLU,
    TOPK,
    UP,
    Instruction,
)  # fmt: skip
from .weight import Weight


def product(
    out: Tensor,
    x: Tensor,
    w: Weight,
    *,
    norm: tuple[Tensor, float] | None = None,
    scaled: tuple[Tensor, float] | None = None,
    limit: float | None = None,
    add: bool = False,
) -> Instruction:
    """out[R, N] = x[R, K] @ w, bf16 in, float32 sums, one rounding to out's bf16 (or none: float32).

    norm: (weight float32 [K], eps): x is normed first; x times the weight is rounded, what the norm divides by is a
    factor of the sums. scaled: (stats float32 [R, K / 128, 4], eps): x is normed in blocks of 128, of sums of squares
    in four parts; rounded. limit: SwiGLU of paired outputs, 0 without a clamp; add: out +=.
    """
    weight = w.data.t()
    assert weight.is_contiguous() and w.inputs % 32 == 0 and w.padded % 8 == 0, "a weight for sweeps is [N, K], K by 32"
    fields: dict[str, Any] = {"w": weight, "x": x, "out": out, "n": w.padded, "k": w.inputs, "x_stride": x.stride(0)}
    fields["out_stride"] = out.stride(0)
    reads = [x]
    assert norm is None or w.inputs <= SLAB
    copies = _norms(fields, norm)
    if scaled is not None:
        assert scaled[0].is_contiguous() and scaled[0].shape[1] * HEAD == w.inputs
        fields |= {"prologue": SCALED, "stats": scaled[0], "eps": scaled[1]}
        reads.append(scaled[0])
    if limit is not None:
        fields |= {"epilogue": SWIGLU, "limit": limit}
    elif add:
        fields["epilogue"] = _adds(out)
        reads.append(out)
    else:
        fields["epilogue"] = STORE_FLOAT if out.dtype == torch.float32 else STORE
    return Instruction(
        kind=PRODUCT, fields=fields, reads=reads, writes=[out], input=_normed(x, norm), copies=copies
    )  # fmt: skip


def _adds(out: Tensor) -> int:
    assert out.dtype == torch.bfloat16 and out.stride(0) % 2 == 0 and out.data_ptr() % 4 == 0, "added in pairs"
    return ADD


def _norms(fields: dict[str, Any], norm: tuple[Tensor, float] | None) -> list[tuple[Tensor, Tensor]]:
    """The norm of the input among the fields; (its weight rounded, the weight), for when that is written anew."""
    if norm is None:
        return []
    fields |= {"prologue": RMS, "norm": norm[0].to(torch.bfloat16), "eps": norm[1]}
    return [(fields["norm"], norm[0])]


def _normed(x: Tensor, norm: tuple[Tensor, float] | None) -> tuple[int, ...] | None:
    return None if norm is None else (x.data_ptr(), x.stride(0), x.shape[1], norm[0].data_ptr())


def route(
    ids: Tensor, weights: Tensor, logits: Tensor, bias: Tensor, groups: int, top_groups: int, renormalize: bool,
    scaling: float,
) -> Instruction:  # fmt: skip
    """The choice of experts; see ops.router.reference. logits stay as they are."""
    experts, topk = bias.shape[0], ids.shape[1]
    per = 4 if experts <= 128 else 8 if experts <= 256 else 16  # experts of a lane
    lanes, rest = divmod(experts // groups, per)
    assert topk <= TOPK and experts <= 512, "a choice is of at most 8 among 512"
    assert groups == 1 or (not rest and lanes and not lanes & (lanes - 1)), "a group is a power of two of lanes"
    fields = {
        "ids": ids, "weights": weights, "logits": logits, "bias": bias, "x_stride": logits.stride(0),
        "experts": experts, "topk": topk, "groups": groups, "top_groups": top_groups, "renormalize": int(renormalize),
        "scaling": scaling,
    }  # fmt: skip
    return Instruction(kind=ROUTE, fields=fields, reads=[logits], writes=[ids, weights])


def load_route(ids: Tensor, weights: Tensor) -> Instruction:
    """Take a choice that is there already."""
    fields = {"ids": ids, "weights": weights, "topk": ids.shape[1]}
    return Instruction(kind=LOAD_ROUTE, fields=fields, reads=[ids, weights], writes=[])


def up(act: Tensor, x: Tensor, w: Tensor, *, norm: tuple[Tensor, float] | None, limit: float) -> Instruction:
    """act[R, slot, I] = swiglu(x @ w[expert of the slot]); w: [E, 2 I, H], gate and up rows in turn; x, norm as in
    product."""
    fields: dict[str, Any] = {
        "w": w, "x": x, "out": act, "n": w.shape[1], "k": w.shape[2], "x_stride": x.stride(0),
        "out_stride": act.stride(0), "slot_stride": act.stride(1), "limit": limit,
    }  # fmt: skip
    copies = _norms(fields, norm)
    return Instruction(kind=UP, fields=fields, reads=[x], writes=[act], input=_normed(x, norm), copies=copies)


def down(out: Tensor, act: Tensor, w: Tensor, shared: tuple[Tensor, Weight] | None, *, add: bool) -> Instruction:
    """out[R, H] (+)= sum over a row's experts, ascending, of weight * (act[R, slot] @ w[expert]), then the shared
    expert's. w: [E, H, I]; act: [R, k, I]; shared: (its activations [R, J], its down weight)."""
    fields: dict[str, Any] = {
        "w": w, "x": act, "out": out, "n": w.shape[1], "k": w.shape[2], "x_stride": act.stride(0),
        "slot_stride": act.stride(1), "out_stride": out.stride(0), "epilogue": _adds(out) if add else STORE,
    }  # fmt: skip
    reads = [act, *([out] if add else [])]
    if shared is not None:
        x2, w2 = shared
        assert w2.inputs <= SLAB and w2.padded == w.shape[1]
        fields |= {"w2": w2.data.t(), "k2": w2.inputs, "x2": x2, "x2_stride": x2.stride(0)}
        reads.append(x2)
    return Instruction(kind=DOWN, fields=fields, reads=reads, writes=[out])


def kda(
    out: Tensor, proj: Tensor, f: Tensor, b: Tensor, window: Tensor, conv: Tensor, a: Tensor, dt_bias: Tensor,
    states: Tensor, current: Tensor, law: str, lower_bound: float, eps: float, *,
    opened: tuple[Tensor, Tensor, Tensor] | None = None, low: tuple[Weight, Weight] | None = None,
) -> Instruction:  # fmt: skip
    """One step of a layer's recurrence; see kda_triton.step, whose arguments these are. Heads of 128 by 128, 4 taps.

    opened: (gate g [R, n * 128], weight float32 [128], stats float32 [R, n, 4]): out is multiplied by the weight and
    sigmoid(g), rounded before and after; stats gets sums of squares of 32 values each, for a product's ``scaled``.
    low: (weights of f, of g): both are then [R, 128] and go through a product each first, rounded.
    """
    slots, heads, key, value = states.shape
    assert key == value == HEAD and conv.shape[0] == 4
    fields = {
        "w": conv, "x": proj, "out": out, "norm": a, "gate": f, "w2": window, "x2": b, "ids": current,
        "weights": states, "bias": dt_bias, "n": heads, "k": conv.shape[1], "x_stride": proj.stride(0),
        "x2_stride": window.stride(0), "out_stride": out.stride(0), "gate_stride": f.stride(0),
        "slot_stride": states.stride(0), "experts": slots, "groups": int(law == "bounded"), "eps": eps,
        "scaling": lower_bound, "limit": key**-0.5,
    }  # fmt: skip
    assert b.stride(0) == proj.stride(0), "beta lies beside the other projections"
    reads, writes = [proj, f, b, window, states], [out, window, states]
    if opened is not None:
        gate, weight, stats = opened
        fields |= {"g": gate, "g_stride": gate.stride(0), "logits": weight, "stats": stats}
        reads.append(gate)
        writes.append(stats)
    if low is not None:
        assert opened is not None and all(w.inputs == HEAD and w.padded >= heads * HEAD for w in low)
        fields |= {"up_f": low[0].data.t(), "up_g": low[1].data.t()}
    return Instruction(kind=KDA, fields=fields, reads=reads, writes=writes)


def tagged(scores: Instruction, choice: Instruction, words: Tensor) -> None:
    """Let a choice of experts wait for its logits word by word instead of for the grid. scores: the product right
    before it, whose output only it reads; words: int64 [R, N], used by nothing else. (``tagged`` is how many
    instructions before the choice it is: what is put between has to say so.)"""
    assert scores.fields["epilogue"] == STORE_FLOAT and choice.kind == ROUTE
    scores.fields |= {"out": words, "out_stride": words.stride(0), "epilogue": STORE_TAGGED}
    scores.writes[:] = [words]
    choice.fields |= {"logits": words, "x_stride": words.stride(0), "tagged": 1}
    choice.reads[:] = [words]
