"""How far the host runs ahead of the device in the loop, and what the device waits between steps."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ..step.executor import Executor, Guide, Slot
from ..step.program import Program


@dataclass(frozen=True)
class LoopTimes:
    """Of the steps of a loop, in microseconds. idle: from the end of each on the device to the start of the next. lead:
    from the moment at which each has been launched to its start on the device; near zero or below it the device waits
    for the host. whole: from the first start to the last end, over the steps."""

    idle: tuple[float, ...]
    lead: tuple[float, ...]
    whole: float

    def histogram(self) -> dict[str, int]:
        """How many leads are at most each edge, and above the edge before."""
        edges = (0, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
        spans = zip((-math.inf, *edges[:-1]), edges, strict=True)
        counts = [sum(low < lead <= high for lead in self.lead) for low, high in spans]
        named = dict(zip((f"<={edge}" for edge in edges), counts, strict=True))
        return {**named, f">{edges[-1]}": len(self.lead) - sum(counts)}


class Watched:
    """An executor with an event on either side of each step."""

    def __init__(self, executor: Executor) -> None:
        self.executor, self.name = executor, executor.name
        self._steps: list[tuple[torch.cuda.Event, torch.cuda.Event, float]] = []
        self._zero = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        self._zero.record()
        self._zero.synchronize()
        self._clock = time.perf_counter()

    def capture(self, programs: Iterable[Program]) -> None:
        """See Executor."""
        self.executor.capture(programs)

    def guided(self, program: Program, guide: Guide) -> None:
        """See Executor."""
        self.executor.guided(program, guide)

    def launch(self, program: Program) -> None:
        """See Executor."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self.executor.launch(program)
        end.record()
        self._steps.append((start, end, time.perf_counter() - self._clock))

    def publish(self, slot: int, logprobs: bool) -> None:
        """See Executor."""
        self.executor.publish(slot, logprobs)

    def read(self, slot: int, logprobs: bool) -> Slot:
        """See Executor."""
        return self.executor.read(slot, logprobs)

    def times(self, skip: int) -> LoopTimes:
        """Of all steps but the first ``skip``, which fill the loop."""
        torch.cuda.synchronize()
        steps = self._steps[skip:]
        starts = [float(self._zero.elapsed_time(start)) * 1e3 for start, _, _ in steps]
        ends = [float(self._zero.elapsed_time(end)) * 1e3 for _, end, _ in steps]
        return LoopTimes(
            idle=tuple(later - end for end, later in zip(ends[:-1], starts[1:], strict=True)),
            lead=tuple(start - told * 1e6 for start, (_, _, told) in zip(starts, steps, strict=True)),
            whole=(ends[-1] - starts[0]) / len(steps),
        )
