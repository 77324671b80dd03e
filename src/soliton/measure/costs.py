"""What a step of a block drafter costs by the number of rows that it verifies, for the schedule that weighs it."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable

import torch

from ..checkpoint import open_checkpoint
from ..config import EngineConfig
from ..errors import ConfigError
from ..runtime import load_runtime, settle
from ..sampling.params import SamplingParams
from ..speculation.schedule import Costs
from .about import commit, device_name
from .doctor import versions
from .step import WARM_UPS, Repeated, context_within


def measure_costs(
    config: EngineConfig,
    *,
    context: int | None = None,
    params: SamplingParams | None = None,
    repeats: int = 15,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Costs:
    """Times of the whole step with 1 to block + 1 rows at ``context`` tokens, medians of ``repeats``, cold weights; the
    draft's part apart. Rounds go through all rows in turn, so that a drift of the machine meets all alike."""
    config = dataclasses.replace(
        config, draft_verify="all", draft_verify_tokens=None, draft_threshold=None, draft_costs=None
    )
    checkpoint = open_checkpoint(config.model)
    settled = settle(config, checkpoint)[0]
    if settled.speculation != "dspark":
        raise ConfigError(
            f"costs by rows are of a DSpark draft, and speculation is {settled.speculation!r}: give draft, or "
            "speculation = 'dspark' where one is bundled"
        )
    assert settled.max_context is not None and settled.speculative_num_steps is not None
    context = context_within(context, settled.max_context, checkpoint.spec.max_position)
    drafts = settled.speculative_num_steps
    runtime = load_runtime(dataclasses.replace(config, draft_verify="fixed", draft_verify_tokens=drafts), checkpoint)
    drafter = runtime.parts.drafter
    assert drafter is not None and drafter.scheduler is not None
    with torch.inference_mode():
        resolved = (params or SamplingParams(temperature=0.0)).resolve({}, vocab=checkpoint.spec.vocab)
        step = Repeated(runtime, runtime.program(resolved), resolved, context)
        times: list[list[float]] = [[] for _ in range(drafts + 1)]
        for turn in range(repeats + WARM_UPS):
            progress(turn, repeats + WARM_UPS)
            for rows, found in enumerate(times, 1):
                drafter.scheduler.constant.fill_(rows)  # the step reads it from there
                found.append(step.time())
        progress(repeats + WARM_UPS, repeats + WARM_UPS)
        draft = step.phases()["draft"]
    whole = [statistics.median(found[WARM_UPS:]) for found in times]
    return Costs(
        draft_us=round(min(draft, 0.9 * whole[0]), 2),
        verify_us=tuple(round(time - min(draft, 0.9 * whole[0]), 2) for time in whole),
        model=checkpoint.name,
        draft=drafter.spec.name,
        device=device_name(runtime.parts.device),
        commit=commit(),
        versions=versions(),
        note=f"context {context}, medians of {repeats}",
    )
