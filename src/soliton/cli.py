"""The command ``soliton``: finds the command, reads its flags, and turns every refusal into one line and exit code 2.

Each command is a module of ``commands`` with ``add_flags(parser)`` and ``run(args)``; only the one that was named is
imported, and torch not before its flags are known to be good, so that help and refusals come at once. A command with
PARTS takes the part's name first, and ``add_flags`` gets it.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import importlib.metadata
import os
import sys
import warnings
from collections.abc import Sequence
from typing import NoReturn

from .binder import check_environment
from .config import EngineConfig
from .errors import BAD_INPUT, ConfigError, SolitonError, nearest
from .server.config import ServerConfig

COMMANDS = {
    "generate": "continue a prompt and stream the text",
    "serve": "answer over HTTP, as OpenAI's and SGLang's clients expect",
    "chat": "talk with a model, with a history",
    "doctor": "this machine, and how a model would run on it",
    "measure": "time a step beside the floor that its bytes set, or a first token",
    "conform": "compare the engine with reference outputs, quantity by quantity",
    "train": "train a DSpark draft for a model: its data, the draft, series of drafts",
}
UNWRITABLE, INTERRUPTED, BROKEN_PIPE = 74, 130, 141
UNWRITABLE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # a full or failing disk under stdout


class Parser(argparse.ArgumentParser):
    """Refuses by ConfigError instead of a page of usage."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def version() -> str:
    """The installed version, or "unknown" for a bare source tree."""
    try:
        return importlib.metadata.version("soliton")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def parser_for(command: str, part: str | None = None) -> Parser:
    """The parser of one command, or of one of its parts."""
    module = importlib.import_module(f"soliton.commands.{command}")
    named = () if part is None else (part,)
    text = module.__doc__ if part is None else module.PARTS[part]
    parser = Parser(prog=" ".join(("soliton", command, *named)), description=text, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    module.add_flags(parser, *named)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 (checks failed), 2 (bad input), 74 (output cannot be
    written), 130 (Ctrl-C), 141 (reader gone)."""
    words = list(sys.argv[1:] if argv is None else argv)
    if sys.stdout is None or sys.stderr is None:  # closed by the caller: there is nobody to tell
        return UNWRITABLE
    warnings.showwarning = _warn
    try:
        return _run(words)
    except SolitonError as error:
        # A message may quote a file; one line is what a caller can read back.
        print(f"soliton: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _leave_stdout()  # whoever read it left
        return BROKEN_PIPE
    except OSError as error:
        if error.errno not in UNWRITABLE_ERRORS:
            raise
        print(f"soliton: the output cannot be written ({error.strerror or error}); make room for it", file=sys.stderr)
        _leave_stdout()
        return UNWRITABLE


def _warn(message: Warning | str, *_: object, **__: object) -> None:
    print(f"soliton: {' '.join(str(message).split())}", file=sys.stderr)


def _leave_stdout() -> None:
    """Python would complain again when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(words: list[str]) -> int:
    if not words or words[0] not in COMMANDS:
        return _without_command(words)
    command, rest = words[0], words[1:]
    check_environment((EngineConfig, ServerConfig), os.environ)
    module = importlib.import_module(f"soliton.commands.{command}")
    part = rest.pop(0) if rest and rest[0] in getattr(module, "PARTS", ()) else None
    parser = parser_for(command, part)
    # Settings may stand between MODEL and PROMPT, which plain parsing does not allow for optional arguments.
    args, unknown = parser.parse_known_intermixed_args(rest)
    if unknown:
        flags = [flag.lstrip("-") for action in parser._actions for flag in action.option_strings]
        close = nearest(unknown[0].split("=")[0].lstrip("-"), flags).replace("'", "'--", 1)
        raise ConfigError(f"unknown argument {unknown[0]!r}{close}")
    code = module.run(args)
    sys.stdout.flush()
    return int(code)


def _without_command(words: list[str]) -> int:
    listed = "\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items())
    parser = Parser(
        prog="soliton",
        usage="soliton COMMAND ...",
        description=f"Decodes one stream of a language model.\n\ncommands:\n{listed}",
        epilog="soliton COMMAND --help lists its settings.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"soliton {version()}")
    if not words:
        parser.print_help(sys.stderr)
        return BAD_INPUT
    if not words[0].startswith("-"):
        known = ", ".join(COMMANDS)
        raise ConfigError(f"no command {words[0]!r}{nearest(words[0], COMMANDS)}; the commands are {known}")
    parser.parse_args(words)
    return BAD_INPUT
