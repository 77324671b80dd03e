"""A weight as one value: the numbers, their storage format, their scales and the way they shard.

Ops pick their variant by ``format``. Only "plain" exists so far; block fp8, int4 groups and mxfp4 will add formats
and scales without changing a signature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from . import device as where

Shard = Literal["replicated", "rows", "columns", "experts"]
# Elementwise loops of torch on a CPU treat the last few elements of a run with scalar code whose exp differs from the
# vector code. Merged products are padded to this many columns, so that a run always ends on a whole vector.
COLUMN_PAD = 64
ROW_PAD = 8  # of rows stored for a GPU


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A linear map with ``inputs`` inputs and ``outputs`` outputs, y = x @ data[:, :outputs].

    data: [inputs, padded outputs] contiguous (or [experts, inputs, padded outputs]). This orientation is a contract,
    not a taste: a CPU's row-major product keeps its bits for every row count >= 2 only when the second operand is
    contiguous along its columns (docs/log.md). On a GPU it is the transposed view of contiguous [padded outputs,
    inputs], whose rows the sweeps stream. ``shard``: how a rank of tensor parallelism cuts it. ``paired``: outputs 2 i
    and 2 i + 1 are gate and up of a SwiGLU's element i; otherwise all gates come before all ups.
    """

    data: Tensor
    inputs: int
    outputs: int
    format: Literal["plain"] = "plain"
    scales: Tensor | None = None
    shard: Shard = "replicated"
    paired: bool = False

    @property
    def padded(self) -> int:
        """Columns of the stored matrix, a multiple of COLUMN_PAD."""
        return self.data.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes held, scales included."""
        return self.data.nbytes + (self.scales.nbytes if self.scales is not None else 0)


def pack(
    parts: Sequence[Tensor],
    *,
    device: torch.device,
    dtype: torch.dtype,
    shard: Shard = "replicated",
    paired: bool = False,
) -> Weight:
    """Stack [out_i, in] matrices into one Weight; y holds their outputs side by side, then zero padding. ``paired``: of
    two matrices (gate, up) the rows take turns, on a GPU.

    On a CPU the numbers are rounded to ``dtype`` and kept in float32: torch's bf16 products there are neither
    faster at these sizes nor independent of the row count.
    """
    inputs = parts[0].shape[1]
    outputs = sum(p.shape[0] for p in parts)
    if where.has_kernels(device):
        return _pack_rows(parts, inputs, outputs, device, dtype, shard, paired)
    padded = -(-outputs // COLUMN_PAD) * COLUMN_PAD
    data = torch.zeros(inputs, padded, dtype=storage_dtype(device, dtype), device=device)
    at = 0
    for part in parts:
        data[:, at : at + part.shape[0]] = part.to(device=device, dtype=dtype).t()
        at += part.shape[0]
    return Weight(data=data, inputs=inputs, outputs=outputs, shard=shard)


def _pack_rows(
    parts: Sequence[Tensor],
    inputs: int,
    outputs: int,
    device: torch.device,
    dtype: torch.dtype,
    shard: Shard,
    paired: bool,
) -> Weight:
    rows = torch.zeros(-(-outputs // ROW_PAD) * ROW_PAD, inputs, dtype=dtype, device=device)
    if paired:
        gate, up = parts
        rows[0:outputs:2], rows[1:outputs:2] = gate, up
    else:
        at = 0
        for part in parts:
            rows[at : at + part.shape[0]] = part
            at += part.shape[0]
    return Weight(data=rows.t(), inputs=inputs, outputs=outputs, shard=shard, paired=paired)


def storage_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a weight of compute dtype ``dtype`` is kept on ``device``."""
    return torch.float32 if device.type == "cpu" else dtype
