"""Answers that have to be JSON, or a call, through the server."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from serving import Served

pytest.importorskip("llguidance", reason="llguidance is not installed: pip install 'soliton[grammar]'")
jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed: pip install jsonschema")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}
ASK = [{"role": "user", "content": "Describe the box."}]
TOOLS = [
    {"type": "function", "function": {"name": "move", "parameters": {
        "type": "object", "properties": {"to": {"type": "string"}, "by": {"type": "integer"}}}}},
    {"type": "function", "function": {"name": "stop"}},
]  # fmt: skip


@pytest.fixture(scope="module", params=["nextn", "dspark"])
def drafting(request: pytest.FixtureRequest) -> Iterator[Served]:
    with Served("--speculation", request.param) as found:
        yield found


def wanted(temperature: float, seed: int) -> dict[str, Any]:
    return {
        "messages": ASK, "max_tokens": 120, "temperature": temperature, "seed": seed,
        "response_format": {"type": "json_schema", "json_schema": {"name": "box", "schema": SCHEMA}},
    }  # fmt: skip


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_schema_whole_and_streamed(drafting: Served, temperature: float) -> None:
    body = wanted(temperature, 3)
    whole = drafting.ask("/v1/chat/completions", {**body, "return_meta_info": True})["choices"][0]
    jsonschema.validate(json.loads(whole["message"]["content"]), SCHEMA)
    assert whole["finish_reason"] == "stop"
    assert (whole["meta_info"]["grammar"], whole["meta_info"]["run_ahead_depth"]) == ("json_schema", 0)
    events = drafting.events("/v1/chat/completions", body)
    text = "".join(c["delta"].get("content") or "" for event in events for c in event["choices"])
    assert text == whole["message"]["content"]


def test_other_forms(drafting: Served) -> None:
    found = drafting.ask("/v1/completions", {"prompt": "x = ", "regex": "[0-9]{3}(a|b)", "max_tokens": 20})
    assert len(found["choices"][0]["text"]) == 4
    given = {"text": "x = ", "sampling_params": {"json_schema": json.dumps(SCHEMA), "max_new_tokens": 120}}
    jsonschema.validate(json.loads(drafting.ask("/generate", given)["text"]), SCHEMA)
    body = {"messages": ASK, "max_tokens": 60, "response_format": {"type": "json_object"}, "temperature": 0}
    assert drafting.ask("/v1/chat/completions", body)["choices"][0]["message"]["content"].startswith("{")


def test_offsets_of_half_characters(drafting: Served) -> None:
    given = {"prompt": "x", "regex": "(😀|漢|é){4}z", "temperature": 0, "logprobs": 0, "max_tokens": 30}
    whole = drafting.ask("/v1/completions", given)["choices"][0]["logprobs"]
    parts = [c["logprobs"] for e in drafting.events("/v1/completions", given) for c in e["choices"] if c["logprobs"]]
    assert [at for part in parts for at in part["text_offset"]] == whole["text_offset"]


def test_bad_grammars_cost_nobody_anything(drafting: Served) -> None:
    plain = {"prompt": "def add(a, b):\n", "max_tokens": 10, "temperature": 0}
    before = drafting.ask("/v1/completions", plain)["choices"][0]["text"]
    for fields, param in (
        ({"regex": "("}, "regex"), ({"ebnf": "start: )"}, "ebnf"), ({"json_schema": "{"}, "json_schema"),
        ({"regex": "a", "ebnf": "start: /a/"}, ""),
    ):  # fmt: skip
        status, _, found = drafting.call("/v1/completions", {**plain, **fields})
        assert status == 400 and str(found["error"]["param"] or "").startswith(param), found
    body = wanted(0, 1) | {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 7}}}}
    assert drafting.call("/v1/chat/completions", body)[0] == 400
    assert drafting.ask("/v1/completions", plain)["choices"][0]["text"] == before


def test_a_grammar_that_is_too_much_is_refused_in_time(drafting: Served) -> None:
    """Compiling it would take minutes and all memory; meanwhile others are answered."""
    plain = {"prompt": "def add(a, b):\n", "max_tokens": 10, "temperature": 0}
    before, found = drafting.ask("/v1/completions", plain), []
    parts = [{"type": "string", "pattern": f"a{{{i}}}"} for i in range(1, 40)]
    given = {**plain, "json_schema": {"allOf": parts}}
    thread = threading.Thread(target=lambda: found.append(drafting.call("/v1/completions", given)))
    thread.start()
    took = []
    while thread.is_alive():
        at = time.perf_counter()
        assert drafting.ask("/v1/completions", plain)["choices"][0]["text"] == before["choices"][0]["text"]
        took.append(time.perf_counter() - at)
    assert found[0][0] == 400 and "too much" in found[0][2]["error"]["message"] and max(took) < 2
    assert (
        drafting.ask("/v1/completions", {"prompt": "x", "regex": "ab", "max_tokens": 5})["choices"][0]["text"] == "ab"
    )


def test_a_compiler_that_was_killed_is_started_again(drafting: Served) -> None:
    def asked(regex: str) -> str:
        found = drafting.ask("/v1/completions", {"prompt": "x", "regex": regex, "max_tokens": 5})
        return str(found["choices"][0]["text"])

    assert asked("a{3}") == "aaa"
    threads = Path(f"/proc/{drafting.process.pid}/task").iterdir()
    children = [int(pid) for thread in threads for pid in (thread / "children").read_text().split()]
    os.kill(max(children), signal.SIGKILL)  # the youngest
    assert asked("b{3}") == "bbb" and asked("a{3}") == "aaa"


def test_calls_of_the_official_client_s_tools(drafting: Served) -> None:
    openai = pytest.importorskip("openai", reason="the openai package is not installed")
    pydantic = pytest.importorskip("pydantic")

    class Place(pydantic.BaseModel):  # type: ignore[name-defined,misc]
        city: Literal["Rome", "Oslo"]
        near: Literal["sea", "hill"] | None

    class Trip(pydantic.BaseModel):  # type: ignore[name-defined,misc]
        to: Place
        by: Literal["train"] | None

    tools = [openai.pydantic_function_tool(Trip, name="trip")]
    body = {"messages": ASK, "tools": tools, "tool_choice": "required", "temperature": 1.0, "max_tokens": 100}
    for seed in range(4):
        whole = drafting.ask("/v1/chat/completions", {**body, "seed": seed})["choices"][0]["message"]
        Trip.model_validate_json(whole["tool_calls"][0]["function"]["arguments"])
        events = drafting.events("/v1/chat/completions", {**body, "seed": seed})
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        assert "".join(delta.get("content") or "" for delta in deltas) == (whole["content"] or "")
        pieces = [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls") or []]
        assert "".join(pieces) == whole["tool_calls"][0]["function"]["arguments"]
    bad = {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": bad}}]
    status, _, found = drafting.call("/v1/chat/completions", {**body, "tools": tools})
    assert status == 200 or (found["error"]["param"] == "tools" and "ebnf" not in found["error"]["message"])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "move"}}], ids=str)
def test_a_call_that_has_to_be(drafting: Served, choice: Any) -> None:
    body = {"messages": ASK, "tools": TOOLS, "tool_choice": choice, "max_tokens": 200, "temperature": 0}
    found = drafting.ask("/v1/chat/completions", body)["choices"][0]
    call = found["message"]["tool_calls"][0]["function"]
    assert call["name"] in (("move",) if isinstance(choice, dict) else ("move", "stop"))
    if found["finish_reason"] == "length":  # a small model may talk on inside a value
        assert call["arguments"].startswith("{")
    else:
        assert found["finish_reason"] == "tool_calls" and len(found["message"]["tool_calls"]) == 1
        assert set(json.loads(call["arguments"])) <= {"to", "by"}
