"""Calls that have to be made: whatever the grammar lets through, the parser reads back as arguments of the schema."""

from __future__ import annotations

import functools
import json
import random
from typing import Any

import pytest
import torch

from soliton import RequestError
from soliton.checkpoint import open_checkpoint
from soliton.sampling.grammar import Grammars, words
from soliton.server.calls import call_grammar
from soliton.server.parsers import MessageParser, message_of

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

DEFS = {
    "Color": {"enum": ["red", "green"], "type": "string"},
    "Part": {"type": "object", "properties": {"c": {"$ref": "#/$defs/Color"}}, "required": ["c"]},
}
KINDS: list[Any] = [
    {"anyOf": [{"type": "string", "maxLength": 6}, {"type": "null"}]}, {"anyOf": [{"type": "string", "enum": ["a b"]}]},
    {"type": ["string", "null"], "maxLength": 6}, {"type": ["string"]}, {"allOf": [{"type": "string", "maxLength": 5}]},
    {"const": "abc"}, {"const": "zz", "type": "string"}, {"anyOf": [{"type": "string"}, {"type": "integer"}]},
    {"$ref": "#/$defs/Color"}, {"$ref": "#/$defs/Part"}, {"type": "array", "items": {"$ref": "#/$defs/Color"}},
    {"type": "string", "pattern": "^[a-z]{3}[\\d_]+$"},
    {"type": "string", "pattern": "a/b|c\\d", "minLength": 4, "maxLength": 9},
    {"type": "string", "minLength": 3}, {"type": "string", "enum": ["aa", "b"], "minLength": 2},
    {"enum": [1, "a", None]}, {"enum": ["1", "b", None]}, {"enum": ["x<y", "true"], "maxLength": 4},
    {"type": "boolean"}, {}, True,
    {"oneOf": [{"const": "one"}, {"const": "two"}], "maxLength": 3}, {"type": "number"}, {"type": "null"},
]  # fmt: skip


@functools.cache
def model() -> tuple[Any, Grammars]:
    checkpoint = open_checkpoint("pebble")
    assert checkpoint.tokenizer is not None
    tokens = (checkpoint.spec.vocab, tuple(checkpoint.eos_ids))
    return checkpoint.tokenizer, Grammars("pebble", checkpoint.tokenizer.json(), *tokens)


def tools_of(kind: Any) -> list[dict[str, Any]]:
    schema = {"type": "object", "properties": {"s": kind}, "required": ["s"], "$defs": DEFS}
    return [{"type": "function", "function": {"name": "f", "parameters": schema}}]


def sampled(source: str, draw: random.Random) -> str | None:
    """A text of the grammar's, walked at random towards its end; None where that is far."""
    tokenizer, grammars = model()
    matcher, ids = grammars.compiled("ebnf", source).deep_copy(), []
    mask = torch.zeros(words(grammars.vocab), dtype=torch.int32)
    for _ in range(300):
        matcher.unsafe_compute_mask_ptr(mask.data_ptr(), mask.nbytes)
        assert not matcher.is_error(), matcher.get_error()
        bits = ((mask.long().unsqueeze(1) >> torch.arange(32)) & 1).view(-1).nonzero().view(-1).tolist()
        left = [token for token in bits if token not in grammars.ends]
        if not left or matcher.is_accepting():
            return str(tokenizer.decode(ids, skip_special=False))
        ending = [token for token in left if tokenizer.token_bytes(token)[:1] in (b"<", b'"', b"]", b"}")]
        ids.append(draw.choice(ending if ending and draw.random() < 0.3 else left))
        matcher.try_consume_tokens(ids[-1:])
    return None


@pytest.mark.parametrize("kind", KINDS, ids=json.dumps)
def test_what_is_written_is_what_the_schema_allows(kind: Any) -> None:
    tools, draw = tools_of(kind), random.Random(1)
    source = call_grammar(tools, "required", model()[0])
    texts = [text for _ in range(12) if (text := sampled(source, draw)) is not None]
    assert texts
    for text in texts:
        parser = MessageParser(thinking=False, tools=tools, tool_choice="required")
        deltas = parser.feed(text)
        rest, reason = parser.finish("stop")
        (call,) = message_of(deltas + rest)["tool_calls"]
        assert reason == "tool_calls"
        jsonschema.validate(json.loads(call["arguments"]), tools[0]["function"]["parameters"])


def test_every_value_can_be_written() -> None:
    draw = random.Random(2)
    for kind, wanted in (
        ({"enum": ["1", "b", None]}, {"1", "b", None}),
        ({"anyOf": [{"const": "x"}, {"type": "null"}]}, {"x", None}),
    ):
        source, found = call_grammar(tools_of(kind), "=f", model()[0]), set()
        for _ in range(40):
            parser = MessageParser(thinking=False, tools=tools_of(kind), tool_choice="required")
            text = sampled(source, draw)
            assert text is not None
            deltas = parser.feed(text) + parser.finish("stop")[0]
            found.add(json.loads(message_of(deltas)["tool_calls"][0]["arguments"])["s"])
        assert found == wanted


def test_parameters_that_are_a_reference() -> None:
    inner = {"type": "object", "properties": {"s": {"type": "string", "const": "7"}}, "required": ["s"]}
    tools = tools_of({})
    tools[0]["function"]["parameters"] = {"$ref": "#/$defs/All", "$defs": {"All": inner}}
    text = sampled(call_grammar(tools, "required", model()[0]), random.Random(0))
    parser = MessageParser(thinking=False, tools=tools, tool_choice="required")
    assert text is not None
    deltas = parser.feed(text) + parser.finish("stop")[0]
    assert json.loads(message_of(deltas)["tool_calls"][0]["arguments"]) == {"s": "7"}


@pytest.mark.parametrize("more", [{"minProperties": 1}, {"required": ["z"]}, {"anyOf": [{"required": ["s"]}]}], ids=str)
def test_parameters_that_no_call_is_made_of(more: dict[str, Any]) -> None:
    tools = tools_of({})
    tools[0]["function"]["parameters"] |= more
    with pytest.raises(RequestError, match="cannot be forced"):
        call_grammar(tools, "required", model()[0])


def test_a_value_that_cannot_be() -> None:
    tools = tools_of(False)
    with pytest.raises(RequestError, match="argument 's' of the tool 'f'"):
        call_grammar(tools, "required", model()[0])
    tools[0]["function"]["parameters"]["required"] = []
    text = sampled(call_grammar(tools, "required", model()[0]), random.Random(0))
    assert text is not None and text.strip() == "<tool_call>f\n</tool_call>"
