"""A block drafter against the reference outputs of a draft's case: its context rows, its first block and every round of
each prompt, then the engine's own answers. The case of its target lies in the directory beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import open_checkpoint
from ..config import EngineConfig, bind
from ..engine import Engine
from ..errors import CheckpointError
from ..runtime import Runtime, load_runtime
from ..sampling.params import SamplingParams
from ..speculation.dspark import read_context, record_draft
from ..speculation.verify import Mode
from ..step.request import begin
from .golden import Check, Exact, Golden, Judge, Rounded, same

GREEDY = SamplingParams(temperature=0.0)


def draft_checks(path: Path, golden: Golden, dtype: str, device: str, threads: int | None) -> Iterator[Check]:
    """All checks of one case; CheckpointError when its target is not beside it."""
    beside = path.resolve().parent / str(golden.data["target"])
    if not beside.is_dir():
        raise CheckpointError(f"{path}: its target's case {beside} is not there; copy it beside the draft's")
    target, checkpoint = Golden.read(beside), open_checkpoint(beside)

    def load(**settings: Any) -> Runtime:
        common = {"model": str(beside), "dtype": dtype, "device": device, "threads": threads, "prefix_reuse": "off"}
        config = bind(EngineConfig, flags={**common, **settings}, env={}, file=None)
        return load_runtime(config, checkpoint)

    exact = dtype == "float32"
    judge: Judge = Exact(golden) if exact else Rounded(golden)
    of_target: Judge = Exact(target) if exact else Rounded(target)
    runtime = load(speculation="dspark", draft=str(path))
    with torch.inference_mode():
        yield from _context(runtime, golden, target, judge)
        yield from _blocks(runtime, golden, target, judge)
        yield from _rounds(runtime, golden, target, judge)
    said, plain = _answers(runtime, target), _answers(load(speculation="off"), target)
    yield same("continuation, DSpark = plain", [ids for ids, _ in said], [ids for ids, _ in plain])
    yield of_target.continuation("continuation, DSpark", [ids for ids, _ in said])
    kept = [_kept(golden, target, i) for i in target.prompts]
    yield judge.chosen("accept lengths", [lengths for _, lengths in said], kept)


def _read(runtime: Runtime, ids: list[int]) -> Tensor:
    """The residuals [len(ids), taps * hidden] after an empty stream has read ids; its context rows are made."""
    runtime.stream.clear()
    found = [step.taps for step in runtime.prefill.read(ids, 0, len(ids))]
    return torch.cat([taps for taps in found if taps is not None]).float().cpu()


def _context(runtime: Runtime, golden: Golden, target: Golden, judge: Judge) -> Iterator[Check]:
    """Residuals, features, and the traced prompt's keys and values."""
    stream, traced = runtime.stream, int(golden.data["trace_prompt"])
    assert stream.features is not None and stream.draft_cache is not None
    taps, features = [], []
    for i in target.prompts:
        ids = target.ids(f"prompt.{i}.ids")
        if i == traced:
            ids += target.ids(f"prompt.{i}.cont_ids")[: len(golden["trace.taps"]) - len(ids)]
            at, names = torch.arange(len(ids)), ("trace.taps", "trace.context")
        else:
            at = golden[f"prompt.{i}.feature_positions"].long()
            names = (f"prompt.{i}.taps", f"prompt.{i}.context")
        made = _read(runtime, ids)
        taps.append((made[at], golden[names[0]]))
        features.append((stream.features[: len(ids)].float().cpu()[at], golden[names[1]]))
        if i == traced:
            length = len(golden["trace.ctx_k.0"])
            caches = stream.draft_cache[:, :, :length].float().cpu().clone()
    yield judge.near("taps", taps)
    yield judge.near("features", features)
    for part, name in enumerate(("ctx_k", "ctx_v")):
        yield judge.near(name, [(c[part], golden[f"trace.{name}.{layer}"]) for layer, c in enumerate(caches)])


def _draft(runtime: Runtime, ids: list[int], anchor: int, trace: dict[str, Tensor] | None = None) -> list[int]:
    """Greedy drafts behind ``anchor``, whose context ids are in the stream."""
    parts, relay = runtime.parts, runtime.relay
    assert parts.drafter is not None
    resolved = GREEDY.resolve({}, vocab=parts.spec.vocab)
    begin(relay, resolved, prompt=[*ids, anchor], limit=1)
    relay.tokens[:1] = anchor
    relay.rows.fill_(parts.drafts + 1)
    mode = Mode(sampled=False, processors=False)
    record_draft(parts.immediate(trace), parts.drafter, parts.weights, parts.stream, relay, mode, None)
    return [int(token) for token in relay.tokens[1:].tolist()]


def _blocks(runtime: Runtime, golden: Golden, target: Golden, judge: Judge) -> Iterator[Check]:
    """Each prompt's first block, in all its numbers."""
    traced = int(golden.data["trace_prompt"])
    drafts, found = [], {name: [] for name in ("hidden", "base_logits", "logits", "confidence_logits")}  # type: ignore
    residuals = []
    for i in target.prompts:
        ids, anchor = target.ids(f"prompt.{i}.ids"), target.ids(f"prompt.{i}.cont_ids")[0]
        _read(runtime, ids)
        trace: dict[str, Tensor] = {}
        drafts.append(_draft(runtime, ids, anchor, trace))
        made = _numbers(runtime, trace)
        for name, listed in found.items():
            listed.append((made[name], golden[f"block.{i}.{name}"]))
        if i == traced:
            layers = range(runtime.parts.drafter.spec.layers)  # type: ignore[union-attr]
            residuals = [(trace[f"block_resid.{n}"].float().cpu(), golden[f"trace.block_resid.{n}"]) for n in layers]
    for name, listed in found.items():
        yield judge.near(f"block {name}", listed)
    yield judge.near("block residuals", residuals)
    yield judge.chosen("first drafts", drafts, [golden.ids(f"block.{i}.draft_ids") for i in target.prompts])
    if isinstance(judge, Rounded):
        yield from _rounded_block(runtime, golden, target, traced)


def _rounded_block(runtime: Runtime, golden: Golden, target: Golden, traced: int) -> Iterator[Check]:
    """The traced prompt's first block over the reference's own features."""
    stream, ids = runtime.stream, target.ids(f"prompt.{traced}.ids")
    assert stream.features is not None and runtime.parts.drafter is not None
    stream.features[: len(ids)] = golden["trace.context"][: len(ids)].to(stream.features)
    read_context(runtime.parts.immediate(), runtime.parts.drafter, stream, 0, len(ids))
    trace: dict[str, Tensor] = {}
    _draft(runtime, ids, target.ids(f"prompt.{traced}.cont_ids")[0], trace)
    made, wanted = _numbers(runtime, trace)["logits"], golden[f"block.{traced}.logits"]
    errors = (made - wanted).norm(dim=1) / wanted.norm(dim=1)
    for name, part in (("median", 0.5), ("p90", 0.9)):
        limit, worst = golden.suggested(f"bf16_rel_l2_{name}"), errors.quantile(part).item()
        yield Check(quantity=f"logits {name}, given features", worst=worst, tolerance=limit, passed=worst <= limit)


def _numbers(runtime: Runtime, trace: dict[str, Tensor]) -> dict[str, Tensor]:
    spec, vocab = runtime.parts.drafter.spec, runtime.parts.spec.vocab  # type: ignore[union-attr]
    rows = [trace[f"draft_logits.{k}"][:vocab] for k in range(spec.drafts)]
    return {
        "hidden": trace["block_hidden"].float().cpu(),
        "base_logits": trace["block_base"][:, :vocab].float().cpu(),
        "logits": torch.stack(rows).cpu(),
        "confidence_logits": runtime.relay.confidence[: spec.drafts].clone().cpu(),
    }


def _rounds(runtime: Runtime, golden: Golden, target: Golden, judge: Judge) -> Iterator[Check]:
    """The drafts and confidences of every round, each over what is committed before it. From the last round to the
    first, because a block is written over the context behind its anchor."""
    made, wanted, sure = [], [], []
    for i in target.prompts:
        ids = target.ids(f"prompt.{i}.ids") + target.ids(f"prompt.{i}.cont_ids")
        length = len(target.ids(f"prompt.{i}.ids"))
        _read(runtime, ids)
        for number, start in reversed(list(enumerate(golden.ids(f"rounds.{i}.start")))):
            place = length + start - 1
            made.append(_draft(runtime, ids[:place], ids[place]))
            wanted.append([int(token) for token in golden[f"rounds.{i}.drafts"][number].tolist()])
            confidence = runtime.relay.confidence[: len(made[-1])].clone().cpu()
            sure.append((confidence, golden[f"rounds.{i}.confidence_logits"][number]))
    yield judge.chosen("drafts of every round", made, wanted, note=f"{len(made)} rounds")
    yield judge.near("confidence logits of every round", sure)


def _answers(runtime: Runtime, target: Golden) -> list[tuple[list[int], list[int]]]:
    """(ids, accept lengths) of each prompt."""
    engine, found = Engine(runtime), []
    for i in target.prompts:
        length = len(target.ids(f"prompt.{i}.cont_ids"))
        params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        answer = engine.generate(target.ids(f"prompt.{i}.ids"), params)
        found.append((answer.token_ids, list(answer.stats.accept_lengths)))
    return found


def _kept(golden: Golden, target: Golden, i: int) -> list[int]:
    """Accept lengths of prompt ``i``: the prompt's own token, then a round each, the last cut at the end."""
    total = len(target.ids(f"prompt.{i}.cont_ids"))
    rounds = zip(golden.ids(f"rounds.{i}.start"), golden.ids(f"rounds.{i}.accepted"), strict=True)
    return [1, *(min(accepted + 1, total - start) for start, accepted in rounds)]
