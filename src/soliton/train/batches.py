"""Which sequences and anchors a step takes, as tensors, made a step ahead of the device in a thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from . import losses
from .data import Sample, mixed, order, sample_anchors
from .model import places
from .options import TrainOptions

Chosen = Sequence[tuple[Sample, int]]  # sequences and the seeds of their anchors


@dataclass(frozen=True)
class Part:
    """A chunk of blocks of every sequence; N of its blocks have a supervised row. context: rows of context they see;
    anchors int64 [B, A]; taken int64 [N], places in [B * A]; previous and labels int64 [N, g], tokens before and at
    each prediction; behind int64 [N * g], places in [B * L] of the target's hidden states; mask bool [N, g]."""

    context: int
    anchors: Tensor
    taken: Tensor
    previous: Tensor
    labels: Tensor
    behind: Tensor
    mask: Tensor

    def to(self, device: torch.device) -> Part:
        """On ``device``, without waiting for it."""
        moved: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in moved.items():
            if isinstance(value, Tensor):
                moved[name] = value.to(device, non_blocking=True)
        return Part(**moved)


@dataclass(frozen=True)
class Micro:
    """Sequences computed at once, padded. ids int64 [B, L]; anchors int64 [B, A] ascending and mask bool [B, A, g] on
    the CPU."""

    samples: tuple[Sample, ...]
    ids: Tensor
    anchors: Tensor
    mask: Tensor

    def parts(self, chunk: int, *, pin: bool = False) -> Iterator[Part]:
        """Chunk by chunk of blocks, without those that have nothing supervised."""
        length = self.ids.shape[1]
        for start in range(0, self.anchors.shape[1], chunk):
            anchors, mask = self.anchors[:, start : start + chunk], self.mask[:, start : start + chunk]
            use = mask.any(-1)
            if not bool(use.any()):
                continue
            at = places(anchors, mask.shape[-1], length)[use]
            sequence = use.nonzero()[:, :1]
            found = (
                anchors, use.flatten().nonzero()[:, 0], self.ids[sequence, at],
                self.ids[sequence, (at + 1).clamp(max=length - 1)], (sequence * length + at).flatten(), mask[use],
            )  # fmt: skip
            yield Part(int(anchors.max()), *((one.contiguous().pin_memory() for one in found) if pin else found))


class Batches:
    """Batches of the sequences to train on, each a function of options and step alone."""

    def __init__(self, samples: Sequence[Sample], options: TrainOptions, block: int, *, pin: bool = False) -> None:
        self._samples, self._options, self._block, self._pin = samples, options, block, pin
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._next: tuple[int, Future[list[tuple[Micro, list[Part]]]]] | None = None

    def of_step(self, step: int) -> list[tuple[Micro, list[Part]]]:
        """The batch of ``step``, from 0; the next one's making begins."""
        ready = self._next
        made = ready[1].result() if ready is not None and ready[0] == step else self._of_step(step)
        self._next = step + 1, self._worker.submit(self._of_step, step + 1)
        return made

    def close(self) -> None:
        """Wait for the batch in the making, and forget it."""
        self._worker.shutdown()
        self._next = None

    def _of_step(self, step: int) -> list[tuple[Micro, list[Part]]]:
        o = self._options
        places = order(o.seed, len(self._samples), step * o.batch, o.batch)
        return self.of([(self._samples[index], mixed(o.seed, "anchors", epoch, index)) for epoch, index in places])

    def of(self, chosen: Chosen) -> list[tuple[Micro, list[Part]]]:
        """Padded together ``micro`` at a time."""
        o = self._options
        micros = [self._micro(chosen[at : at + o.micro]) for at in range(0, len(chosen), o.micro)]
        return [(micro, list(micro.parts(o.chunk, pin=self._pin))) for micro in micros]

    def _micro(self, chosen: Chosen) -> Micro:
        o = self._options
        masks = [sample.mask(o.max_length) for sample, _ in chosen]
        picked = [sample_anchors(mask, o.anchors, seed) for mask, (_, seed) in zip(masks, chosen)]
        pad = torch.nn.utils.rnn.pad_sequence
        ids = [torch.tensor(sample.ids[: o.max_length], dtype=torch.int64) for sample, _ in chosen]
        anchors = pad(picked, batch_first=True)
        keep = pad([torch.ones_like(p, dtype=torch.bool) for p in picked], batch_first=True)
        mask = losses.supervised(pad(masks, batch_first=True), anchors, keep, self._block)
        return Micro(tuple(sample for sample, _ in chosen), pad(ids, batch_first=True), anchors, mask)
