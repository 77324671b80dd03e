"""Skinny products: out = x @ w for a few rows."""

from __future__ import annotations

import torch
from torch import Tensor

from .weight import Weight

# Rows of one library call, and inputs summed in one call: beyond 768 inputs torch's product on a CPU changes the order
# of its sums with the row count and the threads (docs/log.md), in blocks of 512 it does not.
ROW_BLOCK = 64
INPUT_WHOLE, INPUT_BLOCK = 768, 512


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
        if out.dtype == torch.float32:
            product(target, rows.float(), w.data)
        else:
            whole = torch.empty(target.shape, dtype=torch.float32, device=out.device)
            product(whole, rows.float(), w.data)
            target.copy_(whole)


def product(out: Tensor, x: Tensor, w: Tensor) -> None:
    """out = x @ w in float32, the inputs in fixed blocks, one after the other."""
    w = w.float()
    if x.shape[1] <= INPUT_WHOLE:
        torch.mm(x, w, out=out)
        return
    torch.mm(x[:, :INPUT_BLOCK], w[:INPUT_BLOCK], out=out)
    for at in range(INPUT_BLOCK, x.shape[1], INPUT_BLOCK):
        out.addmm_(x[:, at : at + INPUT_BLOCK], w[at : at + INPUT_BLOCK])


def torch_product(out: Tensor, x: Tensor, w: Weight) -> None:
    """out[R, padded] = x @ w through torch's own product, for the many rows of a prompt on a GPU."""
    if w.data.dtype != x.dtype:
        out.copy_(torch.mm(x.float(), w.data.float()))
    elif out.dtype == x.dtype:
        torch.mm(x, w.data, out=out)
    else:
        out.copy_(torch.mm(x, w.data, out_dtype=out.dtype))


def heads_reference(out: Tensor, x: Tensor, w: Tensor) -> None:
    """out[R, n, N] = x[R, n, K] @ w[n, K, N], one product a head, float32 sums, one rounding. R >= 2."""
    product = torch.bmm(x.float().transpose(0, 1), w if w.dtype == torch.float32 else w.float())
    out.copy_(product.transpose(0, 1))
