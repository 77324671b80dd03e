"""Row-independent building blocks for token distributions.

A verify step computes the same token position beside 0, 1 or 31 other rows, and its bits must not change. Float sums do
change with the number of rows (libraries split reductions by the whole shape), and on a CPU even an elementwise ``exp``
does (vector body and scalar tail differ in the last bit, and the tail moves). So this module offers:

* sums of probability mass in fixed-point int64, which are exact and therefore free of any order, on every device;
* ``exp`` and ``log`` evaluated row by row from a fresh, aligned buffer on a CPU, and in one launch elsewhere (there
  every element runs the same scalar code);
* integer keys that order float32 values exactly.

Single IEEE operations (+, -, *, /, comparisons, where) are correctly rounded everywhere and need no care.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def by_row(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply an elementwise ``fn`` to ``x`` [R, V] so that no row's bits depend on R or on the row's place.

    On a CPU each row is copied to its own aligned buffer and computed with the fixed shape [V]; elsewhere ``fn`` runs
    once on the whole tensor.
    """
    if x.device.type != "cpu" or x.shape[0] == 0:
        return fn(x)
    return torch.stack([fn(row.clone()) for row in x.unbind(0)])


def mass_bits(vocab: int) -> int:
    """Fraction bits of the fixed-point mass: the most for which ``vocab`` weights of 1.0 still sum below 2**62."""
    return 62 - max(1, (vocab - 1).bit_length())


def fixed_mass(weights: Tensor) -> Tensor:
    """Weights in [0, 1], [R, V] float32 or float64, as int64 multiples of 2**-mass_bits(V), rounded to nearest even.

    At V = 157184 the unit is 2**-44; weights below half of it have mass zero.
    """
    return torch.round(weights.to(torch.float64) * float(2 ** mass_bits(weights.shape[-1]))).to(torch.int64)


def order_key(x: Tensor) -> Tensor:
    """int32 keys that compare as the float32 values of ``x`` do; -0.0 and +0.0 share a key; NaN gets some key."""
    bits = (x + 0.0).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def row_max(x: Tensor) -> Tensor:
    """[R, V] -> [R, 1]; a maximum is exact in any order."""
    return x.amax(dim=-1, keepdim=True)


def exp_weights(logits: Tensor) -> Tensor:
    """exp(logits - row maximum): [R, V] float32 in [0, 1] whose maximum is exactly 1."""
    return by_row(torch.exp, logits - row_max(logits))
