"""Small calls on whole rows of a step, of which no sweep is made: a norm that no product makes itself, the embedding, a
product with float32 weights. Only where CUDA is."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .chain import chained


@triton.jit
def _norm(out, x, weight, ld_out, ld_x, H, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    inside = cols < H
    gdc_launch_dependents()
    gdc_wait()
    value = tl.load(x + row * ld_x + cols, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / H + eps)
    normed = value * scale * tl.load(weight + cols, mask=inside, other=0.0)
    tl.store(out + row * ld_out + cols, normed.to(out.dtype.element_ty), mask=inside)


def norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """out[R, H] = x / sqrt(mean(x^2) + eps) * weight, float32 inside, one rounding; a row's bits are its own."""
    _norm[(x.shape[0],)](
        out, x, weight, out.stride(0), x.stride(0), x.shape[1], eps, BLOCK=triton.next_power_of_2(x.shape[1]),
        num_warps=8, launch_pdl=chained(),
    )  # fmt: skip


@triton.jit
def _rows(out, ids, table, ld_out, ld_table, H, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    gdc_launch_dependents()
    gdc_wait()
    source = table + tl.load(ids + row) * ld_table
    tl.store(out + row * ld_out + cols, tl.load(source + cols, mask=cols < H), mask=cols < H)


def rows(out: Tensor, ids: Tensor, table: Tensor) -> None:
    """out[R, H] = table[ids]; ids: int64 [R] within the table; equal dtypes."""
    assert out.dtype == table.dtype and table.stride(1) == out.stride(1) == 1
    _rows[(out.shape[0],)](
        out, ids, table, out.stride(0), table.stride(0), out.shape[1], BLOCK=triton.next_power_of_2(out.shape[1]),
        num_warps=8, launch_pdl=chained(),
    )  # fmt: skip


@triton.jit
def _product(out, x, w, ld_out, ld_x, ld_w, N, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    row, first = tl.program_id(0), tl.program_id(1) * BLOCK_N
    outputs, cols = first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    gdc_launch_dependents()
    gdc_wait()
    total = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for at in range(0, K, BLOCK_K):
        inside = (outputs[:, None] < N) & (at + cols[None, :] < K)
        part = tl.load(w + outputs[:, None].to(tl.int64) * ld_w + at + cols[None, :], mask=inside, other=0.0)
        value = tl.load(x + row * ld_x + at + cols, mask=at + cols < K, other=0.0).to(tl.float32)
        total += part * value[None, :]
    tl.store(out + row * ld_out + outputs, tl.sum(total, 1), mask=outputs < N)


def product(out: Tensor, x: Tensor, w: Tensor) -> None:
    """out[R, N] = x[R, K] @ w[K, N]; w: float32, the transposed view of contiguous [N, K]; products and sums float32.

    A program has one row, so that a row's bits are its own; the rows of a tile run side by side, the tile comes from
    memory once and from L2 for the others.
    """
    assert w.dtype == out.dtype == torch.float32 and w.stride(0) == x.stride(1) == out.stride(1) == 1
    _product[(x.shape[0], triton.cdiv(w.shape[1], 16))](
        out, x, w, out.stride(0), x.stride(0), w.stride(1), w.shape[1], w.shape[0], BLOCK_N=16, BLOCK_K=256,
        num_warps=4, launch_pdl=chained(),
    )  # fmt: skip
