"""What commands share: flags of the engine and of sampling, loading with a bar, Ctrl-C, the status line."""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..binder import own_variables
from ..config import EngineConfig, add_arguments, bind, flags_given
from ..errors import ConfigError
from ..sampling.params import ALIASES, SamplingParams

if TYPE_CHECKING:
    from ..engine import Engine, Stats

BLOCK_STYLES = ("cyan", "green")  # accepted blocks take turns
DEFAULT_MODEL = "pebble"
# Not flags. seed: the engine's own --seed does the same; n: only 1 is possible; top_logprobs: --logprobs is a number.
NOT_FLAGS = ("seed", "n", "top_logprobs")
HELP = {
    "max_tokens": "most tokens of the answer; up to the end of the context when unset",
    "temperature": "0 is greedy; the model's own default when unset",
    "top_p": "keep the likeliest tokens up to this probability",
    "stop": "text that ends the answer; may be given several times",
    "logprobs": "log-probabilities of the answer with N alternatives a token",
    "presence_penalty": "from -2 to 2",
    "frequency_penalty": "from -2 to 2",
    "logit_bias": "added to logits, as ID=VALUE,ID=VALUE",
    "top_k": "keep this many likeliest tokens; 0 is off",
    "min_p": "keep tokens at least this likely, relative to the likeliest",
    "repetition_penalty": "above 1 makes tokens already seen less likely",
    "min_tokens": "no end of the answer before so many tokens",
    "ignore_eos": "go on past the model's end tokens",
    "stop_token_ids": "token ids that end the answer, as 1,2,3",
    "skip_special_tokens": "leave special tokens out of the text",
    "prompt_logprobs": "log-probabilities of the prompt's tokens with N alternatives each",
    "json_schema": "the answer is JSON that this schema, itself JSON, allows",
    "json_object": "the answer is a JSON object",
    "regex": "the whole answer matches this regular expression",
    "ebnf": "the answer follows these rules, in Lark's or GBNF's notation",
    "grammar_after": "what the answer has to be begins behind this token id",
}
_PREFIX = "sampling."


def ids_from(text: str) -> list[int]:
    """Token ids from "1,2,3"; commas or spaces."""
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected token ids such as 1,2,3, not {text!r}") from None


def _bias_from(text: str) -> dict[int, float]:
    try:
        pairs = [pair.split("=") for pair in text.split(",")]
        return {int(token): float(value) for token, value in pairs}
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected ID=VALUE,ID=VALUE, not {text!r}") from None


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """A flag for each field of SamplingParams, absent from the namespace unless given."""
    group = parser.add_argument_group("sampling")
    hints = typing.get_type_hints(SamplingParams)
    for item in dataclasses.fields(SamplingParams):
        if item.name in NOT_FLAGS:
            continue
        hint = hints[item.name]
        parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        kinds = {typing.get_origin(part) or part for part in parts}
        names = [item.name, *(alias for alias, target in ALIASES.items() if target == item.name)]
        flags = ["--" + name.replace("_", "-") for name in names]
        common: dict[str, Any] = {
            "dest": _PREFIX + item.name,
            "default": argparse.SUPPRESS,
            "help": HELP[item.name],
        }
        if kinds == {bool}:
            group.add_argument(*flags, action=argparse.BooleanOptionalAction, **common)
        elif str in kinds:
            action = "append" if item.name == "stop" else "store"
            group.add_argument(*flags, action=action, metavar="TEXT", **common)
        elif int in kinds or float in kinds:
            kind = float if float in kinds else int
            group.add_argument(*flags, type=kind, metavar="N" if kind is int else "X", **common)
        elif item.name == "logit_bias":
            group.add_argument(*flags, type=_bias_from, metavar="ID=VALUE,...", **common)
        else:
            group.add_argument(*flags, type=ids_from, metavar="IDS", **common)


def sampling_given(args: argparse.Namespace, **defaults: Any) -> SamplingParams:
    """The SamplingParams of the command line over ``defaults``, checked as far as possible without a model."""
    given = {key.removeprefix(_PREFIX): value for key, value in vars(args).items() if key.startswith(_PREFIX)}
    params = SamplingParams(**(defaults | given))
    params.validate()
    return params


def add_engine(parser: argparse.ArgumentParser) -> None:
    """MODEL, --config and a flag for each setting of the engine."""
    group = parser.add_argument_group("engine", "Each is also an environment variable, and a key of the file.")
    add_arguments(typing.cast(argparse.ArgumentParser, group), EngineConfig)
    group.add_argument("--config", metavar="FILE", help="settings from a .toml or .json file")
    parser.add_argument("word", metavar="model", nargs="?", help="as --model")


def names_model(args: argparse.Namespace) -> bool:
    """Whether flags, environment or a file may name the model."""
    return "model" in args or "SOLITON_MODEL" in os.environ or args.config is not None


def take_model(args: argparse.Namespace) -> None:
    """Make the bare MODEL of the command line what --model says."""
    if args.word is None:
        return
    if "model" in args:
        raise ConfigError(f"two models: {args.word!r} and --model {args.model!r}; give one of them")
    args.model, args.word = args.word, None


def config_given(args: argparse.Namespace) -> EngineConfig:
    """The engine's config from flags over environment over file; the bundled model when nothing names one."""
    take_model(args)
    flags = flags_given(args, EngineConfig)
    if not names_model(args):
        flags["model"] = DEFAULT_MODEL
    env = own_variables(EngineConfig, os.environ)
    return bind(EngineConfig, flags=flags, env=env, file=args.config, defaults={"model": DEFAULT_MODEL})


def load(config: EngineConfig) -> Engine:
    """Load an engine, with a bar on stderr that vanishes; no bar when stderr is no terminal. Either way it says what
    has to be built because no earlier run has left it."""
    from ..engine import Engine
    from ..ops.building import told

    if not sys.stderr.isatty():
        with told(Once()):
            return Engine.from_config(config)
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("loading {task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("tensors"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(config.model, total=None)
        with told(lambda what: bar.update(task, description=f"{config.model}, building {what}")):
            return Engine.from_config(
                config, progress=lambda done, total: bar.update(task, completed=done, total=total)
            )


class Once:
    """Says on stderr what is being built, each kind of it once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def __call__(self, what: str) -> None:
        kind = what.partition(",")[0]
        if kind not in self._said:
            self._said.add(kind)
            print(f"building {kind}", file=sys.stderr)


@contextmanager
def bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A function(done, total) that moves a bar on stderr, which appears at its first call and vanishes at the end; none
    when stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    shown = Progress(console=Console(stderr=True), transient=True)
    task = shown.add_task(what, total=None)

    def move(done: int, total: int) -> None:
        if not done:
            shown.start()
        shown.update(task, completed=done, total=total)

    try:
        yield move
    finally:
        shown.stop()


@contextmanager
def interruptible(engine: Engine) -> Iterator[None]:
    """Ctrl-C ends the answer at its next step, a second one raises KeyboardInterrupt wherever it is."""

    def stop(signum: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, previous)
        engine.abort()

    try:
        previous = signal.signal(signal.SIGINT, stop)
    except ValueError:  # only the main thread may set handlers; elsewhere Ctrl-C is not ours
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def shown(text: str) -> str:
    """Text for a terminal: an escape character of the model's stays a picture of one."""
    return text.replace("\x1b", "␛")


def rate(stats: Stats) -> str:
    """Tokens a second after the first, in words."""
    return "- tokens/s" if not stats.tpot_s else f"{1 / stats.tpot_s:.1f} tokens/s"


def accept(stats: Stats) -> str:
    """The mean accept length, in words."""
    return "accept length -" if stats.accept_length is None else f"accept length {stats.accept_length:.2f}"


def status(stats: Stats, reason: str) -> str:
    """One line on how a request went."""
    tpot = "TPOT -" if stats.tpot_s is None else f"TPOT {stats.tpot_s * 1e3:.2f} ms"
    within = "" if stats.grammar is None else f"{stats.grammar} · "
    return (
        f"TTFT {stats.ttft_s * 1e3:.1f} ms · {tpot} · {rate(stats)} · {accept(stats)} · "
        f"run-ahead {stats.run_ahead_depth} · {within}cached {stats.cached_tokens} of {stats.prompt_tokens} · {reason}"
    )


def stats_json(stats: Stats) -> dict[str, Any]:
    """Stats for a JSON document, the mean accept length included."""
    return {**dataclasses.asdict(stats), "accept_length": stats.accept_length}


def read_text(path: str) -> str:
    """A file's text, or stdin's for "-"; ConfigError when it cannot be read."""
    try:
        if path == "-":
            return sys.stdin.read()
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"{path}: cannot be read ({reason})") from error


def table(title: str, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table on stdout; as wide as its contents when stdout is no terminal. Without ``heads``: no head line."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    cells = [[str(cell) for cell in row] for row in rows]
    columns = len(cells[0]) if cells else len(heads)
    wide = sum(max(len(row[i]) for row in cells) for i in range(columns)) if cells else 0
    made = Table(title=title, title_justify="left", box=box.SIMPLE, show_header=bool(heads))
    for head in heads or [""] * columns:
        made.add_column(head, overflow="fold")
    styles = {"FAIL": "red", "no": "yellow"}
    for row in cells:
        made.add_row(*row, style=next((style for word, style in styles.items() if word in row), None))
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, emoji=False, width=wide + 80)
    console.print(made)
