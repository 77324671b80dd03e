"""Weights of a model, merged for few large products, built from canonical tensor roles.

A provider is anything with ``tensor(role, device) -> Tensor`` and ``has(role) -> bool`` (an opened checkpoint).
Matrices that read the same input are stacked into one, their outputs side by side in the order the docstrings give.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..ops import device as where
from ..ops.weight import Weight, pack, storage_dtype
from .spec import DenseSpec, KdaSpec, LayerSpec, MlaSpec, ModelSpec, MoeSpec


class Provider(Protocol):
    """Where tensors come from."""

    def tensor(self, role: str, device: torch.device) -> Tensor:
        """The tensor of a canonical role, in its canonical shape."""
        ...

    def has(self, role: str) -> bool:
        """Whether the role exists."""
        ...


@dataclass(frozen=True, kw_only=True)
class KdaWeights:
    """``into`` stacks q, k, v, f (or f_a), g (or g_a), b; conv: [W, q+k+v channels]; a = exp(A_log) per key channel."""

    into: Weight
    f_up: Weight | None
    g_up: Weight | None
    conv: Tensor
    a: Tensor
    dt_bias: Tensor
    norm: Tensor
    out: Weight


@dataclass(frozen=True, kw_only=True)
class MlaWeights:
    """``into`` stacks q (or q_a), latent + rope key, head gate; k_up: [n, nope, C] and v_up: [n, C, V] per head."""

    into: Weight
    q_norm: Tensor | None
    q_up: Weight | None
    kv_norm: Tensor
    k_up: Tensor
    v_up: Tensor
    out: Weight


@dataclass(frozen=True, kw_only=True)
class DenseWeights:
    """``up`` stacks gate and up."""

    up: Weight
    down: Weight


@dataclass(frozen=True, kw_only=True)
class MoeWeights:
    """Router in float32 sums, bias float32. Merged: all experts and the shared one in ``up``/``down``; otherwise
    per-expert stacks [E, H, 2I] and [E, I, H], and the shared expert apart; on a GPU [E, 2I, H], gate and up rows in
    turn, and [E, H, I]."""

    router: Weight
    bias: Tensor
    up: Weight | Tensor
    down: Weight | Tensor
    shared_up: Weight | None
    shared_down: Weight | None


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """One decoder layer."""

    input_norm: Tensor
    post_norm: Tensor
    mixer: KdaWeights | MlaWeights
    mlp: DenseWeights | MoeWeights


@dataclass(frozen=True, kw_only=True)
class MtpWeights:
    """The NEXTN layer: u = eh [enorm(embed); hnorm(hidden)], one block, out_norm."""

    enorm: Tensor
    hnorm: Tensor
    eh: Weight
    layer: LayerWeights
    out_norm: Tensor


@dataclass(frozen=True, kw_only=True)
class ModelWeights:
    """A target and, if it has one and it was asked for, its MTP layer."""

    embed: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Weight
    mtp: MtpWeights | None


class Builder:
    """Reads one model from a provider onto a device in a compute dtype, its routers and its head in ``router`` and
    ``head`` where given; one tensor in memory twice at most."""

    def __init__(
        self,
        provider: Provider,
        device: torch.device,
        dtype: torch.dtype,
        *,
        merge_experts: bool,
        router: torch.dtype | None = None,
        head: torch.dtype | None = None,
    ) -> None:
        self._provider, self._device, self._dtype, self._merge = provider, device, dtype, merge_experts
        self._router, self._head = router or dtype, head or dtype

    def model(self, spec: ModelSpec, *, mtp: bool) -> ModelWeights:
        """The whole model; ``mtp`` False leaves the MTP layer unread."""
        embed = self._get("embed").to(storage_dtype(self._device, self._dtype))
        if self._device.type == "cpu" and self._dtype != torch.float32:
            embed = embed.to(self._dtype)
        return ModelWeights(
            embed=embed,
            layers=tuple(self._layer(f"layers.{layer.index}.", layer) for layer in spec.layers),
            norm=self._vector("norm"),
            head=self._pack("embed" if spec.tied else "head", dtype=self._head),
            mtp=self._mtp(spec.mtp) if mtp and spec.mtp is not None else None,
        )

    def _get(self, role: str) -> Tensor:
        return self._provider.tensor(role, self._device)

    def _vector(self, role: str) -> Tensor:
        return self._get(role).float()

    def _pack(self, *roles: str, paired: bool = False, dtype: torch.dtype | None = None) -> Weight:
        return pack([self._get(r) for r in roles], device=self._device, dtype=dtype or self._dtype, paired=paired)

    def _mtp(self, layer: LayerSpec) -> MtpWeights:
        return MtpWeights(
            enorm=self._vector("mtp.enorm"),
            hnorm=self._vector("mtp.hnorm"),
            eh=self._pack("mtp.eh"),
            layer=self._layer("mtp.", layer),
            out_norm=self._vector("mtp.out_norm"),
        )

    def _layer(self, at: str, layer: LayerSpec) -> LayerWeights:
        mixer: KdaWeights | MlaWeights
        mlp: DenseWeights | MoeWeights
        if isinstance(layer.mixer, KdaSpec):
            mixer = self._kda(at, layer.mixer)
        else:
            mixer = self._mla(at, layer.mixer)
        if isinstance(layer.mlp, DenseSpec):
            both = self._pack(at + "mlp.gate", at + "mlp.up", paired=True)
            mlp = DenseWeights(up=both, down=self._pack(at + "mlp.down"))
        else:
            mlp = self._moe(at, layer.mlp)
        return LayerWeights(
            input_norm=self._vector(at + "input_norm"), post_norm=self._vector(at + "post_norm"), mixer=mixer, mlp=mlp
        )

    def _kda(self, at: str, spec: KdaSpec) -> KdaWeights:
        at += "kda."
        full = spec.gate_rank is None
        f, g = ("f", "g") if full else ("f_a", "g_a")
        convs = [self._vector(at + name) for name in ("q_conv", "k_conv", "v_conv")]
        return KdaWeights(
            into=self._pack(*(at + name for name in ("q", "k", "v", f, g, "b"))),
            f_up=None if full else self._pack(at + "f_b"),
            g_up=None if full else self._pack(at + "g_b"),
            conv=torch.cat(convs).t().contiguous(),
            a=self._vector(at + "A_log").exp().repeat_interleave(spec.key_dim),
            dt_bias=self._vector(at + "dt_bias"),
            norm=self._vector(at + "o_norm"),
            out=self._pack(at + "o"),
        )

    def _mla(self, at: str, spec: MlaSpec) -> MlaWeights:
        at += "mla."
        low = spec.q_rank is not None
        roles = ["q_a" if low else "q", "kv_a", *(["gate"] if spec.head_gate else [])]
        kv_up = self._get(at + "kv_b").to(self._dtype).to(storage_dtype(self._device, self._dtype))
        kv_up = kv_up.view(spec.heads, spec.nope_dim + spec.value_dim, spec.kv_rank)
        return MlaWeights(
            into=self._pack(*(at + r for r in roles)),
            q_norm=self._vector(at + "q_norm") if low else None,
            q_up=self._pack(at + "q_b") if low else None,
            kv_norm=self._vector(at + "kv_norm"),
            k_up=kv_up[:, : spec.nope_dim].contiguous(),
            v_up=kv_up[:, spec.nope_dim :].transpose(1, 2).contiguous(),
            out=self._pack(at + "o"),
        )

    def _moe(self, at: str, spec: MoeSpec) -> MoeWeights:
        at += "moe."
        router, bias = self._pack(at + "router", dtype=self._router), self._vector(at + "bias")
        experts = [f"{at}experts.{e}." for e in range(spec.experts)]
        if self._merge:
            shared = f"{at}shared."
            gates, ups = ([e + part for e in [*experts, shared]] for part in ("gate", "up"))
            downs = [self._get(e + "down") for e in [*experts, shared]]
            down = pack([torch.cat(downs, 1)], device=self._device, dtype=self._dtype)
            return MoeWeights(
                router=router, bias=bias, up=self._pack(*gates, *ups), down=down, shared_up=None, shared_down=None
            )
        hidden, width = router.inputs, spec.width
        if where.has_kernels(self._device):
            return self._expert_rows(at, spec, router, bias)
        keep = storage_dtype(self._device, self._dtype)
        up = torch.empty(spec.experts, hidden, 2 * width, dtype=keep, device=self._device)
        down_all = torch.empty(spec.experts, width, hidden, dtype=keep, device=self._device)
        for e, name in enumerate(experts):
            up[e, :, :width] = self._get(name + "gate").to(self._dtype).t()
            up[e, :, width:] = self._get(name + "up").to(self._dtype).t()
            down_all[e] = self._get(name + "down").to(self._dtype).t()
        return MoeWeights(
            router=router,
            bias=bias,
            up=up,
            down=down_all,
            shared_up=self._pack(at + "shared.gate", at + "shared.up"),
            shared_down=self._pack(at + "shared.down"),
        )

    def _expert_rows(self, at: str, spec: MoeSpec, router: Weight, bias: Tensor) -> MoeWeights:
        """As a GPU's sweeps read them: rows of inputs, gate and up rows in turn."""
        hidden, width = router.inputs, spec.width
        up = torch.empty(spec.experts, 2 * width, hidden, dtype=self._dtype, device=self._device)
        down = torch.empty(spec.experts, hidden, width, dtype=self._dtype, device=self._device)
        for e in range(spec.experts):
            name = f"{at}experts.{e}."
            up[e, 0::2], up[e, 1::2] = self._get(name + "gate"), self._get(name + "up")
            down[e] = self._get(name + "down")
        return MoeWeights(
            router=router,
            bias=bias,
            up=up,
            down=down,
            shared_up=self._pack(at + "shared.gate", at + "shared.up", paired=True),
            shared_down=self._pack(at + "shared.down"),
        )


def expert_elements(spec: ModelSpec) -> int:
    """Weights of all experts of the largest MoE layer (0 without one): decides whether they are merged."""
    sizes = [
        3 * spec.hidden * (layer.mlp.experts * layer.mlp.width + layer.mlp.shared_width)
        for layer in (*spec.layers, *([spec.mtp] if spec.mtp else []))
        if isinstance(layer.mlp, MoeSpec)
    ]
    return max(sizes, default=0)


def state_elements(spec: ModelSpec) -> int:
    """Elements of one KDA layer's recurrent state (0 without one)."""
    return max(
        (m.heads * m.key_dim * m.value_dim for m in (x.mixer for x in spec.layers) if isinstance(m, KdaSpec)), default=0
    )
