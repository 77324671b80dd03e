"""What goes back: the bodies of OpenAI's and SGLang's answers, whole or as events, made from the engine's pieces.

A writer gets every piece of a request's answers in order and gives the events that follow from it; ``whole`` is the
same answer in one body. Stream and whole are made of the same parts, so they cannot differ.
"""

from __future__ import annotations

import codecs
import time
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..checkpoint import Checkpoint, Tokenizer
from .service import Active, Service

if TYPE_CHECKING:
    from ..engine import Piece, Stats
    from ..sampling.logprobs import TokenLogprob


@dataclass
class Progress:
    """One answer so far."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    scored: list[TokenLogprob | None] | None = None
    lengths: list[int] = field(default_factory=list)
    reason: str | None = None
    stats: Stats | None = None
    reasoning_tokens: int = 0
    written: Written = field(default_factory=lambda: Written())  # by the tokens whose log-probabilities have been sent

    def add(self, piece: Piece) -> None:
        """Take a piece in."""
        self.ids += piece.token_ids
        self.text += piece.text
        self.logprobs += piece.logprobs or []
        self.scored = piece.prompt_logprobs or self.scored
        self.lengths.append(len(piece.token_ids))
        self.reason, self.stats = piece.finish_reason, piece.stats


class Written:
    """Where a text stands that grows by tokens, of which some end inside a character."""

    def __init__(self) -> None:
        self._at = 0
        self._decode = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: bytes) -> int:
        """The place, in characters, at which the token's text begins: of a part of one, that character's."""
        at = self._at
        self._at += len(self._decode.decode(token))
        return at


class Writer(ABC):
    """What all kinds of answers share."""

    _kind = "text_completion"  # of the bodies

    @abstractmethod
    def push(self, place: int, piece: Piece) -> list[dict[str, Any]]:
        """The events of one piece of the answer at a place."""

    @abstractmethod
    def end(self) -> list[dict[str, Any]]:
        """What comes before [DONE]."""

    @abstractmethod
    def whole(self) -> Any:
        """All of it in one body."""

    def __init__(self, service: Service, active: Active) -> None:
        self._service, self._active, self._ask = service, active, active.ask
        self._created = int(time.time())
        self._answers: list[Progress] = []
        self._tokenizer = service.checkpoint.tokenizer

    def _progress(self, place: int) -> tuple[Progress, bool]:
        """(the answer at a place, whether it is new)."""
        fresh = place == len(self._answers)
        if fresh:
            self._answers.append(Progress())
        return self._answers[place], fresh

    def _prompt_ids(self, place: int) -> tuple[int, ...]:
        return self._active.prompts[place // self._ask.n].ids

    def _body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        body: dict[str, Any] = {
            "id": self._active.rid(), "object": self._kind, "created": self._created, "model": self._service.name,
            "choices": choices,
        }  # fmt: skip
        if self._ask.stream and (self._ask.usage or self._ask.usage_always):
            body["usage"] = self.usage() if self._ask.usage_always else None
        return body

    def usage(self) -> dict[str, Any]:
        """Tokens so far: each prompt once, however many answers it has."""
        prompt = sum(len(p.ids) for p in self._active.prompts)
        done = sum(len(a.ids) for a in self._answers)
        out: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": done, "total_tokens": prompt + done}
        thought = sum(a.reasoning_tokens for a in self._answers)
        out["reasoning_tokens"] = thought
        out["completion_tokens_details"] = {"reasoning_tokens": thought}
        if self._service.config.enable_cache_report:
            cached = [a.stats.cached_tokens for a in self._answers[:: self._ask.n] if a.stats]
            out["prompt_tokens_details"] = {"cached_tokens": sum(cached)}
        return out

    def meta(self, place: int, answer: Progress) -> dict[str, Any]:
        """SGLang's meta_info, with its old and new names for what was accepted."""
        turn, service = self._active.turn, self._service
        drafts = service.about["config"].speculative_num_draft_tokens
        later = answer.lengths[1:]
        steps, accepted = len(later), sum(later) - len(later)
        proposed = steps * ((drafts or 1) - 1)
        out: dict[str, Any] = {
            "id": self._active.rid(place // self._ask.n),
            "finish_reason": self._finish(answer),
            "prompt_tokens": len(self._prompt_ids(place)),
            "completion_tokens": len(answer.ids),
            "cached_tokens": answer.stats.cached_tokens if answer.stats else 0,
            "reasoning_tokens": answer.reasoning_tokens,
            "weight_version": "default",
            "queue_time": turn.waited_s if turn else 0.0,
            "queue_position": turn.position if turn else 0,
        }
        if answer.stats is not None:
            out["e2e_latency"] = time.perf_counter() - self._active.came
            out["decode_throughput"] = 1 / answer.stats.tpot_s if answer.stats.tpot_s else None
            out["ttft_s"], out["tpot_s"] = answer.stats.ttft_s, answer.stats.tpot_s
            out["run_ahead_depth"] = answer.stats.run_ahead_depth
            if (grammar := getattr(answer.stats, "grammar", None)) is not None:
                out["grammar"] = grammar
        if drafts:
            counted = Counter(length - 1 for length in later)
            histogram = [counted[k] for k in range(max(counted, default=0) + 1)]
            rate = accepted / proposed if proposed else 0.0
            out |= {
                "spec_verify_ct": steps,
                "spec_accept_length": len(answer.ids) / steps if steps else 0.0,
                "spec_accept_rate": rate,
                "spec_accept_token_num": accepted,
                "spec_draft_token_num": proposed,
                "spec_accept_histogram": histogram,
                "spec_num_correct_drafts": accepted,
                "spec_accepted_drafts": accepted,
                "spec_num_proposed_drafts": proposed,
                "spec_proposed_drafts": proposed,
                "spec_correct_drafts_histogram": histogram,
            }
        return out

    def _finish(self, answer: Progress) -> dict[str, Any] | None:
        if answer.reason is None:
            return None
        if answer.reason == "length":
            return {"type": "length", "length": len(answer.ids)}
        if answer.reason == "abort":
            return {"type": "abort", "message": "aborted on request", "status_code": None, "err_type": None}
        return {"type": "stop", "matched": self._matched(answer)}

    def _matched(self, answer: Progress) -> int | str | None:
        """What ended the answer: a token that ends answers, or else a stop text."""
        ends = {*self._service.checkpoint.eos_ids, *(self._ask.params.stop_token_ids or ())}
        if answer.ids and answer.ids[-1] in ends:
            return answer.ids[-1]
        stop = self._ask.params.stop
        stops = [stop] if isinstance(stop, str) else list(stop or ())
        tail = decode(self._tokenizer, answer.ids)
        found = [(tail.rfind(text), text) for text in stops if text in tail]
        return max(found)[1] if found else None


def decode(tokenizer: Tokenizer | None, ids: list[int] | tuple[int, ...]) -> str:
    """Text of ids with special tokens shown; empty without a tokenizer."""
    return tokenizer.decode(list(ids), skip_special=False) if tokenizer is not None else ""


def token_text(checkpoint: Checkpoint, token: int) -> str:
    """How one token is shown in log-probabilities: bytes that are no text as OpenAI does, bytes:\\xe6\\x97, so
    that two tokens never look the same."""
    if checkpoint.tokenizer is None:
        return str(token)
    data = checkpoint.tokenizer.token_bytes(token)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class Completion(Writer):
    """/v1/completions."""

    def push(self, place: int, piece: Piece) -> list[dict[str, Any]]:
        """The events of one piece."""
        answer, fresh = self._progress(place)
        seen = len(answer.logprobs)
        answer.add(piece)
        text = piece.text
        scored: list[TokenLogprob | None] = []
        if fresh and self._ask.echo:
            text = decode(self._tokenizer, self._prompt_ids(place)) + text
            scored = answer.scored or []
        choice: dict[str, Any] = {
            "index": place, "text": text, "finish_reason": piece.finish_reason,
            "logprobs": self._logged(place, scored, answer.logprobs[seen:], answer.written),
            "matched_stop": self._matched(answer) if piece.finish_reason == "stop" else None,
        }  # fmt: skip
        if fresh and self._ask.scores:
            choice["prompt_logprobs"] = [self._alternatives(entry) for entry in answer.scored or []]
        if not text and piece.finish_reason is None and choice["logprobs"] is None and "prompt_logprobs" not in choice:
            return []
        if self._ask.meta:
            choice["meta_info"] = self.meta(place, answer)
        return [self._body([choice])]

    def end(self) -> list[dict[str, Any]]:
        """What comes before [DONE]."""
        return [self._body([]) | {"usage": self.usage()}] if self._ask.usage else []

    def whole(self) -> dict[str, Any]:
        """All of it in one body."""
        choices = []
        for place, answer in enumerate(self._answers):
            head = decode(self._tokenizer, self._prompt_ids(place)) if self._ask.echo else ""
            scored = (answer.scored or []) if self._ask.echo else []
            choice: dict[str, Any] = {
                "index": place, "text": head + answer.text, "finish_reason": answer.reason,
                "logprobs": self._logged(place, scored, answer.logprobs, Written()),
                "matched_stop": self._matched(answer) if answer.reason == "stop" else None,
            }  # fmt: skip
            if self._ask.scores:
                choice["prompt_logprobs"] = [self._alternatives(entry) for entry in answer.scored or []]
            if self._ask.meta:
                choice["meta_info"] = self.meta(place, answer)
            choices.append(choice)
        return self._body(choices) | {"usage": self.usage()}

    def _alternatives(self, entry: TokenLogprob | None) -> dict[str, float] | None:
        if entry is None:
            return None
        checkpoint = self._service.checkpoint
        found = {token_text(checkpoint, token): value for token, value in entry.top}
        return {**found, token_text(checkpoint, entry.token_id): entry.logprob}

    def _logged(
        self, place: int, scored: list[TokenLogprob | None], entries: list[TokenLogprob], written: Written
    ) -> dict[str, Any] | None:
        """OpenAI's four lists. Text offsets count the characters of the tokens, an echoed prompt's included."""
        if self._ask.params.logprobs is None or not (scored or entries):
            return None
        checkpoint, prompt = self._service.checkpoint, self._prompt_ids(place)
        rows: list[tuple[int, TokenLogprob | None]] = [(prompt[i], entry) for i, entry in enumerate(scored)]
        rows += [(entry.token_id, entry) for entry in entries]
        tokenizer = checkpoint.tokenizer
        offsets = [written.add(tokenizer.token_bytes(token) if tokenizer is not None else b"") for token, _ in rows]
        return {
            "tokens": [token_text(checkpoint, token) for token, _ in rows],
            "token_logprobs": [entry.logprob if entry else None for _, entry in rows],
            "top_logprobs": [self._alternatives(entry) for _, entry in rows],
            "text_offset": offsets,
        }


class Native(Writer):
    """SGLang's /generate: streamed text is cumulative."""

    def push(self, place: int, piece: Piece) -> list[dict[str, Any]]:
        """The event of one piece."""
        answer, _ = self._progress(place)
        answer.add(piece)
        if not piece.token_ids and piece.finish_reason is None:
            return []
        return [self._one(place, answer, streamed=True)]

    def end(self) -> list[dict[str, Any]]:
        """Nothing comes before [DONE]."""
        return []

    def whole(self) -> Any:
        """One object, or a list of them for several prompts or answers."""
        found = [self._one(place, answer, streamed=False) for place, answer in enumerate(self._answers)]
        return found if self._several else found[0]

    @property
    def _several(self) -> bool:
        return self._ask.batch or self._ask.n > 1

    def _one(self, place: int, answer: Progress, *, streamed: bool) -> dict[str, Any]:
        meta = self.meta(place, answer)
        if self._ask.params.logprobs is not None:
            meta["output_token_logprobs"] = [self._entry(e.token_id, e) for e in answer.logprobs]
            start = self._ask.logprob_start
            scored = list(zip(self._prompt_ids(place), answer.scored or []))[start:]
            meta["input_token_logprobs"] = [self._entry(token, e) for token, e in scored]
            if self._ask.params.logprobs:
                meta["output_top_logprobs"] = [self._top(e) for e in answer.logprobs]
                meta["input_top_logprobs"] = [self._top(e) for _, e in scored]
        out: dict[str, Any] = {"text": answer.text, "output_ids": list(answer.ids), "meta_info": meta}
        if streamed and self._several:
            out["index"] = place
        return out

    def _entry(self, token: int, entry: TokenLogprob | None) -> list[Any]:
        return [entry.logprob if entry else None, token, token_text(self._service.checkpoint, token)]

    def _top(self, entry: TokenLogprob | None) -> list[Any] | None:
        if entry is None:
            return None
        return [[value, token, token_text(self._service.checkpoint, token)] for token, value in entry.top]
