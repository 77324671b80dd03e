"""What a request may ask of sampling, in OpenAI's names and SGLang's extras, and the numbers a step works with.

`SamplingParams` is what a user writes; `SamplingParams.resolve` checks it against one model and fills in defaults:
request, then the checkpoint's generation_config, then neutral. Every refusal is a RequestError with the field's name.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any

from soliton.errors import CheckpointError, RequestError, nearest

from .grammar import Grammar, asked

GREEDY_BELOW = 1e-5  # a temperature under this is greedy decoding
MAX_STOP_STRINGS = 16
LARGEST = 1e30  # of any number: well inside float32, in which a step works
DIGITS = 18  # of a token id written as text
MAX_TOP_LOGPROBS = 20
ALIASES = {"max_new_tokens": "max_tokens", "max_completion_tokens": "max_tokens", "min_new_tokens": "min_tokens"}

# field -> (low, whether low itself is allowed, high or None; high itself is allowed)
_RANGES: dict[str, tuple[float, bool, float | None]] = {
    "temperature": (0.0, True, None),
    "top_p": (0.0, False, 1.0),
    "min_p": (0.0, True, 1.0),
    "repetition_penalty": (0.001, True, 2.0),
    "presence_penalty": (-2.0, True, 2.0),
    "frequency_penalty": (-2.0, True, 2.0),
}


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """Checked values with every default filled in. Off values: top_k 0, top_p 1, min_p 0, penalties 0, repetition 1."""

    greedy: bool  # temperature < 1e-5 or top_k == 1; temperature then reads 1.0
    processors: bool  # some penalty, bias or minimum length is in force
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    max_tokens: int | None  # None: up to the end of the context
    min_tokens: int
    seed: int  # 0 <= seed < 2**63; drawn afresh when the request has none
    stop_ids: tuple[int, ...]  # EOS ids unless ignored, then the request's own; no id twice
    stop_strings: tuple[str, ...]
    skip_special_tokens: bool
    logprobs: int | None  # None: off; else how many alternatives (0: the chosen token alone)
    prompt_logprobs: int | None  # as logprobs, for the prompt's tokens
    grammar: Grammar | None  # what the answer has to be


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling values of one request. None means: not given.

    ``max_new_tokens`` and ``min_new_tokens`` are SGLang's names for ``max_tokens`` and ``min_tokens`` and are folded
    into them. ``logprobs`` is true or false with ``top_logprobs`` alternatives (chat), or a number of alternatives
    (completions); so is ``prompt_logprobs``. ``max_tokens=0`` is for scoring a prompt and needs ``prompt_logprobs``.

    A grammar is one of ``json_schema`` (an object or its text), ``json_object`` (any JSON object), ``regex`` (of the
    whole answer) and ``ebnf`` (Lark or GBNF). The answer then ends where the grammar does, also with ``ignore_eos``,
    which keeps it going while the grammar can. ``grammar_after``: a token id, such as that of ``</think>``, behind
    whose first occurrence in the answer the grammar begins; before it anything may come.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | Sequence[str] | None = None
    seed: int | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    n: int = 1
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] | None = None
    skip_special_tokens: bool = True
    prompt_logprobs: bool | int | None = None
    json_schema: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    ebnf: str | None = None
    grammar_after: int | None = None
    max_new_tokens: InitVar[int | None] = None
    min_new_tokens: InitVar[int | None] = None

    def __post_init__(self, max_new_tokens: int | None, min_new_tokens: int | None) -> None:
        for alias, value in (("max_new_tokens", max_new_tokens), ("min_new_tokens", min_new_tokens)):
            if value is None:
                continue
            name = ALIASES[alias]
            own = getattr(self, name)
            if own != getattr(SamplingParams, name) and own != value:
                raise RequestError(f"{alias} is {value} but {name} is {own}; give one of them", param=alias)
            object.__setattr__(self, name, value)
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if isinstance(value, numbers.Real) and not isinstance(value, bool | int | float):
                plain = int(value) if isinstance(value, numbers.Integral) else float(value)
                object.__setattr__(self, item.name, plain)  # numpy's numbers become Python's

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """From a request body's fields. Null is the same as absent; an unknown name is refused with the nearest one."""
        if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
            raise RequestError(f"sampling parameters must be an object of named values, not {type(values).__name__}")
        known = {f.name for f in dataclasses.fields(cls)}
        out: dict[str, Any] = {}
        origin: dict[str, str] = {}
        for key, value in values.items():
            name = ALIASES.get(key, key)
            if name not in known:
                hint = nearest(key, sorted(known | set(ALIASES)))
                raise RequestError(f"unknown sampling parameter {key!r}{hint}", param=key)
            if value is None:
                continue
            if name in out and out[name] != value:
                raise RequestError(
                    f"{key} is {value!r} but {origin[name]} is {out[name]!r}; give one of them", param=key
                )
            out[name], origin[name] = value, key
        return cls(**out)

    def validate(self, *, vocab: int | None = None) -> None:
        """Raise RequestError for the first value that cannot be honoured; ids are checked when ``vocab`` is given."""
        for name in _RANGES:
            value = getattr(self, name)
            if value is not None:
                _in_range(name, value)
        if _integer("n", self.n) != 1:
            raise RequestError(f"n is {self.n}; one answer is made at a time, send the request again", param="n")
        if self.top_k is not None:
            _check_top_k(self.top_k)
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, not {getattr(self, name)!r}", param=name)
        if self.seed is not None:
            _integer("seed", self.seed)
        self._check_lengths()
        _alternatives("logprobs", self.logprobs, self.top_logprobs)  # first: a server may make the next one of it
        _alternatives("prompt_logprobs", self.prompt_logprobs, None)
        _stop_strings(self.stop)
        self._own_stops(vocab)
        _bias({} if self.logit_bias is None else self.logit_bias, vocab)
        _ids("grammar_after", () if self.grammar_after is None else (self.grammar_after,), vocab)
        asked(self)

    def _own_stops(self, vocab: int | None) -> tuple[int, ...]:
        return _ids("stop_token_ids", () if self.stop_token_ids is None else self.stop_token_ids, vocab)

    def _check_lengths(self) -> None:
        if self.max_tokens is not None and _integer("max_tokens", self.max_tokens) < 1:
            scores = self.max_tokens == 0 and self.prompt_logprobs is not None and self.prompt_logprobs is not False
            if not scores:
                fix = "at least 1, or 0 together with prompt_logprobs"
                raise RequestError(f"max_tokens is {self.max_tokens}; it must be {fix}", param="max_tokens")
        if _integer("min_tokens", self.min_tokens) < 0:
            raise RequestError(f"min_tokens is {self.min_tokens}; it must be at least 0", param="min_tokens")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}", param="min_tokens"
            )

    def resolve(
        self,
        defaults: Mapping[str, Any] | None = None,
        *,
        vocab: int,
        eos_ids: Iterable[int] = (),
        room: int | None = None,
    ) -> Resolved:
        """Check everything and fill in the defaults.

        defaults: the checkpoint's generation_config (temperature, top_p, top_k, min_p and repetition_penalty are read,
        and do_sample, whose false means greedy unless the request has a temperature; other keys are ignored, a bad
        value is a CheckpointError). vocab: ids are 0 .. vocab - 1. eos_ids: the model's end
        ids. room: tokens the context has left after the prompt; a larger max_tokens is refused, None becomes room.
        """
        self.validate(vocab=vocab)
        given = {name: self._pick(name, defaults or {}, off) for name, off in _DEFAULTED.items()}
        top_k = int(given["top_k"])
        top_k = 0 if top_k <= 0 else min(top_k, vocab)
        greedy = given["temperature"] < GREEDY_BELOW or top_k == 1
        max_tokens = room if self.max_tokens is None else self.max_tokens
        if room is not None and max_tokens is not None and max_tokens > room:
            raise RequestError(
                f"max_tokens is {max_tokens}, but the context has room for {room} after the prompt", param="max_tokens"
            )
        if max_tokens is not None and self.min_tokens > max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, but there is room for {max_tokens} tokens", param="min_tokens"
            )
        bias = _bias({} if self.logit_bias is None else self.logit_bias, vocab)
        presence, frequency = float(self.presence_penalty or 0.0), float(self.frequency_penalty or 0.0)
        repetition = float(given["repetition_penalty"])
        ends = () if self.ignore_eos else tuple(eos_ids)
        stops = tuple(dict.fromkeys((*ends, *self._own_stops(vocab))))
        if self.min_tokens > 0 and len(stops) >= vocab:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, but all {vocab} token ids end the answer, so no token could be its "
                "first; leave one out of stop_token_ids",
                param="min_tokens",
            )
        if self.grammar_after in stops:
            raise RequestError(
                f"grammar_after is {self.grammar_after}, which ends the answer; a grammar begins behind a token that "
                "does not",
                param="grammar_after",
            )
        seed = secrets.randbits(63) if self.seed is None else self.seed % 2**63
        return Resolved(
            greedy=greedy,
            processors=bool(bias) or presence != 0 or frequency != 0 or repetition != 1 or self.min_tokens > 0,
            temperature=1.0 if greedy else float(given["temperature"]),
            top_k=top_k,
            top_p=float(given["top_p"]),
            min_p=float(given["min_p"]),
            presence_penalty=presence,
            frequency_penalty=frequency,
            repetition_penalty=repetition,
            logit_bias=bias,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            seed=seed,
            stop_ids=stops,
            stop_strings=_stop_strings(self.stop),
            skip_special_tokens=self.skip_special_tokens,
            logprobs=_alternatives("logprobs", self.logprobs, self.top_logprobs),
            prompt_logprobs=_alternatives("prompt_logprobs", self.prompt_logprobs, None),
            grammar=asked(self),
        )

    def _pick(self, name: str, defaults: Mapping[str, Any], neutral: float) -> float:
        own: float | None = getattr(self, name)
        if own is not None:
            return own
        if name == "temperature" and self._greedy_default(defaults):
            return 0.0
        value: float | None = defaults.get(name)
        if value is None:
            return neutral
        try:
            if name == "top_k":
                _check_top_k(value)
            else:
                _in_range(name, value)
        except RequestError as error:
            raise CheckpointError(f"generation_config: {error}") from error
        return value

    @staticmethod
    def _greedy_default(defaults: Mapping[str, Any]) -> bool:
        value = defaults.get("do_sample")
        if value is not None and not isinstance(value, bool):
            raise CheckpointError(f"generation_config: do_sample must be true or false, not {value!r}")
        return value is False


_DEFAULTED = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise RequestError(f"{name} must be a number, not {value!r}", param=name)
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        number = 2 * LARGEST
    if not math.isfinite(number):
        raise RequestError(f"{name} is {value}; it must be finite", param=name)
    if abs(number) > LARGEST:
        raise RequestError(f"{name} is too large; at most {LARGEST:g} is taken", param=name)
    return number


def _integer(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise RequestError(f"{name} must be a whole number, not {value!r}", param=name)
    return int(value)


def _in_range(name: str, value: object) -> None:
    number = _number(name, value)
    low, closed, high = _RANGES[name]
    good = (number >= low if closed else number > low) and (high is None or number <= high)
    if not good:
        least = f"at least {low:g}" if closed else f"above {low:g}"
        most = "" if high is None else f" and at most {high:g}"
        raise RequestError(f"{name} is {value}; it must be {least}{most}", param=name)


def _check_top_k(value: object) -> None:
    if _integer("top_k", value) < -1:
        raise RequestError(f"top_k is {value}; it must be at least 1, or 0 or -1 for off", param="top_k")


def _alternatives(name: str, value: object, top: int | None) -> int | None:
    """(logprobs, top_logprobs) -> None for off, else how many alternatives."""
    if top is not None and not 0 <= _integer("top_logprobs", top) <= MAX_TOP_LOGPROBS:
        raise RequestError(f"top_logprobs is {top}; it must be from 0 to {MAX_TOP_LOGPROBS}", param="top_logprobs")
    if value is None or value is False:
        if top:
            raise RequestError(f"top_logprobs is {top} but logprobs is off; set logprobs to true", param="top_logprobs")
        return None
    if value is True:
        return top or 0
    count = _integer(name, value)
    if not 0 <= count <= MAX_TOP_LOGPROBS:
        raise RequestError(f"{name} is {count}; it must be from 0 to {MAX_TOP_LOGPROBS}", param=name)
    if top is not None and top != count:
        raise RequestError(f"{name} is {count} but top_logprobs is {top}; give one of them", param=name)
    return count


def _stop_strings(stop: object) -> tuple[str, ...]:
    if stop is None:
        return ()
    strings = [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, (list, tuple)):
        raise RequestError(f"stop must be a string or a list of strings, not {stop!r}", param="stop")
    if len(strings) > MAX_STOP_STRINGS:
        raise RequestError(f"stop has {len(strings)} strings; at most {MAX_STOP_STRINGS} are taken", param="stop")
    for string in strings:
        if not isinstance(string, str) or not string:
            raise RequestError(f"stop has {string!r}; every entry must be a non-empty string", param="stop")
    return tuple(dict.fromkeys(strings))


def _ids(name: str, ids: object, vocab: int | None) -> tuple[int, ...]:
    if not isinstance(ids, (list, tuple, set, frozenset)):  # an iterator would be empty the second time
        raise RequestError(f"{name} must be a list of token ids, not {ids!r}", param=name)
    found = tuple(_integer(name, token) for token in ids)
    for token in found:
        if token < 0 or (vocab is not None and token >= vocab):
            upper = "the vocabulary" if vocab is None else f"the vocabulary of {vocab}"
            raise RequestError(f"{name} has token id {token}, which is outside {upper}", param=name)
    return found


def _bias(bias: object, vocab: int | None) -> tuple[tuple[int, float], ...]:
    """Token ids with their non-zero bias, by id. JSON's keys are strings, so digits in a string are taken too."""
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias must map token ids to numbers, not {bias!r}", param="logit_bias")
    out: dict[int, float] = {}
    for key, value in bias.items():
        written = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= DIGITS
        (token,) = _ids("logit_bias", (int(key) if written else key,), vocab)
        number = _number("logit_bias", value)
        if not -100 <= number <= 100:
            raise RequestError(
                f"logit_bias of token {token} is {value}; it must be from -100 to 100", param="logit_bias"
            )
        if token in out:
            raise RequestError(f"logit_bias names token {token} twice", param="logit_bias")
        out[token] = number
    return tuple((token, out[token]) for token in sorted(out) if out[token] != 0)
