"""The block drafter that a config asks for: found, known to fit, and made ready on a device with its schedule."""

from __future__ import annotations

import torch

from .checkpoint import Checkpoint
from .checkpoint.draft import DraftCheckpoint, bundled_draft, check_fit, open_draft
from .config import EngineConfig
from .context.stream import positions_for
from .model.draft_spec import DraftSpec, shapes
from .model.dspark import build_draft, draft_turns
from .ops.device import name
from .speculation.dspark import Drafter
from .speculation.schedule import Calibration, Costs, Schedule, Scheduler

CALIBRATION = "calibration.json"  # beside a draft's config.json


def find_draft(config: EngineConfig, checkpoint: Checkpoint) -> DraftCheckpoint | None:
    """The DSpark draft that a config asks for, its headers checked and known to fit; None where it asks for none."""
    if config.speculation in ("off", "nextn"):
        return None
    path = config.draft
    if path is None and config.speculation == "dspark":
        bundled = bundled_draft(checkpoint.name)
        path = str(bundled) if bundled is not None else None
    if path is None:
        return None
    draft = open_draft(path)
    check_fit(draft.spec, checkpoint.spec)
    return draft


def make_drafter(config: EngineConfig, draft: DraftCheckpoint, device: torch.device, dtype: torch.dtype) -> Drafter:
    """The draft on the device, and how its blocks are cut."""
    assert config.max_context is not None
    return Drafter(
        spec=draft.spec,
        weights=build_draft(draft.spec, draft, device, dtype),
        turn=draft_turns(draft.spec, positions_for(config.max_context), device),
        scheduler=_scheduler(config, draft, device),
    )


def _scheduler(config: EngineConfig, draft: DraftCheckpoint, device: torch.device) -> Scheduler | None:
    """How many drafts a step verifies; None verifies all. Temperatures that are given are checked in any case."""
    calibration = _calibration(config, draft)
    if calibration is not None:
        calibration.block(draft.spec.drafts)
    mode, costs, fixed = config.draft_verify, None, None
    if mode == "fixed":
        assert config.draft_verify_tokens is not None
        fixed = config.draft_verify_tokens + 1
    elif mode == "cost":
        assert config.draft_costs is not None
        costs = Costs.load(config.draft_costs)
    elif mode != "threshold":
        return None
    threshold = config.draft_threshold or 0.0 if mode == "threshold" else 0.0
    schedule = Schedule(mode, rows=fixed, threshold=threshold, costs=costs)  # type: ignore[arg-type]
    schedule.check(draft.spec.drafts, head=draft.spec.confidence)
    return Scheduler(schedule, draft.spec.drafts, device, calibration)


def _calibration(config: EngineConfig, draft: DraftCheckpoint) -> Calibration | None:
    if config.draft_calibration is not None:
        return Calibration.load(config.draft_calibration)
    if config.draft_verify not in ("threshold", "cost"):
        return None  # it matters to nobody
    beside = draft.path / CALIBRATION if draft.path is not None else None
    return Calibration.load(beside) if beside is not None and beside.is_file() else None


def doubts(config: EngineConfig, checkpoint: Checkpoint, draft: DraftCheckpoint) -> list[str]:
    """What measured files were made for, where that is not what they are used for; output stays right, speed may not.
    ConfigError for a file that cannot be used at all."""
    found = []
    calibration, here = _calibration(config, draft), name(torch.device(config.device))
    if calibration is not None and calibration.model not in ("", checkpoint.name):
        found.append(
            f"the draft's temperatures were fitted on {calibration.model!r}, this model is {checkpoint.name!r}; "
            "calibrate again"
        )
    if config.draft_costs is not None:
        costs = Costs.load(config.draft_costs)
        for key, there, mine in (("model", costs.model, checkpoint.name), ("device", costs.device, here)):
            if there not in ("", mine):
                found.append(
                    f"draft_costs = {config.draft_costs!r} has the times of {key} {there!r}, this is {mine!r}; "
                    "measure them here"
                )
    return found


def draft_elements(spec: DraftSpec) -> int:
    """Elements of all tensors that a draft has of its own."""
    return sum(torch.Size(shape).numel() for shape in shapes(spec).values())
