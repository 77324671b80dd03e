"""Measure a model on this machine. `soliton measure step MODEL`: one step beside the floor that its bytes set.
`soliton measure ttft MODEL`: the time to the first token of a fresh prompt.

The last line is JSON; with --json it is the only one.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext
from typing import Any

from ..config import EngineConfig
from ..errors import ConfigError
from ..sampling.params import SamplingParams
from . import common

REPEATS = {"step": 30, "ttft": 7}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """step or ttft, MODEL and the flags."""
    parser.add_argument("what", choices=tuple(REPEATS), help="what to measure")
    common.add_engine(parser)
    common.add_sampling(parser)
    parser.add_argument("--rows", type=int, metavar="N", help="rows verified a step, where the model does not draft")
    parser.add_argument(
        "--context",
        type=int,
        metavar="TOKENS",
        help="tokens in the cache or the prompt; 8192, or as many as the model takes, when unset",
    )
    parser.add_argument("--repeats", type=int, metavar="N", help="timed steps, default 30, or prompts, default 7")
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
    repeats = REPEATS[args.what] if args.repeats is None else args.repeats
    if repeats < 1:
        raise ConfigError(f"--repeats {repeats}: at least 1 is needed")
    if args.what == "ttft":
        for flag in ("rows", "simulate_accept"):
            if getattr(args, flag) is not None:
                raise ConfigError(f"--{flag.replace('_', '-')} belongs to measure step; leave it out")
    config = common.config_given(args)
    params = common.sampling_given(args, temperature=0.0)
    for flag in ("max_tokens", "stop", "prompt_logprobs"):
        if getattr(params, flag):
            raise ConfigError(f"--{flag.replace('_', '-')} changes nothing that is measured; leave it out")
    from ..ops.chain import unchained

    with unchained() if args.no_pdl else nullcontext():
        title, rows, report = (_step if args.what == "step" else _ttft)(args, config, params, repeats)
    if not args.json:
        common.table(title, (), rows)
    print(json.dumps(report))
    return 0


Found = tuple[str, list[tuple[str, str]], dict[str, Any]]


def _step(args: argparse.Namespace, config: EngineConfig, params: SamplingParams, repeats: int) -> Found:
    from ..measure.step import as_table, measure_step
    from ..ops.building import told

    def progress(text: str) -> None:
        if sys.stderr.isatty():
            print(f"{text} ...", file=sys.stderr)

    with told(common.Once()):
        report = measure_step(
            config,
            rows=args.rows,
            context=args.context,
            params=params,
            repeats=repeats,
            progress=progress,
            accept=args.simulate_accept,
        )
    return "a step", as_table(report), report


def _ttft(args: argparse.Namespace, config: EngineConfig, params: SamplingParams, repeats: int) -> Found:
    from ..measure.ttft import as_table, measure_ttft

    with common.bar("reading prompts") as progress:
        report = measure_ttft(
            config, context=args.context, params=params, repeats=repeats, load=common.load, progress=progress
        )
    return "time to first token", as_table(report), report
