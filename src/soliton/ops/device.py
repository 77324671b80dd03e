"""The one question that decides between a step of torch calls and a step of this package's own kernels."""

from __future__ import annotations

import torch


def has_kernels(device: torch.device) -> bool:
    """Whether a step on this device runs the package's own kernels. Tests that emulate them on a CPU say so."""
    return device.type == "cuda"
