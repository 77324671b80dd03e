"""Kimi Delta Attention: short convolution, gates and the delta-rule recurrence.

Letters: R rows, n heads, K key channels, V value channels, W convolution width, P = n*K (or n*V for values).
State layout: [n, K, V] float32, axis 1 the key channel. Per row, in float32:

    S <- diag(exp g) S;  u = beta (v - S^T k);  S <- S + k u^T;  o = S^T (q K^-1/2)

with q and k L2-normalised per head (epsilon inside the root, on the sum). Source: arXiv 2510.26692 and the gate law
of the checkpoint's owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .runs import in_runs, sigmoid_rows


def conv_reference(out: Tensor, window: Tensor, weight: Tensor) -> None:
    """Causal depthwise convolution + SiLU: out[i, c] = silu(sum_j weight[j, c] * window[i + j, c]).

    out: [R, C]; window: [W-1+R, C], the last W-1 inputs of the past, then this step's; weight: [W, C] float32,
    weight[W-1] meets the current row. Sums in tap order in float32; rounded once to out's dtype.
    """
    rows = out.shape[0]
    acc = out if out.dtype == torch.float32 else torch.empty(out.shape, dtype=torch.float32, device=out.device)
    window = window.float()
    torch.mul(window[:rows], weight[0], out=acc)
    for tap in range(1, weight.shape[0]):
        acc.addcmul_(window[tap : tap + rows], weight[tap])
    in_runs(torch.ops.aten.silu_, acc)
    if acc is not out:
        out.copy_(acc)


def gates_reference(
    decay: Tensor,
    beta: Tensor,
    f: Tensor,
    b: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    law: Literal["bounded", "softplus"],
    lower_bound: float,
) -> None:
    """decay = exp(g) and beta = sigmoid(b), float32.

    decay: [R, n*K]; beta: [R, n]; f: [R, n*K] forget projection; b: [R, n]; a = exp(A_log) repeated per key channel
    [n*K]; dt_bias [n*K]. bounded: g = lower_bound * sigmoid(a (f + dt_bias)); softplus: g = -a softplus(f + dt_bias).
    """
    torch.add(f.float(), dt_bias, out=decay)
    if law == "bounded":
        in_runs(torch.sigmoid_, decay.mul_(a))
        decay.mul_(lower_bound)
    else:
        decay.copy_(torch.cat([F.softplus(part) for part in decay.split(1)])).mul_(a).neg_()
    in_runs(torch.exp_, decay)
    beta.copy_(sigmoid_rows(b))


def l2norm_reference(out: Tensor, x: Tensor, eps: float, scale: float) -> None:
    """Normalise the heads of q and k: out = x / sqrt(sum(x^2) + eps) over the last axis, float32, q times ``scale``.

    out, x: [R, 2n, K], the first n heads are q's.
    """
    x = x.float()
    inverse = (x * x).sum(-1, keepdim=True).add_(eps).rsqrt_()
    inverse[:, : x.shape[1] // 2].mul_(scale)
    torch.mul(x, inverse, out=out)


class RowViews:
    """The rows of a recurrence's operands, each in the shape in which ``recur`` uses it."""

    def __init__(self, o: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> None:
        self.columns, self.weights = k.unsqueeze(-1).unbind(0), decay.unsqueeze(-1).unbind(0)
        self.values, self.strengths, self.outputs = v.unbind(0), beta.unsqueeze(-1).unbind(0), o.unbind(0)


def recur(
    views: RowViews, reads: Sequence[Tensor], qk: Sequence[Tensor], before: Sequence[Tensor], after: Sequence[Tensor]
) -> None:
    """The recurrence over rows, row r from before[r] into after[r] (the same tensor: in place).

    The decay is folded into k and q (reads[r] [n, 2, K] = (k, q) * decay), so that one pass over the old state gives
    both S^T k and S^T q, and o = S^T q + (q.k) u needs no pass over the new one.
    """
    for r in range(len(before)):
        read = torch.bmm(reads[r], before[r])
        u = (views.values[r] - read[:, 0]).mul_(views.strengths[r])
        torch.mul(before[r], views.weights[r], out=after[r])
        after[r].baddbmm_(views.columns[r], u.unsqueeze(1))
        torch.addcmul(read[:, 1], qk[r], u, out=views.outputs[r])


def _recur(
    o: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, before: list[Tensor], after: list[Tensor]
) -> None:
    rows = len(before)
    reads = torch.stack([k[:rows], q[:rows]], 2).mul_(decay[:rows].unsqueeze(2)).unbind(0)
    qk = (q[:rows] * k[:rows]).sum(-1, keepdim=True).unbind(0)
    recur(RowViews(o, k, v, decay, beta), reads, qk, before, after)


def chain_reference(
    o: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, states: Tensor, rows: Tensor
) -> None:
    """The verify chain: row r starts from states[r] and leaves its post-state in states[r + 1].

    o, v: [R, n, V]; q, k, decay: [R, n, K]; beta: [R, n]; states: [R+1, n, K, V], all float32; rows: int64 [1], rows
    beyond it are left untouched. states[0] is the committed state and is only read.
    """
    chain = states.unbind(0)
    live = int(rows)
    _recur(o, q, k, v, decay, beta, list(chain[:live]), list(chain[1 : live + 1]))


def sweep_reference(o: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> None:
    """Prefill as the same recurrence, in place: bit for bit what decoding the rows one by one gives.

    Shapes as in chain_reference; state: [n, K, V] float32, updated.
    """
    same = [state] * q.shape[0]
    _recur(o, q, k, v, decay, beta, same, same)


def commit_reference(states: Tensor, window: Tensor, taken: Tensor, current: Tensor) -> None:
    """Make the state after ``taken`` rows the committed one, for all layers; taken 0 leaves everything.

    states: [R+1, layers, n, K, V], slot 0 committed, slot i the state after i rows; window: [W-1+R, layers, C], its
    first W-1 rows the committed tail, then the step's rows; taken: int64 [1] in 0..R; current: int64 [1], 0 here.
    """
    tail = window.shape[0] - states.shape[0] + 1
    if states.device.type == "cpu":  # the count is in host memory: one copy instead of two
        count = int(taken)
        if count:
            states[0].copy_(states[count])
            window[:tail].copy_(window[count : count + tail].clone())
        return
    states[0].copy_(states.index_select(0, taken)[0])
    window[:tail].copy_(window.index_select(0, torch.arange(tail, device=window.device) + taken))


def chunk_reference(
    o: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, chunk: int = 16
) -> None:
    """Prefill in chunks of ``chunk`` rows (the UT transform of the delta rule): few large products, other rounding.

    Shapes as in sweep_reference. Inside a chunk the cumulative log-decay G gives k' = k exp(G) and k'' = k exp(-G);
    16 rows of a decay bounded by exp(-5) keep exp(-G) inside float32, which is why the chunk is short. With the
    unbounded softplus law it is computed in float64.
    """
    heads = q.shape[1]
    wide = torch.float64
    s = state.to(wide)
    for at in range(0, q.shape[0], chunk):
        end = min(at + chunk, q.shape[0])
        qc, kc, vc = (t[at:end].transpose(0, 1).to(wide) for t in (q, k, v))
        bc = beta[at:end].t().to(wide)
        g = decay[at:end].transpose(0, 1).to(wide).clamp_min(1e-30).log().cumsum(1)
        rows = end - at
        # pairwise exp(G_i - G_j), j <= i, is bounded by one whatever the law
        weigh = (g.unsqueeze(2) - g.unsqueeze(1)).clamp_max(0).exp()
        inner = torch.einsum("hik,hjk,hijk->hij", kc, kc, weigh).tril(-1) * bc.unsqueeze(2)
        eye = torch.eye(rows, dtype=wide, device=q.device).expand(heads, rows, rows)
        carried = torch.bmm(kc * g.exp(), s)
        u = torch.linalg.solve_triangular(eye + inner, (vc - carried) * bc.unsqueeze(2), upper=False)
        attend = torch.einsum("hik,hjk,hijk->hij", qc, kc, weigh).tril()
        o[at:end] = (torch.bmm(qc * g.exp(), s) + torch.bmm(attend, u)).transpose(0, 1).to(o.dtype)
        last = g[:, -1:]
        s = s * last.exp().transpose(1, 2) + torch.bmm((kc * (last - g).exp()).transpose(1, 2), u)
    state.copy_(s)
