"""Messages to prompts in the Ling-3 format: the protocol's cases, rendered as the engine renders a chat."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from soliton.prompt import encode

DATA = Path(__file__).parents[1] / "data" / "protocol"
TEMPLATE = (DATA / "chat_template.jinja").read_text(encoding="utf-8")
CASES = [json.loads(line) for line in (DATA / "chat_template.jsonl").read_text(encoding="utf-8").splitlines()]
EVERY = pytest.mark.parametrize("case", [pytest.param(case, id=case["id"]) for case in CASES])


def prompt_of(case: dict[str, Any], **changes: Any) -> str:
    """What the engine makes of a case, by a tokenizer with one token for every character."""
    checkpoint: Any = SimpleNamespace(
        chat_template=TEMPLATE, special_tokens={}, tokenizer=SimpleNamespace(encode=lambda text: [ord(c) for c in text])
    )
    given = {**case, **changes}
    chat = {**given["chat_template_kwargs"], "add_generation_prompt": given["add_generation_prompt"]}
    if "tools" in given:
        chat["tools"] = given["tools"]
    ids, boundary = encode(checkpoint, given["messages"], chat)
    assert 0 <= boundary <= len(ids)
    return "".join(map(chr, ids))


def test_all_are_there() -> None:
    assert len(CASES) == 20


@EVERY
def test_the_prompt(case: dict[str, Any]) -> None:
    prompt = prompt_of(case)
    if "prompt" in case:
        assert prompt == case["prompt"]  # of an inferred case too: the template is the one that the cases come with
        return
    assert prompt == case["prompt_of_test_template"]
    assert prompt.startswith(case["prompt_prefix"])
    assert prompt.endswith((case["prompt_suffix"], *case.get("prompt_suffix_also_acceptable", ())))
    at = 0
    for part in case["prompt_contains_in_order"]:
        assert part in prompt[at:], part
        at = prompt.index(part, at) + len(part)
    assert not any(part in prompt for part in case.get("prompt_not_contains", ()))


@EVERY
def test_a_text_and_a_list_of_its_parts_are_the_same(case: dict[str, Any]) -> None:
    def parted(message: dict[str, Any]) -> dict[str, Any]:
        text = message["content"]
        if not text:
            return message
        parts = [{"type": "text", "text": part} for part in (text[:1], text[1:])]
        return {**message, "content": parts}

    assert prompt_of(case, messages=[parted(message) for message in case["messages"]]) == prompt_of(case)


@EVERY
def test_arguments_may_be_objects_or_their_json(case: dict[str, Any]) -> None:
    def read(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}

    messages = [
        {**message, "tool_calls": [read(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in case["messages"]
    ]
    assert prompt_of(case, messages=messages) == prompt_of(case)


def test_an_answer_as_it_was_generated_makes_the_same_prompt_again() -> None:
    """What the parsers hand out and a client sends back continues the prompt to the letter, white space included."""
    from soliton.server.parsers import MessageParser, message_of

    case = CASES[0]
    prompt = prompt_of(case)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"s": {"type": "string"}}}}}]
    for text in (
        "\nSo.\n</think>\n\nWell: 3 < 4.\n",
        "So.</think><tool_call>f<arg_key>s</arg_key>\n<arg_value> ü\n</arg_value>\n</tool_call>",
    ):
        parser = MessageParser(thinking=True, tools=tools)
        deltas = parser.feed(text) + parser.finish("stop")[0]
        message = message_of(deltas)
        answer = {"role": "assistant", **message, "tool_calls": [{"function": f} for f in message["tool_calls"]]}
        again = prompt_of(case, messages=[*case["messages"], answer], add_generation_prompt=False)
        assert again == prompt + text + "<|role_end|>"
