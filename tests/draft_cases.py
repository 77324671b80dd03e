"""Block drafters for tests: random ones, and one for nano that knows its bigrams and is sure by the token before."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import helpers as h
from soliton.checkpoint.draft_config import draft_from_config
from soliton.model.draft_spec import shapes

_TEMPORARY = tempfile.TemporaryDirectory(prefix="soliton-drafts-")
DATA = Path(__file__).parent / "data"


def config_for(target: Path, **changes: Any) -> dict[str, Any]:
    """config.json of a small draft in the native layout for a checkpoint directory."""
    config: dict[str, Any] = json.loads((DATA / "dspark-ling-micro" / "config.json").read_text(encoding="utf-8"))
    of = json.loads((target / "config.json").read_text(encoding="utf-8"))
    layers = of["num_hidden_layers"]
    config.update(
        hidden_size=of["hidden_size"], vocab_size=of["vocab_size"], num_target_layers=layers, mask_token_id=1,
        target_layer_ids=[0] if layers < 3 else [0, 2], eos_token_id=1, pad_token_id=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, intermediate_size=48, markov_rank=of["vocab_size"] if layers < 3 else 16,
    )  # fmt: skip
    return {**config, **changes}


_made: dict[str, Path] = {}


def random_draft(target: Path, seed: int = 0, **changes: Any) -> Path:
    """Weights that know nothing: bad on purpose. One directory for the same arguments."""
    key = json.dumps([str(target), seed, changes], sort_keys=True)
    if key not in _made:
        _made[key] = write(target, config_for(target, **changes), seed, {})
    return _made[key]


def write(target: Path, config: dict[str, Any], seed: int, given: dict[str, torch.Tensor]) -> Path:
    """A draft directory; tensors that are not ``given`` are random."""
    spec, _ = draft_from_config(config, where="config.json")
    g = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes(spec).items():
        value = torch.randn(shape, generator=g) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.1)
        tensors[name] = given.get(name, value + 1 if "norm" in name else value).bfloat16().contiguous()
    path = Path(tempfile.mkdtemp(dir=_TEMPORARY.name))
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


METHOD = (
    "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov", "mask_token_id",
    "target_layer_ids", "num_anchors",
)  # fmt: skip


@functools.cache
def dflash_draft() -> Path:
    """For ling-micro, in DFlash's layout: the first row predicts nothing, and nothing ties rows together."""
    config = config_for(h.micro())
    nested = {key: config[key] for key in ("mask_token_id", "target_layer_ids")}
    plain = {key: value for key, value in config.items() if key not in METHOD}
    return write(h.micro(), {**plain, "architectures": ["DFlashDraftModel"], "dflash_config": nested}, 6, {})


@functools.cache
def few_tokens_draft() -> Path:
    """For ling-micro, in speculators' layout with a head of its own over every fourth token."""
    config = json.loads((DATA / "dspark-ling-micro-speculators" / "config.json").read_text(encoding="utf-8"))
    path = write(h.micro(), {**config, "draft_vocab_size": 80}, 7, {})
    offsets = torch.arange(0, 320, 4) - torch.arange(80)
    save_file({**load_file(path / "model.safetensors"), "d2t": offsets}, path / "model.safetensors")
    return path


@functools.cache
def bigram_draft() -> Path:
    """For nano: the Markov head holds the target's logits after each single token, the confidence head a value of its
    own for each token before a draft, so that what a schedule cuts depends on what was drawn."""
    target = h.nano()
    plain = h.engine(target, max_context=64, speculation="off", prefix_reuse="off")
    vocab = plain.checkpoint.spec.vocab
    table = torch.stack([plain.logits([token])[-1] for token in range(vocab)])
    config = config_for(target)
    head = torch.zeros(1, config["hidden_size"] + vocab)
    head[0, config["hidden_size"] :] = torch.randn(vocab, generator=torch.Generator().manual_seed(5)) * 2
    given = {
        "norm.weight": torch.zeros(config["hidden_size"]),
        "markov_head.markov_w1.weight": torch.eye(vocab),
        "markov_head.markov_w2.weight": table.t().contiguous(),
        "confidence_head.proj.weight": head,
    }
    return write(target, config, 3, given)


def costs(times: list[float], draft: float = 1.0) -> str:
    """A file of costs by rows."""
    path = Path(tempfile.mkdtemp(dir=_TEMPORARY.name)) / "costs.json"
    body = {
        "draft_us": draft,
        "verify_us": times,
        "model": "",
        "draft": "",
        "device": "",
        "commit": None,
        "versions": {},
    }
    path.write_text(json.dumps(body), encoding="utf-8")
    return str(path)


def copied(name: str) -> Path:
    """A conformance draft that a test may spoil."""
    return Path(shutil.copytree(DATA / name, Path(tempfile.mkdtemp(dir=_TEMPORARY.name)) / name))
