"""The run-ahead loop on a GPU: the host reads nothing of the device inside it, and a slow host delays nothing."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import helpers as h
from soliton import Engine
from soliton.checkpoint import open_checkpoint
from soliton.config import EngineConfig
from soliton.measure.step import Repeated
from soliton.ops.chain import unchained
from soliton.runtime import load_runtime
from soliton.sampling.params import SamplingParams

LAWS = [
    SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=200, temperature=0.8, top_p=0.9, top_k=40, seed=1, ignore_eos=True),
    SamplingParams(max_tokens=200, temperature=0.8, presence_penalty=0.4, seed=1, ignore_eos=True, logprobs=2),
]


@functools.cache
def gpu(speculation: str, depth: int) -> Engine:
    return Engine.load("pebble", device="cuda", max_context=1024, speculation=speculation, run_ahead=depth)


@contextmanager
def no_reads() -> Iterator[None]:
    """Reads of the device by the host are errors."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def steps(engine: Engine, params: SamplingParams, count: int) -> None:
    """``count`` pieces of a stream inside ``no_reads``, behind the first few."""
    stream = engine.stream([5, 6, 7, 8], params)
    for _ in range(3):
        next(stream)
    with no_reads():
        for _ in range(count):
            next(stream)
    stream.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("speculation", ["off", "nextn"])
@pytest.mark.parametrize("depth", [0, 2])
def test_the_loop_reads_nothing(speculation: str, depth: int) -> None:
    engine = gpu(speculation, depth)
    for params in LAWS:
        steps(engine, params, 20)


def test_a_read_in_the_loop_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = gpu("nextn", 2)
    runtime: Any = engine._runtime
    executor = runtime.loop.executor
    launch = executor.launch

    def reading(program: Any) -> None:
        launch(program)
        int(runtime.relay.length)

    monkeypatch.setattr(executor, "launch", reading)
    with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
        steps(engine, LAWS[0], 5)
    monkeypatch.undo()
    assert len(engine.generate([5, 6, 7, 8], h.greedy(8)).token_ids) == 8


@pytest.fixture(scope="module")
def tiny() -> Iterator[Repeated]:
    name = "synthetic:ling-3.0-tiny"
    config = EngineConfig(model=name, device="cuda", speculation="off", max_context=4096)
    runtime = load_runtime(config, open_checkpoint(name))
    params = SamplingParams(temperature=0.0).resolve({}, vocab=runtime.checkpoint.spec.vocab)
    with torch.inference_mode():
        yield Repeated(runtime, runtime.program(params), params, 2048)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_stalled_host(tiny: Repeated, depth: int) -> None:
    """1 ms a step on the host, less than a step takes: hidden at every depth but 0."""
    tiny.runtime.loop.depth = depth
    free, stalled = tiny.loop(40), tiny.loop(40, stall=0.001)
    assert free is not None and stalled is not None
    if free.whole < 1200:
        pytest.skip(f"a step takes {free.whole:.0f} µs: too short to hide a stall of 1 ms")
    if depth:
        assert stalled.whole < 1.05 * free.whole
    else:
        assert stalled.whole > free.whole + 700


def test_chained_launches_change_no_bit() -> None:
    prompt = list(range(40, 90))
    with unchained():
        apart = Engine.load("pebble", device="cuda", max_context=1024, speculation="nextn")
        want = [h.facts(apart.generate(prompt, params)) for params in LAWS]
    with apart:
        assert want == [h.facts(gpu("nextn", 2).generate(prompt, params)) for params in LAWS]
