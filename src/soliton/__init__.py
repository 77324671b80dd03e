"""Soliton decodes one stream of a hybrid KDA + MLA mixture-of-experts model as fast as a machine's memory allows."""

from .engine import Engine, Generation, Piece, Stats
from .errors import (
    BusyError,
    CheckpointError,
    ConfigError,
    MemoryPlanError,
    RequestError,
    SolitonError,
    UnsupportedError,
)
from .sampling.logprobs import TokenLogprob
from .sampling.params import SamplingParams

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
