"""open_draft: a block drafter's files, checked, and the checks that it fits its target.

Names, shapes and dtypes are checked from file headers before any weight is read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from soliton.checkpoint.draft_config import Layout, draft_from_config
from soliton.checkpoint.draft_synthetic import open_synthetic_draft
from soliton.checkpoint.load import DTYPES, Checkpoint
from soliton.checkpoint.shards import SafetensorsSource, TensorSource, read_json
from soliton.checkpoint.synthetic import PREFIX
from soliton.errors import CheckpointError, ConfigError, UnsupportedError
from soliton.model.draft_spec import DraftSpec, shapes
from soliton.model.spec import ModelSpec

EMBED, HEAD, BIAS = "embed_tokens.weight", "lm_head.weight", "confidence_head.proj.bias"
MOST_DRAFTS = 16  # a step
_PREFIXES = ("draft_model.", "model.")
_MAPS = ("d2t", "t2d")  # draft to target and back, where the draft has a vocabulary of its own
_QUANTISED = (".weight_scale_inv", ".weight_packed", ".weight_scale", ".qweight")
_ROWS = 16  # of a shared tensor, compared with the target's


@dataclass(frozen=True, eq=False)
class DraftCheckpoint:
    """A draft's files, checked. Tensors are read when asked for, by native names (the keys of draft_spec.shapes).

    ``path`` None: synthetic. ``d2t``: the target's ids of the draft vocabulary's tokens, int64, None where the draft
    has the target's vocabulary.
    """

    spec: DraftSpec
    name: str
    path: Path | None
    config: dict[str, Any]
    layout: Layout
    d2t: Tensor | None = field(repr=False)
    source: TensorSource = field(repr=False)
    files: dict[str, str] = field(repr=False)  # native name -> name in the source

    def has(self, name: str) -> bool:
        """Whether ``tensor(name)`` has an answer: all of the spec, and embedding and head where they are stored."""
        return name in self.files or (name == BIAS and self.spec.confidence)

    def tensor(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        """The tensor ``name`` in the file's dtype, on ``device``; zeros for a confidence bias that is not stored.

        CheckpointError when it holds NaN or infinity.
        """
        if not self.has(name):
            raise KeyError(f"{self.name} has no tensor '{name}'")
        if name not in self.files:
            dtype = self.source.info(self.files["confidence_head.proj.weight"])[1]
            return torch.zeros(1, dtype=dtype, device=device)
        stored = self.source.get(self.files[name], device)
        if not bool(torch.isfinite(stored.sum(dtype=torch.float32))):
            raise CheckpointError(
                f"{self.path or self.name}: tensor '{self.files[name]}' holds NaN or infinity; download the file again"
            )
        return stored

    def parameters(self) -> int:
        """Elements stored, embedding and head included where they are."""
        return sum(math.prod(self.source.info(n)[0]) for n in self.files.values())

    def weight_bytes(self) -> int:
        """Bytes of the draft's own tensors in the files' dtypes; embedding and head are the target's."""
        own = [self.source.info(self.files[n]) for n in shapes(self.spec) if n in self.files]
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in own)


def open_draft(path: str | Path) -> DraftCheckpoint:
    """The draft that ``path`` names, a directory or ``synthetic:NAME?key=value``; no weight is read yet.

    ConfigError when nothing has that name or the config is at fault, CheckpointError for files at fault,
    UnsupportedError for a draft or format that this version does not run.
    """
    text, place = str(path), Path(path).expanduser()
    try:
        there = place.exists()
    except (OSError, ValueError):  # too long for a path, or a zero byte in it
        there = False
    if there:
        return _open_directory(place)
    if text.startswith(PREFIX):
        config, spec, made = open_synthetic_draft(text)
        return DraftCheckpoint(spec, text, None, config, "synthetic", None, made, {n: n for n in made.names()})
    raise ConfigError(
        f"no draft '{text}': it is no directory here (looked at {place.absolute()}) and does not start with "
        f"'{PREFIX}'; give the directory that holds the draft's config.json"
    )


def bundled_draft(model: str) -> Path | None:
    """Directory of the draft that comes with a bundled model; None where there is none."""
    path = Path(__file__).resolve().parents[1] / "pebble" / "dspark"
    return path if model == "pebble" and path.is_dir() else None


def _open_directory(path: Path) -> DraftCheckpoint:
    if not path.is_dir():
        raise CheckpointError(f"{path}: a draft is a directory with config.json, this is a file; give its folder")
    file = path / "config.json"
    if not file.exists():
        raise CheckpointError(f"{path}: no config.json; give the directory of a draft's checkpoint")
    config, name = read_json(file), path.resolve().name
    spec, layout = draft_from_config(config, where=str(file), name=name)
    source = SafetensorsSource(path)
    found = _found(source, str(path))
    maps = {n: found.pop(n) for n in _MAPS if n in found}
    _match(spec, found, source, str(path))
    d2t = _target_ids(spec, maps, source, str(path))
    return DraftCheckpoint(spec, name, path, config, layout, d2t, source, found)


def _found(source: TensorSource, where: str) -> dict[str, str]:
    """Native name -> name in the source, of all tensors but the rotation's, which are computed."""
    found: dict[str, str] = {}
    for name in source.names():
        native = name
        while prefix := next((p for p in _PREFIXES if native.startswith(p)), None):
            native = native.removeprefix(prefix)
        if native.endswith("rotary_emb.inv_freq"):
            continue
        if native in found:
            raise CheckpointError(f"{where}: '{found[native]}' and '{name}' are the same tensor; remove one")
        found[native] = name
    return found


def _first(items: list[str], count: int = 4) -> str:
    return ", ".join(items[:count]) + (f" ... ({len(items)} in all)" if len(items) > count else "")


def _match(spec: DraftSpec, found: dict[str, str], source: TensorSource, where: str) -> None:
    """CheckpointError unless ``found`` holds exactly the spec's tensors and perhaps what is the target's."""
    shared = {EMBED: (spec.vocab, spec.hidden), HEAD: (spec.vocab, spec.hidden)}
    want = shared | shapes(spec)
    missing = [n for n in shapes(spec) if n not in found and n != BIAS]
    extra = sorted(found[n] for n in found if n not in want)
    packed = [n for n in extra if n.endswith(_QUANTISED)]
    if packed:
        raise UnsupportedError(
            f"{where}: '{packed[0]}' belongs to quantised weights; quantised drafts are not supported, use the bf16 one"
        )
    if missing or extra:
        parts = [f"{len(missing)} tensors are missing: {_first(missing)}"] if missing else []
        parts += [f"{len(extra)} tensors are unknown: {_first(extra)}"] if extra else []
        raise CheckpointError(
            f"{where}: the files do not fit config.json: {'; '.join(parts)}; "
            "take config.json and all weight files from the same draft"
        )
    for native, name in found.items():
        shape, dtype = source.info(name)
        if shape != want[native]:
            raise CheckpointError(
                f"{where}: tensor '{name}' has the shape {list(shape)}, but config.json gives {list(want[native])}; "
                "take both from the same draft"
            )
        if dtype not in DTYPES:
            raise UnsupportedError(
                f"{where}: tensor '{name}' is stored as {str(dtype).removeprefix('torch.')}; supported are bfloat16, "
                "float16 and float32: quantised drafts are not supported, use the bf16 one"
            )


def _target_ids(spec: DraftSpec, maps: dict[str, str], source: TensorSource, where: str) -> Tensor | None:
    """The target's id of every token of the draft's vocabulary; None where that is the target's.

    d2t holds offsets, id = token + d2t[token]. Where t2d (true at the ids that have a token) says that it holds ids
    instead, it is read so.
    """
    known = spec.draft_vocab or spec.vocab
    if "d2t" not in maps:
        if spec.draft_vocab is None:
            return None
        raise CheckpointError(
            f"{where}: draft_vocab_size is {known} of {spec.vocab}, but the tensor 'd2t', which says what its tokens "
            "are, is missing; take config.json and all weight files from the same draft"
        )
    stored, tokens = _whole(maps["d2t"], known, source, where), torch.arange(known)
    ids = tokens + stored
    if "t2d" in maps:
        mask = _whole(maps["t2d"], spec.vocab, source, where).bool()
        listed = mask.nonzero().flatten()
        if not torch.equal(ids.sort().values, listed):
            if not torch.equal(stored.sort().values, listed):
                raise CheckpointError(
                    f"{where}: 'd2t' and 't2d' disagree on which of the {spec.vocab} tokens the draft knows; "
                    "download the file again"
                )
            ids = stored
    if spec.draft_vocab is None:
        if torch.equal(ids, tokens):
            return None
        raise CheckpointError(
            f"{where}: 'd2t' renames tokens, but config.json gives the draft the target's {spec.vocab} tokens; take "
            "both from the same draft"
        )
    different = set(ids.tolist())
    if min(different) < 0 or max(different) >= spec.vocab or len(different) != known:
        raise CheckpointError(
            f"{where}: 'd2t' leads {known} tokens to {len(different)} different ids, {min(different)} to "
            f"{max(different)}; one each from 0 to {spec.vocab - 1} is needed: download the file again"
        )
    return ids


def _whole(name: str, count: int, source: TensorSource, where: str) -> Tensor:
    shape, dtype = source.info(name)
    if shape != (count,) or dtype.is_floating_point:
        raise CheckpointError(
            f"{where}: tensor '{name}' is {list(shape)} {str(dtype).removeprefix('torch.')}, but config.json gives "
            f"[{count}] whole numbers; take both from the same draft"
        )
    return source.get(name).long()


def check_fit(draft: DraftSpec, target: ModelSpec) -> None:
    """ConfigError unless ``draft`` can draft for ``target``; names both numbers."""
    who, layers = f"the draft '{draft.name}'", len(target.layers)
    for what, ours, theirs in (
        ("vocabulary", draft.vocab, target.vocab),
        ("hidden size", draft.hidden, target.hidden),
        ("number of target layers", draft.target_layers or layers, layers),
    ):
        if ours != theirs:
            raise ConfigError(
                f"{who} was made for another target: its {what} is {ours}, that of '{target.name}' is {theirs}"
            )
    taps, last = list(draft.taps), layers - 1
    if not taps or taps != sorted(set(taps)):
        raise ConfigError(f"{who} taps the layers {taps}, but they have to ascend without repeats")
    if taps[0] < 0:
        raise ConfigError(
            f"{who} taps layer {taps[0]} (-1 is the embedding); only layers 0 to {last - 1} can be tapped"
        )
    if taps[-1] >= last:
        raise ConfigError(
            f"{who} taps layer {taps[-1]}, but of the {layers} layers of '{target.name}' only 0 to {last - 1} can be "
            "tapped (the last one's output is the head's)"
        )
    if not 0 <= draft.mask_id < target.vocab:
        raise ConfigError(f"{who} has the mask id {draft.mask_id}, but token ids run from 0 to {target.vocab - 1}")
    if not 1 <= draft.drafts <= MOST_DRAFTS:
        raise ConfigError(
            f"{who} makes {draft.drafts} drafts a step with its block of {draft.block}; 1 to {MOST_DRAFTS} are possible"
        )


def check_shared(draft: DraftCheckpoint, target: Checkpoint) -> None:
    """CheckpointError where an embedding or head stored with the draft is not the target's.

    Some rows are compared: bit by bit, or within the coarser dtype's rounding where the dtypes differ. Synthetic
    weights are not compared, they belong to no one.
    """
    if draft.path is None or target.path is None:
        return
    for name, role in ((EMBED, "embed"), (HEAD, "head" if target.has("head") else "embed")):
        if name not in draft.files or (name == HEAD and draft.spec.draft_vocab is not None):
            continue
        ours, theirs = draft.source.get(draft.files[name]), target.source.get(target.files[role])
        if ours.shape != theirs.shape:
            raise CheckpointError(
                f"{draft.path}: '{draft.files[name]}' has the shape {list(ours.shape)}, '{target.files[role]}' of "
                f"{target.path} {list(theirs.shape)}; the draft was made for another target"
            )
        rows = torch.tensor(sorted({i * (len(ours) - 1) // (_ROWS - 1) for i in range(_ROWS)}))
        ours, theirs, same = ours[rows].float(), theirs[rows].float(), ours.dtype == theirs.dtype
        tolerance = 0.0 if same else 2.0**-7
        equal = torch.isclose(ours, theirs, rtol=tolerance, atol=tolerance * 1e-3).all(1)
        if not bool(equal.all()):
            row = int(rows[~equal][0])
            raise CheckpointError(
                f"{draft.path}: row {row} of '{draft.files[name]}' differs from that of '{target.files[role]}' of "
                f"{target.path}; the draft was made for another target, give it that one"
            )
