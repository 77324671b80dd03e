"""Runs of skinny products on a GPU: instruction lists for the persistent kernel in sweep.cu, made from a tape.

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
from .weight import Weight

PRODUCT, ROUTE, LOAD_ROUTE, UP, DOWN, KDA = range(6)
PLAIN, RMS, GATED, KEEP = range(4)
STORE, STORE_FLOAT, ADD, SWIGLU = range(4)
WARPS, BUFFERS, BLOCK, HEAD, LIST, GROUPS, TOPK = 10, 2, 256, 128, 16, 4, 8
SLAB = WARPS * BLOCK
_SLOT = 8 * SLAB * 2
_POINTERS = ("w", "x", "out", "norm", "gate", "w2", "x2", "ids", "weights", "bias", "logits")
_COUNTS = (
    "kind", "prologue", "epilogue", "sync", "n", "k", "k2", "x_stride", "x2_stride", "out_stride", "gate_stride",
    "slot_stride", "experts", "topk", "groups", "top_groups", "renormalize", "start", "spare0", "spare1",
)  # fmt: skip
_FLOATS = ("eps", "scaling", "limit", "spare2")


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

    def packed(self, start: int) -> bytes:
        """The bytes of the struct; ``start``: which block of the grid takes the first share."""
        values: dict[str, Any] = {"kind": self.kind, "sync": int(self.sync), "start": start}
        for name, value in self.fields.items():
            values[name] = value.data_ptr() if isinstance(value, Tensor) else value
        return bytes(_Packed(**values))


@dataclass
class Sweep:
    """One launch: a list over fixed buffers. ``rows``: most rows; ``live``: int64 [1] device count or None."""

    rows: int
    live: Tensor | None
    instructions: list[Instruction] = field(default_factory=list)
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
        new.sync = _touch(new.reads, wrote) or _touch(new.writes, wrote) or _touch(new.writes, read)
        last = next((old for old in reversed(self.instructions) if old.kind not in (ROUTE, LOAD_ROUTE)), None)
        if last is not None and last.kind == KDA:
            last = None
        if (
            last is not None
            and new.input is not None
            and new.input == last.input
            and not _touch([last.reads[0]], wrote)
        ):
            new.fields["prologue"] = KEEP  # the normed input is still in the registers
        self.instructions.append(new)

    def prepare(self) -> None:
        """Put the list into device memory."""
        device = self.instructions[0].reads[0].device
        grid, start, parts = _processors(device), 0, []
        for item in self.instructions:
            several = item.kind == DOWN or (item.kind == PRODUCT and item.fields["k"] > SLAB)
            assert not several or item.fields["n"] <= GROUPS * 8 * grid, "too many groups to sum over terms"
            parts.append(item.packed(start))
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
        kernel, counter = _kernel(device, -(-self.rows // 16)), _counter(device)
        args = (
            (table.data_ptr(), POINTER),
            (len(self.instructions), INTEGER),
            (self.live.data_ptr() if self.live is not None else 0, POINTER),
            (self.rows, INTEGER),
            (counter.data_ptr(), POINTER),
        )
        kernel.launch(_processors(device), (WARPS + 2) * 32, args, pdl=chained())

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
def _counter(device: torch.device) -> Tensor:
    return torch.zeros(1, dtype=torch.int64, device=device)


def defines(tiles: int) -> dict[str, int]:
    """The constants that sweep.cu is compiled with for up to ``tiles`` * 16 rows (1 or 2)."""
    return {"SOLITON_TILES": tiles, "SOLITON_SLOTS": 5 if tiles == 1 else 3}


@functools.cache
def _kernel(device: torch.device, tiles: int) -> Kernel:
    constants, rows = defines(tiles), tiles * 16
    # what sweep.cu's Shared takes, rounded up; the kernel traps when it is too little
    sums = BUFFERS * WARPS * rows * 32 + GROUPS * rows * 32 + WARPS * rows * 4 + WARPS * BLOCK * 2
    after = sums + rows * TOPK * (8 + 2 + rows) + LIST * 192 + 512
    shared = constants["SOLITON_SLOTS"] * _SLOT + after
    return Kernel("sweep.cu", "soliton_sweep", defines=constants, shared=shared, device=device)


# -- instructions ------------------------------------------------------------------------------------------------------


def product(
    out: Tensor,
    x: Tensor,
    w: Weight,
    *,
    norm: tuple[Tensor, float] | None = None,
    gated: tuple[Tensor, Tensor, float] | None = None,
    limit: float | None = None,
    add: bool = False,
) -> Instruction:
    """out[R, N] = x[R, K] @ w, bf16 in, float32 sums, one rounding to out's bf16 (or none: float32).

    norm: (weight float32 [K], eps), x is normed first and rounded; gated: (gate [R, K], weight [128], eps), x is normed
    in blocks of 128 and multiplied by sigmoid(gate); limit: SwiGLU of paired outputs, 0 without a clamp; add: out +=.
    """
    weight = w.data.t()
    assert weight.is_contiguous() and w.inputs % 32 == 0 and w.padded % 8 == 0, "a weight for sweeps is [N, K], K by 32"
    fields: dict[str, Any] = {"w": weight, "x": x, "out": out, "n": w.padded, "k": w.inputs, "x_stride": x.stride(0)}
    fields["out_stride"] = out.stride(0)
    reads = [x]
    if norm is not None:
        assert w.inputs <= SLAB
        fields |= {"prologue": RMS, "norm": norm[0], "eps": norm[1]}
    if gated is not None:
        fields |= {"prologue": GATED, "gate": gated[0], "gate_stride": gated[0].stride(0), "norm": gated[1]}
        fields["eps"] = gated[2]
        reads.append(gated[0])
    if limit is not None:
        fields |= {"epilogue": SWIGLU, "limit": limit}
    elif add:
        fields["epilogue"] = ADD
        reads.append(out)
    else:
        fields["epilogue"] = STORE_FLOAT if out.dtype == torch.float32 else STORE
    return Instruction(kind=PRODUCT, fields=fields, reads=reads, writes=[out], input=_normed(x, norm))


def _normed(x: Tensor, norm: tuple[Tensor, float] | None) -> tuple[int, ...] | None:
    return None if norm is None else (x.data_ptr(), x.stride(0), x.shape[1], norm[0].data_ptr())


def route(
    ids: Tensor, weights: Tensor, logits: Tensor, bias: Tensor, groups: int, top_groups: int, renormalize: bool,
    scaling: float,
) -> Instruction:  # fmt: skip
    """The choice of experts; see ops.router.reference. logits stay as they are."""
    experts, topk = bias.shape[0], ids.shape[1]
    per = 4 if experts <= 128 else 8 if experts <= 256 else 16  # experts of a lane
    lanes, rest = divmod(experts // groups, per)
    assert topk <= TOPK and experts <= 512, "a choice is of at most 8 among 512"
    assert groups == 1 or (not rest and lanes and not lanes & (lanes - 1)), "a group is a power of two of lanes"
    fields = {
        "ids": ids, "weights": weights, "logits": logits, "bias": bias, "x_stride": logits.stride(0),
        "experts": experts, "topk": topk, "groups": groups, "top_groups": top_groups, "renormalize": int(renormalize),
        "scaling": scaling,
    }  # fmt: skip
    return Instruction(kind=ROUTE, fields=fields, reads=[logits], writes=[ids, weights])


def load_route(ids: Tensor, weights: Tensor) -> Instruction:
    """Take a choice that is there already."""
    fields = {"ids": ids, "weights": weights, "topk": ids.shape[1]}
    return Instruction(kind=LOAD_ROUTE, fields=fields, reads=[ids, weights], writes=[])


def up(act: Tensor, x: Tensor, w: Tensor, *, norm: tuple[Tensor, float] | None, limit: float) -> Instruction:
    """act[R, slot, I] = swiglu(x @ w[expert of the slot]); w: [E, 2 I, H], gate and up rows in turn; x, norm as in
    product."""
    fields: dict[str, Any] = {
        "w": w, "x": x, "out": act, "n": w.shape[1], "k": w.shape[2], "x_stride": x.stride(0),
        "out_stride": act.stride(0), "slot_stride": act.stride(1), "limit": limit,
    }  # fmt: skip
    if norm is not None:
        fields |= {"prologue": RMS, "norm": norm[0], "eps": norm[1]}
    return Instruction(kind=UP, fields=fields, reads=[x], writes=[act], input=_normed(x, norm))


def down(out: Tensor, act: Tensor, w: Tensor, shared: tuple[Tensor, Weight] | None, *, add: bool) -> Instruction:
    """out[R, H] (+)= sum over a row's experts, ascending, of weight * (act[R, slot] @ w[expert]), then the shared
    expert's. w: [E, H, I]; act: [R, k, I]; shared: (its activations [R, J], its down weight)."""
    fields: dict[str, Any] = {
        "w": w, "x": act, "out": out, "n": w.shape[1], "k": w.shape[2], "x_stride": act.stride(0),
        "slot_stride": act.stride(1), "out_stride": out.stride(0), "epilogue": ADD if add else STORE,
    }  # fmt: skip
    reads = [act, *([out] if add else [])]
    if shared is not None:
        x2, w2 = shared
        assert w2.inputs <= SLAB and w2.padded == w.shape[1]
        fields |= {"w2": w2.data.t(), "k2": w2.inputs, "x2": x2, "x2_stride": x2.stride(0)}
        reads.append(x2)
    return Instruction(kind=DOWN, fields=fields, reads=reads, writes=[out])


def kda(
    out: Tensor, proj: Tensor, f: Tensor, b: Tensor, window: Tensor, conv: Tensor, a: Tensor, dt_bias: Tensor,
    states: Tensor, current: Tensor, law: str, lower_bound: float, eps: float,
) -> Instruction:  # fmt: skip
    """One step of a layer's recurrence; see kda_triton.step, whose arguments these are. Heads of 128 by 128, 4 taps."""
    slots, heads, key, value = states.shape
    assert key == value == HEAD and conv.shape[0] == 4
    fields = {
        "w": conv, "x": proj, "out": out, "norm": a, "gate": f, "w2": window, "x2": b, "ids": current,
        "weights": states, "bias": dt_bias, "n": heads, "k": conv.shape[1], "x_stride": proj.stride(0),
        "x2_stride": window.stride(0), "out_stride": out.stride(0), "gate_stride": f.stride(0),
        "slot_stride": states.stride(0), "experts": slots, "groups": int(law == "bounded"), "eps": eps,
        "scaling": lower_bound, "limit": key**-0.5,
    }  # fmt: skip
    assert b.stride(0) == proj.stride(0), "beta lies beside the other projections"
    return Instruction(kind=KDA, fields=fields, reads=[proj, f, b, window, states], writes=[out, window, states])


# -- from a tape -------------------------------------------------------------------------------------------------------


def fuse(entries: list[Any], live: Tensor | None, *, entry: Any) -> list[Any]:
    """The entries of a recording with their products as sweeps over ``live`` rows (int64 [1]).
    ``entry(op, call)`` makes an entry of a launch."""
    return _Fuser(entries, live, entry).run()


class _Fuser:
    def __init__(self, entries: list[Any], live: Tensor | None, entry: Any) -> None:
        self.entries, self.live, self.entry = entries, live, entry
        self.open: Sweep | None = None
        self.made: list[Any] = []
        self.norms: dict[int, Any] = {}  # address of a normed buffer -> the entry that would make it
        self.readers: dict[int, list[tuple[str, int]]] = {}
        for item in entries:
            for arg in item.args[1:]:
                if isinstance(arg, Tensor):
                    self.readers.setdefault(arg.data_ptr(), []).append((item.op, arg.numel()))

    def run(self) -> list[Any]:
        at = 0
        while at < len(self.entries):
            item = self.entries[at]
            following = self.entries[at + 1] if at + 1 < len(self.entries) else None
            if item.op in ("norm", "kda.norm") and self._folds(item):
                self.norms[item.args[0].data_ptr()] = item
            elif item.op == "linear":
                at += self._linear(item, following)
            elif item.op == "router":
                if self.open is not None and len(self.open.instructions) + 4 > LIST:
                    self._close()  # the experts' products belong into the same list
                self._put(item.args[0].shape[0], route(*item.args))
            elif item.op == "moe":
                at += self._moe(item, following)
            elif item.op == "kda.step" and item.args[8].shape[2:] == (HEAD, HEAD):
                out, proj, f, b, window, conv, a, dt_bias, states, current, _, *law = item.args
                self._put(proj.shape[0], kda(out, proj, f, b, window, conv, a, dt_bias, states, current, *law))
            else:
                self._close()
                self.made.append(item)
            at += 1
        self._close()
        return self.made

    def _folds(self, item: Any) -> bool:
        """Whether everything that reads this norm's output can norm its input itself."""
        out, x = item.args[0], item.args[1]
        readers = self.readers.get(out.data_ptr(), [])
        if not readers or not all(op in ("linear", "moe") and size == out.numel() for op, size in readers):
            return False
        return bool(x.shape[-1] == HEAD) if item.op == "kda.norm" else bool(x.shape[-1] <= SLAB)

    def _close(self) -> None:
        if self.open is not None:
            self.made.append(self.entry("sweep", self.open))
        self.open = None

    def _put(self, rows: int, *new: Instruction) -> None:
        """Instructions that belong together; each list has buffers of one row count."""
        if self.open is not None and (self.open.rows != rows or len(self.open.instructions) + len(new) > LIST):
            self._close()
        if self.open is None:
            self.open = Sweep(rows, self.live)
        for item in new:
            self.open.add(item)

    def _input(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        made = self.norms.get(x.data_ptr())
        if made is None:
            return x, {}
        if made.op == "norm":
            return made.args[1], {"norm": (made.args[2], made.args[3])}
        _, o, gate, weight, eps = made.args
        return o.flatten(1), {"gated": (gate.flatten(1), weight, eps)}

    def _linear(self, item: Any, following: Any) -> int:
        out, x, w = item.args
        source, kind = self._input(x)
        rows = x.shape[0]
        if following is not None and following.op == "swiglu" and w.paired:
            self._put(rows, product(following.args[0], source, w, limit=following.args[3], **kind))
            return 1
        if following is not None and following.op == "add" and following.args[1].data_ptr() == out.data_ptr():
            self._put(rows, product(following.args[0], source, w, add=True, **kind))
            return 1
        self._put(rows, product(out, source, w, **kind))
        return 0

    def _moe(self, item: Any, following: Any) -> int:
        out, x, ids, weights, w_up, w_down, shared_up, shared_down, limit, shared_limit, _, act, act_shared = item.args
        source, kind = self._input(x)
        rows = x.shape[0]
        adds = following is not None and following.op == "add" and following.args[1].data_ptr() == out.data_ptr()
        target = following.args[0] if adds else out
        first = product(act_shared, source, shared_up, limit=shared_limit, **kind)
        second = up(act, source, w_up, norm=kind.get("norm"), limit=limit)
        third = down(target, act, w_down, (act_shared, shared_down), add=adds)
        if self.open is not None and self.open.instructions[-1].kind == ROUTE:
            # the shared expert's weights arrive while the choice is made
            self._put(rows, first, second, third)
        else:
            self._put(rows, first)
            for expert in (second, third):
                self._put(rows, load_route(ids, weights), expert)
        return int(adds)
