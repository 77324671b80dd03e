"""The official client, as its users write it."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from serving import Served

openai = pytest.importorskip("openai", reason="the openai package is not installed: pip install openai")

ADD = "def add(a, b):\n"
ASK: list[Any] = [{"role": "user", "content": "Write a function that adds two numbers."}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "roll_call",
            "description": "Who is here?",
            "parameters": {"type": "object", "properties": {"room": {"type": "string"}, "seats": {"type": "integer"}}},
        },
    }
]


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["pebble"]
    assert client.models.retrieve("pebble").owned_by == "soliton"


def test_completions_whole_and_streamed(client: Any) -> None:
    given = {"model": "pebble", "prompt": ADD, "max_tokens": 30, "temperature": 0}
    whole = client.completions.create(**given)
    pieces = list(client.completions.create(**given, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.text for p in pieces for c in p.choices) == whole.choices[0].text
    assert whole.choices[0].finish_reason == pieces[-2].choices[0].finish_reason == "length"
    assert pieces[-1].choices == [] and pieces[-1].usage.completion_tokens == whole.usage.completion_tokens == 30
    assert whole.usage.prompt_tokens == 8


def test_chats_whole_and_streamed(client: Any) -> None:
    given = {"model": "pebble", "messages": ASK, "max_tokens": 40, "temperature": 0}
    whole = client.chat.completions.create(**given)
    pieces = list(client.chat.completions.create(**given, stream=True))
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(p.choices[0].delta.content or "" for p in pieces) == whole.choices[0].message.content
    assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_several_prompts_and_answers(client: Any) -> None:
    given = {"model": "pebble", "max_tokens": 8, "temperature": 1.0, "seed": 5}
    found = client.completions.create(prompt=[ADD, "import "], n=2, **given)
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert found.choices[0].text != found.choices[1].text, "a seed counts up from answer to answer"
    again = client.completions.create(prompt=ADD, n=2, **given)
    assert [c.text for c in again.choices] == [c.text for c in found.choices[:2]]
    ids = client.completions.create(prompt=[338, 1181, 24], **given)
    assert ids.usage.prompt_tokens == 3


def test_logprobs_and_echo(client: Any) -> None:
    given = {"model": "pebble", "prompt": ADD, "max_tokens": 10, "temperature": 0}
    found = client.completions.create(**given, logprobs=3, echo=True)
    choice, logged = found.choices[0], found.choices[0].logprobs
    assert choice.text.startswith(ADD) and len(logged.tokens) == found.usage.total_tokens
    assert logged.token_logprobs[0] is None and all(value <= 0 for value in logged.token_logprobs[1:])
    assert all(choice.text[at:].startswith(token) for at, token in zip(logged.text_offset, logged.tokens))
    assert all(len(top) in (3, 4) for top in logged.top_logprobs[1:])
    streamed = [p.choices[0].logprobs for p in client.completions.create(**given, logprobs=3, echo=True, stream=True)]
    assert [t for part in streamed if part for t in part.tokens] == logged.tokens
    assert [t for part in streamed if part for t in part.text_offset] == logged.text_offset
    chat = client.chat.completions.create(
        model="pebble", messages=ASK, max_tokens=6, temperature=0, logprobs=True, top_logprobs=2
    )
    content = chat.choices[0].logprobs.content
    assert len(content) == 6 and all(len(entry.top_logprobs) == 2 for entry in content)
    assert "".join(entry.token for entry in content) == chat.choices[0].message.content
    assert bytes(content[0].bytes).decode() == content[0].token


def test_a_prompt_is_scored_without_an_answer(client: Any, served: Served) -> None:
    given = {"model": "pebble", "prompt": ADD, "temperature": 0, "echo": True, "logprobs": 1}
    scored = client.completions.create(**given, max_tokens=0).choices[0]
    longer = client.completions.create(**given, max_tokens=1).choices[0]
    assert (scored.text, scored.finish_reason) == (ADD, "length")
    assert scored.logprobs.tokens == longer.logprobs.tokens[:-1] and scored.logprobs.token_logprobs[0] is None
    assert scored.logprobs.token_logprobs == longer.logprobs.token_logprobs[:-1]
    streamed = list(client.completions.create(**given, max_tokens=0, stream=True))
    assert [chunk.choices[0].text for chunk in streamed] == [ADD]
    del given["logprobs"]
    plain = client.completions.create(**given, max_tokens=0).choices[0]
    assert (plain.text, plain.logprobs) == (ADD, None)
    assert served.call("/v1/completions", {"prompt": ADD, "max_tokens": 0})[0] == 400
    none = served.ask("/generate", {"text": ADD, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True})
    assert (none["text"], none["meta_info"]["completion_tokens"]) == ("", 0)
    assert none["meta_info"]["input_token_logprobs"] == none["meta_info"]["output_token_logprobs"] == []


def test_prompt_scores_stream_as_they_are(served: Served) -> None:
    given = {"prompt": "x = é日 ", "max_tokens": 2, "temperature": 0, "prompt_logprobs": 1, "logprobs": 1}
    for echo in (False, True):
        whole = served.ask("/v1/completions", {**given, "echo": echo})["choices"][0]
        events = served.events("/v1/completions", {**given, "echo": echo})
        found = [c["prompt_logprobs"] for event in events for c in event["choices"] if "prompt_logprobs" in c]
        assert found == [whole["prompt_logprobs"]] and found[0][0] is None
    tokens = whole["logprobs"]["tokens"]
    assert any(token.startswith("bytes:\\x") for token in tokens), "parts of a character can be told apart"
    assert all(at <= len(whole["text"]) for at in whole["logprobs"]["text_offset"])
    assert [at for at, token in zip(whole["logprobs"]["text_offset"], tokens) if token == " "][-1:] <= [7]
    assert served.call("/v1/completions", {**given, "echo": True, "prompt_logprobs": 3})[0] == 400
    full = {"prompt": [338] * 4096, "max_tokens": 0, "echo": True, "logprobs": 0}
    assert len(served.ask("/v1/completions", full)["choices"][0]["logprobs"]["tokens"]) == 4096


def test_stops_bias_and_penalties(client: Any) -> None:
    given = {"model": "pebble", "prompt": ADD, "max_tokens": 40, "temperature": 0}
    plain = client.completions.create(**given).choices[0]
    stopped = client.completions.create(**given, stop="return").choices[0]
    assert stopped.finish_reason == "stop" and stopped.text == plain.text.split("return")[0]
    assert stopped.matched_stop == "return"
    biased = client.completions.create(**given, logit_bias={"343": -100}).choices[0]
    assert biased.text != plain.text
    assert client.completions.create(**given, frequency_penalty=1.5).choices[0].text != plain.text
    short = client.completions.create(**given, stop="return", extra_body={"min_tokens": 30}).choices[0]
    assert "return" in short.text
    assert client.completions.create(**given, extra_body={"top_k": 1, "min_p": 0.1}).choices[0].text == plain.text


def test_tools_reach_the_prompt_and_nothing_breaks(client: Any) -> None:
    given = {"model": "pebble", "messages": ASK, "max_tokens": 10, "temperature": 0}
    bare = client.chat.completions.create(**given)
    offered = client.chat.completions.create(**given, tools=TOOLS)
    unasked = client.chat.completions.create(**given, tools=TOOLS, tool_choice="none")
    assert unasked.usage.prompt_tokens == bare.usage.prompt_tokens
    assert offered.usage.prompt_tokens >= bare.usage.prompt_tokens
    history = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "roll_call", "arguments": '{"room": "a"}'}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "nobody"},
    ]  # fmt: skip
    assert client.chat.completions.create(**{**given, "messages": history}, tools=TOOLS).choices


def test_refusals_are_the_client_s_errors(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="pebble", prompt="a " * 9000, max_tokens=4)
    assert refused.value.code == "context_length_exceeded" and refused.value.param == "prompt"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")


def test_a_reader_who_leaves(client: Any, served: Served) -> None:
    given = {"model": "pebble", "prompt": ADD, "max_tokens": 2000, "temperature": 0, "extra_body": {"ignore_eos": True}}
    stream = client.completions.create(**given, stream=True)
    assert next(iter(stream)).choices
    stream.close()
    began = time.perf_counter()
    text = client.completions.create(model="pebble", prompt=ADD, max_tokens=5, temperature=0).choices[0].text
    assert time.perf_counter() - began < 10, "2000 tokens would take longer"
    assert (
        text == served.ask("/v1/completions", {"prompt": ADD, "max_tokens": 5, "temperature": 0})["choices"][0]["text"]
    )


def test_prefixes_are_reused_and_told(client: Any) -> None:
    long = "".join(f"value_{i} = {i}\n" for i in range(200))
    given = {"model": "pebble", "prompt": long, "max_tokens": 4, "temperature": 0}
    first, second = (client.completions.create(**given) for _ in range(2))
    assert first.choices[0].text == second.choices[0].text
    assert second.usage.prompt_tokens_details.cached_tokens >= 512 > first.usage.prompt_tokens_details.cached_tokens


def test_generate_as_sglang_s_benchmark_asks(served: Served) -> None:
    body = {
        "text": ADD, "sampling_params": {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True},
        "stream": True, "lora_path": None, "return_logprob": False, "logprob_start_len": -1,
        "return_routed_experts": False,
    }  # fmt: skip
    served.ask("/generate", {**body, "stream": False})  # the warm-up
    assert served.call("/flush_cache", {}, method="POST")[0] == 200
    events = list(served.events("/generate", body))
    counts = [event["meta_info"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == 24 and len(set(counts)) == len(counts)
    assert all(b["text"].startswith(a["text"]) for a, b in itertools.pairwise(events)), "text is cumulative"
    assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)
    last = events[-1]["meta_info"]
    assert last["finish_reason"] == {"type": "length", "length": 24} and last["cached_tokens"] == 0
    assert last["spec_verify_ct"] == len(events) - 1
    assert last["spec_accept_length"] == pytest.approx(24 / last["spec_verify_ct"])
    assert sum(last["spec_accept_histogram"]) == last["spec_verify_ct"] == sum(last["spec_correct_drafts_histogram"])
    for path in ("/get_server_info", "/server_info"):
        state = served.ask(path, None)["internal_states"][0]
        assert 1 <= state["avg_spec_accept_length"] <= 4
    assert served.ask("/get_model_info", None)["is_generation"] is True
    ids = served.ask("/generate", {"input_ids": [[338, 1181], [338]], "sampling_params": {"max_new_tokens": 3}})
    assert [len(found["output_ids"]) for found in ids] == [3, 3]
    one = served.ask("/generate", {"text": ["a"], "sampling_params": {"max_new_tokens": 3}})
    assert len(one) == 1, "a list is answered with a list"


def test_generate_s_logprobs(served: Served) -> None:
    body = {"text": ADD, "sampling_params": {"temperature": 0, "max_new_tokens": 5}, "return_logprob": True}
    found = served.ask("/generate", {**body, "logprob_start_len": 0, "top_logprobs_num": 2})["meta_info"]
    assert found["input_token_logprobs"][0][0] is None and len(found["input_token_logprobs"]) == 8
    assert [token for _, token, _ in found["output_token_logprobs"]] == served.ask("/generate", body)["output_ids"]
    assert all(len(top) == 2 for top in found["output_top_logprobs"])


def test_aborting_by_name(served: Served) -> None:
    body = {"text": ADD, "rid": "mine", "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True}}
    events = served.events("/generate", body)
    next(events)
    assert served.call("/generate", {"text": "a", "rid": "mine"})[0] == 400, "one id, one request"
    assert served.ask("/abort_request", {"rid": "mine"}) == {"aborted": 1}
    last = list(events)[-1]["meta_info"]
    assert last["finish_reason"]["type"] == "abort" and last["completion_tokens"] < 3000
    assert served.ask("/abort_request", {"rid": "mine"}) == {"aborted": 0}


def test_aborting_one_prompt_of_several(served: Served) -> None:
    long = {"max_new_tokens": 3000, "ignore_eos": True}
    body = {"text": [ADD, ADD, "a"], "rid": ["one", "two", "three"], "sampling_params": long}
    ends: dict[int, dict[str, Any]] = {}
    for event in served.events("/generate", body):
        meta = event["meta_info"]
        assert meta["id"] == body["rid"][event["index"]]
        if event["index"] not in ends and event["index"] == 0:
            assert served.ask("/abort_request", {"rid": "two"}) == {"aborted": 1}
            assert served.ask("/abort_request", {"rid": "one"}) == {"aborted": 1}
        if event["index"] == 2 and meta["completion_tokens"] > 20:
            served.ask("/abort_request", {"rid": "three"})
        ends[event["index"]] = meta
    assert [ends[place]["finish_reason"]["type"] for place in range(3)] == ["abort"] * 3
    assert ends[0]["completion_tokens"] > 0 == ends[1]["completion_tokens"] and ends[2]["completion_tokens"] > 20
    assert served.ask("/abort_request", {"rid": "two"}) == {"aborted": 0}
    whole: list[Any] = []
    thread = threading.Thread(target=lambda: whole.append(served.ask("/generate", body)))
    thread.start()
    for name in ("two", "three", "one"):
        while not served.ask("/abort_request", {"rid": name})["aborted"]:
            pass
    thread.join()
    assert [answer["meta_info"]["finish_reason"]["type"] for answer in whole[0]] == ["abort"] * 3, "one for each prompt"
    assert served.call("/generate", {**body, "rid": ["one", "one", "two"]})[0] == 400
    assert served.call("/generate", {**body, "rid": ["one"]})[0] == 400


def test_tokens_and_health(served: Served) -> None:
    found = served.ask("/tokenize", {"prompt": ADD})
    assert found["count"] == len(found["tokens"]) == 8
    assert served.ask("/detokenize", {"tokens": found["tokens"]})["text"] == ADD
    assert served.ask("/v1/tokenize", {"prompt": [ADD, "a"]})["count"] == [8, 1]
    assert served.ask("/tokenize", {"messages": ASK})["count"] > 8
    assert served.call("/health")[0] == served.call("/health_generate")[0] == 200
    assert served.ask("/get_load", None)[0]["num_reqs"] == 0
    status, _, text = served.call("/metrics")
    assert status == 200 and 'sglang:spec_accept_length{model_name="pebble"}' in text
    assert json.loads(json.dumps(served.ask("/openapi.json", None)))["openapi"] == "3.1.0"
