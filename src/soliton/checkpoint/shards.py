"""Safetensors files as one source of tensors: headers are checked whole, data is read one tensor at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from soliton.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# The names of the safetensors format; those without a torch dtype still have a size, needed for the checks.
_TORCH = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
}
LONGEST_NAME = 255  # bytes of a file's name
_MAX_HEADER = 100_000_000  # bytes; the format's own limit


class TensorSource(Protocol):
    """Named tensors whose shapes and dtypes are known before any is read."""

    def names(self) -> Iterator[str]: ...

    def info(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """(shape, dtype) as stored; KeyError for a name that is not there."""
        ...

    def get(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        """The tensor as stored, on ``device``."""
        ...


def read_text(path: Path) -> str:
    """The text of ``path``; CheckpointError when it cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 text at byte {error.start}; download the file again") from error


def read_json(path: Path) -> Any:
    """Parsed JSON of ``path``; CheckpointError naming file, line and column when it cannot be read."""
    text = read_text(path)
    try:
        return json.loads(text)
    except RecursionError as error:
        raise CheckpointError(f"{path}: nested too deeply to be a checkpoint's file; download it again") from error
    except json.JSONDecodeError as error:
        raise CheckpointError(
            f"{path}: not valid JSON at line {error.lineno} column {error.colno} ({error.msg}); download it again"
        ) from error
    except ValueError as error:  # such as a number of thousands of digits
        raise CheckpointError(f"{path}: not readable as JSON ({error}); download it again") from error


def read_header(path: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """name -> (shape, dtype) of one safetensors file, checked against the file's length.

    CheckpointError for a header that is no header, and for a file shorter or longer than its header says.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(8)
            length = int.from_bytes(head, "little")
            if len(head) < 8 or length > min(_MAX_HEADER, 1 << 40) or length < 2:
                raise CheckpointError(
                    f"{path}: not a safetensors file (its {size} bytes start with {head!r}); download it again"
                )
            if 8 + length > size:
                raise CheckpointError(
                    f"{path}: truncated: {size} bytes, but the header alone needs {8 + length}; download it again"
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
    try:
        header = json.loads(raw)
        entries = {k: v for k, v in header.items() if k != "__metadata__"}
        parsed = {k: _entry(path, k, v) for k, v in entries.items()}
    except (ValueError, AttributeError, TypeError, KeyError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: the safetensors header is not readable ({error}); download it again") from error
    meta = header.get("__metadata__", {})
    if not isinstance(meta, dict) or not all(isinstance(v, str) for v in meta.values()):
        raise CheckpointError(
            f"{path}: '__metadata__' of the safetensors header is no object of texts; download it again"
        )
    end = 8 + length
    for name, (_, _, first, last) in sorted(parsed.items(), key=lambda item: item[1][2:]):
        if 8 + length + first != end:
            raise CheckpointError(
                f"{path}: tensor '{name}' begins at byte {8 + length + first}, but the one before ends at {end}; "
                "download the file again"
            )
        end = 8 + length + last
    if size < end:
        raise CheckpointError(
            f"{path}: truncated: {size} bytes, but its header describes {end}; download the file again"
        )
    if size > end:
        raise CheckpointError(f"{path}: {size} bytes, but its header describes {end}; download the file again")
    return {name: (shape, dtype) for name, (shape, dtype, _, _) in parsed.items()}


def _entry(path: Path, name: str, value: dict[str, Any]) -> tuple[tuple[int, ...], torch.dtype, int, int]:
    dtype = _TORCH.get(value["dtype"])
    if dtype is None:
        raise CheckpointError(f"{path}: tensor '{name}' has the dtype {value['dtype']}, which this version cannot read")
    counts = [*value["shape"], *value["data_offsets"]]
    if any(type(n) is not int or n < 0 for n in counts) or len(value["data_offsets"]) != 2:
        raise CheckpointError(f"{path}: tensor '{name}' has a shape or offsets that are no counts; download it again")
    shape = tuple(value["shape"])
    first, last = value["data_offsets"]
    if last - first != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(
            f"{path}: tensor '{name}' {list(shape)} {value['dtype']} needs {math.prod(shape) * dtype.itemsize} bytes, "
            f"its header gives {last - first}; download the file again"
        )
    return shape, dtype, first, last


class SafetensorsSource:
    """The weights of a checkpoint directory: one file, or shards listed by model.safetensors.index.json.

    All headers are read and checked in the constructor; CheckpointError names the file at fault.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._info: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._file: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        index = path / INDEX
        if index.exists():
            self._read_index(index)
        else:
            self._read_file(self._only_file())

    def _only_file(self) -> Path:
        single = self.path / SINGLE
        if single.exists():
            return single
        found = sorted(p.name for p in self.path.glob("*.safetensors"))
        if len(found) == 1:
            return self.path / found[0]
        if found:
            raise CheckpointError(
                f"{self.path}: {len(found)} safetensors files ({found[0]} ...) but no {INDEX}; add the index file"
            )
        old = sorted(p.name for pattern in ("*.bin", "*.pth", "*.pt") for p in self.path.glob(pattern))
        if old:
            raise CheckpointError(
                f"{self.path}: only pickled weights ({old[0]}), which are not read because they can run code; "
                "convert them to safetensors"
            )
        raise CheckpointError(f"{self.path}: no weights ({SINGLE} or {INDEX}); finish the download")

    def _read_index(self, index: Path) -> None:
        data = read_json(index)
        mapping = data.get("weight_map") if isinstance(data, dict) else None
        if not isinstance(mapping, dict) or not mapping:
            raise CheckpointError(f"{index}: no 'weight_map' object; download the file again")
        for name, shard in mapping.items():
            if not isinstance(shard, str) or Path(shard).name != shard or len(shard.encode()) > LONGEST_NAME:
                raise CheckpointError(f"{index}: '{name}' points to {shard!r}; a plain file name is needed")
        shards = sorted(set(mapping.values()))
        missing = [s for s in shards if not (self.path / s).exists()]
        if missing:
            raise CheckpointError(
                f"{self.path}: {len(missing)} of {len(shards)} shards named by {INDEX} are missing: "
                f"{', '.join(missing[:4])}{' ...' if len(missing) > 4 else ''}; finish the download"
            )
        for shard in shards:
            self._read_file(self.path / shard)
        for name, shard in mapping.items():
            there = self._file.get(name)
            if there is None or there.name != shard:
                where = f"it is in {there.name}" if there is not None else "no shard has it"
                raise CheckpointError(
                    f"{index}: says that {shard} holds '{name}', but it does not ({where}); download both again"
                )
        unlisted = [n for n in self._file if n not in mapping]
        if unlisted:
            raise CheckpointError(
                f"{index}: {len(unlisted)} tensors of the shards are not listed, first '{unlisted[0]}' in "
                f"{self._file[unlisted[0]].name}; download the index again"
            )

    def _read_file(self, file: Path) -> None:
        for name, info in read_header(file).items():
            if name in self._file:
                raise CheckpointError(
                    f"{self.path}: tensor '{name}' is in {self._file[name].name} and in {file.name}; remove one"
                )
            self._file[name], self._info[name] = file, info

    def names(self) -> Iterator[str]:
        return iter(self._info)

    def info(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        return self._info[name]

    def get(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        file = self._file[name]
        if file not in self._open:
            # Mapped, not read: pages come in with the tensor that needs them.
            try:
                self._open[file] = safe_open(str(file), framework="pt", device="cpu")
            except Exception as error:  # the library has its own kinds; all mean the same
                raise CheckpointError(f"{file}: cannot be opened ({error}); download it again") from error
        tensor: Tensor = self._open[file].get_tensor(name)
        return tensor.to(device)
