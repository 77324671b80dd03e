"""What each technique of a step on a GPU is worth: the same step with one left out at a time, in one run.

    python benchmarks/ab.py [MODEL ...] [--rows N] [--context N] [--repeats N]

MODEL defaults to synthetic:kimi-linear-48b and synthetic:ling-3.0-tiny. A line each as JSON, then a table. Times are of
one step (run-ahead: of a step of the loop), medians with their spread, cold weights; the whole step is timed first and
last, and what lies between those two is noise.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from soliton.checkpoint import open_checkpoint
from soliton.config import EngineConfig
from soliton.measure.about import commit, device_name
from soliton.measure.bandwidth import read_bandwidth
from soliton.measure.step import Repeated
from soliton.ops import fuse
from soliton.ops.chain import unchained
from soliton.runtime import Runtime, load_runtime
from soliton.sampling.params import Resolved, SamplingParams
from soliton.speculation.verify import Mode
from soliton.step import executor
from soliton.step.program import build

WORDS = {
    "kda": "recurrence in a kernel of its own",
    "signs": "the grid's barrier before the choice of experts",
    "route": "the choice of experts in a launch of its own",
    "swiglu": "SwiGLU of shared and dense parts in a kernel of its own",
    "ahead": "the next launch's weights not brought into L2",
    "head": "last norm and head in launches of their own",
}


WIDE = {
    "bfloat16 routers": {"router_dtype": "float32"},
    "bfloat16 head": {"lm_head_dtype": "float32"},
}


def measure_wide(model: str, rows: int, context: int, repeats: int) -> list[dict[str, Any]]:
    """Routers or head in float32: products of their own, between the sweeps. A load for each."""
    found = []
    for what, settings in WIDE.items():
        runtime, params = _loaded(model, rows, context, **settings)
        with torch.inference_mode():
            step = Repeated(runtime, runtime.program(params), params, context)
            times = sorted([step.time() for _ in range(repeats + 3)][3:])
            found.append(_report(runtime, what, rows, times, read_bandwidth(runtime.parts.device)))
        del step, runtime
        _free()
    return found


def _loaded(model: str, rows: int, context: int, **settings: Any) -> tuple[Runtime, Resolved]:
    config = EngineConfig(model=model, device="cuda", speculation="off", max_context=context + 1024, **settings)
    runtime = load_runtime(config, open_checkpoint(config.model), verify=rows)
    return runtime, SamplingParams(temperature=0.0).resolve({}, vocab=runtime.checkpoint.spec.vocab)


def _free() -> None:
    gc.unfreeze()
    gc.collect()
    torch.cuda.empty_cache()


def _report(runtime: Runtime, what: str, rows: int, times: list[float], bandwidth: float) -> dict[str, Any]:
    report = {
        "model": runtime.checkpoint.name,
        "left_out": what,
        "rows": rows,
        "step_us": round(statistics.median(times), 1),
        "spread_us": [round(times[0], 1), round(times[-1], 1)],
        "read_tb_s": round(bandwidth, 3),
        "device": device_name(runtime.parts.device),
        "commit": commit(),
    }
    print(json.dumps(report), flush=True)
    return report


def measure(model: str, rows: int, context: int, repeats: int) -> list[dict[str, Any]]:
    """One report for each variant."""
    runtime, params = _loaded(model, rows, context)
    found: list[dict[str, Any]] = []
    with torch.inference_mode():
        bandwidth = read_bandwidth(runtime.parts.device)

        def keep(what: str, time: Callable[[Repeated], float], program: Any = None) -> None:
            step = Repeated(runtime, program or runtime.program(params), params, context)
            times = sorted([time(step) for _ in range(repeats + 3)][3:])
            found.append(_report(runtime, what, rows, times, bandwidth))

        keep("nothing", Repeated.time)
        for name in fuse.TECHNIQUES:
            fuse.LEFT_OUT.add(name)
            program = build(runtime.parts)[Mode(sampled=False, processors=False)]
            fuse.LEFT_OUT.discard(name)
            _capture(runtime, program)
            keep(WORDS[name], Repeated.time, program)
        with ExitStack() as stack:
            stack.enter_context(unchained())
            _capture(runtime, runtime.program(params))
        keep("programmatic launches", Repeated.time)
        runtime.loop.executor = executor.GraphExecutor(runtime.relay, runtime.stream, phased=True)
        _capture(runtime, runtime.program(params))
        keep("one graph: a graph for each phase", Repeated.time)
        runtime.loop.executor = executor.GraphExecutor(runtime.relay, runtime.stream)
        _capture(runtime, runtime.program(params))
        keep("nothing, again", Repeated.time)
        for depth in (2, 0):
            runtime.loop.depth = depth
            keep(f"the loop at run-ahead {depth}", _looped)
    return found


def _looped(step: Repeated) -> float:
    times = step.loop(48)
    assert times is not None
    return times.whole


def _capture(runtime: Runtime, program: Any) -> None:
    runner = runtime.loop.executor
    assert isinstance(runner, executor.GraphExecutor)
    runner.capture([program])
    runtime.stream.clear()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["synthetic:kimi-linear-48b", "synthetic:ling-3.0-tiny"])
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device was found; this measures one")
    table = Table(title="one technique left out at a time, in µs")
    for head in ("model", "left out", "step", "spread", "more than whole"):
        table.add_column(head)
    for model in args.models:
        reports = measure(model, args.rows, args.context, args.repeats)
        _free()
        reports += measure_wide(model, args.rows, args.context, args.repeats)
        whole = reports[0]["step_us"]
        for r in reports:
            spread = f"{r['spread_us'][0]:.0f} to {r['spread_us'][1]:.0f}"
            table.add_row(model, r["left_out"], str(r["step_us"]), spread, f"{r['step_us'] - whole:+.1f}")
    Console(width=160).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
