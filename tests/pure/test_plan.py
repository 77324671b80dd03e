"""The memory plan of published models on a GPU, without one: scratch of a prompt's pass grows with its rows."""

from __future__ import annotations

import pytest
import torch

from soliton.checkpoint import spec_from_config
from soliton.checkpoint.published import PUBLISHED
from soliton.plan import MemoryPlan, make_plan

GIB = 1 << 30


def plan(name: str, device: str, chunk: int, context: int = 9216) -> MemoryPlan:
    spec = spec_from_config(PUBLISHED[name], where=name, name=name)
    return make_plan(
        spec, weight_elements=0, rows=2, mtp=False, max_context=context, chunk=chunk, checkpoints=0, budget=None,
        device=torch.device(device), dtype=torch.bfloat16,
    )  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_scratch(name: str) -> None:
    small, large = plan(name, "cuda", 512), plan(name, "cuda", 8192)
    assert 0.3 * GIB < large.scratch < 3 * GIB and small.scratch < large.scratch / 3
    assert large.total - small.total == large.scratch - small.scratch
    assert plan(name, "cuda", 65536).scratch == plan(name, "cuda", 9216).scratch, "no pass is longer than the context"
    assert plan(name, "cpu", 8192).scratch == 0
