"""From logits to the law a token is drawn from, and the draw itself.

Law: divide by the temperature; keep the top_k largest (ties at the edge: the lower index stays); softmax; keep the
smallest set, from the likeliest down (ties: lower index first), whose share of what top-k left reaches top_p; drop what
is less likely than min_p times the likeliest; renormalise.

Mass is summed in fixed-point integers (`rowwise.fixed_mass`), so the kept sets are exact: the two ways to find them,
a stable sort and a threshold search, agree bit for bit, on every device and beside any number of rows.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .rowwise import exp_weights, fixed_mass, mass_bits, order_key, row_max

Method = Literal["sort", "threshold"]


def distribution(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, *, method: Method | None = None
) -> Tensor:
    """Probabilities [R, V] float32 of the rows of ``logits`` [R, V] float32.

    temperature: [1] float32 > 0. top_k: [1] int64, <= 0 is off. top_p: [1] float32 in (0, 1], 1 is off. min_p: [1]
    float32 in [0, 1], 0 is off. A logit of -inf has probability 0. With everything off this is the plain softmax.
    The likeliest token always stays. method: how to find the sets; None takes "sort" on a CPU, "threshold" elsewhere.
    A row of NaN gives a row of undefined values and touches no other row.
    """
    if method is None:
        method = "sort" if logits.device.type == "cpu" else "threshold"
    keep_k, keep_p = (top_k_sorted, top_p_sorted) if method == "sort" else (top_k_threshold, top_p_threshold)
    scaled = logits / temperature
    weights = torch.where(keep_k(scaled, top_k), exp_weights(scaled), 0.0)
    weights = torch.where(keep_p(weights, top_p) & (weights >= min_p), weights, 0.0)
    total = fixed_mass(weights).sum(-1, keepdim=True).to(torch.float64) * 2.0 ** -mass_bits(logits.shape[-1])
    return (weights.to(torch.float64) / total).to(torch.float32)


def _count(top_k: Tensor, vocab: int) -> Tensor:
    return torch.where(top_k <= 0, vocab, top_k.clamp(max=vocab))


def _needed(mass: Tensor, top_p: Tensor) -> Tensor:
    """The least mass that reaches top_p of each row's total: [R, 1] int64, at least 1."""
    total = mass.sum(-1, keepdim=True)
    need = torch.ceil(total.to(torch.float64) * top_p.to(torch.float64)).to(torch.int64)
    return torch.minimum(need, total).clamp(min=1)


def top_k_sorted(scaled: Tensor, top_k: Tensor) -> Tensor:
    """Reference: [R, V] bool, true for the top_k largest, by a stable sort."""
    order = torch.sort(order_key(scaled), dim=-1, descending=True, stable=True).indices
    rank = torch.arange(scaled.shape[-1], device=scaled.device)
    keep = (rank < _count(top_k, scaled.shape[-1])).expand_as(order)
    return torch.zeros_like(keep, memory_format=torch.contiguous_format).scatter(-1, order, keep)


def top_p_sorted(weights: Tensor, top_p: Tensor) -> Tensor:
    """Reference: [R, V] bool, true for the smallest likeliest set that reaches top_p, by a stable sort.

    weights: [R, V] float32 in [0, 1], not normalised.
    """
    mass = fixed_mass(weights)
    need = _needed(mass, top_p)
    order = torch.sort(order_key(weights), dim=-1, descending=True, stable=True).indices
    sorted_mass = mass.gather(-1, order)
    before = sorted_mass.cumsum(-1) - sorted_mass
    keep = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before < need)
    return keep | (top_p >= 1)


def top_k_threshold(scaled: Tensor, top_k: Tensor) -> Tensor:
    """As `top_k_sorted`, by 32 halvings of the float bits: no sort, static shapes."""
    key = order_key(scaled)
    wanted = _count(top_k, scaled.shape[-1])
    edge = torch.full((scaled.shape[0], 1), -(2**31), dtype=torch.int64, device=scaled.device)
    for bit in range(31, -1, -1):
        # The largest edge with at least `wanted` keys at or above it; -2**31 always has them all.
        trial = edge + 2**bit
        enough = (key >= trial.to(torch.int32)).sum(-1, keepdim=True) >= wanted
        edge = torch.where(enough, trial, edge)
    edge = edge.to(torch.int32)
    above, at = key > edge, key == edge
    room = wanted - above.sum(-1, keepdim=True)
    return above | (at & (at.cumsum(-1) <= room))


def top_p_threshold(weights: Tensor, top_p: Tensor) -> Tensor:
    """As `top_p_sorted`, by 30 halvings (the bits of a float in [0, 1] below the sign and the top exponent bit)."""
    key = order_key(weights)
    mass = fixed_mass(weights)
    need = _needed(mass, top_p)
    edge = torch.zeros((weights.shape[0], 1), dtype=torch.int32, device=weights.device)
    for bit in range(29, -1, -1):
        trial = edge + 2**bit
        enough = torch.where(key >= trial, mass, 0).sum(-1, keepdim=True) >= need
        edge = torch.where(enough, trial, edge)
    above, at = key > edge, key == edge
    # Tokens at the edge share one mass each; in index order, one stays while the mass before it falls short.
    before = torch.where(above, mass, 0).sum(-1, keepdim=True) + (at.cumsum(-1) - 1) * mass
    return above | (at & (before < need)) | (top_p >= 1)


def pick(weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw one token a row by the inverse of the cumulative mass: [R] int64.

    weights: [R, V] float32 or float64, >= 0, not necessarily normalised, at least one positive. uniform: [R] float in
    [0, 1). Weights are scaled by the row maximum to fixed point and summed exactly; a token is drawn only if its mass
    is positive, also at uniform = 0 and at uniform rounding to 1. A row of NaN gives some index in range.
    """
    vocab = weights.shape[-1]
    weights = weights.to(torch.float64)
    top = row_max(weights)
    mass = fixed_mass(weights / torch.where(top > 0, top, 1.0))
    total = mass.sum(-1, keepdim=True)
    at = torch.floor(uniform.to(torch.float64).unsqueeze(-1) * total.to(torch.float64)).to(torch.int64)
    at = torch.minimum(at, total - 1)
    return (mass.cumsum(-1) <= at).sum(-1).clamp(max=vocab - 1)
