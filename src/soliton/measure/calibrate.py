"""Sequential temperature scaling: temperatures that make a draft's confidences mean what they say.

Samples are rounds in which the whole block was verified, with raw logits: a round that a schedule cut, or the end of
an answer, says nothing about the slots behind the cut, and has to be left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import ConfigError
from ..speculation.schedule import Calibration

__all__ = ["BINS", "FINE", "GRID", "Calibration", "calibration_error", "fit"]

# SGLang's: 41 temperatures from 0.1 to 10 at equal ratios, with 1 in the middle; 15 bins.
GRID = tuple(10 ** (i / 20 - 1) for i in range(41))
FINE = tuple(10 ** (i / 100 - 1) for i in range(201))  # what tens of thousands of rounds can tell apart
BINS = 15


def calibration_error(predicted: Tensor, happened: Tensor, bins: int = BINS) -> Tensor:
    """Expected calibration error over the first dimension: [N, ...] -> [...] float64.

    predicted: probabilities. happened: [N, ...] or what broadcasts to it, 0 or 1. Equal bins, the last one closed;
    the sum over bins of |sum of predicted - sum of happened| / N.
    """
    predicted = predicted.to(torch.float64)
    of = (predicted * bins).floor().to(torch.int64).clamp(0, bins - 1)
    gap = torch.zeros(bins, *predicted.shape[1:], dtype=torch.float64, device=predicted.device)
    return gap.scatter_add_(0, of, predicted - happened).abs().sum(0) / predicted.shape[0]


def fit(
    logits: Tensor | Sequence[Sequence[float]],
    accepted: Tensor | Sequence[int],
    *,
    dataset: str = "",
    temperature: float | None = None,
    model: str = "",
    draft: str = "",
    grid: Sequence[float] = GRID,
    bins: int = BINS,
) -> Calibration:
    """Temperatures from confidence logits [N, g] and the drafts accepted, [N] of 0 .. g.

    For slots from left to right, T_j is the temperature of the grid whose product of sigmoids up to j has the least
    calibration error against "at least j drafts were accepted", those before it being fixed; of equals the first.
    dataset, temperature, model, draft: for the record.
    """
    given = torch.as_tensor(logits, dtype=torch.float64)
    counts = torch.as_tensor(accepted, device=given.device)
    _check(given, counts, grid, bins)
    samples, slots = given.shape
    scales = torch.tensor(tuple(grid), dtype=torch.float64, device=given.device)
    happened = (counts.unsqueeze(1) > torch.arange(slots, device=given.device)).to(torch.float64)
    before = calibration_error(torch.sigmoid(given).cumprod(1), happened, bins)
    survival = torch.ones(samples, 1, dtype=torch.float64, device=given.device)
    chosen, after = [], []
    for j in range(slots):
        trials = survival * torch.sigmoid(given[:, j : j + 1] / scales)
        errors = calibration_error(trials, happened[:, j : j + 1], bins)
        best = int(errors.argmin())
        chosen.append(float(scales[best]))
        after.append(float(errors[best]))
        survival = trials[:, best : best + 1]
    return Calibration(
        temperatures=tuple(chosen),
        dataset=dataset,
        num_samples=samples,
        ece_before=tuple(before.tolist()),
        ece_after=tuple(after),
        temperature=temperature,
        model=model,
        draft=draft,
    )


def _check(logits: Tensor, accepted: Tensor, grid: Sequence[float], bins: int) -> None:
    if logits.dim() != 2 or 0 in logits.shape:
        raise ConfigError(f"confidence logits have the shape {list(logits.shape)}; samples x drafts are needed")
    samples, slots = logits.shape
    if accepted.shape != (samples,) or accepted.is_floating_point():
        raise ConfigError(
            f"accepted counts are {accepted.dtype} {list(accepted.shape)} beside {samples} samples of logits; "
            "give one whole number for each"
        )
    if bool(logits.isnan().any()):
        row, slot = logits.isnan().nonzero()[0].tolist()
        raise ConfigError(f"the confidence logit of sample {row}, draft {slot + 1} is no number; leave the sample out")
    outside = (accepted < 0) | (accepted > slots)
    if bool(outside.any()):
        row = int(outside.nonzero()[0])
        raise ConfigError(f"sample {row} has {int(accepted[row])} accepted drafts, but a block has {slots}")
    if not grid or any(not 0 < value < float("inf") for value in grid):
        raise ConfigError(f"the grid of temperatures is {list(grid)}; numbers above 0 are needed")
    if bins < 1:
        raise ConfigError(f"bins is {bins}; at least 1 is needed")
