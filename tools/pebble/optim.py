"""Muon for the matrices, fused AdamW for everything else, the balancing rule for expert biases."""

from __future__ import annotations

import torch
from model import Pebble
from torch import Tensor, nn

ADAM_NAMES = (".gate", ".b_proj", "conv1d")
NS = (3.4445, -4.7750, 2.0315)


def orthogonalise(g: Tensor) -> Tensor:
    """Five Newton-Schulz steps on a stack of matrices [*, m, n] with m <= n, in bfloat16."""
    x = g.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = NS
    for _ in range(5):
        s = x @ x.mT
        x = a * x + (b * s + c * (s @ s)) @ x
    return x


class Muon:
    """Momentum, orthogonalised update, decoupled decay; matrices of one shape are stepped together."""

    def __init__(self, params: list[nn.Parameter], lr: float, decay: float, momentum: float = 0.95):
        self.lr, self.decay, self.momentum, self.factor = lr, decay, momentum, 1.0
        self.params = params
        self.buffers = [torch.zeros_like(p) for p in params]
        self.groups: dict[tuple[int, int], list[int]] = {}
        for i, p in enumerate(params):
            m, n = p.shape[-2:]
            self.groups.setdefault((min(m, n), max(m, n)), []).append(i)

    @torch.no_grad()
    def step(self) -> None:
        """One update of all matrices."""
        grads = [p.grad for p in self.params]
        torch._foreach_lerp_(self.buffers, grads, 1 - self.momentum)
        updates = torch._foreach_lerp(grads, self.buffers, self.momentum)
        lr = self.lr * self.factor
        for (m, n), members in self.groups.items():
            stacks = []
            for i in members:
                u = updates[i] if updates[i].shape[-2] <= updates[i].shape[-1] else updates[i].mT
                stacks.append(u.reshape(-1, m, n))
            done = orthogonalise(torch.cat(stacks)) * (0.2 * n**0.5)
            for i, u in zip(members, done.split([s.shape[0] for s in stacks]), strict=True):
                p = self.params[i]
                u = u if p.shape[-2] <= p.shape[-1] else u.mT
                p.mul_(1 - lr * self.decay).add_(u.reshape(p.shape).to(p.dtype), alpha=-lr)

    def state_dict(self) -> list[Tensor]:
        """The momentum buffers."""
        return self.buffers

    def load_state_dict(self, state: list[Tensor]) -> None:
        """Restore the momentum buffers."""
        torch._foreach_copy_(self.buffers, state)


class Optimiser:
    """Both optimisers over chosen parameters, with one schedule factor."""

    def __init__(self, named: list[tuple[str, nn.Parameter]], muon_lr: float, adam_lr: float, decay: float):
        fast, matrices, rest = [], [], []
        for name, p in named:
            if name in ("word_embeddings", "lm_head"):
                fast.append(p)
            elif p.ndim < 2 or p.shape[-2] < 16 or name.endswith(ADAM_NAMES):
                rest.append(p)
            else:
                matrices.append(p)
        self.all = [*fast, *matrices, *rest]
        self.muon = Muon(matrices, muon_lr, decay)
        groups = [{"params": g, "lr": lr, "base": lr} for g, lr in ((fast, adam_lr), (rest, adam_lr)) if g]
        device = matrices[0].device.type
        self.adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0, fused=device == "cuda")

    def step(self, factor: float) -> Tensor:
        """Clip, update everything at a share of the peak rates, clear gradients; returns the norm."""
        norm = nn.utils.clip_grad_norm_(self.all, 1.0, foreach=True)
        for group in self.adam.param_groups:
            group["lr"] = group["base"] * factor
        self.muon.factor = factor
        self.muon.step()
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        for p in self.muon.params:
            p.grad = None
        return norm

    def state_dict(self) -> dict:
        """State of both."""
        return {"muon": self.muon.state_dict(), "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        """Restore both."""
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])


@torch.no_grad()
def balance(model: Pebble, rate: float) -> None:
    """Move each expert's selection bias against the sign of its load error."""
    for block in model.moe_blocks():
        if block.load is not None:
            block.expert_bias += rate * torch.sign(block.load.mean() - block.load)
