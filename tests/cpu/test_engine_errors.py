"""What bad input gets at the engine: a typed error that names the value and the fix, and an engine that answers on."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers import engine, facts, greedy, load, micro, nano, nano_config, threads_as_before  # noqa: F401
from soliton import (
    BusyError,
    CheckpointError,
    ConfigError,
    Engine,
    MemoryPlanError,
    RequestError,
    SamplingParams,
    UnsupportedError,
)
from soliton.checkpoint import spec_from_config
from soliton.config import EngineConfig
from soliton.runtime import choose_ops

CONTEXT = 64
PROMPT = [3, 1, 4, 1, 5]

IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


def said(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


BAD_REQUESTS: list[tuple[str, Callable[[Engine], Any], str]] = [
    ("empty prompt", lambda e: e.generate([]), "the prompt is empty; it needs at least one token"),
    ("empty text", lambda e: e.generate(""), "the prompt is empty"),
    ("token too large", lambda e: e.generate([1, 64]), "token 1 of the prompt is 64, but token ids run from 0 to 63"),
    ("token negative", lambda e: e.generate([-1]), "token 0 of the prompt is -1"),
    ("no integer", lambda e: e.generate([1, 2.5]), "token 1 of the prompt is 2.5, not an integer"),
    ("prompt fills the context", lambda e: e.generate([1] * CONTEXT), f"has {CONTEXT} tokens, but max_context is 64"),
    ("prompt over the context", lambda e: e.generate([1] * 65), "65 tokens are more than max_context 64"),
    (
        "answer over the context",
        lambda e: e.generate(PROMPT, SamplingParams(max_tokens=60)),
        "max_tokens is 60, but the context has room for 59 after the prompt",
    ),
    ("bad temperature", lambda e: e.generate(PROMPT, SamplingParams(temperature=-1)), "temperature"),
    ("two answers", lambda e: e.generate(PROMPT, SamplingParams(n=2)), "n is 2; one answer is made at a time"),
    ("bias out of range", lambda e: e.generate(PROMPT, SamplingParams(logit_bias={64: 1.0})), "64"),
    ("nothing", lambda e: e.generate(None), "a prompt is a text, a list of token ids or a list of messages, not None"),
    ("bytes", lambda e: e.generate(b"ab"), "not bytes"),
    ("a truth value", lambda e: e.generate([1, True]), "token 1 of the prompt is True, not an integer"),
    ("no role", lambda e: e.generate([{"content": "a"}]), "messages[0] has no role"),
    ("no content", lambda e: e.generate([{"role": "user"}]), "messages[0] has no content"),
    ("content of no kind", lambda e: e.generate([said(5)]), "messages[0].content is 5; give a text or a list of text"),
    ("an image", lambda e: e.generate([said([IMAGE])]), "content[0] is of type 'image_url'; the model reads text only"),
    ("a part of no kind", lambda e: e.generate([said(["a"])]), "content[0] is 'a'; a part is an object such as"),
    ("a part without text", lambda e: e.generate([said([{"type": "text"}])]), "content[0].text is None; give a text"),
    (
        "no token to begin with",
        lambda e: e.generate(PROMPT, SamplingParams(min_tokens=1, stop_token_ids=list(range(64)))),
        "min_tokens is 1, but all 64 token ids end the answer",
    ),
    ("tools of no kind", lambda e: e.generate([said("a")], tools="abc"), "tools is 'abc'; a list of objects is needed"),
    ("a tool of no kind", lambda e: e.generate([said("a")], tools=[5]), "tools is [5]; a list of objects is needed"),
    ("a huge integer", lambda e: e.generate(PROMPT, SamplingParams(temperature=10**400)), "temperature is too large"),
    ("beyond float32", lambda e: e.generate(PROMPT, SamplingParams(temperature=1e39)), "temperature is too large"),
    ("a long key", lambda e: e.generate(PROMPT, SamplingParams(logit_bias={"9" * 5000: 1})), "logit_bias"),  # type: ignore[dict-item]
    ("params of another kind", lambda e: e.generate(PROMPT, {"top_p": 1}), "params is dict, not SamplingParams"),
    ("a list of params", lambda e: SamplingParams.from_dict([1]), "must be an object of named values, not list"),
    ("a broken chain", lambda e: e.draft_chain(PROMPT, 1.5), "n is 1.5; a chain needs a whole number"),
    ("chat words with text", lambda e: e.generate("ab", tools=[]), "tools: chat arguments go with messages"),
    ("chat words with ids", lambda e: e.generate(PROMPT, tools=[]), "not with token ids"),
    ("template argument", lambda e: e.generate([{"role": "user", "content": "a"}], template="x"), "template is no"),
    ("logits of nothing", lambda e: e.logits([]), "the prompt is empty"),
    ("logits too long", lambda e: e.logits([1] * 65), "more than max_context 64"),
    ("an empty chain", lambda e: e.draft_chain(PROMPT, 0), "n is 0; a chain has at least one draft"),
    ("a chain too long", lambda e: e.draft_chain(PROMPT, 10_000), "n is 10000, but max_context 64 leaves 59"),
]


@pytest.mark.parametrize(("call", "message"), [row[1:] for row in BAD_REQUESTS], ids=[row[0] for row in BAD_REQUESTS])
def test_a_refused_request_leaves_the_engine_as_it_was(call: Callable[[Engine], Any], message: str) -> None:
    served = engine(nano(), max_context=CONTEXT)
    before = facts(served.generate(PROMPT, greedy(20, logprobs=2)))
    with pytest.raises(RequestError, match=re.escape(message)):
        call(served)
    assert facts(served.generate(PROMPT, greedy(20, logprobs=2))) == before


def test_integers_of_other_libraries_are_ids() -> None:
    served = engine(nano(), max_context=CONTEXT)
    want = served.generate(PROMPT, greedy(8)).token_ids
    for prompt in (torch.tensor(PROMPT), torch.tensor(PROMPT).numpy(), tuple(PROMPT), iter(PROMPT)):
        assert served.generate(prompt, greedy(8)).token_ids == want  # type: ignore[arg-type]


def test_text_parts_are_one_text() -> None:
    tried = engine(nano(), max_context=CONTEXT)
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "c the"}]
    assert tried.encode([said(parts)]) == tried.encode([said("abc the")])
    assert tried.encode([said([]), said("a")]) == tried.encode([said(""), said("a")])


def test_a_chain_ends_with_the_context() -> None:
    tried = engine(nano(), max_context=CONTEXT)
    assert len(tried.draft_chain(PROMPT, CONTEXT - len(PROMPT))) == CONTEXT - len(PROMPT)
    with pytest.raises(RequestError, match="n is 60, but max_context 64 leaves 59"):
        tried.draft_chain(PROMPT, CONTEXT - len(PROMPT) + 1)


def test_settings_may_be_numpys() -> None:
    assert load(nano(), max_context=np.int64(64), run_ahead=np.int8(1)).config.max_context == 64


def test_a_stream_is_refused_before_its_first_piece() -> None:
    with pytest.raises(RequestError, match="is empty"):
        engine(nano(), max_context=CONTEXT).stream([])


def test_text_needs_a_tokenizer() -> None:
    served = engine(micro())
    for prompt, what in (("a text", "a text prompt"), ([{"role": "user", "content": "a"}], "messages")):
        with pytest.raises(RequestError, match=f"{what} needs a tokenizer and ling-micro has none; send token ids"):
            served.generate(prompt)
    with pytest.raises(RequestError, match="stop strings need a tokenizer and ling-micro has none"):
        served.generate([1, 2], SamplingParams(stop="x"))


def test_a_second_thread_is_told() -> None:
    served = engine(nano(), max_context=CONTEXT)
    pieces = served.stream(PROMPT, greedy(20))
    first = next(pieces)
    caught: list[BaseException] = []

    def other() -> None:
        try:
            served.generate(PROMPT, greedy(4))
        except BusyError as error:
            caught.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert "serving a request: it decodes one stream at a time" in str(caught[0])
    with pytest.raises(BusyError, match="Finish or close the stream"):
        served.logits(PROMPT)
    rest = [t for piece in pieces for t in piece.token_ids]
    assert [*first.token_ids, *rest] == served.generate(PROMPT, greedy(20)).token_ids


def test_a_stream_never_started_holds_nothing() -> None:
    served = engine(nano(), max_context=CONTEXT)
    unused = served.stream(PROMPT, greedy(4))
    assert len(served.generate(PROMPT, greedy(4)).token_ids) == 4
    del unused


def test_abort_ends_at_the_next_step_and_a_late_one_harms_nobody() -> None:
    served = engine(nano(), max_context=CONTEXT)
    whole = served.generate(PROMPT, greedy(30)).token_ids
    pieces = served.stream(PROMPT, greedy(30))
    got = list(next(pieces).token_ids)
    served.abort()
    last = list(pieces)[-1]
    assert last.finish_reason == "abort" and last.stats is not None
    assert last.stats.completion_tokens == len(got) and got == whole[: len(got)]
    served.abort()
    assert served.generate(PROMPT, greedy(30)).token_ids == whole
    early = served.stream(PROMPT, greedy(30))
    served.abort()
    assert [piece.finish_reason for piece in early] == ["abort"]
    assert served.generate(PROMPT, greedy(30)).token_ids == whole


def test_a_closed_engine_says_so() -> None:
    with load(nano()) as served:
        pass
    served.close()
    with pytest.raises(BusyError, match="this engine is closed; load a new one"):
        served.generate([1])


def test_closing_ends_a_stream_in_progress_and_refuses_one_not_begun() -> None:
    served = load(nano(), max_context=CONTEXT)
    begun, waiting = served.stream(PROMPT, greedy(40)), served.stream(PROMPT, greedy(40))
    next(begun)
    served.close()
    assert [piece.finish_reason for piece in begun][-1] == "abort"
    with pytest.raises(BusyError, match="this engine is closed"):
        next(waiting)


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"run_ahed": 1}, ConfigError, "did you mean 'run_ahead'?"),
        ({"run_ahead": 5}, ConfigError, "run_ahead = 5: expected a whole number of steps from 0 to 4"),
        ({"speculation": "nextm"}, ConfigError, "nextn"),
        ({"speculation": "off", "speculative_num_steps": 2}, ConfigError, "contradicts speculation = 'off'"),
        ({"speculation": "off", "draft": "d"}, ConfigError, "draft = 'd' contradicts speculation = 'off'"),
        ({"speculative_eagle_topk": 4}, ConfigError, "one accepted prefix"),
        ({"speculative_num_steps": 3, "speculative_num_draft_tokens": 3}, ConfigError, "3 contradicts"),
        ({"speculation": "dspark"}, ConfigError, "no draft is given and none is bundled with nano-good"),
        ({"speculation": "nextn", "draft_costs": "c"}, ConfigError, "a chain of NEXTN has none"),
        ({"draft_verify": "fixed"}, ConfigError, "draft_verify = 'fixed' needs draft_verify_tokens"),
        ({"draft_threshold": 0.5}, ConfigError, "means something with draft_verify = 'threshold' only"),
        ({"draft_threshold": 1.5, "draft_verify": "threshold"}, ConfigError, "a number from 0 to 1"),
        ({"dtype": "float16"}, UnsupportedError, "use float32 or bfloat16"),
        ({"device": "cuda:7"}, ConfigError, "CUDA devices; use cpu"),
        ({"max_context": 5000}, ConfigError, "max_context = 5000: .* goes to 4096 tokens"),
        ({"prefix_reuse": "some"}, ConfigError, "prefix_reuse = 'some'"),
    ],
)
def test_settings_are_refused_before_anything_is_loaded(settings: dict[str, Any], kind: type, message: str) -> None:
    with pytest.raises(kind, match=message if ".*" in message else re.escape(message)):
        Engine.load(nano(), **settings)


def test_nextn_needs_the_models_layer() -> None:
    with pytest.raises(ConfigError, match="kimi-micro has no MTP layer; use speculation = 'off'"):
        Engine.load(micro("kimi-micro"), speculation="nextn")
    with pytest.raises(ConfigError, match="kimi-micro has no MTP layer to draft with"):
        Engine.load(micro("kimi-micro"), speculative_num_steps=2)
    with pytest.raises(UnsupportedError, match="draft_chain needs the MTP layer of kimi-micro"):
        engine(micro("kimi-micro")).draft_chain([1, 2], 3)


def test_a_small_budget_names_the_context_that_fits() -> None:
    with pytest.raises(MemoryPlanError) as caught:
        Engine.load(nano(), max_context=4096, memory_budget="1500KB", checkpoint_budget=0)
    found = re.search(r"max_context 4096 needs ([\d,]+) bytes \(.*weights.*\) and the budget is 1,500,000; the largest "
                      r"max_context that fits is (\d+)", str(caught.value))  # fmt: skip
    assert found, caught.value
    fits = int(found[2])
    with load(nano(), max_context=fits, memory_budget="1500KB", checkpoint_budget=0) as served:
        assert served.plan.total <= 1_500_000
        assert len(served.generate([1], greedy(4)).token_ids) == 4
    with pytest.raises(MemoryPlanError, match="no max_context fits"):
        Engine.load(nano(), memory_budget="10KB", checkpoint_budget=0)


def test_a_model_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="no model 'no-such-model'"):
        Engine.load("no-such-model")


def changed(tmp_path: Path, **keys: Any) -> Path:
    """A copy of nano with another config.json, without weights that would fit it."""
    path = shutil.copytree(nano(), tmp_path / "nano")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **keys}))
    return path


def test_bad_defaults_of_the_checkpoint_are_refused_at_load(tmp_path: Path) -> None:
    path = changed(tmp_path)
    (path / "generation_config.json").write_text('{"temperature": "x"}')
    with pytest.raises(CheckpointError, match="generation_config: temperature must be a number"):
        load(path)


def test_odd_widths_are_refused_on_a_cpu() -> None:
    spec = spec_from_config({**nano_config(), "moe_intermediate_size": 24}, where="x", name="odd")
    with pytest.raises(UnsupportedError, match="odd: the feed-forward width of layer 1 is 24, no multiple of 32"):
        choose_ops(EngineConfig(model="x", device="cpu", dtype="float32"), spec)
