"""The trainer: float32 weights, bf16 products on a GPU, AdamW, a step that never holds more than a chunk of logits.

A step's numbers depend on seed, data and step alone, so a run that goes on from a checkpoint repeats, bit for bit on a
CPU, what it would have done without the pause.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..errors import ConfigError
from ..model.spec import ModelSpec
from . import checkpoints, losses, optim
from .batches import Batches, Micro, Part
from .data import Dataset, Sample, candidates, mixed
from .errors import NonFiniteError
from .export import export
from .log import Log
from .losses import Totals
from .model import Context, Drafter
from .options import TrainOptions

Source = Callable[[Sequence[int]], tuple[Tensor, Tensor]]  # ids -> taps [n, m * H], last hidden [n, H]
Evaluate = Callable[[Path, int], Mapping[str, Any]]  # the exported draft's directory, step -> what to log
PLACES = ("out", "data", "features", "start", "target")  # paths: a published draft says their names
Batch = Sequence[tuple[Micro, Sequence[Part]]]
Report = Callable[[int, int, Mapping[str, Any]], None]  # steps done, in all, the line just logged


@dataclass(frozen=True)
class Result:
    """How a run ended. ``finished`` False: it was asked to stop. lines: the last of each split ("train", "valid",
    "eval") of the metrics; draft: the exported directory."""

    steps: int
    finished: bool
    draft: Path
    lines: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


class Trainer:
    """One run. ``provenance`` is kept with every checkpoint; ``stop`` is asked between steps, and True saves and ends.

    ``evaluate`` gets the exported draft every ``eval_every`` steps and at the end.
    """

    def __init__(
        self,
        options: TrainOptions,
        model: Drafter,
        target: ModelSpec,
        dataset: Dataset,
        source: Source,
        *,
        provenance: Mapping[str, Any] | None = None,
        evaluate: Evaluate | None = None,
        report: Report | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.options, self.model, self._target, self._source = options, model, target, source
        self._evaluate, self._report, self._stop = evaluate, report, stop
        self._device = model.head.device
        self._objective = options.objective()
        usable = [s for s in dataset.samples if candidates(s.mask(options.max_length)).shape[0]]
        if len(usable) <= options.holdout:
            raise ConfigError(
                f"data = {options.data!r}: {len(usable)} of its {len(dataset.samples)} sequences have two supervised "
                f"tokens in a row, and {options.holdout} are held out; give more, or hold out fewer"
            )
        # the same for every seed, and a prompt's answers side by side
        usable.sort(key=lambda s: mixed("held", s.source.get("prompt", list(s.ids))))
        self._held, self._train = usable[: options.holdout], usable[options.holdout :]
        self._params = dict(model.named_parameters())
        self._trained = _trained(self._params, options.only)
        for p in self._trained.values():
            p.grad = torch.zeros_like(p)  # so that every tensor has optimizer state, used or not
        self._optimizers = optim.optimizers(self._trained, options)
        self._batches = Batches(self._train, options, model.spec.block, pin=self._device.type == "cuda")
        self._ema = {k: p.detach().clone() for k, p in self._params.items()} if options.ema else {}
        self.step = 0
        self._root, self._threads = Path(options.out), options.threads or torch.get_num_threads()
        self._kept = self._root / "checkpoints"
        self._binding = {
            "options": options.binding(), "data": dataset.digest, "target": target.name, "spec": repr(model.spec),
        }  # fmt: skip
        self._provenance = {**(provenance or {}), "binding": self._binding}

    @property
    def samples(self) -> list[Sample]:
        """The sequences that are trained on or held out: those with something supervised."""
        return self._train + self._held

    # -- the run -----------------------------------------------------------------------------------------------------

    def run(self) -> Result:
        """Go on from the newest checkpoint in ``out``, or start, until the last step or until ``stop`` says so."""
        o = self.options
        self._resume()
        with Log(self._root, self.step, tensorboard=o.tensorboard) as log:
            saved = self.step
            while self.step < o.steps and not self._stop():
                began = time.perf_counter()
                line = self._advance()
                self.step += 1
                last = self.step == o.steps
                line["seconds"] = time.perf_counter() - began
                if last or self.step % o.log_every == 0:
                    log.write("train", self.step, line)
                if last or (o.eval_every and self.step % o.eval_every == 0):
                    self._validate(log)
                if last or self.step % o.save_every == 0:
                    saved = self._save(log)
                if self._report is not None:
                    self._report(self.step, o.steps, line)
            self._batches.close()
            if saved != self.step:
                self._save(log)
            return Result(self.step, self.step == o.steps, self._export(), log.last())

    def _save(self, log: Log) -> int:
        log.sync()
        checkpoints.save(self._kept, self.step, self._state(), self._provenance, self.options.keep)
        return self.step

    def _validate(self, log: Log) -> None:
        if self._held:
            with self._averaged():
                log.write("valid", self.step, self.validate(self._held))
        if self._evaluate is not None:
            log.write("eval", self.step, dict(self._evaluate(self._export(), self.step)))

    def _export(self) -> Path:
        o, model = self.options, self.model
        vocab = (model.embed, model.head) if o.store_vocab else None
        state = self._ema or self._params
        said = {key: value for key, value in self._provenance.items() if key != "binding"}
        said["arguments"] = {
            key: Path(value).name if key in PLACES and value is not None else value
            for key, value in said.get("arguments", {}).items()
        }
        said |= {"data": self._binding["data"], "step": self.step}
        return export(
            self._root / "draft", model.spec, state, self._target, anchors=o.anchors, vocab=vocab, provenance=said
        )

    # -- a step ------------------------------------------------------------------------------------------------------

    def learning_rate(self, step: int) -> float:
        """Of step ``step``, from 0: linear growth, then half a cosine down to ``lr_floor`` of the highest."""
        o = self.options
        warm = math.ceil(o.warmup * o.steps)
        if step < warm:
            return o.lr * (step + 1) / warm
        share = (step - warm) / max(o.steps - warm, 1)
        return o.lr * (o.lr_floor + (1 - o.lr_floor) * 0.5 * (1 + math.cos(math.pi * share)))

    def _advance(self) -> dict[str, Any]:
        """One optimizer step; nothing is changed when a term or the gradient is not finite."""
        o = self.options
        batch = self._batches.of_step(self.step)
        whole = losses.totals([micro.mask for micro, _ in batch], self._objective.decay)
        for p in self._trained.values():
            assert p.grad is not None
            p.grad.zero_()
        weights = self._objective.weights(self.step)
        found = self._sums(batch, whole, weights)
        line: dict[str, Any] = dict(losses.metrics(found, whole)) if found else {}
        for term in losses.TERMS:
            if term in line and not math.isfinite(line[term]):
                self._not_finite(term, f"the term {term} is {line[term]}")
        norm = torch.nn.utils.clip_grad_norm_(list(self._trained.values()), o.clip if o.clip else math.inf)
        line["grad_norm"] = float(norm)
        if not math.isfinite(line["grad_norm"]):
            self._not_finite(*self._worst())
        line["loss"] = sum(weights[term] * line[term] for term in losses.TERMS if term in line)
        line["lr"] = self.learning_rate(self.step)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = line["lr"]
            optimizer.step()
        for name, average in self._ema.items():
            average.lerp_(self._params[name].detach(), 1 - o.ema)
        return line

    def _worst(self) -> tuple[str, str]:
        for name, p in self._trained.items():
            assert p.grad is not None
            if not bool(torch.isfinite(p.grad).all()):
                return f"gradient of {name}", f"the gradient of {name} is not finite"
        return "gradient norm", "the norm of the gradient is not finite"

    def _not_finite(self, term: str, what: str) -> None:
        found = checkpoints.steps(self._kept)
        rest = f"checkpoint {found[-1]} is intact" if found else "no checkpoint was written yet"
        raise NonFiniteError(
            f"step {self.step + 1}: {what}; {rest}. Lower lr ({self.options.lr}) or the term's weight, or look at the "
            "sequences of this step",
            step=self.step + 1,
            term=term,
        )

    def _sums(self, batch: Batch, whole: Totals, weights: Mapping[str, float] | None) -> dict[str, Tensor]:
        """Sums of terms and metrics over a batch; with ``weights`` the loss's gradient is added to the parameters."""
        found: dict[str, Tensor] = {}
        for micro, parts in batch:
            for part in self._parts(micro, parts, whole, weights):
                for name, value in part.items():
                    found[name] = found[name] + value.detach() if name in found else value.detach()
        return found

    def _parts(
        self, micro: Micro, parts: Sequence[Part], whole: Totals, weights: Mapping[str, float] | None
    ) -> Iterator[dict[str, Tensor]]:
        """Chunk by chunk of blocks. Keys and values of the context are made once: each chunk's gradient stops at them
        and is gathered there, and goes on into the context's own weights at the end."""
        model, device = self.model, self._device
        taps, hidden = self._features(micro, max(int(micro.anchors.max()), 1))
        ids = micro.ids.to(device)
        with self._cast():
            context = model.context(taps)
        leaves = [(k.detach(), v.detach()) for k, v in context]
        if weights is not None:
            for a, b in zip(context, leaves):
                for made, leaf in zip(a, b):
                    leaf.requires_grad_(made.requires_grad)
        for part in parts:
            part = part.to(device)
            with self._cast():
                cut: Context = [(k[:, :, : part.context], v[:, :, : part.context]) for k, v in leaves]
                blocks = model.blocks(cut, ids, part.anchors).flatten(0, 1).index_select(0, part.taken)
                draft = model.logits(blocks, part.previous)
                with torch.no_grad():
                    behind = hidden.flatten(0, 1).index_select(0, part.behind)
                    law = model.target_logits(behind.view(*part.mask.shape, -1))
                confidence = model.confidence(blocks, part.previous)
            found = losses.sums(self._objective, draft, law, confidence, part.labels, part.mask)
            if weights is not None:
                shares = [weights[name] * value for name, value in losses.terms(found, whole) if weights[name]]
                loss = torch.stack(shares).sum()
                if not loss.requires_grad:
                    raise ConfigError(
                        f"only = {self.options.only!r}: no term of the loss that has a weight reaches these tensors; "
                        "raise ce, l1, conf or accept, or train others"
                    )
                loss.backward()
            yield found
        if weights is not None:
            pairs = [(made, leaf) for a, b in zip(context, leaves) for made, leaf in zip(a, b) if leaf.grad is not None]
            if pairs:  # none where the context's weights are not trained
                torch.autograd.backward([made for made, _ in pairs], [leaf.grad for _, leaf in pairs])

    def _features(self, micro: Micro, rows: int) -> tuple[Tensor, Tensor]:
        """Padded taps [B, rows, m * H] of the context that blocks see, and last hidden [B, L, H]."""
        pairs = [self._source(sample.ids[: self.options.max_length]) for sample in micro.samples]
        if torch.get_num_threads() != self._threads:  # the target has its own; a sum's bits depend on them
            torch.set_num_threads(self._threads)
        pad = torch.nn.utils.rnn.pad_sequence
        taps = pad([taps[:rows].to(self._device) for taps, _ in pairs], batch_first=True)
        return taps, pad([hidden.to(self._device) for _, hidden in pairs], batch_first=True)

    def _cast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cuda", torch.bfloat16) if self._device.type == "cuda" else nullcontext()

    @torch.no_grad()
    def validate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Terms and metrics of the model as it is, over ``samples`` at anchors that never change."""
        batch = self._batches.of([(s, mixed(self.options.seed, "held", i)) for i, s in enumerate(samples)])
        whole = losses.totals([micro.mask for micro, _ in batch], self._objective.decay)
        return dict(losses.metrics(self._sums(batch, whole, None), whole))

    # -- state -------------------------------------------------------------------------------------------------------

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """The averaged weights in the model's place, where there are any."""
        kept = {name: self._params[name].detach().clone() for name in self._ema}
        try:
            for name, average in self._ema.items():
                self._params[name].data.copy_(average)
            yield
        finally:
            for name, value in kept.items():
                self._params[name].data.copy_(value)

    def _state(self) -> dict[str, Tensor]:
        """All that a later run needs, by name, on the CPU."""
        found = {f"model.{name}": p.detach() for name, p in self._params.items()}
        found |= {f"ema.{name}": average for name, average in self._ema.items()}
        found |= optim.state(self._optimizers, self._params)
        found["rng"] = torch.get_rng_state()
        return {name: tensor.cpu().contiguous() for name, tensor in found.items()}

    @torch.no_grad()
    def _resume(self) -> None:
        kept = checkpoints.newest(self._kept)
        if kept is None:
            if found := checkpoints.steps(self._kept):
                raise ConfigError(
                    f"{self._kept}: none of its {len(found)} checkpoints can be read; restore one, or remove the "
                    "directory to begin anew"
                )
            return
        _check_binding(json.loads(json.dumps(self._binding)), kept.provenance.get("binding", {}), self._root)
        for name, p in self._params.items():
            p.copy_(kept.tensors[f"model.{name}"])
            if self._ema:
                self._ema[name].copy_(kept.tensors[f"ema.{name}"])
        optim.restore(self._optimizers, self._params, kept.tensors, kept.step)
        torch.set_rng_state(kept.tensors["rng"])
        self.step = kept.step
        calls = ("started", "commit", "versions", "device")
        earlier = {"to_step": kept.step, **{key: kept.provenance[key] for key in calls if key in kept.provenance}}
        self._provenance["earlier"] = [*kept.provenance.get("earlier", []), earlier]


def _trained(params: Mapping[str, Parameter], only: str | None) -> dict[str, Parameter]:
    """Those whose names begin with one of ``only``'s words, the others without gradient; ConfigError for a word that
    none begins with."""
    words = ("",) if only is None else tuple(only.split(","))
    for word in words if only is not None else ():
        if not word or not any(name.startswith(word) for name in params):
            parts = ", ".join(sorted({name.split(".")[0] for name in params}))
            raise ConfigError(f"only = {only!r}: no tensor's name begins with {word!r}; they begin with {parts}")
    for name, p in params.items():
        p.requires_grad_(name.startswith(words))
    return {name: p for name, p in params.items() if p.requires_grad}


def _check_binding(own: dict[str, Any], kept: dict[str, Any], root: Path) -> None:
    """ConfigError for the first setting that differs from the checkpoint's."""
    pairs = [(key, own[key], kept.get(key)) for key in ("target", "data", "spec")]
    there = kept.get("options", {})
    pairs = [(key, value, there.get(key)) for key, value in own["options"].items()] + pairs
    for key, mine, its in pairs:
        if mine != its:
            raise ConfigError(
                f"{root} holds a run with {key} = {its!r}, this one has {mine!r}; choose another out, or the same {key}"
            )
