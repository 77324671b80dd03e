"""Reads prompt tokens into the stream: the target's state and caches, and the MTP's entries one position behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..model.prefill import BLOCK, Pass, mtp_pass, target_pass
from ..speculation.dspark import read_context
from .program import Parts


class Prefill:
    """Prefill over one stream. ``chunk``: prompts are cut at its absolute multiples (on a CPU into passes of BLOCK rows
    besides)."""

    def __init__(self, parts: Parts, chunk: int) -> None:
        self._parts, self.chunk = parts, chunk
        self._block = BLOCK if parts.device.type == "cpu" else chunk

    def read(
        self,
        ids: Sequence[int],
        start: int,
        end: int,
        *,
        trace: dict[str, Tensor] | None = None,
        cancelled: Callable[[], bool] | None = None,
        taps: tuple[int, ...] = (),
    ) -> Iterator[Pass]:
        """Run tokens ids[start:end] at their positions, pass by pass; the stream must hold ids[:start].

        MTP entries up to end - 2 exist afterwards; entry end - 1 waits for the token after it (``seal``). ``trace``
        collects intermediates of a single pass. ``cancelled`` is asked before each pass; True stops early.
        ``taps``: layers whose residuals the passes bring along, a block drafter's where none are named.
        """
        parts, at = self._parts, start
        # all of them to the device at once: a copy for each pass would wait for the pass before it
        tokens = torch.tensor(ids[start:end], dtype=torch.int64, device=parts.device)
        while at < end:
            if cancelled is not None and cancelled():
                return
            stop = min(end, at + self._block, (at // self.chunk + 1) * self.chunk)
            step = target_pass(
                lambda: parts.immediate(trace),
                parts.weights,
                parts.spec,
                tokens[at - start : stop - start],
                at,
                parts.stream.committed,
                parts.stream.keep,
                parts.turn,
                taps or (parts.drafter.spec.taps if parts.drafter is not None else ()),
            )
            if parts.drafter is not None and not taps and step.taps is not None:
                read_context(parts.immediate(), parts.drafter, parts.stream, at, stop - at, step.taps)
            self._follow(tokens[max(at, 1) - start : stop - start], at, step.hidden)
            parts.stream.boundary.copy_(step.hidden[-1:].expand(2, -1))
            at = stop
            yield step

    def restored(self, length: int) -> None:
        """After a checkpoint of ``length`` tokens came back: the block drafter's keys and values, cut like a prompt."""
        parts, at = self._parts, 0
        while parts.drafter is not None and at < length:
            stop = min(length, (at // self.chunk + 1) * self.chunk)
            read_context(parts.immediate(), parts.drafter, parts.stream, at, stop - at)
            at = stop

    def seal(self, token: int, length: int) -> Tensor | None:
        """The MTP entry at ``length`` - 1, whose next token is now known; returns its output [1, hidden]."""
        parts = self._parts
        if parts.stream.draft_kv is None or length == 0:
            return None
        ids = torch.full((1,), token, dtype=torch.int64, device=parts.device)
        return self._entries(ids, parts.stream.boundary[:1], length - 1)

    def _follow(self, tokens: Tensor, at: int, hidden: Tensor) -> None:
        """MTP entries from at - 1 on of the pass's tokens, all but position 0's: hidden states one behind them."""
        parts = self._parts
        if parts.stream.draft_kv is None or not tokens.shape[0]:
            return
        behind = torch.cat([parts.stream.boundary[:1], hidden[:-1]]) if at else hidden[:-1]
        self._entries(tokens, behind, max(at, 1) - 1)

    def _entries(self, ids: Tensor, hidden: Tensor, start: int) -> Tensor:
        parts = self._parts
        assert parts.stream.draft_kv is not None
        return mtp_pass(
            parts.immediate, parts.weights, parts.spec, ids, hidden, start, parts.stream.draft_kv, parts.turn
        )
