"""Compares the engine with the reference outputs of a conformance case, quantity by quantity.

A case is a checkpoint directory with ``golden.json`` (tolerances under ``suggested``) and ``golden.safetensors``: for
a few prompts the logits, hidden states, greedy continuation, intermediates of one prompt, and the rounds of its MTP
layer. In float32 every number has to agree within a tolerance and every id, expert set and accept length exactly. In
bfloat16 the logits have to agree in their relative error's median and 90th percentile; a continuation may part only
where a choice was close; numbers without a stated tolerance are shown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import Checkpoint, open_checkpoint
from ..config import EngineConfig, bind
from ..engine import Engine
from ..errors import ConfigError, UnsupportedError
from ..model.prefill import BLOCK, logits_of, mtp_pass
from ..model.spec import MoeSpec
from ..runtime import Runtime, load_runtime
from ..sampling.params import SamplingParams
from .conform_draft import draft_checks
from .golden import Check, Exact, Golden, Judge, Rounded, Spoken, margins, same

STEPS = 5  # drafts a round of the reference
# How a prompt is cut: as few passes as there can be, uneven pieces, one piece short of a pass, token by token.
PIECES = {"one piece": 65536, "pieces of 7": 7, f"pieces of {BLOCK - 1}": BLOCK - 1, "token by token": 1}


@dataclass(frozen=True, kw_only=True)
class Report:
    """All checks of one case in one dtype. ``skipped``: why nothing was compared, empty if something was."""

    case: str
    dtype: str
    checks: tuple[Check, ...] = ()
    skipped: str = ""

    @property
    def failed(self) -> bool:
        """Whether any check failed."""
        return any(check.passed is False for check in self.checks)

    def document(self) -> dict[str, Any]:
        """For ``--json``; a difference that is no number is null and has failed."""
        body = dataclasses.asdict(self)
        for check in body["checks"]:
            check["worst"] = check["worst"] if check["worst"] == check["worst"] else None
        return {**body, "failed": self.failed}


def find_cases(paths: Iterable[Path]) -> list[Path]:
    """The case directories among ``paths``; a directory of cases stands for all of them."""
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            raise ConfigError(f"{path}: no such directory; give a directory with golden.json, or one of such")
        inner = sorted(child for child in path.iterdir() if (child / "golden.json").is_file())
        if not inner and not (path / "golden.json").is_file():
            raise ConfigError(f"{path}: no golden.json here or one level below; give a case, or a directory of cases")
        found += inner if inner and not (path / "golden.json").is_file() else [path]
    return found


def conform(path: Path, *, dtype: str = "float32", device: str = "auto", threads: int | None = None) -> Report:
    """Compare one case. Kinds that this version does not decode come back as a skipped report; CheckpointError for
    reference files that do not hold what the model calls for."""
    golden = Golden.read(path)
    if "target" in golden.data:
        drafted = tuple(draft_checks(path, golden, dtype, device, threads))
        return Report(case=path.name, dtype=dtype, checks=drafted)
    try:
        checkpoint = open_checkpoint(path)
        checks = tuple(_all(golden, checkpoint, dtype, device, threads))
    except UnsupportedError as error:
        return Report(case=path.name, dtype=dtype, skipped=f"not supported yet: {error}")
    return Report(case=path.name, dtype=dtype, checks=checks)


def _all(golden: Golden, checkpoint: Checkpoint, dtype: str, device: str, threads: int | None) -> Iterator[Check]:
    def load(**settings: Any) -> Runtime:
        common = {"model": checkpoint.name, "dtype": dtype, "device": device, "threads": threads}
        config = bind(EngineConfig, flags={**common, "prefix_reuse": "off", **settings}, env={}, file=None)
        return load_runtime(config, checkpoint)

    exact = dtype == "float32"
    judge = Exact(golden) if exact else Rounded(golden)
    for layer in checkpoint.spec.layers:
        if isinstance(layer.mlp, MoeSpec):
            golden[f"trace.router_experts.{layer.index}"]  # what is missing would not be compared
    plain = load(speculation="off")
    for how, chunk in PIECES.items():
        plain.prefill.chunk = chunk
        yield from _forced(plain, golden, judge, how)
    plain.prefill.chunk = PIECES["one piece"]
    yield from _trace(plain, golden, judge)
    said = _generate(plain, golden)
    yield judge.continuation("continuation, plain", said.ids)
    yield judge.logprobs("log-probabilities, plain", said)
    if checkpoint.spec.mtp is not None:
        nextn = load(speculation="nextn", speculative_num_steps=STEPS)
        for how, chunk in PIECES.items():
            nextn.prefill.chunk = plain.prefill.chunk = chunk  # on a GPU other pieces have other last bits
            spoken = _generate(nextn, golden)
            yield same(f"continuation, NEXTN = plain, {how}", spoken.ids, _generate(plain, golden).ids)
            yield judge.continuation(f"continuation, NEXTN, {how}", spoken.ids)
            kept = [golden.kept(i) for i in golden.prompts]
            yield judge.chosen(f"accept lengths, {how}", spoken.accept_lengths, kept)
        yield judge.logprobs("log-probabilities, NEXTN", spoken)
        nextn.prefill.chunk = PIECES["one piece"]
        yield from _mtp(nextn, golden, judge)
    yield from margins(golden)


@torch.inference_mode()
def _read(runtime: Runtime, ids: Sequence[int], trace: dict[str, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """(hidden, logits) of every position from an empty stream, float32 on the CPU."""
    runtime.stream.clear()
    hidden, logits = [], []
    for step in runtime.prefill.read(ids, 0, len(ids), trace=trace):
        hidden.append(step.hidden.float().cpu())
        logits.append(logits_of(runtime.weights, runtime.checkpoint.spec, step.hidden, step.tape).cpu())
    return torch.cat(hidden), torch.cat(logits)


def _forced(runtime: Runtime, golden: Golden, judge: Judge, how: str) -> Iterator[Check]:
    """Prompts with their golden continuations fed back: logits and hidden states where the reference has them."""
    pairs: dict[str, list[tuple[Tensor, Tensor]]] = {"logits": [], "hidden": [], "continuation logits": []}
    for i in golden.prompts:
        ids, following = golden.ids(f"prompt.{i}.ids"), golden.ids(f"prompt.{i}.cont_ids")
        hidden, logits = _read(runtime, ids + following[:-1])
        at = golden[f"prompt.{i}.logit_positions"].long()
        pairs["logits"].append((logits[at], golden[f"prompt.{i}.logits"]))
        pairs["hidden"].append((hidden[at], golden[f"prompt.{i}.hidden"]))
        pairs["continuation logits"].append((logits[len(ids) - 1 :], golden[f"prompt.{i}.cont_logits"]))
    yield from judge.forced(pairs, how)


def _trace(runtime: Runtime, golden: Golden, judge: Judge) -> Iterator[Check]:
    """Every intermediate of the traced prompt, and what the stream holds after it."""
    number = golden.data["trace_prompt"]
    ids, spec = golden.ids(f"prompt.{number}.ids"), runtime.checkpoint.spec
    trace: dict[str, Tensor] = {}
    _read(runtime, ids, trace)
    stream = runtime.stream
    for place, layer in enumerate(spec.kda_layers):
        trace[f"kda_state.{layer}"] = stream.states[0, place]
        tail = stream.windows[: stream.tail, place]
        widths = [golden[f"trace.conv_state.{layer}.{part}"].shape[1] for part in "qkv"]
        trace |= {f"conv_state.{layer}.{part}": piece for part, piece in zip("qkv", tail.split(widths, 1), strict=True)}
    routed = [name for name in golden.arrays if name.startswith("trace.router_experts.")]
    for name, layer in sorted((name, int(name.rpartition(".")[2])) for name in routed):
        experts = spec.layers[layer].mlp.experts  # type: ignore[union-attr]
        for store, source in ((trace, trace), (golden.arrays, golden.arrays)):
            at = "" if store is trace else "trace."
            chosen, weights = source[f"{at}router_experts.{layer}"].long(), source[f"{at}router_weights.{layer}"]
            # Slots may come in another order; over all experts a weight has its place.
            dense = torch.zeros(len(ids), experts).scatter_(1, chosen.cpu(), weights.float().cpu())
            store[f"{at}router_weights.{layer}"] = dense
        assert name in golden
    yield judge.experts(trace)
    groups: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for name in sorted(golden.arrays):
        _, _, key = name.partition("trace.")
        kind = ".".join(part for part in key.split(".") if not part.isdigit())
        if not key or kind in ("router_experts", "router_margin", "mtp_logits", "mtp_hidden"):
            continue
        groups.setdefault(kind, []).append((trace[key].float().cpu(), golden[name]))
    for kind, pairs in groups.items():
        yield judge.near(f"trace {kind}", pairs, note=f"{len(pairs)} arrays")


def _generate(runtime: Runtime, golden: Golden) -> Spoken:
    """The engine's own greedy answers, one a prompt."""
    engine = Engine(runtime)
    answers = []
    for i in golden.prompts:
        length = len(golden.ids(f"prompt.{i}.cont_ids"))
        params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, logprobs=0)
        answers.append(engine.generate(golden.ids(f"prompt.{i}.ids"), params))
    return Spoken(
        ids=[answer.token_ids for answer in answers],
        logprobs=[[entry.logprob for entry in answer.logprobs or []] for answer in answers],
        accept_lengths=[list(answer.stats.accept_lengths) for answer in answers],
    )


def _mtp(runtime: Runtime, golden: Golden, judge: Judge) -> Iterator[Check]:
    """The MTP layer alone: over the traced prompt, its first chain, and the chain of every round."""
    ids = golden.ids(f"prompt.{golden.data['trace_prompt']}.ids")
    hidden, _ = _read(runtime, ids)
    stream, parts, spec = runtime.stream, runtime.parts, runtime.checkpoint.spec
    assert stream.draft_kv is not None
    with torch.inference_mode():
        following = torch.tensor(ids[1:], device=parts.device)
        behind = hidden[:-1].to(device=parts.device, dtype=parts.dtype)
        out = mtp_pass(parts.immediate, runtime.weights, spec, following, behind, 0, stream.draft_kv, parts.turn)
        logits = logits_of(runtime.weights, spec, out, parts.immediate()).cpu()
    yield judge.near("trace mtp_hidden", [(out.float().cpu(), golden["trace.mtp_hidden"])])
    yield judge.near("trace mtp_logits", [(logits, golden["trace.mtp_logits"])])
    chains, values, made, wanted = [], [], [], []
    for i in golden.prompts:
        prompt, following_ids = golden.ids(f"prompt.{i}.ids"), golden.ids(f"prompt.{i}.cont_ids")
        chain, rows = runtime.draft_chain(prompt, STEPS)
        chains.append(chain)
        values.append((rows, golden[f"mtp.{i}.draft_logits"]))
        for start, drafts in zip(golden.ids(f"mtp.{i}.round_start"), golden[f"mtp.{i}.round_drafts"], strict=True):
            done = prompt + following_ids[: start - 1]
            made.append(runtime.drafts_after(done, following_ids[start - 1], STEPS))
            wanted.append([int(token) for token in drafts.tolist()])
    yield judge.chosen("MTP draft ids", chains, [golden.ids(f"mtp.{i}.draft_ids") for i in golden.prompts])
    yield judge.near("MTP draft logits", values)
    yield judge.chosen("MTP drafts of every round", made, wanted, note=f"{len(made)} rounds")
