"""The reference outputs of a conformance case, and what counts as agreeing with them in either dtype."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file
from torch import Tensor

from ..errors import CheckpointError

NEAR_TIE = 1e-4  # relative margin of the two best logits
CLOSE_LOGITS, CLOSE_ROUTE = 0.03, 0.01  # below these bfloat16 may choose otherwise

Pair = tuple[Tensor, Tensor]  # (the engine's, the reference's)


@dataclass(frozen=True, kw_only=True)
class Check:
    """One compared quantity. worst: the largest difference, or a count of what differs; passed None: only shown."""

    quantity: str
    worst: float
    tolerance: float | None
    passed: bool | None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Golden:
    """The reference outputs: ``data`` golden.json, ``arrays`` golden.safetensors."""

    data: dict[str, Any]
    arrays: dict[str, Tensor]

    @classmethod
    def read(cls, path: Path) -> Golden:
        """Both files; CheckpointError when one cannot be read."""
        try:
            data = json.loads((path / "golden.json").read_text(encoding="utf-8"))
            arrays = load_file(path / "golden.safetensors")
        except Exception as error:  # the reader of arrays has its own kinds; all mean the same here
            raise CheckpointError(f"{path}: golden.json or golden.safetensors cannot be read ({error})") from error
        if not isinstance(data, dict) or not isinstance(data.get("prompts", data.get("target")), list | str | dict):
            raise CheckpointError(f"{path / 'golden.json'}: an object with 'prompts' is needed; copy the case again")
        return cls(data=data, arrays=arrays)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.arrays:
            raise CheckpointError(f"golden.safetensors has no array '{name}'; copy the case again")
        return self.arrays[name]

    def __contains__(self, name: str) -> bool:
        return name in self.arrays

    def ids(self, name: str) -> list[int]:
        """An array of ids as a list."""
        return [int(token) for token in self[name].tolist()]

    @property
    def prompts(self) -> range:
        """Indices of the prompts."""
        return range(len(self.data["prompts"]))

    def suggested(self, key: str) -> float:
        """A tolerance."""
        try:
            return float(self.data["suggested"][key])
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(f"golden.json: 'suggested' has no number '{key}'; copy the case again") from None

    def kept(self, i: int) -> list[int]:
        """Accept lengths of prompt ``i``: the prompt's own token, then a round each, the last cut at the end."""
        total = len(self.ids(f"prompt.{i}.cont_ids"))
        rounds = zip(self.ids(f"mtp.{i}.round_start"), self.ids(f"mtp.{i}.accepted"), strict=True)
        return [1, *(min(accepted + 1, total - start) for start, accepted in rounds)]


@dataclass(frozen=True, kw_only=True)
class Spoken:
    """The engine's own greedy answers, one a prompt."""

    ids: list[list[int]]
    logprobs: list[list[float]]
    accept_lengths: list[list[int]]


class Judge(Protocol):
    """Decides, for one dtype, whether a quantity agrees."""

    def forced(self, pairs: Mapping[str, list[Pair]], how: str) -> Iterator[Check]:
        """Logits and hidden states with golden ids fed back."""
        ...

    def near(self, quantity: str, pairs: Iterable[Pair], note: str = "") -> Check:
        """Arrays of real numbers."""
        ...

    def chosen(self, quantity: str, made: Sequence[Any], wanted: Sequence[Any], note: str = "") -> Check:
        """Ids that follow from numbers."""
        ...

    def experts(self, trace: Mapping[str, Tensor]) -> Check:
        """Expert sets of the traced prompt."""
        ...

    def continuation(self, quantity: str, made: Sequence[Sequence[int]]) -> Check:
        """Free-running greedy ids of every prompt."""
        ...

    def logprobs(self, quantity: str, said: Spoken) -> Check:
        """Log-probabilities of the answers' own ids."""
        ...


class Exact:
    """float32: ids, expert sets and accept lengths as they are; numbers within atol * (1 + |golden|)."""

    def __init__(self, golden: Golden) -> None:
        self._golden = golden

    def forced(self, pairs: Mapping[str, list[Pair]], how: str) -> Iterator[Check]:
        """See Judge."""
        for name, listed in pairs.items():
            key = "fp32_logits_atol" if "logits" in name else "fp32_other_atol"
            yield self._within(f"{name}, {how}", listed, self._golden.suggested(key), "")

    def near(self, quantity: str, pairs: Iterable[Pair], note: str = "") -> Check:
        """See Judge."""
        key = "fp32_logits_atol" if "logits" in quantity else "fp32_other_atol"
        return self._within(quantity, pairs, self._golden.suggested(key), note)

    def chosen(self, quantity: str, made: Sequence[Any], wanted: Sequence[Any], note: str = "") -> Check:
        """See Judge."""
        return same(quantity, made, wanted, note)

    def experts(self, trace: Mapping[str, Tensor]) -> Check:
        """See Judge."""
        made, wanted = [], []
        for _, chosen, reference in _routes(self._golden, trace):
            made += chosen
            wanted += reference
        return same("trace router_experts", made, wanted, f"{len(made)} sets")

    def continuation(self, quantity: str, made: Sequence[Sequence[int]]) -> Check:
        """See Judge."""
        return same(quantity, made, [self._golden.ids(f"prompt.{i}.cont_ids") for i in self._golden.prompts])

    def logprobs(self, quantity: str, said: Spoken) -> Check:
        """See Judge."""
        return self._within(quantity, _logprobs(self._golden, said), self._golden.suggested("fp32_logits_atol"), "")

    @staticmethod
    def _within(quantity: str, pairs: Iterable[Pair], tolerance: float, note: str) -> Check:
        worst = _worst((made - wanted).abs() / (1 + wanted.abs()) for made, wanted in _fitting(pairs))
        return Check(quantity=quantity, worst=worst, tolerance=tolerance, passed=worst <= tolerance, note=note)


class Rounded:
    """bfloat16: relative errors of logits; ids may differ where the reference's choice was close."""

    def __init__(self, golden: Golden) -> None:
        self._golden = golden

    def forced(self, pairs: Mapping[str, list[Pair]], how: str) -> Iterator[Check]:
        """See Judge."""
        # A continuation's first row is its prompt's last position again: every position counts once.
        following = [(made[1:], wanted[1:]) for made, wanted in pairs["continuation logits"]]
        logits = list(_fitting([*pairs["logits"], *following]))
        errors = torch.cat([(made - wanted).norm(dim=1) / wanted.norm(dim=1) for made, wanted in logits])
        for name, part in (("median", 0.5), ("p90", 0.9)):
            limit = self._golden.suggested(f"bf16_rel_l2_{name}")
            worst = errors.quantile(part).item()
            yield Check(quantity=f"logits {name}, {how}", worst=worst, tolerance=limit, passed=worst <= limit)
        agree = torch.cat([made.argmax(1) == wanted.argmax(1) for made, wanted in logits]).float().mean().item()
        least = self._golden.suggested("bf16_teacher_forced_argmax_agreement")
        note = f"{1 - agree:.4f} of {len(errors)} positions differ"
        yield Check(quantity=f"argmax, {how}", worst=1 - agree, tolerance=1 - least, passed=agree >= least, note=note)
        yield self.near(f"hidden, {how}", pairs["hidden"])

    def near(self, quantity: str, pairs: Iterable[Pair], note: str = "") -> Check:
        """Shown as the largest relative error of an array; only what is no number fails."""
        worst = _worst((made - wanted).norm() / wanted.norm() for made, wanted in _fitting(pairs))
        passed = None if math.isfinite(worst) else False
        return Check(quantity=quantity, worst=worst, tolerance=None, passed=passed, note=note)

    def chosen(self, quantity: str, made: Sequence[Any], wanted: Sequence[Any], note: str = "") -> Check:
        """Shown: how many lists differ."""
        wrong = sum(a != b for a, b in zip(made, wanted, strict=True))
        return Check(quantity=quantity, worst=wrong, tolerance=None, passed=None, note=f"of {len(made)} {note}".strip())

    def experts(self, trace: Mapping[str, Tensor]) -> Check:
        """A set may differ where its margin is small, and where an earlier one of this or an earlier position did."""
        wrong, allowed, total = 0, 0, 0
        flipped = 10**9  # the first position with another set in a layer below: from there on the inputs differ
        for margins_of, chosen, reference in _routes(self._golden, trace):
            differ = [t for t, (a, b) in enumerate(zip(chosen, reference, strict=True)) if a != b]
            bad = [t for t in differ if t < flipped and margins_of[t] >= CLOSE_ROUTE]
            wrong, allowed, total = wrong + len(bad), allowed + len(differ) - len(bad), total + len(chosen)
            flipped = min([flipped, *differ])
        note = f"of {total} sets; {allowed} more differ where they may"
        return Check(quantity="trace router_experts", worst=wrong, tolerance=0, passed=not wrong, note=note)

    def continuation(self, quantity: str, made: Sequence[Sequence[int]]) -> Check:
        """A parting is wrong unless a logit was close there, or a routing choice of that step or an earlier one."""
        wrong, parted = [], 0
        for i, ids in enumerate(made):
            wanted = self._golden.ids(f"prompt.{i}.cont_ids")
            at = next((j for j, (a, b) in enumerate(zip(ids, wanted, strict=True)) if a != b), None)
            if at is None:
                continue
            parted += 1
            close = self._golden[f"prompt.{i}.cont_rel_margin"][at] < CLOSE_LOGITS
            routes = self._golden[f"prompt.{i}.cont_route_margin"][: at + 1]
            if not close and not (routes < CLOSE_ROUTE).any():
                wrong.append(i)
        note = f"{parted} of {len(made)} part where they may" if not wrong else f"prompts {wrong} part too early"
        return Check(quantity=quantity, worst=len(wrong), tolerance=0, passed=not wrong, note=note)

    def logprobs(self, quantity: str, said: Spoken) -> Check:
        """Shown, up to where an answer parts."""
        return self.near(quantity, _logprobs(self._golden, said))


def same(quantity: str, made: Sequence[Any], wanted: Sequence[Any], note: str = "") -> Check:
    """Lists that have to be equal; ``worst`` counts those that are not."""
    wrong = [i for i, (a, b) in enumerate(zip(made, wanted, strict=True)) if a != b]
    if wrong:
        note = f"first at {wrong[0]}: {made[wrong[0]]} is not {wanted[wrong[0]]}"
    return Check(quantity=quantity, worst=len(wrong), tolerance=0, passed=not wrong, note=note)


def margins(golden: Golden) -> Iterator[Check]:
    """How many choices of the reference were close, for reading the rest."""
    relative = torch.cat([golden[f"prompt.{i}.cont_rel_margin"] for i in golden.prompts])
    names = [f"prompt.{i}.{kind}" for i in golden.prompts for kind in ("route_margin", "cont_route_margin")]
    routes = torch.cat([golden[name] for name in names])
    for name, values, limit in (
        ("near ties of logits", relative, NEAR_TIE),
        ("close choices of logits", relative, CLOSE_LOGITS),
        ("close choices of experts", routes, CLOSE_ROUTE),
    ):
        count = int((values < limit).sum())
        note = f"of {len(values)}, margin under {limit:g}; least {values.min().item():.2g}"
        yield Check(quantity=name, worst=count, tolerance=None, passed=None, note=note)


def _fitting(pairs: Iterable[Pair]) -> Iterator[Pair]:
    for made, wanted in pairs:
        # Broadcasting would compare what cannot be compared.
        assert made.shape == wanted.shape, f"{list(made.shape)} against the reference's {list(wanted.shape)}"
        yield made, wanted


def _worst(differences: Iterable[Tensor]) -> float:
    """The largest of all; NaN if there is one, or nothing to compare, so that no comparison with it holds."""
    largest = [d.max() for d in differences]
    return torch.stack(largest).max().item() if largest else math.nan


def _routes(golden: Golden, trace: Mapping[str, Tensor]) -> Iterator[tuple[list[float], list[Any], list[Any]]]:
    """(margins, the engine's sets, the reference's) of each MoE layer, from the lowest."""
    start = "trace.router_experts."
    for layer in sorted(int(name.removeprefix(start)) for name in golden.arrays if name.startswith(start)):
        made = [set(row) for row in trace[f"router_experts.{layer}"].tolist()]
        wanted = [set(row) for row in golden[f"{start}{layer}"].tolist()]
        yield golden[f"trace.router_margin.{layer}"].tolist(), made, wanted


def _logprobs(golden: Golden, said: Spoken) -> Iterator[Pair]:
    """(the engine's, the reference's) log-probabilities of each answer, up to the first id that differs."""
    for i, (ids, values) in enumerate(zip(said.ids, said.logprobs, strict=True)):
        wanted = golden.ids(f"prompt.{i}.cont_ids")
        length = next((j for j, (a, b) in enumerate(zip(ids, wanted, strict=True)) if a != b), len(wanted))
        if length:
            law = golden[f"prompt.{i}.cont_logits"][:length].double().log_softmax(-1)
            at = torch.tensor(wanted[:length]).unsqueeze(1)
            yield torch.tensor(values[:length], dtype=torch.float64), law.gather(1, at)[:, 0]
