"""Synthetic weights in the true shapes of published models, made when asked for, for measuring without a download.

``synthetic:NAME?layers=N&experts=M&overlap=X&seed=S&vocab=V`` with NAME ling-3.0-flash, ling-3.0-tiny or
kimi-linear-48b. All keys are optional.

- ``layers``: the first N layers of the pattern (dense layers first, MLA where the model has it; flash has its first
  MLA layer at 6), with the last N entries of the clamp lists, and the MTP layer.
- ``experts``: M routed experts; the number of groups must divide it.
- ``vocab``: V rows; stop and padding ids move to its end.
- ``seed``: another set of weights. A tensor depends on (seed, its name) alone, not on the order of reading; CPU and
  CUDA draw from different generators, so their values differ.
- ``overlap``: how many experts of a layer all rows share, from 0 (uniform) to top_k; a fraction is a probability.
  A shared expert's router bias outweighs every score, so which weights a verify step re-reads is set, not left to
  chance. Measured with the router of flash (512 experts, 8 groups of which 4 are kept, top-8; independent rows of
  unit variance; 400 layers of 6 rows), mean distinct experts of the 48 (row, expert) pairs (least..most), and mean
  experts that two neighbouring rows share:

  ======= =============== ======
  overlap distinct of 48  shared
  ======= =============== ======
  0       45.8 (40..48)   0.15
  0.5     43.2 (39..48)   0.56
  1       41.3 (38..43)   1.12
  2       36.6 (33..38)   2.09
  3       31.9 (29..33)   3.08   (the default)
  4       26.9 (24..28)   4.08
  6       17.7 (16..18)   6.02
  8       8.0  (8..8)     8.00
  ======= =============== ======

The text such a model writes means nothing. Rows of lm_head for stop and padding ids are zero, so a stream runs
until its token limit. Residual stream, state and logits stay in the range of a trained model at any length.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any
from urllib.parse import parse_qsl

import torch
from torch import Tensor

from soliton.checkpoint.config_json import spec_from_config
from soliton.checkpoint.names import Entry, tensor_table
from soliton.checkpoint.published import PUBLISHED
from soliton.errors import ConfigError, nearest
from soliton.model.spec import KdaSpec, LayerSpec, MlaSpec, ModelSpec, MoeSpec

PREFIX = "synthetic:"
DEFAULT_OVERLAP = 3.0


@dataclass(frozen=True)
class Synthetic:
    """A synthetic model: the config it comes from, its spec and its tensors."""

    config: dict[str, Any]
    spec: ModelSpec
    source: SyntheticSource


@dataclass(frozen=True, kw_only=True)
class _Options:
    layers: int | None = None
    experts: int | None = None
    overlap: float | None = None
    seed: int = 0
    vocab: int | None = None


def _options(text: str, query: str) -> _Options:
    kinds: dict[str, type[int] | type[float]] = {
        "layers": int,
        "experts": int,
        "overlap": float,
        "seed": int,
        "vocab": int,
    }
    values: dict[str, Any] = {}
    for key, value in parse_qsl(query, keep_blank_values=True):
        if key not in kinds:
            raise ConfigError(f"{text}: unknown key '{key}'{nearest(key, kinds)}; known are {', '.join(kinds)}")
        if key in values:
            raise ConfigError(f"{text}: '{key}' is given twice; keep one")
        try:
            values[key] = kinds[key](value)
        except ValueError:
            want = "a whole number" if kinds[key] is int else "a number"
            raise ConfigError(f"{text}: '{key}' is '{value}', but {want} is needed") from None
    return _Options(**values)


def open_synthetic(text: str) -> Synthetic:
    """The model that ``text`` (``synthetic:NAME?key=value&...``) describes; ConfigError for what cannot be had."""
    name, _, query = text.removeprefix(PREFIX).partition("?")
    if name not in PUBLISHED:
        raise ConfigError(f"{text}: no synthetic model '{name}'{nearest(name, PUBLISHED)}; there are "
                          f"{', '.join(PUBLISHED)}")  # fmt: skip
    options = _options(text, query)
    config = copy.deepcopy(PUBLISHED[name])
    if options.layers is not None:
        _cut_layers(config, options.layers, text)
    if options.experts is not None:
        _cut_experts(config, options.experts, text)
    if options.vocab is not None:
        _cut_vocab(config, options.vocab, text)
    spec = spec_from_config(config, where=text, name=text)
    moe = next((s.mlp for s in (*spec.layers, *filter(None, [spec.mtp])) if isinstance(s.mlp, MoeSpec)), None)
    top_k = moe.top_k if moe else 0
    overlap = min(DEFAULT_OVERLAP, top_k) if options.overlap is None else options.overlap
    if not 0 <= overlap <= max(top_k, 0):
        raise ConfigError(f"{text}: 'overlap' is {overlap:g}, but it runs from 0 to the {top_k} experts of a row")
    return Synthetic(config, spec, SyntheticSource(spec, seed=options.seed, overlap=overlap))


def _cut_layers(config: dict[str, Any], count: int, text: str) -> None:
    full = config["num_hidden_layers"]
    if not 1 <= count <= full:
        raise ConfigError(f"{text}: 'layers' is {count}, but the model has 1 to {full}")
    config["num_hidden_layers"] = count
    if "linear_attn_config" in config:
        for key in ("kda_layers", "full_attn_layers"):
            config["linear_attn_config"][key] = [i for i in config["linear_attn_config"][key] if i <= count]
        return
    group = config["layer_group_size"]
    if count % group:
        # An incomplete last group would be MLA throughout by the layer rule; the list form keeps the pattern.
        config["layer_group_size"] = [0 if (i + 1) % group == 0 else 1 for i in range(count)]
    for key in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list"):
        if config[key] is not None:
            config[key] = config[key][-count:]


def _cut_experts(config: dict[str, Any], count: int, text: str) -> None:
    groups = config.get("n_group", config.get("num_expert_group", 1))
    kept = config["topk_group"]
    top_k = int(config.get("num_experts_per_tok") or config["num_experts_per_token"])
    least = max(-(-top_k // kept) * groups, 2 * groups)
    if count % groups or count < least:
        raise ConfigError(
            f"{text}: 'experts' is {count}, but {groups} groups of which {kept} are kept, with {top_k} experts a row, "
            f"need a multiple of {groups}, at least {least}"
        )
    config["num_experts"] = count


def _cut_vocab(config: dict[str, Any], count: int, text: str) -> None:
    if count < 8:
        raise ConfigError(f"{text}: 'vocab' is {count}, but at least 8 are needed")
    config["vocab_size"] = count
    for back, key in enumerate(("eos_token_id", "pad_token_id", "bos_token_id"), start=1):
        if config.get(key) is not None and config[key] >= count - 3:
            config[key] = count - back


def router_bias(moe: MoeSpec, overlap: float, generator: torch.Generator) -> Tensor:
    """[experts] float32: a hot set of floor(overlap) experts, and one more for the fraction.

    Hot experts are dealt over the groups that can be kept at once. The bonus 2 exceeds the score of every group
    without one (two sigmoids), so their groups are kept and they are chosen. The fraction's expert gets the bonus that
    lets it win with probability sqrt(fraction), so that two independent rows share it with probability ``fraction``.
    """
    bias = torch.zeros(moe.experts)
    sure, fraction = int(overlap), overlap - int(overlap)
    per_group = moe.experts // moe.groups
    groups = torch.randperm(moe.groups, generator=generator).tolist()
    order = torch.randperm(per_group, generator=generator).tolist()
    dealt = min(moe.top_groups, max(1, sure))
    for i in range(sure + (fraction > 0)):
        expert = groups[i % dealt] * per_group + order[i // dealt]
        if i < sure:
            bias[expert] = 2.0
            continue
        normal, kept = NormalDist(), moe.top_groups * per_group - sure
        sigmoid = lambda z: 1 / (1 + math.exp(-z))  # noqa: E731
        last = sigmoid(normal.inv_cdf(1 - min(0.999, (moe.top_k - sure) / kept)))
        bias[expert] = last - sigmoid(normal.inv_cdf(1 - min(0.999, math.sqrt(fraction))))
    return bias


class SyntheticSource:
    """Tensors in the layout of the published files, drawn when asked for (see the module's text). A TensorSource.

    bfloat16 except A_log, dt_bias and router bias (float32). KeyError for a name the model has not.
    """

    def __init__(self, spec: ModelSpec, *, seed: int, overlap: float) -> None:
        self.spec, self.seed, self.overlap = spec, seed, overlap
        self._roles: dict[str, tuple[str, Entry]] = {e.names[0]: (r, e) for r, e in tensor_table(spec).items()}
        layers = {f"layers.{layer.index}": layer for layer in spec.layers}
        self._layers: dict[str, LayerSpec] = layers | ({"mtp": spec.mtp} if spec.mtp else {})
        # Each of the 2L additions to the residual stream gets this standard deviation: the stream's variance grows
        # from 1 to 4 through all layers, at any depth, so no layer drowns and none is drowned.
        self._branch = math.sqrt(3 / (2 * len(spec.layers)))

    def names(self) -> Iterator[str]:
        return iter(self._roles)

    def info(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        role, entry = self._roles[name]
        return entry.file_shapes[-1], self._dtype(role)

    def _dtype(self, role: str) -> torch.dtype:
        return torch.float32 if role.endswith(("A_log", "dt_bias", "moe.bias")) else torch.bfloat16

    def get(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        role, entry = self._roles[name]
        digest = hashlib.sha256(f"{self.seed}|{name}".encode()).digest()
        seed = int.from_bytes(digest[:8], "little") >> 1  # generators take 63 bits
        generator = torch.Generator("cpu" if role.endswith("moe.bias") else device).manual_seed(seed)
        layer = self._layers.get("mtp" if role.startswith("mtp.") else ".".join(role.split(".")[:2]))
        if role.endswith("moe.bias"):
            # Always drawn on the CPU: the hot set must not depend on where the weights live.
            assert layer is not None and isinstance(layer.mlp, MoeSpec)
            return router_bias(layer.mlp, self.overlap, generator).to(device)
        value = self._draw(role, entry, layer, generator, device)
        return value.reshape(entry.file_shapes[-1])

    def _draw(
        self, role: str, entry: Entry, layer: LayerSpec | None, generator: torch.Generator, device: str | torch.device
    ) -> Tensor:
        shape, leaf = entry.shape, role.rsplit(".", 1)[-1]
        if leaf in ("A_log", "dt_bias"):
            assert layer is not None and isinstance(layer.mixer, KdaSpec)
            uniform = torch.rand(shape, generator=generator, device=device, dtype=torch.float32)
            return _decay(layer.mixer, leaf, uniform)
        normal = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        if leaf in ("norm", "input_norm", "post_norm", "o_norm", "q_norm", "kv_norm", "enorm", "hnorm", "out_norm"):
            return normal.mul_(0.05).add_(1.0)
        normal.mul_(self._deviation(leaf, shape[-1], layer))
        if leaf == "head":
            stops = [t for t in (*self.spec.eos_ids, self.spec.pad_id) if t is not None]
            normal[stops] = 0
        return normal

    def _deviation(self, leaf: str, inputs: int, layer: LayerSpec | None) -> float:
        """Standard deviation of a weight: inputs have unit variance, so 1/sqrt(inputs) keeps it."""
        fan = 1 / math.sqrt(inputs)
        if leaf == "embed":
            return 1.0
        if leaf == "head":
            return 3 * fan  # logits of a trained model spread by about 3
        if leaf == "down":
            # std of silu(a) * b for unit normal a, b is 0.596.
            moe = layer.mlp if layer is not None and isinstance(layer.mlp, MoeSpec) else None
            if moe is None:
                return self._branch * fan / 0.596
            # top_k experts with weights of about scaling/top_k, and the shared one with weight 1.
            routed = moe.scaling / math.sqrt(moe.top_k)
            return self._branch * fan / 0.596 / math.sqrt(1 + routed**2)
        if leaf == "o" and layer is not None:
            # The mean square of sigmoid(unit normal) is 0.293; the KDA output is normalised before its gate.
            gated = not isinstance(layer.mixer, MlaSpec) or layer.mixer.head_gate
            return self._branch * fan / (math.sqrt(0.293) if gated else 1.0)
        if leaf == "f" or leaf == "f_b":
            return 0.5 * fan  # decay varies with the token, but around the channel's own rate
        return fan


def _decay(kda: KdaSpec, leaf: str, uniform: Tensor) -> Tensor:
    """A_log and dt_bias from uniform draws in [0, 1).

    Channels forget at rates spread evenly in the logarithm between 0.001 and 1 a token at f = 0: memories of one
    token to a thousand, and never a state that grows.
    """
    if kda.gate == "softplus":
        # -exp(A_log) * softplus(dt): A in [1, 4], softplus(dt) in [0.0005, 0.25].
        if leaf == "A_log":
            return torch.log(1 + 3 * uniform)
        rate = torch.exp(math.log(0.0005) + uniform * math.log(0.25 / 0.0005))
        return rate + torch.log(-torch.expm1(-rate))
    # lower_bound * sigmoid(exp(A_log) * dt): A near 1, so that dt alone sets the rate.
    if leaf == "A_log":
        return torch.log(0.8 + 0.4 * uniform)
    share = torch.exp(math.log(0.001) + uniform * math.log(1.0 / 0.001)) / -kda.lower_bound
    return torch.logit(share.clamp(max=0.9))
