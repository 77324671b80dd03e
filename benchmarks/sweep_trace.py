"""Where a step's persistent kernels spend their time, from clock readings inside them.

    python benchmarks/sweep_trace.py [MODEL] [--rows N] [--context N] [--launches N]

MODEL defaults to synthetic:kimi-linear-48b?layers=5. Cycles of one multiprocessor, shown in microseconds at its clock
rate; medians over the blocks, of the last of several steps. For each instruction of a launch: when the multipliers came
to it (from the launch's first reading), the wait for the block's own sums, the wait for the grid, making the input, the
first piece's arrival, the rest, and when the copier issued its first and its last piece.
"""

from __future__ import annotations

import argparse
import sys

import torch
from rich.console import Console
from rich.table import Table

from soliton.checkpoint import open_checkpoint
from soliton.config import EngineConfig
from soliton.measure.step import Repeated
from soliton.ops.sweep import LIST, MARKS, Sweep
from soliton.runtime import load_runtime
from soliton.sampling.params import SamplingParams

NAMES = ("product", "route", "load", "up", "down", "kda")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="synthetic:kimi-linear-48b?layers=5")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--launches", type=int, default=6, help="how many launches to show")
    args = parser.parse_args()
    config = EngineConfig(
        model=args.model, device="cuda", speculation="off", executor="eager", max_context=args.context + 1024
    )
    runtime = load_runtime(config, open_checkpoint(config.model), verify=args.rows)
    params = SamplingParams(temperature=0.0).resolve({}, vocab=runtime.checkpoint.spec.vocab)
    program = runtime.program(params)
    with torch.inference_mode():
        step = Repeated(runtime, program, params, args.context)
        calls = [e.function for p in program.phases for e in p.tape.entries]
        sweeps = [c for c in calls if isinstance(c, Sweep)]
        grid = torch.cuda.get_device_properties(0).multi_processor_count
        for sweep in sweeps:
            sweep.trace = torch.zeros(grid, LIST, MARKS, dtype=torch.int64, device="cuda")
        for _ in range(4):
            step.again()
            torch.cuda._sleep(20_000_000)  # the host runs ahead, so that launches follow one another
            runtime.loop.executor.launch(program)
        torch.cuda.synchronize()
    hertz = torch.cuda.clock_rate() * 1e6
    console = Console(width=150)
    print(f"{len(calls)} launches a step, {len(sweeps)} of them sweeps; {hertz / 1e6:.0f} MHz")
    for number, sweep in enumerate(sweeps[: args.launches]):
        console.print(shown(number, sweep, hertz))
    return 0


def shown(number: int, sweep: Sweep, hertz: float) -> Table:
    """One launch."""
    assert sweep.trace is not None
    marks = sweep.trace.cpu().double() / hertz * 1e6
    zero = marks[:, 0, 0].clone()
    table = Table(title=f"sweep {number}, µs")
    for head in (
        "instruction",
        "n",
        "k",
        "MB",
        "at",
        "sums",
        "grid",
        "input",
        "arrival",
        "rest",
        "whole",
        "copier first",
        "last",
    ):
        table.add_column(head)
    middle = lambda t: f"{float(t.median()):.2f}"  # noqa: E731
    for i, item in enumerate(sweep.instructions):
        f, m = item.fields, marks[:, i]
        begun = m[:, 2]
        input_ = torch.where(m[:, 3] > 0, m[:, 3], begun)
        arrival = torch.where(m[:, 4] > 0, m[:, 4], input_)
        megabytes = f["n"] * f["k"] * 2 / 1e6 if "k" in f and item.kind != 5 else 0
        own = torch.where(m[:, 1] > 0, m[:, 1] - m[:, 0], 0.0)
        grid = torch.where(m[:, 1] > 0, begun - m[:, 1], 0.0)
        cells = [middle(m[:, 0] - zero), middle(own), middle(grid), middle(input_ - begun), middle(arrival - input_)]
        cells += [middle(m[:, 5] - arrival), middle(m[:, 5] - m[:, 0])]
        cells += [middle(m[:, c] - zero) if bool((m[:, c] > 0).any()) else "" for c in (6, 7)]
        name = f"{'|' if item.sync else ' '}{NAMES[item.kind]}"
        table.add_row(name, str(f.get("n", "")), str(f.get("k", "")), f"{megabytes:.1f}", *cells)
    return table


if __name__ == "__main__":
    sys.exit(main())
