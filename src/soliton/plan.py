"""The memory plan: what an engine will take, by purpose, before it takes anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .context.stream import sizes
from .errors import MemoryPlanError
from .model.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes. weights: as held on the device; kv, draft_kv: caches at max_context; staging: recurrent states and conv
    windows, committed and staged; checkpoints: their budget; budget: what all of it may take, None if unknown."""

    weights: int
    kv: int
    draft_kv: int
    staging: int
    checkpoints: int
    budget: int | None

    @property
    def total(self) -> int:
        """Bytes of everything."""
        return self.weights + self.kv + self.draft_kv + self.staging + self.checkpoints

    def rows(self) -> Mapping[str, int]:
        """Bytes by purpose, for a table."""
        return {
            "weights": self.weights,
            "kv": self.kv,
            "draft kv": self.draft_kv,
            "state and staging": self.staging,
            "prefix checkpoints": self.checkpoints,
            "total": self.total,
        }


def make_plan(
    spec: ModelSpec,
    *,
    weight_elements: int,
    rows: int,
    drafts: int,
    max_context: int,
    checkpoints: int,
    budget: int | None,
    device: torch.device,
    dtype: torch.dtype,
) -> MemoryPlan:
    """The plan, or MemoryPlanError naming the largest max_context that would fit."""
    width = 4 if device.type == "cpu" else dtype.itemsize

    def plan(context: int) -> MemoryPlan:
        need = sizes(spec, max_context=context, rows=rows, draft=drafts > 0, dtype=dtype)
        return MemoryPlan(
            weights=weight_elements * width,
            kv=need.kv,
            draft_kv=need.draft_kv,
            staging=need.states + need.windows + (need.states // (rows + 1) if device.type == "cuda" else 0),
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
