"""What runs a program's phases: one call after another (any device, and the oracle of a graph), or one graph a step."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..context.stream import Stream
from .program import Program
from .relay import Relay

WARM_UPS = 2


@dataclass(frozen=True)
class Slot:
    """One step's outputs in host memory: tokens, (taken, reason, length, rows), and log-probabilities if asked."""

    tokens: list[int]
    meta: tuple[int, int, int, int]
    logprob: list[float]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]


class Executor(Protocol):
    """Launches steps and hands over what they published."""

    name: str

    def launch(self, program: Program) -> None:
        """Enqueue one step."""
        ...

    def publish(self, slot: int, logprobs: bool) -> None:
        """Start bringing the step just launched, which writes this ring slot, to the host."""
        ...

    def read(self, slot: int, logprobs: bool) -> Slot:
        """What the step of this ring slot published; the one place where the host waits for the device."""
        ...


class _Held:
    """Fixed addresses: asserted before every launch."""

    def __init__(self, relay: Relay, stream: Stream) -> None:
        self._relay, self._stream = relay, stream
        self._addresses = self._current()

    def check(self) -> None:
        assert self._addresses == self._current(), "a relay or stream buffer moved since the program was built"

    def _current(self) -> dict[str, int]:
        stream = {name: t.data_ptr() for name, t in self._stream.tensors().items()}
        return self._relay.addresses() | stream


def _read(ring: dict[str, Tensor], slot: int, logprobs: bool) -> Slot:
    taken, reason, length, rows = ring["ring_meta"][slot].tolist()
    logged = [ring[n][slot].tolist() if logprobs else [] for n in ("ring_logprob", "ring_top_ids", "ring_top_logprobs")]
    return Slot(ring["ring_tokens"][slot].tolist(), (taken, reason, length, rows), *logged)


RING = ("ring_meta", "ring_tokens", "ring_logprob", "ring_top_ids", "ring_top_logprobs")


class EagerExecutor:
    """Replays a program's tapes. ``early``: skip what a raised stop flag or a phase's guard makes void, which costs
    nothing where scalars are in host memory; off, every phase runs and must leave a frozen stream as it is."""

    name = "eager"

    def __init__(self, relay: Relay, stream: Stream, *, early: bool) -> None:
        self._relay, self._early = relay, early
        self._held = _Held(relay, stream)

    @torch.inference_mode()
    def launch(self, program: Program) -> None:
        """Run one step."""
        self._held.check()
        relay = self._relay
        frozen = self._early and bool(relay.stopped)
        if frozen:
            relay.taken.zero_()
            relay.reason.zero_()
            relay.new_tokens.fill_(-1)
        for phase in program.phases:
            void = frozen or (phase.guard is not None and self._early and not int(phase.guard))
            if not void or phase.name == "publish":
                phase.tape.run()

    def publish(self, slot: int, logprobs: bool) -> None:
        """Nothing: ``read`` looks at the ring itself."""

    def read(self, slot: int, logprobs: bool) -> Slot:
        """See Executor."""
        return _read({name: getattr(self._relay, name) for name in RING}, slot, logprobs)


class GraphExecutor:
    """Replays one CUDA graph a step, or one a phase (``phased``, for census). Outputs go to pinned memory on a side
    stream; ``read`` waits for the event behind them.

    ``capture`` takes every program after warm-ups; a program whose capture fails runs eagerly from then on, with one
    warning that says why. A graph belongs to its relay, stream and program and is never used for others.
    """

    name = "graph"

    def __init__(self, relay: Relay, stream: Stream, *, phased: bool = False) -> None:
        self._relay, self._phased = relay, phased
        self._held = _Held(relay, stream)
        self._eager = EagerExecutor(relay, stream, early=False)
        self._graphs: dict[int, list[Any]] = {}
        self._side = torch.cuda.Stream()
        slots = relay.ring_meta.shape[0]
        self._pinned = {name: getattr(relay, name).cpu().pin_memory() for name in RING}
        self._done = [torch.cuda.Event() for _ in range(slots)]
        self._copied = [torch.cuda.Event() for _ in range(slots)]

    @torch.inference_mode()
    def capture(self, programs: Iterable[Program]) -> None:
        """Warm up and capture. The relay's and the stream's contents are undefined afterwards."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        for program in programs:
            try:
                with torch.cuda.stream(stream):
                    for _ in range(WARM_UPS):
                        self._eager.launch(program)
                torch.cuda.synchronize()
                tapes = [phase.tape for phase in program.phases]
                self._graphs[id(program)] = [
                    self._captured(part, stream) for part in ([[t] for t in tapes] if self._phased else [tapes])
                ]
            except RuntimeError as error:
                torch.cuda.synchronize()
                warnings.warn(
                    f"the step {program.mode} could not be captured and runs call by call: {error}", stacklevel=2
                )
        torch.cuda.current_stream().wait_stream(stream)
        gc.collect()
        gc.freeze()

    def _captured(self, tapes: list[Any], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for tape in tapes:
                tape.run()
        return graph

    @torch.inference_mode()
    def launch(self, program: Program) -> None:
        """Enqueue one step and the copy of its outputs; reads nothing of the device."""
        self._held.check()
        graphs = self._graphs.get(id(program))
        if graphs is None:
            self._eager.launch(program)
        else:
            for graph in graphs:
                graph.replay()

    def publish(self, slot: int, logprobs: bool) -> None:
        """Copy a ring slot to pinned memory behind the step just launched."""
        self._done[slot].record()
        with torch.cuda.stream(self._side):
            self._side.wait_event(self._done[slot])
            for name in RING if logprobs else RING[:2]:
                self._pinned[name][slot].copy_(getattr(self._relay, name)[slot], non_blocking=True)
            self._copied[slot].record()

    def read(self, slot: int, logprobs: bool) -> Slot:
        """See Executor."""
        self._copied[slot].synchronize()  # the one allowed wait of the loop
        return _read(self._pinned, slot, logprobs)
