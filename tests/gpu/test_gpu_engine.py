"""Whole engines on a GPU: right against the CPU, and the same bytes whatever the speculation, depth and executor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import helpers as h
from gpu_engines import FLASH, gpu, plain, prompts, same
from soliton import SamplingParams
from soliton.step.program import MODES

STEPS, DEPTHS = (1, 2, 3, 4, 5), (0, 1, 2, 4)


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    yield
    torch.cuda.synchronize()


def test_pebble_is_the_cpus() -> None:
    ours, theirs = gpu("pebble", speculation="off"), h.engine("pebble", speculation="off", dtype="bfloat16")
    for prompt in prompts("pebble", 3):
        a, b = ours.logits(prompt), theirs.logits(prompt)
        assert float((a - b).norm() / b.norm()) < 2e-2
        got = ours.generate(prompt, h.greedy(24)).token_ids
        whole = theirs.logits(prompt + got)[len(prompt) - 1 : -1]
        best = whole.max(-1).values
        chosen = whole.gather(1, torch.tensor(got).unsqueeze(1)).squeeze(1)
        assert float((best - chosen).max()) < 0.3, "every token is the CPU's choice or a near tie"


@pytest.mark.parametrize("steps", STEPS)
def test_pebble_is_identical_with_drafts(steps: int) -> None:
    engine = gpu("pebble", speculation="nextn", speculative_num_steps=steps)
    assert same("pebble", engine, 64, 4) > 1.3


@pytest.mark.parametrize("depth", DEPTHS)
def test_pebble_is_identical_at_every_depth(depth: int) -> None:
    same("pebble", gpu("pebble", speculation="nextn", run_ahead=depth), 64, 3)
    same("pebble", gpu("pebble", speculation="off", run_ahead=depth), 64, 3)


@pytest.mark.parametrize("executor", ["eager", "phased"])
def test_executors_agree(executor: str) -> None:
    same("pebble", gpu("pebble", speculation="nextn", executor=executor), 48, 3)
    one, other = gpu("pebble", speculation="nextn"), gpu("pebble", speculation="nextn", executor=executor)
    params = SamplingParams(max_tokens=40, temperature=0.8, top_p=0.9, seed=3, presence_penalty=0.3, ignore_eos=True)
    for prompt in prompts("pebble", 2):
        assert one.generate(prompt, params).token_ids == other.generate(prompt, params).token_ids


def test_every_program_is_captured() -> None:
    runtime = gpu("pebble", speculation="nextn")._runtime
    assert runtime is not None
    executor: Any = runtime.loop.executor
    assert executor.name == "graph" and set(executor._graphs) == {id(runtime.programs[m]) for m in MODES}


def test_the_past_leaves_no_trace() -> None:
    engine = gpu("pebble", speculation="nextn", speculative_num_steps=4)
    for prompt, want in zip(prompts("pebble", 3), plain("pebble", 64, 3), strict=True):
        engine.generate([3, 1, 2], SamplingParams(max_tokens=9, temperature=1.3, seed=5, presence_penalty=0.5))
        stream = engine.stream([9, 8, 7, 6], h.greedy(40))
        next(stream), next(stream)
        stream.close()  # type: ignore[attr-defined]
        engine.reset()
        assert h.facts(engine.generate(prompt, h.greedy(64, logprobs=3))) == want


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_flash_is_identical_with_drafts(steps: int) -> None:
    engine = gpu(FLASH, speculation="nextn", speculative_num_steps=steps)
    same(FLASH, engine, 32, 2)
