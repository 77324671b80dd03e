"""The step as a tuple of phases, each a tape over the relay, the stream and the weights.

draft -> verify -> verdict -> commit -> extend -> publish, in that order whatever the way of speculating. One program
for each of {greedy, sampled} x {processors off, on}: which one a request takes is known before its first step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ..context.stream import Stream
from ..model.spec import ModelSpec
from ..model.weights import ModelWeights
from ..ops import device as where
from ..ops.select import Choice
from ..ops.tape import Tape
from ..speculation import dspark, nextn, verify
from ..speculation.verify import Laws, Mode
from .relay import Relay


@dataclass(frozen=True)
class Phase:
    """A named part of a step. ``guard``: a relay scalar; at 0 the phase has nothing to do, and an executor that can
    read scalars for free may skip it. On a device the phase's own kernels leave early instead."""

    name: str
    tape: Tape
    guard: Tensor | None = None


@dataclass(frozen=True)
class Program:
    """The phases of one step in order."""

    mode: Mode
    phases: tuple[Phase, ...]

    def dump(self) -> list[str]:
        """The step in words, for refactoring proofs and the census."""
        return [f"{phase.name}: {line}" for phase in self.phases for line in phase.tape.dump()]

    def reread(self) -> None:
        """After weights were written in place, between two steps."""
        for phase in self.phases:
            phase.tape.reread()


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What programs are built over. ``drafts``: S, 0 for plain decoding; ``verify``: rows after the first when there
    are drafts (S, or what a measurement asks for). ``turn``: the rotary table or None. ``drafter``: a block drafter;
    without one the model's own MTP layer drafts."""

    spec: ModelSpec
    weights: ModelWeights
    stream: Stream
    relay: Relay
    choices: Mapping[str, Choice]
    turn: Tensor | None
    drafts: int
    verify: int
    device: torch.device
    dtype: torch.dtype
    drafter: dspark.Drafter | None = None

    @cached_property
    def laws(self) -> Laws | None:
        """Of sampled steps on a GPU, one for all programs; None elsewhere."""
        if not where.has_kernels(self.device):
            return None
        return Laws.allocate(self.relay.tokens.shape[0], self.verify, self.spec.vocab, self.device)

    def tape(self) -> Tape:
        """An empty recording."""
        return Tape(self.choices, self.device, self.dtype, record=True)

    def immediate(self, trace: dict[str, Tensor] | None = None) -> Tape:
        """A tape that runs at once, for ordinary code."""
        return Tape(self.choices, self.device, self.dtype, record=False, trace=trace)


MODES = tuple(Mode(sampled=s, processors=p) for s in (False, True) for p in (False, True))


def build(parts: Parts) -> dict[Mode, Program]:
    """All four programs; phases that do not depend on the mode are shared, buffers too."""
    relay, stream = parts.relay, parts.stream
    refill = parts.tape()
    verify.record_refill(refill, relay, parts.turn, parts.verify)
    forward = parts.tape()
    taps = parts.drafter.spec.taps if parts.drafter is not None else ()
    verify.record_forward(forward, parts.weights, parts.spec, stream.staged(), relay, taps)
    forward.finish(relay.rows)
    commit = parts.tape()
    commit.call("kda.commit", stream.states, stream.windows, relay.taken, stream.current)
    verify.record_commit(commit, relay, stream.boundary)
    if stream.marks is not None:
        verify.record_mark(commit, relay, stream)
    publish = parts.tape()
    verify.record_publish(publish, relay)

    programs = {}
    for mode in MODES:
        verdict = _verdict(parts, mode)
        phases = [Phase("refill", refill)]
        if parts.drafts:
            draft, extend = _speculate(parts, mode)
            phases.append(Phase("draft", draft, guard=relay.drafted))
        phases += [Phase("verify", forward), Phase("verdict", verdict), Phase("commit", commit)]
        if parts.drafts:
            phases.append(Phase("extend", extend, guard=relay.taken))
        phases.append(Phase("publish", publish))
        programs[mode] = Program(mode, tuple(phases))
    return programs


def guided(parts: Parts, program: Program) -> Program:
    """``program`` with its verdict within the masks of a grammar: relay.allowed, written between the draft and the
    verdict. All other phases are the same tapes; drafts are chosen without masks, which costs acceptance alone."""
    mode = replace(program.mode, grammar=True)
    verdict = Phase("verdict", _verdict(parts, mode))
    return Program(mode, tuple(verdict if phase.name == "verdict" else phase for phase in program.phases))


def _verdict(parts: Parts, mode: Mode) -> Tape:
    verdict = parts.tape()
    verify.record_verdict(verdict, parts.relay, mode, parts.spec.vocab, parts.drafts, parts.laws)
    return verdict


def _speculate(parts: Parts, mode: Mode) -> tuple[Tape, Tape]:
    """The draft and extend phases."""
    draft, extend, laws = parts.tape(), parts.tape(), parts.laws
    w, spec, stream, relay, drafter = parts.weights, parts.spec, parts.stream, parts.relay, parts.drafter
    if drafter is not None:
        draft.finish(dspark.record_draft(draft, drafter, w, stream, relay, mode, laws))
        extend.finish(dspark.record_extend(extend, drafter, stream, relay))
        return draft, extend
    assert stream.draft_kv is not None
    draft.finish(nextn.record_draft(draft, w, spec, stream.draft_kv, relay, mode, parts.turn, parts.drafts, laws))
    extend.finish(nextn.record_extend(extend, w, spec, stream.draft_kv, relay, mode, laws))
    return draft, extend
