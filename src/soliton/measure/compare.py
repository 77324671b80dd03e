"""Ways of decoding one model beside each other: the same prompts, in turns, as a reader of the stream sees them.

TPOT is the time from an answer's first piece to its last over the tokens after the first piece. Prompts go through all
ways before the next one, in an order that turns, so that a drift of the machine meets all alike. Weights are as warm as
serving leaves them: a model that fits a cache stays there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from ..config import EngineConfig
from ..engine import Engine
from ..errors import ConfigError, RequestError
from ..sampling.params import SamplingParams
from .about import commit, device_name, driver, sampling_words
from .accept import repeats
from .doctor import versions

LEAST = 8  # tokens after the first piece that a time needs
Load = Callable[[EngineConfig], Any]


@dataclass(kw_only=True)
class Way:
    """One engine and what it did: seconds a token by prompt, and tokens and steps after each answer's first."""

    name: str
    engine: Engine
    times: list[float] = field(default_factory=list)
    tokens: int = 0
    steps: int = 0


def parse_way(word: str) -> dict[str, Any]:
    """Settings of "off", "nextn:4" (drafts), "dspark" (all drafts verified), "dspark:fixed=3", "dspark:threshold=0.4",
    "dspark:cost". ConfigError for another word."""
    kind, _, rest = word.partition(":")
    mode, _, value = rest.partition("=")
    try:
        if word == "off":
            return {"speculation": "off"}
        if kind == "nextn" and not value:
            return {"speculation": "nextn", "speculative_num_steps": int(mode)}
        if word in ("dspark", "dspark:cost"):
            return {"speculation": "dspark", "draft_verify": mode or "all"}
        if kind == "dspark" and mode == "fixed":
            return {"speculation": "dspark", "draft_verify": mode, "draft_verify_tokens": int(value)}
        if kind == "dspark" and mode == "threshold":
            return {"speculation": "dspark", "draft_verify": mode, "draft_threshold": float(value)}
    except ValueError:
        pass
    raise ConfigError(
        f"--ways {word!r}: known are off, nextn:DRAFTS, dspark, dspark:fixed=DRAFTS, dspark:threshold=X and dspark:cost"
    )


def config_of(config: EngineConfig, word: str) -> EngineConfig:
    """``config`` as that way decodes; files of a draft only where one is loaded."""
    changes = parse_way(word)
    clean = {
        "speculative_num_steps": None,
        "draft_verify": "auto",
        "draft_verify_tokens": None,
        "draft_threshold": None,
    }
    if changes["speculation"] != "dspark":
        clean |= {"draft": None, "draft_costs": None, "draft_calibration": None}
    elif changes.get("draft_verify") != "cost":
        clean["draft_costs"] = None
    return dataclasses.replace(config, **{**clean, **changes})


def compare(
    config: EngineConfig,
    words: Sequence[str],
    prompts: Sequence[Any],
    params: SamplingParams,
    *,
    load: Load,
    exclude: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """A row a way: median and quartiles of TPOT in µs, the median and quartiles of its ratio to the first way's on the
    same prompt, accept length pooled. Greedy answers must be the same tokens everywhere: ``different`` counts the
    prompts on which they are not. exclude: leave out greedy answers that repeat themselves."""
    known = [parse_way(word) for word in words]
    if len(words) < 2 or any(way in known[:place] for place, way in enumerate(known)):
        raise ConfigError(f"--ways {' '.join(words)}: give at least two, each once")
    for key in ("speculative_num_steps", "draft_verify_tokens", "draft_threshold"):
        if getattr(config, key) is not None:
            raise ConfigError(
                f"{key} = {getattr(config, key)}: the ways say it, such as --ways off nextn:3; leave it out"
            )
    if config.draft_costs is not None and not any(way.get("draft_verify") == "cost" for way in known):
        raise ConfigError(f"draft_costs = {config.draft_costs!r}: no way reads it; leave it out, or add dspark:cost")
    configs = [config_of(config, word) for word in words]
    with ExitStack() as stack:
        ways = [Way(name=w, engine=stack.enter_context(load(c))) for w, c in zip(words, configs, strict=True)]
        first = ways[0].engine
        greedy = params.resolve({}, vocab=first.checkpoint.spec.vocab).greedy
        for way in ways:
            with contextlib.suppress(RequestError):
                _answer(way, prompts[0], params)
        excluded, different, refused, short = 0, 0, 0, 0
        for place, prompt in enumerate(prompts):
            progress(place, len(prompts))
            given = dataclasses.replace(params, seed=place)
            try:
                turns = {
                    way.name: _answer(way, prompt, given)
                    for way in ways[place % len(ways) :] + ways[: place % len(ways)]
                }
            except RequestError:
                refused += 1
                continue
            found = [turns[way.name] for way in ways]
            different += greedy and any(ids != found[0][0] for ids, *_ in found)
            if exclude and greedy and repeats(found[0][0]):
                excluded += 1
            elif any(after < LEAST for _, after, *_ in found):
                short += 1
            else:
                for way, (_, after, seconds, lengths) in zip(ways, found, strict=True):
                    way.times.append(seconds / after)
                    way.tokens, way.steps = way.tokens + sum(lengths[1:]), way.steps + len(lengths[1:])
        progress(len(prompts), len(prompts))
        resolved = params.resolve({}, vocab=first.checkpoint.spec.vocab)
        loaded = [way.engine._ready() for way in ways]
        drafts = [one.parts.drafter.spec.name for one in loaded if one.parts.drafter is not None]
        return {
            "model": first.checkpoint.name, "draft": drafts[0] if drafts else None,
            "sampling": sampling_words(resolved), "max_tokens": params.max_tokens, "dtype": first._ready().config.dtype,
            "device": device_name(first._ready().parts.device), "prompts": len(ways[0].times), "excluded": excluded,
            "short": short, "refused": refused, "different": different if greedy else None,
            "ways": [_row(way, ways[0]) for way in ways], "commit": commit(), "versions": versions(),
            "driver": driver(),
        }  # fmt: skip


def _answer(way: Way, prompt: Any, params: SamplingParams) -> tuple[list[int], int, float, Sequence[int]]:
    """(ids, tokens after the first piece, seconds from it to the last, accept lengths)."""
    ids: list[int] = []
    began = ended = 0.0
    before = 0
    lengths: tuple[int, ...] = ()
    for piece in way.engine.stream(prompt, params):
        if piece.token_ids:
            ended = time.perf_counter()
            if not ids:
                began, before = ended, len(piece.token_ids)
        ids += piece.token_ids
        lengths = piece.stats.accept_lengths if piece.stats is not None else lengths
    return ids, len(ids) - before, ended - began, lengths


def _row(way: Way, first: Way) -> dict[str, Any]:
    ratios = [mine / its for mine, its in zip(way.times, first.times, strict=True)]
    return {
        "way": way.name,
        "tpot_us": spread([1e6 * one for one in way.times], 1),
        "ratio": spread(ratios, 3),
        "accept_length": round(way.tokens / way.steps, 3) if way.steps else None,
    }


def spread(values: Sequence[float], digits: int) -> dict[str, float] | None:
    """The median and the quartiles."""
    if len(values) < 2:
        return None
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, digits), "q1": round(low, digits), "q3": round(high, digits)}


def as_table(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows of two words for a terminal."""
    rows = [
        ("model", f"{report['model']}, {report['sampling']}, on {report['device']}"),
        (
            "prompts",
            f"{report['prompts']} timed; {report['excluded']} repeat themselves, {report['short']} were short, "
            f"{report['refused']} refused",
        ),
    ]
    if report["different"]:
        rows.append(("different", f"{report['different']} prompts were answered with other tokens by some way"))
    for row in report["ways"]:
        if row["tpot_us"] is None:
            rows.append((row["way"], "too few answers to time"))
            continue
        one, ratio = row["tpot_us"], row["ratio"]
        accept = "" if row["accept_length"] is None else f", accept length {row['accept_length']:.2f}"
        rows.append(
            (
                row["way"],
                f"TPOT {one['median']:.1f} µs ({one['q1']:.1f} to {one['q3']:.1f}), "
                f"{ratio['median']:.3f} of {report['ways'][0]['way']} ({ratio['q1']:.3f} to {ratio['q3']:.3f}){accept}",
            )
        )
    return rows
