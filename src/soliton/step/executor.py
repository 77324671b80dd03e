"""Running a program's phases on any device, one call after another: the CPU engine, and the oracle of a graph."""

from __future__ import annotations

import torch

from ..context.stream import Stream
from .program import Program
from .relay import Relay


class EagerExecutor:
    """Replays a program's tapes. ``early``: skip what a raised stop flag or a phase's guard makes void, which costs
    nothing where scalars are in host memory; off, every phase runs and must leave a frozen stream as it is."""

    name = "eager"

    def __init__(self, relay: Relay, stream: Stream, *, early: bool) -> None:
        self._relay, self._stream, self._early = relay, stream, early
        self._addresses = self._current()

    @torch.inference_mode()
    def launch(self, program: Program) -> None:
        """Run one step."""
        assert self._addresses == self._current(), "a relay or stream buffer moved since the program was built"
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

    def _current(self) -> dict[str, int]:
        stream = {name: t.data_ptr() for name, t in self._stream.tensors().items()}
        return self._relay.addresses() | stream
