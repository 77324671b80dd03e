"""The optimizers of a run: AdamW, or Muon for the matrices inside the layers and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .options import TrainOptions

if TYPE_CHECKING:
    from torch.optim import Optimizer

OUTSIDE = ("markov_head.markov_w", "confidence_head.")  # one side is a vocabulary, or one number


def optimizers(params: Mapping[str, nn.Parameter], options: TrainOptions) -> list[Optimizer]:
    """Without weight decay. Muon's update is scaled to the size of AdamW's, so that one rate serves both."""
    inside = {k: p for k, p in params.items() if options.optimizer == "muon" and p.ndim == 2}
    inside = {k: p for k, p in inside.items() if not k.startswith(OUTSIDE)}
    rest = [p for k, p in params.items() if k not in inside]
    made: list[Optimizer] = []
    if rest:
        made.append(
            torch.optim.AdamW(
                rest, lr=options.lr, betas=(options.beta1, options.beta2), weight_decay=0.0,
                fused=rest[0].device.type == "cuda",
            )
        )  # fmt: skip
    if inside:
        made.append(torch.optim.Muon(inside.values(), options.lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
    return made


def state(made: list[Optimizer], params: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """What they remember, as "exp_avg.NAME"; steps are not counted in it."""
    found = {}
    for optimizer in made:
        for name, p in params.items():
            for part, value in optimizer.state.get(p, {}).items():
                if part != "step":
                    found[f"{part}.{name}"] = value
    return found


def restore(
    made: list[Optimizer], params: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor], step: int
) -> None:
    """Put back what ``state`` gave after ``step`` steps."""
    names = {id(p): name for name, p in params.items()}
    for optimizer in made:
        adam = isinstance(optimizer, torch.optim.AdamW)
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            parts = ("exp_avg", "exp_avg_sq") if adam else ("momentum_buffer",)
            kept = {part: tensors.get(f"{part}.{names[id(p)]}") for part in parts}
            if any(value is None for value in kept.values()):
                continue  # saved before the first step
            # a fused AdamW counts on the device
            count = {"step": torch.tensor(float(step), device=p.device if p.is_cuda else "cpu")} if adam else {}
            optimizer.state[p] = {
                **count,
                **{part: value.to(p.device) for part, value in kept.items() if value is not None},
            }
