"""Grammars in whole engines: answers are what was asked, drafts change neither greedy bytes nor the law, and nothing is
left behind for the next request."""

from __future__ import annotations

import functools
import json
import random
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import draft_cases as d
import helpers as h
from helpers import threads_as_before  # noqa: F401 - takes effect by being here
from law_cases import CASES, PASS, PROMPT, REJECT, Spy, confined, judged, walk
from soliton import Engine, Generation, RequestError, SamplingParams, UnsupportedError
from soliton.sampling import penalties
from soliton.sampling.grammar import Matcher

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

_TEMPORARY = tempfile.TemporaryDirectory(prefix="soliton-grammars-")
TIGHT = {"x-guidance": {"whitespace_flexible": False}}


# -- engines ----------------------------------------------------------------------------------------------------------


@functools.cache
def lettered() -> Path:
    """nano with the characters of JSON in its vocabulary."""
    path = Path(_TEMPORARY.name) / "lettered"
    shutil.copytree(h.nano("fair"), path)
    file = path / "tokenizer.json"
    body = json.loads(file.read_text(encoding="utf-8"))
    tokens = [*'{}[]":,.-+\\', "Ġ", "Ċ", '":', '","', ',"', "true", "false", "null", "en", "re", "Ġth", *"0123456789"]
    tokens += "abcdefghijklmnopqrstuvwxyz"
    body["model"]["vocab"] = {token: i for i, token in enumerate((tokens + [f"x{i}" for i in range(62)])[: h.NANO_EOS])}
    file.write_text(json.dumps(body), encoding="utf-8")
    return path


WAYS: dict[str, dict[str, Any]] = {
    "plain": {"speculation": "off"},
    "nextn 1": {"speculation": "nextn", "speculative_num_steps": 1},
    "nextn 3": {"speculation": "nextn", "speculative_num_steps": 3},
    "nextn 5": {"speculation": "nextn", "speculative_num_steps": 5, "run_ahead": 2},
    "dspark": {"speculation": "dspark"},
    "dspark, few rows": {"speculation": "dspark", "draft_verify": "fixed", "draft_verify_tokens": 2, "run_ahead": 4},
}

NEXTN, DSPARK = ([way for way in WAYS if way.startswith(drafter)] for drafter in ("nextn", "dspark"))


def engine(name: str, way: str) -> Engine:
    settings = dict(WAYS[way])
    if name == "pebble":
        return h.engine("pebble", max_context=512, **settings)
    model = lettered() if name == "lettered" else h.nano("fair")
    if "dspark" in way:
        settings["draft"] = str(d.bigram_draft())
    return h.engine(model, max_context=512, **settings)


def ids_of(tried: Engine, answer: Generation) -> list[int]:
    """The answer's tokens without the one that ended it."""
    return [t for t in answer.token_ids if t not in tried.checkpoint.eos_ids]


def same_as_fresh(tried: Engine, name: str, way: str) -> None:
    """Answers without a grammar are those of an engine that never had one."""
    fresh = _untouched(name, way)
    for values in ({"temperature": 0.0, "logprobs": 2}, {"temperature": 0.9, "seed": 5, "presence_penalty": 0.3}):
        params = SamplingParams(max_tokens=24, ignore_eos=True, **values)
        assert h.facts(tried.generate(PROMPT, params)) == h.facts(fresh.generate(PROMPT, params))


@functools.cache
def _untouched(name: str, way: str) -> Engine:
    model: Any = "pebble" if name == "pebble" else lettered() if name == "lettered" else h.nano("fair")
    draft = {"draft": str(d.bigram_draft())} if "dspark" in way and name != "pebble" else {}
    return h.load(model, max_context=512, **WAYS[way], **draft)


# -- JSON schemas -----------------------------------------------------------------------------------------------------


def schema_of(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """A random schema out of what llguidance supports."""
    leaves = ["string", "integer", "number", "boolean", "enum", "const", "pattern", "null"]
    kind = draw.choice(["object"] * (4 if depth == 0 else 1) + ["array", "any"] + leaves * (depth + 1))
    if depth > 2 and kind in ("object", "array", "any"):
        kind = "boolean"
    if kind == "object":
        names = draw.sample(["a", "id", "name", "on", "size", "tags"], draw.randint(1, 3))
        required = draw.sample(names, draw.randint(1, len(names)))
        inner = {name: schema_of(draw, depth + 1) for name in names}
        return {"type": "object", "properties": inner, "required": required, "additionalProperties": False}
    if kind == "array":
        low = draw.randint(0, 1)
        return {"type": "array", "items": schema_of(draw, depth + 1), "minItems": low, "maxItems": draw.randint(1, 3)}
    if kind == "any":
        return {"anyOf": [schema_of(draw, depth + 1) for _ in range(draw.randint(2, 3))]}
    low = draw.randint(-20, 50)
    return {
        "string": {"type": "string", "minLength": draw.randint(0, 2), "maxLength": draw.randint(3, 8)},
        "integer": {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 90)},
        "number": {"type": "number", "minimum": low, "exclusiveMaximum": low + 3},
        "boolean": {"type": "boolean"},
        "null": {"type": "null"},
        "enum": {"enum": draw.sample(["red", "re", "den", 7, None, True, 2.5], draw.randint(1, 4))},
        "const": {"const": draw.choice(["x", 3, False, {"a": [1]}])},
        "pattern": {"type": "string", "pattern": draw.choice(["^[a-f]{2,4}$", "^(en|re)*d$", "^[0-9a-f]{1,3}-[0-9]$"])},
    }[kind]


SCHEMAS = [pytest.param(i, marks=() if i < 60 else pytest.mark.full) for i in range(200)]


@pytest.mark.parametrize("number", SCHEMAS)
def test_json_schemas(number: int) -> None:
    """Finished answers validate, others can be gone on with; greedy bytes are the same however they are drafted."""
    draw = random.Random(number)
    schema = schema_of(draw) | (TIGHT if number % 4 else {})
    name = "pebble" if number % 3 == 0 else "lettered"
    asked: Any = json.dumps(schema) if number % 2 else schema
    greedy: list[Any] = []
    for way in ("plain", draw.choice(NEXTN), draw.choice(DSPARK)) if number % 6 else WAYS:
        tried = engine(name, way)
        seed = draw.randrange(2**32)
        for values in ({"temperature": 0.0}, {"temperature": draw.choice([0.7, 1.0, 1.5]), "seed": seed}):
            answer = tried.generate(PROMPT, SamplingParams(max_tokens=60, json_schema=asked, **values))
            check(tried, answer, schema)
            if not values["temperature"]:
                greedy.append(h.facts(answer))
    assert all(one == greedy[0] for one in greedy)


ENDED = {"stop": 0, "length": 0}


def check(tried: Engine, answer: Generation, schema: dict[str, Any]) -> None:
    ENDED[answer.finish_reason] += 1
    assert answer.stats.grammar == "json_schema" and answer.stats.run_ahead_depth == 0
    ends = tried.checkpoint.eos_ids
    if answer.finish_reason == "stop":
        assert answer.token_ids[-1] in ends and not set(answer.token_ids[:-1]) & set(ends)
        jsonschema.validate(json.loads(answer.text), schema)
    else:
        assert answer.finish_reason == "length" and not set(answer.token_ids) & set(ends)
    fresh = matcher_of(tried, json_schema=schema)
    fresh.advance(answer.token_ids)  # or it raises
    assert answer.text == tried.checkpoint.tokenizer.decode(ids_of(tried, answer))  # type: ignore[union-attr]


def matcher_of(tried: Engine, **asked: Any) -> Matcher:
    runtime = tried._ready()
    params = SamplingParams(**asked).resolve(vocab=runtime.checkpoint.spec.vocab, eos_ids=runtime.checkpoint.eos_ids)
    found = runtime.matcher(params)
    assert found is not None
    return found


def test_enough_of_them_came_to_an_end() -> None:
    if sum(ENDED.values()) < 100:
        pytest.skip("the schemas were not run in this process")
    assert ENDED["stop"] > ENDED["length"]


# -- the same greedy bytes --------------------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "regex": {"regex": r"([a-m]+[0-9][ ,.])*"},
    "rules": {"ebnf": 'root ::= item (sep item)*\nitem ::= [a-z]+ "." [0-9]+\nsep ::= [,;] " "?'},
    "lark": {"ebnf": "start: word+\nword: /[a-z]{2,7}/ / |,/"},
    "object": {"json_object": True},
    "with processors": {
        "regex": r"([a-m]+[0-9][ ,.])*", "repetition_penalty": 1.4, "presence_penalty": 0.5, "min_tokens": 30,
        "logit_bias": {0: 4.0, 60: 8.0}, "logprobs": 3,
    },
    "to an end": {"regex": r"[a-m]{1,9}[0-9]{2}", "logprobs": 1},
    "behind a marker": {"regex": r"[a-m]{1,9}[0-9]{2}", "grammar_after": 12},
    "stop strings": {"regex": r"([a-m]+[0-9][ ,.])*", "stop": ["a", "4 ", "b2"]},
    "past the end": {"regex": r"([a-m]{3}[0-9][ ,.]){4}", "ignore_eos": True},
}  # fmt: skip
NO_BRACES = ("nano", "object")


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name in ("nano", "lettered") for kind in KINDS if (name, kind) != NO_BRACES]
)
def test_greedy_bytes_are_plains(name: str, kind: str) -> None:
    params = h.greedy(36, **{"ignore_eos": False, **KINDS[kind]})
    for prompt in (PROMPT, [i % 60 for i in range(40)]) if name == "nano" else ([9],):
        found = []
        for way in WAYS:
            tried = engine(name, way)
            # the second time from what the first left
            found += [h.facts(tried.generate(prompt, params)), h.joined(tried, prompt, params)]
        assert all(one == found[0] for one in found)


def test_drafts_are_accepted_within_a_grammar() -> None:
    tried = engine("nano", "nextn 3")
    answer = tried.generate(PROMPT, h.greedy(80, regex="[a-z0-9 ]*"))
    assert answer.stats.accept_length is not None and answer.stats.accept_length > 1.2


def test_the_end_of_the_context() -> None:
    found = []
    for way in WAYS:
        draft = {"draft": str(d.bigram_draft())} if "dspark" in way else {}
        tried = h.engine(h.nano("fair"), max_context=24, **WAYS[way], **draft)
        answer = tried.generate(PROMPT, SamplingParams(temperature=0.0, regex="[a-m]*", ignore_eos=True))
        assert (len(answer.token_ids), answer.finish_reason) == (24 - len(PROMPT), "length")
        found.append(h.facts(answer))
    assert all(one == found[0] for one in found)


# -- the law ----------------------------------------------------------------------------------------------------------


@functools.cache
def spelled() -> tuple[str, ...]:
    """nano's tokens as text."""
    tokenizer = h.engine(h.nano(), max_context=64, speculation="off").checkpoint.tokenizer
    assert tokenizer is not None
    return tuple(tokenizer.token_bytes(i).decode("latin-1") for i in range(h.NANO_EOS))


# by state: characters that may come, and the state behind them; states in which the text may end
Machine = tuple[dict[int, list[tuple[str, int]]], set[int]]
GROUPS = r"([a-m]+[0-9][ ,.])*"
OF_GROUPS: Machine = ({0: [("abcdefghijklm", 1)], 1: [("abcdefghijklm", 1), ("0123456789", 2)], 2: [(" ,.", 0)]}, {0})
SHORT = "[ab][c-e]?[0-3]?"
OF_SHORT: Machine = ({0: [("ab", 1)], 1: [("cde", 2), ("0123", 3)], 2: [("0123", 3)], 3: []}, {1, 2, 3})


def state_after(machine: Machine, text: str) -> int | None:
    state = 0
    for character in text:
        found = [then for characters, then in machine[0][state] if character in characters]
        if not found:
            return None
        (state,) = found
    return state


def allowed_by(machine: Machine, ids: Sequence[int], *, ends: bool) -> list[int]:
    """Tokens after which the text is still the beginning of one that the machine takes; ``ends``: EOS where it is."""
    text = "".join(spelled()[i] for i in ids)
    tokens = [i for i, more in enumerate(spelled()) if more and state_after(machine, text + more) is not None]
    if state_after(machine, text) in machine[1] and (ends or not tokens):
        tokens.append(h.NANO_EOS)
    return tokens


LAW_WAYS = ["plain", "nextn 1", "nextn 3", "dspark", "dspark, few rows"]


class TestLaw:
    @pytest.mark.parametrize(
        ("case", "way"), [("mixture", way) for way in LAW_WAYS] + [("plain", "nextn 3"), ("top_k", "dspark")]
    )
    def test_walks(self, case: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Long answers, each token against the target's exact law within what the machine allows."""
        p, liked, total = self.judge(way, CASES[case], monkeypatch)
        assert total == 600 and min(p, liked) > PASS

    @pytest.mark.parametrize("way", ["nextn 3", "dspark"])
    def test_masks_on_logits_that_are_off_are_caught(self, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
        inner = penalties.restrict
        monkeypatch.setattr(penalties, "restrict", lambda logits, masks: inner(logits * 0.5, masks))
        assert self.judge(way, CASES["plain"], monkeypatch)[0] < REJECT

    def judge(self, way: str, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[float, float, int]:
        def allowed(ids: Sequence[int]) -> list[int]:
            return allowed_by(OF_GROUPS, ids, ends=False)

        spy = None if way == "plain" else Spy(monkeypatch)
        walked = walk(engine("nano", way), spy, values | {"regex": GROUPS}, tokens=150, seeds=range(4), allowed=allowed)
        return judged(walked)

    @pytest.mark.parametrize(
        ("way", "values"),
        [
            *((way, {}) for way in ("plain", "nextn 3", "dspark")),
            *((way, {"temperature": 1.6, "top_k": 5, "presence_penalty": 0.7}) for way in LAW_WAYS[1:]),
        ],
        ids=str,
    )
    def test_every_answer_of_a_small_language(self, way: str, values: dict[str, Any]) -> None:
        """With its end tokens: all answers, each as often as its law says."""
        cells = self.cells(values)
        counts = dict.fromkeys(cells, 0)
        tried = engine("nano", way)
        for seed in range(300):
            answer = tried.generate(PROMPT, SamplingParams(max_tokens=8, seed=seed, regex=SHORT, **values))
            assert answer.finish_reason == "stop" and re.fullmatch(SHORT, answer.text)
            counts[tuple(answer.token_ids)] += 1
        p, used = h.chi_square(list(counts.values()), [300 * chance for chance in cells.values()], least=5.0)
        assert used > 8 and p > PASS

    def cells(self, values: dict[str, Any]) -> dict[tuple[int, ...], float]:
        judge = h.engine(h.nano(), max_context=2048, speculation="off", prefix_reuse="off")
        params = SamplingParams(**values)
        done: dict[tuple[int, ...], float] = {}
        open_: dict[tuple[int, ...], float] = {(): 1.0}
        while open_:
            ids, chance = open_.popitem()
            logits = confined(judge.logits(PROMPT + list(ids))[-1], allowed_by(OF_SHORT, ids, ends=True))
            law = h.exact_law(logits, params, PROMPT, ids)
            for token in law.nonzero()[:, 0].tolist():
                into = done if token == h.NANO_EOS else open_
                into[(*ids, token)] = chance * float(law[token])
        assert abs(sum(done.values()) - 1) < 1e-9
        return done

    def test_logprobs_are_of_raw_logits(self) -> None:
        for way in ("plain", "nextn 3"):
            answer = engine("nano", way).generate(PROMPT, h.greedy(30, regex=GROUPS, logprobs=4))
            judge = h.engine(h.nano(), max_context=2048, speculation="off")
            raw = judge.logits(PROMPT + answer.token_ids)[len(PROMPT) - 1 : -1].double().log_softmax(-1)
            assert answer.logprobs is not None and len(answer.logprobs) == 30
            for row, token in zip(raw, answer.logprobs, strict=True):
                assert abs(float(row[token.token_id]) - token.logprob) < 1e-5
                assert token.top[0][0] == int(row.argmax())


# -- where it begins and ends -----------------------------------------------------------------------------------------


class TestMarker:
    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("values", [{"temperature": 0.0}, {"seed": 3}, {"seed": 4, "min_tokens": 6}], ids=str)
    def test_nothing_is_masked_before_it(self, way: str, values: dict[str, Any]) -> None:
        tried, asked = engine("nano", way), r"[a-m]{2,6}[0-9]"
        free = tried.generate(PROMPT, SamplingParams(max_tokens=60, ignore_eos=True, **values)).token_ids
        for place in (0, 3, 11, 12):
            marker = free[place]
            begins = free.index(marker) + 1
            answer = tried.generate(
                PROMPT, SamplingParams(max_tokens=60, regex=asked, grammar_after=marker, ignore_eos=True, **values)
            )
            assert answer.token_ids[:begins] == free[:begins]
            text = "".join(spelled()[i] for i in answer.token_ids[begins:-1])
            assert answer.finish_reason == "stop" and re.fullmatch(asked, text)
            assert answer.token_ids[-1] == h.NANO_EOS

    def test_one_that_never_comes(self) -> None:
        for way in ("plain", "nextn 3"):
            tried = engine("nano", way)
            free = tried.generate(PROMPT, h.greedy(40))
            never = next(i for i in range(60) if i not in free.token_ids)
            answer = tried.generate(PROMPT, h.greedy(40, regex="a", grammar_after=never))
            assert answer.token_ids == free.token_ids and answer.finish_reason == "length"
            assert answer.stats.grammar == "regex"


class TestEnds:
    @pytest.mark.parametrize("way", WAYS)
    def test_length_and_end(self, way: str) -> None:
        tried = engine("nano", way)
        cases: list[tuple[dict[str, Any], str, str]] = [
            ({"regex": "ab?", "min_tokens": 5}, "ab", "stop"),
            ({"regex": "a{1,4}", "ignore_eos": True}, "aaaa", "stop"),
            ({"regex": "a{6}", "max_tokens": 4}, "aaaa", "length"),
            ({"regex": "a{6}", "max_tokens": 6}, "aaaaaa", "length"),
            ({"regex": "a{6}", "max_tokens": 7, "ignore_eos": True}, "aaaaaa", "stop"),
            ({"regex": "a{6}", "stop": "aaa"}, "", "stop"),
            ({"regex": "a{6}", "stop_token_ids": [0], "min_tokens": 3}, "", "stop"),  # nothing else is left
        ]
        for values, text, reason in cases:
            for more in ({"temperature": 0.0}, {"seed": 1}):
                answer = tried.generate(PROMPT, SamplingParams(**{"max_tokens": 30, **values, **more}))
                assert (answer.text, answer.finish_reason) == (text, reason), values
                assert answer.stats.completion_tokens == len(answer.token_ids)

    def test_an_answer_that_has_ended_is_a_prefix_for_the_next(self) -> None:
        tried = engine("nano", "nextn 3")
        for ignored in (False, True):
            first = tried.generate(PROMPT, h.greedy(30, regex="[a-m]{9}", ignore_eos=ignored))
            longer = [*PROMPT, *first.token_ids, 5, 6]
            second = tried.generate(longer, h.greedy(20))
            assert second.stats.cached_tokens >= len(PROMPT) - 1
            fresh = h.load(h.nano("fair"), max_context=512, prefix_reuse="off", **WAYS["nextn 3"])
            assert second.token_ids == fresh.generate(longer, h.greedy(20)).token_ids


# -- what it leaves behind --------------------------------------------------------------------------------------------


class Injected(Exception):
    pass


class TestNothingIsLeft:
    @pytest.mark.parametrize("way", ["plain", "nextn 3", "dspark, few rows"])
    def test_by_answers_aborts_leaving_readers_and_failures(self, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
        tried = engine("nano", way)
        same_as_fresh(tried, "nano", way)
        for values in ({"temperature": 0.0}, {"seed": 2}, {"seed": 2, "presence_penalty": 1.0}):
            params = SamplingParams(max_tokens=40, regex=GROUPS, ignore_eos=True, **values)
            want = tried.generate(PROMPT, params)
            same_as_fresh(tried, "nano", way)
            pieces: Iterator[Any] = tried.stream(PROMPT, params)
            next(pieces)
            pieces.close()  # type: ignore[attr-defined]
            same_as_fresh(tried, "nano", way)
            reasons = []
            for piece in tried.stream(PROMPT, params):
                reasons.append(piece.finish_reason)
                tried.abort()
            assert reasons[-1] == "abort" and len(reasons) < 5
            same_as_fresh(tried, "nano", way)
            inner, calls = Matcher.fill, [0]

            def failing(self: Matcher, *given: Any, inner: Any = inner, calls: list[int] = calls) -> None:
                inner(self, *given)
                calls[0] += 1
                if calls[0] == 3:
                    raise Injected

            with monkeypatch.context() as patched:
                patched.setattr(Matcher, "fill", failing)
                with pytest.raises(Injected):
                    tried.generate(PROMPT, params)
            same_as_fresh(tried, "nano", way)
            assert h.facts(tried.generate(PROMPT, params)) == h.facts(want)

    @pytest.mark.parametrize("way", ["plain", "nextn 3", "dspark"])
    @pytest.mark.parametrize("values", [{"temperature": 0.0}, {"seed": 2}], ids=str)
    def test_a_place_that_nothing_leads_on_from(self, way: str, values: dict[str, Any]) -> None:
        """nano cannot write a quote."""
        tried = engine("nano", way)
        with pytest.raises(RequestError, match="regex cannot be followed beyond token [23]") as caught:
            tried.generate(PROMPT, SamplingParams(max_tokens=20, regex='[ab][cd]"[ef]', **values))
        assert caught.value.param == "regex"
        same_as_fresh(tried, "nano", way)

    def test_programs_without_a_grammar_stay_as_they_were(self) -> None:
        tried, fresh = (h.load(h.nano("fair"), max_context=256, **WAYS["nextn 3"]) for _ in range(2))
        tried.generate(PROMPT, h.greedy(9, regex="[a-m]*"))
        one, two = tried._ready(), fresh._ready()
        assert set(one.programs) == set(two.programs) and len(one.guided) == 1 and not two.guided
        for mode, program in one.programs.items():
            assert program.dump() == two.programs[mode].dump()
        (made,) = one.guided.values()
        base = one.programs[next(iter(one.guided))]
        assert [a is b for a, b in zip(made.phases, base.phases, strict=True)].count(False) == 1
        assert made.mode.grammar and [p.name for p in made.phases] == [p.name for p in base.phases]


class TestRefusals:
    def test_before_anything_runs(self) -> None:
        tried = engine("nano", "plain")
        for asked, says in (({"regex": "a("}, "unclosed"), ({"json_schema": {"type": "x"}}, "Invalid type")):
            with pytest.raises(RequestError, match=says) as caught:
                tried.stream(PROMPT, SamplingParams(**asked))  # type: ignore[arg-type]
            assert caught.value.param in asked

    def test_a_model_without_a_tokenizer(self) -> None:
        tried = h.engine(h.micro(), max_context=64, speculation="off")
        with pytest.raises(RequestError, match="json_object needs a tokenizer and .* has none") as caught:
            tried.generate([1, 2], SamplingParams(json_object=True))
        assert caught.value.param == "json_object"

    def test_without_the_library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from soliton.sampling import grammar

        def missing(name: str) -> Any:
            raise ImportError(name)

        tried = h.load(h.nano(), max_context=64, speculation="off")
        monkeypatch.setattr(grammar.importlib, "import_module", missing)
        with pytest.raises(UnsupportedError, match=r"pip install 'soliton\[grammar\]'"):
            tried.generate([1, 2], SamplingParams(regex="a"))
        assert tried.generate([1, 2], h.greedy(3)).stats.grammar is None
