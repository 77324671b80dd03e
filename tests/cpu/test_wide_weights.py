"""Routers and head in float32 beside weights in bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers import micro
from soliton import Engine, SamplingParams
from soliton.checkpoint import open_checkpoint
from soliton.config import EngineConfig
from soliton.model.weights import Builder, MoeWeights
from soliton.runtime import _weight_elements


class Fine:
    """The small checkpoint with numbers that bfloat16 does not have."""

    def __init__(self) -> None:
        self.checkpoint = open_checkpoint(str(micro()))

    def tensor(self, role: str, device: torch.device) -> Tensor:
        return self.checkpoint.tensor(role, device).float() * 1.001

    def has(self, role: str) -> bool:
        return self.checkpoint.has(role)


@pytest.mark.parametrize("wide", [False, True])
def test_what_is_rounded(wide: bool) -> None:
    fine, cpu, asked = Fine(), torch.device("cpu"), torch.float32 if wide else None
    model = Builder(fine, cpu, torch.bfloat16, merge_experts=False, router=asked, head=asked).model(
        fine.checkpoint.spec, mtp=False
    )
    at, block = next((i, la.mlp) for i, la in enumerate(model.layers) if isinstance(la.mlp, MoeWeights))
    for weight, role in ((block.router, f"layers.{at}.moe.router"), (model.head, "head")):
        exact = fine.tensor(role, cpu).t()
        rounded = exact.bfloat16().float()
        assert not torch.equal(exact, rounded)
        assert torch.equal(weight.data[:, : weight.outputs], exact if wide else rounded)
    into = model.layers[0].mixer.into.data
    assert torch.equal(into, into.bfloat16().float()), "all others are rounded"


def test_the_plan_counts_them_twice_on_a_gpu() -> None:
    checkpoint = open_checkpoint(str(micro()))
    plain = EngineConfig(model="any", device="cuda:0")
    wide = EngineConfig(model="any", device="cuda:0", router_dtype="float32", lm_head_dtype="float32")
    routers = [e.numel for role, e in checkpoint.table.items() if role.endswith("moe.router") and "mtp" not in role]
    more = _weight_elements(checkpoint, False, wide) - _weight_elements(checkpoint, False, plain)
    assert routers and more == sum(routers) + checkpoint.table["head"].numel
    on_cpu = EngineConfig(model="any", device="cpu", lm_head_dtype="float32")
    assert _weight_elements(checkpoint, False, on_cpu) == _weight_elements(checkpoint, False, plain)


def test_an_answer_is_the_same_where_the_weights_are_bfloat16() -> None:
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    found = []
    for settings in ({}, {"router_dtype": "float32", "lm_head_dtype": "float32"}):
        with Engine.load(str(micro()), device="cpu", dtype="bfloat16", max_context=64, **settings) as engine:
            found.append(engine.generate([5, 6, 7], params).token_ids)
    assert found[0] == found[1]
