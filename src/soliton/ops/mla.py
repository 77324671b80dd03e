"""Absorbed attention over the latent cache, for a few rows at the end of one sequence.

Letters: R rows, n heads, C latent width (kv_rank), D = C + rope width, L cached positions, B positions a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .runs import in_runs, sigmoid_rows

BLOCK = 128


def store_reference(cache: Tensor, latent: Tensor, key: Tensor, positions: Tensor) -> None:
    """cache[positions[r]] = concat(latent[r], key[r]). cache: [max_len, D]; latent: [R, C]; key: [R, D-C]."""
    cache.index_copy_(0, positions, torch.cat([latent, key], 1))


def attend_reference(out: Tensor, q: Tensor, cache: Tensor, positions: Tensor, rows: Tensor, scale: float) -> None:
    """out[r, h] = softmax_{p <= positions[r]}(scale * q[r, h] . cache[p]) @ cache[p, :C].

    out: [R, n, C]; q: [R, n, D]; cache: [max_len, D]; positions: int64 [R], ascending, the rows' own entries are
    stored already; rows: int64 [1], how many of the R rows are live: rows beyond it see what the last live row's
    block holds and mean nothing. float32 inside, one rounding.

    Order of the sums, whatever R and the cache's length: absolute blocks of BLOCK positions; within a block as one
    product of fixed inner size; blocks one after the other. The maximum is taken over all visible positions first
    (a maximum has no order), so a block without a visible position adds exact zeros. Scores are computed as
    cache @ q^T because a product with a transposed cache would change bits with R.
    """
    live = int(rows)
    end = int(positions[live - 1]) + 1
    blocks = -(-end // BLOCK)
    span = blocks * BLOCK
    cache[end:span].zero_()  # stale rows of the last block must not turn 0 * NaN into NaN
    table = cache[:span].float()
    heads, wide = q.shape[1], q.shape[0] * q.shape[1]
    latent = out.shape[2]
    q_t = q.float().reshape(wide, -1).t().contiguous()
    scores_t = torch.empty(span, wide, dtype=torch.float32, device=q.device)
    for b in range(0, span, BLOCK):
        torch.mm(table[b : b + BLOCK], q_t, out=scores_t[b : b + BLOCK])
    scores = scores_t.t().contiguous().mul_(scale)
    first = int(positions[0]) // BLOCK * BLOCK  # every row sees all of the blocks before
    hidden = torch.arange(first, span, device=q.device) > positions.clamp_max(end - 1).unsqueeze(1)
    scores.view(-1, heads, span)[..., first:].masked_fill_(hidden.unsqueeze(1), float("-inf"))
    weights = in_runs(torch.exp_, scores.sub_(scores.amax(-1, keepdim=True)))
    # cumsum runs in order, so blocks of zeros at the end leave the total as it was
    total = weights.view(wide, blocks, BLOCK).sum(-1).cumsum(-1)[:, -1:]
    acc = torch.mm(weights[:, :BLOCK], table[:BLOCK, :latent])
    for b in range(BLOCK, span, BLOCK):
        acc.addmm_(weights[:, b : b + BLOCK], table[b : b + BLOCK, :latent])
    out.copy_(acc.div_(total).view(-1, heads, latent))


def gate_reference(out: Tensor, o: Tensor, gate: Tensor) -> None:
    """out[R, n, V] = o * sigmoid(gate[R, n]) per head, float32 inside, one rounding; out may be o."""
    opened = sigmoid_rows(gate).unsqueeze(-1)
    if out.dtype == torch.float32:
        torch.mul(o, opened, out=out)
    else:
        out.copy_(o.float() * opened)
