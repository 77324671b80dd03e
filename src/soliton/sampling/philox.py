"""Philox4x32-10, a counter-based random generator, in torch int64 arithmetic.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); the tests hold the
known-answer vectors published with it. A number depends on (seed, position, stream, lane) alone: not on the step that
asks for it, the run-ahead depth, the executor or the number of rows.

Words of the counter: position low, position high, stream, block of four lanes. Words of the key: seed low, seed high.

A draw at one (position, stream) may be asked for in several steps (a draft that was thrown away and made again), but
the output may depend on it only once. This holds for the streams below: a verdict never looks at accept draws behind
the first rejection, and a position that got its final token is never sampled again.
"""

from __future__ import annotations

import torch
from torch import Tensor

STREAM_DRAFT = 0  # picks the draft token of a position
STREAM_ACCEPT = 1  # accepts or rejects that draft token
STREAM_FINAL = 2  # picks the token after a rejection, the bonus token, and every token of plain decoding

_MASK = 0xFFFFFFFF
_MUL = (0xD2511F53, 0xCD9E8D57)  # multiply counter words 0 and 2
_WEYL = (0x9E3779B9, 0xBB67AE85)  # advance key words 0 and 1
_ROUNDS = 10


def philox4x32(counter: Tensor, key: Tensor) -> Tensor:
    """counter [..., 4] and key [..., 2], int64 holding 32-bit words, broadcast together -> [..., 4] 32-bit words.

    The 64-bit products wrap around in int64; their high word is read back with a shift and a mask.
    """
    device = counter.device
    # Even words (0, 2) get multiplied; odd words (1, 3) get mixed in. Words swap pairs each round.
    mul = _pair(_MUL, device)
    weyl = _pair(_WEYL, device)
    even, odd, key = counter[..., 0::2], counter[..., 1::2], key & _MASK
    for turn in range(_ROUNDS):
        product = even * mul
        high = (product >> 32) & _MASK
        # New word 0 = high(2) ^ word 1 ^ key 0, word 2 = high(0) ^ word 3 ^ key 1; word 1 = low(2), word 3 = low(0).
        even = high.flip(-1) ^ odd ^ key
        odd = (product & _MASK).flip(-1)
        if turn + 1 < _ROUNDS:
            key = (key + weyl) & _MASK
    return torch.stack((even[..., 0], odd[..., 0], even[..., 1], odd[..., 1]), dim=-1)


def _pair(values: tuple[int, int], device: torch.device) -> Tensor:
    """Two constants as an int64 tensor made by kernels alone, with no copy from the host."""
    return torch.arange(2, device=device, dtype=torch.int64) * (values[1] - values[0]) + values[0]


def words(seed: Tensor, position: Tensor, stream: int | Tensor, count: int) -> Tensor:
    """``count`` 32-bit words for each position: [..., count] int64.

    seed: one-element or broadcastable int64, 0 <= seed < 2**63; position: int64 [...]; stream: a number or an int64
    tensor that broadcasts against position (so one call can serve several streams).
    """
    if isinstance(stream, Tensor):
        position, streams = position + torch.zeros_like(stream), stream + torch.zeros_like(position)
    else:
        streams = torch.full_like(position, stream)
    blocks = (count + 3) // 4
    block = torch.arange(blocks, device=position.device, dtype=torch.int64).expand(*position.shape, blocks)
    pos = position.unsqueeze(-1).expand_as(block)
    counter = torch.stack((pos & _MASK, (pos >> 32) & _MASK, streams.unsqueeze(-1).expand_as(block), block), dim=-1)
    if seed.numel() == 1:
        seed = seed.reshape(())
    key = torch.stack((seed & _MASK, (seed >> 32) & _MASK), dim=-1)
    if key.dim() > 1:
        key = key.unsqueeze(-2)
    return philox4x32(counter, key).flatten(-2)[..., :count]


def uniform(seed: Tensor, position: Tensor, stream: int | Tensor, lanes: int = 1) -> Tensor:
    """float32 in [0, 1) with 24 random bits: shape of position for one lane, [..., lanes] for more.

    Every value is a multiple of 2**-24, so 1.0 cannot occur. Arguments as in `words`.
    """
    out = (words(seed, position, stream, lanes) >> 8).to(torch.float32) * 2.0**-24
    return out.squeeze(-1) if lanes == 1 else out
