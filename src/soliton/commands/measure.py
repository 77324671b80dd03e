"""Measure a model on this machine. `soliton measure step MODEL`: one step beside the floor that its bytes set.

The last line is JSON; with --json it is the only one.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext

from ..errors import ConfigError
from . import common

WHAT = ("step",)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """step MODEL and the flags."""
    parser.add_argument("what", choices=WHAT, help="what to measure")
    common.add_engine(parser)
    common.add_sampling(parser)
    parser.add_argument("--rows", type=int, metavar="N", help="rows verified a step, where the model does not draft")
    parser.add_argument("--context", type=int, default=8192, metavar="TOKENS", help="tokens in the cache; default 8192")
    parser.add_argument("--repeats", type=int, default=30, metavar="N", help="timed steps; default 30")
    parser.add_argument(
        "--no-pdl", action="store_true", help="start each kernel when the one in front has ended, on a GPU"
    )
    parser.add_argument(
        "--simulate-accept", type=float, metavar="X", help="print the time a token at this accept length"
    )
    parser.add_argument("--json", action="store_true", help="only the JSON line")


def run(args: argparse.Namespace) -> int:
    """Check, load, measure, print."""
    common.take_model(args)
    if not common.names_model(args):
        raise ConfigError("nothing to measure: give MODEL, such as synthetic:ling-3.0-tiny")
    if args.repeats < 1:
        raise ConfigError(f"--repeats {args.repeats}: at least 1 is needed")
    config = common.config_given(args)
    params = common.sampling_given(args, temperature=0.0)
    from ..measure.step import as_table, measure_step, simulated
    from ..ops.chain import unchained

    def progress(text: str) -> None:
        if sys.stderr.isatty():
            print(f"{text} ...", file=sys.stderr)

    with unchained() if args.no_pdl else nullcontext():
        report = measure_step(
            config, rows=args.rows, context=args.context, params=params, repeats=args.repeats, progress=progress
        )
    if args.simulate_accept is not None:
        report = simulated(report, args.simulate_accept)
    if not args.json:
        common.table("a step", (), as_table(report))
    print(json.dumps(report))
    return 0
