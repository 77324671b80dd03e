"""The law of a sampled step on a GPU: temperature, top-k, top-p, min-p as one kernel, `law.cu`.

The law is sampling.law's: keep the top_k largest scaled logits (ties: the lower index stays), of those the smallest
likeliest set whose share reaches top_p, of those what is at least min_p times as likely as the likeliest. Thresholds
are found digit by digit. Mass is summed in fixed-point integers, which no order of sums can change, so the sets are
exact and a row's bits are its own.

A law is kept as float32 weights [R, V] (0 outside the sets, the likeliest is 1) and their mass int64 [R].
Letters: R rows, V vocabulary, B parts of CHUNK elements in a row.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import UnsupportedError
from .chain import chained
from .cuda import INTEGER, POINTER, Kernel

CHUNK = 1024  # elements of a part
_CLUSTER, _THREADS = 8, 1024
_FIXED = 26 * 1024  # shared memory of a block beside its logits
_PARTS = (227 * 1024 - _FIXED) // (4 * CHUNK)  # most of a block
MOST = _CLUSTER * _PARTS * CHUNK  # the largest vocabulary


def mass_bits(vocab: int) -> int:
    """Fraction bits of the mass: V weights of 1.0 still sum below 2**62 (as sampling.rowwise)."""
    return 62 - max(1, (vocab - 1).bit_length())


@dataclass(frozen=True)
class Law:
    """A law of each of R rows: weights float32 [R, V], masses int64 [R, B] of its parts, total mass int64 [R]."""

    weights: Tensor
    masses: Tensor
    total: Tensor

    @classmethod
    def allocate(cls, rows: int, vocab: int, device: torch.device) -> Law:
        """All of it, zeroed. Raises UnsupportedError where a row does not fit into a cluster's shared memory."""
        if vocab > MOST:
            raise UnsupportedError(
                f"a vocabulary of {vocab} is too large to sample from on a GPU: at most {MOST} logits of a row fit "
                f"into the shared memory of {_CLUSTER} blocks"
            )
        return cls(
            weights=torch.zeros(rows, vocab, dtype=torch.float32, device=device),
            masses=torch.zeros(rows, -(-vocab // CHUNK), dtype=torch.int64, device=device),
            total=torch.zeros(rows, dtype=torch.int64, device=device),
        )

    def row(self, i: int) -> Law:
        """The law of row ``i`` alone, in place."""
        return Law(self.weights[i : i + 1], self.masses[i : i + 1], self.total[i : i + 1])


def defines() -> dict[str, int]:
    """The constants that law.cu is compiled with."""
    return {"SOLITON_FIXED": _FIXED, "SOLITON_PARTS": _PARTS}


def sizes(vocab: int) -> tuple[int, int]:
    """(parts of a row that each block of its cluster takes, fraction bits of mass)."""
    return -(-vocab // (_CLUSTER * CHUNK)), mass_bits(vocab)


@functools.cache
def _kernel(device: torch.device, parts: int) -> Kernel:
    shared = _FIXED + parts * CHUNK * 4
    return Kernel("law.cu", "soliton_law", defines=defines(), shared=shared, device=device)


def distribution(
    law: Law, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, live: Tensor, vocab: int
) -> None:
    """law of logits[R, >= vocab] float32; temperature, top_k, top_p, min_p: [1] as in sampling.law.distribution; live:
    int64 [1], rows beyond it are left as they are.

    Scaled logits are rounded as a division, weights as CUDA's expf, mass to the nearest unit, halves up.
    """
    rows = law.masses.shape[0]
    parts, bits = sizes(vocab)
    pointers = (law.weights, law.masses, law.total, logits, temperature, top_k, top_p, min_p, live)
    numbers = (vocab, logits.stride(0), parts, bits)
    args = [*((t.data_ptr(), POINTER) for t in pointers), *((n, INTEGER) for n in numbers)]
    _kernel(logits.device, parts).launch(rows * _CLUSTER, _THREADS, args, pdl=chained())
