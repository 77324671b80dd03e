"""Generated text to a message: reasoning, content and tool calls of the Ling-3 format, while the text still grows.

Reasoning ends at ``</think>``, or where a call begins. A call is ``<tool_call>NAME``, pairs of ``<arg_key>K</arg_key>``
and ``<arg_value>V</arg_value>``, ``</tool_call>``, with any white space between the parts and around NAME and K.

The parser is one machine that reads every character once. What it makes of a text depends on the text alone and not on
how it was cut, so a stream adds up to the same message as the whole text given at once.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .arguments import HELD, Kinds, is_text, json_of, kinds_of, may_call, quoted, schemas_of

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"

_AFTER_NAME = (KEY, CALL_END, CALL)
_IN_BODY = (KEY, VALUE, CALL_END, CALL)
_IN_KEY = (KEY_END, *_IN_BODY)
_NAME = re.compile(r"\w[\w.:/-]{0,255}")  # of a tool that was not offered: anything else is another grammar, or prose
_SPACE, _WORD = re.compile(r"\s*"), re.compile(r"[^\s<]*")


@dataclass(frozen=True)
class ReasoningText:
    """The next piece of reasoning."""

    text: str


@dataclass(frozen=True)
class ContentText:
    """The next piece of content."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call begins. index: 0, 1, 2, .. in the order of the text."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """The next piece of the JSON object, as text, that holds the arguments of call ``index``."""

    index: int
    text: str


Delta = ReasoningText | ContentText | CallStart | CallArguments
_Text = type[ReasoningText] | type[ContentText]


def message_of(deltas: Iterable[Delta]) -> dict[str, Any]:
    """What deltas add up to: {"reasoning_content": text, "content": text, "tool_calls": [{"name", "arguments"}]}, where
    arguments is JSON text. A text is empty, not None, where nothing was said."""
    reasoning: list[str] = []
    content: list[str] = []
    calls: list[tuple[str, list[str]]] = []
    for delta in deltas:
        if isinstance(delta, ReasoningText):
            reasoning.append(delta.text)
        elif isinstance(delta, ContentText):
            content.append(delta.text)
        elif isinstance(delta, CallStart):
            calls.append((delta.name, []))
        else:
            calls[delta.index][1].append(delta.text)
    return {
        "reasoning_content": "".join(reasoning),
        "content": "".join(content),
        "tool_calls": [{"name": name, "arguments": "".join(parts)} for name, parts in calls],
    }


class MessageParser:
    """Reads one answer. ``feed`` it the text in pieces of any size, then ``finish`` it once.

    thinking: the prompt ended in ``<think>``, so the text starts inside reasoning. tools: as in a request,
    [{"type": "function", "function": {"name", "parameters"}}]. tool_choice: "auto", "none", "required",
    {"type": "function", "function": {"name"}}, or None, which is auto; with none, or without tools, the tags of calls
    are ordinary text. separate_reasoning: False leaves reasoning in the content, with its tags as generated. The text
    has to hold the tags (decode it without skipping special tokens) and not the end-of-turn token.

    Reasoning and content are the text to the letter, white space included, so that an answer which comes back as
    history makes the same tokens again. Left out are: tags that were understood, white space inside calls, keys without
    a value, and what the end of the output leaves unfinished inside a call: a tag, a key, a value (but a string value
    of more than 64 characters has been sent by then, and stays).

    RequestError for tools or a tool_choice that are no such thing.
    """

    def __init__(
        self,
        *,
        thinking: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        separate_reasoning: bool = True,
    ) -> None:
        self._schemas = schemas_of(tools)
        self._calling = (CALL,) if may_call(tool_choice, self._schemas) else ()
        self._state: Callable[[], bool] = self._start if thinking and separate_reasoning else self._in_content
        self._text, self._at = "", 0  # what lies before _at is done with
        self._out: list[Delta] = []
        self._kind: _Text | None = ContentText  # of the delta in the making; None: arguments
        self._parts: list[str] = []
        self._calls = 0
        self._done = False
        # the call that is being read
        self._head: list[str] = []  # all of it, while it may still turn out to be none
        self._name = ""
        self._pairs = 0  # begun in the written JSON
        self._stray = False  # text has come where only tags belong
        self._key: str | None = None  # waits for its value
        self._key_parts: list[str] = []
        self._value: list[str] = []  # not written yet
        self._value_size = 0
        self._value_kinds: Kinds | None = None
        self._streaming = False  # the written JSON ends inside a string

    def feed(self, text: str) -> list[Delta]:
        """What the next piece of text makes certain. Kept back are a possible beginning of a tag, a call's name until a
        tag follows, values until they end, and of string values the first 64 characters."""
        assert not self._done, "fed after finish"
        self._text, self._at = self._text[self._at :] + text, 0
        while self._state():
            pass
        return self._collected()

    def finish(self, raw_finish: str) -> tuple[list[Delta], str]:
        """(the rest, the finish reason). raw_finish: why generation ended, "stop", "length" or "abort".

        The reason is "tool_calls" if there are calls and generation stopped by itself. The arguments of every call are
        a JSON object now, save where something other than "stop" cut a string that was being sent: that is left open,
        so that nobody takes it for whole.
        """
        assert not self._done, "finished twice"
        self._done = True
        rest, state = self._text[self._at :], self._state
        if state in (self._start, self._in_reasoning):
            self._say(ReasoningText, rest)
        elif state == self._in_content:
            self._say(ContentText, rest)
        elif state == self._after_name and self._name in self._schemas:
            self._begin()
            self._end()
        elif state in (self._in_name, self._after_name):
            self._say(ContentText, "".join(self._head) + rest)
        elif not self._streaming or raw_finish == "stop":
            if state == self._in_value and self._key is None:
                self._say(ContentText, rest)
            if self._streaming:
                self._write('"')
            self._end()
        return self._collected(), "tool_calls" if self._calls and raw_finish == "stop" else raw_finish

    # -- states: each reads on, and says whether the next may find more ------------------------------------------------

    def _start(self) -> bool:
        self._say(ReasoningText, self._run(_SPACE))
        rest = self._text[self._at : self._at + len(THINK)]
        if rest == THINK:  # as the prompt's end already said
            self._at += len(THINK)
        elif THINK.startswith(rest):
            return False
        self._state = self._in_reasoning
        return True

    def _in_reasoning(self) -> bool:
        text, tag = self._until((THINK_END, *self._calling))
        self._say(ReasoningText, text)
        if tag:
            self._state = self._in_content
        if tag == CALL:
            self._open()
        return tag != ""

    def _in_content(self) -> bool:
        text, tag = self._until(self._calling)
        self._say(ContentText, text)
        if tag:
            self._open()
        return tag != ""

    def _in_name(self) -> bool:
        if not self._name:
            self._head.append(self._run(_SPACE))
        word = self._run(_WORD)
        self._head.append(word)
        self._name += word
        more = self._at < len(self._text)
        if self._name and not self._may_be_name(whole=False):
            return self._no_call()
        if more and not self._name:
            return self._no_call()
        if more:
            self._state = self._after_name
        return more

    def _after_name(self) -> bool:
        self._head.append(self._run(_SPACE))
        rest = self._text[self._at : self._at + len(CALL_END)]
        tag = next((tag for tag in _AFTER_NAME if rest.startswith(tag)), "")
        if not tag and any(tag.startswith(rest) for tag in _AFTER_NAME):
            return False
        if not tag or not self._may_be_name(whole=True):
            return self._no_call()
        self._at += len(tag)
        self._begin()
        self._go(tag)
        return True

    def _in_body(self) -> bool:
        text, tag = self._until(_IN_BODY)
        if not self._stray:
            text = text.lstrip()
        if text:
            self._stray = True
            self._say(ContentText, text)  # no argument's, but nothing may be lost
        if tag:
            self._go(tag)
        return tag != ""

    def _in_key(self) -> bool:
        text, tag = self._until(_IN_KEY)
        self._key_parts.append(text)
        if tag in (KEY_END, VALUE):
            self._key = "".join(self._key_parts).strip()
        if tag:
            self._go(tag)
        return tag != ""

    def _in_value(self) -> bool:
        text, tag = self._until((VALUE_END,))  # other tags in a value are text
        if self._key is None:
            self._say(ContentText, text + tag)
        else:
            self._value.append(text)
            self._value_size += len(text)
            if tag or (self._value_size > HELD and is_text(self._value_kinds)):
                self._write_value(whole=tag != "")
        if tag:
            self._key = None
            self._go(tag)
        return tag != ""

    # -- from state to state -------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self._head, self._name = [CALL], ""
        self._state = self._in_name

    def _no_call(self) -> bool:
        self._say(ContentText, "".join(self._head))
        self._state = self._in_content
        return True

    def _begin(self) -> None:
        self._flush()
        self._out.append(CallStart(self._calls, self._name))
        self._calls += 1
        self._pairs, self._key = 0, None

    def _go(self, tag: str) -> None:
        """To where a tag leads inside a call."""
        self._stray = False
        if tag == KEY:
            self._key_parts = []
            self._state = self._in_key
        elif tag in (KEY_END, VALUE_END):
            self._state = self._in_body
        elif tag == VALUE:
            self._state = self._in_value
            self._value, self._value_size = [], 0
            if self._key is None:
                self._say(ContentText, VALUE)
            else:
                self._value_kinds = kinds_of(self._schemas.get(self._name), self._key)
        else:
            self._end()
            self._state = self._in_content
            if tag == CALL:
                self._open()

    def _end(self) -> None:
        self._write("}" if self._pairs else "{}")

    def _write_value(self, *, whole: bool) -> None:
        text, self._value = "".join(self._value), []
        if self._streaming:
            written = quoted(text)[1:]
        else:
            assert self._key is not None
            lead = ", " if self._pairs else "{"
            self._pairs += 1
            written = f"{lead}{quoted(self._key)}: {json_of(text, self._value_kinds) if whole else quoted(text)}"
        self._streaming = not whole
        self._write(written if whole else written[:-1])

    def _may_be_name(self, *, whole: bool) -> bool:
        if _NAME.fullmatch(self._name):
            return True
        return self._name in self._schemas if whole else any(name.startswith(self._name) for name in self._schemas)

    # -- text in, deltas out -------------------------------------------------------------------------------------------

    def _run(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self._text, self._at)
        assert found is not None
        self._at = found.end()
        return found[0]

    def _until(self, tags: tuple[str, ...]) -> tuple[str, str]:
        """(text, the first of tags, which follows it) or (text in which none of them can begin, "")."""
        if found := _any_of(tags).search(self._text, self._at) if tags else None:
            text, self._at = self._text[self._at : found.start()], found.end()
            return text, found[0]
        end = self._text.rfind("<", self._at)
        if end < 0 or not any(tag.startswith(self._text[end:]) for tag in tags):
            end = len(self._text)
        text, self._at = self._text[self._at : end], end
        return text, ""

    def _say(self, kind: _Text | None, text: str) -> None:
        """Neighbours of one kind become one delta."""
        if kind is not self._kind:
            self._flush()
            self._kind = kind
        self._parts.append(text)

    def _write(self, arguments: str) -> None:
        self._say(None, arguments)

    def _flush(self) -> None:
        text, self._parts = "".join(self._parts), []
        if text:
            self._out.append(self._kind(text) if self._kind else CallArguments(self._calls - 1, text))

    def _collected(self) -> list[Delta]:
        self._flush()
        out, self._out = self._out, []
        return out


@functools.cache
def _any_of(tags: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, tags)))
