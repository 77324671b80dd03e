"""Synthetic models: true shapes, same tensors in any order, the promised overlap, healthy numbers in all layers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from soliton.checkpoint import Checkpoint, open_checkpoint
from soliton.checkpoint.published import PUBLISHED
from soliton.checkpoint.synthetic import router_bias
from soliton.errors import ConfigError
from soliton.model.spec import KdaSpec, LayerSpec, MlaSpec, MoeSpec


@pytest.mark.parametrize(
    ("name", "tensors", "parameters"),
    [
        ("ling-3.0-flash", 63_783, 127_486_405_600),
        ("ling-3.0-tiny", 9_283, 7_893_392_800),
        ("kimi-linear-48b", 20_493, 49_122_681_728),
    ],
)
def test_published_sizes(name: str, tensors: int, parameters: int) -> None:
    checkpoint = open_checkpoint(f"synthetic:{name}")
    assert len(checkpoint.roles()) == tensors
    assert sum(checkpoint.table[r].numel for r in checkpoint.roles()) == parameters
    assert checkpoint.tokenizer is None and checkpoint.path is None


def test_flash_layers_and_limits() -> None:
    spec = open_checkpoint("synthetic:ling-3.0-flash").spec
    assert spec.mla_layers == (5, 11, 17, 23, 29, 35, 41)
    limits = [(s.mlp.limit, s.mlp.shared_limit) for s in spec.layers if isinstance(s.mlp, MoeSpec)]
    assert limits[-8:] == [(0, 5), (4, 5), (4, 5), (4, 5), (4, 5), (4, 5), (4, 7), (4, 7)]
    assert spec.mtp is not None and spec.mtp.kind == "mla" and isinstance(spec.mtp.mlp, MoeSpec)
    assert (spec.mtp.index, spec.mtp.mlp.limit, spec.mtp.mlp.shared_limit) == (42, 0, 0)


def test_fewer_layers_keep_pattern_last_limits_and_mtp() -> None:
    spec = open_checkpoint("synthetic:ling-3.0-flash?layers=8").spec
    assert spec.kda_layers == (0, 1, 2, 3, 4, 6, 7) and spec.mla_layers == (5,)
    moe = [s.mlp for s in spec.layers if isinstance(s.mlp, MoeSpec)]
    assert len(moe) == 6  # two dense layers first
    assert [m.limit for m in moe] == [4, 4, 4, 4, 4, 4] and [m.shared_limit for m in moe] == [5, 5, 5, 5, 7, 7]
    assert spec.mtp is not None and spec.mtp.index == 8
    kimi = open_checkpoint("synthetic:kimi-linear-48b?layers=5").spec
    assert kimi.mla_layers == (3,)


def test_options_change_sizes() -> None:
    checkpoint = open_checkpoint("synthetic:ling-3.0-tiny?layers=4&experts=32&vocab=512&seed=3")
    assert checkpoint.spec.vocab == 512 and checkpoint.eos_ids == (511,) and checkpoint.spec.pad_id == 510
    head = checkpoint.tensor("head")
    assert head.shape == (512, 1536) and not head[510:].any() and bool(head[:510].abs().sum(-1).min() > 0)
    assert checkpoint.has("layers.3.moe.experts.31.down") and not checkpoint.has("layers.3.moe.experts.32.down")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("synthetic:ling-3.0-flsh", ["did you mean 'ling-3.0-flash'"]),
        ("synthetic:ling-3.0-tiny?layer=4", ["unknown key 'layer'", "did you mean 'layers'"]),
        ("synthetic:ling-3.0-tiny?layers=25", ["'layers' is 25", "1 to 24"]),
        ("synthetic:ling-3.0-tiny?layers=four", ["'layers' is 'four'", "whole number"]),
        ("synthetic:ling-3.0-tiny?layers=4&layers=5", ["'layers' is given twice"]),
        ("synthetic:ling-3.0-tiny?experts=20", ["'experts' is 20", "multiple of 8", "at least 16"]),
        ("synthetic:ling-3.0-tiny?overlap=9", ["'overlap' is 9", "0 to the 8"]),
        ("synthetic:ling-3.0-tiny?overlap=nan", ["'overlap' is nan"]),
        ("synthetic:ling-3.0-tiny?vocab=4", ["'vocab' is 4", "at least 8"]),
    ],
)
def test_bad_options(text: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        open_checkpoint(text)
    for part in parts:
        assert part in str(caught.value)


def test_every_published_config_carries_no_shared_state() -> None:
    before = repr(PUBLISHED)
    open_checkpoint("synthetic:kimi-linear-48b?layers=5&experts=16&vocab=100")
    assert repr(PUBLISHED) == before


def test_deterministic_and_independent_of_order() -> None:
    roles = ["layers.1.kda.q", "layers.1.kda.A_log", "layers.3.moe.bias", "layers.3.mla.kv_b"]
    one = open_checkpoint("synthetic:ling-3.0-tiny?layers=4&experts=16&vocab=64")
    two = open_checkpoint("synthetic:ling-3.0-tiny?layers=4&experts=16&vocab=64")
    first = {r: one.tensor(r) for r in roles}
    second = {r: two.tensor(r) for r in reversed(roles)}
    for role in roles:
        assert torch.equal(first[role], second[role]) and first[role].dtype == two.tensor(role).dtype
        assert first[role].shape == one.table[role].shape
    other = open_checkpoint("synthetic:ling-3.0-tiny?layers=4&experts=16&vocab=64&seed=1")
    assert not torch.equal(first["layers.1.kda.q"], other.tensor("layers.1.kda.q"))
    assert not torch.equal(first["layers.1.kda.q"], one.tensor("layers.1.kda.k"))


def test_stored_layouts_are_the_published_ones() -> None:
    ling = open_checkpoint("synthetic:ling-3.0-tiny?layers=4&experts=16&vocab=64")
    assert ling.source.get("model.layers.0.attention.q_conv1d.weight").shape == (2048, 1, 4)
    assert ling.tensor("layers.0.kda.q_conv").shape == (2048, 4)
    kimi = open_checkpoint("synthetic:kimi-linear-48b?layers=1&experts=16&vocab=64")
    assert kimi.source.get("model.layers.0.self_attn.A_log").shape == (1, 1, 32, 1)
    assert kimi.tensor("layers.0.kda.A_log").shape == (32,)


def _route(x: Tensor, router: Tensor, bias: Tensor, moe: MoeSpec) -> tuple[Tensor, Tensor]:
    scores = torch.sigmoid(x @ router.T)
    biased = (scores + bias).view(len(x), moe.groups, -1)
    kept = biased.topk(2, -1).values.sum(-1).topk(moe.top_groups, -1).indices
    mask = torch.full((len(x), moe.groups), -math.inf).scatter(1, kept, 0.0)
    chosen = (biased + mask[..., None]).flatten(1).topk(moe.top_k, -1).indices
    weights = scores.gather(1, chosen)
    return chosen, weights / weights.sum(-1, keepdim=True) * moe.scaling


@pytest.mark.parametrize(("overlap", "distinct"), [(0.0, 45.8), (0.5, 43.2), (3.0, 31.9), (8.0, 8.0)])
def test_overlap_sets_distinct_experts(overlap: float, distinct: float) -> None:
    moe = MoeSpec(experts=512, top_k=8, groups=8, top_groups=4, width=768, shared_width=768, scaling=2.5)
    counts = []
    for trial in range(60):
        generator = torch.Generator().manual_seed(trial)
        router = torch.randn(512, 64, generator=generator) / 8
        rows = torch.nn.functional.rms_norm(torch.randn(6, 64, generator=generator), (64,))
        chosen, _ = _route(rows, router, router_bias(moe, overlap, generator), moe)
        counts.append(chosen.unique().numel())
    assert abs(sum(counts) / len(counts) - distinct) < 1.5


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)


class _Forward:
    """The layers in plain float32 over a whole sequence; only what is needed to see the size of the numbers."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint, self.prefix = checkpoint, ""
        self.state_rms: list[tuple[float, float]] = []  # (half way, at the end) of each KDA layer

    def w(self, role: str) -> Tensor:
        return self.checkpoint.tensor(self.prefix + role).float()

    def layer(self, layer: LayerSpec, h: Tensor) -> Tensor:
        self.prefix, eps = f"layers.{layer.index}.", self.checkpoint.spec.eps
        x = _norm(h, self.w("input_norm"), eps)
        h = h + (self.kda(layer.mixer, x) if isinstance(layer.mixer, KdaSpec) else self.mla(layer.mixer, x))
        x = _norm(h, self.w("post_norm"), eps)
        if isinstance(layer.mlp, MoeSpec):
            return h + self.moe(layer.mlp, x)
        return h + self.swiglu("mlp.", x, 0.0)

    def swiglu(self, role: str, x: Tensor, limit: float) -> Tensor:
        gate, up = torch.nn.functional.silu(x @ self.w(f"{role}gate").T), x @ self.w(f"{role}up").T
        if limit:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (gate * up) @ self.w(f"{role}down").T

    def moe(self, moe: MoeSpec, x: Tensor) -> Tensor:
        chosen, weights = _route(x, self.w("moe.router"), self.w("moe.bias"), moe)
        for hot in (self.w("moe.bias") == 2).nonzero().flatten().tolist():
            assert (chosen == hot).any(-1).all()  # the shared experts win for every row
        out = self.swiglu("moe.shared.", x, moe.shared_limit)
        for expert in chosen.unique().tolist():
            rows, slots = (chosen == expert).nonzero(as_tuple=True)
            out[rows] += weights[rows, slots, None] * self.swiglu(f"moe.experts.{expert}.", x[rows], moe.limit)
        return out

    def kda(self, kda: KdaSpec, x: Tensor) -> Tensor:
        def conv(name: str) -> Tensor:
            u = torch.nn.functional.pad((x @ self.w(f"kda.{name}").T).T, (kda.conv_width - 1, 0))
            y = torch.nn.functional.conv1d(u[None], self.w(f"kda.{name}_conv")[:, None], groups=u.shape[0])[0].T
            return torch.nn.functional.silu(y).reshape(len(x), kda.heads, -1)

        def low(name: str) -> Tensor:
            if kda.gate_rank is None:
                return x @ self.w(f"kda.{name}").T
            return x @ self.w(f"kda.{name}_a").T @ self.w(f"kda.{name}_b").T

        q, k, v = conv("q"), conv("k"), conv("v")
        q, k = (t / (t.square().sum(-1, keepdim=True) + kda.qk_eps).sqrt() for t in (q, k))
        f = (low("f") + self.w("kda.dt_bias")).reshape(len(x), kda.heads, -1)
        rate = self.w("kda.A_log").exp()[:, None]
        if kda.gate == "bounded":
            g = kda.lower_bound * torch.sigmoid(rate * f)
        else:
            g = -rate * torch.nn.functional.softplus(f)
        beta = torch.sigmoid(x @ self.w("kda.b").T)
        state, outs = torch.zeros(kda.heads, kda.key_dim, kda.value_dim), []
        for t in range(len(x)):
            state = state * g[t].exp()[..., None]
            error = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
            state = state + (beta[t][:, None] * k[t])[..., None] * error[:, None]
            outs.append(torch.einsum("hkv,hk->hv", state, q[t]) * kda.key_dim**-0.5)
            if t == len(x) // 2:
                half = state.square().mean().sqrt().item()
        self.state_rms.append((half, state.square().mean().sqrt().item()))
        gate = torch.sigmoid(low("g")).reshape(len(x), kda.heads, -1)
        return (_norm(torch.stack(outs), self.w("kda.o_norm"), kda.eps) * gate).flatten(1) @ self.w("kda.o").T

    def mla(self, mla: MlaSpec, x: Tensor) -> Tensor:
        if mla.q_rank is None:
            q = x @ self.w("mla.q").T
        else:
            q = _norm(x @ self.w("mla.q_a").T, self.w("mla.q_norm"), mla.eps) @ self.w("mla.q_b").T
        q = q.reshape(len(x), mla.heads, -1).transpose(0, 1)
        latent, rope = (x @ self.w("mla.kv_a").T).split((mla.kv_rank, mla.rope_dim), -1)
        kv = _norm(latent, self.w("mla.kv_norm"), mla.eps) @ self.w("mla.kv_b").T
        kv = kv.reshape(len(x), mla.heads, -1).transpose(0, 1)
        k = torch.cat([kv[..., : mla.nope_dim], rope.expand(mla.heads, -1, -1)], -1)  # sizes do not need the rotation
        v = kv[..., mla.nope_dim :]
        o = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, scale=mla.scale)
        o = o[0].transpose(0, 1)
        if mla.head_gate:
            o = o * torch.sigmoid(x @ self.w("mla.gate").T)[..., None]
        return o.flatten(1) @ self.w("mla.o").T


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("synthetic:ling-3.0-tiny?layers=4&experts=16&vocab=512", 160),
        pytest.param("synthetic:ling-3.0-tiny?layers=4&experts=16&vocab=512", 2500, marks=pytest.mark.full),
        pytest.param("synthetic:ling-3.0-tiny?experts=16&vocab=512", 64, marks=pytest.mark.full),
        pytest.param("synthetic:kimi-linear-48b?layers=9&experts=16&vocab=512", 64, marks=pytest.mark.full),
        pytest.param("synthetic:ling-3.0-flash?layers=12&experts=16&vocab=512", 64, marks=pytest.mark.full),
    ],
)
@pytest.mark.timeout(1200)  # minutes on a busy machine
@torch.inference_mode()
def test_numbers_stay_healthy(text: str, tokens: int) -> None:
    checkpoint = open_checkpoint(text)
    forward = _Forward(checkpoint)
    ids = torch.randint(0, 500, (tokens,), generator=torch.Generator().manual_seed(5))
    h = checkpoint.tensor("embed").float()[ids]
    for layer in checkpoint.spec.layers:
        before = h
        h = forward.layer(layer, h)
        rms, added = h.square().mean().sqrt().item(), (h - before).square().mean().sqrt().item()
        assert 0.7 < rms < 4 and 0.03 < added < 3, (layer.index, rms, added)
    for half, end in forward.state_rms:
        assert 1e-4 < half < 5 and 0.5 < end / half < 2, (half, end)
    logits = _norm(h, checkpoint.tensor("norm").float(), checkpoint.spec.eps) @ checkpoint.tensor("head").float().T
    live = logits[:, :500]
    assert torch.isfinite(logits).all() and 1.5 < live.std().item() < 6
    # Not one token for ever: the best logit depends on the input.
    assert live.argmax(-1).unique().numel() > 20
