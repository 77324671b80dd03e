"""The whole grid on a GPU: 10 prompts, 512 tokens, every number of drafts, every depth, whatever went before."""

from __future__ import annotations

import pytest

import helpers as h
from gpu_engines import FLASH, gpu, plain, prompts, same
from soliton import SamplingParams

pytestmark = pytest.mark.full

TOKENS, COUNT = 512, 10
MODELS = pytest.mark.parametrize("model", ["pebble", FLASH])


@MODELS
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5])
def test_drafts(model: str, steps: int) -> None:
    same(model, gpu(model, speculation="nextn", speculative_num_steps=steps), TOKENS, COUNT)


@MODELS
@pytest.mark.parametrize("speculation", ["off", "nextn"])
@pytest.mark.parametrize("depth", [0, 1, 2, 3, 4])
def test_depths(model: str, speculation: str, depth: int) -> None:
    same(model, gpu(model, speculation=speculation, run_ahead=depth), TOKENS, COUNT)


@MODELS
def test_the_past(model: str) -> None:
    """After a sampled request with penalties and after one that its reader left, each before every prompt."""
    engine = gpu(model, speculation="nextn", speculative_num_steps=4)
    for i, (prompt, want) in enumerate(zip(prompts(model, COUNT), plain(model, TOKENS, COUNT), strict=True)):
        engine.generate(prompt, SamplingParams(max_tokens=20 + i, temperature=1.3, seed=i, presence_penalty=0.5))
        stream = engine.stream([*prompt[: 3 + i], 5], h.greedy(64))
        for _ in range(1 + i):
            next(stream)
        stream.close()  # type: ignore[attr-defined]
        assert h.facts(engine.generate(prompt, h.greedy(TOKENS, logprobs=3))) == want


@MODELS
@pytest.mark.parametrize("speculation", ["off", "nextn"])
def test_a_seed_at_every_depth_and_executor(model: str, speculation: str) -> None:
    params = SamplingParams(max_tokens=128, temperature=0.9, top_p=0.95, top_k=20, seed=11, ignore_eos=True)
    kinds = [{"executor": "eager", "run_ahead": 0}, {"executor": "phased", "run_ahead": 1}]
    kinds += [{"executor": "graph", "run_ahead": depth} for depth in (0, 1, 2, 4)]
    found = []
    for kind in kinds:
        engine = gpu(model, speculation=speculation, **kind)
        found.append([engine.generate(prompt, params).token_ids for prompt in prompts(model, 3)])
    assert all(one == found[0] for one in found)
