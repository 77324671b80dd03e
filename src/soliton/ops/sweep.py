"""Runs of skinny products on a GPU: instruction lists for the persistent kernel in sweep.cu.

A list is what one launch does: products [N, K] with what folds into them (a norm of their input, SwiGLU or the residual
add on their output), the choice of experts, and the experts' two products. An instruction waits for the whole grid
(``sync``) where it touches what an earlier one of the list wrote, or writes what an earlier one read.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from .chain import chained
from .cuda import INTEGER, POINTER, Kernel

PRODUCT, ROUTE, LOAD_ROUTE, UP, DOWN, KDA, PREFETCH = range(7)
PLAIN, RMS, SCALED, KEEP = range(4)
STORE, STORE_FLOAT, ADD, SWIGLU, STORE_TAGGED = range(5)
WARPS, BLOCK, HEAD, LIST, GROUPS, TOPK = 8, 320, 128, 32, 6, 8
SLAB = WARPS * BLOCK  # most columns of a term
UNITS = 16  # sums of 8 weight rows and a warp's block that a piece leaves at most
FORESEEN = 192 * 1024  # bytes that a block brings into L2 for the launch after its own
MARKS, PIECES, STEPS = 8, 32, 12
_POINTERS = (
    "w", "x", "out", "norm", "gate", "w2", "x2", "ids", "weights", "bias", "logits", "stats", "g", "up_f", "up_g",
)  # fmt: skip
_COUNTS = (
    "kind", "prologue", "epilogue", "sync", "n", "k", "k2", "x_stride", "x2_stride", "out_stride", "gate_stride",
    "slot_stride", "experts", "topk", "groups", "top_groups", "renormalize", "start", "terms", "split",
)  # fmt: skip
_FLOATS = ("eps", "scaling", "limit", "spare2")


class _Shape(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_int16) for name in ("width", "size")),
        *((name, ctypes.c_uint8) for name in ("blocks", "teams", "per", "spare")),
    ]


class _Packed(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_uint64) for name in _POINTERS),
        *((name, ctypes.c_int32) for name in _COUNTS),
        ("shape", _Shape),
        ("last", _Shape),
        ("g_stride", ctypes.c_int32),
        ("tagged", ctypes.c_int32),
        *((name, ctypes.c_float) for name in _FLOATS),
    ]


def shape_of(width: int, halves: int) -> tuple[int, int, int, int, int]:
    """(width, columns of a warp's block, blocks, teams, groups of 8 weight rows of a piece) for terms so wide."""
    blocks = -(-width // BLOCK)
    teams = WARPS // blocks
    blocks = min(WARPS // teams, -(-width // 32))  # the warps that a team can have: shorter blocks are sooner done
    size = -(-width // (32 * blocks)) * 32
    blocks = -(-width // size)
    return width, size, blocks, teams, max(1, min(UNITS // blocks, PIECE[halves] * 64 // width))


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
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (rounded, the weight it was made of)

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

    def packed(self, start: int, grid: int, halves: int) -> bytes:
        """The bytes of the struct for so many blocks; ``start``: which of them takes the first share."""
        values: dict[str, Any] = {"kind": self.kind, "sync": int(self.sync), "start": start, "terms": 1}
        for name, value in self.fields.items():
            values[name] = value.data_ptr() if isinstance(value, Tensor) else value
        for name, width in zip(("shape", "last"), self.widths(), strict=True):
            if width:
                values[name] = _Shape(*shape_of(width, halves))
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
    ahead: Sweep | None = None  # the launch after this one in the step, with others between
    trace: Tensor | None = None  # int64 of ``traced`` words, see benchmarks/sweep_trace.py
    finely: bool = False  # whether it holds times of pieces too
    _table: Tensor | None = None
    _count: int = 0

    def add(self, new: Instruction) -> None:
        """Append, with a barrier where the list since the last one conflicts with it."""
        since: list[Instruction] = []
        for old in reversed(self.instructions):
            since.append(old)
            if old.sync:
                break
        wrote = [t for old in since for t in old.writes]
        read = [t for old in since for t in old.reads]
        if signed := new.fields.get("tagged"):  # each word that this one before it writes says itself that it is there
            wrote = [t for n, old in enumerate(since, 1) for t in old.writes if n != signed]
        new.sync = hazard = _touch(new.reads, wrote) or _touch(new.writes, wrote) or _touch(new.writes, read)
        if new.kind in (ROUTE, LOAD_ROUTE) and any(old.kind in (ROUTE, LOAD_ROUTE, UP, DOWN) for old in since):
            new.sync = True  # whoever reads the tables of the choice before has to have finished
        if since and new.kind == KDA:
            new.sync = True  # its sums lie where those of products do
        if new.fields.get("prologue") == RMS and any(old.fields.get("prologue") == RMS for old in since):
            new.sync = True  # the squares of one norm at a time
        if new.spans and any(old.spans for old in since):
            new.sync = True  # one sum at a time is on its way between two blocks
        last = next((old for old in reversed(self.instructions) if old.kind not in (ROUTE, LOAD_ROUTE)), None)
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
        signed = any("tagged" in item.fields for item in self.instructions)
        assert not signed or any(item.sync for item in self.instructions), "signs are of a launch with a barrier"
        grid = _processors(device)
        halves = halves_of(self.rows)
        parts = [item.packed(start, grid, halves) for item, start in self._starts(grid)]
        if self.ahead is not None and len(parts) < LIST:
            parts += self.ahead.foreseen(grid)[: LIST - len(parts)]
        self._count = len(parts)
        raw = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)
        self._table = raw.to(device)

    def reread(self) -> None:
        """After weights were written in place: what was made of them when the list was made is made again."""
        for copy, source in (pair for item in self.instructions for pair in item.copies):
            copy.copy_(source)

    def _starts(self, grid: int) -> Iterator[tuple[Instruction, int]]:
        """Each instruction and the block with its first share."""
        start = 0
        for item in self.instructions:
            yield item, start
            if item.kind == PRODUCT:  # the next one begins where this one's last share ended
                start = (start - item.fields["n"] // 8) % grid

    def foreseen(self, grid: int) -> list[bytes]:
        """What the launch before this one brings into L2: the first weights of each block."""
        found, room = [], FORESEEN
        for item, start in self._starts(grid):
            if item.kind != PRODUCT or room <= 0:
                break
            f = item.fields
            wanted = {"w": f["w"], "n": f["n"], "k": f["k"], "experts": room}
            new = Instruction(kind=PREFETCH, fields=wanted, reads=[], writes=[])
            found.append(new.packed(start, grid, halves_of(self.rows)))
            room -= f["n"] * f["k"] * 2 // grid
        return found

    def __call__(self) -> None:
        if self._table is None:
            self.prepare()
        table = self._table
        assert table is not None
        device = table.device
        halves = halves_of(self.rows)
        kernel, (counter, carry) = _kernel(device, halves, int(self.trace is not None) + self.finely), _common(device)
        args = (
            (table.data_ptr(), POINTER),
            (self._count, INTEGER),
            (self.live.data_ptr() if self.live is not None else 0, POINTER),
            (self.rows, INTEGER),
            (counter.data_ptr(), POINTER),
            (carry.data_ptr(), POINTER),
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
def _common(device: torch.device) -> tuple[Tensor, Tensor]:
    """The barrier's counter and the launches' epoch, and room for sums on their way from one block to the next."""
    carry = torch.zeros(_processors(device), 32, 8, dtype=torch.int64, device=device)
    return torch.zeros(2, dtype=torch.int32, device=device), carry


SHARED = 227 * 1024  # most shared memory of a block
HALVES = (1, 2, 4)  # what sweep.cu is compiled for, in eights of rows
PIECE = {1: 48, 2: 76, 4: 48}  # KiB that a piece should have: with more rows a step takes longer, with one memory does


def halves_of(rows: int) -> int:
    """The narrowest of HALVES that holds so many rows."""
    return next(h for h in HALVES if rows <= 8 * h)


def defines(halves: int, trace: int = 0) -> dict[str, int]:
    """The constants that sweep.cu is compiled with for up to ``halves`` * 8 rows."""
    return {"SOLITON_HALVES": halves, "SOLITON_TRACE": trace}


def _beside(halves: int) -> int:
    """What sweep.cu's Shared takes, rounded up; the kernel traps when it is too little."""
    rows = halves * 8
    buffers = {1: 3, 2: 3, 4: 2}[halves]
    sums = buffers * UNITS * rows * 32 + GROUPS * rows * 32 + (WARPS + 1) * rows * 4
    delta = 8 * (3 * HEAD + 2 * 32 + 2) * 4
    return sums + delta + rows * TOPK * (8 + 2 + 2 * rows + 1) + LIST * (ctypes.sizeof(_Packed) + 4 + 32) + 1024


@functools.cache
def _kernel(device: torch.device, halves: int, trace: int = 0) -> Kernel:
    return Kernel("sweep.cu", "soliton_sweep", defines=defines(halves, trace), shared=SHARED, device=device)
