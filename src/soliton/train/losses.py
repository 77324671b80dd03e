"""The terms that train a draft, as sums over supervised rows, so that a batch can be taken a few blocks at a time.

Denominators are known from the masks alone (``totals``), before anything is computed: each chunk of blocks adds its
share to every term, and only one chunk's [rows, V] logits exist at a time. Sources: DeepSpec's objective (ce, l1,
confidence with position decay), its open proposal for the accept length.

Letters in shapes: N blocks, g rows of a block, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-6  # added to the sum of weights, as DeepSpec does
GREEDY = 1e-5  # a temperature below is the target's argmax, as in sampling
TERMS = ("ce", "l1", "confidence", "accept_length")


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Weights of the terms; 0 leaves a term out. ``decay``: row k counts exp(-k / decay) in ce, l1 and confidence, None
    for all alike. ``temperatures``: of distillation; l1, accept length and confidence take the mean over them (0: the
    target's argmax); ``sure``: what confidence takes instead; ``reached``: there a row also counts as its block's
    earlier drafts are accepted, for only then its confidence matters. ``ramp``: steps over which the accept length's
    weight grows from 0, because its later rows have no gradient while the earlier ones are never accepted."""

    ce: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0
    accept_length: float = 0.0
    decay: float | None = 4.0
    temperatures: tuple[float, ...] = (1.0,)
    sure: tuple[float, ...] | None = None
    reached: bool = False
    ramp: int = 0

    def weights(self, step: int) -> dict[str, float]:
        """Term -> weight in optimizer step ``step``, from 0."""
        grown = min(1.0, (step + 1) / self.ramp) if self.ramp else 1.0
        return {
            "ce": self.ce,
            "l1": self.l1,
            "confidence": self.confidence,
            "accept_length": self.accept_length * grown,
        }


@dataclass(frozen=True)
class Totals:
    """Denominators of a batch. weight: sum of row weights; blocks: those with a supervised row; rows: supervised rows
    by place in the block."""

    weight: float
    blocks: int
    rows: tuple[int, ...]


def supervised(loss_mask: Tensor, anchors: Tensor, keep: Tensor, block: int) -> Tensor:
    """bool [B, A, g]: rows whose label, at anchor + k + 1, lies in the sequence and, like all before it, in the loss
    mask. loss_mask bool [B, L], anchors int64 [B, A], keep bool [B, A]."""
    length = loss_mask.shape[1]
    at = anchors[..., None] + torch.arange(1, block + 1, device=anchors.device)
    inside = at < length
    taken = loss_mask.gather(1, at.clamp(max=length - 1).flatten(1)).view(at.shape)
    return ((inside & taken).long().cumprod(-1) * keep[..., None]).bool()


def row_weights(mask: Tensor, decay: float | None) -> Tensor:
    """float64 [..., g] of mask bool [..., g]."""
    k = torch.arange(mask.shape[-1], dtype=torch.float64, device=mask.device)
    return mask * (torch.ones_like(k) if decay is None else torch.exp(-k / decay))


def totals(masks: list[Tensor], decay: float | None) -> Totals:
    """Of all the masks [.., g] of a batch."""
    flat = torch.cat([mask.flatten(0, -2).cpu() for mask in masks])
    rows = tuple(int(n) for n in flat.sum(0))
    return Totals(float(row_weights(flat, decay).sum()), int(flat.any(-1).sum()), rows)


def distances(draft: Tensor, target: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """(sum over v of |q - p|, the chance that a draw of the draft is accepted), both [...], of logits [..., V].

    Rates are 1 - l1 / 2 = sum of min(p, q). At temperature 0 p is the target's argmax; q stays the draft's softmax,
    which has a gradient, while the rate is whether the two argmaxes agree (so it has none).
    """
    if temperature < GREEDY:
        best = target.argmax(-1)
        q = draft.softmax(-1).gather(-1, best[..., None])[..., 0]
        return 2 * (1 - q), (draft.argmax(-1) == best).to(draft.dtype)
    p, q = (target / temperature).softmax(-1), (draft / temperature).softmax(-1)
    l1 = (q - p).abs().sum(-1)
    return l1, 1 - 0.5 * l1


def expected(rates: Tensor) -> Tensor:
    """Sum over k of prod_{j <= k} rates[..., j]: drafts accepted of a block, 0 at rows that do not count."""
    reach, total = torch.ones_like(rates[..., 0]), torch.zeros_like(rates[..., 0])
    for rate in rates.unbind(-1):
        reach = reach * rate
        total = total + reach
    return total


def sums(
    objective: Objective, draft: Tensor, target: Tensor, confidence: Tensor | None, labels: Tensor, mask: Tensor
) -> dict[str, Tensor]:
    """Numerators of the terms (with gradients) and of the metrics (without), summed over N blocks.

    draft, target [N, g, V] logits, the target's without gradient; confidence logits [N, g] or None; labels int64
    [N, g]; mask bool [N, g]. Confidence learns 1 - l1 / 2 as a constant, and its inputs are not detached.
    """
    w = row_weights(mask, objective.decay).to(draft.dtype)
    pairs = [distances(draft, target, t) for t in objective.temperatures]
    l1 = torch.stack([pair[0] for pair in pairs]).mean(0)
    rate = torch.stack([pair[1] for pair in pairs]).mean(0).detach()
    soft = [(1 - 0.5 * pair[0]) * mask for pair in pairs]
    with torch.no_grad():
        agree = (draft.argmax(-1) == target.argmax(-1)) & mask
    found = {
        "ce": (w * F.cross_entropy(draft.flatten(0, 1), labels.flatten(), reduction="none").view(w.shape)).sum(),
        "l1": (w * l1).sum(),
        "accept_length": -torch.stack([expected(a).sum() for a in soft]).mean(),
        "rates": (rate * mask).sum(0),
        "tau": expected(rate * mask).sum(),
        "tau_greedy": expected(agree.to(w.dtype)).sum(),
    }
    if confidence is not None:
        if objective.sure is not None:
            with torch.no_grad():
                rate = torch.stack([distances(draft, target, t)[1] for t in objective.sure]).mean(0)
        bce = F.binary_cross_entropy_with_logits(confidence.to(rate.dtype), rate, reduction="none")
        before = F.pad(rate[..., :-1], (1, 0), value=1.0).cumprod(-1) if objective.reached else 1.0
        found["confidence"] = (w * before * bce).sum()
        c = confidence.detach().to(rate.dtype).sigmoid()
        found["abs_error"], found["bias"] = (w * (c - rate).abs()).sum(), (w * (c - rate)).sum()
        found["cumprod_bias"] = (w * ((c * mask).cumprod(-1) - (rate * mask).cumprod(-1))).sum()
    return found


def terms(found: dict[str, Tensor], whole: Totals) -> Iterator[tuple[str, Tensor]]:
    """Term by term this chunk's share of the batch's value."""
    for name in TERMS:
        if name in found:
            yield name, found[name] / (max(whole.blocks, 1) if name == "accept_length" else whole.weight + EPS)


def metrics(found: dict[str, Tensor], whole: Totals) -> dict[str, float | list[float | None]]:
    """Terms and metrics of a whole batch's sums. accept_rate: mean chance by row that its draft is accepted, None for a
    row that no block has; tau: expected accept length, the bonus token counts; tau_greedy: the same for argmaxes."""
    out: dict[str, float | list[float | None]] = {name: float(value.detach()) for name, value in terms(found, whole)}
    rates = found["rates"].tolist()
    out["accept_rate"] = [rate / n if n else None for rate, n in zip(rates, whole.rows, strict=True)]
    for name in ("tau", "tau_greedy"):
        out[name] = 1 + float(found[name]) / max(whole.blocks, 1)
    for name in ("abs_error", "bias", "cumprod_bias"):
        if name in found:
            out[f"confidence_{name}"] = float(found[name]) / max(whole.weight, EPS)
    return out
