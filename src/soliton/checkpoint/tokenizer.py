"""Text <-> token ids for byte-level BPE, and text that grows token by token without ever showing half a character."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers

from soliton.errors import CheckpointError, RequestError, UnsupportedError

LONG = 4096  # characters of a text that takes a millisecond and more


def _byte_alphabet() -> dict[str, int]:
    """The 256 characters by which byte-level BPE writes bytes: printable Latin-1 as itself, the rest from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTES = _byte_alphabet()


class Tokenizer:
    """A tokenizer.json (``path``: the file or its directory) with a byte-level decoder.

    CheckpointError when the file is missing or unreadable, UnsupportedError for another kind of decoder, whose text
    could not be cut between tokens.
    """

    def __init__(self, path: str | Path) -> None:
        file = Path(path)
        if file.is_dir():
            file = file / "tokenizer.json"
        if not file.exists():
            raise CheckpointError(f"{file}: no such file; a tokenizer.json is needed to turn text into token ids")
        try:
            self._inner = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{file}: not a readable tokenizer.json ({error}); download it again") from error
        if not isinstance(self._inner.decoder, tokenizers.decoders.ByteLevel):
            kind = type(self._inner.decoder).__name__ if self._inner.decoder is not None else "none"
            raise UnsupportedError(f"{file}: its decoder is {kind}; only byte-level BPE (ByteLevel) is supported")
        # A saved file may carry the padding or truncation of the training run; a prompt must arrive whole.
        self._inner.no_padding()
        self._inner.no_truncation()
        vocab = self._inner.get_vocab(with_added_tokens=True)
        self._ids: dict[str, int] = vocab
        self.vocab_size = max(vocab.values(), default=-1) + 1  # highest id + 1; a model's rows may exceed it
        self.special_ids = frozenset(i for i, t in self._inner.get_added_tokens_decoder().items() if t.special)

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        """Token ids of ``text``; special tokens written in it become their ids. ``add_special``: BOS and the like."""
        try:
            if len(text) > LONG:  # the same ids; other threads run meanwhile, and no offsets are made
                found = self._inner.encode_batch_fast([text], add_special_tokens=add_special)[0]
            else:
                found = self._inner.encode(text, add_special_tokens=add_special)
            ids: list[int] = found.ids
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(f"the text cannot be encoded ({error}); it must be valid Unicode", param=None) from error
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of ``ids``; bytes that are no UTF-8 become U+FFFD, ids without a token become nothing."""
        return self._inner.decode(list(ids), skip_special_tokens=skip_special)

    def id_of(self, token: str) -> int | None:
        """The id of one token's text as written in the file, or None."""
        return self._ids.get(token)

    def token_bytes(self, token_id: int, skip_special: bool = False) -> bytes:
        """The bytes that one token adds to a text; empty for an id without a token and for a skipped special one."""
        if skip_special and token_id in self.special_ids:
            return b""
        token = self._inner.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        try:
            return bytes([_BYTES[c] for c in token])
        except KeyError:
            # An added token with characters outside the byte alphabet (a space, say) stands for its own text.
            return token.encode("utf-8")

    def json(self) -> str:
        """The file's text, without padding and truncation."""
        return self._inner.to_str()

    def stream(self, skip_special: bool = True) -> Detokeniser:
        """A fresh incremental decoder."""
        return Detokeniser(self, skip_special)


class Detokeniser:
    """Text of a growing list of ids. All pieces and the flush together equal Tokenizer.decode of all ids.

    Bytes that may still become a character are held back. Bytes that no continuation can save are U+FFFD at once
    (waiting would stall the text behind them); an incomplete end becomes U+FFFD at flush.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """The complete characters that ``ids`` add."""
        data = b"".join(self._tokenizer.token_bytes(i, self._skip) for i in ids)
        return self._utf8.decode(data)

    def flush(self) -> str:
        """What is held back, as replacement characters; the decoder is fresh afterwards."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest
