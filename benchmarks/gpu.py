"""Everything that needs a GPU in one go: the tests, then the numbers that docs/results.md shows, then their tables.

    python benchmarks/gpu.py [tests|grids|steps|ttft|all] [--models NAME ...] [--rows N ...] [--out DIR] [--limit S]

tests: pytest tests/gpu but its long grids, stopped at the first failures; `all` measures only behind green tests.
grids: the long grids alone: 10 prompts, 512 tokens, every number of drafts and every depth.
steps: `soliton measure step` for each model and number of rows, greedy, at a context of 8192, and a sampled one.
ttft: `soliton measure ttft` for each model, a prompt of 8192 tokens.
--out takes the JSON lines (steps.jsonl, ttft.jsonl). The last lines are the tables.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
MODELS = ("synthetic:kimi-linear-48b", "synthetic:ling-3.0-tiny")
SAMPLED = ("--temperature", "0.6", "--top-p", "0.95", "--top-k", "20")


def run_tests(limit: float, chosen: str) -> bool:
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-p", "no:cacheprovider", "--maxfail=3", "--tb=short"]
    command += ["-m", chosen]
    try:
        done = subprocess.run(command, cwd=ROOT, timeout=limit)
    except subprocess.TimeoutExpired:
        print(f"tests: no end after {limit:.0f} s")
        return False
    return done.returncode == 0


def measure(what: str, model: str, *words: str, limit: float) -> dict[str, Any] | None:
    """One report, or None when it failed (its words are printed)."""
    base = [sys.executable, "-m", "soliton", "measure", what, model, "--json", "--max-context", "9216"]
    command = [*base, "--speculation", "off", *words]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        print(f"{model} {' '.join(words)}: no end after {limit:.0f} s")
        return None
    if done.returncode:
        print(f"{model} {' '.join(words)}: {done.stderr.strip()[-2000:]}")
        return None
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="all", choices=("tests", "grids", "steps", "ttft", "all"))
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 6, 9, 17])
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--limit", type=float, default=540.0, help="seconds for all of it")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device was found; this measures one")
    ends = time.monotonic() + args.limit
    if args.what in ("tests", "grids", "all"):
        good = run_tests(ends - time.monotonic(), "full" if args.what == "grids" else "not full")
        if not good or args.what != "all":
            return 0 if good else 1
    wanted: list[tuple[str, str, tuple[str, ...]]] = []
    for model in args.models:
        if args.what != "ttft":
            wanted += [("step", model, ("--rows", str(n))) for n in args.rows]
            wanted.append(("step", model, ("--rows", "1", *SAMPLED)))
        if args.what != "steps":
            wanted.append(("ttft", model, ()))
    reports: dict[str, list[dict[str, Any]]] = {"step": [], "ttft": []}
    for what, model, words in wanted:
        left = ends - time.monotonic()
        report = measure(what, model, *words, limit=left) if left > 20 else None
        if report is not None:
            reports[what].append(report)
            print(json.dumps(report), flush=True)
            if args.out is not None:
                name = {"step": "steps.jsonl", "ttft": "ttft.jsonl"}[what]
                with (args.out / name).open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps(report) + "\n")
    if reports["step"]:
        show_steps(reports["step"])
    if reports["ttft"]:
        show_ttft(reports["ttft"])
    return 0 if sum(map(len, reports.values())) == len(wanted) else 1


def show_ttft(reports: list[dict[str, Any]]) -> None:
    """The table of first tokens."""
    table = Table(title="time to first token of a fresh prompt of 8192 tokens, in ms")
    for head in ("model", "ttft", "spread", "prefill tokens/s", "chunk", "ready, s", "from start, s"):
        table.add_column(head)
    for r in reports:
        spread = f"{r['spread_ms'][0]:.0f} to {r['spread_ms'][1]:.0f}"
        cells = (r["model"], r["ttft_ms"], spread, round(r["prefill_tokens_s"]), r["prefill_chunk"])
        table.add_row(*(str(c) for c in (*cells, r["load_s"], r["first_token_s"])))
    Console(width=160).print(table)


def show_steps(reports: list[dict[str, Any]]) -> None:
    """The table of steps."""
    table = Table(title="steps at a context of 8192, in µs")
    for head in ("model", "sampling", "rows", "step", "spread", "floor", "ratio", "GB", "experts", "idle", "kernels"):
        table.add_column(head)
    for r in reports:
        spread = f"{r['spread_us'][0]:.0f} to {r['spread_us'][1]:.0f}"
        cells = (r["model"], r["sampling"], r["rows"], r["step_us"], spread, r["floor_us"], r["ratio"])
        more = (round(r["bytes"] / 1e9, 3), r["experts_mean"], r["idle_us"], r["kernels"])
        table.add_row(*(str(c) for c in (*cells, *more)))
    Console(width=160).print(table)


if __name__ == "__main__":
    sys.exit(main())
