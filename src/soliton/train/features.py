"""What a draft learns from: the target's residuals after the tapped layers and its hidden states after the final norm.

Live from a loaded target, or kept, where they are many times larger than the text: on disk, the estimate first, or in
the memory of the target's device.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..errors import ConfigError
from ..runtime import Runtime
from .errors import check_space, writing

MEMORY = "memory"


def features(runtime: Runtime, ids: Sequence[int], taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """(taps [n, m * H], last hidden [n, H]) of a sequence, in the target's dtype and on its device. The stream is read
    from its start and left empty."""
    runtime.hold_threads()
    runtime.stream.clear()
    tapped, hidden = [], []
    with torch.inference_mode():
        for step in runtime.prefill.read(list(ids), 0, len(ids), taps=taps):
            assert step.taps is not None
            tapped.append(step.taps)
            hidden.append(step.hidden)
        runtime.stream.clear()
    return torch.cat(tapped), torch.cat(hidden)  # outside: tensors that autograd may keep


class Features:
    """``features`` of a target by sequence; with ``folder`` each is computed once and kept there, bit for bit. MEMORY
    as folder: in the memory of the target's device. ``memory``: GiB of that in which what was asked for stays."""

    def __init__(
        self, runtime: Runtime, taps: tuple[int, ...], folder: str | Path | None = None, memory: float = 0.0
    ) -> None:
        self._runtime, self._taps = runtime, taps
        self._folder = None if folder in (None, MEMORY) else Path(str(folder))
        self._all = folder == MEMORY
        self._memory: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        self._room = math.inf if self._all else memory * 2**30
        dtype = str(runtime.parts.dtype).removeprefix("torch.")
        self._key = json.dumps([runtime.checkpoint.name, str(runtime.checkpoint.path), taps, dtype])

    def bytes_of(self, lengths: Iterable[int]) -> int:
        """Bytes of the kept features of sequences of these lengths."""
        spec = self._runtime.checkpoint.spec
        return sum(lengths) * (len(self._taps) + 1) * spec.hidden * self._runtime.parts.dtype.itemsize

    def check_space(self, sequences: Iterable[Sequence[int]]) -> int:
        """Bytes still to be written for these; DiskError when the disk has less free, ConfigError when memory has; 0
        when nothing is kept."""
        if self._all:
            needed, device = self.bytes_of(map(len, sequences)), self._runtime.parts.device
            free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else needed
            if needed > free:
                raise ConfigError(
                    f"features = {MEMORY!r} needs {needed:,} bytes on {device}, and {free:,} are free; give a directory"
                )
            return needed
        if self._folder is None:
            return 0
        with writing(self._folder, "the target's hidden states"):
            self._folder.mkdir(parents=True, exist_ok=True)
        needed = self.bytes_of(len(ids) for ids in sequences if not self._file(ids).exists())
        check_space(self._folder, needed, "keeping the target's hidden states")
        return needed

    def __call__(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """As ``features``."""
        key = tuple(ids)
        if key in self._memory:
            return self._memory[key]
        pair = self._kept(ids) if self._folder is not None else features(self._runtime, ids, self._taps)
        if self._room > 0:
            self._room -= sum(one.nbytes for one in pair)
            self._memory[key] = pair
        return pair

    def _kept(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """From the folder; computed and put there when it has them not."""
        file = self._file(ids)
        try:
            kept = load_file(file, device=str(self._runtime.parts.device))
            return kept["taps"], kept["hidden"]
        except (OSError, SafetensorError, KeyError):
            pass  # not there, or cut off by a crash of the machine
        taps, hidden = features(self._runtime, ids, self._taps)
        temporary = file.with_suffix(f".{os.getpid()}.tmp")
        with writing(file, "the target's hidden states"):
            try:
                save_file({"taps": taps.contiguous(), "hidden": hidden.contiguous()}, temporary)
                temporary.replace(file)
            finally:
                temporary.unlink(missing_ok=True)
        return taps, hidden

    def _file(self, ids: Sequence[int]) -> Path:
        assert self._folder is not None
        name = hashlib.sha256(f"{self._key}{list(ids)}".encode()).hexdigest()
        return self._folder / f"{name[:40]}.safetensors"
