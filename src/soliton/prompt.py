"""What may be a prompt: the first look at what a caller sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .errors import RequestError


def check_message(place: int, message: Mapping[str, Any]) -> None:
    """A template would write a message without role or content as if it were empty."""
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise RequestError(f"messages[{place}] has no role, such as user", param=f"messages[{place}].role")
    where, content = f"messages[{place}].content", message.get("content")
    if content is None and not message.get("tool_calls"):
        raise RequestError(f"messages[{place}] has no content; give a text", param=where)
    if isinstance(content, list | tuple):
        for at, part in enumerate(content):
            _check_part(f"{where}[{at}]", part)
    elif content is not None and not isinstance(content, str):
        raise RequestError(f"{where} is {content!r}; give a text or a list of text parts", param=where)


def check_tools(tools: Any) -> None:
    """A text would be taken for a list of its letters."""
    if tools is not None and not (isinstance(tools, list | tuple) and all(isinstance(tool, Mapping) for tool in tools)):
        raise RequestError(f"tools is {tools!r}; a list of objects is needed", param="tools")


def _check_part(where: str, part: Any) -> None:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        wanted = '{"type": "text", "text": ...}'
        raise RequestError(f"{where} is {part!r}; a part is an object such as {wanted}", param=where)
    if kind != "text":
        raise RequestError(f"{where} is of type {kind!r}; the model reads text only: leave it out", param=where)
    if not isinstance(part.get("text"), str):
        raise RequestError(f"{where}.text is {part.get('text')!r}; give a text", param=where)


def plain_message(message: Any) -> Any:
    """The message with a list of text parts joined to one text, which every template can write."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple):
        return message
    return {**message, "content": "".join(part["text"] for part in content)}


def listed(prompt: Any) -> list[Any]:
    """The items of a prompt that is no text."""
    if isinstance(prompt, (bytes, bytearray, Mapping)) or not isinstance(prompt, Iterable):
        raise RequestError(
            f"a prompt is a text, a list of token ids or a list of messages, not {type(prompt).__name__}",
            param="prompt",
        )
    try:
        return list(prompt)
    except TypeError as error:  # such as an array without an axis
        raise RequestError(f"the prompt cannot be read as a list ({error})", param="prompt") from error
