"""A trained draft in the native layout: config.json and model.safetensors, bfloat16, named as in DeepSpec and SGLang.

Embedding and head are the target's and are left out unless asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..model.draft_spec import DraftSpec, shapes
from ..model.spec import ModelSpec
from .checkpoints import write_tensors, write_text
from .errors import writing

ARCHITECTURES = {"bailing_hybrid": "LingDSparkModel"}
EMBED, HEAD = "embed_tokens.weight", "lm_head.weight"


def config_of(spec: DraftSpec, target: ModelSpec, *, anchors: int) -> dict[str, Any]:
    """config.json: the method's keys at top level beside Qwen3's. ``anchors``: blocks of a sequence in training."""
    return {
        "architectures": [ARCHITECTURES.get(target.family, "Qwen3DSparkModel")],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": spec.block,
        "bos_token_id": target.bos_id,
        "confidence_head_with_markov": spec.confidence_markov,
        "dtype": "bfloat16",
        "enable_confidence_head": spec.confidence,
        "eos_token_id": target.eos_ids[0] if len(target.eos_ids) == 1 else list(target.eos_ids) or None,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.hidden,
        "initializer_range": 0.02,
        "intermediate_size": spec.width,
        "layer_types": ["full_attention"] * spec.layers,
        "markov_head_type": spec.markov if spec.rank else "vanilla",
        "markov_rank": spec.rank,
        "mask_token_id": spec.mask_id,
        "max_position_embeddings": min(spec.max_position, target.max_position),
        "max_window_layers": spec.layers,
        "model_type": "qwen3",
        "num_anchors": anchors,
        "num_attention_heads": spec.heads,
        "num_hidden_layers": spec.layers,
        "num_key_value_heads": spec.kv_heads,
        "num_target_layers": spec.target_layers,
        "pad_token_id": target.pad_id,
        "rms_norm_eps": spec.eps,
        "rope_scaling": None,
        "rope_theta": spec.theta,
        "sliding_window": None,
        "target_layer_ids": list(spec.taps),
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": spec.vocab,
    }


def export(
    folder: str | Path,
    spec: DraftSpec,
    state: Mapping[str, Tensor],
    target: ModelSpec,
    *,
    anchors: int,
    vocab: tuple[Tensor, Tensor] | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> Path:
    """Write the draft into ``folder``, each file whole or not at all; temperatures of an earlier one are taken away.
    ``state``: tensors by the names of ``draft_spec.shapes``; ``vocab``: embedding and head [V, H] to store, too;
    ``provenance``: how it came to be, for provenance.json. Returns the folder."""
    folder = Path(folder)
    wanted = shapes(spec)
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    if found != wanted:
        odd = sorted(name for name in found | wanted if found.get(name) != wanted.get(name))
        raise CheckpointError(
            f"the draft's tensors do not fit its sizes: {', '.join(odd[:4])}; export what was trained"
        )
    tensors = dict(state)
    if vocab is not None:
        tensors |= {EMBED: vocab[0], HEAD: vocab[1]}
    stored = {name: t.detach().to("cpu", torch.bfloat16).clone().contiguous() for name, t in tensors.items()}
    with writing(folder, "the draft"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "calibration.json").unlink(missing_ok=True)  # of other weights
        write_tensors(folder / "model.safetensors", stored)
        if provenance is not None:
            write_text(folder / "provenance.json", json.dumps(provenance, indent=1) + "\n")
        write_text(folder / "config.json", json.dumps(config_of(spec, target, anchors=anchors), indent=2))
    return folder
