"""Compare the engine with reference outputs (golden.json, golden.safetensors), quantity by quantity.

DIR is a conformance case or a directory of such. Kinds that are not decoded yet are named and do not fail.
Exit code 1 when any quantity is outside its tolerance.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import EngineConfig, bind
from ..errors import ConfigError
from . import common

if TYPE_CHECKING:
    from ..measure.conform import Report


def add_flags(parser: argparse.ArgumentParser) -> None:
    """DIR and the flags."""
    parser.add_argument("directories", nargs="+", metavar="DIR", help="a case, or a directory of cases")
    parser.add_argument("--dtype", default="float32", metavar="{float32,bfloat16}", help="default float32")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--threads", default=None, help="torch threads on a CPU; left as found when unset")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of tables")


def run(args: argparse.Namespace) -> int:
    """Check, compare, print."""
    flags = {"model": "-", "device": args.device, "threads": args.threads, "dtype": args.dtype}
    config = bind(EngineConfig, flags={key: value for key, value in flags.items() if value is not None}, env={})
    if config.dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"--dtype {config.dtype}: the references have tolerances for float32 and bfloat16")
    from ..measure.conform import conform, find_cases

    reports = []
    for path in find_cases(Path(text) for text in args.directories):
        reports.append(conform(path, dtype=config.dtype, device=config.device, threads=config.threads))
        if not args.json:
            _print(reports[-1])
    failed = [report.case for report in reports if report.failed]
    compared = sum(not report.skipped for report in reports)
    if args.json:
        print(json.dumps({"reports": [report.document() for report in reports], "failed": failed}))
    else:
        print(f"{compared} cases compared, {len(reports) - compared} not; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def _print(report: Report) -> None:
    if report.skipped:
        print(f"{report.case}: {report.skipped}\n")
        return
    words = {True: "pass", False: "FAIL", None: "shown"}
    rows = [
        (c.quantity, f"{c.worst:.3g}", "-" if c.tolerance is None else f"{c.tolerance:g}", words[c.passed], c.note)
        for c in report.checks
    ]
    heads = ("quantity", "worst", "tolerance", "", "note")
    common.table(f"{report.case}, {report.dtype}", heads, rows)
