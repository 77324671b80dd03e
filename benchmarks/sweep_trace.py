"""Where a step's persistent kernels spend their time, from clock readings inside them.

    python benchmarks/sweep_trace.py [MODEL] [--rows N] [--context N] [--launches N] [--pieces] [--dump FILE]

MODEL defaults to synthetic:kimi-linear-48b?layers=5. Cycles of one multiprocessor, shown in microseconds at its clock
rate; medians over the blocks, of the last of several steps. For each instruction of a launch: when the multipliers came
to it (from the launch's first reading), the wait for the block's own sums, the wait for the grid, making the input, the
first piece's arrival, the rest, and when the copier issued its first and its last piece. ``late``: how long the block
in the middle waits for the grid beyond the one that waits least. In a recurrence, input and arrival are when its input
was there and when its rows were made ready.

--pieces: also the pieces of each instruction, by two multipliers (the first of the first and of the last four) and the
warp that adds up, medians over the blocks. --dump keeps all clock readings and each block's multiprocessor, for
torch.load.
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
from soliton.ops.sweep import LIST, MARKS, PIECES, STEPS, Sweep
from soliton.runtime import load_runtime
from soliton.sampling.params import SamplingParams

NAMES = ("product", "route", "load", "up", "down", "kda")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="synthetic:kimi-linear-48b?layers=5")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--launches", type=int, default=6, help="how many launches to show")
    parser.add_argument("--pieces", action="store_true")
    parser.add_argument("--dump", default=None)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device was found; this measures one")
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
            words = grid * LIST * (MARKS + PIECES * STEPS * args.pieces)
            sweep.trace, sweep.finely = torch.zeros(words, dtype=torch.int64, device="cuda"), args.pieces
        for _ in range(4):
            step.again()
            torch.cuda._sleep(20_000_000)  # the host runs ahead, so that launches follow one another
            runtime.loop.executor.launch(program)
        torch.cuda.synchronize()
    hertz = torch.cuda.clock_rate() * 1e6
    console = Console(width=150)
    print(f"{len(calls)} launches a step, {len(sweeps)} of them sweeps; {hertz / 1e6:.0f} MHz")
    for number, sweep in enumerate(sweeps[: args.launches]):
        console.print(shown(number, sweep, hertz, grid))
        if args.pieces:
            for i in range(len(sweep.instructions)):
                console.print(pieces(sweep, i, hertz, grid))
    if args.dump is not None:
        kept = [(str(s), s.trace.cpu() if s.trace is not None else None) for s in sweeps[: args.launches]]
        torch.save({"grid": grid, "hertz": hertz, "sweeps": kept}, args.dump)
    return 0


def pieces(sweep: Sweep, i: int, hertz: float, grid: int) -> Table:
    """One instruction, piece by piece, in µs from the first piece's beginning."""
    assert sweep.trace is not None
    times = sweep.trace[grid * LIST * MARKS :].view(grid, LIST, PIECES, STEPS)[:, i].cpu().double() / hertz * 1e6
    name = NAMES[sweep.instructions[i].kind]
    table = Table(title=f"{i} {name}: begin, input, weights, products, met; added up from, to")
    for head in ("piece", *(f"{who} {n}" for who in ("a", "b") for n in range(5)), "from", "to"):
        table.add_column(head)
    zero = torch.where(times > 0, times, float("inf")).flatten(1).min(1).values
    for p in range(PIECES):
        there = times[:, p] > 0
        if not bool(there.any()):
            break
        cells = [
            f"{float((times[:, p, n] - zero)[there[:, n]].median()):.2f}" if bool(there[:, n].any()) else ""
            for n in range(STEPS)
        ]
        table.add_row(str(p), *cells)
    return table


def shown(number: int, sweep: Sweep, hertz: float, grid: int) -> Table:
    """One launch."""
    assert sweep.trace is not None
    marks = sweep.trace[: grid * LIST * MARKS].view(grid, LIST, MARKS).cpu().double() / hertz * 1e6
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
        "late",
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
        begun = torch.where(m[:, 2] > 0, m[:, 2], m[:, 0])
        input_ = torch.where(m[:, 3] > 0, m[:, 3], begun)
        arrival = torch.where(m[:, 4] > 0, m[:, 4], input_)
        megabytes = f["n"] * f["k"] * 2 / 1e6 if "k" in f and item.kind != 5 else 0
        own = torch.where(m[:, 1] > 0, m[:, 1] - m[:, 0], 0.0)
        waits = torch.where(m[:, 1] > 0, begun - m[:, 1], 0.0)
        late = f"{float(waits.median() - waits.min()):.2f}"
        cells = [middle(m[:, 0] - zero), middle(own), middle(waits), late]
        cells += [middle(input_ - begun), middle(arrival - input_)]
        cells += [middle(m[:, 5] - arrival), middle(m[:, 5] - m[:, 0])]
        brought = [(m[:, c] - zero)[m[:, c] > 0] for c in (6, 7)]  # a block may have no piece
        cells += [middle(t) if len(t) else "" for t in brought]
        name = f"{'|' if item.sync else ' '}{NAMES[item.kind]}"
        table.add_row(name, str(f.get("n", "")), str(f.get("k", "")), f"{megabytes:.1f}", *cells)
    return table


if __name__ == "__main__":
    sys.exit(main())
