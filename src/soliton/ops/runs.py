"""Elementwise functions whose bits do not depend on how many elements stand beside an element.

On a CPU torch walks a tensor in vectors and finishes each run with scalar code, and its scalar exp rounds otherwise
than its vector exp. A run ends at the end of a tensor or where the work is split among threads. So transcendental
functions here go over contiguous runs that end on a whole vector and are too short to be split.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# at or below this many elements torch's elementwise loops stay on one thread
RUN = 32768
VECTOR = 32


def in_runs(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply an in-place function to contiguous x (last axis a multiple of 32 on a CPU for exact bits); returns x."""
    if x.device.type != "cpu" or x.numel() <= RUN:
        function(x)
    else:
        for part in x.view(-1).split(RUN):
            function(part)
    return x


def silu_rows(x: Tensor) -> Tensor:
    """A new float32 tensor silu(x) of rows x[R, n], n a multiple of 32 on a CPU for exact bits."""
    if x.dtype == torch.float32 and x.numel() <= RUN:
        return F.silu(x)
    return in_runs(torch.ops.aten.silu_, x.to(torch.float32, copy=True, memory_format=torch.contiguous_format))


def sigmoid_rows(x: Tensor) -> Tensor:
    """sigmoid of narrow rows x[R, n] in float32, each row as a run of its own, so that R plays no part: rows that lie
    apart are walked one by one, rows that touch are padded to whole vectors."""
    if x.dtype == torch.float32 and not x.is_contiguous() and x.numel() <= RUN:
        return torch.sigmoid(x)
    wide = -(-x.shape[1] // VECTOR) * VECTOR
    padded = torch.zeros(x.shape[0], wide, dtype=torch.float32, device=x.device)
    padded[:, : x.shape[1]] = x
    return in_runs(torch.sigmoid_, padded)[:, : x.shape[1]]
