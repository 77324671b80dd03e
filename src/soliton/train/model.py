"""The DSpark draft in plain torch, differentiable, over blocks at chosen anchors of known sequences.

A block is [embed(anchor), embed(mask) x (g - 1)] at positions anchor .. anchor + g - 1; row k predicts the token at
anchor + k + 1. It sees the context rows before its anchor and all its own rows, never another block's. Context rows
are fused from the target's residuals (taps), and every layer makes keys and values from them. Teacher-forced: the
token before row k's prediction is the sequence's own. Source: the DSpark paper (arXiv 2607.05147), DeepSpec.

Letters in shapes: B sequences, L tokens, A anchors (blocks), g rows of a block, H hidden, V vocabulary, m taps, r rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UnsupportedError
from ..model.draft_spec import DraftSpec, shapes

STD = 0.02  # of initial matrices: the targets' own initializer_range

Context = list[tuple[Tensor, Tensor]]  # keys and values [B, KV heads, L, head_dim] by layer


@dataclass(frozen=True)
class Output:
    """hidden [B, A, g, H] after the last norm; logits [B, A, g, V], Markov bias included; confidence logits [B, A, g],
    None without the head."""

    hidden: Tensor
    logits: Tensor
    confidence: Tensor | None


class Drafter(nn.Module):
    """The trainable tensors of ``draft_spec.shapes(spec)``, under exactly those names.

    embed [V, H] and head [V, H] are the target's: frozen, and in no state dict.
    """

    embed: Tensor
    head: Tensor

    def __init__(self, spec: DraftSpec, embed: Tensor, head: Tensor, *, seed: int = 0) -> None:
        super().__init__()
        if not spec.anchor_first:
            raise UnsupportedError(
                f"{spec.name}: a draft whose anchor row predicts nothing (DFlash) is not trained here"
            )
        if spec.draft_vocab is not None:
            raise UnsupportedError(
                f"{spec.name}: a draft with its own vocabulary of {spec.draft_vocab} is not trained here; leave it out"
            )
        for name, tensor in (("embed", embed), ("head", head)):
            if tuple(tensor.shape) != (spec.vocab, spec.hidden):
                raise ValueError(f"{name} is {list(tensor.shape)}, the draft needs [{spec.vocab}, {spec.hidden}]")
            self.register_buffer(name, tensor.detach(), persistent=False)
        self.spec = spec
        g = torch.Generator().manual_seed(seed)
        for name, shape in shapes(spec).items():
            *path, leaf = name.split(".")
            at: nn.Module = self
            for part in path:
                if part not in at._modules:
                    at.add_module(part, nn.Module())
                at = at.get_submodule(part)
            at.register_parameter(leaf, nn.Parameter(_initial(name, shape, g)))

    def context(self, taps: Tensor) -> Context:
        """Keys (normed, rotated) and values of context rows 0 .. L - 1, from taps [B, L, m * H]."""
        w, spec = self._weights(), self.spec
        x = self._norm(F.linear(_wide(taps, w["fc.weight"]), w["fc.weight"]), w["hidden_norm.weight"])
        turn = _turn(torch.arange(taps.shape[1], device=taps.device), spec, x.dtype)
        return [self._keys(w, f"layers.{i}.self_attn.", x, turn) for i in range(spec.layers)]

    def blocks(self, context: Context, ids: Tensor, anchors: Tensor) -> Tensor:
        """Hidden states [B, A, g, H] of the blocks at anchors, int64 [B, A]; ids int64 [B, L].

        ``context`` may end at the largest anchor. A block at anchor 0 sees only itself.
        """
        w, spec = self._weights(), self.spec
        (count, blocks), g, device = anchors.shape, spec.block, ids.device
        tokens = torch.full((count, blocks, g), spec.mask_id, dtype=torch.int64, device=device)
        tokens[..., 0] = ids.gather(1, anchors)
        x = _wide(F.embedding(tokens, self.embed), w["norm.weight"]).flatten(1, 2)  # [B, A * g, H]
        turn = _turn((anchors[..., None] + torch.arange(g, device=device)).flatten(1), spec, x.dtype)
        rows = torch.arange(context[0][0].shape[2], device=device)
        before = (rows < anchors[..., None]).repeat_interleave(g, 1)  # [B, A * g, L]
        own = torch.eye(blocks, dtype=torch.bool, device=device).repeat_interleave(g, 0).repeat_interleave(g, 1)
        seen = torch.cat([before, own.expand(count, -1, -1)], 2)[:, None]
        for i in range(spec.layers):
            at = f"layers.{i}."
            normed = self._norm(x, w[at + "input_layernorm.weight"])
            x = x + self._attention(w, at + "self_attn.", normed, turn, context[i], seen)
            normed = self._norm(x, w[at + "post_attention_layernorm.weight"])
            gate, up = (F.linear(normed, w[f"{at}mlp.{part}_proj.weight"]) for part in ("gate", "up"))
            x = x + F.linear(F.silu(gate) * up, w[at + "mlp.down_proj.weight"])
        return self._norm(x, w["norm.weight"]).view(count, blocks, g, spec.hidden)

    def logits(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Corrected logits [..., g, V] of hidden [..., g, H] and the tokens before each prediction, int64 [..., g]."""
        base = self.target_logits(hidden)
        bias = self._markov(hidden, previous)
        return base if bias is None else base + bias.to(base.dtype)

    def target_logits(self, hidden: Tensor) -> Tensor:
        """[..., V] in float32 at least: the target's head over hidden [..., H], its own or the draft's."""
        logits = F.linear(hidden if hidden.dtype == self.head.dtype else hidden.to(self.head.dtype), self.head)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor | None:
        """Logits [..., g] that the row's draft is accepted if those before it are; None without the head."""
        if not self.spec.confidence:
            return None
        w = self._weights()
        if self.spec.confidence_markov:
            hidden = torch.cat([hidden, F.embedding(previous, w["markov_head.markov_w1.weight"])], -1)
        with torch.autocast(hidden.device.type, enabled=False):  # one output: nothing to gain from bf16
            return F.linear(hidden, w["confidence_head.proj.weight"], w["confidence_head.proj.bias"])[..., 0]

    def forward(self, taps: Tensor, ids: Tensor, anchors: Tensor, keep: Tensor, *, chunk: int = 64) -> Output:
        """All blocks at once, ``chunk`` anchors at a time in attention: its masks and scores are [B, chunk * g, L +
        chunk * g]. taps [B, L, m * H], ids int64 [B, L], anchors int64 [B, A], keep bool [B, A]: rows of blocks that
        are not kept come out as 0."""
        context = self.context(taps)
        hidden = torch.cat([self.blocks(context, ids, part) for part in torch.split(anchors, chunk, 1)], 1)
        hidden = hidden * keep[..., None, None]
        previous = ids.gather(1, places(anchors, self.spec.block, ids.shape[1]).flatten(1)).view(hidden.shape[:3])
        return Output(hidden, self.logits(hidden, previous), self.confidence(hidden, previous))

    def _weights(self) -> dict[str, Tensor]:
        return dict(self.named_parameters())

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(_wide(x, weight), weight.shape, weight, self.spec.eps)

    def _heads(self, x: Tensor, weight: Tensor) -> Tensor:
        """[B, heads, rows, head_dim]"""
        return F.linear(x, weight).view(*x.shape[:2], -1, self.spec.head_dim).transpose(1, 2)

    def _keys(self, w: dict[str, Tensor], at: str, x: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        k = _rotate(self._norm(self._heads(x, w[at + "k_proj.weight"]), w[at + "k_norm.weight"]), turn)
        return k, self._heads(x, w[at + "v_proj.weight"])

    def _attention(
        self,
        w: dict[str, Tensor],
        at: str,
        x: Tensor,
        turn: tuple[Tensor, Tensor],
        context: tuple[Tensor, Tensor],
        seen: Tensor,
    ) -> Tensor:
        q = _rotate(self._norm(self._heads(x, w[at + "q_proj.weight"]), w[at + "q_norm.weight"]), turn)
        own = self._keys(w, at, x, turn)
        # heads repeated by hand: fused kernels with a mask do not share them
        share = self.spec.heads // self.spec.kv_heads
        k, v = (torch.cat(pair, 2) for pair in zip(context, own))
        if share > 1:
            k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return F.linear(out.transpose(1, 2).flatten(2), w[at + "o_proj.weight"])

    def _markov(self, hidden: Tensor, previous: Tensor) -> Tensor | None:
        """The bias [..., g, V]; rnn carries a state along the rows of a block."""
        w, kind = self._weights(), self.spec.markov
        if kind == "none":
            return None
        e = F.embedding(previous, w["markov_head.markov_w1.weight"])
        if kind == "gated":
            at = "markov_head.gate_proj."
            e = e * torch.sigmoid(F.linear(torch.cat([hidden, e], -1), w[at + "weight"], w[at + "bias"]))
        elif kind == "rnn":
            at, state, outs = "markov_head.joint_proj.", torch.zeros_like(e[..., 0, :]), []
            for k in range(e.shape[-2]):
                joint = torch.cat([state, e[..., k, :], hidden[..., k, :]], -1)
                gate, candidate, out = F.linear(joint, w[at + "weight"], w[at + "bias"]).chunk(3, -1)
                keep = torch.sigmoid(gate)
                state = keep * state + (1 - keep) * torch.tanh(candidate)
                outs.append(torch.tanh(out))
            e = torch.stack(outs, -2)
        return F.linear(e, w["markov_head.markov_w2.weight"])


def places(anchors: Tensor, block: int, length: int) -> Tensor:
    """int64 [B, A, g]: anchor + k, cut at the last place. Row k's previous token stands there, and the target's hidden
    state there predicts row k's label."""
    return (anchors[..., None] + torch.arange(block, device=anchors.device)).clamp(max=length - 1)


def _initial(name: str, shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    """Norms 1, biases 0, matrices normal. markov_w2 is 0: the bias then starts at 0, so that training begins at the
    base logits and no random bigram law has to be unlearned (its own gradient is not 0, as markov_w1 is random)."""
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    if name.endswith((".bias", "markov_w2.weight")):
        return torch.zeros(shape)
    return torch.randn(shape, generator=g) * STD


def _wide(x: Tensor, weight: Tensor) -> Tensor:
    """``x`` in the weights' dtype: float32 in training whatever autocast made of it, so norms and residuals keep it."""
    return x.to(weight.dtype)


def _turn(positions: Tensor, spec: DraftSpec, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [..., 1, rows, head_dim / 2] of positions [rows] or [B, rows]; angles in float64, which a float32
    would miss by hundredths at long contexts."""
    half = torch.arange(spec.head_dim // 2, dtype=torch.float64, device=positions.device)
    angle = positions[..., None] * spec.theta ** (-2 * half / spec.head_dim)
    angle = angle.unsqueeze(-3)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def _rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Half-split rotation: channel j turns with channel j + head_dim / 2. x [B, heads, rows, head_dim]."""
    cos, sin = turn
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
