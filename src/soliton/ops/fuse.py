"""From the tape of a step on a GPU to sweeps: which products run together in one launch, and what folds into them."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .bulk import swiglu
from .instructions import down, kda, load_route, product, route, tagged, up
from .sweep import HEAD, LIST, PRODUCT, ROUTE, SLAB, Instruction, Sweep


def fuse(entries: list[Any], live: Tensor | None, *, entry: Any) -> list[Any]:
    """The entries of a recording with their products as sweeps over ``live`` rows (int64 [1]).
    ``entry(op, call)`` makes an entry of a launch."""
    return _Fuser(entries, live, entry).run()


# Techniques left out of the steps recorded from now on, for measuring what each is worth; see benchmarks/ab.py.
LEFT_OUT: set[str] = set()
TECHNIQUES = ("kda", "signs", "route", "swiglu", "ahead", "head")


def _alone(item: Any) -> bool:
    """Whether no sweep takes this product: its weights are wider than its input."""
    return item.op == "linear" and bool(item.args[2].data.dtype != item.args[1].dtype)


class _Fuser:
    def __init__(self, entries: list[Any], live: Tensor | None, entry: Any) -> None:
        self.entries, self.live, self.entry = entries, live, entry
        self.open: Sweep | None = None
        self.made: list[Any] = []
        self.norms: dict[int, Any] = {}  # address of a normed buffer -> the entry that would make it
        self.scales: dict[int, tuple[Tensor, float]] = {}  # address of a recurrence's opened output -> its norm
        self.words: Tensor | None = None  # logits on their way, for all layers
        self.low: tuple[Any, Any] | None = None  # products that the next recurrence makes itself
        self.readers: dict[int, list[tuple[str, int]]] = {}
        for item in entries:
            for arg in item.args[1:]:
                if isinstance(arg, Tensor):
                    name = "linear alone" if _alone(item) else item.op
                    self.readers.setdefault(arg.data_ptr(), []).append((name, arg.numel()))

    def run(self) -> list[Any]:
        at = 0
        while at < len(self.entries):
            item = self.entries[at]
            following = self.entries[at + 1] if at + 1 < len(self.entries) else None
            if item.op == "norm" and self._is_last(at) and "head" not in LEFT_OUT:
                self._last(at)
                break
            if item.op == "norm" and self._folds(item):
                self.norms[item.args[0].data_ptr()] = item
            elif item.op == "linear" and self._is_low(at):
                at += 1  # made by the recurrence itself
            elif item.op == "linear" and not _alone(item):
                at += self._linear(item, following)
            elif item.op == "router" and "route" in LEFT_OUT:
                self._close()
                self._put(item.args[0].shape[0], route(*item.args))
                self._close()
            elif item.op == "router":
                if self.open is not None and len(self.open.instructions) + 4 > LIST:
                    self._close()  # the experts' products belong into the same list
                self._choice(item)
            elif item.op == "moe":
                at += self._moe(item, following)
            elif item.op == "kda.step" and item.args[8].shape[2:] == (HEAD, HEAD) and "kda" not in LEFT_OUT:
                at += self._recurrence(at)
            else:
                self._close()
                self.made.append(item)
            at += 1
        self._close()
        sweeps = [made.function for made in self.made if isinstance(made.function, Sweep)]
        if "ahead" not in LEFT_OUT:
            for one, after in itertools.pairwise(sweeps):
                one.ahead = after
        return self.made

    def _is_last(self, at: int) -> bool:
        """Whether after this norm only copies of it and one product of it follow: the target's head."""
        item, rest = self.entries[at], self.entries[at + 1 :]
        if sorted(e.op for e in rest) != ["copy", "linear"] or any(map(_alone, rest)) or item.args[1].shape[-1] > SLAB:
            return False
        out = item.args[0]
        return all(e.args[1].data_ptr() == out.data_ptr() and e.args[1].shape == out.shape for e in rest)

    def _last(self, at: int) -> None:
        """The product goes on in the sweep that is open and norms its input itself; what is kept is normed after it."""
        item, rest = self.entries[at], {entry.op: entry for entry in self.entries[at + 1 :]}
        self.norms[item.args[0].data_ptr()] = item
        self._linear(rest["linear"], None)
        self._close()
        kept = rest["copy"].args[0]
        self.made.append(self.entry("norm", partial(item.ready.func, kept, *item.args[1:])))

    def _choice(self, item: Any) -> None:
        logits, choice = item.args[2], route(*item.args)
        scores = self.open.instructions[-1] if self.open is not None else None
        alone = "signs" not in LEFT_OUT and [op for op, _ in self.readers.get(logits.data_ptr(), [])] == ["router"]
        if scores is not None and alone and scores.kind == PRODUCT and scores.fields["out"] is logits:
            if self.words is None or self.words.shape != logits.shape:
                self.words = torch.zeros(logits.shape, dtype=torch.int64, device=logits.device)
            tagged(scores, choice, self.words)
        self._put(item.args[0].shape[0], choice)

    def _folds(self, item: Any) -> bool:
        """Whether everything that reads this norm's output can norm its input itself."""
        out, x = item.args[0], item.args[1]
        readers = self.readers.get(out.data_ptr(), [])
        if not readers or not all(op in ("linear", "moe") and size == out.numel() for op, size in readers):
            return False
        return bool(x.shape[-1] <= SLAB)

    def _opens(self, at: int) -> bool:
        """Whether the recurrence at ``at`` is followed by its gated norm, which it can then do."""
        if at + 1 >= len(self.entries) or self.entries[at + 1].op != "kda.norm":
            return False
        out, x = self.entries[at + 1].args[:2]
        readers = self.readers.get(out.data_ptr(), [])
        return bool(x.data_ptr() == self.entries[at].args[0].data_ptr()) and all(op == "linear" for op, _ in readers)

    def _is_low(self, at: int) -> bool:
        """Whether the products at ``at`` and after it make a recurrence's forget rows and gates out of 128 columns."""
        if at + 2 >= len(self.entries) or "kda" in LEFT_OUT:
            return False
        one, two, step = self.entries[at : at + 3]
        if (two.op, step.op) != ("linear", "kda.step") or not self._opens(at + 2) or step.args[8].shape[2] != HEAD:
            return False
        same = step.args[2].data_ptr() == one.args[0].data_ptr()
        if not same or one.args[2].inputs != HEAD or two.args[2].inputs != HEAD:
            return False
        self.low = (one, two)
        return True

    def _recurrence(self, at: int) -> int:
        out, proj, f, b, window, conv, a, dt_bias, states, current, _, *law = self.entries[at].args
        low, opened = None, None
        if self._opens(at):
            y, _, gate, weight, eps = self.entries[at + 1].args
            out, g = y.flatten(1), gate.flatten(1)
            stats = torch.zeros(proj.shape[0], states.shape[1], 4, dtype=torch.float32, device=proj.device)
            self.scales[y.data_ptr()] = (stats, eps)
            if self.low is not None:
                one, two = self.low
                f, g, low = one.args[1], two.args[1], (one.args[2], two.args[2])
            opened = (g, weight, stats)
        self.low = None
        self._put(
            proj.shape[0],
            kda(out, proj, f, b, window, conv, a, dt_bias, states, current, *law, opened=opened, low=low),
        )
        return int(opened is not None)

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
        if x.data_ptr() in self.scales:
            return x, {"scaled": self.scales[x.data_ptr()]}
        made = self.norms.get(x.data_ptr())
        return (x, {}) if made is None else (made.args[1], {"norm": (made.args[2], made.args[3])})

    def _linear(self, item: Any, following: Any) -> int:
        out, x, w = item.args
        source, kind = self._input(x)
        rows = x.shape[0]
        if following is not None and following.op == "swiglu" and w.paired and "swiglu" not in LEFT_OUT:
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
        if "swiglu" in LEFT_OUT:
            both = torch.zeros(rows, shared_up.padded, dtype=x.dtype, device=x.device)
            self._put(rows, product(both, source, shared_up, **kind))
            self._close()
            self.made.append(
                self.entry("swiglu", partial(swiglu, act_shared, both[:, 0::2], both[:, 1::2], shared_limit))
            )
            self._put(rows, load_route(ids, weights), second, third)
        elif self.open is not None and self.open.instructions[-1].kind == ROUTE:
            choice = self.open.instructions.pop()
            if "tagged" in choice.fields:  # its words are on their way while the shared expert is multiplied
                choice.fields["tagged"] = 2
                self._put(rows, first, choice, second, third)
            else:
                self._put(rows, choice, first, second, third)
        else:
            self._put(rows, first)
            self._put(rows, load_route(ids, weights), second, third)
        return int(adds)
