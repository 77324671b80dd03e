"""Checkpoints of a run that survive a kill at any moment and a full disk.

Each is a directory step-N with state.safetensors and provenance.json. It is written under another name, forced to the
disk and renamed, so a directory of that name is whole; ``latest`` names the newest. Old ones go after it is there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .errors import check_space, writing

LATEST, STATE, PROVENANCE = "latest", "state.safetensors", "provenance.json"
_NAME = re.compile(r"step-(\d{8})")
MARGIN = 1 << 20  # bytes beside the tensors


@dataclass(frozen=True)
class Kept:
    """A checkpoint read back, its tensors on the CPU."""

    step: int
    tensors: dict[str, Tensor]
    provenance: dict[str, Any]


def sync(path: Path) -> None:
    """Force a file or a directory to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write(path: Path, fill: Callable[[Path], Any]) -> None:
    """Let ``fill`` write a file beside ``path``, force it to the disk and put it in place at once."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        fill(temporary)
        sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """As ``write``."""
    write(path, lambda to: to.write_text(text, encoding="utf-8"))


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """As ``write``, in safetensors."""
    write(path, lambda to: save_file(dict(tensors), to, metadata={"format": "pt"}))


def steps(root: Path) -> list[int]:
    """Steps of the whole checkpoints under ``root``, ascending."""
    found = [_NAME.fullmatch(path.name) for path in root.iterdir()] if root.is_dir() else []
    return sorted(int(match[1]) for match in found if match)


def save(root: Path, step: int, tensors: Mapping[str, Tensor], provenance: Mapping[str, Any], keep: int) -> Path:
    """Write the checkpoint of ``step``, then forget all but the newest ``keep``. DiskError leaves the others alone."""
    name = f"step-{step:08d}"
    whole, temporary = root / name, root / f".{name}.tmp"
    with writing(whole, f"the checkpoint of step {step}"):
        root.mkdir(parents=True, exist_ok=True)
        _sweep(root)
        check_space(root, sum(t.nbytes for t in tensors.values()) + MARGIN, f"the checkpoint of step {step}")
        try:
            temporary.mkdir()
            write_tensors(temporary / STATE, tensors)
            write_text(temporary / PROVENANCE, json.dumps({**provenance, "step": step}, indent=1))
            if whole.exists():  # unreadable, or later than the one this run went on from
                whole.rename(root / f".{name}.old")
            temporary.rename(whole)
            sync(root)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        write_text(root / LATEST, name)
        for old in steps(root)[:-keep]:
            gone = root / f".step-{old:08d}.old"  # a half-deleted checkpoint must not look like one
            (root / f"step-{old:08d}").rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
    return whole


def newest(root: Path) -> Kept | None:
    """The checkpoint that ``latest`` names, else the newest that can be read; None without one."""
    names = [f"step-{step:08d}" for step in reversed(steps(root))]
    pointer = root / LATEST
    if pointer.exists() and (name := pointer.read_text(encoding="utf-8").strip()) in names:
        names.insert(0, name)
    for name in names:
        try:
            provenance = json.loads((root / name / PROVENANCE).read_text(encoding="utf-8"))
            return Kept(int(provenance["step"]), load_file(root / name / STATE), provenance)
        except (OSError, ValueError, KeyError, SafetensorError):
            continue
    return None


def _sweep(root: Path) -> None:
    """Remove what killed runs left half-written or half-deleted."""
    for path in root.iterdir():
        if path.name.startswith(".step-"):
            shutil.rmtree(path, ignore_errors=True)
