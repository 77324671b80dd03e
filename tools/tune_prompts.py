"""Tunes the kernels of flash-linear-attention for the supported models on this GPU, and keeps what it found.

    python tools/tune_prompts.py [DIR]

Without tuned configurations the first prompt of a head count waits over a minute. DIR defaults to the package's own
``ops/tuned/<device>``, which the engine points the library to. One JSON file a kernel, in the library's format; tuned
at 8192 tokens, and matched to other lengths by the library. Takes some minutes, and a GPU.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

HEADS = (16, 32)  # Ling-3.0-tiny; Ling-3.0-flash and Kimi-Linear
TOKENS = 8192
WIDTH = 128


def entries(cache: dict[tuple[Any, ...], Any]) -> dict[str, dict[str, Any]]:
    """A tuner's cache (key to triton.Config) as the library's ``autotune_entries``."""
    found = {}
    for key, config in cache.items():
        listed = list(key)
        name = hashlib.md5(json.dumps(listed, separators=(",", ":"), sort_keys=True).encode()).hexdigest()
        chosen = {"kwargs": config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}
        chosen |= {"num_ctas": config.num_ctas, "maxnreg": config.maxnreg}
        found[name] = {"autotune_key": listed, "config": chosen}
    return found


def dump(directory: Path, tuners: dict[str, dict[tuple[Any, ...], Any]]) -> int:
    """Write a file for each kernel that was tuned; returns how many."""
    import triton

    directory.mkdir(parents=True, exist_ok=True)
    tuned = {name: cache for name, cache in tuners.items() if cache}
    for name, cache in tuned.items():
        content = {"kernel_name": name, "triton_version": triton.__version__, "autotune_entries": entries(cache)}
        (directory / f"{name}.json").write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return len(tuned)


def main() -> int:
    os.environ["FLA_CACHE_MODE"] = "disabled"
    import torch
    from rich.progress import track
    from triton.runtime.autotuner import Autotuner

    from soliton.ops import bulk

    def call(heads: int, law: str) -> None:
        rows = torch.randn(TOKENS, 3 * heads * WIDTH, device="cuda", dtype=torch.bfloat16)
        gate = torch.randn(TOKENS, heads * WIDTH, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(TOKENS, heads, WIDTH, device="cuda", dtype=torch.bfloat16)
        a = torch.rand(heads * WIDTH, device="cuda")
        state = torch.zeros(heads, WIDTH, WIDTH, device="cuda")
        bulk.recurrence(out, rows, gate, gate[:, :heads], a, a, state, law, -5.0, 1e-6)  # type: ignore[arg-type]
        torch.cuda.synchronize()

    for heads, law in track([(h, law) for h in HEADS for law in ("bounded", "softplus")], description="tuning"):
        call(heads, law)
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else bulk.tuned()
    found = {o.base_fn.__name__: o.cache for o in gc.get_objects() if isinstance(o, Autotuner)}
    print(f"{dump(directory, found)} kernels in {directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
