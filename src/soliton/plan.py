"""The memory plan: what an engine will take, by purpose, before it takes anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .context.stream import sizes
from .errors import MemoryPlanError
from .model.draft_spec import DraftSpec
from .model.spec import DenseSpec, KdaSpec, LayerSpec, ModelSpec, MoeSpec


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes. weights: as held on the device; kv, draft_kv: caches at max_context, with a block drafter's features;
    staging: recurrent states and conv
    windows, committed and staged; scratch: activations of a prompt's pass on a GPU; checkpoints: their budget; budget:
    what all of it may take, None if unknown."""

    weights: int
    kv: int
    draft_kv: int
    staging: int
    scratch: int
    checkpoints: int
    budget: int | None

    @property
    def total(self) -> int:
        """Bytes of everything."""
        return self.weights + self.kv + self.draft_kv + self.staging + self.scratch + self.checkpoints

    def rows(self) -> Mapping[str, int]:
        """Bytes by purpose, for a table."""
        return {
            "weights": self.weights,
            "kv": self.kv,
            "draft kv": self.draft_kv,
            "state and staging": self.staging,
            "prompt scratch": self.scratch,
            "prefix checkpoints": self.checkpoints,
            "total": self.total,
        }


def prompt_scratch(spec: ModelSpec, rows: int, context: int) -> int:
    """Bytes of activations while ``rows`` rows of a prompt go through the largest layer, bfloat16, at the end of
    ``context`` tokens. What the ops of ops.bulk hold at once, a little over; a pass on a CPU has too few rows to count.
    """
    layers = (*spec.layers, *([spec.mtp] if spec.mtp else []))
    largest = max((max(_mixer(layer, rows, context), _mlp(layer, spec.hidden, rows)) for layer in layers), default=0)
    return 2 * (largest + 4 * spec.hidden * rows)  # the residual stream, normed, and what a block adds to it


def _mixer(layer: LayerSpec, rows: int, context: int) -> int:
    """Elements of two bytes."""
    m = layer.mixer
    if isinstance(m, KdaSpec):
        keys, values = m.heads * m.key_dim, m.heads * m.value_dim
        projected = 2 * keys + values + (m.gate_rank or keys) + (m.gate_rank or values) + m.heads
        convolved = 2 * keys + values
        gates = 0 if m.gate_rank is None else keys + values
        # the chunked recurrence: normed q and k, gates in float32, three factors, values, two chunk matrices, states
        chunked = 2 * keys + 2 * keys + 2 * keys + 2 * values + 160 * m.heads + values * m.key_dim // 64
        return rows * (projected + convolved + gates + chunked + 3 * values)
    wide = m.nope_dim + m.rope_dim
    projected = (m.q_rank or m.heads * wide) + m.kv_rank + m.rope_dim + (m.heads if m.head_gate else 0)
    queries = m.heads * wide * (2 if m.q_rank is None else 3)
    expanded = m.heads * (2 * wide + m.nope_dim + m.value_dim)  # keys and values of the whole context
    return rows * (projected + queries + 3 * m.heads * m.value_dim) + context * expanded


def _mlp(layer: LayerSpec, hidden: int, rows: int) -> int:
    """Elements of two bytes."""
    m = layer.mlp
    if isinstance(m, DenseSpec):
        return rows * (3 * m.width + hidden)
    assert isinstance(m, MoeSpec)
    routed = m.top_k * (2 * hidden + 3 * m.width + 16)  # inputs and outputs of each pair, and where it lies
    return rows * (routed + 2 * m.experts + 3 * m.shared_width + 2 * hidden)


def make_plan(
    spec: ModelSpec,
    *,
    weight_elements: int,
    rows: int,
    mtp: bool,
    max_context: int,
    chunk: int,
    checkpoints: int,
    budget: int | None,
    device: torch.device,
    dtype: torch.dtype,
    drafter: DraftSpec | None = None,
) -> MemoryPlan:
    """The plan, or MemoryPlanError naming the largest max_context that would fit."""
    width = 4 if device.type == "cpu" else dtype.itemsize

    def plan(context: int) -> MemoryPlan:
        need = sizes(spec, max_context=context, rows=rows, draft=mtp, dtype=dtype, drafter=drafter)
        return MemoryPlan(
            weights=weight_elements * width,
            kv=need.kv,
            draft_kv=need.draft_kv,
            staging=need.states + need.windows + (need.states // (rows + 1) if device.type == "cuda" else 0),
            scratch=prompt_scratch(spec, min(chunk, context), context) if device.type == "cuda" else 0,
            checkpoints=checkpoints,
            budget=budget,
        )

    made = plan(max_context)
    if budget is None or made.total <= budget:
        return made
    low, high = 0, max_context
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if plan(middle).total <= budget else (low, middle - 1)
    parts = ", ".join(f"{name} {value:,}" for name, value in made.rows().items() if name != "total")
    if low < 2:
        raise MemoryPlanError(
            f"the model needs {made.total:,} bytes ({parts}) and the budget is {budget:,}: no max_context fits; "
            "give a larger memory_budget or a smaller checkpoint_budget"
        )
    raise MemoryPlanError(
        f"max_context {max_context} needs {made.total:,} bytes ({parts}) and the budget is {budget:,}; the largest "
        f"max_context that fits is {low}"
    )
