"""A guided step as the graph executor launches it, on stand-ins for CUDA's streams, events and graphs: what is read and
written in which order, and that answers are those of the tapes."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch

import helpers as h
from helpers import threads_as_before  # noqa: F401 - takes effect by being here
from law_cases import PROMPT
from soliton import Engine, SamplingParams
from soliton.sampling.grammar import Matcher
from soliton.step.executor import EagerExecutor, GraphExecutor
from soliton.step.loop import Loop

pytest.importorskip("llguidance")

LOG: list[str] = []


class Stream:
    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...


class Event:
    def record(self) -> None: ...

    def synchronize(self) -> None:
        LOG.append("wait")


class Graph:
    """A captured part: its tapes."""

    def __init__(self, tapes: list[Any], names: list[str]) -> None:
        self._tapes, self._names = tapes, names

    def replay(self) -> None:
        LOG.append(" ".join(self._names))
        for tape in self._tapes:
            tape.run()


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "Stream": Stream, "Event": Event, "current_stream": Stream, "synchronize": lambda *_: None,
        "stream": lambda _: contextlib.nullcontext(),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self.clone())
    monkeypatch.setattr(gc, "freeze", lambda: None)
    inner = Matcher.fill

    def fill(self: Matcher, drafts: Any, masks: Any) -> None:
        LOG.append(f"masks of {len(drafts) + 1}")
        inner(self, drafts, masks)

    monkeypatch.setattr(Matcher, "fill", fill)


def graphs(engine: Engine, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    """Give an engine the graph executor."""
    runtime = engine._ready()
    names = {}

    def captured(self: GraphExecutor, tapes: list[Any], stream: Any) -> Graph:
        for program in [*runtime.programs.values(), *runtime.guided.values()]:
            names.update({id(phase.tape): phase.name for phase in program.phases})
        return Graph(tapes, [names[id(tape)] for tape in tapes])

    monkeypatch.setattr(GraphExecutor, "_captured", captured)
    executor = GraphExecutor(runtime.relay, runtime.stream, **settings)
    executor.capture(runtime.programs.values())
    runtime.stream.clear()
    runtime.loop = Loop(runtime.relay, executor, 2)


REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0.0, "regex": "([a-m]+[0-9][ ,.])*"},
    {"temperature": 0.0},
    {"seed": 3, "regex": "[a-m]{1,9}[0-9]{2}", "grammar_after": 12, "presence_penalty": 0.4},
    {"seed": 3, "json_schema": {"type": "integer"}, "logprobs": 1},
    {"seed": 4},
]


@pytest.mark.parametrize("phased", [False, True])
@pytest.mark.parametrize("speculation", ["off", "nextn"])
def test_answers_are_those_of_the_tapes(
    stand_ins: None, monkeypatch: pytest.MonkeyPatch, speculation: str, phased: bool
) -> None:
    settings = {"speculation": speculation} | ({"speculative_num_steps": 3} if speculation == "nextn" else {})
    tried, want = (h.load(h.nano("fair"), max_context=256, prefix_reuse="off", **settings) for _ in range(2))
    graphs(tried, monkeypatch, phased=phased)
    for values in REQUESTS:
        params = SamplingParams(max_tokens=30, ignore_eos="regex" not in values, **values)
        assert h.facts(tried.generate(PROMPT, params)) == h.facts(want.generate(PROMPT, params))


def test_masks_are_made_while_the_target_runs(stand_ins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = h.load(h.nano("good"), max_context=256, speculation="nextn", speculative_num_steps=3, run_ahead=2)
    graphs(tried, monkeypatch)
    LOG.clear()
    tried.generate(PROMPT, h.greedy(24, regex="[a-z0-9 ]*"))
    launches = [LOG[i : i + 6] for i in range(0, len(LOG), 6)]
    parts = ["refill draft", "verify", "wait", "masks of", "verdict commit extend publish", "wait"]
    for number, launch in enumerate(launches):
        assert [a[: len(b)] for a, b in zip(launch, parts, strict=True)] == parts
        assert launch[3] == ("masks of 4" if number else "masks of 1")


def test_a_capture_that_fails_leaves_the_tapes(stand_ins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = h.load(h.nano("fair"), max_context=256, speculation="nextn", speculative_num_steps=3)
    want = tried.generate(PROMPT, h.greedy(20, regex="[a-m]*"))
    runtime = tried._ready()
    graphs(tried, monkeypatch)
    runtime.guided.clear()

    def refused(*_: Any) -> Any:
        raise RuntimeError("not today")

    monkeypatch.setattr(GraphExecutor, "_captured", refused)
    with pytest.warns(UserWarning, match="could not be captured and runs call by call: not today"):
        assert h.facts(tried.generate(PROMPT, h.greedy(20, regex="[a-m]*"))) == h.facts(want)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(EagerExecutor, "guided", refused)
        with pytest.raises(RuntimeError, match="not today"):
            tried.generate(PROMPT, h.greedy(20, regex="[a-m]*"))
