"""RMS norms, residual adds and the KDA output norm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .runs import in_runs


def reference(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """out[R, H] = x * rsqrt(mean(x^2) + eps) * weight, in float32, rounded once to out's dtype.

    x: [R, H] (or [..., H]) any float dtype; weight: [H] float32.
    """
    normed = F.rms_norm(x.float(), x.shape[-1:], None, eps)
    if out.dtype == torch.float32:
        torch.mul(normed, weight, out=out)
    else:
        out.copy_(normed * weight)


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
    normed = F.rms_norm(o.float(), o.shape[-1:], weight, eps)
    opened = in_runs(torch.sigmoid_, gate.reshape(gate.shape[0], -1).float().clone()).view(o.shape)
    if out.dtype == torch.float32:
        torch.mul(normed, opened, out=out)
    else:
        out.copy_(normed * opened)
