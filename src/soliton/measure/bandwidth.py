"""Timing one call, and the read bandwidth that floors divide by, measured in the same run as what stands beside it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

READS = 5  # passes of the read benchmark; the best counts
STREAM_BYTES = {"cuda": 4 << 30, "cpu": 1 << 28}


def microseconds(device: torch.device, call: Callable[[], object]) -> float:
    """Of one call: between events around it on a GPU, by the clock elsewhere."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    call()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after)) * 1e3


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
    return data.nbytes / min(microseconds(device, call) for _ in range(READS)) / 1e6
