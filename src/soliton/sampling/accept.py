"""The verdict on a chain of draft tokens: how many stay, and the token that follows them.

A step feeds row 0 the anchor and row i draft token i - 1; row i gives the target's law of the token after it. Only the
first ``rows`` rows count (1 <= rows <= R, on the device); what lies behind them, NaN and ids out of range included, is
never looked at.

Sampled verdicts follow the lossless rule (Leviathan et al. 2023, Chen et al. 2023): keep a draft d with probability
min(1, p(d) / q(d)); at the first refusal draw from max(p - q, 0), normalised; after the last row draw from p. The
output then has the target's law whatever q is, as long as d was drawn from q.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .law import pick


class Verdict(NamedTuple):
    """n_accepted: [1] int64, 0 .. rows - 1. final: [1] int64, the token after the accepted drafts. tokens: [R] int64,
    the accepted drafts, the final token, then -1."""

    n_accepted: Tensor
    final: Tensor
    tokens: Tensor


def argmax_lowest(logits: Tensor) -> Tensor:
    """[R, V] -> [R] int64: the index of the largest value, of equal ones the lowest, which torch.argmax promises."""
    return torch.argmax(logits, dim=-1)


def one_hot(tokens: Tensor, vocab: int) -> Tensor:
    """The law of drafts that were not drawn but chosen (greedy): [n] int64 -> [n, vocab] float32."""
    return (tokens.unsqueeze(-1) == torch.arange(vocab, device=tokens.device)).to(torch.float32)


def greedy_chain(target_argmax: Tensor, draft_tokens: Tensor, rows: Tensor) -> Verdict:
    """Keep drafts while they equal the target's choice.

    target_argmax: [R] int64. draft_tokens: int64 [R - 1] or longer. rows: [1] int64.
    """
    size = target_argmax.shape[0]
    draft = draft_tokens[: size - 1]
    n = _leading(draft == target_argmax[: size - 1], rows)
    return _verdict(draft, n, target_argmax.index_select(0, n), size)


def sampled_chain(
    target_probs: Tensor,
    draft_probs: Tensor | None,
    draft_tokens: Tensor,
    rows: Tensor,
    accept_uniform: Tensor,
    final_uniform: Tensor,
) -> Verdict:
    """The lossless verdict.

    target_probs: [R, V] float32. draft_probs: float32 [R - 1, V] or longer, the laws the drafts were drawn from; None
    stands for one-hot laws (greedy drafts). draft_tokens: int64 [R - 1] or longer. rows: [1] int64. accept_uniform:
    float [R - 1] or longer, one draw for each draft. final_uniform: [1] or [R] float; of R draws, one for each
    position, the one at the final token's place is taken, so that a draw belongs to a position.

    A draft with p(d) = 0 is always refused; with p(d) >= q(d) always kept. Where rounding leaves no residual, p is
    drawn from.
    """
    size, vocab = target_probs.shape
    chain = torch.arange(size - 1, device=target_probs.device)
    in_use = chain < rows - 1
    draft = torch.where(in_use, draft_tokens[: size - 1], 0)
    index = draft.unsqueeze(-1)
    p = target_probs[: size - 1].gather(-1, index).squeeze(-1).to(torch.float64)
    if draft_probs is None:
        q = torch.ones_like(p)
    else:
        q = draft_probs[: size - 1].gather(-1, index).squeeze(-1).to(torch.float64)
    n = _leading(accept_uniform[: size - 1].to(torch.float64) * q < p, rows)

    target = target_probs.index_select(0, n).to(torch.float64)
    weights = target
    if size > 1:
        last = n.clamp(max=size - 2)
        if draft_probs is None:
            spent = one_hot(draft.index_select(0, last), vocab).to(torch.float64)
        else:
            spent = draft_probs.index_select(0, last).to(torch.float64)
        residual = (target - spent).clamp(min=0)
        refused = (n < rows - 1) & (residual.amax(dim=-1) > 0)
        weights = torch.where(refused.unsqueeze(-1), residual, target)
    if final_uniform.shape[0] > 1:
        final_uniform = final_uniform.index_select(0, n)
    return _verdict(draft, n, pick(weights, final_uniform), size)


def _leading(good: Tensor, rows: Tensor) -> Tensor:
    """Length of the leading run of true among the first rows - 1: [1] int64."""
    good = good & (torch.arange(good.shape[0], device=good.device) < rows - 1)
    return good.to(torch.int64).cumprod(0).sum(0, keepdim=True)


def _verdict(draft: Tensor, n: Tensor, final: Tensor, size: int) -> Verdict:
    place = torch.arange(size, device=draft.device)
    padded = torch.cat((draft, torch.zeros_like(final)))
    tokens = torch.where(place < n, padded, torch.where(place == n, final, -1))
    return Verdict(n, final, tokens)
