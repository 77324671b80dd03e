"""Train a DSpark draft for a model. `soliton train data MODEL`: sequences to train on, answered by the model itself.
`soliton train dspark MODEL`: the draft. `soliton train ablate MODEL`: drafts that differ in a few settings, compared.

`soliton train WHAT --help` lists the settings of each. The last line is JSON; with --json it is the only one.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import itertools
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..config import add_arguments, bind, flags_given
from ..errors import BusyError, ConfigError, RequestError
from ..sampling.params import SamplingParams
from . import common

if TYPE_CHECKING:
    from ..engine import Engine, Generation
    from ..train.data import Dataset
    from ..train.evaluate import Evaluator
    from ..train.options import TrainOptions

PARTS = {
    "data": "Sequences to train on: the model's answers to prompts at several sampling settings, or texts.",
    "dspark": "Train a DSpark draft for MODEL on sequences that `soliton train data` made.",
    "ablate": "Train drafts that differ in a few settings, and set accept length beside the time of a draft.",
}
INTERRUPTED = 130
LEAST = {"answers": 1, "limit": 1, "max_length": 2, "eval_limit": 1, "eval_tokens": 2, "eval_context": 2}
PROMPTS_HELP = 'JSONL with "prompt" (text or token ids) or "messages" a line; .gz is read too'


def add_flags(parser: argparse.ArgumentParser, part: str | None = None) -> None:
    """The flags of a part, or only which parts there are."""
    if part is None:
        parser.add_argument("what", choices=tuple(PARTS), help="what to do")
        return
    parser.set_defaults(what=part)
    {"data": _data_flags, "dspark": _dspark_flags, "ablate": _ablate_flags}[part](parser)
    parser.add_argument("--json", action="store_true", help="only the JSON line")


def run(args: argparse.Namespace) -> int:
    """One part."""
    for flag, least in LEAST.items():
        if isinstance(value := getattr(args, flag, None), int) and value < least:  # an option of the run is a text here
            raise ConfigError(f"--{flag.replace('_', '-')} {value}: at least {least} is needed")
    return {"data": _data, "dspark": _dspark, "ablate": _ablate}[args.what](args)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file, which a killed process gives back; BusyError where another process has it."""
    import fcntl

    from ..train.errors import writing

    with writing(path, "the lock"):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            who = file.read().strip()
            raise BusyError(f"{path}: process {who} writes there; wait for its end, or choose another --out") from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


# -- data ------------------------------------------------------------------------------------------------------------


def _data_flags(parser: argparse.ArgumentParser) -> None:
    common.add_engine(parser)
    group = parser.add_argument_group("data", "--seed is the data's: every answer has a seed of its own made from it.")
    group.add_argument("--prompts", metavar="FILE", help=PROMPTS_HELP)
    group.add_argument("--texts", nargs="+", metavar="FILE", help='text files, or JSONL with "text" a line')
    group.add_argument("--merge", nargs="+", metavar="FILE", help="join the files that --part made")
    group.add_argument("--out", metavar="FILE", help="where to write")
    group.add_argument("--temperatures", default="0,0.6,1.0", metavar="X,X", help="default 0,0.6,1.0; they take turns")
    group.add_argument("--top-p", default="1", metavar="X,X", help="one, or one for each temperature; default 1")
    group.add_argument("--max-tokens", type=int, default=1024, metavar="N", help="of an answer, default 1024")
    group.add_argument("--ignore-eos", action="store_true", help="go on past the model's end tokens")
    group.add_argument("--answers", type=int, default=1, metavar="N", help="of each prompt, default 1")
    group.add_argument("--limit", type=int, metavar="N", help="only the first N prompts")
    group.add_argument("--part", metavar="I/N", help="only prompts I, I + N, ...; I from 0")
    group.add_argument("--max-length", type=int, default=2048, metavar="N", help="texts are cut here, default 2048")


def _data(args: argparse.Namespace) -> int:
    given = [name for name in ("prompts", "texts", "merge") if getattr(args, name)]
    if len(given) != 1:
        found = " and ".join(f"--{name}" for name in given) or "none"
        raise ConfigError(f"give one source: --prompts, --texts or --merge; found {found}")
    if args.out is None:
        raise ConfigError("--out is not set: give the file to write")
    out = Path(args.out)
    if out.exists():
        raise ConfigError(f"--out {out}: there is a file already; take it away, or choose another name")
    common.take_model(args)
    if args.merge:
        made = _merged(args.merge, out)
    else:
        if not common.names_model(args):
            raise ConfigError("no target: give MODEL, whose sequences these will be")
        config = common.config_given(args)
        settings, share = _settings(args), _share(args.part)
        if args.texts and share is not None:
            raise ConfigError("--part shares prompts out; with --texts leave it out")
        from ..train import data

        prompts = data.read_prompts(args.prompts)[: args.limit] if args.prompts else []
        # the file must not depend on which prompts one process has answered before
        config = dataclasses.replace(config, prefix_reuse="off")
        with locked(out.with_name(f".{out.name}.lock")), common.load(config) as engine:
            if args.texts:
                made = data.from_texts(engine, args.texts, out, max_length=args.max_length)
            else:
                seed = config.seed or 0
                asked = engine if share is None else _shared(engine, share, out, len(prompts), args.answers, seed)
                with common.bar("answering") as progress:
                    progress(0, len(prompts) * args.answers)
                    made = data.answer(
                        asked, prompts, settings, out, answers=args.answers, seed=seed, progress=progress
                    )
    report = _described(made, out)
    if not args.json:
        common.table("data", (), [(key.replace("_", " "), value) for key, value in report.items()])
    print(json.dumps(report))
    return 0


def _described(made: Dataset, out: Path) -> dict[str, Any]:
    return {
        "data": str(out),
        "target": made.head.get("target"),
        "sequences": len(made.samples),
        "supervised_tokens": sum(end - start for s in made.samples for start, end in s.spans),
        "longest": max(len(s.ids) for s in made.samples),
        "sha256": made.digest,
    }


def _settings(args: argparse.Namespace) -> list[SamplingParams]:
    from ..train.options import numbers

    temperatures, top_p = numbers(args.temperatures, "--temperatures"), numbers(args.top_p, "--top-p")
    if len(top_p) not in (1, len(temperatures)):
        raise ConfigError(
            f"--top-p has {len(top_p)} values beside {len(temperatures)} temperatures: give one, or as many"
        )
    found = [
        SamplingParams(temperature=t, top_p=p, max_tokens=args.max_tokens, ignore_eos=args.ignore_eos)
        for t, p in zip(temperatures, itertools.cycle(top_p))
    ]
    for params in found:
        params.validate()
    return found


def _share(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not int(found[1]) < int(found[2]):
        raise ConfigError(f"--part {text!r}: expected I/N with I from 0 to N - 1, such as 0/4")
    return int(found[1]), int(found[2])


class _Share:
    """An engine that answers the requests of one part, told by their seeds, and refuses the rest, which are then left
    out: so a part's sequences are the whole's own."""

    def __init__(self, engine: Engine, seeds: set[int]) -> None:
        self.checkpoint, self._engine, self._seeds = engine.checkpoint, engine, seeds

    def generate(self, prompt: Any, params: SamplingParams) -> Generation:
        if params.seed not in self._seeds:
            raise RequestError("another part's prompt")
        return self._engine.generate(prompt, params)


def _shared(engine: Engine, share: tuple[int, int], out: Path, prompts: int, answers: int, seed: int) -> Engine:
    from ..train.data import mixed

    first, of = share
    seeds = {mixed(seed, prompt, turn) for prompt in range(first, prompts, of) for turn in range(answers)}
    begun = out.with_name(out.name + ".part")
    for line in begun.read_text(encoding="utf-8").split("\n")[1:-1] if begun.exists() else []:
        if line != "null" and json.loads(line)["source"].get("prompt", first) % of != first:
            raise ConfigError(
                f"{begun} holds answers of another part than {first}/{of}; give each part a file of its own, or take "
                "that one away"
            )
    return cast("Engine", _Share(engine, seeds))


def _merged(files: Sequence[str], out: Path) -> Dataset:
    """Parts joined in the order that one process would have written."""
    from ..train import data

    parts = [data.load(file) for file in files]
    for file, part in zip(files, parts):
        if part.head != parts[0].head or "prompts" not in part.head:
            raise ConfigError(
                f"{file} is no part of the same data as {files[0]}: join files made with --prompts of the same target, "
                "prompts, settings and seed"
            )
    owners: dict[int, str] = {}
    for file, part in zip(files, parts):
        for prompt in {int(s.source["prompt"]) for s in part.samples}:
            if prompt in owners:
                raise ConfigError(f"{owners[prompt]} and {file} both answer prompt {prompt}; leave one of them out")
            owners[prompt] = file
    samples = sorted((s for part in parts for s in part.samples), key=lambda s: int(s.source["prompt"]))
    return data.save(samples, out, parts[0].head)


# -- dspark ----------------------------------------------------------------------------------------------------------


def _dspark_flags(parser: argparse.ArgumentParser) -> None:
    # only here and only for a part that trains: these settings bring torch along
    options = importlib.import_module("soliton.train.options").TrainOptions
    parser.add_argument("word", metavar="model", nargs="?", help="as --target")
    group = parser.add_argument_group("training", "By flags alone; no variable of the environment sets them.")
    add_arguments(cast(argparse.ArgumentParser, group), options)
    for action in group._group_actions:
        action.help = re.sub(r" \[SOLITON_\w+\]$", "", action.help or "")
        action.help = re.sub(r"\[SOLITON_\w+; ", "[", action.help)
    group = parser.add_argument_group("evaluation", "Greedy answers, served by the engine with the draft as it is.")
    group.add_argument("--eval-prompts", metavar="FILE", help=PROMPTS_HELP)
    group.add_argument("--eval-limit", type=int, metavar="N", help="of these at most N, spread over the file")
    group.add_argument("--eval-tokens", type=int, default=128, metavar="N", help="of an answer, default 128")
    text = "tokens of prompt and answer, default 4096"
    group.add_argument("--eval-context", type=int, default=4096, metavar="N", help=text)


def _dspark(args: argparse.Namespace) -> int:
    options = _options(args)
    from ..train.evaluate import engine_config, read_prompts
    from ..train.log import bar
    from ..train.run import train

    prompts = read_prompts(args.eval_prompts, args.eval_limit) if args.eval_prompts else None
    with ExitStack() as held:
        held.enter_context(locked(Path(options.out) / ".lock"))
        evaluator = _evaluator(args, options, prompts) if prompts else None
        engine = common.load(engine_config(options)) if evaluator is None else evaluator.engine
        held.enter_context(engine)
        stop = held.enter_context(stoppable())
        with bar("training") as report:
            result = train(
                options,
                engine=engine,
                report=report,
                evaluate=None if evaluator is None else _telling(evaluator),
                stop=stop,
                tell=lambda text: print(text, file=sys.stderr),
            )
    found = {"draft": str(result.draft), "steps": result.steps, "finished": result.finished, **result.lines}
    if not args.json:
        rows = [("draft", found["draft"]), ("steps", f"{result.steps} of {options.steps}")]
        rows += [(split, _words(split, line)) for split, line in result.lines.items()]
        common.table("a draft" if result.finished else "stopped; the same command goes on", (), rows)
    print(json.dumps(found))
    return 0 if result.finished else INTERRUPTED


def _words(split: str, line: Mapping[str, Any]) -> str:
    from ..train.evaluate import in_words

    if split == "eval":
        return in_words(line)
    rates = " ".join(_figure(rate, 2) for rate in line["accept_rate"])
    loss = f"loss {line['loss']:.3f}, " if "loss" in line else ""
    return f"{loss}accept length {line['tau']:.2f}, greedy {line['tau_greedy']:.2f}; rates by position {rates}"


def _figure(value: float | str | None, digits: int = 3) -> str:
    return "-" if value is None else value if isinstance(value, str) else f"{value:.{digits}f}"


def _options(args: argparse.Namespace, **more: Any) -> TrainOptions:
    from ..train.options import TrainOptions

    given = flags_given(args, TrainOptions)
    if args.word is not None:
        if "target" in given:
            raise ConfigError(f"two targets: {args.word!r} and --target {given['target']!r}; give one of them")
        given["target"] = args.word
    for key, what in (("target", "MODEL, such as pebble"), ("data", "--data FILE"), ("out", "--out DIR")):
        if key not in given:
            raise ConfigError(f"{key} is not set: give {what}")
    return bind(TrainOptions, flags={**given, **more})


def _evaluator(args: argparse.Namespace, options: TrainOptions, prompts: Sequence[Any]) -> Evaluator:
    from ..train.evaluate import evaluator_for

    return evaluator_for(options, prompts, tokens=args.eval_tokens, context=args.eval_context, load=common.load)


def _telling(evaluate: Callable[[Path, int], dict[str, Any]]) -> Callable[[Path, int], dict[str, Any]]:
    """The same, with a line on stderr."""

    def told(folder: Path, step: int) -> dict[str, Any]:
        found = evaluate(folder, step)
        print(f"step {step}: {_words('eval', found)}", file=sys.stderr)
        return found

    return told


@contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """A function that says whether Ctrl-C or SIGTERM asked to stop; a second one ends the process as usual."""
    asked, before = list[int](), dict[int, Any]()

    def ask(signum: int, frame: Any) -> None:
        signal.signal(signum, before[signum])
        asked.append(signum)
        print("stopping after this step; once more to stop at once", file=sys.stderr)

    try:
        for signum in (signal.SIGINT, signal.SIGTERM):
            before[signum] = signal.signal(signum, ask)
    except ValueError:  # only the main thread may set handlers
        before.clear()
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# -- ablate ----------------------------------------------------------------------------------------------------------


def _ablate_flags(parser: argparse.ArgumentParser) -> None:
    _dspark_flags(parser)
    group = parser.add_argument_group("series")
    text = "key=a,b ... (all combinations), or a .json list of {key: value}"
    group.add_argument("--grid", nargs="+", metavar="GRID", help=text)
    group.add_argument("--seeds", default="0", metavar="N,N", help="each setting is trained with each, default 0")


def _ablate(args: argparse.Namespace) -> int:
    if not args.grid:
        raise ConfigError("--grid is not set: give what differs, such as --grid markov=vanilla,none")
    if args.eval_prompts is None:
        raise ConfigError("--eval-prompts is not set: accept lengths are compared on prompts; give a file of them")
    base = _options(args)
    from ..train.evaluate import grid_from, means, read_prompts, series, shares
    from ..train.log import bar
    from ..train.options import numbers

    seeds = numbers(args.seeds, "--seeds", int)
    grid = grid_from(args.grid, lambda more: _options(args, **more), seeds)
    prompts = read_prompts(args.eval_prompts, args.eval_limit)
    with locked(Path(base.out) / ".lock"), ExitStack() as shown:

        def evaluator(options: TrainOptions) -> Evaluator:
            shown.close()  # one bar at a time, and loading has its own
            return _evaluator(args, options, prompts)

        def report(label: str) -> Any:
            shown.close()
            return shown.enter_context(bar(label))

        rows = series(grid, base, seeds, evaluator, report)
    if not args.json:
        heads = ("run", "accept length", "accepted by position", "held out, greedy", "draft µs", "seconds")
        cells = []
        for row in rows:
            served, held = row["eval"], row.get("valid", {}).get("tau_greedy")
            values = (row["run"], served["accept_length"], shares(served), held, served["draft_us"], row["seconds"])
            cells.append([_figure(value) for value in values])
        common.table(f"drafts for {base.target}, {base.steps} steps each", heads, cells)
        if len(seeds) > 1:
            names = ("setting", "accept length", "from", "to", "draft µs")
            common.table("over the seeds", names, [[_figure(v) for v in mean.values()] for mean in means(rows)])
    print(json.dumps({"runs": rows, "means": means(rows)}))
    return 0
