"""Generated text to messages: the protocol's cases, every way of cutting a stream, and where each character goes."""

from __future__ import annotations

import itertools
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soliton.errors import RequestError
from soliton.server.arguments import HELD, json_of, kinds_of
from soliton.server.parsers import (
    CallArguments,
    CallStart,
    ContentText,
    Delta,
    MessageParser,
    ReasoningText,
    message_of,
)

FILE = Path(__file__).parents[1] / "data" / "protocol" / "parsers.jsonl"
CASES = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}


NOTE = tool("note", body={"type": "string"}, stars={"type": "integer"}, label={"type": ["string", "null"]}, extra={})
TOOLS = [NOTE, tool("list"), {"type": "function", "function": {"name": "list.all"}}]


def read(pieces: Iterable[str], raw_finish: str = "stop", **request: Any) -> dict[str, Any]:
    """The whole message, its finish_reason beside it."""
    parser = MessageParser(**request)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    rest, reason = parser.finish(raw_finish)
    return {**message_of(deltas + rest), "finish_reason": reason}


def cut(text: str, places: Iterable[int]) -> list[str]:
    ends = [0, *sorted(places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(ends)]


def cuts(text: str, seed: int = 0, count: int = 20) -> Iterable[list[str]]:
    """By character, at every single place, and at random places."""
    yield list(text)
    for place in range(len(text) + 1):
        yield cut(text, [place])
    draw = random.Random(seed)
    for _ in range(count):
        yield cut(text, [draw.randint(0, len(text)) for _ in range(draw.randint(2, 12))])


def arguments_of(text: str) -> Any:
    """An unfinished text of arguments can only be open inside a string."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return json.loads(text + '"}')


def same(a: Any, b: Any) -> bool:
    """Numbers by value, booleans with booleans only."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


class TestCases:
    def test_all_are_there(self) -> None:
        assert len(CASES) == 62

    @pytest.mark.parametrize("case", [pytest.param(case, id=case["id"]) for case in CASES])
    def test_the_expected_answer_for_every_cut(self, case: dict[str, Any]) -> None:
        """The contested cases too: none of them needs one of the other acceptable answers."""
        text, finish = case["text"], case["raw_finish"]
        request = {key: case[key] for key in ("thinking", "tools", "tool_choice")}
        whole = read([text], finish, **request)
        got = {
            "reasoning_content": whole["reasoning_content"].strip(),
            "content": whole["content"].strip(),
            "tool_calls": [
                {"name": call["name"], "arguments": json.loads(call["arguments"])} for call in whole["tool_calls"]
            ],
            "finish_reason": whole["finish_reason"],
        }
        assert same(got, case["expected"]), got
        for pieces in cuts(text):
            assert read(pieces, finish, **request) == whole


# -- where each character goes -----------------------------------------------------------------------------------------
# A second reading, of the whole text and with other means: it cuts the text into parts without gaps, and says of each
# what becomes of it. Lost is what neither stands in the message nor is one of these:
#   tag         an understood tag,
#   space       white space inside a call, between its parts or around a name or a key,
#   valueless   a key that no value follows,
#   unfinished  inside a call that the output's end cuts: the last tag, key or value.

Part = tuple[str, str]
LOST = ("tag", "space", "valueless", "unfinished")
INNER = ("<arg_key>", "<arg_value>", "</tool_call>", "<tool_call>")
OUTER = re.compile(r"\s*([^\s<]+)(\s*)(?=<arg_key>|</tool_call>|<tool_call>)")
AT_END = re.compile(r"\s*([^\s<]+)(\s+|(?=<))(<[a-z_/]*)?\Z")
KEY = re.compile(r"<arg_key>((?:(?!<arg_key>|</arg_key>|<arg_value>|</tool_call>|<tool_call>).)*)(</arg_key>)?", re.S)
VALUE = re.compile(r"<arg_value>(.*?)(</arg_value>|\Z)", re.S)
STRAY = re.compile(r"(?:(?!<arg_key>|<arg_value>|</tool_call>|<tool_call>).)+", re.S)
STRINGS = ("body", "label")  # of note


def unfinished(text: str, tags: Sequence[str]) -> int:
    """Where the beginning of a tag at the end of the text lies; its length if there is none."""
    place = text.rfind("<")
    return place if place >= 0 and any(tag.startswith(text[place:]) for tag in tags) else len(text)


def parts_of(text: str, *, thinking: bool, calling: bool) -> list[Part]:
    parts: list[Part] = []
    at = 0
    if thinking:
        if found := re.match(r"(\s*)<think>", text):
            parts += [("reasoning", found[1]), ("tag", "<think>")]
            at = found.end()
        end = re.compile("</think>|<tool_call>" if calling else "</think>").search(text, at)
        parts.append(("reasoning", text[at : end.start() if end else len(text)]))
        at = end.start() if end else len(text)
        if end and end[0] == "</think>":
            parts.append(("tag", end[0]))
            at = end.end()
    while at < len(text):
        opened = text.find("<tool_call>", at) if calling else -1
        if opened < 0:
            return [*parts, ("content", text[at:])]
        parts.append(("content", text[at:opened]))
        at = opened + len("<tool_call>")
        if call := call_of(text, at):
            parts += call
            at += sum(len(part) for _, part in call)
        else:
            parts.append(("content", "<tool_call>"))
    return parts


def call_of(text: str, at: int) -> list[Part] | None:
    """The parts of the call whose opening tag ends at a place; its own tag comes as the first, of no width."""
    if found := OUTER.match(text, at):
        if not (re.fullmatch(r"\w[\w.:/-]*", found[1]) and len(found[1]) <= 256):
            return None
        return named(found, [*body_of(text, found.end())])
    found = AT_END.match(text, at)
    known = found and found[1] in ("note", "list", "list.all")
    if not found or not known or (found[3] and not any(tag.startswith(found[3]) for tag in INNER if "val" not in tag)):
        return None
    return named(found, [("unfinished", found[3] or "")])


def named(found: re.Match[str], rest: list[Part]) -> list[Part]:
    before = found[0][: found.start(1) - found.start()]
    return [("call", ""), ("space", before), ("name", found[1]), ("space", found[2]), *rest]


def body_of(text: str, at: int) -> Iterable[Part]:
    key: str | None = None
    while at < len(text):
        if text.startswith("<tool_call>", at):
            break
        if text.startswith("</tool_call>", at):
            if key is not None:
                yield "valueless", ""
            yield "tag", "</tool_call>"
            return
        if found := KEY.match(text, at):
            at = found.end()
            if at == len(text) and not found[2]:
                yield "unfinished", found[0]
                return
            key = found[1].strip()
            yield "tag", "<arg_key>"
            yield ("key" if valued(text, at) else "valueless"), found[1]
            yield "tag", found[2] or ""
            if not valued(text, at):
                key = None
        elif found := VALUE.match(text, at):
            at, kept = found.end(), found[1]
            if not found[2]:
                kept = found[1][: unfinished(found[1], ["</arg_value>"])]
            if key is None:
                yield "content", found[0]
            elif found[2]:
                yield from (("tag", "<arg_value>"), ("value", found[1]), ("tag", found[2]))
            elif key in STRINGS and len(kept) > HELD:
                yield from (("tag", "<arg_value>"), ("open value", kept), ("unfinished", found[1][len(kept) :]))
            else:
                yield "unfinished", found[0]
            key = None
        else:
            found = STRAY.match(text, at)
            assert found is not None
            at, stray = found.end(), found[0]
            end = unfinished(stray, INNER) if at == len(text) else len(stray)
            space = len(stray[:end]) - len(stray[:end].lstrip())
            yield from (("space", stray[:space]), ("content", stray[space:end]), ("unfinished", stray[end:]))


def valued(text: str, at: int) -> bool:
    """Whether a value that ends follows a key before another part does, or one that was sent before the end came."""
    found = re.compile(r"(?:(?!<arg_key>|</tool_call>|<tool_call>|<arg_value>).)*<arg_value>", re.S).match(text, at)
    return found is not None


def meant(key: str, value: str) -> Any:
    if key == "body" or (key == "label" and value.strip(" \t\r\n") != "null"):
        return value
    try:
        got = json.loads(value, parse_constant={}.__getitem__)  # NaN is no JSON
    except (ValueError, KeyError):
        return value
    return value if isinstance(got, str) and key not in ("stars", "extra") else got


def told(parts: list[Part]) -> dict[str, Any]:
    """The message that the parts make."""
    message: dict[str, Any] = {"reasoning_content": "", "content": "", "tool_calls": []}
    calls, key, offered = message["tool_calls"], "", False
    for what, part in parts:
        if what == "reasoning":
            message["reasoning_content"] += part
        elif what == "content":
            message["content"] += part
        elif what == "name":
            calls.append({"name": part, "arguments": {}})
            offered = part == "note"
        elif what == "key":
            key = part.strip()
        elif what in ("value", "open value"):
            calls[-1]["arguments"][key] = meant(key if offered else "", part)
    return message


PIECES = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<", ">", "</", "<t", "<tool", "<tool_call", "call>", "</tool_", "<arg_", "<arg_value", "</arg_valu", "</think"),
    *("note", "list", "lis", "list.all", "Note", "note 2", "no/t.e-7:x", "{", '{"name": "list"}', "body", "stars"),
    *(" ", "\n", "\r\n", "\t", "  ", "\u00a0", "null", "true", "3", "-1.50", '"q"', '"', "\\", "[1, ", "{}", "NaN"),
    *("潮", "🏴‍☠️", "é", "‮", "\u2028", "\x00", "x" * (HELD - 1), "y" * (HELD + 1), "words and words"),
]
DEEPER = [
    *("<tool_call>note\n", "<tool_call>list</tool_call>", "<arg_key>body</arg_key>\n", "<arg_key>stars</arg_key>"),
    *("<tool_call>note<arg_key>body</arg_key><arg_value>", "<arg_key>label</arg_key><arg_value>null</arg_value>"),
    *("<arg_key>more</arg_key><arg_value>", "<arg_key>extra</arg_key><arg_value>", "</arg_value></tool_call>"),
]
BODY = [
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "</tool_call>",
    "stars",
    "more",
    " ",
    "\n",
    "1",
    "<a",
    "lost",
]
LOOSE = st.lists(st.sampled_from(DEEPER) | st.sampled_from(PIECES) | st.text(max_size=3), max_size=14)
INSIDE = st.lists(st.sampled_from(BODY), max_size=14).map(lambda pieces: ["<tool_call>note", *pieces])
TEXTS = (LOOSE | INSIDE).map("".join)


class TestEveryCharacter:
    @settings(max_examples=400)
    @given(
        text=TEXTS,
        thinking=st.booleans(),
        calling=st.booleans(),
        finish=st.sampled_from(["stop", "length", "abort"]),
        seed=st.integers(0, 1 << 30),
    )
    def test_nothing_is_lost_and_cuts_do_not_matter(
        self, text: str, thinking: bool, calling: bool, finish: str, seed: int
    ) -> None:
        request = {"thinking": thinking, "tools": TOOLS, "tool_choice": "auto" if calling else "none"}
        parts = parts_of(text, thinking=thinking, calling=calling)
        # every tag of a call that was opened is understood; parts_of gives it no width
        assert "".join("<tool_call>" * (what == "call") + part for what, part in parts) == text
        assert all(part.isspace() for what, part in parts if what == "space" and part)
        whole = read([text], finish, **request)
        calls = [
            {"name": call["name"], "arguments": arguments_of(call["arguments"])} for call in whole.pop("tool_calls")
        ]
        reason = whole.pop("finish_reason")
        assert same({**whole, "tool_calls": calls}, told(parts))
        assert reason == ("tool_calls" if calls and finish == "stop" else finish)
        whole = read([text], finish, **request)
        if finish == "stop":
            assert all(isinstance(json.loads(call["arguments"]), dict) for call in whole["tool_calls"])
        for pieces in cuts(text, seed, count=5):
            assert read(pieces, finish, **request) == whole

    @given(text=TEXTS, thinking=st.booleans())
    def test_without_calls_and_reasoning_all_is_content(self, text: str, thinking: bool) -> None:
        for request in ({"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
            got = read(list(text), thinking=thinking, separate_reasoning=False, **request)
            assert got == {"reasoning_content": "", "content": text, "tool_calls": [], "finish_reason": "stop"}

    def test_reasoning_left_in_the_content_keeps_its_tags(self) -> None:
        text = "<think>so</think>Well: <tool_call>list</tool_call>"
        got = read(text, thinking=True, tools=TOOLS, separate_reasoning=False)
        assert (got["reasoning_content"], got["content"]) == ("", "<think>so</think>Well: ")
        assert got["tool_calls"] == [{"name": "list", "arguments": "{}"}]


def streamed(text: str, **request: Any) -> list[list[Delta]]:
    """What every character lets out."""
    parser = MessageParser(**{"thinking": False, "tools": TOOLS, **request})
    return [parser.feed(letter) for letter in text]


class TestWhen:
    def test_text_goes_out_at_once_and_a_possible_tag_when_it_is_none(self) -> None:
        assert streamed("a <b") == [[ContentText("a")], [ContentText(" ")], [], [ContentText("<b")]]
        assert streamed("<tool_c.")[-1] == [ContentText("<tool_c.")]
        assert streamed("a</t.", thinking=True) == [[ReasoningText("a")], [], [], [], [ReasoningText("</t.")]]
        assert streamed(" <th", thinking=True) == [[ReasoningText(" ")], [], [], []]
        assert streamed("<tool", tool_choice="none") == [[ContentText(letter)] for letter in "<tool"]

    def test_another_grammar_goes_out_at_its_first_letter(self) -> None:
        assert streamed("<tool_call>{")[-1] == [ContentText("<tool_call>{")]
        assert streamed("<tool_call>list them")[-4] == [ContentText("<tool_call>list t")]

    def test_a_call_begins_with_the_tag_behind_its_name(self) -> None:
        letters = streamed("<tool_call>note\n<arg_key>")
        assert letters[-1] == [CallStart(0, "note")] and not any(letters[:-1])
        assert streamed("<tool_call>list</tool_call>")[-1] == [CallStart(0, "list"), CallArguments(0, "{}")]

    def test_values_come_whole_but_long_strings_stream(self) -> None:
        opening = "<tool_call>note<arg_key>stars</arg_key><arg_value>"
        letters = streamed(opening + "9" * 200 + "</arg_value>")
        assert letters[-1] == [CallArguments(0, '{"stars": ' + "9" * 200)] and not any(letters[len(opening) : -1])
        opening = opening.replace("stars", "body")
        letters = streamed(opening + '"' * (HELD + 2) + "</arg_value></tool_call>")[len(opening) :]
        assert not any(letters[:HELD])
        assert letters[HELD] == [CallArguments(0, '{"body": "' + '\\"' * (HELD + 1))]
        assert letters[HELD + 1] == [CallArguments(0, '\\"')]
        assert [delta for letter in letters[HELD + 2 :] for delta in letter] == [
            CallArguments(0, '"'),
            CallArguments(0, "}"),
        ]

    def test_neighbours_come_as_one(self) -> None:
        parser = MessageParser(thinking=True, tools=TOOLS)
        text = "a<b</think><tool_call>{<tool_call>note<arg_key>stars</arg_key><arg_value>1</arg_value></tool_call>"
        assert parser.feed(text) == [
            ReasoningText("a<b"),
            ContentText("<tool_call>{"),
            CallStart(0, "note"),
            CallArguments(0, '{"stars": 1}'),
        ]
        assert parser.finish("stop") == ([], "tool_calls")

    def test_the_end_closes_a_string_only_where_generation_stopped_by_itself(self) -> None:
        text = "<tool_call>note<arg_key>body</arg_key><arg_value>" + "z" * 99 + "</arg_v"
        for finish, end in (("stop", '"}'), ("length", ""), ("abort", "")):
            got = read([text], finish, thinking=False, tools=TOOLS)
            assert got["tool_calls"] == [{"name": "note", "arguments": '{"body": "' + "z" * 99 + end}]

    @pytest.mark.parametrize(
        "text",
        [
            "plain words, and then some " * 4000,
            "<" * 100_000,
            "</thin" * 17_000,
            " " * 100_000,
            "</think>" + "<tool_call>x " * 8000,
            "</think><tool_call>" + " " * 100_000,
            "</think><tool_call>" + "x" * 100_000,
            "</think><tool_call>list" + "\n" * 100_000,
            "<tool_call>note<arg_key>body</arg_key><arg_value>" + '"<' * 50_000 + "</arg_value></tool_call>",
            "<tool_call>note<arg_key>extra</arg_key><arg_value>[" + "1, " * 33_000 + "1]</arg_value></tool_call>",
            "<tool_call>note<arg_key>" + "k " * 50_000 + "</arg_key><arg_value>1</arg_value>",
            "<tool_call>note" + "<arg_key>stars</arg_key><arg_value>1</arg_value>" * 2000,
            "<tool_call>note<arg_key></arg_key>" + " stray" * 16_000,
            "<tool_call>list</tool_call>" * 4000,
        ],
        ids=lambda text: text[:30],
    )
    def test_time_is_linear(self, text: str) -> None:
        """By character and whole. Looking again at all of 100,000 characters for each would take minutes."""
        started = time.process_time()
        got = read(text, thinking=True, tools=TOOLS)
        assert got == read([text], thinking=True, tools=TOOLS)
        assert time.process_time() - started < 3


class TestValues:
    SCHEMA: Any = {  # noqa: RUF012
        "properties": {
            "text": {"type": "string"},
            "word": {"enum": ["1", "fast"]},
            "fixed": {"const": "true"},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "old": {"type": "string", "nullable": True},
            "count": {"type": "integer"},
            "some": {"type": ["string", "integer"]},
            "mixed": {"enum": ["1", 1]},
            "mode": {"$ref": "#/$defs/a~1b"},
            "both": {"allOf": [{"$ref": "#/$defs/a~1b"}, {"description": "of a mode"}]},
            "round": {"$ref": "#/$defs/round"},
            "gone": {"$ref": "#/$defs/gone"},
            "away": {"$ref": "https://example.org/schema"},
            "odd": {"type": "text"},
            "any": True,
        },
        "$defs": {
            "a/b": {"type": "string", "enum": ["1", "true"]},
            "round": {"anyOf": [{"$ref": "#/$defs/round"}, {"type": "string"}]},
        },
    }

    @pytest.mark.parametrize(
        ("key", "value", "meaning"),
        [
            *((key, "1", "1") for key in ("text", "word", "fixed", "maybe", "old", "mode", "both")),
            *((key, "1", 1) for key in ("count", "some", "mixed", "round", "gone", "away", "odd", "any", "unknown")),
            *((key, "null", "null") for key in ("text", "word", "mode")),
            *((key, "null", None) for key in ("maybe", "old", "count", "some", "unknown")),
            ("maybe", " null\n", None),
            ("maybe", " null" + " " * HELD, " null" + " " * HELD),
            ("some", "words", "words"),
            ("some", '"words"', "words"),
            ("unknown", '"words"', '"words"'),
            ("text", " raw\n", " raw\n"),
            ("count", " 5\n", 5),
            ("count", "5 apples", "5 apples"),
            ("count", "", ""),
            ("count", "NaN", "NaN"),
            ("count", "-Infinity", "-Infinity"),
            ("count", "True", "True"),
            ("count", "9" * 5000, "9" * 5000),  # more digits than Python reads
            ("any", "[" * 100_000, "[" * 100_000),
            ("any", "[" * 100_000 + "]" * 100_000, "[" * 100_000 + "]" * 100_000),
        ],
        ids=lambda value: str(value)[:20],
    )
    def test_by_schema(self, key: str, value: str, meaning: Any) -> None:
        got = json.loads(json_of(value, kinds_of(self.SCHEMA, key)))
        assert same(got, meaning), got

    def test_what_is_json_stays_as_written(self) -> None:
        for value in ("0.10000000000000000000001", "1E+2", '{"b":1,  "a": [ ]}', "12345678901234567890"):
            assert json_of(f" {value}\n", kinds_of(self.SCHEMA, "any")) == value

    def test_a_schema_for_all_other_arguments(self) -> None:
        assert kinds_of({"additionalProperties": {"type": "string"}}, "x") == {"string"}
        assert kinds_of({"additionalProperties": True}, "x") is None is kinds_of(None, "x")

    def test_schemas_that_never_end(self) -> None:
        deep: Any = {"type": "string"}
        for _ in range(500):
            deep = {"anyOf": [deep]}
        wide = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{j}"} for j in range(40)]} for i in range(40)}
        started = time.process_time()
        for schema in (deep, {"$ref": "#/$defs/d0"}):
            assert kinds_of({"properties": {"x": schema}, "$defs": wide}, "x")
        assert time.process_time() - started < 1

    def test_duplicate_keys(self) -> None:
        one = "<arg_key>stars</arg_key><arg_value>{}</arg_value>"
        text = "<tool_call>note" + one.format(1) + one.format(2) + "</tool_call>"
        (call,) = read([text], thinking=False, tools=TOOLS)["tool_calls"]
        assert json.loads(call["arguments"]) == {"stars": 2}


class TestCalls:
    @pytest.mark.parametrize(
        ("text", "content", "names"),
        [
            ("<tool_call>list<tool_call>list.all</tool_call>", "", ["list", "list.all"]),
            ("<tool_call><tool_call>list</tool_call>", "<tool_call>", ["list"]),
            ("<tool_call>list", "<tool_call>list", []),
            ("<tool_call>list\n", "", ["list"]),
            ("<tool_call>list</tool", "", ["list"]),
            ("<tool_call>lost\n<arg_k", "<tool_call>lost\n<arg_k", []),
            ("<tool_call>list {}</tool_call>", "<tool_call>list {}</tool_call>", []),
            ("<tool_call>list<b></tool_call>", "<tool_call>list<b></tool_call>", []),
            ("<tool_call>...</tool_call>", "<tool_call>...</tool_call>", []),
            ("<tool_call>" + "n" * 257 + "</tool_call>", "<tool_call>" + "n" * 257 + "</tool_call>", []),
            ("<tool_call>list\n<arg_key>a</arg_key>lost?</tool_call>!", "lost?!", ["list"]),
            ("<tool_call>list<arg_key>a<arg_value>1</arg_value></tool_call>", "", ["list"]),
        ],
    )
    def test_what_is_one(self, text: str, content: str, names: list[str]) -> None:
        got = read([text], thinking=False, tools=TOOLS)
        assert got["content"] == content and [call["name"] for call in got["tool_calls"]] == names

    @pytest.mark.parametrize(
        ("body", "content", "arguments"),
        [
            ("<arg_key> stars\n</arg_key>\n<arg_value>1</arg_value>", "", {"stars": 1}),
            ("<arg_key>body</arg_key> a  b <arg_value>1</arg_value>", "a  b ", {"body": "1"}),
            ("<arg_key>body</arg_key>a<arg_key>stars</arg_key> <arg_value>1</arg_value> b", "ab", {"stars": 1}),
            ("<arg_key>body</arg_key><arg_key></tool_call><arg_value>1", "<arg_value>1", {}),
            (
                "<arg_key>body</arg_key><arg_value>1</arg_value><arg_value>2 <tool_call></arg_value> ",
                "<arg_value>2 <tool_call></arg_value>",
                {"body": "1"},
            ),
            ("<arg_key>body</arg_key><arg_value>1</arg_value><arg_value>2</arg", "<arg_value>2</arg", {"body": "1"}),
            ("<arg_key>body</arg_key><arg_key><arg_value>1</arg_value>", "", {"": 1}),
            ("<arg_key>body</arg_key><arg_key>stars", "", {}),
            ("<arg_key>body</arg_key><arg_value>1</arg_val", "", {}),
            ("<arg_key>body</arg_key><arg_key>stars<arg_key>more</arg_key><arg_value>1</arg_value>", "", {"more": 1}),
        ],
    )
    def test_what_is_an_argument(self, body: str, content: str, arguments: dict[str, Any]) -> None:
        got = read([f"<tool_call>note{body}"], thinking=False, tools=TOOLS)
        (call,) = got["tool_calls"]
        assert got["content"] == content and same(json.loads(call["arguments"]), arguments)

    def test_a_long_string_does_not_hurry_the_next(self) -> None:
        pair = "<arg_key>body</arg_key><arg_value>"
        text = "<tool_call>note" + pair + "x" * 99 + "</arg_value>" + pair + "cut"
        (call,) = read(text, "length", thinking=False, tools=TOOLS)["tool_calls"]
        assert json.loads(call["arguments"]) == {"body": "x" * 99}

    def test_an_offered_name_may_be_odd(self) -> None:
        name = "é?" + "x" * 300
        for text in (f"<tool_call>{name}\n</tool_call>", f"<tool_call>{name[:-1]}</tool_call>"):
            got = read(text, thinking=False, tools=[tool(name)])
            assert bool(got["tool_calls"]) == (name in text) and bool(got["content"]) == (name not in text)


class TestRequests:
    @pytest.mark.parametrize(
        ("request_", "param", "words"),
        [
            ({"tools": ["list"]}, "tools[0].function", "object"),
            ({"tools": [NOTE, {"function": {}}]}, "tools[1].function.name", "name"),
            ({"tools": [{"function": {"name": "f", "parameters": 1}}]}, "tools[0].function.parameters", "Schema"),
            ({"tools": TOOLS, "tool_choice": "all"}, "tool_choice", "'all'"),
            ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice", "give"),
            ({"tools": TOOLS, "tool_choice": {"function": {"name": "lists"}}}, "tool_choice", "'list'"),
            ({"tool_choice": "required"}, "tool_choice", "give tools"),
        ],
    )
    def test_refused(self, request_: dict[str, Any], param: str, words: str) -> None:
        with pytest.raises(RequestError, match=re.escape(words)) as caught:
            MessageParser(thinking=True, **request_)
        assert caught.value.param == param

    @pytest.mark.parametrize("choice", [None, "auto", "required", {"type": "function", "function": {"name": "list"}}])
    def test_choices_that_look_for_calls(self, choice: Any) -> None:
        got = read(["<tool_call>list</tool_call>"], thinking=False, tools=TOOLS, tool_choice=choice)
        assert got["finish_reason"] == "tool_calls"

    def test_needs_neither_torch_nor_a_server(self) -> None:
        code = "import sys, soliton.server.parsers; print({'torch', 'aiohttp'} & set(sys.modules))"
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert ran.stdout.strip() == "set()"
