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

Shard = Literal["replicated", "rows", "columns", "experts"]
# Elementwise loops of torch on a CPU treat the last few elements of a run with scalar code whose exp differs from the
# vector code. Merged products are padded to this many columns, so that a run always ends on a whole vector.
COLUMN_PAD = 64


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A linear map with ``inputs`` inputs and ``outputs`` outputs, y = x @ data[:, :outputs].

    data: [inputs, padded outputs] contiguous (or [experts, inputs, padded outputs]). This orientation is a contract,
    not a taste: a CPU's row-major product keeps its bits for every row count >= 2 only when the second operand is
    contiguous along its columns (docs/log.md). ``shard``: how a rank of tensor parallelism cuts it.
    """

    data: Tensor
    inputs: int
    outputs: int
    format: Literal["plain"] = "plain"
    scales: Tensor | None = None
    shard: Shard = "replicated"

    @property
    def padded(self) -> int:
        """Columns of the stored matrix, a multiple of COLUMN_PAD."""
        return self.data.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes held, scales included."""
        return self.data.nbytes + (self.scales.nbytes if self.scales is not None else 0)


def pack(parts: Sequence[Tensor], *, device: torch.device, dtype: torch.dtype, shard: Shard = "replicated") -> Weight:
    """Stack [out_i, in] matrices into one Weight; y holds their outputs side by side, then zero padding.

    On a CPU the numbers are rounded to ``dtype`` and kept in float32: torch's bf16 products there are neither
    faster at these sizes nor independent of the row count.
    """
    inputs = parts[0].shape[1]
    outputs = sum(p.shape[0] for p in parts)
    padded = -(-outputs // COLUMN_PAD) * COLUMN_PAD
    data = torch.zeros(inputs, padded, dtype=storage_dtype(device, dtype), device=device)
    at = 0
    for part in parts:
        data[:, at : at + part.shape[0]] = part.to(device=device, dtype=dtype).t()
        at += part.shape[0]
    return Weight(data=data, inputs=inputs, outputs=outputs, shard=shard)


def storage_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a weight of compute dtype ``dtype`` is kept on ``device``."""
    return torch.float32 if device.type == "cpu" else dtype
