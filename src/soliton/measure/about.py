"""What a measurement says of where it was made: commit, device, driver, types and sampling."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

from ..ops.device import name as device_name
from ..sampling.params import Resolved

__all__ = ["commit", "device_name", "driver", "dtypes", "sampling_words"]


def sampling_words(params: Resolved) -> str:
    """How tokens are drawn, in a few signs."""
    words = [] if params.greedy else [f"T={params.temperature:g} p={params.top_p:g} k={params.top_k}"]
    words += [f"min-p={params.min_p:g}"] if params.min_p and not params.greedy else []
    words += ["with processors"] if params.processors else []
    words += [f"logprobs={params.logprobs}"] if params.logprobs is not None else []
    return " ".join((["greedy"] if params.greedy else []) + words)


def driver() -> str | None:
    """The version of NVIDIA's driver, or None."""
    try:
        said = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"\b\d+\.\d+(?:\.\d+)?\b", said)
    return found[0] if found else None


def commit() -> str | None:
    """The commit of this source tree, with + when it has changes; SOLITON_COMMIT outside one, or None."""
    named = os.environ.get("SOLITON_COMMIT")
    if named:
        return named
    try:
        where = Path(__file__).resolve().parents[3]
        run = lambda *a: subprocess.run(["git", *a], cwd=where, capture_output=True, text=True, check=True).stdout  # noqa: E731
        return run("rev-parse", "--short", "HEAD").strip() + ("+" if run("status", "--porcelain").strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def dtypes(report: dict[str, Any]) -> str:
    """The weights' type, and where routers or the head have another."""
    others = [f"{name} {report[f'{key}_dtype']}" for name, key in (("routers", "router"), ("head", "lm_head"))
              if report[f"{key}_dtype"] != report["dtype"]]  # fmt: skip
    return report["dtype"] + "".join(f" ({other})" for other in others)
