"""What runs a program's phases: one call after another (any device, and the oracle of a graph), or one graph a step."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..context.stream import Stream
from ..ops.tape import Tape
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


class Guide(Protocol):
    """What may come next in an answer, by the host; see sampling.grammar."""

    def fill(self, drafts: Sequence[int], masks: Tensor) -> None:
        """masks[i], int32 [R, words] on the host, for the token after the first i drafts."""
        ...


class Executor(Protocol):
    """Launches steps and hands over what they published."""

    name: str

    def capture(self, programs: Iterable[Program]) -> None:
        """Make programs ready; relay and stream hold nothing to rely on afterwards."""
        ...

    def launch(self, program: Program) -> None:
        """Enqueue one step."""
        ...

    def guided(self, program: Program, guide: Guide) -> None:
        """Enqueue one step of a guided program; its drafts are read in between and their masks handed over."""
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


DRAFTED = ("tokens", "rows")
RING = ("ring_meta", "ring_tokens", "ring_logprob", "ring_top_ids", "ring_top_logprobs")


class EagerExecutor:
    """Replays a program's tapes. ``early``: skip what a raised stop flag or a phase's guard makes void, which costs
    nothing where scalars are in host memory; off, every phase runs and must leave a frozen stream as it is."""

    name = "eager"

    def __init__(self, relay: Relay, stream: Stream, *, early: bool) -> None:
        self._relay, self._early = relay, early
        self._held = _Held(relay, stream)

    def capture(self, programs: Iterable[Program]) -> None:
        """Nothing: tapes are ready as they are."""

    def launch(self, program: Program) -> None:
        """Run one step."""
        self._run(program, None)

    def guided(self, program: Program, guide: Guide) -> None:
        """See Executor."""
        self._run(program, guide)

    @torch.inference_mode()
    def _run(self, program: Program, guide: Guide | None) -> None:
        self._held.check()
        relay = self._relay
        frozen = self._early and bool(relay.stopped)
        if frozen:
            relay.taken.zero_()
            relay.reason.zero_()
            relay.new_tokens.fill_(-1)
        for phase in program.phases:
            if phase.name == "verdict" and guide is not None and not frozen:
                masks = relay.allowed.cpu()  # on a CPU itself
                guide.fill(relay.tokens[1 : int(relay.rows)].tolist(), masks)
                relay.allowed.copy_(masks)
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
    stream; ``read`` waits for the event behind them. A guided step is three graphs: while the second verifies, the host
    reads the drafts of the first and makes the masks of the third.

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
        names = (*RING, *DRAFTED, "allowed")
        self._pinned = {name: getattr(relay, name).cpu().pin_memory() for name in names}
        self._drafted = torch.cuda.Event()
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
                self._graphs[id(program)] = [self._captured(part, stream) for part in self._parts(program)]
            except RuntimeError as error:
                torch.cuda.synchronize()
                warnings.warn(
                    f"the step {program.mode} could not be captured and runs call by call: {error}", stacklevel=2
                )
        torch.cuda.current_stream().wait_stream(stream)
        gc.collect()
        gc.freeze()

    def _parts(self, program: Program) -> list[list[Tape]]:
        tapes, names = [phase.tape for phase in program.phases], [phase.name for phase in program.phases]
        if program.mode.grammar:
            drafted, verified = names.index("verify"), names.index("verdict")
            return [tapes[:drafted], tapes[drafted:verified], tapes[verified:]]
        return [[tape] for tape in tapes] if self._phased else [tapes]

    def _captured(self, tapes: list[Tape], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
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

    @torch.inference_mode()
    def guided(self, program: Program, guide: Guide) -> None:
        """See Executor. The one wait is for the draft phase, behind which the device verifies."""
        self._held.check()
        graphs = self._graphs.get(id(program))
        if graphs is None:
            self._eager.guided(program, guide)
            return
        draft, verify, rest = graphs
        draft.replay()
        for name in DRAFTED:
            self._pinned[name].copy_(getattr(self._relay, name), non_blocking=True)
        self._drafted.record()
        verify.replay()
        self._drafted.synchronize()
        masks = self._pinned["allowed"]  # the copy of the step before is done: its outputs have been read
        guide.fill(self._pinned["tokens"][1 : int(self._pinned["rows"])].tolist(), masks)
        self._relay.allowed.copy_(masks, non_blocking=True)
        rest.replay()

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
