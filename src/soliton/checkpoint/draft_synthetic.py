"""Synthetic drafts in the true shapes of published ones, made when asked for, for measuring without a download.

``synthetic:NAME?layers=N&rank=R&markov=KIND&block=B&seed=S&vocab=V&target_layers=T`` with NAME ling-3.0-flash-dspark
or ling-3.0-tiny-dspark. All keys are optional.

- ``layers``, ``rank``, ``block``: draft layers, rank of the Markov head, rows of a block.
- ``markov``: none, vanilla, gated or rnn.
- ``vocab``, ``target_layers``: of a target cut to the same numbers. The mask id moves to the vocabulary's end, the taps
  are spread over the target's layers.
- ``seed``: another set of weights. A tensor depends on (seed, its name) alone.

What such a draft proposes means nothing; its activations stay in the range of a trained one.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl

import torch
from torch import Tensor

from soliton.checkpoint.draft_config import draft_from_config
from soliton.checkpoint.synthetic import PREFIX
from soliton.errors import ConfigError, nearest
from soliton.model.draft_spec import DraftSpec, shapes

_LING: dict[str, Any] = {
    "architectures": ["LingDSparkModel"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "vocab_size": 157184,
    "num_hidden_layers": 5,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 6_000_000.0,
    "block_size": 8,
    "mask_token_id": 156892,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "tie_word_embeddings": False,
}
# Published sizes of each draft; the other keys are common to both.
PUBLISHED: dict[str, dict[str, Any]] = {
    "ling-3.0-flash-dspark": {
        **_LING,
        "hidden_size": 2560,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 262144,
        "num_target_layers": 42,
        "target_layer_ids": [1, 11, 23, 29, 35],
    },
    "ling-3.0-tiny-dspark": {
        **_LING,
        "hidden_size": 1536,
        "intermediate_size": 4608,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "max_position_embeddings": 131072,
        "num_target_layers": 24,
        "target_layer_ids": [1, 6, 13, 17, 20],
    },
}
_KEYS = {"layers": "num_hidden_layers", "rank": "markov_rank", "block": "block_size"}
_OPTIONS = (*_KEYS, "markov", "seed", "vocab", "target_layers")
_MARKOV = ("none", "vanilla", "gated", "rnn")


class SyntheticDraftSource:
    """The tensors of a draft by native names, embedding and head included, bfloat16. A TensorSource."""

    def __init__(self, spec: DraftSpec, *, seed: int) -> None:
        self.spec, self.seed = spec, seed
        matrix = (spec.vocab, spec.hidden)
        self._shapes = shapes(spec) | {"embed_tokens.weight": matrix, "lm_head.weight": matrix}
        # As in a synthetic target: through all layers the residual stream's variance grows from 1 to 4.
        self._branch = math.sqrt(3 / (2 * spec.layers))

    def names(self) -> Iterator[str]:
        return iter(self._shapes)

    def info(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        return self._shapes[name], torch.bfloat16

    def get(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        shape = self._shapes[name]
        digest = hashlib.sha256(f"{self.seed}|{name}".encode()).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        normal = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        if name.endswith("norm.weight"):
            return normal.mul_(0.05).add_(1.0)
        return normal.mul_(self._deviation(name, shape))

    def _deviation(self, name: str, shape: tuple[int, ...]) -> float:
        """Standard deviation of a weight: inputs have unit variance, so 1/sqrt(inputs) keeps it."""
        fan = 1 / math.sqrt(shape[-1])
        if name in ("embed_tokens.weight", "markov_head.markov_w1.weight"):
            return 1.0
        if name == "lm_head.weight":
            return 3 * fan  # logits of a trained model spread by about 3
        if name.endswith(".bias"):
            return 0.1
        if name.endswith("o_proj.weight"):
            return self._branch * fan
        if name.endswith("down_proj.weight"):
            return self._branch * fan / 0.596  # std of silu(a) * b for unit normal a, b
        return fan


def _options(text: str, query: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in parse_qsl(query, keep_blank_values=True):
        if key not in _OPTIONS:
            raise ConfigError(f"{text}: unknown key '{key}'{nearest(key, _OPTIONS)}; known are {', '.join(_OPTIONS)}")
        if key in values:
            raise ConfigError(f"{text}: '{key}' is given twice; keep one")
        if key == "markov":
            if value not in _MARKOV:
                raise ConfigError(f"{text}: 'markov' is '{value}', but it is one of {', '.join(_MARKOV)}")
            values[key] = value
            continue
        try:
            values[key] = int(value)
        except ValueError:
            raise ConfigError(f"{text}: '{key}' is '{value}', but a whole number is needed") from None
    return values


def open_synthetic_draft(text: str) -> tuple[dict[str, Any], DraftSpec, SyntheticDraftSource]:
    """(config, spec, tensors) of the draft that ``text`` describes; ConfigError for what cannot be had."""
    name, _, query = text.removeprefix(PREFIX).partition("?")
    if name not in PUBLISHED:
        raise ConfigError(f"{text}: no synthetic draft '{name}'{nearest(name, PUBLISHED)}; there are "
                          f"{', '.join(PUBLISHED)}")  # fmt: skip
    options = _options(text, query)
    config = copy.deepcopy(PUBLISHED[name])
    if options.get("markov") == "none":
        if options.get("rank"):
            raise ConfigError(f"{text}: 'rank' is {options['rank']}, but 'markov' is none; leave one of them out")
        options["rank"] = 0
    elif "markov" in options:
        config["markov_head_type"] = options["markov"]
    for key, written in _KEYS.items():
        if key in options:
            config[written] = options[key]
    config["confidence_head_with_markov"] = config["markov_rank"] > 0
    if "vocab" in options:
        _cut_vocab(config, options["vocab"], text)
    if "target_layers" in options:
        _cut_target(config, options["target_layers"], text)
    spec, _ = draft_from_config(config, where=text, name=text)
    return config, spec, SyntheticDraftSource(spec, seed=options.get("seed", 0))


def _cut_vocab(config: dict[str, Any], count: int, text: str) -> None:
    if count < 8:
        raise ConfigError(f"{text}: 'vocab' is {count}, but at least 8 are needed")
    config["vocab_size"] = count
    if config["mask_token_id"] >= count - 3:
        config["mask_token_id"] = count - 2  # where a synthetic target has its padding id


def _cut_target(config: dict[str, Any], count: int, text: str) -> None:
    """Taps of a target of ``count`` layers: the published ones, or as many from the first to the last but one."""
    taps = len(config["target_layer_ids"])
    if count < taps + 1:
        raise ConfigError(f"{text}: 'target_layers' is {count}, but {taps} taps need at least {taps + 1}")
    if count != config["num_target_layers"]:
        config["num_target_layers"] = count
        config["target_layer_ids"] = [i * (count - 2) // (taps - 1) for i in range(taps)]
