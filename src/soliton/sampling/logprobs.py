"""Log-probabilities of emitted tokens, from the target's raw logits (before temperature, penalties and masks)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .rowwise import by_row, exp_weights, fixed_mass, mass_bits, order_key, row_max

MAX_TOP = 20


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """One token of an answer: its id, its log-probability, and the likeliest ids at that place, best first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)


def gather(logits_raw: Tensor, chosen: Tensor, top: int = MAX_TOP) -> tuple[Tensor, Tensor, Tensor]:
    """Log-softmax at the chosen tokens and at the ``top`` largest of each row.

    logits_raw: [R, V] float32. chosen: [R] int64; -1 (padding) gives NaN. top: a host number, clamped to V; 0 allowed.
    Returns chosen_logprob [R] float32, top_ids [R, top] int64 (ties: lower index first), top_logprobs [R, top] float32.
    Sums are exact fixed point and the last step is float64, rounded once.
    """
    vocab = logits_raw.shape[-1]
    top = min(top, vocab)
    largest = row_max(logits_raw)
    total = fixed_mass(exp_weights(logits_raw)).sum(-1, keepdim=True).to(torch.float64) * 2.0 ** -mass_bits(vocab)
    shift = largest.to(torch.float64) + by_row(torch.log, total)
    at = logits_raw.gather(-1, chosen.clamp(0, vocab - 1).unsqueeze(-1)).to(torch.float64)
    chosen_logprob = torch.where(chosen >= 0, (at - shift).squeeze(-1), float("nan")).to(torch.float32)
    # One int64 key holds the value above and the reversed index below: all keys differ, so ties cannot occur in topk.
    reverse = vocab - 1 - torch.arange(vocab, device=logits_raw.device)
    best = torch.topk(order_key(logits_raw).to(torch.int64) * 2**32 + reverse, top, dim=-1, sorted=True).values
    top_ids = vocab - 1 - (best & 0xFFFFFFFF)
    top_logprobs = (logits_raw.gather(-1, top_ids).to(torch.float64) - shift).to(torch.float32)
    return chosen_logprob, top_ids, top_logprobs


def assemble(
    tokens: Sequence[int],
    chosen_logprob: Sequence[float],
    top_ids: Sequence[Sequence[int]],
    top_logprobs: Sequence[Sequence[float]],
    *,
    count: int,
    top: int,
) -> list[TokenLogprob]:
    """The first ``count`` rows of `gather`, already on the host as lists, as API values with ``top`` alternatives."""
    return [
        TokenLogprob(
            token_id=int(tokens[i]),
            logprob=float(chosen_logprob[i]),
            top=[(int(t), float(p)) for t, p in zip(top_ids[i][:top], top_logprobs[i][:top], strict=True)],
        )
        for i in range(count)
    ]
