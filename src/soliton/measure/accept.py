"""How many tokens a step commits: answers to prompts, counted by position, with what a confidence head said of them.

Tokens and steps are pooled over all prompts; the first step of an answer has no drafts and is left out. A greedy answer
that repeats itself (some 8-gram three times) says little about drafts and can be excluded.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..engine import Engine
from ..errors import ConfigError, RequestError
from ..sampling.params import SamplingParams
from ..speculation.schedule import Calibration
from ..speculation.verify import ROLLING
from .calibrate import FINE, calibration_error, fit


@dataclass(kw_only=True)
class Counts:
    """tokens, steps: of steps with drafts; reached[k]: steps in which k drafts or more were accepted; excluded: prompts
    left out; refused: those that the engine does not take. logits, accepted: of steps whose whole block was verified
    and kept."""

    tokens: int = 0
    steps: int = 0
    prompts: int = 0
    excluded: int = 0
    refused: int = 0
    reached: Counter[int] = field(default_factory=Counter)
    logits: list[list[float]] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def report(self, drafts: int) -> dict[str, Any]:
        """As plain values."""
        return {
            "accept_length": round(self.tokens / self.steps, 4) if self.steps else None,
            "accepted_at_position": [round(self.reached[k] / self.steps, 4) for k in range(1, drafts + 1)]
            if self.steps
            else [],
            "steps": self.steps,
            "prompts": self.prompts,
            "excluded": self.excluded,
            "refused": self.refused,
        }


def read_prompts(path: str | Path, limit: int | None = None) -> list[Any]:
    """Texts ("prompt") or messages ("messages") of a JSONL file, which may be compressed; ``limit`` of them spread over
    it."""
    from ..train.data import read_prompts as read

    found = read(path)
    if not found:
        raise ConfigError(f"{path}: no prompt in it")
    count = min(limit or len(found), len(found))
    return [found[i * len(found) // count] for i in range(count)]


def repeats(ids: Sequence[int], n: int = 8, times: int = 3) -> bool:
    """Whether some n-gram stands ``times`` times in ids."""
    grams = Counter(tuple(ids[i : i + n]) for i in range(len(ids) - n + 1))
    return bool(grams) and max(grams.values()) >= times


def count(
    engine: Engine,
    prompts: Sequence[Any],
    params: SamplingParams,
    *,
    exclude: bool = False,
    confidences: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Counts:
    """Answer each prompt (sampled ones with a seed of their own each) and count. exclude: leave out answers that repeat
    themselves. confidences: keep what the head said, which needs run_ahead 0 and every draft verified."""
    found = Counts()
    runtime = engine._ready()
    relay, drafts = runtime.relay, runtime.parts.drafts
    if confidences and (runtime.config.run_ahead != 0 or runtime.config.draft_verify != "all"):
        raise ConfigError(
            f"run_ahead is {runtime.config.run_ahead} and draft_verify {runtime.config.draft_verify!r}: confidences "
            "are read between steps that verify whole blocks; set run_ahead = 0 and draft_verify = 'all'"
        )
    for place, prompt in enumerate(prompts):
        progress(place, len(prompts))
        ids: list[int] = []
        sure: list[list[float] | None] = []
        try:
            stream = engine.stream(prompt, dataclasses.replace(params, seed=place))
        except RequestError:
            found.refused += 1
            continue
        for piece in stream:
            ids += piece.token_ids
            if confidences:
                cut = int(relay.length) % ROLLING == 0  # there a block ends whatever its drafts were worth
                sure.append(None if cut else relay.confidence[:drafts].tolist())
            lengths = piece.stats.accept_lengths if piece.stats is not None else ()
        if exclude and repeats(ids):
            found.excluded += 1
            continue
        found.prompts += 1
        for step, length in enumerate(lengths[1:], 1):
            found.tokens, found.steps = found.tokens + length, found.steps + 1
            found.reached.update(range(1, length))
            if confidences and step + 1 < len(lengths) and (said := sure[step]) is not None:
                found.logits.append(said)  # but for the last block, which may be cut by the answer's end
                found.accepted.append(length - 1)
    progress(len(prompts), len(prompts))
    return found


def calibrate(
    engine: Engine,
    prompts: Sequence[Any],
    params: SamplingParams,
    *,
    dataset: str,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Calibration, Calibration]:
    """(temperatures of the engine's confidence head, what such temperatures do on prompts that they have not seen: its
    errors are of both halves of the prompts together, each with temperatures fitted on the other; its temperatures are
    those of the first half)."""
    drafter = engine._ready().parts.drafter
    if drafter is None:
        raise ConfigError("a confidence head is calibrated, and this engine has none; load it with a DSpark draft")
    if not drafter.spec.confidence:
        raise ConfigError(f"the draft {drafter.spec.name} has no confidence head: there is nothing to calibrate")
    halves = [
        count(engine, prompts[part::2], params, confidences=True, progress=lambda done, total, p=part: progress(  # type: ignore[misc]
            done + p * total, 2 * total))
        for part in (0, 1)
    ]  # fmt: skip
    if not all(half.accepted for half in halves):
        few = min(len(half.accepted) for half in halves)
        raise ConfigError(f"{few} whole blocks in one half of the answers: give more prompts, or a higher max_tokens")
    logits, accepted = ([row for half in halves for row in getattr(half, name)] for name in ("logits", "accepted"))
    record = {
        "dataset": dataset, "temperature": 0.0 if params.temperature is None else params.temperature,
        "model": engine.checkpoint.name, "draft": drafter.spec.name,
    }  # fmt: skip
    whole = fit(logits, accepted, grid=FINE, **record)  # type: ignore[arg-type]
    fitted = [fit(half.logits, half.accepted, grid=FINE, **record) for half in halves]  # type: ignore[arg-type]
    happened = torch.tensor(accepted).unsqueeze(1) > torch.arange(len(logits[0]))

    def error(first: Sequence[float], second: Sequence[float]) -> tuple[float, ...]:
        scaled = [
            torch.tensor(half.logits, dtype=torch.float64) / torch.tensor(heat, dtype=torch.float64)
            for half, heat in zip(halves, (first, second))
        ]
        return tuple(calibration_error(torch.cat(scaled).sigmoid().cumprod(1), happened.double()).tolist())

    ones = [1.0] * len(logits[0])
    after = error(fitted[1].temperatures, fitted[0].temperatures)
    return whole, dataclasses.replace(
        fitted[0], num_samples=len(accepted), ece_before=error(ones, ones), ece_after=after
    )
