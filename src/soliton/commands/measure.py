"""Measure a model on this machine. `soliton measure step MODEL`: one step beside the floor that its bytes set.
`soliton measure ttft MODEL`: the time to the first token of a fresh prompt. `accept`: tokens a step on prompts.
`compare`: ways of decoding beside each other, on the same prompts in one run: TPOT and accept length. `serve`: TPOT
through `soliton serve` beside that of the engine alone.
Of a DSpark draft, `costs`: a step's time by verified rows, for --draft-costs; `calibration`: temperatures of its
confidence head, for calibration.json beside it. Both into --out.

The last line is JSON; with --json it is the only one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ..config import EngineConfig
from ..errors import ConfigError
from ..sampling.params import SamplingParams
from . import common

REPEATS = {"step": 30, "ttft": 7, "costs": 15, "serve": 12}
# flags that belong to some of what can be measured
ONLY = {
    "rows": ("step",),
    "simulate_accept": ("step",),
    "prompts": ("accept", "compare", "calibration", "serve"),
    "limit": ("accept", "compare", "calibration", "serve"),
    "ways": ("compare",),
    "out": ("costs", "calibration"),
    "keep_repeating": ("accept", "compare"),
    "storm": ("serve",),
    "context": ("step", "ttft", "costs"),
    "repeats": ("step", "ttft", "costs", "serve"),
}
FEW_ROUNDS = 10_000  # in fewer even a perfect head shows an error of over 1 %
ANSWERS = ("accept", "compare", "calibration", "serve")
ANSWER_TOKENS = 128


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What, MODEL and the flags."""
    parser.add_argument("what", choices=tuple(FUNCTIONS), help="what to measure")
    common.add_engine(parser)
    common.add_sampling(parser)
    parser.add_argument("--rows", type=int, metavar="N", help="rows verified a step, where the model does not draft")
    parser.add_argument(
        "--context",
        type=int,
        metavar="TOKENS",
        help="tokens in the cache or the prompt; 8192, or as many as the model takes, when unset",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        metavar="N",
        help="timed steps, default 30 (costs: 15), or prompts, default 7 (serve: 12)",
    )
    parser.add_argument(
        "--no-pdl", action="store_true", help="start each kernel when the one in front has ended, on a GPU"
    )
    parser.add_argument(
        "--simulate-accept", type=float, metavar="X", help="print the time a token at this accept length"
    )
    parser.add_argument(
        "--ways", nargs="+", metavar="WAY", default=None,
        help="off, nextn:N, dspark, dspark:fixed=N, dspark:threshold=X, dspark:cost; ratios are to the first",
    )  # fmt: skip
    parser.add_argument("--prompts", metavar="FILE", help='JSON lines with "prompt" or "messages"')
    parser.add_argument("--limit", type=int, metavar="N", help="prompts of the file, spread over it; all when unset")
    parser.add_argument(
        "--keep-repeating", action="store_true", help="count greedy answers that repeat themselves, too"
    )
    parser.add_argument("--storm", action="store_true", help="amid 200 idle connections and a client of bad requests")
    parser.add_argument("--out", metavar="FILE", help="where the costs or temperatures go")
    parser.add_argument("--json", action="store_true", help="only the JSON line")


def run(args: argparse.Namespace) -> int:
    """Check, load, measure, print."""
    common.take_model(args)
    if not common.names_model(args):
        raise ConfigError("nothing to measure: give MODEL, such as synthetic:ling-3.0-tiny")
    repeats = REPEATS.get(args.what, 1) if args.repeats is None else args.repeats
    if repeats < 1:
        raise ConfigError(f"--repeats {repeats}: at least 1 is needed")
    for flag, whose in ONLY.items():
        given = getattr(args, flag)
        if given is not None and given is not False and args.what not in whose:
            belongs = " and ".join(f"measure {what}" for what in whose)
            raise ConfigError(f"--{flag.replace('_', '-')} belongs to {belongs}; leave it out")
    if args.what in ONLY["prompts"] and args.what != "serve" and not args.prompts:
        raise ConfigError(f"measure {args.what} answers prompts: give --prompts FILE")
    config = common.config_given(args)
    params = common.sampling_given(args, temperature=0.0)
    answers = args.what in ANSWERS
    for flag in ("stop", "prompt_logprobs", *(() if answers else ("max_tokens",))):
        if getattr(params, flag):
            raise ConfigError(f"--{flag.replace('_', '-')} changes nothing that is measured; leave it out")
    from ..ops.chain import unchained

    with unchained() if args.no_pdl else nullcontext():
        title, rows, report = FUNCTIONS[args.what](args, config, params, repeats)
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


def _answering(args: argparse.Namespace, params: SamplingParams) -> tuple[list[Any], SamplingParams]:
    from ..measure.accept import read_prompts

    if args.limit is not None and args.limit < 1:
        raise ConfigError(f"--limit {args.limit}: at least 1 prompt is needed")
    most = ANSWER_TOKENS if params.max_tokens is None else params.max_tokens
    return read_prompts(args.prompts, args.limit), dataclasses.replace(params, max_tokens=most)


def _accept(args: argparse.Namespace, config: EngineConfig, params: SamplingParams, repeats: int) -> Found:
    from ..measure.about import commit, sampling_words
    from ..measure.accept import count

    prompts, params = _answering(args, params)
    with common.load(config) as engine, common.bar("answering") as progress:
        resolved = params.resolve({}, vocab=engine.checkpoint.spec.vocab)
        found = count(engine, prompts, params, exclude=resolved.greedy and not args.keep_repeating, progress=progress)
        settled, drafter = engine.config, engine._ready().parts.drafter
        report = {
            "model": engine.checkpoint.name, "draft": drafter.spec.name if drafter is not None else None,
            "speculation": settled.speculation,
            "drafts": settled.speculative_num_steps or 0, "draft_verify": settled.draft_verify,
            "sampling": sampling_words(resolved), "max_tokens": params.max_tokens, "file": args.prompts,
            **found.report(settled.speculative_num_steps or 0), "commit": commit(),
        }  # fmt: skip
    rows = [
        ("model", f"{report['model']}, {report['speculation']}, {report['drafts']} drafts, {report['sampling']}"),
        (
            "prompts",
            f"{report['prompts']} counted, {report['excluded']} left out because they repeat themselves, "
            f"{report['refused']} refused",
        ),
        ("accept length", "-" if report["accept_length"] is None else f"{report['accept_length']:.3f}"),
        ("accepted by position", " ".join(f"{share:.2f}" for share in report["accepted_at_position"])),
    ]
    return "tokens a step", rows, report


def _compare(args: argparse.Namespace, config: EngineConfig, params: SamplingParams, repeats: int) -> Found:
    from ..measure.compare import as_table, compare

    prompts, params = _answering(args, params)
    words = args.ways or ["off", "nextn:3"]
    with common.bar("answering") as progress:
        exclude = not args.keep_repeating
        report = compare(config, words, prompts, params, load=common.load, exclude=exclude, progress=progress)
    return "ways of decoding", as_table(report), {**report, "file": args.prompts}


def _serve(args: argparse.Namespace, config: EngineConfig, params: SamplingParams, repeats: int) -> Found:
    from ..measure.serve import as_table, measure_serve

    prompts = None
    if args.prompts:
        prompts, params = _answering(args, params)
    elif params.max_tokens is None:
        params = dataclasses.replace(params, max_tokens=ANSWER_TOKENS)
    with common.bar("answering") as progress:
        report = measure_serve(
            config, prompts, params, count=repeats, load=common.load, stormy=args.storm, progress=progress
        )
    return "the server beside the engine", as_table(report), {**report, "file": args.prompts}


def _costs(args: argparse.Namespace, config: EngineConfig, params: SamplingParams, repeats: int) -> Found:
    from ..measure.costs import measure_costs

    with common.bar("timing steps") as progress:
        costs = measure_costs(config, context=args.context, params=params, repeats=repeats, progress=progress)
    if args.out:
        costs.save(args.out)
    rows = [("draft", f"{costs.draft_us:.1f} µs")]
    rows += [(f"verify {n} rows", f"{time:.1f} µs") for n, time in enumerate(costs.verify_us, 1)]
    return "a step by rows", rows, dataclasses.asdict(costs)


def _calibration(args: argparse.Namespace, config: EngineConfig, params: SamplingParams, repeats: int) -> Found:
    from ..measure.accept import calibrate

    prompts, params = _answering(args, params)
    if len(prompts) < 2:
        raise ConfigError(f"{len(prompts)} prompt: half of them are kept for testing the temperatures; give more")
    # what is fitted are the head's own logits: temperatures of before have no say
    config = dataclasses.replace(config, run_ahead=0, draft_verify="all", draft_calibration=None, draft_costs=None)
    with common.load(config) as engine, common.bar("answering") as progress:
        found, tested = calibrate(engine, prompts, params, dataset=Path(args.prompts).name, progress=progress)
    if found.num_samples < FEW_ROUNDS:
        text = f"temperatures of {found.num_samples} rounds are mostly chance: give at least {FEW_ROUNDS:,}"
        warnings.warn(f"{text}, by more prompts or a higher max_tokens", stacklevel=1)
    if args.out:
        found.save(args.out)
    rows = [("rounds", f"{found.num_samples}; errors are of each half with temperatures fitted on the other")]
    for slot, heat in enumerate(found.temperatures, 1):
        half, before, after = (getattr(tested, k)[slot - 1] for k in ("temperatures", "ece_before", "ece_after"))
        text = f"temperature {heat:.3g}, of half the prompts {half:.3g}; error {after:.4f}, before {before:.4f}"
        rows.append((f"slot {slot}", text))
    report = {**dataclasses.asdict(found), "held_out": dataclasses.asdict(tested)}
    return "calibration", rows, report


FUNCTIONS = {
    "step": _step, "ttft": _ttft, "accept": _accept, "compare": _compare, "costs": _costs, "calibration": _calibration,
    "serve": _serve,
}  # fmt: skip
