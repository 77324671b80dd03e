"""Reading a prompt: the target, and its MTP layer one position behind, over blocks of rows.

Ordinary code: it runs the model's functions on an immediate tape, for any number of rows. On a CPU every op keeps
its bits for any row count, so how a prompt is cut changes nothing, except where a large state makes the recurrence go
in chunks of rows (``kda.prefill`` in ops.select).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.tape import Tape
from .decoder import Memory, Rows, decoder, head
from .mtp import mtp
from .spec import ModelSpec
from .weights import ModelWeights

BLOCK = 32  # rows of one pass: enough to share weights, few enough that elementwise work stays on one thread
HEAD_ROWS = 256  # rows whose logits are held at once


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One pass over ``count`` prompt rows: hidden after the final norm [count, hidden], its tape for the head, and the
    residuals after the tapped layers side by side [count, taps * hidden], None without taps."""

    start: int
    count: int
    hidden: Tensor
    tape: Tape
    taps: Tensor | None = None


def _whole(number: int, device: torch.device) -> Tensor:
    """int64 [1], filled by a kernel: a copy from the host would wait for all that is queued on a GPU."""
    return torch.full((1,), number, dtype=torch.int64, device=device)


def _padded(values: Tensor, to: int = 2) -> Tensor:
    """Repeat the last row until there are ``to``: one row alone would take a product with other bits."""
    missing = to - values.shape[0]
    return values if missing <= 0 else torch.cat([values, values[-1:].expand(missing, *values.shape[1:])])


def target_pass(
    make_tape: Callable[[], Tape],
    w: ModelWeights,
    spec: ModelSpec,
    ids: Tensor,
    start: int,
    memory: Callable[[int], Memory],
    keep: Callable[[int, int], None],
    turn: Tensor | None,
    taps: tuple[int, ...] = (),
) -> Pass:
    """Run the target over ids, int64 [n], at positions start.. and commit its state.

    ``taps``: layers whose residuals a block drafter reads. ``memory(rows)`` and ``keep(rows, real)`` are the stream's
    ``committed`` and ``keep``. A single row is padded to two; the state advances over the real row only.
    """
    tape = make_tape()
    device = w.embed.device
    real = ids.shape[0]
    if real == 1 and not tape.bulk:
        # the recurrence must not see the padding row, so a single row is a decode step with one live row
        return _single(tape, w, spec, ids, start, memory, keep, turn, taps)
    where = Rows(
        positions=torch.arange(start, start + real, device=device),
        live=_whole(real, device),
        turn=None if turn is None else turn[start : start + real],
        decode=False,
        start=start,
    )
    tapped, by_layer = tap_buffers(tape, spec, real, taps)
    hidden = decoder(tape, w, spec, ids, memory(real), where, by_layer)
    keep(real, real)
    return Pass(start=start, count=real, hidden=hidden, tape=tape, taps=tapped)


def tap_buffers(
    tape: Tape, spec: ModelSpec, rows: int, taps: tuple[int, ...]
) -> tuple[Tensor | None, dict[int, Tensor]]:
    """One buffer [rows, taps * hidden] and its columns by layer, for ``decoder``; None without taps."""
    if not taps:
        return None, {}
    buffer = tape.new(rows, len(taps) * spec.hidden)
    return buffer, dict(zip(taps, buffer.split(spec.hidden, 1), strict=True))


def _single(
    tape: Tape,
    w: ModelWeights,
    spec: ModelSpec,
    token: Tensor,
    start: int,
    memory: Callable[[int], Memory],
    keep: Callable[[int, int], None],
    turn: Tensor | None,
    taps: tuple[int, ...],
) -> Pass:
    device = w.embed.device
    place = memory(2)
    staged = {layer: torch.stack([s, s]) for layer, s in place.states.items()}
    scratch = Memory(windows=place.windows, states=staged, caches=place.caches)
    where = Rows(
        positions=torch.tensor([start, start + 1], device=device),
        live=_whole(1, device),
        turn=None if turn is None else turn[start : start + 2],
        decode=True,
    )
    tapped, by_layer = tap_buffers(tape, spec, 2, taps)
    hidden = decoder(tape, w, spec, token.repeat(2), scratch, where, by_layer)
    for layer, state in place.states.items():
        state.copy_(staged[layer][1])
    keep(2, 1)
    return Pass(start=start, count=1, hidden=hidden[:1], tape=tape, taps=None if tapped is None else tapped[:1])


def mtp_pass(
    make_tape: Callable[[], Tape],
    w: ModelWeights,
    spec: ModelSpec,
    ids: Tensor,
    hidden: Tensor,
    start: int,
    cache: Tensor,
    turn: Tensor | None,
) -> Tensor:
    """MTP entries start .. start + n - 1 from the tokens after them, ids [n], and the target's hidden [n, hidden].

    Returns the layer's normed output [n, hidden].
    """
    tape, device, real = make_tape(), w.embed.device, ids.shape[0]
    positions = torch.arange(start, start + max(real, 2), device=device)
    where = Rows(
        positions=positions,
        live=_whole(real, device),
        turn=None if turn is None else turn[start : start + max(real, 2)],
        decode=True,
        start=start,
    )
    return mtp(tape, w, spec, _padded(ids), _padded(hidden), cache, where)[:real]


def logits_of(w: ModelWeights, spec: ModelSpec, hidden: Tensor, tape: Tape) -> Tensor:
    """float32 [n, vocab] of hidden [n, hidden]."""
    return head(tape, w, _padded(hidden))[: hidden.shape[0], : spec.vocab]


def logits_in_parts(w: ModelWeights, spec: ModelSpec, step: Pass) -> Iterator[Tensor]:
    """The logits of a pass, float32 [at most HEAD_ROWS, vocab] at a time: all of a long one are larger than a model."""
    for at in range(0, step.count, HEAD_ROWS):
        yield logits_of(w, spec, step.hidden[at : at + HEAD_ROWS], step.tape)
