"""The one question that decides between a step of torch calls and a step of this package's own kernels; and names."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import torch


def has_kernels(device: torch.device) -> bool:
    """Whether a step on this device runs the package's own kernels. Tests that emulate them on a CPU say so."""
    return device.type == "cuda"


def name(device: torch.device) -> str:
    """The GPU's or the processor's own name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()
