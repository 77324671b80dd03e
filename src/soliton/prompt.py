"""What may be a prompt: the first look at what a caller sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .errors import RequestError


def check_message(place: int, message: Mapping[str, Any]) -> None:
    """A template would write a message without role or content as if it were empty."""
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise RequestError(f"messages[{place}] has no role, such as user", param=f"messages[{place}].role")
    if message.get("content") is None and not message.get("tool_calls"):
        raise RequestError(f"messages[{place}] has no content; give a text", param=f"messages[{place}].content")


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
