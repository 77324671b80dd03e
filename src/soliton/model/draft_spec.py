"""A block drafter as data: a DSpark draft, or one in DFlash's layout, in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Markov = Literal["none", "vanilla", "gated", "rnn"]


@dataclass(frozen=True, kw_only=True)
class DraftSpec:
    """A block drafter for one target. Sizes are counts of elements; ``vocab`` is the target's.

    ``block``: rows of a block, the anchor and masks. ``anchor_first``: row k predicts the token k + 1 places behind the
    anchor, so all rows draft (DSpark); otherwise row k predicts the token k places behind it, row 0 nothing (DFlash).
    ``taps``: target layers whose residual, after the layer, makes the context's features, ascending;
    ``target_layers``: how many layers that target has. ``draft_vocab``: tokens that the draft's own head knows, None
    where it is the target's head. ``rank``: of the Markov head, 0 without. ``confidence_markov``: whether the
    confidence head reads the Markov embedding too. ``theta``: of half-split rotation over all of ``head_dim``, absolute
    positions.
    """

    name: str
    hidden: int
    vocab: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    eps: float
    theta: float
    block: int
    mask_id: int
    taps: tuple[int, ...]
    target_layers: int
    markov: Markov = "none"
    rank: int = 0
    confidence: bool = False
    confidence_markov: bool = False
    anchor_first: bool = True
    draft_vocab: int | None = None
    max_position: int = 1 << 30

    @property
    def drafts(self) -> int:
        """Tokens drafted a step."""
        return self.block if self.anchor_first else self.block - 1


def shapes(spec: DraftSpec) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that a draft of this spec has of its own, by native names (embedding and head are
    the target's, except a head over ``draft_vocab``)."""
    h, r, q, kv = spec.hidden, spec.rank, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    known = spec.draft_vocab or spec.vocab
    found: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, len(spec.taps) * h),
        "hidden_norm.weight": (h,),
        "norm.weight": (h,),
    }
    for i in range(spec.layers):
        at = f"layers.{i}."
        found |= {
            at + "input_layernorm.weight": (h,),
            at + "post_attention_layernorm.weight": (h,),
            at + "self_attn.q_proj.weight": (q, h),
            at + "self_attn.k_proj.weight": (kv, h),
            at + "self_attn.v_proj.weight": (kv, h),
            at + "self_attn.o_proj.weight": (h, q),
            at + "self_attn.q_norm.weight": (spec.head_dim,),
            at + "self_attn.k_norm.weight": (spec.head_dim,),
            at + "mlp.gate_proj.weight": (spec.width, h),
            at + "mlp.up_proj.weight": (spec.width, h),
            at + "mlp.down_proj.weight": (h, spec.width),
        }
    if spec.draft_vocab is not None:
        found["lm_head.weight"] = (spec.draft_vocab, h)
    if spec.markov != "none":
        found |= {"markov_head.markov_w1.weight": (spec.vocab, r), "markov_head.markov_w2.weight": (known, r)}
    if spec.markov == "gated":
        found |= {"markov_head.gate_proj.weight": (r, h + r), "markov_head.gate_proj.bias": (r,)}
    if spec.markov == "rnn":
        found |= {"markov_head.joint_proj.weight": (3 * r, 2 * r + h), "markov_head.joint_proj.bias": (3 * r,)}
    if spec.confidence:
        found |= {
            "confidence_head.proj.weight": (1, h + r if spec.confidence_markov else h),
            "confidence_head.proj.bias": (1,),
        }
    return found
