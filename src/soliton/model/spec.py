"""A model as data: what each layer is, in numbers, with nothing about files or devices.

``checkpoint`` makes a ModelSpec from a config.json; ``model`` builds weights and computations from it.
Sizes are counts of elements. Sources: the published configurations of Ling-3.0 (BailingMoeV3) and Kimi-Linear.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary embedding over ``dim`` channels, adjacent pairs (2j, 2j+1), angle = position * inv_freq[j].

    ``inv_freq[j] = theta ** (-2j/dim)``; with YaRN (``factor`` > 1) the frequencies are interpolated as in the
    YaRN paper and cos/sin are multiplied by ``mscale``.
    """

    dim: int
    theta: float
    factor: float = 1.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class KdaSpec:
    """Kimi Delta Attention. State per layer: [heads, key_dim, value_dim] float32.

    ``gate``: the log-decay law. "bounded": lower_bound * sigmoid(exp(A_log) * (f + dt_bias)) (Ling);
    "softplus": -exp(A_log) * softplus(f + dt_bias) (Kimi). ``gate_rank``: rank of the low-rank forget and output
    gate projections (f_a/f_b, g_a/g_b), None where they are full (f_proj, g_proj).
    """

    heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    gate: Literal["bounded", "softplus"]
    lower_bound: float = -5.0
    gate_rank: int | None = None
    eps: float = 1e-6  # of the gated output norm
    qk_eps: float = 1e-6  # inside the square root of the q/k L2 norms


@dataclass(frozen=True, kw_only=True)
class MlaSpec:
    """Multi-head latent attention. Cache per token: kv_rank latent values + rope_dim shared key values.

    ``scale`` multiplies q.k. ``rope`` None means no rotation (NoPE): the rope_dim channels are kept as they are.
    ``head_gate``: sigmoid gate per head, from the normed input, on the attention output before o_proj.
    """

    heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    rope: RopeSpec | None
    head_gate: bool
    eps: float = 1e-6  # of q_a_layernorm and kv_a_layernorm


@dataclass(frozen=True, kw_only=True)
class DenseSpec:
    """SwiGLU: down(silu(gate x) * up x), no clamp."""

    width: int


@dataclass(frozen=True, kw_only=True)
class MoeSpec:
    """Grouped sigmoid router over ``experts`` SwiGLU experts of ``width``, ``top_k`` chosen, plus a shared expert.

    ``limit`` and ``shared_limit``: the checkpoint owner's clamp min(silu(gate), L) * clip(up, -L, L); 0 is off.
    """

    experts: int
    top_k: int
    groups: int
    top_groups: int
    width: int
    shared_width: int
    scaling: float
    renormalize: bool = True
    limit: float = 0.0
    shared_limit: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One decoder layer: x + mixer(norm x), then x + mlp(norm x). ``index`` is its 0-based number in the files."""

    index: int
    mixer: KdaSpec | MlaSpec
    mlp: DenseSpec | MoeSpec

    @property
    def kind(self) -> Literal["kda", "mla"]:
        return "kda" if isinstance(self.mixer, KdaSpec) else "mla"


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A target model. ``family`` picks the file naming only; everything numeric is in the fields.

    ``mtp``: the NEXTN layer (index = number of layers), or None. ``dtype``: the checkpoint's own ("bfloat16", ...).
    """

    family: Literal["bailing_hybrid", "kimi_linear"]
    name: str
    hidden: int
    vocab: int
    eps: float
    layers: tuple[LayerSpec, ...]
    mtp: LayerSpec | None
    max_position: int
    dtype: str
    tied: bool = False
    eos_ids: tuple[int, ...] = field(default=())
    pad_id: int | None = None
    bos_id: int | None = None

    @property
    def kda_layers(self) -> tuple[int, ...]:
        """Indices of the KDA layers, ascending."""
        return tuple(layer.index for layer in self.layers if layer.kind == "kda")

    @property
    def mla_layers(self) -> tuple[int, ...]:
        """Indices of the MLA layers, ascending, without the MTP layer's."""
        return tuple(layer.index for layer in self.layers if layer.kind == "mla")
