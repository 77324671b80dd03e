"""A block drafter's attention: queries of one block over context and block, keys and values in one cache.

Letters: B rows of a block, n query heads, m key/value heads, d head width, P positions of the cache. The cache of a
layer is [2, P, m, d], keys (normed and rotated) then values: committed positions hold the context's, the block's own
lie right behind them, and the next context rows are written over those.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .norm import inverse_rms


def turned(x: Tensor, turn: Tensor) -> Tensor:
    """Rotate pairs (j, j + d/2) of x[R, n, d] float32 by turn[R, d/2, 2] = (cos, sin)."""
    first, second = x.chunk(2, -1)
    cos, sin = turn.unsqueeze(1).unbind(-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def query_reference(out: Tensor, q: Tensor, weight: Tensor, turn: Tensor, eps: float) -> None:
    """out[R, n, d] = turned(rmsnorm(q) * weight) per head; q: [R, n * d]; weight: [d] float32. One rounding."""
    x = q.view(out.shape).float()
    out.copy_(turned((x * inverse_rms(x, eps)).mul_(weight), turn))


def store_reference(cache: Tensor, kv: Tensor, weight: Tensor, turn: Tensor, positions: Tensor, eps: float) -> None:
    """cache[:, positions[r]] = turned(rmsnorm(k) * weight), v of kv[R, 2 * m * d], all keys before all values."""
    keys, values = kv.view(kv.shape[0], 2, *cache.shape[2:]).unbind(1)
    x = keys.float()
    made = turned((x * inverse_rms(x, eps)).mul_(weight), turn)
    cache[0].index_copy_(0, positions, made.to(cache.dtype))
    cache[1].index_copy_(0, positions, values.to(cache.dtype))


def attend_reference(out: Tensor, q: Tensor, cache: Tensor, length: Tensor) -> None:
    """out[b, h] = softmax over the positions < length + B of q[b, h] . k / sqrt(d), times v; every row of the block
    sees all context and all of the block. out, q: [B, n, d]; length: int64 [1]. float32 inside, one rounding."""
    rows, heads, width = q.shape
    end = int(length) + rows
    keys, values = cache[:, :end].float().transpose(1, 2)  # [m, end, d] each
    groups = keys.shape[0]
    asked = q.float().view(rows, groups, heads // groups, width).permute(1, 2, 0, 3).reshape(groups, -1, width)
    scores = torch.bmm(asked, keys.transpose(1, 2)).mul_(width**-0.5)
    found = torch.bmm(scores.softmax(-1), values)
    out.copy_(found.view(groups, heads // groups, rows, width).permute(2, 0, 1, 3).reshape(out.shape))
