"""/v1/chat/completions: messages to a prompt, the answer's text to reasoning, content and tool calls."""

from __future__ import annotations

import dataclasses
import uuid
from typing import TYPE_CHECKING, Any

from ..checkpoint import Tokenizer
from ..errors import RequestError
from ..prompt import Encoded, encode
from .asks import Ask
from .calls import call_grammar
from .parsers import (
    CALL,
    CALL_END,
    KEY,
    KEY_END,
    THINK,
    THINK_END,
    VALUE,
    VALUE_END,
    CallArguments,
    CallStart,
    ContentText,
    Delta,
    MessageParser,
    ReasoningText,
    message_of,
)  # fmt: skip
from .replies import Progress, Writer, decode, token_text
from .service import Active, Service

if TYPE_CHECKING:
    from ..engine import Piece
    from ..sampling.logprobs import TokenLogprob

TAGS = (THINK, THINK_END, CALL, CALL_END, KEY, KEY_END, VALUE, VALUE_END)


@dataclasses.dataclass
class Reading:
    """One answer being read. reason: what the message ended as; ids: of its calls."""

    parser: MessageParser
    deltas: list[Delta] = dataclasses.field(default_factory=list)
    reason: str | None = None
    ids: list[str] = dataclasses.field(default_factory=list)
    greeted: bool = False
    blank: str = ""  # white space that is content only if there is more, or no call
    solid: bool = False  # content has been sent


class Chat(Writer):
    """One request's messages."""

    def __init__(self, service: Service, active: Active, thinking: bool) -> None:
        super().__init__(service, active)
        self.active = active
        self._thinking = thinking
        self._kind = "chat.completion.chunk" if active.ask.stream else "chat.completion"
        self._readings: list[Reading] = []

    @classmethod
    async def prepared(cls, service: Service, ask: Ask, size: int) -> Chat:
        """Take a request in: its prompt is rendered, and what the answer has to look like becomes its grammar."""
        checkpoint = service.checkpoint
        ids, boundary = await service.aside(size, lambda: encode(checkpoint, ask.prompts[0], ask.chat))
        ask.prompts = [Encoded(tuple(ids), boundary)]
        thinking = service.parses("reasoning_parser") and _ends_thinking(checkpoint.tokenizer, ids)
        changes: dict[str, Any] = {}
        special = checkpoint.tokenizer.special_ids if checkpoint.tokenizer is not None else frozenset()
        if any(_id_of(checkpoint.tokenizer, tag) in special for tag in TAGS):
            changes["skip_special_tokens"] = False  # the tags have to be seen
        if ask.tool_choice not in ("auto", "none") and service.parses("tool_call_parser"):
            if ask.grammar_in_answer:
                raise RequestError(
                    f"tool_choice = {ask.tool_choice.lstrip('=')!r} asks for a call and response_format for a text; "
                    "give one of them",
                    param="tool_choice",
                )
            changes["ebnf"] = call_grammar(ask.tools, ask.tool_choice, checkpoint.tokenizer)
        if thinking and (ask.grammar_in_answer or "ebnf" in changes):
            close = _id_of(checkpoint.tokenizer, THINK_END)
            if close is None:
                raise RequestError("a grammar cannot begin after reasoning: </think> is no token of this model")
            changes["grammar_after"] = close
        ask.params = dataclasses.replace(ask.params, **changes)
        try:
            active = await service.enter(ask, "chatcmpl", size)
        except RequestError as error:
            if error.param == "ebnf" and "ebnf" in changes:
                fault = str(error).replace("ebnf", "a grammar of the tools' schemas", 1)
                raise RequestError(fault, param="tools") from error
            raise
        return cls(service, active, thinking)

    def push(self, place: int, piece: Piece) -> list[dict[str, Any]]:
        """The events of one piece: every kind of delta in one of its own, logprobs with the first."""
        answer, fresh = self._progress(place)
        if fresh:
            self._readings.append(Reading(self._parser()))
        reading = self._readings[place]
        answer.add(piece)
        self._count_reasoning(answer)
        deltas = reading.parser.feed(piece.text)
        if piece.finish_reason is not None:
            rest, reading.reason = reading.parser.finish(piece.finish_reason)
            deltas = deltas + rest
        reading.deltas += deltas
        if not self._ask.stream:
            return []
        return self._events(place, reading, answer, piece, deltas)

    def end(self) -> list[dict[str, Any]]:
        """What comes before [DONE]."""
        return [self._body([]) | {"usage": self.usage()}] if self._ask.usage else []

    def whole(self) -> dict[str, Any]:
        """All of it in one body."""
        choices = []
        for place, (answer, reading) in enumerate(zip(self._answers, self._readings)):
            found = message_of(reading.deltas)
            message: dict[str, Any] = {
                "role": "assistant", "content": _content(found),
                "reasoning_content": found["reasoning_content"] or None, "tool_calls": None, "refusal": None,
            }  # fmt: skip
            if found["tool_calls"]:
                calls = [(self._call_id(reading, i), call) for i, call in enumerate(found["tool_calls"])]
                message["tool_calls"] = [
                    {"id": name, "index": i, "type": "function", "function": call}
                    for i, (name, call) in enumerate(calls)
                ]
            choice: dict[str, Any] = {
                "index": place, "message": message, "finish_reason": reading.reason,
                "logprobs": self._logged(answer.logprobs),
                "matched_stop": self._matched(answer) if answer.reason == "stop" else None,
            }  # fmt: skip
            if self._ask.meta:
                choice["meta_info"] = self.meta(place, answer)
            choices.append(choice)
        return self._body(choices) | {"usage": self.usage()}

    def _parser(self) -> MessageParser:
        reads = self._service.parses("tool_call_parser")
        return MessageParser(
            thinking=self._thinking,
            tools=self._ask.tools if reads else None,
            tool_choice="none" if self._ask.tool_choice == "none" else "auto",
            separate_reasoning=self._ask.separate_reasoning,
        )

    def _events(
        self, place: int, reading: Reading, answer: Progress, piece: Piece, deltas: list[Delta]
    ) -> list[dict[str, Any]]:
        sent = [said for delta in deltas if (said := self._delta(reading, delta)) is not None]
        last = piece.finish_reason is not None
        if last and reading.blank and not reading.ids:
            sent.append({"content": reading.blank})
        if not reading.greeted:
            sent[:0] = [{"role": "assistant", "content": ""}]
            reading.greeted = True
        logged = self._logged(piece.logprobs or [])
        if not sent and (last or logged is not None or self._ask.meta):
            sent = [{}]
        events = []
        for i, said in enumerate(sent):
            final = last and i == len(sent) - 1
            choice: dict[str, Any] = {
                "index": place, "delta": said, "logprobs": logged if i == len(sent) - 1 else None,
                "finish_reason": reading.reason if final else None,
                "matched_stop": self._matched(answer) if final and answer.reason == "stop" else None,
            }  # fmt: skip
            if self._ask.meta and i == len(sent) - 1:
                choice["meta_info"] = self.meta(place, answer)
            events.append(self._body([choice]))
        return events

    def _delta(self, reading: Reading, delta: Delta) -> dict[str, Any] | None:
        if isinstance(delta, ReasoningText):
            return {"reasoning_content": delta.text}
        if isinstance(delta, ContentText):
            said = reading.blank + delta.text
            if self._ask.tool_choice != "none" and not reading.solid and not said.strip():
                reading.blank = said
                return None
            reading.blank, reading.solid = "", True
            return {"content": said}
        if isinstance(delta, CallStart):
            function = {"name": delta.name, "arguments": ""}
            call: dict[str, Any] = {"index": delta.index, "id": self._call_id(reading, delta.index), "type": "function"}
            return {"tool_calls": [call | {"function": function}]}
        assert isinstance(delta, CallArguments)
        return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}

    def _call_id(self, reading: Reading, index: int) -> str:
        while len(reading.ids) <= index:
            reading.ids.append(f"call_{uuid.uuid4().hex[:24]}")
        return reading.ids[index]

    def _count_reasoning(self, answer: Progress) -> None:
        if self._thinking:
            close = _id_of(self._tokenizer, THINK_END)
            answer.reasoning_tokens = answer.ids.index(close) + 1 if close in answer.ids else len(answer.ids)

    def _logged(self, entries: list[TokenLogprob]) -> dict[str, Any] | None:
        if self._ask.params.logprobs is None or not entries:
            return None
        content = []
        for entry in entries:
            top = [self._token(token, value) for token, value in entry.top]
            content.append(self._token(entry.token_id, entry.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _token(self, token: int, value: float) -> dict[str, Any]:
        tokenizer = self._tokenizer
        data = list(tokenizer.token_bytes(token)) if tokenizer is not None else []
        return {"token": token_text(self._service.checkpoint, token), "logprob": value, "bytes": data}


def _content(found: dict[str, Any]) -> str | None:
    """The content to the letter, but null where it is nothing but the white space around calls."""
    text: str = found["content"]
    return None if found["tool_calls"] and not text.strip() else text


def _id_of(tokenizer: Tokenizer | None, token: str) -> int | None:
    return tokenizer.id_of(token) if tokenizer is not None else None


def _ends_thinking(tokenizer: Tokenizer | None, ids: list[int]) -> bool:
    """Whether a prompt leaves the model inside reasoning: it ends with the opening tag."""
    return decode(tokenizer, ids[-8:]).rstrip().endswith(THINK)
