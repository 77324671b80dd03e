"""Every call of a recorded step, made ready beforehand, has the bits of the op's reference on the same buffers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from soliton import Engine
from soliton.ops.tape import Entry

MICRO = Path(__file__).resolve().parents[1] / "data"


def buffers(entry: Entry) -> list[Tensor]:
    return [a for a in entry.args if isinstance(a, Tensor)]


def entries(model: str, steps: int | None) -> Iterator[Entry]:
    with Engine.load(model, speculative_num_steps=steps, threads=1) as engine:
        runtime = engine._runtime
        assert runtime is not None
        for phase in next(iter(runtime.programs.values())).phases:
            for entry in phase.tape.entries:
                if entry.op in runtime.choices and runtime.choices[entry.op].bind is not None:
                    runtime.relay.rows.fill_(runtime.relay.tokens.shape[0])
                    yield entry


@pytest.mark.parametrize(
    ("model", "steps"), [(str(MICRO / "ling-micro"), 3), (str(MICRO / "kimi-micro"), None), ("pebble", 5)]
)
def test_ready_calls_have_the_references_bits(model: str, steps: int | None) -> None:
    maker = torch.Generator().manual_seed(1)
    seen = set()
    for entry in entries(model, steps):
        for tensor in buffers(entry):
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=maker))
        before = [t.clone() for t in buffers(entry)]
        entry.function(*entry.args)
        want = [t.clone() for t in buffers(entry)]
        for tensor, old in zip(buffers(entry), before, strict=True):
            tensor.copy_(old)
        entry.ready()
        for tensor, expected in zip(buffers(entry), want, strict=True):
            assert torch.equal(tensor, expected), entry
        assert any(not torch.equal(a, b) for a, b in zip(before, want, strict=True)), f"{entry} wrote nothing"
        seen.add(entry.op)
    assert {"linear", "norm", "kda.chain", "kda.conv", "router"} <= seen
