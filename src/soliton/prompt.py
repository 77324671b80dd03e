"""What may be a prompt, and what it becomes: token ids and checked sampling values.

All of it needs the checkpoint's tokenizer and template alone, so a server does it in another process than the engine's.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .checkpoint import Checkpoint
from .checkpoint.chat import render
from .errors import RequestError
from .sampling.params import Resolved, SamplingParams

TOO_LONG = "context_length_exceeded"  # OpenAI's code
Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True)
class Encoded:
    """A prompt as token ids. ``boundary``: where the final chat message begins, 0 without messages."""

    ids: tuple[int, ...]
    boundary: int = 0


@dataclass(frozen=True)
class Prepared:
    """A request that can be run. ``room``: tokens that the context leaves for the answer."""

    ids: list[int]
    boundary: int
    params: Resolved
    room: int


def prepare(
    checkpoint: Checkpoint,
    max_context: int,
    prompt: Prompt | Encoded,
    params: SamplingParams | None,
    chat: Mapping[str, Any],
) -> Prepared:
    """Everything about a request that can be refused before it runs; RequestError names the field."""
    ids, boundary = encode(checkpoint, prompt, chat)
    ids = checked_ids(ids, checkpoint.spec.vocab, max_context)
    room = max_context - len(ids)
    if room < 1 and (params is None or params.max_tokens != 0):
        raise RequestError(
            f"the prompt has {len(ids)} tokens, but max_context is {max_context} and an answer needs at least one; "
            "shorten the prompt or load the engine with a larger max_context",
            param="messages" if boundary else "prompt",
            code=TOO_LONG,
        )
    wanted = SamplingParams() if params is None else params
    if not isinstance(wanted, SamplingParams):
        raise RequestError(
            f"params is {type(wanted).__name__}, not SamplingParams; SamplingParams.from_dict makes one of a dict"
        )
    resolved = wanted.resolve(checkpoint.generation, vocab=checkpoint.spec.vocab, eos_ids=checkpoint.eos_ids, room=room)
    if resolved.stop_strings and checkpoint.tokenizer is None:
        raise RequestError(f"stop strings need a tokenizer and {checkpoint.name} has none", param="stop")
    return Prepared(ids, boundary, resolved, room)


def encode(checkpoint: Checkpoint, prompt: Prompt | Encoded, chat: Mapping[str, Any]) -> tuple[list[int], int]:
    """(token ids, where the final message begins: 0 without messages). ``chat``: variables of the chat template."""
    if isinstance(prompt, Encoded):
        return list(prompt.ids), prompt.boundary
    if isinstance(prompt, str):
        _needs_text(checkpoint, "a text prompt")
        if chat:
            raise RequestError(f"{', '.join(chat)}: chat arguments go with messages, not with a text prompt")
        assert checkpoint.tokenizer is not None
        return checkpoint.tokenizer.encode(prompt), 0
    items = listed(prompt)
    if items and isinstance(items[0], Mapping):
        _needs_text(checkpoint, "messages")
        if checkpoint.chat_template is None:
            raise RequestError(f"{checkpoint.name} has no chat template; send text or token ids", param="messages")
        return _render(checkpoint, items, dict(chat))
    if chat:
        raise RequestError(f"{', '.join(chat)}: chat arguments go with messages, not with token ids")
    return items, 0


def _render(checkpoint: Checkpoint, messages: list[Any], chat: dict[str, Any]) -> tuple[list[int], int]:
    assert checkpoint.tokenizer is not None and checkpoint.chat_template is not None
    for name in ("template", "messages", "special_tokens"):
        if name in chat:
            raise RequestError(f"{name} is no argument of a chat template; leave it out", param=name)
    for place, message in enumerate(messages):
        if isinstance(message, Mapping):  # render refuses anything else
            check_message(place, message)
    check_tools(chat.get("tools"))
    messages = [plain_message(message) for message in messages]
    chat.setdefault("add_generation_prompt", True)
    text = render(checkpoint.chat_template, messages, special_tokens=checkpoint.special_tokens, **chat)
    ids = checkpoint.tokenizer.encode(text)
    boundary = 0
    if len(messages) > 1:
        # where the earlier messages end, if the template renders them the same without the final one
        try:
            chat["add_generation_prompt"] = False
            head = render(checkpoint.chat_template, messages[:-1], special_tokens=checkpoint.special_tokens, **chat)
        except RequestError:
            return ids, 0
        for a, b in zip(ids, checkpoint.tokenizer.encode(head)):
            if a != b:
                break
            boundary += 1
    return ids, boundary


def _needs_text(checkpoint: Checkpoint, what: str) -> None:
    if checkpoint.tokenizer is None:
        raise RequestError(f"{what} needs a tokenizer and {checkpoint.name} has none; send token ids")


def checked_ids(token_ids: Sequence[int], vocab: int, limit: int) -> list[int]:
    """The ids as integers; RequestError for none, for one outside the vocabulary, or for more than ``limit``."""
    given = listed(token_ids)
    if not given:
        raise RequestError("the prompt is empty; it needs at least one token", param="prompt")
    ids: list[int] = []
    for place, value in enumerate(given):
        try:
            token = operator.index(value)  # integers of numpy and torch too
        except TypeError:
            token = None
        if token is None or isinstance(value, bool):
            raise RequestError(f"token {place} of the prompt is {value!r}, not an integer", param="prompt")
        ids.append(token)
        if not 0 <= token < vocab:
            raise RequestError(
                f"token {place} of the prompt is {token}, but token ids run from 0 to {vocab - 1}", param="prompt"
            )
    if len(ids) > limit:
        message = f"{len(ids)} tokens are more than max_context {limit}; shorten them"
        raise RequestError(message, param="prompt", code=TOO_LONG)
    return ids


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
