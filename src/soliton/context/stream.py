"""The buffers of the one stream, all at fixed addresses.

KV (latent caches) is addressed by position and simply overwritten by what comes next; recurrent state and conv tail
are not, so verify stages them by row and ``kda.commit`` moves the accepted row's into slot 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..model.decoder import Memory
from ..model.draft_spec import DraftSpec
from ..model.kda import channels
from ..model.spec import KdaSpec, MlaSpec, ModelSpec
from ..ops import device as where
from ..ops.mla import BLOCK

ROWS_MAX = 32  # most rows of a step; KV has that many positions of slack past max_context


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes of each part of a stream, for the memory plan."""

    kv: int
    draft_kv: int
    states: int
    windows: int


def positions_for(max_context: int) -> int:
    """KV positions kept for ``max_context`` tokens: slack for a last step's rows, then up to a whole block."""
    return -(-(max_context + ROWS_MAX) // BLOCK) * BLOCK


class Stream:
    """Buffers for one sequence of up to ``max_context`` tokens and steps of up to ``rows`` rows.

    kv: [mla layers, positions, kv_rank + rope]; draft_kv: [positions, D] of the MTP layer or None; features:
    [positions, hidden] and draft_cache: [layers, 2, positions, m, d] of a block drafter (ops.draft), the second made of
    the first, or None; states: float32 [rows + 1, kda layers, n, K, V], slot 0 committed; windows: [W-1+rows, kda
    layers, channels], the first W-1 rows committed; boundary: [2, hidden], the target's state at the last committed
    position after its final norm (twice the same row: the draft's next input); current: int64 [1], the slot of the
    committed state in a step on a GPU, where committing moves it and copies no states. Outside a step it is slot 0.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        max_context: int,
        rows: int,
        draft: bool,
        device: torch.device,
        dtype: torch.dtype,
        drafter: DraftSpec | None = None,
    ) -> None:
        self.spec, self.max_context, self.rows = spec, max_context, rows
        self.positions = positions_for(max_context)
        shapes = _shapes(spec, max_context, rows, draft)
        self.kv = torch.zeros(shapes["kv"], dtype=dtype, device=device)
        self.draft_kv = torch.zeros(shapes["draft_kv"], dtype=dtype, device=device) if draft else None
        self.features: Tensor | None = None
        self.draft_cache: Tensor | None = None
        if drafter is not None:
            features, cache = (_drafter_shapes(drafter, max_context)[name] for name in ("features", "draft_cache"))
            self.features = torch.zeros(features, dtype=dtype, device=device)
            self.draft_cache = torch.zeros(cache, dtype=dtype, device=device)
        self.states = torch.zeros(shapes["states"], dtype=torch.float32, device=device)
        self.windows = torch.zeros(shapes["windows"], dtype=dtype, device=device)
        self.boundary = torch.zeros(2, spec.hidden, dtype=dtype, device=device)
        self.current = torch.zeros(1, dtype=torch.int64, device=device)
        self.tail = shapes["windows"][0] - rows
        # what a step on a GPU copies at a multiple of ROLLING, because the host learns of it later
        self.marks: tuple[Tensor, Tensor, Tensor] | None = None
        if where.has_kernels(device):
            parts = (self.states[0], self.windows[: self.tail], self.boundary)
            self.marks = tuple(torch.zeros_like(t, memory_format=torch.contiguous_format) for t in parts)  # type: ignore
        self._kda = {index: i for i, index in enumerate(spec.kda_layers)}
        self._mla = {index: i for i, index in enumerate(spec.mla_layers)}

    def staged(self) -> Memory:
        """What a verify step reads and writes: staged states and windows."""
        return Memory(
            windows={layer: self.windows[:, i] for layer, i in self._kda.items()},
            states={layer: self.states[:, i] for layer, i in self._kda.items()},
            caches={layer: self.kv[i] for layer, i in self._mla.items()},
            current=self.current,
        )

    def state(self) -> Tensor:
        """A copy of the committed recurrent state, [kda layers, n, K, V]."""
        return self.states.index_select(0, self.current)[0]

    def committed(self, rows: int) -> Memory:
        """What prefill of ``rows`` rows reads and writes: states in place, windows of its own that start at the tail.

        ``keep`` afterwards to store the new tails.
        """
        if self.windows.device.type == "cuda":  # the rows' own projections are not kept: the tail is replaced in place
            windows = self.windows[: self.tail]
            return self._in_place(windows)
        windows = self.windows.new_empty(self.tail + rows, *self.windows.shape[1:])
        windows[: self.tail] = self.windows[: self.tail]
        self._scratch = windows
        return self._in_place(windows)

    def _in_place(self, windows: Tensor) -> Memory:
        return Memory(
            windows={layer: windows[:, i] for layer, i in self._kda.items()},
            states={layer: self.states[0, i] for layer, i in self._kda.items()},
            caches={layer: self.kv[i] for layer, i in self._mla.items()},
        )

    def keep(self, rows: int, real: int) -> None:
        """After a prefill over ``committed(rows)`` of which the first ``real`` rows count: store the conv tails."""
        if self.windows.device.type == "cuda":
            return
        self.windows[: self.tail] = self._scratch[real : real + self.tail]
        del self._scratch

    def clear(self) -> None:
        """Back to the empty sequence: zero state and history."""
        self.states[0].zero_()
        self.current.zero_()
        self.windows[: self.tail].zero_()
        self.boundary.zero_()

    def tensors(self) -> dict[str, Tensor]:
        """All buffers by name, for address checks and the memory plan."""
        named = {"kv": self.kv, "states": self.states, "windows": self.windows, "boundary": self.boundary}
        named["current"] = self.current
        named |= {f"mark {i}": t for i, t in enumerate(self.marks or ())}
        drafts = {"draft_kv": self.draft_kv, "features": self.features, "draft_cache": self.draft_cache}
        return named | {name: t for name, t in drafts.items() if t is not None}


def _shapes(spec: ModelSpec, max_context: int, rows: int, draft: bool) -> dict[str, tuple[int, ...]]:
    kda = next((x.mixer for x in spec.layers if isinstance(x.mixer, KdaSpec)), None)
    mla = next((x.mixer for x in spec.layers if isinstance(x.mixer, MlaSpec)), None)
    positions = positions_for(max_context)
    shapes: dict[str, tuple[int, ...]] = {"kv": (0, positions, 0), "states": (rows + 1, 0), "windows": (rows, 0, 0)}
    if mla is not None:
        shapes["kv"] = (len(spec.mla_layers), positions, mla.kv_rank + mla.rope_dim)
    if kda is not None:
        layers = len(spec.kda_layers)
        shapes["states"] = (rows + 1, layers, kda.heads, kda.key_dim, kda.value_dim)
        shapes["windows"] = (kda.conv_width - 1 + rows, layers, channels(kda))
    if draft and spec.mtp is not None and isinstance(spec.mtp.mixer, MlaSpec):
        shapes["draft_kv"] = (positions, spec.mtp.mixer.kv_rank + spec.mtp.mixer.rope_dim)
    else:
        shapes["draft_kv"] = (0,)
    return shapes


def _drafter_shapes(spec: DraftSpec, max_context: int) -> dict[str, tuple[int, ...]]:
    positions = positions_for(max_context)
    cache = (spec.layers, 2, positions, spec.kv_heads, spec.head_dim)
    return {"features": (positions, spec.hidden), "draft_cache": cache}


def sizes(
    spec: ModelSpec, *, max_context: int, rows: int, draft: bool, dtype: torch.dtype, drafter: DraftSpec | None = None
) -> Sizes:
    """Bytes that a Stream of these sizes takes."""
    shapes = _shapes(spec, max_context, rows, draft)
    drafts = ["draft_kv"] if draft else []
    if drafter is not None:
        shapes |= _drafter_shapes(drafter, max_context)
        drafts += ["features", "draft_cache"]

    def count(name: str, width: int) -> int:
        return int(torch.Size(shapes[name]).numel()) * width

    return Sizes(
        kv=count("kv", dtype.itemsize),
        draft_kv=sum(count(name, dtype.itemsize) for name in drafts),
        states=count("states", 4),
        windows=count("windows", dtype.itemsize),
    )
