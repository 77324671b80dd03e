"""Grammars: what an answer has to be, as a mask over the vocabulary for every place, by llguidance.

A mask leaves the tokens after which the answer can still be completed, and the model's end tokens exactly where it may
end. Where a grammar leaves one text only, its usual tokens alone are left. Masks are packed: bit t % 32 of word
t // 32 is token t (penalties.restrict reads them).
"""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from soliton.errors import RequestError, UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor

    from .params import Resolved, SamplingParams

KINDS = ("json_schema", "json_object", "regex", "ebnf")
MOST_KEPT = 64  # compiled grammars


@dataclass(frozen=True)
class Grammar:
    """``kind``: the field of SamplingParams that asks for it; ``text``: a schema as JSON, a regular expression of the
    whole answer, or rules in Lark's or GBNF's notation. It holds behind the answer's first token ``after``; None: from
    the start."""

    kind: str
    text: str
    after: int | None


def asked(params: SamplingParams) -> Grammar | None:
    """The grammar of a request, or None; RequestError for one that can be refused without knowing the model."""
    if not isinstance(params.json_object, bool):
        raise RequestError(f"json_object must be true or false, not {params.json_object!r}", param="json_object")
    given = [kind for kind in KINDS if getattr(params, kind) is not None and getattr(params, kind) is not False]
    after = params.grammar_after
    if not given:
        if after is not None:
            raise RequestError(
                f"grammar_after is {after}, but there is no grammar; give one of {', '.join(KINDS)}",
                param="grammar_after",
            )
        return None
    if len(given) > 1:
        raise RequestError(f"{' and '.join(given)} are given; an answer has one grammar, leave one", param=given[1])
    (kind,) = given
    if kind == "json_schema":
        return Grammar(kind, _schema(params.json_schema), after)
    text = '{"type": "object"}' if kind == "json_object" else getattr(params, kind)
    if not isinstance(text, str):
        raise RequestError(f"{kind} must be a string, not {text!r}", param=kind)
    return Grammar(kind, text, after)


def _schema(value: object) -> str:
    """JSON text of a schema that came as an object or as text; its order is kept, properties are written in it."""
    try:
        if isinstance(value, str):
            value = json.loads(value)
        return json.dumps(dict(value) if isinstance(value, Mapping) else value, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(
            f"json_schema is not valid JSON ({error}); give a JSON schema", param="json_schema"
        ) from None


def words(vocab: int) -> int:
    """Words of a mask over ``vocab`` tokens."""
    return -(-vocab // 32)


class Grammars:
    """The grammars of the model ``name``, each compiled once. ``tokenizer``: the text of its tokenizer.json; ``vocab``:
    ids are 0 .. vocab - 1; ``ends``: its end tokens. Reading a tokenizer takes llguidance a second for 150,000 tokens,
    so that waits for the first grammar."""

    def __init__(self, name: str, tokenizer: str | None, vocab: int, ends: Sequence[int]) -> None:
        self._name, self._text, self.vocab, self.ends = name, tokenizer, vocab, frozenset(ends)
        self.compiled = functools.lru_cache(MOST_KEPT)(self._compiled)

    def matcher(self, params: Resolved) -> Matcher:
        """A fresh matcher of a request with a grammar. RequestError for a grammar that llguidance refuses, and for a
        model without tokenizer or end token; UnsupportedError where llguidance is missing or cannot read the tokenizer.
        """
        assert params.grammar is not None
        self.ready(params.grammar.kind)
        return Matcher(self, params)

    def ready(self, kind: str = "a grammar") -> None:
        """Read the tokenizer. Errors as ``matcher``."""
        for what, there in (("a tokenizer", self._text is not None), ("an end token", bool(self.ends))):
            if not there:
                raise RequestError(f"{kind} needs {what} and {self._name} has none", param=kind)
        _ = self._tokenizer

    @functools.cached_property
    def _library(self) -> Any:
        try:
            return importlib.import_module("llguidance")
        except ImportError:
            raise UnsupportedError(
                f"{', '.join(KINDS)} need llguidance, which is not installed; install the extra: "
                "pip install 'soliton[grammar]'"
            ) from None

    @functools.cached_property
    def _tokenizer(self) -> Any:
        try:
            return self._library.LLTokenizer(self._text, n_vocab=self.vocab, eos_token=sorted(self.ends))
        except ValueError as error:
            raise UnsupportedError(f"llguidance cannot read the tokenizer of {self._name}: {_line(error)}") from error

    def _compiled(self, kind: str, text: str) -> Any:
        library, tokenizer = self._library, self._tokenizer
        try:
            source = library.grammar_from("json_schema" if kind == "json_object" else kind, text)
            limits = library.LLParserLimits(verbose_errors=False)
            made = library.LLMatcher(tokenizer, source, log_level=0, limits=limits)
            fault = made.get_error()
        except (ValueError, RecursionError) as error:
            fault = str(error)
        if fault:
            raise RequestError(f"{kind} cannot be followed: {_line(fault)}", param=kind)
        return made


def _line(error: object) -> str:
    """A library's message on one line."""
    return " ".join(str(error).split())[:300]


class Matcher:
    """The place of one answer in its grammar. ``fill`` looks ahead along drafts, ``advance`` moves."""

    def __init__(self, grammars: Grammars, params: Resolved) -> None:
        assert params.grammar is not None
        self.grammar, self._grammars, self._ends = params.grammar, grammars, grammars.ends
        self._inner = grammars.compiled(self.grammar.kind, self.grammar.text).deep_copy()
        self._begun = self.grammar.after is None
        self._count = 0  # tokens of the answer
        self._read: list[int] = []  # those that the grammar has taken
        self._least = params.min_tokens
        self._no_stops = self._all_but(params.stop_ids)
        ignored = self._ends - set(params.stop_ids)
        self._no_ends = self._all_but(sorted(ignored)) if ignored else None
        self._only_ends = ~self._all_but(sorted(self._ends))

    def fill(self, drafts: Sequence[int], masks: Tensor) -> None:
        """masks[i], of int32 [R, words(V)] on the host, for the token after the first i ``drafts``, R > len(drafts).

        No mask is empty: while other tokens are left, it is without stop ids below min_tokens, and without end tokens
        that the request ignores. Rows behind a draft that cannot stay are left as they are; nothing is taken from them.
        RequestError where the grammar has come to a place that no token of the vocabulary leads on from.
        """
        inner, begun, ahead = self._inner, self._begun, 0
        for row in range(len(drafts) + 1):
            mask = masks[row]
            if begun:
                inner.unsafe_compute_mask_ptr(mask.data_ptr(), mask.nbytes)
                if inner.is_error() or not bool(mask.any()):
                    if row == 0:
                        raise self._stuck()
                    mask.copy_(self._only_ends)  # taken, they are refused by advance
                    break
            else:
                mask.fill_(-1)
            if self._count + row < self._least:
                self._forbid(mask, self._no_stops)
            if begun and self._no_ends is not None:
                self._forbid(mask, self._no_ends)
            if row == len(drafts):
                break
            if not begun:
                begun = drafts[row] == self.grammar.after
            elif drafts[row] in self._ends or inner.try_consume_tokens([drafts[row]]) != 1:
                break
            else:
                ahead += 1
        if inner.is_error():  # for good, and on a path that may not be taken
            self._inner = self._again()
        elif ahead:
            inner.rollback(ahead)

    def advance(self, tokens: Sequence[int]) -> int | None:
        """Take the tokens of a step. The place of the end token with which the grammar ended, or None.

        RequestError as ``fill``.
        """
        for place, token in enumerate(tokens):
            self._count += 1
            if not self._begun:
                self._begun = token == self.grammar.after
            elif token in self._ends:
                if not self._inner.is_accepting():
                    raise self._stuck()
                return place
            elif self._inner.try_consume_tokens([token]) != 1:
                raise self._stuck()
            else:
                self._read.append(token)
        return None

    def _again(self) -> Any:
        made = self._grammars.compiled(self.grammar.kind, self.grammar.text).deep_copy()
        made.try_consume_tokens(self._read)
        return made

    def _stuck(self) -> RequestError:
        reason = _line(self._inner.get_error()) or "no token of the vocabulary leads on from there"
        kind = self.grammar.kind
        return RequestError(f"{kind} cannot be followed beyond token {self._count}: {reason}", param=kind)

    def _all_but(self, ids: Sequence[int]) -> Tensor:
        """int32 [words]: a bit for every token but ``ids``."""
        import torch  # here, since flags are made of SamplingParams without waiting for it

        bits = torch.ones(words(self._grammars.vocab), 32, dtype=torch.int64)
        bits.view(-1)[list(ids)] = 0
        return (bits << torch.arange(32)).sum(1).to(torch.int32)

    @staticmethod
    def _forbid(mask: Tensor, keep: Tensor) -> None:
        left = mask & keep
        if bool(left.any()):
            mask.copy_(left)
