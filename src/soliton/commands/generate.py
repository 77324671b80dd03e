"""Continue a prompt: a text, token ids or chat messages. The text goes to stdout, how it went to stderr."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from . import common

if TYPE_CHECKING:
    from ..engine import Engine, Generation, Piece, Prompt, Stats
    from ..sampling.logprobs import TokenLogprob
    from ..sampling.params import SamplingParams

DEMO_PROMPT = '''import os


def remove_file(path):
    """Remove a file if it exists."""'''
# up to the blank lines behind the function
DEMO = {"temperature": 0.0, "max_tokens": 96, "stop": ["\n\n\n"]}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """MODEL, PROMPT and the flags."""
    common.add_engine(parser)
    common.add_sampling(parser)
    parser.add_argument("prompt", nargs="?", metavar="prompt", help="the prompt's text, or - for stdin")
    parser.add_argument("--prompt-file", metavar="FILE", help="the prompt's text from a file")
    parser.add_argument("--ids", type=common.ids_from, metavar="IDS", help="the prompt as token ids, as 1,2,3")
    parser.add_argument("--messages", metavar="FILE", help="chat messages, a JSON list of {role, content}")
    parser.add_argument("--demo", action="store_true", help="complete a small Python function, greedily")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout instead of text")


def run(args: argparse.Namespace) -> int:
    """Check, load, answer."""
    take_words(args)
    config = common.config_given(args)
    prompt = _prompt(args)
    params = common.sampling_given(args, **(DEMO if args.demo else {}))
    with common.load(config) as engine:
        if args.json:
            return _document(engine, prompt, params)
        if args.demo:
            print(DEMO_PROMPT, end="", flush=True)
        return _text(engine, prompt, params, demo=args.demo)


def take_words(args: argparse.Namespace) -> None:
    """One bare word is the prompt where something else names the model; "-" always is."""
    others = (args.prompt, args.prompt_file, args.ids, args.messages)
    alone = args.word is not None and others == (None,) * 4 and not args.demo
    if alone and (args.word == "-" or common.names_model(args)):
        args.prompt, args.word = args.word, None


def _prompt(args: argparse.Namespace) -> Prompt:
    given = [name for name in ("prompt", "prompt_file", "ids", "messages") if getattr(args, name) is not None]
    given += ["demo"] if args.demo else []
    ways = "PROMPT, - (stdin), --prompt-file, --ids, --messages or --demo"
    if len(given) != 1:
        found = " and ".join("PROMPT" if name == "prompt" else "--" + name.replace("_", "-") for name in given)
        taken = f" (MODEL is {args.model!r})" if "model" in args and not given else ""
        raise ConfigError(f"give one prompt: {ways}; found {found or 'none'}{taken}")
    if args.demo:
        return DEMO_PROMPT
    if args.ids is not None:
        return list(args.ids)
    if args.messages is not None:
        return _messages(args.messages)
    if args.prompt_file is not None:
        return common.read_text(args.prompt_file)
    return common.read_text("-") if args.prompt == "-" else str(args.prompt)


def _messages(path: str) -> list[dict[str, Any]]:
    text = common.read_text(path)
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise ConfigError(f"{path}: a JSON list of messages is needed, each an object with role and content")
    return messages


def _document(engine: Engine, prompt: Prompt, params: SamplingParams) -> int:
    with common.interruptible(engine):
        answer = engine.generate(prompt, params)
    print(json.dumps(document(answer), ensure_ascii=False))
    return 130 if answer.finish_reason == "abort" else 0


def document(answer: Generation) -> dict[str, Any]:
    """What ``--json`` prints."""
    return {
        "ids": answer.token_ids,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "logprobs": _logged(answer.logprobs),
        "prompt_logprobs": _logged(answer.prompt_logprobs),
        "stats": common.stats_json(answer.stats),
    }


def _logged(entries: list[TokenLogprob] | list[TokenLogprob | None] | None) -> list[Any] | None:
    return None if entries is None else [entry and dataclasses.asdict(entry) for entry in entries]


def _text(engine: Engine, prompt: Prompt, params: SamplingParams, *, demo: bool) -> int:
    write = _writer()
    spelled = engine.checkpoint.tokenizer is not None
    last: Piece | None = None
    ended = True  # whether stdout stands at the start of a line
    with common.interruptible(engine):
        for block, last in enumerate(engine.stream(prompt, params)):
            text = last.text if spelled else "".join(f"{token} " for token in last.token_ids)
            if text:
                write(text, block)
                ended = text.endswith("\n")
    assert last is not None and last.finish_reason is not None and last.stats is not None
    if not ended:
        print(flush=True)
    if demo:
        print(_demo_line(last.stats), flush=True)
    else:
        print(common.status(last.stats, last.finish_reason), file=sys.stderr)
    return 130 if last.finish_reason == "abort" else 0


def _demo_line(stats: Stats) -> str:
    return f"\n{stats.completion_tokens} tokens: {common.accept(stats)}, {common.rate(stats)}"


def _writer() -> Callable[[str, int], None]:
    """Writes a block's text: in turns of colour on a terminal, as it is elsewhere."""
    if not sys.stdout.isatty():
        return lambda text, block: print(text, end="", flush=True)
    from rich.console import Console

    console = Console(highlight=False)
    styles = common.BLOCK_STYLES
    return lambda text, block: console.out(common.shown(text), end="", style=styles[block % len(styles)])
