"""How many drafts of a block a step verifies: from the confidence head, or by a fixed choice; and the files it reads.

Slot j = 1 .. g of a block has a confidence logit; with its calibrated temperature, c_j = sigmoid(logit_j / T_j) is the
probability that draft j is accepted once all before it are, and a_j = c_1 .. c_j that it survives. A step of l drafts
has 1 + l live rows (the anchor's first), and yields 1 + a_1 + .. + a_l tokens on average, the bonus token included.

Sampling stays lossless as long as slot j's inclusion rests on slots <= j alone: c_j is computed from the tokens before
draft j, so nothing that depends on draft j has a say in whether it is verified (DSpark, sections on scheduling and
appendix A; the appendix has the counterexample for a choice that looks further). A threshold and the early stop are of
that kind. The best length over the whole block is not, and serves greedy steps only, where any cut is harmless.

Nothing here reads a device value on the host or makes a shape depend on one, so all of it can be captured in a graph.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor

from ..errors import ConfigError, nearest

Choice = Literal["all", "fixed", "threshold", "cost"]

# -- the rules, on tensors of any device ------------------------------------------------------------------------------


def confidences(logits: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """(conditional c, survival a), each [g], of confidence logits [g] and their temperatures [g], float32."""
    conditional = torch.sigmoid(logits / temperatures)
    return conditional, conditional.cumprod(0)


def rows_all(drafts: int, device: torch.device | str | None = None) -> Tensor:
    """Live rows, int64 [1], when every draft is verified."""
    return rows_fixed(drafts + 1, device)


def rows_fixed(rows: int, device: torch.device | str | None = None) -> Tensor:
    """Live rows, int64 [1], always the same: the anchor and rows - 1 drafts."""
    return torch.full((1,), rows, dtype=torch.int64, device=device)


def rows_threshold(conditional: Tensor, threshold: float | Tensor) -> Tensor:
    """Live rows, int64 [1]: up to the first slot whose conditional confidence [g] is below the threshold; 0 is off."""
    return _leading(~(conditional < threshold)) + 1


def rows_cost(survival: Tensor, t_draft: float | Tensor, t_verify: Tensor, early_stop: bool) -> Tensor:
    """Live rows, int64 [1], by the rate of tokens: rate[l] = (1 + a_1 + .. + a_l) / (t_draft + t_verify[l]).

    survival: [g]. t_draft: the time of a step beside its verify. t_verify: [g + 1], of 1 + l rows; float64 for sums in
    float64. early_stop: walk up from l = 0 and stop at the first rate that does not improve. Without it the best of
    all, of equal ones the shortest; a sampled step must not take that, since a_j is a function of drafts before j.
    """
    return _by_rate(survival, t_verify + t_draft, early_stop)


def _by_rate(survival: Tensor, cost: Tensor, early_stop: bool) -> Tensor:
    tokens = torch.nn.functional.pad(survival.cumsum(0, dtype=cost.dtype), (1, 0)) + 1
    rate = tokens / cost
    if early_stop:
        return _leading(rate[1:] > rate[:-1]) + 1
    return rate.argmax(0, keepdim=True) + 1  # torch takes the first of equals


def _leading(good: Tensor) -> Tensor:
    """Length of the leading run of true in [g] bool: int64 [1]."""
    return good.to(torch.int64).cumprod(0).sum(0, keepdim=True)


# -- the paper's form for a batch, as a reference ---------------------------------------------------------------------


class Admission(NamedTuple):
    """order: (request, length) as admitted, by falling survival. path[s]: throughput after s admissions. early, best:
    lengths of each request where the path first fails to rise, and at its highest point; with their throughputs."""

    order: tuple[tuple[int, int], ...]
    path: tuple[float, ...]
    early: tuple[int, ...]
    early_theta: float
    best: tuple[int, ...]
    best_theta: float


def admit(confidence: Sequence[Sequence[float]], sps: Sequence[float]) -> Admission:
    """DSpark's algorithm 1 over requests x conditional confidences; sps[B - 1]: steps a second at B verified rows.

    Admits slots one by one by falling survival (those of zero never) and follows theta = expected tokens a second. In
    plain floats: batch 1 with sps = 1 / (t_draft + t_verify) must choose what `rows_cost` does.
    """
    requests = len(confidence)
    slots: list[tuple[float, int, int]] = []
    for request, row in enumerate(confidence):
        survival = 1.0
        for length, value in enumerate(row, 1):
            survival *= value
            if survival > 0:
                slots.append((-survival, request, length))
    if len(sps) < requests + len(slots):
        raise ConfigError(f"sps has {len(sps)} entries, but up to {requests + len(slots)} rows can be verified")
    slots.sort()  # of equal survival the lower request and the shorter length, so that a request's order holds
    tokens = float(requests)
    path = [tokens * sps[requests - 1]]
    for rows, (negative, _, _) in enumerate(slots, requests):
        tokens -= negative
        path.append(tokens * sps[rows])
    early = next((s for s in range(len(slots)) if path[s + 1] <= path[s]), len(slots))
    best = max(range(len(path)), key=lambda s: path[s])
    order = tuple((request, length) for _, request, length in slots)

    def lengths(admitted: int) -> tuple[int, ...]:
        return tuple(sum(request == r for request, _ in order[:admitted]) for r in range(requests))

    return Admission(order, tuple(path), lengths(early), path[early], lengths(best), path[best])


# -- the files --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Measured times of a step in microseconds, of one draft and target on one device.

    draft_us: of all that does not grow with the rows, the draft first of all. verify_us[r - 1]: of a verify of r rows.
    More rows never cost less; where noise says so, the larger time before it is taken, and ``note`` tells. commit:
    None outside a source tree. versions: of what computes, None where absent.
    """

    draft_us: float
    verify_us: tuple[float, ...]
    model: str
    draft: str
    device: str
    commit: str | None
    versions: Mapping[str, str | None] = field(hash=False)
    note: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "draft_us", _number("draft_us", self.draft_us, zero=True))
        measured = _numbers("verify_us", self.verify_us)
        if not measured:
            raise ConfigError("'verify_us' is empty; it holds the time of 1 row, of 2 rows, and so on")
        _words(self, "model", "draft", "device")
        for key in ("commit", "note"):
            if not isinstance(value := getattr(self, key), str | None):
                raise ConfigError(f"'{key}' is {value!r}, but a text or null is needed")
        versions = self.versions
        if not isinstance(versions, Mapping) or any(
            not isinstance(name, str) or not isinstance(value, str | None) for name, value in versions.items()
        ):
            raise ConfigError(f"'versions' is {versions!r}, but texts (or null) by name are needed")
        object.__setattr__(self, "versions", dict(versions))
        rising, raised = [measured[0]], []
        for rows, value in enumerate(measured[1:], 2):
            if value < rising[-1]:
                raised.append(f"{rows} rows from {value:g} to {rising[-1]:g}")
            rising.append(max(value, rising[-1]))
        object.__setattr__(self, "verify_us", tuple(rising))
        if raised:
            told = f"times raised so that more rows never cost less: {', '.join(raised)}"
            object.__setattr__(self, "note", f"{self.note}; {told}" if self.note else told)

    @classmethod
    def load(cls, path: str | Path) -> Costs:
        """From a JSON file; ConfigError names the file, the key and the value that will not do."""
        return _load(cls, path, "measure the costs again")

    def save(self, path: str | Path) -> None:
        """As JSON, which `load` reads."""
        _save(self, path)

    def rows(self, needed: int) -> tuple[float, ...]:
        """verify_us of 1 .. needed rows; ConfigError where fewer were measured."""
        if len(self.verify_us) < needed:
            raise ConfigError(
                f"the costs cover {len(self.verify_us)} rows, but a block of {needed - 1} drafts needs {needed}; "
                "measure them again with this draft"
            )
        return self.verify_us[:needed]


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Temperatures of the confidence head by slot, and how they were found; the file is SGLang's with keys of our own.

    dataset, num_samples: what they were fitted on. ece_before, ece_after: calibration error of the survival by slot,
    with all temperatures 1 and with these. temperature: of the sampling while samples were taken, 0 is greedy.
    Everything but ``temperatures`` may be absent.
    """

    temperatures: tuple[float, ...]
    dataset: str = ""
    num_samples: int = 0
    ece_before: tuple[float, ...] = ()
    ece_after: tuple[float, ...] = ()
    temperature: float | None = None
    model: str = ""
    draft: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperatures", _numbers("temperatures", self.temperatures))
        slots = len(self.temperatures)
        if not slots:
            raise ConfigError("'temperatures' is empty; it holds one number above 0 for each draft of a block")
        for key in ("ece_before", "ece_after"):
            object.__setattr__(self, key, _numbers(key, getattr(self, key), zero=True))
            if len(errors := getattr(self, key)) not in (0, slots):
                raise ConfigError(f"'{key}' has {len(errors)} numbers beside {slots} temperatures")
        _words(self, "dataset", "model", "draft")
        samples = self.num_samples
        if isinstance(samples, bool) or not isinstance(samples, int) or samples < 0:
            raise ConfigError(f"'num_samples' is {samples!r}, but a count is needed")
        if self.temperature is not None:
            object.__setattr__(self, "temperature", _number("temperature", self.temperature, zero=True))

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """From a JSON file of ours or SGLang's; ConfigError names the file, the key and the value that will not do."""
        return _load(cls, path, "calibrate again")

    def save(self, path: str | Path) -> None:
        """As JSON, which `load` and SGLang read."""
        _save(self, path)

    def block(self, drafts: int) -> tuple[float, ...]:
        """The temperatures for a draft of so many slots; ConfigError where they are for another number."""
        if len(self.temperatures) != drafts:
            raise ConfigError(
                f"the calibration has {len(self.temperatures)} temperatures, but a block of this draft has {drafts} "
                "drafts; calibrate with this draft"
            )
        return self.temperatures


_File = TypeVar("_File", Costs, Calibration)


def _load(kind: type[_File], path: str | Path, remedy: str) -> _File:
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); {remedy}, or correct the path") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: no JSON ({error}); {remedy}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: holds {type(data).__name__}, but one JSON object is needed; {remedy}")
    keys = {f.name: f for f in fields(kind)}
    for key in data:
        if key not in keys:
            raise ConfigError(f"{path}: the key '{key}' is unknown{nearest(key, keys)}; take it out")
    for key, of in keys.items():
        if key not in data and of.default is MISSING:
            raise ConfigError(f"{path}: the key '{key}' is missing; {remedy}")
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _save(what: Costs | Calibration, path: str | Path) -> None:
    try:
        Path(path).write_text(json.dumps(asdict(what), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}); choose another path") from None


def _number(key: str, value: Any, *, zero: bool = False) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if not number or value < 0 or (value == 0 and not zero):
        raise ConfigError(f"'{key}' is {value!r}, but a finite number {'of at least' if zero else 'above'} 0 is needed")
    return float(value)


def _numbers(key: str, values: Any, *, zero: bool = False) -> tuple[float, ...]:
    if not isinstance(values, tuple | list):
        raise ConfigError(f"'{key}' is {values!r}, but a list of numbers is needed")
    return tuple(_number(f"{key}[{i}]", value, zero=zero) for i, value in enumerate(values))


def _words(of: Costs | Calibration, *keys: str) -> None:
    for key in keys:
        if not isinstance(value := getattr(of, key), str):
            raise ConfigError(f"'{key}' is {value!r}, but a text is needed")


# -- what a step calls ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Schedule:
    """Which rule chooses the live rows: ``all``; ``fixed``, always ``rows`` of them, the anchor's included;
    ``threshold``, a cut at the first conditional confidence below it (0: off); ``cost``, the rate by ``costs``."""

    mode: Choice = "all"
    rows: int | None = None
    threshold: float = 0.0
    costs: Costs | None = None

    def __post_init__(self) -> None:
        if self.mode not in get_args(Choice):
            raise ConfigError(f"the schedule '{self.mode}' is unknown; it is one of {', '.join(get_args(Choice))}")
        for mode, given in (
            ("fixed", self.rows is not None),
            ("threshold", self.threshold != 0),
            ("cost", self.costs is not None),
        ):
            if given and mode != self.mode:
                raise ConfigError(f"the schedule '{self.mode}' has no use for what '{mode}' takes; choose '{mode}'")
        if self.mode == "fixed" and (isinstance(self.rows, bool) or not isinstance(self.rows, int) or self.rows < 1):
            raise ConfigError(f"rows is {self.rows!r}, but the schedule 'fixed' needs a whole number of at least 1")
        if _number("threshold", self.threshold, zero=True) > 1:
            raise ConfigError(f"threshold is {self.threshold!r}, but a confidence lies between 0 and 1")
        if self.mode == "cost" and self.costs is None:
            raise ConfigError("the schedule 'cost' needs a file of costs; measure them, or choose 'threshold'")

    @property
    def confident(self) -> bool:
        """Whether the rule reads confidences, so that the draft has to have a confidence head."""
        return self.mode == "cost" or (self.mode == "threshold" and self.threshold > 0)

    def check(self, drafts: int, head: bool) -> None:
        """ConfigError unless a draft of so many slots, with or without a confidence head, can be scheduled so."""
        if self.rows is not None and self.rows > drafts + 1:
            raise ConfigError(
                f"rows is {self.rows}, but a block of {drafts} drafts has {drafts + 1} rows; choose 1 to {drafts + 1}"
            )
        if self.confident and not head:
            raise ConfigError(
                f"the schedule '{self.mode}' reads confidences, and this draft has no confidence head; "
                "choose 'all' or 'fixed'"
            )
        if self.costs is not None:
            self.costs.rows(drafts + 1)


class Scheduler:
    """A schedule on a device: its constants at fixed addresses, and the one call of a step.

    drafts: g. calibration: None stands for temperatures of 1.
    """

    def __init__(
        self, schedule: Schedule, drafts: int, device: torch.device | str, calibration: Calibration | None = None
    ) -> None:
        schedule.check(drafts, head=True)
        self.schedule, self.drafts = schedule, drafts
        values = (1.0,) * drafts if calibration is None else calibration.block(drafts)
        self.temperatures = torch.tensor(values, dtype=torch.float32, device=device)
        self.constant = rows_fixed(schedule.rows or drafts + 1, device)
        self.cost: Tensor | None = None
        if schedule.costs is not None:
            times = [schedule.costs.draft_us + time for time in schedule.costs.rows(drafts + 1)]
            self.cost = torch.tensor(times, dtype=torch.float64, device=device)

    def live_rows(self, logits: Tensor | None, out: Tensor, *, sampled: bool) -> Tensor:
        """The step's live rows into ``out``, int64 [1], which is returned.

        logits: the block's confidence logits, float32 [g]; None will do where the schedule reads none. sampled: a
        sampled step stops early, a greedy one takes the best length of all.
        """
        if not self.schedule.confident:
            return out.copy_(self.constant)
        assert logits is not None
        conditional, survival = confidences(logits, self.temperatures)
        if self.cost is None:
            return out.copy_(rows_threshold(conditional, self.schedule.threshold))
        return out.copy_(_by_rate(survival, self.cost, early_stop=sampled))
