"""Everything that needs a GPU in one go: the tests, then the steps that docs/results.md shows, then one table.

    python benchmarks/gpu.py [tests|steps|all] [--models NAME ...] [--rows N ...] [--out DIR] [--limit SECONDS]

tests: pytest tests/gpu, stopped at the first failures; steps are measured only behind green tests (or with `steps`).
steps: `soliton measure step` for each model and number of rows, greedy, at a context of 8192, and a sampled one.
--out takes the JSON lines (steps.jsonl) and the log. The last lines are the table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
MODELS = ("synthetic:kimi-linear-48b", "synthetic:ling-3.0-tiny")
SAMPLED = ("--temperature", "0.6", "--top-p", "0.95", "--top-k", "20")


def run_tests(limit: float) -> bool:
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-p", "no:cacheprovider", "--maxfail=3", "--tb=short"]
    try:
        done = subprocess.run(command, cwd=ROOT, timeout=limit)
    except subprocess.TimeoutExpired:
        print(f"tests: no end after {limit:.0f} s")
        return False
    return done.returncode == 0


def measure(model: str, *words: str, limit: float) -> dict[str, Any] | None:
    """One report, or None when it failed (its words are printed)."""
    base = [sys.executable, "-m", "soliton", "measure", "step", model, "--json", "--max-context", "9216"]
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
    parser.add_argument("what", nargs="?", default="all", choices=("tests", "steps", "all"))
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 6, 9, 17])
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--limit", type=float, default=540.0, help="seconds for all of it")
    args = parser.parse_args()
    ends = time.monotonic() + args.limit
    if args.what != "steps":
        good = run_tests(ends - time.monotonic())
        if not good or args.what == "tests":
            return 0 if good else 1
    reports = []
    for model in args.models:
        for words in (*(("--rows", str(n)) for n in args.rows), ("--rows", "1", *SAMPLED)):
            left = ends - time.monotonic()
            report = measure(model, *words, limit=left) if left > 20 else None
            if report is not None:
                reports.append(report)
                print(json.dumps(report), flush=True)
                if args.out is not None:
                    with (args.out / "steps.jsonl").open("a", encoding="utf-8") as lines:
                        lines.write(json.dumps(report) + "\n")
    show(reports)
    return 0 if reports else 1


def show(reports: list[dict[str, Any]]) -> None:
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
