"""Runs of skinny products on a GPU: instruction lists for the persistent kernel in sweep.cu.

A list is what one launch does: products [N, K] with what folds into them (a norm of their input, SwiGLU or the residual
add on their output), the choice of experts, and the experts' two products. An instruction waits for the whole grid
(``sync``) where it touches what an earlier one of the list wrote, or writes what an earlier one read.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .chain import chained
from .cuda import INTEGER, POINTER, Kernel

PRODUCT, ROUTE, LOAD_ROUTE, UP, DOWN, KDA = range(6)
PLAIN, RMS, SCALED, KEEP = range(4)
STORE, STORE_FLOAT, ADD, SWIGLU = range(4)
WARPS, BLOCK, HEAD, LIST, GROUPS, TOPK = 8, 320, 128, 32, 6, 8
SLAB = WARPS * BLOCK  # most columns of a term
PIECE = 32 * 1024  # bytes that a piece should have
MARKS = 8
_POINTERS = (
    "w", "x", "out", "norm", "gate", "w2", "x2", "ids", "weights", "bias", "logits", "stats", "g", "up_f", "up_g",
)  # fmt: skip
_COUNTS = (
    "kind", "prologue", "epilogue", "sync", "n", "k", "k2", "x_stride", "x2_stride", "out_stride", "gate_stride",
    "slot_stride", "experts", "topk", "groups", "top_groups", "renormalize", "start", "terms", "split",
    "width", "blocks", "teams", "per", "last_width", "last_blocks", "last_teams", "last_per", "g_stride", "spare",
)  # fmt: skip
_FLOATS = ("eps", "scaling", "limit", "eps2")


class _Packed(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint64) for name in _POINTERS),
        *((name, ctypes.c_int32) for name in _COUNTS),
        *((name, ctypes.c_float) for name in _FLOATS),
    ]


@dataclass(kw_only=True)
class Instruction:
    """One product or choice. ``fields``: what sweep.cu's struct holds, tensors for its pointers. ``reads`` and
    ``writes``: tensors for the hazards."""

    kind: int
    fields: dict[str, Any]
    reads: list[Tensor]
    writes: list[Tensor]
    sync: bool = False
    input: tuple[int, ...] | None = None  # what a norm makes of the input: equal ones need not be made again

    @property
    def spans(self) -> bool:
        """Whether its sums are over several terms, which blocks may share."""
        return self.kind == DOWN or (self.kind == PRODUCT and self.fields["k"] > SLAB)

    def widths(self) -> tuple[int, int]:
        """Columns of each term of its sums, and of the last one; (0, 0) where nothing is multiplied."""
        if self.kind not in (PRODUCT, UP, DOWN):
            return 0, 0
        k = self.fields["k"]
        if self.kind != PRODUCT or k <= SLAB:
            return k, self.fields.get("k2", k) if self.kind == DOWN else k
        terms = -(-k // SLAB)
        width = -(-k // (terms * HEAD)) * HEAD
        return width, k - (terms - 1) * width

    def packed(self, start: int, grid: int) -> bytes:
        """The bytes of the struct for so many blocks; ``start``: which of them takes the first share."""
        values: dict[str, Any] = {"kind": self.kind, "sync": int(self.sync), "start": start, "terms": 1}
        for name, value in self.fields.items():
            values[name] = value.data_ptr() if isinstance(value, Tensor) else value
        for prefix, width in zip(("", "last_"), self.widths(), strict=True):
            if width:
                blocks = -(-width // BLOCK)
                teams = WARPS // blocks
                shape = (width, blocks, teams, max(1, min(teams, PIECE // (16 * width))))
                values |= {prefix + name: v for name, v in zip(("width", "blocks", "teams", "per"), shape, strict=True)}
        if self.kind == PRODUCT:
            values["terms"] = -(-self.fields["k"] // SLAB)
        if self.kind == DOWN or values["terms"] > 1:
            groups = self.fields["n"] // 8
            values["split"] = int(groups >= grid)
            assert groups <= (GROUPS - 2) * grid, "too many groups to sum over terms"
        return bytes(_Packed(**values))


@dataclass
class Sweep:
    """One launch: a list over fixed buffers. ``rows``: most rows; ``live``: int64 [1] device count or None."""

    rows: int
    live: Tensor | None
    instructions: list[Instruction] = field(default_factory=list)
    trace: Tensor | None = None  # int64 [processors, LIST, MARKS], see benchmarks/sweep_trace.py
    _table: Tensor | None = None

    def add(self, new: Instruction) -> None:
        """Append, with a barrier where the list since the last one conflicts with it."""
        since: list[Instruction] = []
        for old in reversed(self.instructions):
            since.append(old)
            if old.sync:
                break
        wrote = [t for old in since for t in old.writes]
        read = [t for old in since for t in old.reads]
        new.sync = hazard = _touch(new.reads, wrote) or _touch(new.writes, wrote) or _touch(new.writes, read)
        if since and new.kind == KDA:
            new.sync = True  # its sums lie where those of products do
        if new.fields.get("prologue") == RMS and any(old.fields.get("prologue") == RMS for old in since):
            new.sync = True  # the squares of one norm at a time
        if new.spans and any(old.spans for old in since):
            new.sync = True  # one sum at a time is on its way between two blocks
        last = self.instructions[-1] if self.instructions else None
        if (
            last is not None
            and new.input is not None
            and new.input == last.input
            and not _touch([last.reads[0]], wrote)
        ):
            new.fields["prologue"] = KEEP  # the normed input is still in the registers
            new.sync = hazard
        self.instructions.append(new)

    def prepare(self) -> None:
        """Put the list into device memory."""
        device = self.instructions[0].reads[0].device
        grid, start, parts = _processors(device), 0, []
        for item in self.instructions:
            parts.append(item.packed(start, grid))
            if item.kind == PRODUCT:  # the next one begins where this one's last share ended
                start = (start - item.fields["n"] // 8) % grid
        raw = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)
        self._table = raw.to(device)

    def __call__(self) -> None:
        if self._table is None:
            self.prepare()
        table = self._table
        assert table is not None
        device = table.device
        halves = halves_of(self.rows)
        kernel, (counter, carry, flags) = _kernel(device, halves, self.trace is not None), _common(device)
        args = (
            (table.data_ptr(), POINTER),
            (len(self.instructions), INTEGER),
            (self.live.data_ptr() if self.live is not None else 0, POINTER),
            (self.rows, INTEGER),
            (counter.data_ptr(), POINTER),
            (carry.data_ptr(), POINTER),
            (flags.data_ptr(), POINTER),
            (0 if self.trace is None else self.trace.data_ptr(), POINTER),
            ((SHARED - _beside(halves)) // 128 * 128, INTEGER),
        )
        kernel.launch(_processors(device), (WARPS + 4) * 32, args, pdl=chained())

    def __str__(self) -> str:
        names = ("product", "route", "load", "up", "down", "kda")
        return " ".join(f"{'|' if i.sync else ''}{names[i.kind]}[{i.fields.get('n', '')}]" for i in self.instructions)


def _span(t: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


def _touch(a: Iterable[Tensor], b: Iterable[Tensor]) -> bool:
    spans = [_span(t) for t in b if t.numel()]
    return any(lo < end and start < hi for lo, hi in (_span(t) for t in a if t.numel()) for start, end in spans)


@functools.cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def _common(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The barrier's counter, and sums on their way from one block to the next with their flags."""
    grid = _processors(device)
    carry = torch.zeros(grid, 32, 8, dtype=torch.float32, device=device)
    return torch.zeros(1, dtype=torch.int32, device=device), carry, torch.zeros(grid, dtype=torch.int32, device=device)


SHARED = 227 * 1024  # most shared memory of a block
HALVES = (1, 2, 4)  # what sweep.cu is compiled for, in eights of rows


def halves_of(rows: int) -> int:
    """The narrowest of HALVES that holds so many rows."""
    return next(h for h in HALVES if rows <= 8 * h)


def defines(halves: int, trace: bool = False) -> dict[str, int]:
    """The constants that sweep.cu is compiled with for up to ``halves`` * 8 rows."""
    return {"SOLITON_HALVES": halves, "SOLITON_TRACE": int(trace)}


def _beside(halves: int) -> int:
    """What sweep.cu's Shared takes, rounded up; the kernel traps when it is too little."""
    rows = halves * 8
    buffers = {1: 4, 2: 3, 4: 2}[halves]
    sums = buffers * WARPS * rows * 32 + GROUPS * rows * 32 + (WARPS + 1) * rows * 4
    delta = 8 * (3 * HEAD + 2 * 32 + 2) * 4
    return sums + delta + rows * TOPK * (8 + 2 + rows) + LIST * (ctypes.sizeof(_Packed) + 4 + 32) + 1024


@functools.cache
def _kernel(device: torch.device, halves: int, trace: bool = False) -> Kernel:
    return Kernel("sweep.cu", "soliton_sweep", defines=defines(halves, trace), shared=SHARED, device=device)
