"""Soliton decodes one stream of a hybrid KDA + MLA mixture-of-experts model as fast as a machine's memory allows."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .errors import (
    BusyError,
    CheckpointError,
    ConfigError,
    MemoryPlanError,
    RequestError,
    SolitonError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from .engine import Engine, Generation, Piece, Stats
    from .sampling.logprobs import TokenLogprob
    from .sampling.params import SamplingParams

# read on first use, so that the command can refuse bad flags without waiting for torch
_LATER = {
    "Engine": ".engine",
    "Generation": ".engine",
    "Piece": ".engine",
    "Stats": ".engine",
    "SamplingParams": ".sampling.params",
    "TokenLogprob": ".sampling.logprobs",
}

__all__ = [
    "BusyError",
    "CheckpointError",
    "ConfigError",
    "Engine",
    "Generation",
    "MemoryPlanError",
    "Piece",
    "RequestError",
    "SamplingParams",
    "SolitonError",
    "Stats",
    "TokenLogprob",
    "UnsupportedError",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'soliton' has no attribute '{name}'")
    return getattr(importlib.import_module(_LATER[name], __name__), name)
