"""Ops of a recorded float32 step on a CPU, with views and scratch made once.

A step at batch 1 is some five hundred calls of a few microseconds, so slicing and allocating in each of them shows.
Every function here takes an op's arguments and returns the call; it issues the same torch operations on the same
numbers as the op's reference, in the same order, and so has the same bits (held by tests).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import kda, moe, router
from .linear import INPUT_WHOLE, ROW_BLOCK
from .linear import reference as linear_reference
from .runs import in_runs, silu_rows
from .weight import Weight

Call = Callable[[], object]


def linear(out: Tensor, x: Tensor, w: Weight) -> Call:
    """See ops.linear.reference."""
    if x.shape[0] > ROW_BLOCK or x.shape[1] > INPUT_WHOLE or w.data.dtype != torch.float32:
        return lambda: linear_reference(out, x, w)
    matrix, mm = w.data, torch.mm
    return lambda: mm(x, matrix, out=out)


def norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> Call:
    """See ops.norm.reference."""
    square, scale = torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(*x.shape[:-1], 1)
    share, mul, total = 1.0 / x.shape[-1], torch.mul, torch.sum

    def run() -> None:
        mul(x, x, out=square)
        total(square, -1, keepdim=True, out=scale)
        scale.mul_(share).add_(eps).rsqrt_()
        mul(x, scale, out=out).mul_(weight)

    return run


def gated_norm(out: Tensor, o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Call:
    """See ops.norm.gated_reference."""
    opened, normed = torch.empty_like(o), torch.empty_like(o)
    first = norm(normed, o, weight, eps)

    def run() -> None:
        first()
        opened.copy_(gate)
        in_runs(torch.sigmoid_, opened)
        torch.mul(normed, opened, out=out)

    return run


def conv(out: Tensor, window: Tensor, weight: Tensor) -> Call:
    """See ops.kda.conv_reference."""
    rows = out.shape[0]
    first, *later = ((window[tap : tap + rows], weight[tap]) for tap in range(weight.shape[0]))

    def run() -> None:
        torch.mul(*first, out=out)
        for view, tap in later:
            out.addcmul_(view, tap)
        in_runs(torch.ops.aten.silu_, out)

    return run


def chain(
    o: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, states: Tensor, rows: Tensor
) -> Call:
    """See ops.kda.chain_reference."""
    views = kda.RowViews(o, k, v, decay, beta)
    slots = list(states.unbind(0))
    reads = torch.empty(q.shape[0], q.shape[1], 2, q.shape[2], dtype=torch.float32)
    decays = decay.unsqueeze(2)
    qk = torch.empty(q.shape[0], q.shape[1], 1, dtype=torch.float32)
    product = torch.empty(q.shape, dtype=torch.float32)
    read_rows, qk_rows = reads.unbind(0), qk.unbind(0)

    def run() -> None:
        live = int(rows)
        torch.stack([k, q], 2, out=reads).mul_(decays)
        torch.sum(torch.mul(q, k, out=product), -1, keepdim=True, out=qk)
        kda.recur(views, read_rows, qk_rows, slots[:live], slots[1 : live + 1])

    return run


def heads(out: Tensor, x: Tensor, w: Tensor) -> Call:
    """See ops.linear.heads_reference."""
    by_head = x.transpose(0, 1)
    product = torch.empty(x.shape[1], x.shape[0], w.shape[2], dtype=torch.float32)
    turned, bmm = product.transpose(0, 1), torch.bmm

    def run() -> None:
        bmm(by_head, w, out=product)
        out.copy_(turned)

    return run


def gates(
    decay: Tensor, beta: Tensor, f: Tensor, b: Tensor, a: Tensor, dt_bias: Tensor, law: str, lower_bound: float
) -> Call:
    """See ops.kda.gates_reference; only the bounded law is made ready."""
    if law != "bounded" or b.is_contiguous():
        return lambda: kda.gates_reference(decay, beta, f, b, a, dt_bias, law, lower_bound)  # type: ignore[arg-type]

    def run() -> None:
        torch.add(f, dt_bias, out=decay)
        in_runs(torch.sigmoid_, decay.mul_(a))
        in_runs(torch.exp_, decay.mul_(lower_bound))
        beta.copy_(torch.sigmoid(b))

    return run


def l2norm(out: Tensor, x: Tensor, eps: float, scale: float) -> Call:
    """See ops.kda.l2norm_reference."""
    square, inverse = torch.empty_like(out), out.new_empty(*out.shape[:-1], 1)
    queries, mul, total = inverse[:, : out.shape[1] // 2], torch.mul, torch.sum

    def run() -> None:
        mul(x, x, out=square)
        total(square, -1, keepdim=True, out=inverse)
        inverse.add_(eps).rsqrt_()
        queries.mul_(scale)
        mul(x, inverse, out=out)

    return run


def route(
    ids: Tensor,
    weights: Tensor,
    logits: Tensor,
    bias: Tensor,
    groups: int,
    top_groups: int,
    renormalize: bool,
    scaling: float,
) -> Call:
    """See ops.router.reference."""
    experts, k = bias.shape[0], ids.shape[1]
    if groups == 1 or not renormalize:
        return lambda: router.reference(ids, weights, logits, bias, groups, top_groups, renormalize, scaling)
    score, choice = logits[:, :experts], logits.new_empty(logits.shape[0], experts)
    by_group = choice.view(choice.shape[0], groups, -1)
    members = min(2, by_group.shape[2])
    out_of_play = torch.ones(choice.shape[0], groups, 1, dtype=torch.bool)
    outside = out_of_play.squeeze(-1)
    lowest = float("-inf")

    def run() -> None:
        in_runs(torch.sigmoid_, logits)
        torch.add(score, bias, out=choice)
        worth = by_group.topk(members, dim=-1)[0].sum(-1)
        order = worth.sort(dim=-1, descending=True, stable=True)[1]
        outside.fill_(True).scatter_(1, order[:, :top_groups], False)
        by_group.masked_fill_(out_of_play, lowest)
        ids.copy_(choice.sort(dim=-1, descending=True, stable=True)[1][:, :k])
        chosen = score.gather(1, ids)
        torch.div(chosen, chosen.sum(-1, keepdim=True).add_(1e-20), out=weights).mul_(scaling)

    return run


def dense_experts(
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
) -> Call:
    """See ops.moe.dense_reference; layers with a clamp keep the reference."""
    if limit or shared_limit:
        return lambda: moe.dense_reference(out, x, ids, weights, up, down, experts, width, limit, shared_limit, rows)
    total, count = down.inputs, x.shape[0]
    both, act = x.new_empty(count, up.padded), x.new_empty(count, total)
    first, second = linear(both, x, up), linear(out, act, down)
    gate, rise = both[:, :total], both[:, total : 2 * total]
    share = x.new_empty(count, experts)
    spread, routed = share.unsqueeze(-1), act[:, : experts * width].view(count, experts, width)

    def run() -> None:
        first()
        torch.mul(silu_rows(gate), rise, out=act)
        share.zero_().scatter_(1, ids, weights)
        routed.mul_(spread)
        second()

    return run
