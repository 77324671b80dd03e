"""The one question that decides between a step of torch calls and a step of this package's own kernels; and names."""

from __future__ import annotations

import platform

import torch


def has_kernels(device: torch.device) -> bool:
    """Whether a step on this device runs the package's own kernels. Tests that emulate them on a CPU say so."""
    return device.type == "cuda"


def name(device: torch.device) -> str:
    """The GPU's or the processor's own name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
