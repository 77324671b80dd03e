"""How many of a draft's tokens the target accepts, served by the engine's own verify path, while the draft is trained;
and series of drafts, compared by that and by what a draft costs.

The target is loaded once: a later draft of the same sizes is copied into the loaded one's tensors, whose addresses,
and with them the recorded steps and captured graphs, stay as they are.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import open_checkpoint
from ..checkpoint.draft import DraftCheckpoint, check_shared, open_draft
from ..config import EngineConfig
from ..drafting import make_drafter
from ..engine import Engine, Prompt
from ..errors import ConfigError, RequestError
from ..measure.accept import count
from ..measure.accept import read_prompts as read_prompts
from ..measure.step import WARM_UPS, Repeated
from ..model.draft_spec import DraftSpec, shapes
from ..runtime import Runtime
from ..sampling.params import SamplingParams
from .checkpoints import write_text
from .export import export
from .options import TrainOptions
from .run import BUDGET, ablate, draft_spec
from .trainer import Report

TOKENS = 128  # of an answer
LATENCY_CONTEXT = 8192  # tokens in the cache, where the engine takes as many
FREE = ("name", "max_position")  # fields of a draft that change no tensor


# -- one draft after another in one engine ---------------------------------------------------------------------------


def engine_config(options: TrainOptions, context: int = 0) -> EngineConfig:
    """The target of a run, for its sequences and for requests of ``context`` tokens, without a drafter."""
    most = open_checkpoint(options.target).spec.max_position
    return EngineConfig(
        model=options.target, device=options.device, speculation="off", prefix_reuse="off",
        max_context=min(max(options.max_length, context), most),
    )  # fmt: skip


def engine_for(config: EngineConfig, spec: DraftSpec, load: Callable[[EngineConfig], Engine]) -> Engine:
    """The target of ``config`` with a drafter of ``spec``'s sizes that knows nothing until ``replace_draft``. It serves
    training as well: features of a prompt do not depend on the drafter."""
    target, zero = open_checkpoint(config.model).spec, torch.zeros((), dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory(prefix="soliton-draft-") as folder:
        export(folder, spec, {name: zero.expand(shape) for name, shape in shapes(spec).items()}, target, anchors=1)
        return load(dataclasses.replace(config, speculation="dspark", draft=folder, prefix_reuse="off"))


def evaluator_for(
    options: TrainOptions, prompts: Sequence[Prompt], *, tokens: int, context: int,
    load: Callable[[EngineConfig], Engine],
) -> Evaluator:  # fmt: skip
    """An evaluator of the drafts of a run, with an engine loaded for it."""
    spec = draft_spec(options, open_checkpoint(options.target).spec)
    return Evaluator(engine_for(engine_config(options, context), spec, load), prompts, tokens=tokens)


def replace_draft(runtime: Runtime, draft: DraftCheckpoint) -> None:
    """Put ``draft``'s numbers into the loaded drafter's tensors, in place, between two requests; prefix checkpoints,
    which hold features of the old one, are forgotten. ConfigError unless both drafts have the same sizes."""
    loaded = runtime.parts.drafter
    if loaded is None:
        raise ConfigError(
            f"{draft.path or draft.name}: no draft is loaded that it could replace; load the engine with "
            "speculation = 'dspark' and a draft of the same sizes"
        )
    difference = first_difference(loaded.spec, draft.spec)
    if difference is not None:
        name, there, here = difference
        raise ConfigError(
            f"{draft.path or draft.name}: its {name} is {here!r}, that of the loaded draft {there!r}; load an engine "
            "with this draft"
        )
    check_shared(draft, runtime.checkpoint)
    device = runtime.parts.device
    with torch.inference_mode():
        fresh = make_drafter(runtime.config, draft, device, runtime.parts.dtype)
        for old, new in zip(_tensors(loaded.weights), _tensors(fresh.weights), strict=True):
            old.copy_(new)
        if loaded.scheduler is not None and fresh.scheduler is not None:  # its calibration comes with the draft
            loaded.scheduler.temperatures.copy_(fresh.scheduler.temperatures)
        for program in runtime.programs.values():
            program.reread()
        runtime.tree.clear()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def first_difference(one: DraftSpec, other: DraftSpec) -> tuple[str, Any, Any] | None:
    """(field, value, value) of the first field that lets the tensors or their use differ; None without one."""
    for item in dataclasses.fields(DraftSpec):
        a, b = getattr(one, item.name), getattr(other, item.name)
        if a != b and item.name not in FREE:
            return item.name, a, b
    return None


def _tensors(of: Any) -> Iterator[Tensor]:
    """All tensors of nested dataclasses and tuples, in order."""
    if isinstance(of, Tensor):
        yield of
    elif isinstance(of, tuple):
        for item in of:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(of):
        for field in dataclasses.fields(of):
            yield from _tensors(getattr(of, field.name))


class Evaluator:
    """Greedy answers to ``prompts``, of at most ``tokens`` tokens each, by an engine that has a block drafter (see
    ``engine_for``). Called as the trainer's ``evaluate``."""

    def __init__(self, engine: Engine, prompts: Sequence[Prompt], *, tokens: int = TOKENS) -> None:
        self.engine, self._params = engine, SamplingParams(temperature=0.0, max_tokens=tokens)
        self._prompts = [prompt for prompt in prompts if self._takes(prompt)]
        self._refused = len(prompts) - len(self._prompts)
        if not self._prompts:
            raise ConfigError(f"none of {len(prompts)} prompts can be answered; give shorter ones, or a longer context")

    def _takes(self, prompt: Prompt) -> bool:
        try:
            self.engine.stream(prompt, self._params)  # refused now, or begun never
        except RequestError:
            return False
        return True

    def __call__(self, folder: Path, step: int) -> dict[str, Any]:
        """accept_length: mean tokens a step after an answer's first, None without such a step; accepted[k]: the share
        of those steps that accepted draft k + 1, and so all before it; steps and prompts: counted ones; excluded:
        answers that repeat themselves; refused: prompts that the engine does not take."""
        runtime = self.engine._ready()
        replace_draft(runtime, open_draft(folder))
        found = count(self.engine, self._prompts, self._params, exclude=True)
        places = range(1, runtime.parts.drafts + 1)
        return {
            "accept_length": found.tokens / found.steps if found.steps else None,
            "accepted": [found.reached[k] / found.steps for k in places] if found.steps else [],
            "steps": found.steps,
            "prompts": found.prompts,
            "excluded": found.excluded,
            "refused": self._refused,
        }


def draft_latency(engine: Engine, *, context: int | None = None, repeats: int = 5) -> float:
    """Microseconds of a greedy step's draft phase by itself, the median; ``context``: tokens in the cache, 8192 or as
    many as the engine takes when None."""
    runtime = engine._ready()
    most = runtime.config.max_context
    assert most is not None
    params = SamplingParams(temperature=0.0).resolve({}, vocab=runtime.checkpoint.spec.vocab)
    with torch.inference_mode():
        step = Repeated(runtime, runtime.program(params), params, min(context or LATENCY_CONTEXT, most))
        for _ in range(WARM_UPS):
            step.time()
        # on a GPU each call takes a median of its own
        found = [step.phases()["draft"] for _ in range(1 if runtime.parts.device.type == "cuda" else repeats)]
        runtime.stream.clear()
    return statistics.median(found)


def in_words(found: Mapping[str, Any]) -> str:
    """What ``Evaluator`` found, in a line."""
    length, left = found["accept_length"], ""
    for key, what in (("excluded", "repeated themselves"), ("refused", "were refused")):
        left += f", {found[key]} {what}" if found[key] else ""
    return (
        f"accept length {'-' if length is None else f'{length:.2f}'} over {found['steps']} steps of "
        f"{found['prompts']} prompts{left}; accepted by position {shares(found)}"
    )


def shares(found: Mapping[str, Any]) -> str:
    """Shares of accepted drafts by position."""
    return " ".join(f"{share:.2f}" for share in found["accepted"]) or "-"


# -- series ----------------------------------------------------------------------------------------------------------


def grid_from(
    words: Sequence[str], bound: Callable[[dict[str, Any]], TrainOptions], seeds: Sequence[int] = ()
) -> list[dict[str, Any]]:
    """The overrides of each run, their values as the settings have them: of "key=a,b" ... all combinations, or a .json
    file's list of objects. ``bound``: the settings of a run with overrides, refused where they cannot be."""
    if len(words) == 1 and words[0].endswith(".json"):
        try:
            found = json.loads(Path(words[0]).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"{words[0]}: no JSON can be read ({getattr(error, 'strerror', None) or error})"
            ) from error
        if not isinstance(found, list) or not found or not all(isinstance(item, dict) for item in found):
            raise ConfigError(f"{words[0]}: a JSON list of objects is needed, each the settings of a run")
    else:
        pairs = [word.partition("=") for word in words]
        for word, (key, _, values) in zip(words, pairs):
            if not key or not values:
                raise ConfigError(f"--grid {word!r}: expected key=a,b, or one .json file alone")
        keys = [key.replace("-", "_") for key, _, _ in pairs]
        if len(set(keys)) < len(keys):
            raise ConfigError(f"--grid names {max(keys, key=keys.count)} twice; give all its values at once")
        found = [dict(zip(keys, chosen)) for chosen in itertools.product(*(v.split(",") for _, _, v in pairs))]
    grid = []
    for overrides in found:
        for key in overrides:
            if key in BUDGET:
                raise ConfigError(f"--grid: {key} is part of what all runs share; set it once, by its flag or --seeds")
        options = bound(overrides)
        grid.append({key: getattr(options, key) for key in overrides})
    for seed in seeds:
        bound({"seed": seed})
    for many, name in ((grid, "--grid"), (list(seeds), "--seeds")):
        twice = [one for place, one in enumerate(many) if one in many[:place]]
        if twice:
            raise ConfigError(f"{name} has {twice[0]} twice; each run is made once")
    return grid


def series(
    grid: Sequence[Mapping[str, Any]],
    base: TrainOptions,
    seeds: Sequence[int],
    make: Callable[[TrainOptions], Evaluator],
    report: Callable[[str], Report],
) -> list[dict[str, Any]]:
    """``run.ablate`` with evaluation: each row's "eval" has a "draft_us" besides. ``make``: the evaluator of a run,
    made once for all seeds; its engine is closed when they are done."""
    rows: list[dict[str, Any]] = []
    for overrides in grid:
        one = make(dataclasses.replace(base, **overrides))

        def evaluate(folder: Path, step: int, one: Evaluator = one) -> dict[str, Any]:
            found = one(folder, step)
            return {**found, "draft_us": draft_latency(one.engine)} if step == base.steps else found

        with one.engine:
            rows += ablate([overrides], base, seeds=seeds, engine=one.engine, evaluate=evaluate, report=report)
        write_text(Path(base.out) / "ablation.json", json.dumps(rows, indent=1))
    return rows


def means(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Over the seeds of each setting: mean, least and greatest accept length, and the mean time of a draft."""
    found = []
    for name, group in itertools.groupby(rows, key=lambda row: str(row["run"]).rpartition(",seed=")[0]):
        runs = [row["eval"] for row in group]
        lengths = [run["accept_length"] for run in runs if run["accept_length"] is not None]
        mean, low, high = (statistics.mean(lengths), min(lengths), max(lengths)) if lengths else (None,) * 3
        latency = statistics.mean(run["draft_us"] for run in runs)
        found.append({"setting": name, "accept_length": mean, "from": low, "to": high, "draft_us": latency})
    return found
