"""The run-ahead loop: launch step k, then consume step k - depth.

What a step decided reaches the host ``depth`` steps late. Nothing the host does with it feeds the steps in between:
ends that the device can see freeze the stream there; ends that only the host sees (stop strings, an abort) cut what
was committed meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..sampling.logprobs import TokenLogprob, assemble
from .executor import Executor, Guide
from .program import Program
from .relay import Relay


@dataclass(frozen=True)
class StepOutput:
    """One consumed step: its new tokens (the accepted block), the device's finish code (0 = running), the tokens run
    so far, live rows, and log-probabilities if asked."""

    tokens: tuple[int, ...]
    reason: int
    length: int
    rows: int
    logprobs: list[TokenLogprob] | None


class Loop:
    """Runs one request's steps. ``depth``: steps in flight before the oldest is read, 0 to 4."""

    def __init__(self, relay: Relay, executor: Executor, depth: int) -> None:
        assert relay.ring_meta.shape[0] > depth, "the ring must hold every step in flight"
        self._relay, self.executor, self.depth = relay, executor, depth
        self.launched = self.consumed = 0

    def run(
        self,
        program: Program,
        *,
        limit: int,
        top_logprobs: int | None,
        after_launch: Callable[[], None] | None = None,
        guide: Guide | None = None,
    ) -> Iterator[StepOutput]:
        """Yield steps in order until one carries a finish code; at most ``limit`` steps are launched (each adds a
        token at least). Close the iterator to stop early, then ``drain``.

        after_launch: called between launches, in stream order: the place to snapshot committed state.
        guide: of a guided program. Its masks need the tokens of every step before, so none runs ahead.
        """
        self.launched = self.consumed = 0
        depth = self.depth if guide is None else 0
        while True:
            if self.launched < limit:
                if guide is None:
                    self.executor.launch(program)
                else:
                    self.executor.guided(program, guide)
                self.executor.publish(self._slot(self.launched), top_logprobs is not None)
                self.launched += 1
                if after_launch is not None:
                    after_launch()
            if self.launched - self.consumed > depth or self.launched >= limit:
                output = self._consume(top_logprobs)
                yield output
                if output.reason or self.consumed >= limit:
                    return

    def drain(self) -> list[StepOutput]:
        """Freeze the stream and consume what is in flight: the overshoot, in order."""
        self._relay.stopped.fill_(1)
        return [self._consume(None) for _ in range(self.launched - self.consumed)]

    def _slot(self, step: int) -> int:
        return step % self._relay.ring_meta.shape[0]

    def _consume(self, top_logprobs: int | None) -> StepOutput:
        slot = self.executor.read(self._slot(self.consumed), top_logprobs is not None)
        self.consumed += 1
        taken, reason, length, rows = slot.meta
        logged = None
        if top_logprobs is not None:
            logged = assemble(slot.tokens, slot.logprob, slot.top_ids, slot.top_logprobs, count=taken, top=top_logprobs)
        return StepOutput(tuple(slot.tokens[:taken]), reason, length, rows, logged)
