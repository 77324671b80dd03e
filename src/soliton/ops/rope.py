"""Rotary position embedding on adjacent pairs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# channels whose pairs fill the two vectors of complex numbers that torch's loop takes at a time
WHOLE = 32


def inverse_frequencies(
    dim: int,
    theta: float,
    factor: float = 1.0,
    original_max_position: int = 0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
) -> Tensor:
    """float64 [dim/2] angles per position. ``factor`` > 1 blends in YaRN's interpolation (arXiv 2309.00071)."""
    exponent = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    freq = theta**-exponent
    if factor <= 1.0:
        return freq

    def turning(rotations: float) -> float:
        return dim * math.log(original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(turning(beta_fast)), 0), min(math.ceil(turning(beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(0, 1)
    return freq / factor * ramp + freq * (1 - ramp)


def table(positions: int, inverse: Tensor, mscale: float, device: torch.device) -> Tensor:
    """float32 [positions, dim/2, 2] of (cos, sin) * mscale; angles in float64, so that far positions stay exact."""
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * inverse[None]
    return torch.stack([angle.cos(), angle.sin()], -1).mul_(mscale).float().to(device)


def reference(out: Tensor, x: Tensor, turn: Tensor | None) -> None:
    """Rotate pairs (2j, 2j+1) of x[R, n, dim] by turn[R, dim/2, 2] = (cos, sin); None copies (NoPE).

    float32 inside, one rounding to out's dtype. Pairs stay in place (the adjacent-pair layout of the checkpoints).
    A complex product is one call instead of a dozen, but a CPU rounds it otherwise in a vector than in a vector's
    tail: with pairs that do not fill whole vectors a row's bits would depend on its place, so those take real products.
    """
    if turn is None:
        out.copy_(x)
        return
    if x.shape[-1] % WHOLE == 0:
        pairs = torch.view_as_complex(x.float().contiguous().unflatten(-1, (-1, 2)))
        out.copy_(torch.view_as_real(pairs * torch.view_as_complex(turn).unsqueeze(1)).flatten(-2))
        return
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = turn.unsqueeze(1).unbind(-1)
    target = out.unflatten(-1, (-1, 2))
    target[..., 0] = first * cos - second * sin
    target[..., 1] = second * cos + first * sin
