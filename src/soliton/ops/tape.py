"""A flat list of bound op calls over fixed buffers.

Model code is written once against this class. Recording (decode): ``new`` hands out static buffers and ``call`` notes
the call; ``run`` replays the list, a graph executor can capture it, a census can name its kernels. Immediate
(prefill): ``new`` allocates and ``call`` executes at once, for any number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import device as where
from .select import Choice


@dataclass(frozen=True)
class Entry:
    """One bound call: the op, the variant that serves it, its callable and its arguments; ``ready`` makes the call."""

    op: str
    variant: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    ready: Callable[[], Any]

    def __str__(self) -> str:
        parts = [
            f"{str(a.dtype).removeprefix('torch.')}{list(a.shape)}" if isinstance(a, Tensor) else type(a).__name__
            for a in self.args
        ]
        return f"{self.op}:{self.variant}({', '.join(parts)})"


class Tape:
    """See the module's docstring. ``trace``: immediate mode only, collects named intermediate tensors."""

    def __init__(
        self,
        choices: Mapping[str, Choice],
        device: torch.device,
        dtype: torch.dtype,
        *,
        record: bool,
        trace: dict[str, Tensor] | None = None,
    ) -> None:
        assert not (record and trace is not None), "a trace needs values, a recording has none"
        self.choices, self.device, self.dtype, self.record = choices, device, dtype, record
        self.fused = record and where.has_kernels(device)  # the step's own kernels are there; else ops one by one
        self.bulk = not record and device.type == "cuda"  # the many rows of a prompt go through libraries
        self.entries: list[Entry] = []
        self.scope: int | None = None  # the layer being computed, part of the names of notes
        self._trace = trace

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A buffer of ``shape``: zeroed and owned by the recording, or fresh and unwritten in immediate mode."""
        make = torch.zeros if self.record else torch.empty
        return make(*shape, dtype=dtype or self.dtype, device=self.device)

    def call(self, op: str, *args: Any) -> None:
        """Bind (recording) or run (immediate) the chosen variant of ``op``."""
        choice = self.choices[op]
        if self.record:
            ready = partial(choice.function, *args) if choice.bind is None else choice.bind(*args)
            self.entries.append(Entry(op, choice.variant, choice.function, args, ready))
        else:
            choice.function(*args)

    def do(self, name: str, function: Callable[..., Any], *args: Any) -> None:
        """Bind or run a step of the program that is no op of a model (verdict, publishing, ...)."""
        if self.record:
            self.entries.append(Entry(name, "torch", function, args, partial(function, *args)))
        else:
            function(*args)

    def finish(self, live: Tensor | None) -> None:
        """On a GPU: turn the recorded products into sweeps over ``live`` rows (int64 [1]). Elsewhere nothing."""
        if not self.fused:
            return
        from .fuse import fuse

        def entry(op: str, call: Callable[[], Any]) -> Entry:
            return Entry(op, str(call), call, (), call)

        self.entries = fuse(self.entries, live, entry=entry)

    def run(self) -> None:
        """Replay the recorded calls in order."""
        for entry in self.entries:
            entry.ready()

    def note(self, name: str, value: Tensor) -> None:
        """Keep a copy of an intermediate for a trace as ``name.layer``; free when nobody asked."""
        if self._trace is not None:
            self._trace[name if self.scope is None else f"{name}.{self.scope}"] = value.detach().clone()

    def reread(self) -> None:
        """After weights were written in place: calls that keep something made of them make it again."""
        for entry in self.entries:
            again = getattr(entry.function, "reread", None)
            if again is not None:
                again()

    def dump(self) -> list[str]:
        """The recording in words, one line a call: equal dumps mean an equal step."""
        return [str(entry) for entry in self.entries]
