"""Every error a user can cause, as a small tree of typed exceptions.

A message names the thing at fault (file, key, tensor, number) and what to do about it. Asserts are kept for
Soliton's own invariants and never for user input.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

BAD_INPUT = 2  # exit code of a command that refused what it was given


class SolitonError(Exception):
    """Base of all errors that Soliton raises on purpose."""


class ConfigError(SolitonError, ValueError):
    """A setting, flag, file key or combination of them that cannot be honoured."""


class CheckpointError(SolitonError, ValueError):
    """A checkpoint directory that does not hold what its config.json promises."""


class UnsupportedError(SolitonError, NotImplementedError):
    """A well-formed request for something this version or this device does not have."""


class RequestError(SolitonError, ValueError):
    """A generation request that cannot be served; the engine stays ready for the next one.

    ``param`` names the field at fault in OpenAI's spelling, or None; ``code`` is OpenAI's word for the fault, if any.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code


class BusyError(SolitonError, RuntimeError):
    """A second thread or a second request inside an engine that serves one stream."""


class MemoryPlanError(SolitonError, MemoryError):
    """The plan (weights, KV, staging, checkpoints) does not fit; names the largest max_context that would."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a misspelt name: `` (did you mean 'x'?)`` or the empty string."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean '{match[0]}'?)" if match else ""
