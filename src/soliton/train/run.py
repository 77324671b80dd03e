"""A whole run from its settings, and series of runs that differ in a few of them."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.draft import open_draft
from ..config import EngineConfig
from ..engine import Engine
from ..errors import ConfigError, nearest
from ..measure.about import commit, device_name
from ..measure.doctor import versions
from ..model.draft_spec import DraftSpec, shapes
from ..model.spec import ModelSpec
from ..runtime import Runtime
from .checkpoints import write_text
from .data import Dataset, load
from .features import Features
from .model import Drafter
from .options import TrainOptions, numbers
from .trainer import Evaluate, Report, Result, Trainer

BUDGET = ("target", "data", "out", "device", "seed", "steps", "batch", "anchors", "max_length", "holdout")


def draft_spec(options: TrainOptions, target: ModelSpec) -> DraftSpec:
    """The draft of these settings for ``target``; ConfigError names the setting that cannot be."""
    o, last = options, len(target.layers) - 1
    head_dim = o.head_dim or (128 if target.hidden >= 1024 else 32)
    heads = o.heads or max(target.hidden // head_dim, 1)
    kv_heads = o.kv_heads or heads
    taps = default_taps(len(target.layers)) if o.taps is None else numbers(o.taps, "taps", int)
    if list(taps) != sorted(set(taps)) or not 0 <= taps[0] <= taps[-1] < max(last, 1):
        raise ConfigError(
            f"taps = {o.taps!r}: ascending layers from 0 to {last - 1} are needed; {target.name} has {last + 1} "
            "layers, and the last one's residual is not read"
        )
    if heads % kv_heads:
        raise ConfigError(f"kv_heads = {kv_heads}: {heads} query heads cannot share them; take a divisor of {heads}")
    if head_dim % 2:
        raise ConfigError(f"head_dim = {head_dim}: rotation needs pairs of channels; take an even number")
    mask = next((t for t in (o.mask_id, target.pad_id, *target.eos_ids) if t is not None), None)
    if mask is None or mask >= target.vocab:
        raise ConfigError(f"mask_id = {mask}: a token of {target.name} is needed, from 0 to {target.vocab - 1}")
    plain = o.markov == "none"
    return DraftSpec(
        name=f"{target.name}-dspark",
        hidden=target.hidden,
        vocab=target.vocab,
        layers=o.layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        width=o.width or 3 * target.hidden,
        eps=target.eps,
        theta=o.theta,
        block=o.block,
        mask_id=mask,
        taps=taps,
        target_layers=len(target.layers),
        markov=o.markov,  # type: ignore[arg-type]  # checked by its choices
        rank=0 if plain else o.rank,
        confidence=o.confidence,
        confidence_markov=o.confidence and o.confidence_markov,
        max_position=target.max_position,
    )


def default_taps(layers: int) -> tuple[int, ...]:
    """Up to five layers spread evenly from 1 to layers - 3, as SpecForge chooses them."""
    low, high = min(1, max(layers - 2, 0)), max(layers - 3, min(1, max(layers - 2, 0)))
    count = min(5, high - low + 1)
    return tuple(low + round(i * (high - low) / max(count - 1, 1)) for i in range(count))


def drafter(options: TrainOptions, runtime: Runtime) -> Drafter:
    """The trainable draft on the target's device, over the target's own embedding and head."""
    target = runtime.checkpoint.spec
    spec = draft_spec(options, target)
    head = runtime.weights.head.data[:, : target.vocab].t()
    model = Drafter(spec, runtime.weights.embed, head, seed=options.seed)
    if options.start is not None:
        model.load_state_dict(_start(options.start, spec))
    for p in model.parameters():  # embedding and head are there already, in the target's dtype
        p.data = p.data.to(runtime.parts.device)
    return model


def _start(path: str, spec: DraftSpec) -> dict[str, Tensor]:
    """The tensors of a draft that differs from ``spec`` in nothing but its name and its longest context."""
    draft = open_draft(path)
    for item in dataclasses.fields(DraftSpec):
        there, here = getattr(draft.spec, item.name), getattr(spec, item.name)
        if there != here and item.name not in ("name", "max_position"):
            raise ConfigError(
                f"start = {path!r}: that draft has {item.name} = {there!r}, this run {here!r}; set it alike"
            )
    return {name: draft.tensor(name) for name in shapes(spec)}


def train(
    options: TrainOptions,
    *,
    engine: Engine | None = None,
    report: Report | None = None,
    evaluate: Evaluate | None = None,
    stop: Callable[[], bool] = lambda: False,
    tell: Callable[[str], None] = lambda text: None,
) -> Result:
    """Run to the end, or go on with what ``options.out`` holds. ``engine``: the target where it is loaded already;
    ``tell`` gets a line on the disk that kept features will take."""
    data = load(options.data)
    if engine is None:
        config = EngineConfig(
            model=options.target, device=options.device, speculation="off", prefix_reuse="off",
            max_context=_context(options, data.samples),
        )  # fmt: skip
        with Engine.from_config(config) as own:
            return train(options, engine=own, report=report, evaluate=evaluate, stop=stop, tell=tell)
    runtime = engine._ready()
    _check_data(options, data, engine)
    longest, limit = _context(options, data.samples), runtime.config.max_context
    if limit is not None and longest > limit:
        raise ConfigError(f"max_length = {options.max_length}: the engine's max_context is {limit}; lower one of them")
    model = drafter(options, runtime)
    source = Features(runtime, model.spec.taps, options.features, options.features_memory)
    trainer = Trainer(
        options, model, runtime.checkpoint.spec, data, source, provenance=provenance(options, runtime),
        evaluate=evaluate, report=report, stop=stop,
    )  # fmt: skip
    if options.features is not None:
        needed = source.check_space([s.ids[: options.max_length] for s in trainer.samples])
        tell(f"{options.features} will take {needed:,} bytes more for the target's hidden states")
    return trainer.run()


def _check_data(options: TrainOptions, data: Dataset, engine: Engine) -> None:
    """ConfigError for sequences of another target: their ids mean something else, or nothing."""
    made_for, name = data.head.get("target"), engine.checkpoint.name
    if made_for != name:
        raise ConfigError(
            f"data = {options.data!r} was made for {made_for!r}, and the target is {name!r}; make data with this target"
        )
    vocab = engine.checkpoint.spec.vocab
    for place, sample in enumerate(data.samples, 1):
        low, high = min(sample.ids), max(sample.ids)
        if low < 0 or high >= vocab:
            raise ConfigError(
                f"data = {options.data!r}: sequence {place} holds token {low if low < 0 else high}, but those of "
                f"{name} run from 0 to {vocab - 1}; make it again"
            )


def _context(options: TrainOptions, samples: Sequence[Any]) -> int:
    return max(2, min(options.max_length, max(len(s.ids) for s in samples)))


def provenance(options: TrainOptions, runtime: Runtime) -> dict[str, Any]:
    """What a checkpoint says of how it came to be; ``start``: what the draft that it started from said."""
    files = {name: metadata.version(name) for name in ("safetensors", "numpy")}
    before = Path(options.start) / "provenance.json" if options.start is not None else None
    from_draft = {"start": json.loads(before.read_text(encoding="utf-8"))} if before and before.exists() else {}
    return {
        **from_draft,
        "arguments": dataclasses.asdict(options),
        "commit": commit() or "unknown",
        "versions": {**versions(), **files},
        "target": runtime.checkpoint.name,
        "device": device_name(runtime.parts.device),
        "threads": torch.get_num_threads(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def ablate(
    grid: Sequence[Mapping[str, Any]],
    base: TrainOptions,
    *,
    seeds: Sequence[int] = (0,),
    engine: Engine | None = None,
    report: Callable[[str], Report] | None = None,
    evaluate: Evaluate | None = None,
) -> list[dict[str, Any]]:
    """Train ``base`` with each of ``grid``'s overrides and each seed, all with the same data, steps and batch; one row
    a run: the overrides, the seed, and the last lines of the metrics. Runs lie in ``base.out``; a finished one is not
    repeated, an unfinished one goes on."""
    known = [f.name for f in dataclasses.fields(TrainOptions)]
    runs = []
    for overrides in grid:
        for key in overrides:
            if key not in known:
                raise ConfigError(f"grid: no setting {key!r}{nearest(key, known)}")
            if key in BUDGET:
                raise ConfigError(f"grid: {key} is part of the budget, which all runs share; set it in the base")
        name = ",".join(f"{key}={value}" for key, value in overrides.items()).replace("/", "_") or "base"
        for seed in seeds:
            out = str(Path(base.out) / f"{name},seed={seed}")
            runs.append(
                (overrides, seed, dataclasses.replace(base, **overrides, seed=seed, out=out))
            )  # all are checked
    rows = []
    for overrides, seed, options in runs:
        label = Path(options.out).name
        began = time.perf_counter()
        result = train(options, engine=engine, evaluate=evaluate, report=report(label) if report is not None else None)
        lines = {split: dict(line) for split, line in result.lines.items()}
        seconds = round(time.perf_counter() - began, 3)
        rows.append({"run": label, "overrides": dict(overrides), "seed": seed, "seconds": seconds, **lines})
        write_text(Path(base.out) / "ablation.json", json.dumps(rows, indent=1))
    return rows
