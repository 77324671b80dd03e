"""Chat templates: the checkpoint's own Jinja text, in a sandbox, with the surroundings Hugging Face gives it."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from soliton.errors import CheckpointError, RequestError


class _Generation(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}`` marks text for training masks; here it is its contents."""

    tags = {"generation"}  # noqa: RUF012 - the name and form that jinja2 asks for

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Unlike Jinja's own filter: no HTML escaping, non-ASCII letters and key order as they are.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = _tojson
    env.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    try:
        return env.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(f"the chat template fails at line {error.lineno}: {error.message}") from error
    except RecursionError as error:
        raise CheckpointError("the chat template is nested too deeply; simplify it") from error


def _with_arguments(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of ``messages`` in which the arguments of tool calls are objects (a request carries them as JSON text)."""
    copies = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"messages[{i}] is {type(message).__name__}, an object is needed", param="messages")
        copy = dict(message)
        calls = copy.get("tool_calls")
        if isinstance(calls, list | tuple):
            copy["tool_calls"] = [_with_object(call, f"messages[{i}].tool_calls[{j}]") for j, call in enumerate(calls)]
        copies.append(copy)
    return copies


def _with_object(call: Any, where: str) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    text: str = function["arguments"]
    try:
        arguments = json.loads(text) if text.strip() else {}
    except json.JSONDecodeError as error:
        raise RequestError(f"{where}.function.arguments is not valid JSON ({error})", param="messages") from error
    if not isinstance(arguments, dict):
        raise RequestError(f"{where}.function.arguments must be a JSON object, not {text[:40]!r}", param="messages")
    return {**call, "function": {**function, "arguments": arguments}}


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    special_tokens: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> str:
    """The prompt text of ``messages``. ``kwargs`` reach the template as variables (enable_thinking and the like).

    RequestError when the template refuses the messages or cannot work with them, CheckpointError when the template
    itself is not valid Jinja.
    """
    compiled = _compiled(template)
    variables: dict[str, Any] = {"documents": None, **(special_tokens or {}), **kwargs}
    try:
        return compiled.render(
            messages=_with_arguments(messages),
            tools=list(tools) if tools else None,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
    except RequestError:
        raise
    # A template is a program of the checkpoint's; whatever it trips over is something in the messages.
    except jinja2.exceptions.TemplateError as error:
        raise RequestError(f"the chat template refuses these messages: {error.message}", param="messages") from error
    except Exception as error:
        raise RequestError(
            f"the chat template cannot render these messages ({type(error).__name__}: {error})", param="messages"
        ) from error
