"""Shared by the tests of training: the conformance batch, and a target that is a function of the ids alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from soliton.checkpoint import open_checkpoint
from soliton.checkpoint.draft import open_draft
from soliton.model.draft_spec import shapes
from soliton.model.spec import ModelSpec
from soliton.train.batches import Micro, Part
from soliton.train.data import Dataset, Sample
from soliton.train.model import Drafter
from soliton.train.options import TrainOptions
from soliton.train.run import draft_spec
from soliton.train.trainer import Trainer

DATA = Path(__file__).resolve().parent / "data"
CASE = DATA / "dspark-ling-micro"


class Batch:
    """The conformance case's training batch in a dtype: model, arrays and values."""

    def __init__(self, dtype: torch.dtype) -> None:
        golden = json.loads((CASE / "golden.json").read_text(encoding="utf-8"))
        self.values: dict[str, Any] = golden["training"]
        self.suggested: dict[str, float] = golden["suggested"]
        draft, weights = open_draft(CASE), load_file(CASE / "model.safetensors")
        self.model = Drafter(draft.spec, weights["embed_tokens.weight"], weights["lm_head.weight"])
        self.model.load_state_dict({name: weights[name] for name in shapes(draft.spec)})
        self.model.to(dtype)
        arrays = load_file(CASE / "golden.safetensors")
        self.arrays = {k.removeprefix("train."): v for k, v in arrays.items() if k.startswith("train.")}
        self.taps, self.last = self.arrays["taps"].to(dtype), self.arrays["last_hidden"].to(dtype)
        self.ids, self.anchors = self.arrays["input_ids"].long(), self.arrays["anchors"].long()
        self.keep, self.loss_mask = self.arrays["block_keep"].bool(), self.arrays["loss_mask"].bool()
        self.mask = self.arrays["label_mask"].bool()
        self.samples = [sample(row.tolist(), mask.tolist()) for row, mask in zip(self.ids, self.loss_mask)]

    def trainer(self, **options: Any) -> Trainer:
        """A trainer over the batch that computes its features from the golden ones."""

        def source(ids: Sequence[int]) -> tuple[Tensor, Tensor]:
            at = [list(s.ids) for s in self.samples].index(list(ids))
            return self.taps[at], self.last[at]

        made = TrainOptions(**{"target": "ling-micro", "data": "-", "out": "-", **options})
        data = Dataset(tuple(self.samples), {}, "0")
        return Trainer(made, self.model, target(), data, source)

    def batch(self, chunk: int = 32) -> list[tuple[Micro, list[Part]]]:
        """As the trainer takes it."""
        micro = self.micro()
        return [(micro, list(micro.parts(chunk)))]

    def micro(self) -> Micro:
        """The batch with its fixed anchors."""
        return Micro(tuple(self.samples), self.ids, self.anchors, self.mask)


def sample(ids: Sequence[int], mask: Sequence[Any]) -> Sample:
    """A sample from a loss mask."""
    edges = [i for i in range(len(mask) + 1) if (i and bool(mask[i - 1])) != (i < len(mask) and bool(mask[i]))]
    return Sample(tuple(ids), tuple(zip(edges[::2], edges[1::2])))


def target() -> ModelSpec:
    """ling-micro's."""
    return open_checkpoint(DATA / "ling-micro").spec


def toy_options(out: Path, **values: Any) -> TrainOptions:
    """Settings of a run that takes a moment."""
    given: dict[str, Any] = {
        "target": "toy", "data": "-", "out": str(out), "block": 3, "layers": 1, "rank": 8, "width": 32, "steps": 12,
        "batch": 3, "micro": 2, "anchors": 6, "chunk": 4, "save_every": 1, "lr": 3e-3, "max_length": 20,
    }  # fmt: skip
    return TrainOptions(**(given | values))


def toy_source(taps: int, hidden: int, vocab: int) -> Any:
    """Features that are fixed functions of the ids: no target has to be loaded."""
    g = torch.Generator().manual_seed(5)
    fused, last = torch.randn(vocab, taps * hidden, generator=g), torch.randn(vocab, hidden, generator=g)

    def source(ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        rows = torch.tensor(list(ids))
        return fused[rows], last[rows] * 4

    return source


def toy(out: Path, *, source: Any = None, sequences: int = 7, **values: Any) -> Trainer:
    """A trainer over seven sequences of ling-micro's vocabulary."""
    keys = ("evaluate", "report", "stop", "provenance")
    extra = {key: values.pop(key) for key in keys if key in values}
    options, spec, g = toy_options(out, **values), target(), torch.Generator().manual_seed(3)
    draft = draft_spec(options, spec)
    rows = [torch.randint(0, 40, (14 + i,), generator=g).tolist() for i in range(sequences)]
    data = Dataset(tuple(Sample(tuple(row), ((4, len(row)),)) for row in rows), {}, "toy")
    embed, head = (torch.randn(spec.vocab, spec.hidden, generator=g) * 0.2 for _ in range(2))
    model = Drafter(draft, embed, head, seed=options.seed)
    chosen = source or toy_source(len(draft.taps), spec.hidden, spec.vocab)
    return Trainer(options, model, spec, data, chosen, **extra)


def curve(out: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics without their times."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]
