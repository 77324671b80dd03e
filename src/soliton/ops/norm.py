"""RMS norms, residual adds and the KDA output norm."""

from __future__ import annotations

import torch
from torch import Tensor

from .runs import in_runs


def reference(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """out[R, H] = x * rsqrt(mean(x^2) + eps) * weight, in float32, rounded once to out's dtype.

    x: [R, H] (or [..., H]) any float dtype; weight: [H] float32.
    """
    x = x.float()
    if out.dtype == torch.float32:
        torch.mul(x, inverse_rms(x, eps), out=out).mul_(weight)
    else:
        out.copy_((x * inverse_rms(x, eps)).mul_(weight))


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last axis, kept as one column. Five small calls: torch's own makes twice
    as many."""
    return (x * x).sum(-1, keepdim=True).mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()


def add_reference(x: Tensor, delta: Tensor) -> None:
    """x[R, H] += delta[R, H], in float32, rounded once to x's dtype: the residual stream."""
    if x.dtype == torch.float32:
        x.add_(delta)
    else:
        x.copy_(x.float() + delta.float())


def gated_reference(out: Tensor, o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> None:
    """out[R, n, V] = rmsnorm(o) * weight * sigmoid(gate) per head: the norm after the KDA recurrence.

    o, gate: [R, n, V]; weight: [V] float32. Norm first, gate second; all in float32, rounded once.
    """
    o = o.float()
    opened = in_runs(torch.sigmoid_, gate.to(torch.float32, copy=True, memory_format=torch.contiguous_format))
    normed = (o * inverse_rms(o, eps)).mul_(weight)
    if out.dtype == torch.float32:
        torch.mul(normed, opened, out=out)
    else:
        out.copy_(normed * opened)
