"""SwiGLU and the expert sweep.

Letters: R rows, H hidden, E experts, I expert width, k experts a row, J shared-expert width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .linear import product
from .linear import reference as linear
from .runs import silu_rows
from .weight import Weight


def halves(both: Tensor, w: Weight, width: int) -> tuple[Tensor, Tensor]:
    """Gate and up columns of a product's output, both[R, 2 width padded]."""
    if w.paired:
        return both[:, 0 : 2 * width : 2], both[:, 1 : 2 * width : 2]
    return both[:, :width], both[:, width : 2 * width]


def swiglu_reference(out: Tensor, gate: Tensor, up: Tensor, limit: float) -> None:
    """out = silu(gate) * up; with limit L > 0: min(silu(gate), L) * clip(up, -L, L), clamped after the SiLU.

    All [R, width]; float32 inside (silu is not rounded before the product), one rounding to out's dtype.
    """
    g = silu_rows(gate)
    up = up.float()
    if limit:
        g.clamp_max_(limit)
        up = up.clamp(-limit, limit)
    if out.dtype == torch.float32:
        torch.mul(g, up, out=out)
    else:
        out.copy_(g * up)


def dense_reference(
    out: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Weight,
    down: Weight,
    experts: int,
    width: int,
    limit: float,
    shared_limit: float,
    rows: Tensor | None,
) -> None:
    """Every expert for every row, unchosen ones with weight zero: two products in all, for models with few experts.

    out: [R, H padded]; x: [R, H]; ids, weights: [R, k]; up: [H, 2 (E I + J)], gates of all experts then of the
    shared one, then the ups in the same order; down: [E I + J, H]. The routing weight multiplies the activation in
    float32 before the down product; sums run over experts in index order, the shared expert last.
    """
    total = down.inputs
    both = torch.empty(x.shape[0], up.padded, dtype=torch.float32, device=x.device)
    linear(both, x, up)
    act = torch.empty(x.shape[0], total, dtype=torch.float32, device=x.device)
    routed = experts * width
    if limit == shared_limit:
        swiglu_reference(act, both[:, :total], both[:, total : 2 * total], limit)
    else:
        swiglu_reference(act[:, :routed], both[:, :routed], both[:, total : total + routed], limit)
        swiglu_reference(act[:, routed:], both[:, routed:total], both[:, total + routed : 2 * total], shared_limit)
    share = torch.zeros(x.shape[0], experts, dtype=torch.float32, device=x.device).scatter_(1, ids, weights)
    act[:, :routed].view(-1, experts, width).mul_(share.unsqueeze(-1))
    linear(out, act, down)


def grouped_reference(
    out: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    shared_up: Weight,
    shared_down: Weight,
    limit: float,
    shared_limit: float,
    rows: Tensor | None,
) -> None:
    """Each chosen expert once, over the rows that chose it; results combined in slot order, then the shared expert.

    out: [R, H padded]; x: [R, H]; ids, weights: [R, k]; up: [E, H, 2 I] (gate columns, then up columns); down:
    [E, I, H]. ``rows``: int64 [1], live rows (None = all); rows beyond form no pairs and their out is the shared
    expert's alone. An expert's rows are padded to two, so that its product never takes the one-row path.
    """
    live = x.shape[0] if rows is None else int(rows)
    hidden, width, k = x.shape[1], down.shape[1], ids.shape[1]
    chosen = ids[:live].flatten()
    order = chosen.sort(stable=True).indices
    starts = torch.bincount(chosen, minlength=up.shape[0]).tolist()
    pairs = torch.empty(live * k, hidden, dtype=torch.float32, device=x.device)
    at = 0
    for expert, count in enumerate(starts):
        if not count:
            continue
        which = order[at : at + count]
        at += count
        index = which if count > 1 else which.repeat(2)
        got = torch.empty(index.shape[0], 2 * width, dtype=torch.float32, device=x.device)
        product(got, x[index // k].float(), up[expert])
        act = torch.empty(index.shape[0], width, dtype=torch.float32, device=x.device)
        swiglu_reference(act, got[:, :width].contiguous(), got[:, width:].contiguous(), limit)
        result = torch.empty(index.shape[0], hidden, dtype=torch.float32, device=x.device)
        product(result, act.to(x.dtype).float(), down[expert])
        pairs[which] = result[:count]
    both = torch.empty(x.shape[0], shared_up.padded, dtype=torch.float32, device=x.device)
    linear(both, x, shared_up)
    inner = shared_down.inputs
    act = torch.empty(x.shape[0], inner, dtype=x.dtype, device=x.device)
    swiglu_reference(act, both[:, :inner], both[:, inner : 2 * inner], shared_limit)
    result = torch.empty(x.shape[0], shared_down.padded, dtype=torch.float32, device=x.device)
    linear(result, act, shared_down)
    by_slot = pairs.view(live, k, hidden)
    total = by_slot[:, 0] * weights[:live, :1]
    for slot in range(1, k):
        total.addcmul_(by_slot[:, slot], weights[:live, slot : slot + 1])
    result[:live, :hidden].add_(total)
    out.copy_(result[:, :hidden])
