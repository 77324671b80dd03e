"""The read bandwidth that floors divide by, measured in the same run as what stands beside it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

READS = 5  # passes of the read benchmark; the best counts
STREAM_BYTES = {"cuda": 4 << 30, "cpu": 1 << 28}


def read_bandwidth(device: torch.device) -> float:
    """TB/s of reading a buffer much larger than any cache into registers, the best of READS passes."""
    count = STREAM_BYTES[device.type] // 4
    data = torch.ones(count, dtype=torch.float32, device=device)
    if device.type == "cuda":
        from ..ops.stream_triton import read

        out = torch.empty(1 << 16, dtype=torch.float32, device=device)
        call: Callable[[], object] = lambda: read(out, data)  # noqa: E731 - one of two
    else:
        call = data.sum
    call()
    best = 0.0
    for _ in range(READS):
        if device.type == "cuda":
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before.record()
            call()
            after.record()
            after.synchronize()
            seconds = float(before.elapsed_time(after)) / 1e3
        else:
            start = time.perf_counter()
            call()
            seconds = time.perf_counter() - start
        best = max(best, data.nbytes / seconds / 1e12)
    return best
