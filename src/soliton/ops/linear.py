"""Skinny products: out = x @ w for a few rows."""

from __future__ import annotations

import torch
from torch import Tensor

from .weight import Weight

# A larger row count lets the library split the inner dimension on big matrices, and with it the order of the sums
# (seen from 256 rows on).
ROW_BLOCK = 64


def reference(out: Tensor, x: Tensor, w: Weight) -> None:
    """out[R, padded] = x[R, inputs] @ w, R >= 2.

    x: [R, inputs] any float dtype, rows contiguous; out: [R, w.padded] (columns beyond w.outputs become zero).
    Sums in float32, one rounding to out's dtype. Row i's bits depend on row i alone for every R from 2 up; a
    single row would take a matrix-vector path with another order, so callers pad to two.
    """
    assert x.shape[0] >= 2, "a single row has other bits; pad to two"
    for at in range(0, x.shape[0], ROW_BLOCK):
        rows = x[at : at + ROW_BLOCK]
        if rows.shape[0] == 1:  # a tail of one row: recompute it beside its predecessor
            rows, at = x[at - 1 : at + 1], at - 1
        target = out[at : at + rows.shape[0]]
        if out.dtype == torch.float32 == rows.dtype:
            torch.mm(rows, w.data, out=target)
        else:
            target.copy_(rows.float() @ w.data.float())


def heads_reference(out: Tensor, x: Tensor, w: Tensor) -> None:
    """out[R, n, N] = x[R, n, K] @ w[n, K, N], one product a head, float32 sums, one rounding. R >= 2."""
    product = torch.bmm(x.float().transpose(0, 1), w if w.dtype == torch.float32 else w.float())
    out.copy_(product.transpose(0, 1))
