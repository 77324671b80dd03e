"""Grammars without an engine: what is refused, masks along drafts, ends, and places that nothing leads on from."""

from __future__ import annotations

import functools
import importlib
import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from soliton.checkpoint import open_checkpoint
from soliton.checkpoint.tokenizer import Tokenizer
from soliton.errors import RequestError, UnsupportedError
from soliton.sampling import grammar, penalties
from soliton.sampling.grammar import Grammars, Matcher
from soliton.sampling.params import SamplingParams

pytest.importorskip("llguidance")
VOCAB, ENDS = 4096, (1, 0)

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
ASKED: dict[str, dict[str, Any]] = {
    "schema": {"json_schema": SCHEMA},
    "object": {"json_object": True},
    "regex": {"regex": r"(yes|no|maybe)( [a-z]{2,5}){0,4}\."},
    "gbnf": {"ebnf": 'root ::= item ("," item)*\nitem ::= [a-z]+ "=" [0-9]+'},
    "lark": {"ebnf": "start: /[a-c]+/ (SEP /[0-9]{1,3}/)*\nSEP: /[;:]/"},
}


@functools.cache
def tokenizer() -> Tokenizer:
    found = open_checkpoint("pebble").tokenizer
    assert found is not None
    return found


@functools.cache
def grammars() -> Grammars:
    return Grammars("pebble", tokenizer().json(), VOCAB, ENDS)


def matcher(**asked: Any) -> Matcher:
    return grammars().matcher(SamplingParams(**asked).resolve(vocab=VOCAB, eos_ids=ENDS))


def masks(rows: int) -> Tensor:
    return torch.full((rows, grammar.words(VOCAB)), 0x55, dtype=torch.int32)


def tokens_of(mask: Tensor) -> list[int]:
    """The tokens that a mask leaves, by a way of its own."""
    bits = int.from_bytes(mask.numpy().tobytes(), "little")
    return [i for i in range(VOCAB) if bits >> i & 1]


def allowed(found: Matcher) -> list[int]:
    one = masks(1)
    found.fill([], one)
    return tokens_of(one[0])


def walked(found: Matcher, draw: random.Random, most: int) -> list[int]:
    """A random walk through what is allowed."""
    ids: list[int] = []
    while len(ids) < most:
        ids.append(draw.choice(allowed(found)))
        if found.advance(ids[-1:]) is not None:
            break
    return ids


class TestMasks:
    @pytest.mark.parametrize("name", ASKED)
    @pytest.mark.parametrize("seed", range(4))
    def test_rows_are_what_a_fresh_matcher_allows_after_the_drafts(self, name: str, seed: int) -> None:
        draw = random.Random(f"{name} {seed}")
        tried = matcher(**ASKED[name])
        done: list[int] = []
        for _ in range(6):
            path = walked(self.after(name, done), draw, 5)
            drafts = [draw.randrange(VOCAB) if draw.random() < 0.15 else token for token in path]
            rows = masks(len(drafts) + 1)
            tried.fill(drafts, rows)
            for row, drafted in enumerate([None, *drafts]):
                if drafted is not None and drafted not in (legal := tokens_of(rows[row - 1])):
                    assert legal
                    break  # that draft has probability 0: what lies behind it is not looked at
                if drafted in ENDS:
                    break
                assert tokens_of(rows[row]) == allowed(self.after(name, [*done, *drafts[:row]]))
            kept = path[: draw.randrange(1, len(path) + 1)]
            assert tried.advance(kept) == (len(kept) - 1 if kept[-1] in ENDS else None)
            done += kept
            if kept[-1] in ENDS:
                return

    def after(self, name: str, ids: Sequence[int]) -> Matcher:
        found = matcher(**ASKED[name])
        found.advance(ids)
        return found

    @pytest.mark.parametrize("name", ASKED)
    def test_end_tokens_come_all_or_none(self, name: str) -> None:
        ended = 0
        for seed in range(30):
            draw, found = random.Random(seed), matcher(**ASKED[name])
            for _ in range(60):
                legal = allowed(found)
                assert legal and len(set(ENDS) & set(legal)) in (0, len(ENDS))
                token = draw.choice([t for t in legal if t not in ENDS] or legal)
                if found.advance([token]) == 0:
                    ended += 1
                    break
        assert ended or name != "regex", "the others can go on for ever"

    def test_restrict_unpacks(self) -> None:
        torch.manual_seed(0)
        for vocab in (5, 32, 100, 4096):
            logits = torch.randn(3, vocab)
            packed = torch.randint(-(2**31), 2**31, (3, grammar.words(vocab)), dtype=torch.int32)
            out = penalties.restrict(logits, packed)
            for row in range(3):
                left = {t for t in range(vocab) if int(packed[row, t // 32]) >> t % 32 & 1}
                assert {t for t in range(vocab) if out[row, t] > float("-inf")} == left
                assert all(out[row, t] == logits[row, t] for t in left)

    def test_an_answers_text_is_what_was_asked(self) -> None:
        tight = SCHEMA | {"x-guidance": {"whitespace_flexible": False}}
        for seed in range(20):
            ids = walked(matcher(json_schema=tight), random.Random(seed), 2000)
            assert ids[-1] in ENDS
            found = json.loads(tokenizer().decode(ids[:-1]))
            assert {"name", "tags"} <= set(found) <= {"name", "age", "tags"}


class TestEnds:
    def ids(self, text: str) -> list[int]:
        return tokenizer().encode(text)

    def test_before_the_marker_anything_goes(self) -> None:
        found = matcher(regex="[ab]", grammar_after=7)
        rows = masks(4)
        found.fill([5, 7, 9], rows)
        assert [len(tokens_of(row)) for row in rows[:2]] == [VOCAB, VOCAB]
        assert sorted(tokenizer().decode([t]) for t in tokens_of(rows[2])) == ["a", "b"]
        assert found.advance([1, 7]) is None, "an end token before it is no end of the grammar"
        assert len(allowed(found)) == 2
        assert found.advance([*self.ids("a"), ENDS[1], 9]) == 1

    def test_min_tokens_gives_way_where_nothing_else_is_left(self) -> None:
        (a,), (b,) = self.ids("a"), self.ids("b")
        found = matcher(regex="a[bc]?", min_tokens=9)
        assert found.advance([a]) is None
        assert not set(allowed(found)) & set(ENDS)
        rows = masks(2)
        found.fill([b], rows)
        assert tokens_of(rows[1]) == sorted(ENDS)
        found = matcher(regex="a[bc]?", min_tokens=1)
        found.advance([a])
        assert set(ENDS) < set(allowed(found))

    def test_min_tokens_before_the_marker(self) -> None:
        found = matcher(regex="a", grammar_after=7, min_tokens=2, stop_token_ids=[40])
        rows = masks(3)
        found.fill([5, 6], rows)
        left = [set(range(VOCAB)) - set(tokens_of(row)) for row in rows]
        assert left == [{0, 1, 40}, {0, 1, 40}, set()]

    def test_ignored_ends_wait_for_the_grammars(self) -> None:
        found = matcher(regex="a{1,2}", ignore_eos=True)
        (a,) = self.ids("a")
        assert allowed(found) == [a]
        found.advance([a])
        assert allowed(found) == [a]
        found.advance([a])
        assert allowed(found) == sorted(ENDS) and found.advance([ENDS[0]]) == 0

    def test_an_end_too_early_or_a_token_that_is_not_allowed(self) -> None:
        for wrong in (ENDS[0], 3000):
            found = matcher(regex="ab{5}")
            with pytest.raises(RequestError, match="regex cannot be followed beyond token 1") as caught:
                found.advance([wrong])
            assert caught.value.param == "regex"

    def test_a_limit_of_the_library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """On the way that is taken it is an error; on one that drafts take it changes nothing."""
        library = importlib.import_module("llguidance")
        limits = library.LLParserLimits

        def few(**given: Any) -> Any:
            return limits(step_max_items=50, **given)

        monkeypatch.setattr(library, "LLParserLimits", few)
        made = Grammars("pebble", tokenizer().json(), VOCAB, ENDS)
        asked = SamplingParams(ebnf='root ::= root root | "a" | "b"').resolve(vocab=VOCAB, eos_ids=ENDS)
        found, (a,) = made.matcher(asked), self.ids("a")
        rows = masks(13)
        found.fill([a] * 12, rows)
        assert all(tokens_of(row) for row in rows)
        first = tokens_of(rows[0])
        assert allowed(found) == first
        with pytest.raises(RequestError, match="ebnf cannot be followed beyond token .*Too many items"):
            for _ in range(12):
                found.advance([a])
                found.fill([], rows)


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "two": ({"regex": "a", "json_object": True}, "regex", "json_object and regex are given"),
    "schema and rules": ({"json_schema": "{}", "ebnf": "x"}, "ebnf", "json_schema and ebnf are given"),
    "bad JSON": ({"json_schema": '{"type":'}, "json_schema", "json_schema is not valid JSON"),
    "no JSON": ({"json_schema": {"a": {1, 2}}}, "json_schema", "json_schema is not valid JSON"),
    "NaN": ({"json_schema": {"const": float("nan")}}, "json_schema", "json_schema is not valid JSON"),
    "a list": ({"json_schema": [1]}, "json_schema", "schema must be an object"),
    "unknown type": ({"json_schema": {"type": "strnig"}}, "json_schema", "Invalid type: strnig"),
    "not supported": ({"json_schema": {"not": {"type": "null"}}}, "json_schema", "Unimplemented keys"),
    "nothing satisfies": ({"json_schema": "false"}, "json_schema", "Unsatisfiable"),
    "a word": ({"json_object": "yes"}, "json_object", "must be true or false"),
    "open group": ({"regex": "a("}, "regex", "unclosed group"),
    "a number": ({"regex": 5}, "regex", "must be a string"),
    "nought": ({"regex": 0}, "regex", "must be a string"),
    "no rules": ({"ebnf": "hello"}, "ebnf", "cannot be followed"),
    "unknown rule": ({"ebnf": "start: a"}, "ebnf", "unknown name"),
    "a marker alone": ({"grammar_after": 5}, "grammar_after", "there is no grammar"),
    "a marker outside": ({"grammar_after": VOCAB, "regex": "a"}, "grammar_after", "outside the vocabulary"),
    "a marker in words": ({"grammar_after": "</think>", "regex": "a"}, "grammar_after", "whole number"),
    "a marker that ends": ({"grammar_after": 1, "regex": "a"}, "grammar_after", "which ends the answer"),
}


class TestRefusals:
    @pytest.mark.parametrize("name", REFUSED)
    def test_name_the_field_and_the_reason(self, name: str) -> None:
        asked, param, says = REFUSED[name]
        with pytest.raises(RequestError, match=says) as caught:
            matcher(**asked)
        assert caught.value.param == param and "\n" not in str(caught.value)

    def test_a_model_without_what_a_grammar_needs(self) -> None:
        params = SamplingParams(regex="a").resolve(vocab=VOCAB)
        for made, says in (
            (Grammars("m", None, VOCAB, ENDS), "regex needs a tokenizer and m has none"),
            (Grammars("m", tokenizer().json(), VOCAB, ()), "regex needs an end token and m has none"),
        ):
            with pytest.raises(RequestError, match=says):
                made.matcher(params)

    def test_without_the_library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def missing(name: str) -> Any:
            raise ImportError(name)

        monkeypatch.setattr(grammar.importlib, "import_module", missing)
        made = Grammars("pebble", tokenizer().json(), VOCAB, ENDS)
        with pytest.raises(UnsupportedError, match=r"pip install 'soliton\[grammar\]'"):
            made.matcher(SamplingParams(regex="a").resolve(vocab=VOCAB, eos_ids=ENDS))

    def test_a_tokenizer_that_cannot_be_read(self) -> None:
        made = Grammars("m", "{}", VOCAB, ENDS)
        with pytest.raises(UnsupportedError, match="cannot read the tokenizer of m"):
            made.matcher(SamplingParams(regex="a").resolve(vocab=VOCAB, eos_ids=ENDS))

    def test_an_object_and_its_text_are_one_grammar(self) -> None:
        schema = {"b": 1, "type": "object", "a": [True, None]}
        one, two = (SamplingParams(json_schema=s).resolve(vocab=VOCAB).grammar for s in (schema, json.dumps(schema)))
        assert one == two and SamplingParams().resolve(vocab=VOCAB).grammar is None

    def test_is_compiled_once(self) -> None:
        made = Grammars("pebble", tokenizer().json(), VOCAB, ENDS)
        for _ in range(3):
            made.matcher(SamplingParams(regex="a").resolve(vocab=VOCAB, eos_ids=ENDS))
        assert made.compiled.cache_info().misses == 1
