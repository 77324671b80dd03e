"""NEXTN: the model's own MTP layer drafts a chain, and is set right by the target's hidden states afterwards.

With S drafts a step runs S - 1 MTP forwards (the first candidate comes from the step before), verifies S + 1 rows,
and extends: the MTP over the verified rows with the *target's* hidden states overwrites the chain's entries and yields
the next first candidate, its law and the seed of the next chain. Entry t reads token t + 1 and hidden t.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..model.decoder import Rows
from ..model.mtp import mtp
from ..model.spec import ModelSpec
from ..model.weights import ModelWeights
from ..ops.law import distribution
from ..ops.tape import Tape
from ..sampling import accept, law, penalties, philox
from .verify import Laws, Mode, commit_boundary, processors
from .verify import kernels as verify_kernels

if TYPE_CHECKING:
    from ..step.relay import Relay


def record_draft(
    tape: Tape,
    w: ModelWeights,
    spec: ModelSpec,
    cache: Tensor,
    relay: Relay,
    mode: Mode,
    turn: Tensor | None,
    drafts: int,
    laws: Laws | None = None,
) -> Tensor:
    """tokens[2:] and their laws: drafts - 1 forwards of one row (held twice), each fed by the one before.

    Forward j reads draft j and makes entry length - 1 + j. Returns the live rows of a forward, int64 [1].
    """
    hidden = relay.seed
    one = torch.ones(1, dtype=torch.int64, device=tape.device)
    for j in range(1, drafts):
        ids = tape.new(2, dtype=torch.int64)
        positions = tape.new(2, dtype=torch.int64)
        turned = tape.new(2, *turn.shape[1:], dtype=torch.float32) if turn is not None else None
        if tape.fused:
            place = (relay.tokens, relay.length, turn, j)
            tape.do("draft.row", verify_kernels().draft_row, ids, positions, turned, *place)
        else:
            tape.do("draft.row", _draft_row, ids, positions, turned, relay, turn, j)
        rows = Rows(positions=positions, live=one, turn=turned, decode=True)
        hidden = mtp(tape, w, spec, ids, hidden, cache, rows)
        logits = tape.new(2, w.head.padded, dtype=torch.float32)
        tape.call("linear", logits, hidden, w.head)
        record_pick(tape, relay, mode, logits, spec.vocab, j, one, laws)
    return one


def record_extend(
    tape: Tape,
    w: ModelWeights,
    spec: ModelSpec,
    cache: Tensor,
    relay: Relay,
    mode: Mode,
    laws: Laws | None = None,
) -> Tensor:
    """Entries of the verified rows from the target's hidden states; the next step's first draft, law and seed.

    Rows beyond the accepted ones write entries past the committed length, which the next chain overwrites.
    Returns the live rows, int64 [1].
    """
    ids = tape.new(*relay.tokens.shape, dtype=torch.int64)
    live = tape.new(1, dtype=torch.int64)
    one = torch.ones(1, dtype=torch.int64, device=tape.device)
    if tape.fused:
        tape.do("extend.rows", verify_kernels().extend_rows, ids, live, relay.new_tokens, relay.taken)
    else:
        tape.do("extend.rows", _extend_rows, ids, live, relay)
    rows = Rows(positions=relay.positions, live=live, turn=relay.turn, decode=True)
    out = mtp(tape, w, spec, ids, relay.hidden, cache, rows)
    if tape.fused:
        tape.do("extend.seed", verify_kernels().keep_seed, relay.seed, relay.drafted, out, relay.taken)
    else:
        tape.do("extend.seed", _keep_seed, relay, out)
    logits = tape.new(2, w.head.padded, dtype=torch.float32)
    tape.call("linear", logits, relay.seed, w.head)
    record_pick(tape, relay, mode, logits, spec.vocab, 0, one, laws)
    return live


def record_pick(
    tape: Tape, relay: Relay, mode: Mode, logits: Tensor, vocab: int, j: int, one: Tensor, laws: Laws | None
) -> None:
    """Draft number j (0-based) from logits[0] into tokens[j + 1], its law kept for the verdict. one: int64 [1], 1."""
    if not tape.fused:
        tape.do("draft.pick", _pick, relay, mode, logits, vocab, j)
        return
    kernels = verify_kernels()
    if mode.processors:
        tape.do("draft.counts", _draft_counts, relay, j)
        processed = tape.new(1, vocab, dtype=torch.float32)
        given = (relay.draft_counts, *processors(relay)[1:])
        tape.do("draft.process", kernels.process, processed, logits, *given, relay.tokens[:0], one, j)
        logits = processed
    if mode.sampled:
        assert laws is not None and laws.drafts is not None
        q = laws.drafts.row(j)
        sets = (relay.temperature, relay.top_k, relay.top_p, relay.min_p)
        tape.do("draft.law", distribution, q, logits, *sets, one, vocab)
        drawn = (relay.length, relay.generator_seed, j + 1, philox.STREAM_DRAFT)
        tape.do("draft.pick", laws.draws.draft, relay.tokens, q, *drawn)
    else:
        values = tape.new(1, kernels.SPLITS, dtype=torch.float32)
        indices = tape.new(1, kernels.SPLITS, dtype=torch.int32)
        tape.do("draft.pick", kernels.choose, relay.tokens, values, indices, logits, one, j + 1, vocab)


def _draft_row(
    ids: Tensor, positions: Tensor, turned: Tensor | None, relay: Relay, turn: Tensor | None, j: int
) -> None:
    ids.copy_(relay.tokens[j : j + 1].expand(2))
    positions.copy_((relay.length + (j - 1)).expand(2))
    if turned is not None and turn is not None:
        torch.index_select(turn, 0, positions, out=turned)


def _extend_rows(ids: Tensor, live: Tensor, relay: Relay) -> None:
    # relay.length has moved on; positions are still those of the verified rows
    torch.clamp_min(relay.new_tokens, 0, out=ids)
    torch.clamp_min(relay.taken, 1, out=live)


def _keep_seed(relay: Relay, out: Tensor) -> None:
    commit_boundary(relay.seed, out, relay.taken)
    relay.drafted.copy_(torch.maximum(relay.drafted, (relay.taken > 0).to(torch.int64)))


def _pick(relay: Relay, mode: Mode, logits: Tensor, vocab: int, j: int) -> None:
    """Draft number j (0-based) from logits[0] into tokens[j + 1], its law into draft_law[j].

    The draft follows the request's own law (temperature, sets, penalties as they stand after the drafts before it),
    which is what makes it likely to be accepted; any law would be lossless.
    """
    row = logits[:1, :vocab]
    if mode.processors:
        _draft_counts(relay, j)
        row = penalties.process(
            row,
            counts=relay.draft_counts,
            prompt_seen=relay.prompt_seen,
            bias=relay.bias,
            presence=relay.presence,
            frequency=relay.frequency,
            repetition=relay.repetition,
            generated=relay.generated + j,
            min_tokens=relay.min_tokens,
            stop_mask=relay.stop_mask,
            draft_tokens=relay.tokens[:0],
        )
    if mode.sampled:
        probs = law.distribution(row, relay.temperature, relay.top_k, relay.top_p, relay.min_p)
        place = relay.length + (j + 1)
        relay.draft_law[j : j + 1].copy_(probs)
        relay.tokens[j + 1 : j + 2].copy_(
            law.pick(probs, philox.uniform(relay.generator_seed, place, philox.STREAM_DRAFT))
        )
    else:
        relay.tokens[j + 1 : j + 2].copy_(accept.argmax_lowest(row))


def _draft_counts(relay: Relay, j: int) -> None:
    """Counts as they stand after the drafts before number j."""
    if j == 0:
        relay.draft_counts.copy_(relay.counts)
    else:
        penalties.commit_counts(relay.draft_counts, relay.tokens[j : j + 1], relay.taken * 0)
