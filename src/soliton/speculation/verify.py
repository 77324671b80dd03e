"""Verify: the target over the anchor and its drafts, the verdict on them, and what leaves the step.

Every function here works on relay tensors of fixed shape and reads no device value on the host, except where an op's
CPU variant may.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..model.decoder import Memory, Rows, decoder
from ..model.spec import ModelSpec
from ..model.weights import ModelWeights
from ..ops.law import Law, distribution
from ..ops.tape import Tape
from ..sampling import accept, law, logprobs, penalties, philox

if TYPE_CHECKING:
    from ..context.stream import Stream
    from ..step.relay import Relay

ROLLING = 512  # committed tokens between checkpoints of a long answer


@dataclass(frozen=True)
class Mode:
    """Which variant of the step: sampled or greedy, with or without logit processors, within a grammar's masks."""

    sampled: bool
    processors: bool
    grammar: bool = False


def record_refill(tape: Tape, relay: Relay, turn: Tensor | None, drafts: int) -> None:
    """Positions, first token, live rows and rotations of the coming step, from the relay's length and flags."""
    if tape.fused:
        r, found = relay, kernels()
        into = (r.tokens, r.positions, r.rows, r.turn)
        tape.do("refill", found.refill, *into, r.anchor, r.length, r.drafted, r.stopped, turn, drafts)
    else:
        tape.do("refill", _refill, relay, turn, drafts)


@dataclass(frozen=True)
class Laws:
    """Laws of a sampled step on a GPU: of the verified rows, and of the drafts (None without).
    draws: soliton.ops.draws_triton."""

    draws: Any
    target: Law
    drafts: Law | None

    @classmethod
    def allocate(cls, rows: int, drafts: int, vocab: int, device: torch.device) -> Laws:
        """All of it, zeroed."""
        some = Law.allocate(drafts, vocab, device) if drafts else None
        draws = importlib.import_module("soliton.ops.draws_triton")
        return cls(draws, Law.allocate(rows, vocab, device), some)


def kernels() -> Any:
    """The step's small parts as kernels; they import triton, which only a GPU's machine has."""
    return importlib.import_module("soliton.ops.verdict_triton")


def _refill(relay: Relay, turn: Tensor | None, drafts: int) -> None:
    count = relay.positions.shape[0]
    torch.add(torch.arange(count, device=relay.length.device), relay.length, out=relay.positions)
    relay.tokens[:1] = relay.anchor
    torch.add(relay.drafted * drafts, 1, out=relay.rows)
    if turn is not None and relay.turn is not None:
        torch.index_select(turn, 0, relay.positions, out=relay.turn)


def record_forward(
    tape: Tape, w: ModelWeights, spec: ModelSpec, memory: Memory, relay: Relay, taps: tuple[int, ...] = ()
) -> None:
    """The target over all rows: relay.hidden, relay.logits, and relay.taps after the layers ``taps``."""
    rows = Rows(positions=relay.positions, live=relay.rows, turn=relay.turn, decode=True)
    by_layer = {}
    if relay.taps is not None:
        by_layer = dict(zip(taps, relay.taps.split(spec.hidden, 1), strict=True))
    hidden = decoder(tape, w, spec, relay.tokens, memory, rows, by_layer)
    tape.call("copy", relay.hidden, hidden)
    tape.call("linear", relay.logits, hidden, w.head)


def record_verdict(tape: Tape, relay: Relay, mode: Mode, vocab: int, drafts: int, laws: Laws | None = None) -> None:
    """What is accepted, where the answer ends, what the next step starts from. laws: on a GPU, the drafts' and ours."""
    if tape.fused:
        _record_kernels(tape, relay, mode, vocab, laws)
    else:
        tape.do("verdict", _verdict, relay, mode, vocab, drafts)


def _record_kernels(tape: Tape, relay: Relay, mode: Mode, vocab: int, laws: Laws | None) -> None:
    r, found, count = relay, kernels(), relay.tokens.shape[0]
    logits, state = r.logits, (r.new_tokens, r.taken, r.reason, r.anchor, r.length, r.generated, r.stopped)
    if mode.processors:
        logits = tape.new(count, vocab, dtype=torch.float32)
        tape.do("process", found.process, logits, r.logits, *processors(r), r.tokens[1:], r.rows, 0)
    if mode.grammar:
        masked = logits if mode.processors else tape.new(count, vocab, dtype=torch.float32)
        tape.do("grammar", found.restrict, masked, logits, r.allowed, r.rows)
        logits = masked
    if mode.sampled:
        assert laws is not None
        scratch, rest = tape.new(2, dtype=torch.int64), tape.new(laws.target.masses.shape[1], dtype=torch.int64)
        sets = (r.temperature, r.top_k, r.top_p, r.min_p)
        tape.do("law", distribution, laws.target, logits, *sets, r.rows, vocab)
        given = (r.tokens, r.positions, r.rows, r.generator_seed, r.limit, r.stop_mask)
        streams = (philox.STREAM_ACCEPT, philox.STREAM_FINAL)
        tape.do(
            "verdict", laws.draws.sampled, scratch, rest, laws.target, laws.drafts, *state, *given, streams, ROLLING
        )
    else:
        values = tape.new(count, found.SPLITS, dtype=torch.float32)
        indices = tape.new(count, found.SPLITS, dtype=torch.int32)
        asked = (r.tokens, r.rows, r.limit, r.stop_mask)
        tape.do("verdict", found.greedy, values, indices, logits, *state, *asked, vocab, ROLLING)
    if mode.processors:
        tape.do("counts", _count_new, r)
        tape.do("log", _log, r, r.logits[:, :vocab])


def processors(r: Relay) -> tuple[Tensor, ...]:
    """What penalties and the rest of the processors look at, in the order in which kernels take it."""
    values = (r.presence, r.frequency, r.repetition, r.generated, r.min_tokens)
    return (r.counts, r.prompt_seen, r.bias, *values, r.stop_mask)


def _count_new(relay: Relay) -> None:
    penalties.commit_counts(relay.counts, relay.new_tokens, relay.taken - 1)


def record_commit(tape: Tape, relay: Relay, boundary: Tensor) -> None:
    """The boundary hidden of what is committed; states and windows are kda.commit's."""
    commit = kernels().commit_boundary if tape.fused else commit_boundary
    tape.do("boundary", commit, boundary, relay.hidden, relay.taken)


def record_mark(tape: Tape, relay: Relay, stream: Stream) -> None:
    """On a GPU: copies of the committed state at multiples of ROLLING."""
    found, none = importlib.import_module("soliton.ops.kda_triton"), tape.new(1, dtype=torch.int64)
    given = (stream.states, stream.windows, stream.boundary, relay.length, relay.taken, stream.current, none)
    tape.do("mark", found.mark, stream.marks, *given, ROLLING)


def record_publish(tape: Tape, relay: Relay) -> None:
    """What leaves the step."""
    if tape.fused:
        r = relay
        given = (r.new_tokens, r.taken, r.reason, r.length, r.rows, r.step)
        tape.do("publish", kernels().publish, r.ring_tokens, r.ring_meta, *given)
    else:
        tape.do("publish", publish, relay)


def _verdict(relay: Relay, mode: Mode, vocab: int, drafts: int) -> None:
    raw = relay.logits[:, :vocab]
    logits = raw
    if mode.processors:
        logits = penalties.process(
            raw,
            counts=relay.counts,
            prompt_seen=relay.prompt_seen,
            bias=relay.bias,
            presence=relay.presence,
            frequency=relay.frequency,
            repetition=relay.repetition,
            generated=relay.generated,
            min_tokens=relay.min_tokens,
            stop_mask=relay.stop_mask,
            draft_tokens=relay.tokens[1:],
        )
    if mode.grammar:  # last, so that nothing brings back what it takes away
        logits = penalties.restrict(logits, relay.allowed)
    if mode.sampled:
        target = law.distribution(logits, relay.temperature, relay.top_k, relay.top_p, relay.min_p)
        places = relay.positions + 1
        verdict = accept.sampled_chain(
            target,
            relay.draft_law,
            relay.tokens[1:],
            relay.rows,
            philox.uniform(relay.generator_seed, places, philox.STREAM_ACCEPT),
            philox.uniform(relay.generator_seed, places, philox.STREAM_FINAL),
        )
    else:
        verdict = accept.greedy_chain(accept.argmax_lowest(logits), relay.tokens[1:], relay.rows)
    relay.new_tokens.copy_(verdict.tokens)
    # A block ends at a multiple of ROLLING at the latest, so that the place of a rolling checkpoint, and with it what a
    # later prompt starts from, depends neither on the drafts nor on the depth. The place is fixed beforehand, so what
    # is thrown away says nothing about what stays.
    _cut(relay, torch.minimum(verdict.n_accepted + 1, ROLLING - relay.length % ROLLING))
    if mode.processors:  # nothing else reads the counts
        penalties.commit_counts(relay.counts, relay.new_tokens, relay.taken - 1)
    if mode.processors or raw.device.type == "cpu":
        _log(relay, raw)


def _cut(relay: Relay, offered: Tensor) -> None:
    """End the block at its earliest event (a stop id before a full length at the same token) and move on.

    A block cut at token i commits rows 0..i: the state is that of an answer which ended there.
    """
    place = torch.arange(relay.new_tokens.shape[0], device=offered.device)
    is_stop = relay.stop_mask[relay.new_tokens.clamp_min(0)]
    is_full = relay.generated + place + 1 >= relay.limit
    event = (is_stop | is_full) & (place < offered)
    first = event.to(torch.int64).argmax(0, keepdim=True)
    found = event.any(0, keepdim=True)
    running = 1 - relay.stopped
    taken = torch.where(found, first + 1, offered) * running
    code = torch.where(is_stop.gather(0, first), 1, 2) * found * running
    relay.taken.copy_(taken)
    relay.reason.copy_(code)
    relay.new_tokens.copy_(torch.where(place < taken, relay.new_tokens, -1))
    last = relay.new_tokens.gather(0, (taken - 1).clamp_min(0))
    relay.anchor.copy_(torch.where(taken > 0, last, relay.anchor))
    relay.length.add_(taken)
    relay.generated.add_(taken)
    relay.stopped.copy_(torch.maximum(relay.stopped, (code > 0).to(torch.int64)))


def _log(relay: Relay, raw: Tensor) -> None:
    """Log-probabilities of the new tokens into this step's ring slot; on a CPU only when somebody asked."""
    if raw.device.type == "cpu" and not int(relay.want_logprobs):
        return
    slot = relay.step % relay.ring_meta.shape[0]
    chosen, ids, values = logprobs.gather(raw, relay.new_tokens, relay.ring_top_ids.shape[2])
    relay.ring_logprob.index_copy_(0, slot, chosen.unsqueeze(0))
    relay.ring_top_ids.index_copy_(0, slot, ids.unsqueeze(0))
    relay.ring_top_logprobs.index_copy_(0, slot, values.unsqueeze(0))


def commit_boundary(boundary: Tensor, hidden: Tensor, taken: Tensor) -> None:
    """boundary[2, hidden] = the last committed row of hidden[R, hidden], twice; taken 0 leaves it."""
    index = (taken - 1).clamp_min(0).expand(2)
    boundary.copy_(torch.where(taken > 0, hidden.index_select(0, index), boundary))


def publish(relay: Relay) -> None:
    """Tokens and counts into the ring slot of this step; the step counter moves on."""
    slot = relay.step % relay.ring_meta.shape[0]
    relay.ring_tokens.index_copy_(0, slot, relay.new_tokens.unsqueeze(0))
    meta = torch.stack([relay.taken, relay.reason, relay.length, relay.rows], 1)
    relay.ring_meta.index_copy_(0, slot, meta)
    relay.step.add_(1)
