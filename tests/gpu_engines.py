"""Engines on a GPU for its tests, and what their answers are compared with."""

from __future__ import annotations

import functools
import gc
from typing import Any

import torch

import helpers as h
from soliton import Engine
from soliton.checkpoint import open_checkpoint

FLASH = "synthetic:ling-3.0-flash?layers=6"
KEPT = 3  # engines in memory at once
_engines: dict[tuple[Any, ...], Engine] = {}


def gpu(model: str, **settings: Any) -> Engine:
    """An engine, the same one for the same settings while it is among the last few asked for."""
    key = (model, *sorted(settings.items()))
    engine = _engines.pop(key, None)
    if engine is None:
        while len(_engines) >= KEPT:
            _engines.pop(next(iter(_engines))).close()
            gc.unfreeze()  # warm-ups froze what they had made
            gc.collect()
            torch.cuda.empty_cache()
        engine = Engine.load(model, device="cuda", max_context=1024, memory_budget="45GiB", **settings)
    _engines[key] = engine
    return engine


def prompts(model: str, count: int) -> list[list[int]]:
    if model == "pebble":
        tokenizer = open_checkpoint("pebble").tokenizer
        assert tokenizer is not None
        texts = [p["prompt"] for p in h.heldout() if "prompt" in p]
        return [tokenizer.encode(t) for t in texts[:: len(texts) // count][:count]]
    return h.prompts_of(150_000, tuple(5 + 11 * i for i in range(count)))


@functools.cache
def plain(model: str, tokens: int, count: int) -> list[Any]:
    engine = gpu(model, speculation="off", run_ahead=0)
    return [h.facts(engine.generate(p, h.greedy(tokens, logprobs=3))) for p in prompts(model, count)]


def same(model: str, engine: Engine, tokens: int, count: int) -> float:
    lengths: list[int] = []
    for prompt, want in zip(prompts(model, count), plain(model, tokens, count), strict=True):
        got = engine.generate(prompt, h.greedy(tokens, logprobs=3))
        assert h.facts(got) == want
        lengths += got.stats.accept_lengths[1:]
    return sum(lengths) / max(len(lengths), 1)
