"""A DSpark block drafter: features of the context from the target's residuals, one non-causal block over the anchor and
masks, and a Markov head that makes its rows depend on one another. Source: arXiv 2607.05147 and the published drafts.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..ops.moe import halves
from ..ops.rope import inverse_frequencies, table
from ..ops.tape import Tape
from ..ops.weight import Weight, pack, storage_dtype
from .draft_spec import DraftSpec
from .weights import ModelWeights


class DraftProvider(Protocol):
    """Where a draft's tensors come from, by native names (model.draft_spec.shapes)."""

    @property
    def d2t(self) -> Tensor | None:
        """The target's ids of the draft vocabulary's tokens, None where both are the same."""
        ...

    def tensor(self, name: str, device: torch.device) -> Tensor:
        """The tensor of that name."""
        ...


@dataclass(frozen=True, kw_only=True)
class DraftLayer:
    """``kv`` stacks k and v, ``up`` gate and up."""

    input_norm: Tensor
    post_norm: Tensor
    q: Weight
    kv: Weight
    q_norm: Tensor
    k_norm: Tensor
    out: Weight
    up: Weight
    down: Weight


@dataclass(frozen=True, kw_only=True)
class DraftWeights:
    """Embedding and head are the target's; ``head``: the draft's own over fewer tokens, ``known`` their ids. markov_in:
    [vocab, r]; ``markov_out``: r -> vocab; ``mix``: the gated or joint projection, ``mix_bias`` float32. confidence:
    float32 [1, H (+ r)] and [1]."""

    fc: Weight
    hidden_norm: Tensor
    layers: tuple[DraftLayer, ...]
    norm: Tensor
    head: Weight | None
    known: Tensor | None
    markov_in: Tensor | None
    markov_out: Weight | None
    mix: Tensor | None
    mix_bias: Tensor | None
    confidence: Tensor | None
    confidence_bias: Tensor | None


def build_draft(spec: DraftSpec, provider: DraftProvider, device: torch.device, dtype: torch.dtype) -> DraftWeights:
    """Read a draft onto a device."""

    def get(name: str) -> Tensor:
        return provider.tensor(name, device)

    def vector(name: str) -> Tensor:
        return get(name).float()

    def packed(*names: str, paired: bool = False) -> Weight:
        return pack([get(n) for n in names], device=device, dtype=dtype, paired=paired)

    def layer(at: str) -> DraftLayer:
        attention = at + "self_attn."
        return DraftLayer(
            input_norm=vector(at + "input_layernorm.weight"),
            post_norm=vector(at + "post_attention_layernorm.weight"),
            q=packed(attention + "q_proj.weight"),
            kv=packed(attention + "k_proj.weight", attention + "v_proj.weight"),
            q_norm=vector(attention + "q_norm.weight"),
            k_norm=vector(attention + "k_norm.weight"),
            out=packed(attention + "o_proj.weight"),
            up=packed(at + "mlp.gate_proj.weight", at + "mlp.up_proj.weight", paired=True),
            down=packed(at + "mlp.down_proj.weight"),
        )

    markov, mix = spec.markov != "none", {"gated": "gate_proj", "rnn": "joint_proj"}.get(spec.markov)
    stored = storage_dtype(device, dtype)
    return DraftWeights(
        fc=packed("fc.weight"),
        hidden_norm=vector("hidden_norm.weight"),
        layers=tuple(layer(f"layers.{i}.") for i in range(spec.layers)),
        norm=vector("norm.weight"),
        head=packed("lm_head.weight") if spec.draft_vocab is not None else None,
        known=provider.d2t.to(device) if spec.draft_vocab is not None and provider.d2t is not None else None,
        markov_in=get("markov_head.markov_w1.weight").to(dtype).to(stored) if markov else None,
        markov_out=packed("markov_head.markov_w2.weight") if markov else None,
        mix=vector(f"markov_head.{mix}.weight") if mix else None,
        mix_bias=vector(f"markov_head.{mix}.bias") if mix else None,
        confidence=vector("confidence_head.proj.weight") if spec.confidence else None,
        confidence_bias=vector("confidence_head.proj.bias") if spec.confidence else None,
    )


def draft_turns(spec: DraftSpec, positions: int, device: torch.device) -> Tensor:
    """float32 [positions, d/2, 2] of (cos, sin)."""
    return table(positions, inverse_frequencies(spec.head_dim, spec.theta), 1.0, device)


def features(tape: Tape, w: DraftWeights, spec: DraftSpec, taps: Tensor, out: Tensor) -> None:
    """out[R, hidden] = rmsnorm(fc taps) * hidden_norm: what the context's keys and values are made of, in all layers.

    taps: [R, taps * hidden], R >= 2.
    """
    fused = tape.new(taps.shape[0], w.fc.padded)
    tape.call("linear", fused, taps, w.fc)
    tape.call("norm", out, fused[:, : spec.hidden], w.hidden_norm, spec.eps)


def remember(
    tape: Tape, w: DraftWeights, spec: DraftSpec, feature: Tensor, cache: Tensor, positions: Tensor, turn: Tensor
) -> None:
    """The context's keys and values from ``feature`` [R, hidden], R >= 2, into cache [layers, 2, P, m, d]."""
    for i, layer in enumerate(w.layers):
        kv = tape.new(feature.shape[0], layer.kv.padded)
        tape.call("linear", kv, feature, layer.kv)
        tape.call("draft.store", cache[i], kv[:, : layer.kv.outputs], layer.k_norm, turn, positions, spec.eps)


def block(
    tape: Tape, w: DraftWeights, spec: DraftSpec, target: ModelWeights, ids: Tensor, cache: Tensor,
    positions: Tensor, length: Tensor, turn: Tensor,
) -> Tensor:  # fmt: skip
    """The block's rows after the last norm, [B, hidden].

    ids: int64 [B], the anchor and masks; positions: int64 [B] from ``length`` (int64 [1], the anchor's) on; cache:
    [layers, 2, P, m, d] with the context at positions < length, the block's own is written behind it.
    """
    count = ids.shape[0]
    x = tape.new(count, spec.hidden)
    tape.call("embed", x, ids, target.embed)
    for i, layer in enumerate(w.layers):
        normed = tape.new(count, spec.hidden)
        tape.call("norm", normed, x, layer.input_norm, spec.eps)
        q_flat, kv = tape.new(count, layer.q.padded), tape.new(count, layer.kv.padded)
        tape.call("linear", q_flat, normed, layer.q)
        tape.call("linear", kv, normed, layer.kv)
        q, o = (tape.new(count, spec.heads, spec.head_dim) for _ in range(2))
        tape.call("draft.query", q, q_flat[:, : layer.q.outputs], layer.q_norm, turn, spec.eps)
        tape.call("draft.store", cache[i], kv[:, : layer.kv.outputs], layer.k_norm, turn, positions, spec.eps)
        tape.call("draft.attend", o, q, cache[i], length)
        delta = tape.new(count, layer.out.padded)
        tape.call("linear", delta, o.view(count, -1), layer.out)
        tape.call("add", x, delta[:, : spec.hidden])
        normed = tape.new(count, spec.hidden)
        tape.call("norm", normed, x, layer.post_norm, spec.eps)
        both, act = tape.new(count, layer.up.padded), tape.new(count, spec.width)
        tape.call("linear", both, normed, layer.up)
        tape.call("swiglu", act, *halves(both, layer.up, spec.width), 0.0)
        delta = tape.new(count, layer.down.padded)
        tape.call("linear", delta, act, layer.down)
        tape.call("add", x, delta[:, : spec.hidden])
        tape.note(f"block_resid.{i}", x)
    out = tape.new(count, spec.hidden)
    tape.call("norm", out, x, w.norm, spec.eps)
    return out


def base_logits(tape: Tape, w: DraftWeights, target: ModelWeights, hidden: Tensor) -> Tensor:
    """float32 [B, padded] before the Markov head, over the tokens that the draft knows."""
    head = w.head or target.head
    logits = tape.new(hidden.shape[0], head.padded, dtype=torch.float32)
    tape.call("linear", logits, hidden, head)
    return logits


class Markov:
    """The Markov head over one block, row by row: corrected logits of a row once the token before it is drawn."""

    def __init__(
        self, tape: Tape, w: DraftWeights, spec: DraftSpec, hidden: Tensor, base: Tensor, tokens: Tensor
    ) -> None:
        """hidden: [B, H]; base: float32 [B, padded]; tokens: int64, entry k is the token before draft k."""
        self._tape, self._w, self._spec = tape, w, spec
        self._hidden, self._base, self._tokens = hidden, base, tokens
        exact = spec.markov == "vanilla" or tape.fused  # the embedding as stored; what is made of it is not rounded
        self._e = tape.new(2, max(spec.rank, 1), dtype=None if exact else torch.float32)
        self._state = tape.new(1, max(spec.rank, 1), dtype=torch.float32)
        self._mixed, self._states = (tape.new(n, max(spec.rank, 1), dtype=torch.float32) for n in (1, 2))
        power = spec.rank & (spec.rank - 1) == 0 and spec.rank >= (1 if w.mix is None else 8)
        self._fits = tape.fused and spec.markov != "none" and power
        self._zero = torch.zeros(1, dtype=torch.int64, device=tape.device)

    def row(self, k: int) -> Tensor:
        """float32 [2, vocab (padded)], the same row twice: draft k's logits; a token that the draft does not know has
        -inf."""
        tape, w, spec = self._tape, self._w, self._spec
        at = self._at(k)
        out = tape.new(2, self._base.shape[1], dtype=torch.float32)
        if self._fits and w.markov_in is not None and w.markov_out is not None:
            embedding, tokens, place = self._mix(k, None)
            given = (self._base, embedding, w.markov_out.data, tokens, place, at, spec.vocab)
            tape.do("markov", _kernels().chain, out, *given, self._found(), None)
        elif w.markov_in is not None and w.markov_out is not None:
            tape.do("markov.in", _markov_in, self._e, self._state, w, spec, self._hidden, self._tokens, at, k)
            bias = tape.new(2, w.markov_out.padded, dtype=torch.float32)
            tape.call("linear", bias, self._e, w.markov_out)
            tape.do("markov.out", _markov_out, out, self._base, bias, at)
        else:
            tape.do("markov.out", _base_row, out, self._base, at)
        if w.known is None:
            return out
        wide = tape.new(2, spec.vocab, dtype=torch.float32)
        tape.do("draft.known", _spread, wide, out, w.known)
        return wide

    @property
    def chains(self) -> bool:
        """Whether greedy drafts are chosen by the kernels that make the logits."""
        return self._fits and self._w.known is None

    def chain(self) -> None:
        """All greedy drafts into the tokens: a row's kernel chooses the token that the row before found."""
        tape, w, spec, tokens = self._tape, self._w, self._spec, self._tokens
        kernels = _kernels()
        assert w.markov_out is not None
        last: Any = None
        for k in range(spec.drafts):
            out = tape.new(1, self._base.shape[1], dtype=torch.float32)
            found = self._found()
            embedding, seen, place = self._mix(k, last)
            given = (self._base, embedding, w.markov_out.data, seen, place, self._at(k), spec.vocab)
            tape.do("markov", kernels.chain, out, *given, found, last if w.mix is None else None)
            tape.note(f"draft_logits.{k}", out[0])
            last = found
        tape.do("draft.pick", kernels.chosen, tokens, last, spec.drafts, spec.vocab)

    def _found(self) -> tuple[Tensor, Tensor]:
        """Where a row's kernel puts the best of each of its parts."""
        parts = _kernels().parts_of(self._base.shape[1])
        return self._tape.new(parts, dtype=torch.float32), self._tape.new(parts, dtype=torch.int32)

    def _mix(self, k: int, last: Any) -> tuple[Tensor, Tensor, int]:
        """Where the last product finds its input: (rows, which, place of which) for draft k."""
        w = self._w
        assert w.markov_in is not None
        if w.mix is None:
            return w.markov_in, self._tokens, k
        before, after = self._states[k % 2], self._states[(k + 1) % 2]
        given = (w.markov_in, self._hidden, w.mix, w.mix_bias, self._tokens, k, self._at(k), last)
        self._tape.do("markov.mix", _kernels().mix, self._mixed[0], after, before, *given)
        return self._mixed, self._zero, 0

    def _at(self, k: int) -> int:
        """The block's row that draft k comes from."""
        return k if self._spec.anchor_first else k + 1


def _kernels() -> Any:
    return importlib.import_module("soliton.ops.markov_triton")


def _markov_in(
    e: Tensor, state: Tensor, w: DraftWeights, spec: DraftSpec, hidden: Tensor, tokens: Tensor, at: int, k: int
) -> None:
    """e[2, r] = what the last product of the head takes: the embedding of the token before draft k, gated or through
    the recurrent form, whose state [1, r] begins at zero. float32 inside."""
    assert w.markov_in is not None
    embedded = w.markov_in.index_select(0, tokens[k : k + 1]).float()
    if spec.markov == "vanilla":
        e.copy_(embedded.expand(2, -1))
        return
    assert w.mix is not None and w.mix_bias is not None
    row = hidden[at : at + 1].float()
    if spec.markov == "gated":
        gate = torch.cat([row, embedded], 1) @ w.mix.t() + w.mix_bias
        e.copy_((gate.sigmoid() * embedded).expand(2, -1))
        return
    if k == 0:
        state.zero_()
    joint = torch.cat([state, embedded, row], 1) @ w.mix.t() + w.mix_bias
    gate, candidate, output = joint.chunk(3, 1)
    opened = gate.sigmoid()
    e.copy_(output.tanh().expand(2, -1))
    state.copy_(opened * state + (1 - opened) * candidate.tanh())


def _markov_out(out: Tensor, base: Tensor, bias: Tensor, at: int) -> None:
    torch.add(base[at : at + 1, : bias.shape[1]].expand(2, -1), bias, out=out[:, : bias.shape[1]])


def _base_row(out: Tensor, base: Tensor, at: int) -> None:
    out.copy_(base[at : at + 1].expand(2, -1))


def _spread(wide: Tensor, out: Tensor, known: Tensor) -> None:
    wide.fill_(float("-inf"))
    wide.index_copy_(1, known, out[:, : known.shape[0]])


def confidence(out: Tensor, w: DraftWeights, spec: DraftSpec, hidden: Tensor, tokens: Tensor) -> None:
    """out[g] = logits of each draft's acceptance given that those before it are accepted; float32. They see tokens
    before the draft alone: a choice made of them may cut it."""
    assert w.confidence is not None and w.confidence_bias is not None
    count = out.shape[0]
    rows = hidden[-count:].float()  # without the row that predicts nothing
    if spec.confidence_markov:
        assert w.markov_in is not None
        rows = torch.cat([rows, w.markov_in.index_select(0, tokens[:count]).float()], 1)
    torch.add((rows * w.confidence).sum(1), w.confidence_bias, out=out)
