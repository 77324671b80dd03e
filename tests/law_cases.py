"""How a sampled answer is held against its exact law; see test_law."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import helpers as h
from soliton import Engine, SamplingParams
from soliton.sampling import accept

PASS, REJECT = 1e-6, 1e-9
CELLS = 20
PROMPT = [5, 6, 7, 30, 2]

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 1.8},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "repetition": {"repetition_penalty": 1.7},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.6},
    "bias": {"logit_bias": {3: 2.5, 9: 1.5, 20: -5.0, 33: 3.0}},
    "mixture": {
        "temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.3,
        "presence_penalty": 0.4, "frequency_penalty": 0.3, "logit_bias": {7: 2.0},
    },
    "other mixture": {"temperature": 1.5, "top_k": 8, "presence_penalty": -0.8, "frequency_penalty": 0.4},
}  # fmt: skip


@dataclass
class Drawn:
    """One token with its exact law, and the law its draft had (None where there was no draft)."""

    token: int
    law: Tensor
    draft: Tensor | None


Allowed = Callable[[Sequence[int]], Collection[int]]


def confined(logits: Tensor, tokens: Collection[int]) -> Tensor:
    """Logits [V] with -inf for all but ``tokens``; as they are where there are none."""
    if not tokens:
        return logits
    out = torch.full_like(logits, float("-inf"))
    out[list(tokens)] = logits[list(tokens)]
    return out


class Spy:
    """Keeps what the verdicts of a request saw: per output token, the draft's law at its row."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drafts: list[Tensor | None] = []
        inner = accept.sampled_chain

        def seen(target: Tensor, draft: Tensor, tokens: Tensor, rows: Tensor, *draws: Tensor) -> accept.Verdict:
            verdict = inner(target, draft, tokens, rows, *draws)
            for row in range(int(verdict.n_accepted) + 1):
                self.drafts.append(draft[row].double().clone() if row < int(rows) - 1 else None)
            return verdict

        monkeypatch.setattr(accept, "sampled_chain", seen)


def walk(
    tried: Engine,
    spy: Spy | None,
    values: dict[str, Any],
    *,
    tokens: int,
    seeds: range,
    allowed: Allowed = lambda _: (),
) -> Iterator[Drawn]:
    """``allowed``: the tokens to which a grammar confines the one after an answer so far; none where there is none."""
    judge = h.engine(h.nano() if tried.checkpoint.spec.vocab == 64 else h.micro(), max_context=2048, speculation="off")
    for seed in seeds:
        params = SamplingParams(max_tokens=tokens, seed=seed, ignore_eos=True, **values)
        if spy is not None:
            spy.drafts.clear()
        ids = tried.generate(PROMPT, params).token_ids
        logits = judge.logits(PROMPT + ids)[len(PROMPT) - 1 : -1]
        for place, token in enumerate(ids):
            exact = h.exact_law(confined(logits[place], allowed(ids[:place])), params, PROMPT, ids[:place])
            yield Drawn(token, exact, spy.drafts[place] if spy is not None else None)


def judged(drawn: Iterator[Drawn]) -> tuple[float, float, int]:
    """(least p of both orders' cells, p of the draft's favourites, tokens)."""
    g = torch.Generator().manual_seed(99)
    counts = [[0.0] * CELLS, [0.0] * CELLS]
    excess = variance = 0.0
    total = 0
    for one in drawn:
        own = float(one.law[one.token])
        if own == 0.0:
            return 0.0, 0.0, total
        liking = one.law if one.draft is None else one.draft - one.law
        inside = own * float(torch.rand(1, generator=g, dtype=torch.float64))
        orders = (liking.argsort(descending=True, stable=True), torch.arange(one.law.shape[0]))
        for cells, order in zip(counts, orders, strict=True):
            at = float(one.law[order].cumsum(0)[int((order == one.token).nonzero())]) - inside
            cells[min(max(int(at * CELLS), 0), CELLS - 1)] += 1
        total += 1
        if one.draft is not None:
            liked = one.draft > one.law
            chance = float(one.law[liked].sum())
            excess += float(liked[one.token]) - chance
            variance += chance * (1 - chance)
    p = min(h.chi_square(cells, [total / CELLS] * CELLS)[0] for cells in counts)
    return p, h.two_sided(excess / variance**0.5) if variance else 1.0, total


def joint(tried: Engine, values: dict[str, Any], *, tokens: int, seeds: range) -> tuple[float, int]:
    """Chi-square of all cells of the first ``tokens`` tokens against the product of exact laws."""
    judge = h.engine(h.nano(), max_context=2048, speculation="off", prefix_reuse="off")
    base = SamplingParams(max_tokens=tokens, ignore_eos=True, **values)
    ends = tried.checkpoint.eos_ids
    cells: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(tokens):
        grown = {}
        for done, chance in cells.items():
            exact = h.exact_law(judge.logits(PROMPT + list(done))[-1], base, PROMPT, done, ends)
            for token in exact.nonzero()[:, 0].tolist():
                grown[(*done, token)] = chance * float(exact[token])
        cells = grown
    counts = dict.fromkeys(cells, 0)
    for seed in seeds:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=seed, **values)
        ids = tuple(tried.generate(PROMPT, params).token_ids)
        if ids not in counts:
            return 0.0, len(cells)
        counts[ids] += 1
    return h.chi_square(list(counts.values()), [len(seeds) * chance for chance in cells.values()], least=5.0)
