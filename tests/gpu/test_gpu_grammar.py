"""Grammars on a GPU: plain's bytes and valid answers whatever drafts and executes; no read but that of the drafts."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

import helpers as h
from gpu_engines import FLASH, gpu, prompts
from soliton import SamplingParams
from soliton.step.executor import GraphExecutor

pytest.importorskip("llguidance")
GROUPS = "([a-m]+[0-9][ ,.])*"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer", "maximum": 99}},
    "required": ["name", "size"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
WAYS: list[dict[str, Any]] = [
    {"speculation": "nextn", "speculative_num_steps": 3},
    {"speculation": "nextn", "speculative_num_steps": 5, "run_ahead": 2},
    {"speculation": "dspark"},
    {"speculation": "nextn", "speculative_num_steps": 3, "executor": "phased"},
    {"speculation": "nextn", "speculative_num_steps": 3, "executor": "eager"},
]
ASKED: list[dict[str, Any]] = [
    {"regex": GROUPS, "logprobs": 2},
    {"json_schema": SCHEMA},
    {"regex": GROUPS, "presence_penalty": 0.4, "logit_bias": {70: 3.0}, "logprobs": 1},
    {"regex": "[a-m]{1,9}[0-9]{2}", "grammar_after": 200},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_greedy_bytes_are_plains(way: dict[str, Any]) -> None:
    plain, tried = gpu("pebble", speculation="off"), gpu("pebble", **way)
    for asked in ASKED:
        for prompt in prompts("pebble", 2):
            params = h.greedy(48, **{"ignore_eos": False, **asked})
            want = plain.generate(prompt, params)
            assert h.facts(tried.generate(prompt, params)) == h.facts(want)
            assert want.stats.run_ahead_depth == 0 and want.stats.grammar in asked
            check(asked, want.text, want.finish_reason)


def check(asked: dict[str, Any], text: str, reason: str) -> None:
    if "json_schema" in asked and reason == "stop":
        assert {"name", "size"} == set(json.loads(text))
    if asked.get("regex") == GROUPS:
        assert re.fullmatch(f"{GROUPS}([a-m]+[0-9]?)?", text)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_sampled_answers_fit_and_come_again(way: dict[str, Any]) -> None:
    tried = gpu("pebble", **way)
    for asked in ASKED:
        for seed in range(4):
            params = SamplingParams(max_tokens=60, seed=seed, temperature=1.1, **asked)
            one, two = (tried.generate([5, 6, 7, 8], params) for _ in range(2))
            assert one.token_ids == two.token_ids
            check(asked, one.text, one.finish_reason)


def test_executors_agree() -> None:
    params = SamplingParams(max_tokens=40, seed=3, temperature=0.8, top_p=0.9, presence_penalty=0.3, regex=GROUPS)
    found = [
        gpu("pebble", speculation="nextn", executor=executor).generate([5, 6, 7, 8], params).token_ids
        for executor in ("graph", "phased", "eager")
    ]
    assert all(one == found[0] for one in found)


def test_the_usual_programs_and_answers_stay() -> None:
    tried = gpu("pebble", speculation="nextn", speculative_num_steps=3)
    runtime = tried._ready()
    before = [program.dump() for program in runtime.programs.values()]
    values = ({"temperature": 0.0}, {"seed": 4}, {"seed": 4, "presence_penalty": 0.5})
    want = []
    for number in range(2):
        for more in values:
            params = SamplingParams(max_tokens=40, ignore_eos=True, **more)
            want.append(h.facts(tried.generate([5, 6, 7, 8], params)))
        if number == 0:
            for more in values:
                tried.generate([5, 6, 7, 8], SamplingParams(max_tokens=40, regex=GROUPS, **more))
    assert want[:3] == want[3:] and before == [program.dump() for program in runtime.programs.values()]
    executor = runtime.loop.executor
    assert isinstance(executor, GraphExecutor) and runtime.guided
    assert all(len(executor._graphs[id(program)]) == 3 for program in runtime.guided.values()), "captured in parts"


def test_no_other_read_of_the_device() -> None:
    tried = gpu("pebble", speculation="nextn", speculative_num_steps=3)
    for values in ({"temperature": 0.0}, {"seed": 1}, {"seed": 1, "presence_penalty": 0.4, "logprobs": 2}):
        params = SamplingParams(max_tokens=200, regex=GROUPS, ignore_eos=True, **values)
        tried.generate([5, 6, 7, 8], params)
        stream = tried.stream([5, 6, 7, 8], params)
        for _ in range(3):
            next(stream)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(20):
                next(stream)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        stream.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("vocab", [90, 4096, 157184])
def test_masks(vocab: int) -> None:
    from soliton.ops import verdict_triton as kernels
    from soliton.sampling import penalties

    g = torch.Generator("cuda").manual_seed(vocab)
    logits = torch.randn(6, vocab + 64, generator=g, device="cuda")
    masks = torch.randint(-(2**31), 2**31, (6, -(-vocab // 32)), generator=g, device="cuda").int()
    out = torch.full((6, vocab), 7.0, device="cuda")
    kernels.restrict(out, logits, masks, torch.tensor([4], device="cuda"))
    assert torch.equal(out[:4], penalties.restrict(logits[:4, :vocab], masks[:4])) and bool((out[4:] == 7.0).all())


def test_a_model_without_a_tokenizer_says_so() -> None:
    with pytest.raises(ValueError, match="regex needs a tokenizer"):
        gpu(FLASH, speculation="off").generate([1, 2], SamplingParams(regex="a"))
