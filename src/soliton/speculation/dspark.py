"""DSpark: a block drafter reads the target's residuals, drafts a block, and says how sure it is of each draft.

A step drafts: one pass over [anchor, masks] and a walk through the Markov head, draft by draft; then the schedule says
how many of the drafts are verified. Extend: the verified rows' residuals become context rows. Rows beyond the accepted
ones are written too, past the committed length; the next block lies over them.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..model import dspark as model
from ..model.draft_spec import DraftSpec
from ..model.weights import ModelWeights
from ..ops.tape import Tape
from .nextn import record_pick
from .verify import Laws, Mode

if TYPE_CHECKING:
    from ..context.stream import Stream
    from ..step.relay import Relay
    from .schedule import Scheduler


@dataclass(frozen=True, kw_only=True)
class Drafter:
    """A loaded draft: ``turn`` its rotary table over the stream's positions; ``scheduler`` None verifies all."""

    spec: DraftSpec
    weights: model.DraftWeights
    turn: Tensor
    scheduler: Scheduler | None


def record_draft(
    tape: Tape, d: Drafter, target: ModelWeights, stream: Stream, relay: Relay, mode: Mode, laws: Laws | None
) -> Tensor:
    """tokens[1:] with their laws, relay.confidence and relay.rows. Returns the live rows of the block, int64 [1]."""
    spec, device = d.spec, tape.device
    assert stream.draft_cache is not None
    one = torch.ones(1, dtype=torch.int64, device=device)
    ids = torch.full((spec.block,), spec.mask_id, dtype=torch.int64, device=device)
    positions = tape.new(spec.block, dtype=torch.int64)
    turn = tape.new(spec.block, *d.turn.shape[1:], dtype=torch.float32)
    if tape.fused:
        tape.do("draft.rows", kernels().block_rows, ids, positions, turn, relay.tokens, relay.length, d.turn)
    else:
        tape.do("draft.rows", _block_rows, ids, positions, turn, relay, d.turn)
    hidden = model.block(tape, d.weights, spec, target, ids, stream.draft_cache, positions, relay.length, turn)
    base = model.base_logits(tape, d.weights, target, hidden)
    tape.note("block_hidden", hidden)
    tape.note("block_base", base)
    markov = model.Markov(tape, d.weights, spec, hidden, base, relay.tokens)
    chained = markov.chains and not (mode.sampled or mode.processors)
    if chained:
        markov.chain()
    for k in range(0 if chained else spec.drafts):
        logits = markov.row(k)
        tape.note(f"draft_logits.{k}", logits[0])
        record_pick(tape, relay, mode, logits, spec.vocab, k, one, laws)
    if spec.confidence:
        _record_confidence(tape, d, relay, hidden)
    if d.scheduler is not None:
        _record_schedule(tape, d.scheduler, relay, mode)
    return torch.full((1,), spec.block, dtype=torch.int64, device=device)


def kernels() -> Any:
    """A block drafter's kernels; they import triton, which only a GPU's machine has."""
    return importlib.import_module("soliton.ops.draft_triton")


def _record_confidence(tape: Tape, d: Drafter, relay: Relay, hidden: Tensor) -> None:
    w, out = d.weights, relay.confidence
    if not tape.fused:
        tape.do("draft.confidence", model.confidence, out, w, d.spec, hidden, relay.tokens)
        return
    assert w.confidence is not None and w.confidence_bias is not None
    embedding = w.markov_in if d.spec.confidence_markov else None
    given = (hidden, w.confidence, w.confidence_bias, embedding, relay.tokens)
    tape.do("draft.confidence", kernels().confide, out[: d.spec.drafts], *given)


def _record_schedule(tape: Tape, scheduler: Scheduler, relay: Relay, mode: Mode) -> None:
    if tape.fused and scheduler.schedule.confident:
        cost = None if scheduler.cost is None else scheduler.cost.float()
        given = (scheduler.temperatures, cost, scheduler.schedule.threshold, mode.sampled)
        tape.do("schedule", kernels().schedule, relay.rows, relay.confidence, *given)
        return
    wanted = tape.new(1, dtype=torch.int64)
    tape.do("schedule", _schedule, scheduler, relay.confidence, wanted, mode.sampled)
    tape.do("schedule.rows", _fewer_rows, relay, wanted)


def record_extend(tape: Tape, d: Drafter, stream: Stream, relay: Relay) -> Tensor:
    """Context rows of the verified ones. Returns the live rows, int64 [1]."""
    assert stream.features is not None and stream.draft_cache is not None and relay.taps is not None
    rows = relay.positions.shape[0]
    made = tape.new(rows, d.spec.hidden)
    turn = tape.new(rows, *d.turn.shape[1:], dtype=torch.float32)
    live = tape.new(1, dtype=torch.int64)
    if tape.fused:
        given = (relay.taken, relay.positions, d.turn)
        tape.do("extend.rows", kernels().context_rows, live, relay.drafted, turn, *given)
    else:
        tape.do("extend.rows", _context_rows, live, turn, relay, d.turn)
    model.features(tape, d.weights, d.spec, relay.taps, made)
    tape.do("extend.keep", _keep, stream.features, made, relay)
    model.remember(tape, d.weights, d.spec, made, stream.draft_cache, relay.positions, turn)
    return live


def read_context(tape: Tape, d: Drafter, stream: Stream, start: int, count: int, taps: Tensor | None = None) -> None:
    """Context rows start .. start + count - 1 of a prompt: from its residuals ``taps`` [count, taps * hidden], or,
    where None, from the features that the stream holds already."""
    assert stream.features is not None and stream.draft_cache is not None
    device = stream.features.device
    rows = max(count, 2)  # a single row has other bits; its double is overwritten by whatever comes next
    positions = torch.arange(start, start + rows, device=device)
    feature = stream.features[start : start + rows]
    if taps is not None:
        if count < rows:
            taps = taps.expand(rows, -1)
        model.features(tape, d.weights, d.spec, taps, feature)
    model.remember(tape, d.weights, d.spec, feature, stream.draft_cache, positions, d.turn[start : start + rows])


def _block_rows(ids: Tensor, positions: Tensor, turn: Tensor, relay: Relay, table: Tensor) -> None:
    ids[:1].copy_(relay.tokens[:1])
    torch.add(torch.arange(positions.shape[0], device=positions.device), relay.length, out=positions)
    torch.index_select(table, 0, positions, out=turn)


def _schedule(scheduler: Scheduler, logits: Tensor, out: Tensor, sampled: bool) -> None:
    scheduler.live_rows(logits, out, sampled=sampled)


def _fewer_rows(relay: Relay, wanted: Tensor) -> None:
    """A step without drafts, or a frozen one, keeps the rows it has."""
    torch.minimum(relay.rows, wanted, out=relay.rows)


def _context_rows(live: Tensor, turn: Tensor, relay: Relay, table: Tensor) -> None:
    torch.clamp_min(relay.taken, 1, out=live)
    torch.index_select(table, 0, relay.positions, out=turn)
    relay.drafted.copy_(torch.maximum(relay.drafted, (relay.taken > 0).to(torch.int64)))


def _keep(features: Tensor, made: Tensor, relay: Relay) -> None:
    features.index_copy_(0, relay.positions, made)
