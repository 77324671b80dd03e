"""What the tests of one kernel on a GPU and emulated on a CPU have in common; tensors lie where their inputs lie."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from soliton.ops import kda


def error(got: Tensor, want: Tensor) -> float:
    """Relative, by the norm."""
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm().clamp_min(1e-30))


def recurrence(
    proj: Tensor, f: Tensor, b: Tensor, past: Tensor, conv: Tensor, a: Tensor, dt: Tensor, state: Tensor, law: Any
) -> tuple[Tensor, Tensor]:
    """(outputs [R, n, 128], the states before and after each row [R + 1, n, 128, 128]), by the references in turn."""
    rows, heads = proj.shape[0], state.shape[0]
    width = heads * 128

    def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full(shape, float("nan"), dtype=dtype, device=proj.device)

    mixed = poisoned(rows, 3 * width, dtype=proj.dtype)
    kda.conv_reference(mixed, torch.cat([past, proj[:, : 3 * width]]), conv)
    qk = poisoned(rows, 2 * heads, 128)
    kda.l2norm_reference(qk, mixed[:, : 2 * width].view(rows, 2 * heads, 128), 1e-6, 128**-0.5)
    decay, beta = poisoned(rows, width), poisoned(rows, heads)
    kda.gates_reference(decay, beta, f, b, a, dt, law, -5.0)
    chain, o = poisoned(rows + 1, heads, 128, 128), poisoned(rows, heads, 128)
    chain[0] = state
    v = mixed[:, 2 * width :].view(rows, heads, 128).float()
    count = torch.tensor([rows], device=proj.device)
    kda.chain_reference(o, qk[:, :heads], qk[:, heads:], v, decay.view(rows, heads, 128), beta, chain, count)
    return o, chain


def draw_logits(style: str, rows: int, vocab: int) -> Tensor:
    """[rows, vocab + 5] on the CPU: rows are not aligned to 16 bytes."""
    wide = (rows, vocab + 5)
    logits = torch.randn(wide) * 3
    if style == "ties":
        logits = torch.randint(-3, 4, wide).float()
    if style == "equal":
        logits = torch.full(wide, 0.7)
    if style == "near":  # weights within one digit
        logits = 1 + torch.randint(0, 60, wide).float() * 2.0**-20
    if style == "peak":
        logits[:, vocab // 3] += 20
    if style == "masked":
        logits[torch.rand(wide) < 0.7] = float("-inf")
        logits[:, vocab - 1] = -0.0
    return logits
