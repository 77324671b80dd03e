"""Any sequence of requests on one engine: each answer is that of the same request alone on a fresh engine."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import helpers as h
from helpers import threads_as_before  # noqa: F401 - takes effect by being here
from soliton import Engine, RequestError, SamplingParams

CONTEXT = 160
QUIET = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture)

# prompts share beginnings, and some begin with others
STEMS = tuple(tuple(p) for p in h.prompts_of(60, (1, 16, 33, 64), seed=77))


@dataclass(frozen=True)
class Request:
    """One request: ``ids`` as a stem's length and a tail; ``end``: "run", or ("close" | "abort", after pieces), or
    "refuse" (a bad value is added)."""

    ids: tuple[int, ...]
    values: tuple[tuple[str, Any], ...]
    end: tuple[str, int]

    def params(self) -> SamplingParams:
        values: dict[str, Any] = dict(self.values)
        bias = values.pop("logit_bias", None)
        return SamplingParams(logit_bias=dict(bias) if bias else None, **values)


prompts = st.builds(
    lambda stem, cut, tail: (stem[: max(cut, 1)] if cut else stem) + tail,
    st.sampled_from(STEMS),
    st.sampled_from((0, 0, 0, 5, 16, 17)),
    st.lists(st.integers(0, 59), max_size=4).map(tuple),
)
sampling = st.one_of(
    st.just((("temperature", 0.0),)),
    st.builds(
        lambda seed, t, k: (("seed", seed), ("temperature", t), ("top_k", k)),
        st.integers(0, 3),
        st.sampled_from((0.7, 1.0, 1.5)),
        st.sampled_from((0, 5)),
    ),
)
optional = st.lists(
    st.sampled_from(
        (
            ("presence_penalty", 0.7),
            ("frequency_penalty", 0.4),
            ("repetition_penalty", 1.3),
            ("logit_bias", ((3, 2.0), (h.NANO_EOS, 3.0))),
            ("min_tokens", 4),
            ("stop", ("a", "1in")),
            ("stop", ("th", "e1", "4;")),
            ("stop_token_ids", (39, 49)),
            ("ignore_eos", True),
            ("logprobs", 2),
            ("prompt_logprobs", 1),
            ("top_p", 0.8),
            ("min_p", 0.05),
            ("skip_special_tokens", False),
        )
    ),
    max_size=4,
    unique_by=lambda pair: pair[0],
)
ends = st.one_of(
    st.just(("run", 0)),
    st.just(("run", 0)),
    st.tuples(st.sampled_from(("close", "abort")), st.integers(0, 6)),
    st.just(("refuse", 0)),
    st.just(("logits", 0)),
)
requests = st.builds(
    lambda ids, count, how, more, end: Request(ids, (("max_tokens", count), *how, *more), end),
    prompts,
    st.sampled_from((4, 9, 20, 45)),
    sampling,
    optional,
    ends,
)
engines = st.tuples(
    st.sampled_from((0, 1, 2, 3, 5)),  # steps
    st.sampled_from((0, 1, 2, 4)),  # run-ahead
    st.sampled_from(("fast", "exact", "off")),
    st.sampled_from((3, 16, 512)),  # prefill chunk
    st.sampled_from((None, 60_000)),  # checkpoint budget: 60,000 bytes hold a few
)
Way = tuple[int, int, str, int, int | None]


def settings_of(way: Way) -> dict[str, Any]:
    steps, depth, reuse, chunk, budget = way
    made: dict[str, Any] = {"run_ahead": depth, "prefix_reuse": reuse, "prefill_chunk": chunk, "max_context": CONTEXT}
    made |= {"speculation": "nextn", "speculative_num_steps": steps} if steps else {"speculation": "off"}
    return made | ({"checkpoint_budget": budget} if budget else {})


@functools.cache
def alone(request: Request, model: str, steps: int) -> tuple[Any, ...]:
    """The request on an engine that has seen nothing, at depth 0."""
    way = settings_of((steps, 0, "off", 512, None))
    with h.load(h.nano() if model == "nano" else h.micro(), **way) as fresh:
        return h.facts(fresh.generate(request.ids, request.params()))


def serve(engine: Engine, request: Request, model: str, steps: int) -> None:
    """Do the request as it says, and check what came out."""
    kind, after = request.end
    if kind == "logits":
        assert engine.logits(request.ids).shape[0] == len(request.ids)
        return
    if kind == "refuse":
        for bad in ({"top_p": 2.0}, {"max_tokens": CONTEXT}):
            with pytest.raises(RequestError):
                engine.generate(request.ids, SamplingParams(**bad))
        return
    sampled = "seed" in dict(request.values)
    # a draft changes which of the lawful answers a seed gives; greedy answers have to be plain decoding's
    expected = alone(request, model, steps if sampled else 0)
    if kind == "run":
        answer = engine.generate(request.ids, request.params())
        assert h.facts(answer) == expected
        assert 0 <= answer.stats.cached_tokens < len(request.ids)
        assert sum(answer.stats.accept_lengths) == len(answer.token_ids)
        return
    stream = engine.stream(request.ids, request.params())
    ids: list[int] = []
    text = ""
    for number, piece in enumerate(stream):
        ids += piece.token_ids
        text += piece.text
        if number == after:
            engine.abort() if kind == "abort" else stream.close()  # type: ignore[attr-defined]
    assert ids == expected[0][: len(ids)]
    if kind == "close":  # an abort flushes what is held back, which may be half a character
        assert expected[1].startswith(text)


def check(model: str, way: Way, asked: list[Request]) -> None:
    path = h.nano() if model == "nano" else h.micro()
    if model != "nano":  # no tokenizer there
        asked = [Request(r.ids, tuple(v for v in r.values if v[0] != "stop"), r.end) for r in asked]
    engine = h.engine(path, **settings_of(way))
    for request in asked:
        serve(engine, request, model, way[0])


CHAT = Request(STEMS[2], (("max_tokens", 20), ("temperature", 0.0)), ("run", 0))


@settings(max_examples=40, deadline=None, suppress_health_check=QUIET)
@given(engines, st.lists(requests, min_size=2, max_size=6))
@example((3, 4, "fast", 16, 60_000), [CHAT, Request(STEMS[2], CHAT.values, ("close", 2)), CHAT])
@example((5, 2, "exact", 3, None), [Request(STEMS[3], CHAT.values, ("abort", 1)), CHAT, CHAT])
def test_sequences_of_requests(way: Way, asked: list[Request]) -> None:
    check("nano", way, asked)


@settings(max_examples=6, deadline=None, suppress_health_check=QUIET)
@given(engines, st.lists(requests, min_size=2, max_size=4))
def test_sequences_on_ling_micro(way: Way, asked: list[Request]) -> None:
    check("ling-micro", way, asked)


@pytest.mark.full
@pytest.mark.timeout(7200)
@settings(max_examples=600, deadline=None, suppress_health_check=QUIET)
@given(engines, st.lists(requests, min_size=2, max_size=10))
def test_many_sequences(way: Way, asked: list[Request]) -> None:
    check("nano", way, asked)


@pytest.mark.full
@pytest.mark.timeout(7200)
@settings(max_examples=150, deadline=None, suppress_health_check=QUIET)
@given(engines, st.lists(requests, min_size=2, max_size=8))
def test_many_sequences_on_ling_micro(way: Way, asked: list[Request]) -> None:
    check("ling-micro", way, asked)
