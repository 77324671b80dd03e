"""Which variant of each operation runs here, and why.

A variant has a check that says (fits, reason). The first that fits wins; the choice and its reason are kept for
``soliton doctor``. There is no silent fallback: a forced variant that does not fit is an error of the caller.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import bound, bulk, draft, embed, kda, linear, mla, moe, norm, rope, router
from . import device as where
from .weight import Weight


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a check may look at: device, activation dtype, and the model's expert sizes (0 where it has none)."""

    device: torch.device
    dtype: torch.dtype
    expert_elements: int = 0
    state_elements: int = 0


@dataclass(frozen=True)
class Choice:
    """A chosen variant of an op: its callable, its name and the reason in words.

    ``bind``: takes the call's arguments once, when a tape records them, and returns the call itself with its views
    and scratch made beforehand; same bits as ``function``. None: the arguments are kept as they are.
    """

    op: str
    variant: str
    function: Callable[..., Any]
    reason: str
    bind: Callable[..., Callable[[], Any]] | None = None


def _copy(out: Tensor, x: Tensor) -> None:
    out.copy_(x)


# every expert for every row pays while all experts of a layer together are no larger than this (elements)
DENSE_EXPERTS_LIMIT = 2_000_000
# a recurrence row costs about ten small calls on a CPU; beyond this state size a chunk's few large products win
SWEEP_STATE_LIMIT = 262_144

_ONLY = "the reference is the only variant so far"
_READY = "the reference, its views and scratch made when a step is recorded"
_BOUND: dict[str, Callable[..., Callable[[], Any]]] = {
    "linear": bound.linear,
    "linear.heads": bound.heads,
    "router": bound.route,
    "kda.gates": bound.gates,
    "kda.l2norm": bound.l2norm,
    "norm": bound.norm,
    "kda.conv": bound.conv,
    "kda.chain": bound.chain,
    "kda.norm": bound.gated_norm,
}
_PLAIN: dict[str, Callable[..., Any]] = {
    "copy": _copy,
    "embed": embed.reference,
    "linear": linear.reference,
    "linear.heads": linear.heads_reference,
    "norm": norm.reference,
    "add": norm.add_reference,
    "rope": rope.reference,
    "kda.conv": kda.conv_reference,
    "kda.gates": kda.gates_reference,
    "kda.l2norm": kda.l2norm_reference,
    "kda.chain": kda.chain_reference,
    "kda.norm": norm.gated_reference,
    "kda.commit": kda.commit_reference,
    "mla.store": mla.store_reference,
    "mla.attend": mla.attend_reference,
    "mla.gate": mla.gate_reference,
    "router": router.reference,
    "swiglu": moe.swiglu_reference,
    "draft.query": draft.query_reference,
    "draft.store": draft.store_reference,
    "draft.attend": draft.attend_reference,
}


def _launch(module: str, name: str) -> Callable[..., Callable[[], Any]]:
    """Binds a call of a kernel's launcher; its module, which imports triton, comes when the first step is recorded."""

    def bind(*args: Any) -> Callable[[], Any]:
        return partial(getattr(importlib.import_module(f"{__package__}.{module}"), name), *args)

    return bind


def _linear_alone(out: Tensor, x: Tensor, w: Weight) -> Callable[[], Any]:
    """Of a recorded product that no sweep takes over: one with float32 weights."""
    if w.data.dtype != torch.float32 or x.dtype == torch.float32:
        return partial(linear.torch_product, out, x, w)
    return _launch("norm_triton", "product")(out, x, w.data)


def _attend_with_scratch(out: Tensor, query: Tensor, cache: Tensor, *rest: Any) -> Callable[[], Any]:
    kernels = importlib.import_module(f"{__package__}.mla_triton")
    scratch = kernels.scratch(query.shape[0], query.shape[1], out.shape[2], cache)
    return partial(kernels.attend, out, query, cache, *rest, *scratch)


def _draft_attend(out: Tensor, query: Tensor, cache: Tensor, length: Tensor) -> Callable[[], Any]:
    kernels = importlib.import_module(f"{__package__}.draft_triton")
    return partial(kernels.attend, out, query, cache, length, *kernels.scratch(query, cache))


def _in_a_step(*args: Any) -> None:
    raise AssertionError("this op exists only in a recorded step on a GPU")


_SWEPT = "in a step part of a sweep, a persistent kernel over a run of products; in a prompt a call for all its rows"
_TRITON = "one Triton kernel for all rows of a step"
_TORCH = "a torch call"


def _choose_cuda() -> dict[str, Choice]:
    fla = bulk.has_fla()
    prompt: dict[str, Callable[..., Any]] = {
        **_PLAIN,
        "linear": linear.torch_product,
        "norm": bulk.norm,
        "add": bulk.add,
        "router": bulk.route,
        "swiglu": bulk.swiglu,
        "kda.norm": bulk.gated_norm,
        "moe": bulk.experts,
    }
    chosen = {op: Choice(op, "torch", function, _TORCH) for op, function in prompt.items()}
    for op in ("router", "add", "swiglu", "kda.norm", "moe"):
        chosen[op] = Choice(op, "sweep", prompt[op], _SWEPT)
    chosen["linear"] = Choice("linear", "sweep", prompt["linear"], _SWEPT, _linear_alone)
    chosen["kda.mix"] = Choice("kda.mix", "triton", bulk.mix, "one kernel for a prompt's rows")
    chosen["mla.read"] = Choice("mla.read", "sdpa", bulk.attend, "torch's attention for a prompt's rows")
    chosen["kda.recurrence"] = Choice(
        "kda.recurrence",
        "fla" if fla else "chunk",
        bulk.recurrence if fla else bulk.recurrence_reference,
        "flash-linear-attention's chunk_kda" if fla else "fla-core is not installed, so prompts are read slowly",
    )
    kernels = {
        "norm": ("norm_triton", "norm"),
        "embed": ("norm_triton", "rows"),
        "kda.step": ("kda_triton", "step"),
        "kda.commit": ("kda_triton", "commit"),
        "mla.heads": ("mla_triton", "heads"),
        "mla.enter": ("mla_triton", "enter"),
        "draft.query": ("draft_triton", "query"),
        "draft.store": ("draft_triton", "store"),
    }
    for op, (module, name) in kernels.items():
        chosen[op] = Choice(op, "triton", prompt.get(op, _in_a_step), _TRITON, _launch(module, name))
    attend = prompt["mla.attend"]
    split = "split over the cache, combined"
    chosen["mla.attend"] = Choice("mla.attend", "triton", attend, split, _attend_with_scratch)
    chosen["draft.attend"] = Choice("draft.attend", "triton", prompt["draft.attend"], split, _draft_attend)
    return chosen


def choose(facts: Facts) -> dict[str, Choice]:
    """One Choice for every op, for a model and device described by ``facts``."""
    if where.has_kernels(facts.device):
        return _choose_cuda()
    ready = _BOUND if facts.device.type == "cpu" and facts.dtype == torch.float32 else {}
    chosen = {
        op: Choice(op, "reference", function, _READY if op in ready else _ONLY, ready.get(op))
        for op, function in _PLAIN.items()
    }
    if facts.expert_elements and facts.expert_elements <= DENSE_EXPERTS_LIMIT and facts.device.type == "cpu":
        reason = f"{facts.expert_elements:,} expert weights a layer: two products over all beat a sweep"
        chosen["moe"] = Choice("moe", "dense", moe.dense_reference, reason, bound.dense_experts if ready else None)
    else:
        reason = f"{facts.expert_elements:,} expert weights a layer: read only the chosen experts"
        chosen["moe"] = Choice("moe", "grouped", moe.grouped_reference, reason)
    if facts.state_elements <= SWEEP_STATE_LIMIT:
        reason = "row by row: prefill has the bits of decoding"
        chosen["kda.prefill"] = Choice("kda.prefill", "sweep", kda.sweep_reference, reason)
    else:
        reason = f"a state of {facts.state_elements:,} elements: chunks of 16 rows"
        chosen["kda.prefill"] = Choice("kda.prefill", "chunk", kda.chunk_reference, reason)
    return chosen
