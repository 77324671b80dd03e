"""Grouped sigmoid routing with a selection bias."""

from __future__ import annotations

import torch
from torch import Tensor

from .runs import in_runs


def reference(
    ids: Tensor,
    weights: Tensor,
    logits: Tensor,
    bias: Tensor,
    groups: int,
    top_groups: int,
    renormalize: bool,
    scaling: float,
) -> None:
    """Choose experts: ids int64 [R, k] by descending biased score, weights float32 [R, k] in the same order.

    logits: float32 [R, E_padded], experts first, overwritten; bias: float32 [E]. score = sigmoid(logit); choice =
    score + bias; a group's worth is the sum of its two best choices; the best ``top_groups`` groups stay, others are
    excluded with -inf (a biased score may be negative); the k best choices win, ties to the lower index (groups too).
    weight = score / (sum of chosen scores + 1e-20) * scaling.
    """
    experts, k = bias.shape[0], ids.shape[1]
    score = in_runs(torch.sigmoid_, logits)[:, :experts]
    choice = score + bias
    if groups > 1:
        by_group = choice.view(choice.shape[0], groups, -1)
        worth = by_group.topk(min(2, by_group.shape[2]), dim=-1).values.sum(-1)
        order = worth.sort(dim=-1, descending=True, stable=True).indices
        out_of_play = torch.ones_like(worth, dtype=torch.bool).scatter_(1, order[:, :top_groups], False)
        by_group.masked_fill_(out_of_play.unsqueeze(-1), float("-inf"))
    ids.copy_(choice.sort(dim=-1, descending=True, stable=True).indices[:, :k])
    chosen = score.gather(1, ids)
    if renormalize:
        chosen = chosen / chosen.sum(-1, keepdim=True).add_(1e-20)
    torch.mul(chosen, scaling, out=weights)
