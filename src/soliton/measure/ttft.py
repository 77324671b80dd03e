"""Time to first token: how long a fresh prompt takes from the request to its first token, through the whole engine.

Every prompt is drawn anew and the prefix checkpoints are forgotten before it, so nothing is reused. The first prompt
is not counted: its token ends ``first_token_s``, the time from the start of the process.
"""

from __future__ import annotations

import dataclasses
import os
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from ..checkpoint import open_checkpoint
from ..config import EngineConfig
from ..engine import Engine
from ..errors import ConfigError
from ..sampling.params import SamplingParams
from .about import commit, device_name, driver, dtypes, sampling_words
from .doctor import versions
from .step import context_within

LEAST = 5  # prompts of which a median is given


def measure_ttft(
    config: EngineConfig,
    *,
    context: int | None = None,
    params: SamplingParams | None = None,
    repeats: int = 7,
    load: Callable[[EngineConfig], Engine] = Engine.from_config,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """One report as plain values (ttft in milliseconds, prefill in tokens a second, the rest in seconds).

    context: tokens of the prompt, 8192 or as many as the engine takes; the engine's max_context becomes one more where
    it is unset. load: makes the engine. progress: told of prompts read. Raises ConfigError for a context that the
    engine cannot have.
    """
    if repeats < LEAST:
        raise ConfigError(f"repeats is {repeats}: a time to first token is a median of at least {LEAST}")
    longest = open_checkpoint(config.model).spec.max_position
    most = longest if config.max_context is None else config.max_context
    if context == most:
        raise ConfigError(
            f"context is {context}, but the engine goes to {most} with the first token; set --max-context"
        )
    context = min(context_within(context, most, longest), most - 1)
    if config.max_context is None:
        config = dataclasses.replace(config, max_context=context + 1)
    started = time.perf_counter()
    engine = load(config)
    loaded = time.perf_counter() - started
    one = dataclasses.replace(
        params or SamplingParams(temperature=0.0), max_tokens=1, ignore_eos=True, seed=0, logprobs=None
    )
    with engine:
        draw, vocab = random.Random(0), engine.checkpoint.spec.vocab

        def first_token() -> float:
            engine.reset()
            stats = engine.generate([draw.randrange(vocab) for _ in range(context)], one).stats
            assert stats.cached_tokens == 0 and stats.completion_tokens == 1
            return stats.ttft_s * 1e3

        progress(0, repeats + 1)
        cold = first_token()
        age = process_age()
        times = []
        for done in range(1, repeats + 1):
            progress(done, repeats + 1)
            times.append(first_token())
        progress(repeats + 1, repeats + 1)
        settled, name = engine.config, engine.checkpoint.name
        words = sampling_words(one.resolve({}, vocab=vocab))
    middle = statistics.median(times)
    device = torch.device(settled.device)
    speculation = settled.speculation
    return {
        "model": name,
        "device": device_name(device),
        "dtype": settled.dtype,
        "router_dtype": settled.router_dtype,
        "lm_head_dtype": settled.lm_head_dtype,
        "threads": settled.threads,
        "tp": 1,
        "speculation": speculation if speculation == "off" else f"{speculation} S={settled.speculative_num_steps}",
        "sampling": words,
        "context": context,
        "ttft_ms": round(middle, 3),
        "spread_ms": [round(min(times), 3), round(max(times), 3)],
        "runs": repeats,
        "prefill_tokens_s": round(context / middle * 1e3, 1),
        "prefill_chunk": settled.prefill_chunk,
        "prefix_reuse": settled.prefix_reuse,
        "load_s": round(loaded, 3),
        "first_ttft_ms": round(cold, 3),
        "first_token_s": None if age is None else round(age, 3),
        "executor": settled.executor,
        "run_ahead": settled.run_ahead,
        "commit": commit(),
        "versions": {**versions(), "driver": driver()},
    }


def process_age() -> float | None:
    """Seconds since this process was started; None where the system does not tell."""
    try:
        with open("/proc/self/stat", encoding="utf-8") as line:
            ticks = int(line.read().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def as_table(report: dict[str, Any]) -> list[tuple[str, str]]:
    """The card for people."""
    r = report
    low, high = r["spread_ms"]
    age = r["first_token_s"]
    return [
        ("model", f"{r['model']}, {dtypes(r)}, {r['speculation']}, {r['sampling']}"),
        ("device", f"{r['device']}, {r['executor']}, run-ahead {r['run_ahead']}"),
        ("prompt", f"{r['context']} tokens, nothing reused, in chunks of {r['prefill_chunk']}"),
        ("time to first token", f"{r['ttft_ms']:.1f} ms ({low:.1f} to {high:.1f}, {r['runs']} prompts)"),
        ("prefill", f"{r['prefill_tokens_s']:,.0f} tokens/s"),
        ("from start to ready", f"{r['load_s']:.1f} s of loading"),
        ("from start to first token", "-" if age is None else f"{age:.1f} s since the process began, "
                                                               f"{r['first_ttft_ms']:.0f} ms of it the first prompt"),
    ]  # fmt: skip
