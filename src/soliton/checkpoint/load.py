"""open_checkpoint: from what a user typed to a Checkpoint whose every tensor is known to be there.

Names, shapes and dtypes are checked from file headers before any tensor is read.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from soliton.checkpoint.config_json import spec_from_config
from soliton.checkpoint.names import HEAD, Entry, ignorable, tensor_table
from soliton.checkpoint.shards import SafetensorsSource, TensorSource, read_json, read_text
from soliton.checkpoint.synthetic import PREFIX, open_synthetic
from soliton.checkpoint.tokenizer import Tokenizer
from soliton.errors import CheckpointError, ConfigError, UnsupportedError
from soliton.model.spec import ModelSpec

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]


@dataclass(frozen=True)
class Checkpoint:
    """A model's files, checked. Tensors are read when asked for, by canonical role (see names.tensor_table).

    ``path`` None: synthetic. ``generation``: generation_config.json as it is, unknown keys included.
    ``eos_ids``: ids that end a turn, from generation_config.json if it lists any, else from config.json.
    ``special_tokens``: texts such as bos_token for the chat template.
    """

    spec: ModelSpec
    name: str
    path: Path | None
    config: dict[str, Any]
    tokenizer: Tokenizer | None
    chat_template: str | None
    generation: dict[str, Any]
    eos_ids: tuple[int, ...]
    special_tokens: dict[str, str]
    source: TensorSource = field(repr=False)
    table: dict[str, Entry] = field(repr=False)
    files: dict[str, str] = field(repr=False)  # role -> name in the source

    def roles(self) -> tuple[str, ...]:
        """All roles that the checkpoint holds, in the order of the layers."""
        return tuple(self.files)

    def has(self, role: str) -> bool:
        """Whether ``role`` is part of this model."""
        return role in self.files

    def _file(self, role: str) -> str:
        try:
            return self.files[role]
        except KeyError:
            raise KeyError(f"{self.name} has no tensor for the role '{role}'") from None

    def tensor(self, role: str, device: str | torch.device = "cpu") -> Tensor:
        """The tensor of ``role`` in its canonical shape and the file's dtype, on ``device``.

        CheckpointError when it holds NaN or infinity: one such weight makes every answer nonsense.
        """
        stored = self.source.get(self._file(role), device)
        if not bool(torch.isfinite(stored.sum(dtype=torch.float32))):
            raise CheckpointError(
                f"{self.path or self.name}: tensor '{self._file(role)}' holds NaN or infinity; download the file again"
            )
        return stored.reshape(self.table[role].shape)

    def weight_bytes(self) -> int:
        """Bytes of all tensors of the spec (the MTP layer's included) in the files' dtypes."""
        return sum(self.table[r].numel * self.source.info(n)[1].itemsize for r, n in self.files.items())


def open_checkpoint(model: str | Path) -> Checkpoint:
    """The checkpoint that ``model`` names, its headers checked; no tensor is read yet.

    ``model``: a directory; ``synthetic:NAME?key=value``; ``pebble`` (the bundled model); or a hub id ``org/name``.
    An existing local path wins over the other readings. ConfigError when nothing has that name, CheckpointError for
    files at fault, UnsupportedError for a model or format that this version does not decode.
    """
    text = str(model)
    path = Path(model).expanduser()
    try:
        there = path.exists()
    except (OSError, ValueError):  # too long for a path, or a zero byte in it
        there = False
    if there:
        return _open_directory(path, path.resolve().name)
    if text.startswith(PREFIX):
        return _open_synthetic(text)
    if text == "pebble":
        return _open_directory(_pebble_path(), "pebble")
    if isinstance(model, str) and _HUB_ID.fullmatch(text):
        return _open_directory(_from_hub(text), text)
    raise ConfigError(
        f"no model '{text}': it is no directory here (looked at {path.absolute()}), not 'pebble', does not start with "
        f"'{PREFIX}', and is no hub id of the form org/name; give the directory that holds config.json"
    )


def _pebble_path() -> Path:
    try:
        # By name, because the bundled weights are a room of their own and optional in a source tree.
        return Path(importlib.import_module("soliton.pebble").path())
    except (ImportError, AttributeError, FileNotFoundError) as error:
        raise CheckpointError(f"the bundled model 'pebble' is not in this installation ({error}); reinstall") from error


def _from_hub(repo: str) -> Path:
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError:
        raise ConfigError(
            f"no directory '{repo}' here; to fetch it as a hub id install the extra: pip install 'soliton[hub]', "
            "or download the checkpoint and give its directory"
        ) from None
    try:
        return Path(hub.snapshot_download(repo, allow_patterns=_HUB_FILES))
    except Exception as error:  # the hub client raises many kinds; all mean that there are no files
        detail = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"no directory '{repo}' here, and fetching it as a hub id failed ({type(error).__name__}: {detail[0]}); "
            "check the name and the connection, or give a local directory"
        ) from error


def _open_synthetic(text: str) -> Checkpoint:
    made = open_synthetic(text)
    table = tensor_table(made.spec)
    files = _match(made.spec, table, made.source, text)
    return Checkpoint(
        spec=made.spec,
        name=text,
        path=None,
        config=made.config,
        tokenizer=None,
        chat_template=None,
        generation={},
        eos_ids=made.spec.eos_ids,
        special_tokens={},
        source=made.source,
        table=table,
        files=files,
    )


def _open_directory(path: Path, name: str) -> Checkpoint:
    if not path.is_dir():
        raise CheckpointError(f"{path}: a checkpoint is a directory with config.json, this is a file; give its folder")
    file = path / "config.json"
    if not file.exists():
        raise CheckpointError(f"{path}: no config.json; give the directory of a Hugging Face checkpoint")
    config = read_json(file)
    spec = spec_from_config(config, where=str(file), name=name)
    source = SafetensorsSource(path)
    table = tensor_table(spec)
    files = _match(spec, table, source, str(path))
    generation = _object(path / "generation_config.json")
    settings = _object(path / "tokenizer_config.json")
    tokens = path / "tokenizer.json"
    return Checkpoint(
        spec=spec,
        name=name,
        path=path,
        config=config,
        tokenizer=Tokenizer(tokens) if tokens.exists() else None,
        chat_template=_chat_template(path, settings),
        generation=generation,
        eos_ids=_eos_ids(generation, spec, path),
        special_tokens=_special_tokens(settings),
        source=source,
        table=table,
        files=files,
    )


def _object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    data = read_json(path)
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: a JSON object is needed, not {type(data).__name__}; download it again")
    return data


def _first(items: list[str], count: int = 4) -> str:
    return ", ".join(items[:count]) + (f" ... ({len(items)} in all)" if len(items) > count else "")


def _match(spec: ModelSpec, table: dict[str, Entry], source: TensorSource, where: str) -> dict[str, str]:
    """role -> name in ``source``; CheckpointError unless the source holds exactly the table's tensors."""
    there = set(source.names())
    files: dict[str, str] = {}
    missing: list[str] = []
    for role, entry in table.items():
        found = [n for n in entry.names if n in there]
        if len(found) > 1:
            raise CheckpointError(f"{where}: '{found[0]}' and '{found[1]}' are the same tensor; remove one")
        if found:
            files[role] = found[0]
        elif entry.required:
            missing.append(entry.names[0])
    known = set(files.values())
    extra = sorted(n for n in there if n not in known and not ignorable(n, spec))
    if missing or extra:
        # A quantised export without its quantization_config looks like this; say so instead of listing thousands.
        packed = [n for n in extra if n.endswith((".weight_scale_inv", ".weight_packed", ".weight_scale"))]
        if packed:
            raise UnsupportedError(
                f"{where}: '{packed[0]}' belongs to quantised weights; quantised formats are not supported yet by this "
                "version; use the bf16 checkpoint"
            )
        parts = [f"{len(missing)} tensors are missing: {_first(missing)}"] if missing else []
        parts += [f"{len(extra)} tensors are unknown: {_first(extra)}"] if extra else []
        raise CheckpointError(
            f"{where}: the files do not fit config.json: {'; '.join(parts)}; "
            "take config.json and all weight files from the same checkpoint"
        )
    for role, name in files.items():
        shape, dtype = source.info(name)
        if shape not in table[role].file_shapes:
            want = " or ".join(str(list(s)) for s in table[role].file_shapes)
            raise CheckpointError(
                f"{where}: tensor '{name}' has the shape {list(shape)}, but config.json gives {want}; "
                "take both from the same checkpoint"
            )
        if dtype not in DTYPES:
            raise UnsupportedError(
                f"{where}: tensor '{name}' is stored as {str(dtype).removeprefix('torch.')}; supported are bfloat16, "
                "float16 and float32: use the bf16 checkpoint"
            )
    _check_tied(spec, files["embed"], source, where)
    return files


def _check_tied(spec: ModelSpec, embed: str, source: TensorSource, where: str) -> None:
    """A tied config beside files with a head of their own: fine where it repeats the embedding, else they disagree."""
    if not spec.tied or HEAD not in source.names():
        return
    if source.info(HEAD) != source.info(embed) or not torch.equal(source.get(HEAD), source.get(embed)):
        raise CheckpointError(
            f"{where}: config.json says tie_word_embeddings, but '{HEAD}' differs from '{embed}'; set "
            "tie_word_embeddings to false to use the head, or remove it from the files"
        )


def _eos_ids(generation: dict[str, Any], spec: ModelSpec, path: Path) -> tuple[int, ...]:
    value = generation.get("eos_token_id")
    if value is None:
        return spec.eos_ids
    listed = value if isinstance(value, list) else [value]
    for token in listed:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < spec.vocab:
            raise ConfigError(
                f"{path / 'generation_config.json'}: 'eos_token_id' is {value!r}, but token ids run from 0 to "
                f"vocab_size - 1 = {spec.vocab - 1}"
            )
    return tuple(dict.fromkeys(listed))


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    found = {}
    for key, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            found[key] = text
    return found


def _chat_template(path: Path, settings: dict[str, Any]) -> str | None:
    """chat_template.jinja, else tokenizer_config.json's string or its list of named templates ("default")."""
    file = path / "chat_template.jinja"
    if file.exists():
        return read_text(file)
    value = settings.get("chat_template")
    if value is None or isinstance(value, str):
        return value
    where = f"{path / 'tokenizer_config.json'}: 'chat_template'"
    try:
        named = {str(v["name"]): str(v["template"]) for v in value}
    except (TypeError, KeyError):
        raise CheckpointError(f"{where} is neither a text nor a list of names and templates") from None
    if "default" in named:
        return named["default"]
    if len(named) == 1:
        return next(iter(named.values()))
    raise CheckpointError(f"{where} has no template named 'default' among {sorted(named)}; name one 'default'")
