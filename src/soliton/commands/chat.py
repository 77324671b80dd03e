"""Talk with a model. /reset forgets the talk, /system TEXT sets the system message, /quit or end of input ends.

Ctrl-C stops an answer. On a terminal accepted blocks take turns of colour; from a pipe each line is one message.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..errors import BAD_INPUT, RequestError, UnsupportedError
from . import common

if TYPE_CHECKING:
    from ..engine import Engine, Piece
    from ..sampling.params import SamplingParams

COMMANDS = "/reset /system TEXT /quit"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """MODEL and the flags."""
    common.add_engine(parser)
    common.add_sampling(parser)
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")


def run(args: argparse.Namespace) -> int:
    """Check, load, talk until the input ends."""
    config = common.config_given(args)
    params = common.sampling_given(args)
    with common.load(config) as engine:
        checkpoint = engine.checkpoint
        if checkpoint.tokenizer is None or checkpoint.chat_template is None:
            lacks = "tokenizer" if checkpoint.tokenizer is None else "chat template"
            raise UnsupportedError(f"{checkpoint.name} has no {lacks}, so it cannot chat; use soliton generate")
        talk = Talk(engine, params, args.system)
        if sys.stdin.isatty():
            print(f"{checkpoint.name} · {COMMANDS}", file=sys.stderr)
        for line in _lines():
            if not talk.take(line):
                break
    # a script has to learn that a message got no answer; somebody at a terminal has read it
    return BAD_INPUT if talk.refused and not sys.stdin.isatty() else 0


def _lines() -> Iterator[str]:
    """Lines of the user, until end of input. Ctrl-C at the prompt of a terminal only starts a fresh line."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    import readline  # noqa: F401 - input() then edits its line

    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n/quit ends", file=sys.stderr)


class Talk:
    """A conversation over one engine."""

    def __init__(self, engine: Engine, params: SamplingParams, system: str | None) -> None:
        self._engine, self._params, self._system = engine, params, system
        self.history: list[dict[str, str]] = []
        self.refused = 0

    def take(self, line: str) -> bool:
        """Act on one line of the user; False when it ends the talk."""
        text = line.strip()
        if text == "/quit":
            return False
        if text == "/reset":
            self.history.clear()
        elif text == "/system" or text.startswith("/system "):
            self._system = text.removeprefix("/system").strip() or None
        elif text.startswith("/") and " " not in text:
            print(f"no command {text}; there are {COMMANDS}", file=sys.stderr)
        elif text:
            self._ask(text)
        return True

    def _ask(self, text: str) -> None:
        system = [{"role": "system", "content": self._system}] if self._system else []
        asked = {"role": "user", "content": text}
        try:
            pieces = self._engine.stream([*system, *self.history, asked], self._params)
        except RequestError as error:  # too long, or refused by the template: the talk goes on without it
            print(f"soliton: {error}", file=sys.stderr)
            self.refused += 1
            return
        parts: list[str] = []
        last: Piece | None = None
        with common.interruptible(self._engine), _screen() as write:
            for block, last in enumerate(pieces):
                parts.append(last.text)
                write(last, block)
        assert last is not None and last.finish_reason is not None and last.stats is not None
        print(common.status(last.stats, last.finish_reason), file=sys.stderr, flush=True)
        if "".join(parts):
            self.history += [asked, {"role": "assistant", "content": "".join(parts)}]


@contextmanager
def _screen() -> Iterator[Callable[[Piece, int], None]]:
    """A writer of blocks. On a terminal only the unfinished line is live; whole lines scroll away as they are made."""
    if not sys.stdout.isatty():
        yield lambda piece, block: print(piece.text, end="", flush=True)
        print(flush=True)
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    line, tokens, first = Text(), 0, 0.0
    with Live(line, console=console, transient=True, auto_refresh=False) as live:

        def write(piece: Piece, block: int) -> None:
            nonlocal line, tokens, first
            first = first or time.perf_counter()
            tokens += len(piece.token_ids)
            style = common.BLOCK_STYLES[block % len(common.BLOCK_STYLES)]
            *whole, rest = common.shown(piece.text).split("\n")
            for part in whole:
                console.print(line.append(part, style))
                line = Text()
            line.append(rest, style)
            live.update(line + Text("\n" + _so_far(tokens, block, time.perf_counter() - first), "dim"), refresh=True)

        yield write
        live.update(Text(), refresh=True)
    console.print(line)


def _so_far(tokens: int, later: int, seconds: float) -> str:
    """The live status: ``later`` steps after the first, which brought one token."""
    if not later or tokens < 2:
        return "Ctrl-C stops"
    mean = (tokens - 1) / later
    return f"TPOT {seconds / (tokens - 1) * 1e3:.2f} ms · accept length {mean:.2f} · Ctrl-C stops"
