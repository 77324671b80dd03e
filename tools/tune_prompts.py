"""Tunes the kernels of flash-linear-attention for the supported models on this GPU, and keeps what it found.

    python tools/tune_prompts.py [DIR] [--most N] [--processes N]

Without tuned configurations the first prompt of a head count waits over a minute. DIR defaults to the package's own
``ops/tuned/<device>``, which the engine points the library to. One JSON file a kernel, in the library's format. No key
of the library holds the prompt's length but l2norm's (in steps of 65536 rows of heads), and a key that no file has is
matched by the numbers' places (FLA_CACHE_MODE=fuzzy), so any length and head count finds a configuration.

Most of the time is compiling. So first several processes compile, each every n-th configuration, into Triton's cache
on disk, without a launch; then one process alone times them. --most N: at most N configurations of a kernel, spread
over its list. A bounded law tries 7 kernels with 106 configurations in all on an H200 (l2norm 25, gate and its sum 6,
diagonal blocks 12, solving 6, factors 9, states 12, outputs 36); for a softplus law 16 others take the diagonal blocks.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# heads and gate law of Ling-3.0-tiny, Ling-3.0-flash and Kimi-Linear
LAYERS = ((16, "bounded"), (32, "bounded"), (32, "softplus"))
TOKENS = 8192
WIDTH = 128
WARM_MS, TIMED_MS = 5, 25  # of each configuration; the kernels take 20 to 300 µs


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


def spread(configs: list[Any], most: int | None) -> list[Any]:
    """At most ``most`` of them, over the whole list, which is a product of choices: a step that divides its length
    would leave some choices out."""
    if most is None or len(configs) <= most:
        return list(configs)
    step = max(len(configs) // most, 2)
    while math.gcd(step, len(configs)) > 1:
        step += 1
    return [configs[i * step % len(configs)] for i in range(most)]


def call(heads: int, law: str) -> None:
    """One recurrence over TOKENS rows."""
    import torch

    from soliton.ops import bulk

    def rows(width: int) -> Any:
        return torch.randn(TOKENS, width, device="cuda", dtype=torch.bfloat16)

    q, k, v, gate = (rows(heads * WIDTH) for _ in range(4))
    out = rows(heads * WIDTH).view(TOKENS, heads, WIDTH)
    a = torch.rand(heads * WIDTH, device="cuda") + 0.1
    state = torch.zeros(heads, WIDTH, WIDTH, device="cuda")
    bulk.recurrence(out, q, k, v, gate, gate[:, :heads], a, a, state, law, -5.0, 1e-6)  # type: ignore[arg-type]
    torch.cuda.synchronize()


def tuners(most: int | None) -> list[Any]:
    """The library's tuners, with ``most`` configurations each."""
    import fla.ops.kda  # noqa: F401 - makes them
    from triton.runtime.autotuner import Autotuner

    found = [o for o in gc.get_objects() if isinstance(o, Autotuner)]
    for tuner in found:
        tuner.configs = spread(tuner.configs, most)
    return found


def compile_part(part: int, parts: int, most: int | None) -> None:
    """Compile every ``parts``-th configuration, from ``part`` on, and launch nothing of what is tuned."""
    from triton.runtime.autotuner import Autotuner

    tuners(most)
    seen: set[tuple[Any, ...]] = set()

    def only_compile(self: Any, *args: Any, **kwargs: Any) -> None:
        for config in self.configs:
            mine = len(seen) % parts == part
            # what a kernel is compiled for besides its configuration: the constants, and which arguments are there
            constants = {n: v for n, v in kwargs.items() if isinstance(v, (bool, int, float, str, type(None)))}
            what = (self.base_fn.__name__, str(config), str(sorted(constants.items(), key=str)))
            if what in seen:
                continue
            seen.add(what)
            if mine:
                try:
                    self.fn.run(*args, **{**kwargs, "warmup": True}, **config.all_kwargs())
                except Exception as error:  # the timing process meets it again, and knows what to do
                    print(f"{what[0]}, {config}: {error}", file=sys.stderr)

    for kind in {Autotuner, *Autotuner.__subclasses__()}:
        kind.run = only_compile
    for heads, law in LAYERS:
        call(heads, law)


def tune(directory: Path | None, most: int | None) -> int:
    """Time every configuration, alone on the GPU, and write the best; returns how many kernels."""
    import triton
    from rich.progress import track

    from soliton.ops import bulk

    def brief(run: Any, quantiles: Any) -> Any:
        return triton.testing.do_bench(run, warmup=WARM_MS, rep=TIMED_MS, quantiles=quantiles)

    found = tuners(most)
    for tuner in found:
        tuner.__dict__["do_bench"] = brief
    for heads, law in track(LAYERS, description="timing"):
        call(heads, law)
    return dump(directory or bulk.tuned(), {tuner.base_fn.__name__: tuner.cache for tuner in found})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", type=Path, help="where the files go; the package's own when left out")
    parser.add_argument("--most", type=int, metavar="N", help="configurations of a kernel; all when left out")
    parser.add_argument("--processes", type=int, metavar="N", help="that compile; as many as cores when left out")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    import torch  # only here: its processes choose their own devices

    if not torch.cuda.is_available():
        parser.error("no CUDA device was found; kernels are tuned on one")
    os.environ["FLA_CACHE_MODE"] = "disabled"  # read when the library is imported
    os.environ["FLA_CACHE_RESULTS"] = "0"
    count = args.processes if args.processes is not None else len(os.sched_getaffinity(0))
    if args.part is not None:
        compile_part(args.part, count, args.most)
        return 0
    begun = time.perf_counter()
    base = [sys.executable, __file__, "--processes", str(count)]
    base += [] if args.most is None else ["--most", str(args.most)]
    ended = [worker.wait() for worker in [subprocess.Popen([*base, "--part", str(i)]) for i in range(count)]]
    compiled = time.perf_counter()
    if any(ended):
        print(f"{sum(map(bool, ended))} of {count} processes failed; what they left is compiled while it is timed")
    kernels = tune(args.directory, args.most)
    print(f"{kernels} kernels; compiling took {compiled - begun:.0f} s, timing {time.perf_counter() - compiled:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
