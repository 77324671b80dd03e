"""Sampled answers have the target's law, whatever the draft: whole engines against the law written down plainly.

Two ways. *Walks*: long answers, each token held against its exact law given all before it. Tokens are ordered by how
much more the draft likes them than the target does, and the place of the drawn one (within its own mass: at random)
is uniform if and only if the law is right; 20 equal cells, chi-square; and once more in the order of ids. *Joints*:
many short answers from one prompt, all cells of the first three tokens. Engines are loaded with rules broken on purpose
as well, and must be caught.
Seeds are fixed, so no outcome varies.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import helpers as h
from helpers import threads_as_before  # noqa: F401 - takes effect by being here
from law_cases import CASES, PASS, PROMPT, REJECT, Drawn, Spy, joint, judged, walk
from soliton import Engine, SamplingParams
from soliton.sampling import accept, law, penalties
from soliton.speculation import nextn

NEXTN: dict[str, Any] = {"speculation": "nextn", "speculative_num_steps": 3}


def fresh(model: Path, **settings: Any) -> Engine:
    return h.load(model, max_context=512, prefix_reuse="off", **settings)


class TestWalks:
    @pytest.mark.parametrize("case", CASES)
    def test_with_good_drafts(self, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.check(h.nano(), CASES[case], monkeypatch, seeds=range(2))

    @pytest.mark.parametrize("case", ["top_k", "mixture"])
    def test_with_bad_drafts(self, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.check(h.nano("bad"), CASES[case], monkeypatch, seeds=range(2), steps=2)

    def test_ling_micro(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.check(h.micro(), CASES["mixture"], monkeypatch, seeds=range(2))

    @pytest.mark.parametrize("steps", [1, 5])
    def test_other_numbers_of_steps(self, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.check(h.nano("fair"), CASES["other mixture"], monkeypatch, seeds=range(2), steps=steps)

    def test_without_a_draft(self) -> None:
        tried = fresh(h.nano(), speculation="off")
        p, _, total = judged(walk(tried, None, CASES["mixture"], tokens=200, seeds=range(3)))
        assert total == 600 and p > PASS

    def test_a_draft_of_another_model_and_another_law(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Any law the draft is truly drawn from will do: here one of shuffled logits, hotter than asked for."""
        g = torch.Generator().manual_seed(4)
        shuffle = torch.randperm(64, generator=g)
        monkeypatch.setattr(nextn, "law", _Changed(lambda logits: logits[:, shuffle] * 0.7))
        self.check(h.nano(), CASES["mixture"], monkeypatch, seeds=range(2), steps=2)

    @pytest.mark.full
    @pytest.mark.timeout(3600)
    @pytest.mark.parametrize("drafter", ["good", "fair", "bad"])
    @pytest.mark.parametrize("case", CASES)
    def test_nano_at_length(self, case: str, drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.check(h.nano(drafter), CASES[case], monkeypatch, seeds=range(100, 140))

    @pytest.mark.full
    @pytest.mark.timeout(3600)
    @pytest.mark.parametrize("case", CASES)
    def test_ling_micro_at_length(self, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.check(h.micro(), CASES[case], monkeypatch, seeds=range(200, 220))

    def check(
        self, model: Path, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *, seeds: range, steps: int = 3
    ) -> None:
        tried = fresh(model, speculation="nextn", speculative_num_steps=steps)
        p, liked, total = judged(walk(tried, Spy(monkeypatch), values, tokens=150, seeds=seeds))
        assert total == 150 * len(seeds)
        assert p > PASS, f"the law differs: p = {p:.1e} over {total} tokens"
        assert liked > PASS, f"the draft's favourites come too often or too seldom: p = {liked:.1e}"


class _Changed:
    """The module ``law`` with logits changed before a draft's law is made: the law stays the one that is drawn from."""

    def __init__(self, change: Any) -> None:
        self._change = change

    def distribution(self, logits: Tensor, *rest: Tensor) -> Tensor:
        return law.distribution(self._change(logits), *rest)

    def pick(self, probs: Tensor, uniform: Tensor) -> Tensor:
        return law.pick(probs, uniform)


def all_accepted(
    target: Tensor, draft: Tensor, tokens: Tensor, rows: Tensor, accepted: Tensor, final: Tensor
) -> accept.Verdict:
    """Wrong: every draft stays."""
    return _sound(target, draft, tokens, rows, accepted * 0 - 1, final)


def no_residual(
    target: Tensor, draft: Tensor, tokens: Tensor, rows: Tensor, accepted: Tensor, final: Tensor
) -> accept.Verdict:
    """Wrong: after a refusal the target's own law is drawn from, not what the draft left of it."""
    verdict = _sound(target, draft, tokens, rows, accepted, final)
    n = verdict.n_accepted
    token = law.pick(target.index_select(0, n), final.index_select(0, n))
    return verdict._replace(final=token, tokens=verdict.tokens.index_copy(0, n, token))


def half_ratio(
    target: Tensor, draft: Tensor, tokens: Tensor, rows: Tensor, accepted: Tensor, final: Tensor
) -> accept.Verdict:
    """Wrong: a draft stays with probability p, not p / q."""
    told = draft.gather(1, tokens[: draft.shape[0], None])[:, 0]
    return _sound(target, draft, tokens, rows, accepted[: draft.shape[0]] / told, final)


_sound = accept.sampled_chain


class TestBrokenRules:
    """The tests above must be able to fail."""

    @pytest.mark.parametrize("rule", [all_accepted, no_residual, half_ratio])
    def test_a_wrong_verdict_is_caught(self, rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(accept, "sampled_chain", rule)
        self.caught(CASES["plain"], monkeypatch)

    def test_drafts_not_drawn_from_the_law_they_are_said_to_have(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tried = _Changed(lambda logits: logits)
        monkeypatch.setattr(tried, "pick", lambda probs, uniform: probs.argmax(-1), raising=False)
        monkeypatch.setattr(nextn, "law", tried)
        self.caught(CASES["plain"], monkeypatch, drafter="fair", seeds=8)

    def test_penalties_that_forget_the_drafts_before_a_row(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            penalties, "draft_counts", lambda tokens, rows, vocab: torch.zeros(rows, vocab, dtype=torch.int32)
        )
        self.caught({"presence_penalty": -2.0, "top_k": 12}, monkeypatch, drafter="good", steps=5)

    def test_a_temperature_that_is_off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        inner = law.distribution
        monkeypatch.setattr(law, "distribution", lambda logits, t, *rest: inner(logits, t * 1.7, *rest))
        tried = fresh(h.nano(), speculation="off")
        p, _, total = judged(walk(tried, None, CASES["plain"], tokens=200, seeds=range(3)))
        assert p < REJECT, f"not caught: p = {p:.1e} over {total} tokens"

    def caught(
        self,
        values: dict[str, Any],
        monkeypatch: pytest.MonkeyPatch,
        *,
        drafter: str = "bad",
        steps: int = 1,
        seeds: int = 5,
    ) -> None:
        tried, spy = fresh(h.nano(drafter), speculation="nextn", speculative_num_steps=steps), Spy(monkeypatch)
        for count in (2, seeds):  # a gross fault shows at once
            p, liked, total = judged(walk(tried, spy, values, tokens=200, seeds=range(count)))
            if min(p, liked) < REJECT:
                return
        pytest.fail(f"not caught: p = {p:.1e} and {liked:.1e} over {total} tokens")


class TestJoints:
    SMALL: dict[str, dict[str, Any]] = {  # noqa: RUF012 - a table
        "top_k": {"top_k": 4},
        "mixture": {"temperature": 1.3, "top_k": 4, "presence_penalty": 0.8, "repetition_penalty": 1.3,
                    "logit_bias": {5: 3.0}},
    }  # fmt: skip

    @pytest.mark.parametrize(("case", "drafter"), [("top_k", "good"), ("mixture", "bad")])
    def test_first_three_tokens(self, case: str, drafter: str) -> None:
        """The first token has no draft; the other two come out of one drafted step or two."""
        tried = h.engine(h.nano(drafter), max_context=64, **NEXTN)
        p, cells = joint(tried, self.SMALL[case], tokens=3, seeds=range(200))
        assert cells > 8 and p > PASS

    def test_a_wrong_rule_is_caught(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(accept, "sampled_chain", all_accepted)
        p, _ = joint(h.engine(h.nano("bad"), max_context=64, **NEXTN), self.SMALL["top_k"], tokens=3, seeds=range(150))
        assert p < REJECT

    @pytest.mark.full
    @pytest.mark.timeout(3600)
    @pytest.mark.parametrize("settings", [NEXTN, {"speculation": "off"}], ids=["nextn", "plain"])
    @pytest.mark.parametrize("drafter", ["good", "bad"])
    @pytest.mark.parametrize("case", SMALL)
    def test_at_length(self, case: str, drafter: str, settings: dict[str, Any]) -> None:
        tried = h.engine(h.nano(drafter), max_context=64, **settings)
        p, cells = joint(tried, self.SMALL[case], tokens=3, seeds=range(1000, 7000))
        assert cells > 40 and p > PASS

    @pytest.mark.parametrize("steps", [0, 3])
    def test_min_tokens_holds_the_end_back(self, steps: int) -> None:
        """Stop ids cannot occur before min_tokens, also inside a drafted block; afterwards they do."""
        settings = {"speculation": "nextn", "speculative_num_steps": steps} if steps else {"speculation": "off"}
        tried = h.engine(h.nano(), max_context=64, **settings)
        ends = [1, 14, 40, 24, 46, 21, 49, 17, 20]
        lengths = []
        for seed in range(30):
            params = SamplingParams(max_tokens=30, min_tokens=6, seed=seed, stop_token_ids=ends)
            answer = tried.generate(PROMPT, params)
            assert not set(answer.token_ids[:6]) & {*ends, h.NANO_EOS}
            lengths.append(len(answer.token_ids))
        assert min(lengths) == 7 and len(set(lengths)) > 4

    def test_the_law_under_min_tokens(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tried, spy = fresh(h.nano("fair"), **NEXTN), Spy(monkeypatch)
        judge = h.engine(h.nano(), max_context=2048, speculation="off")
        ends = [1, 14, 40, 24]

        def drawn() -> Iterator[Drawn]:
            for seed in range(5):
                params = SamplingParams(max_tokens=120, min_tokens=120, seed=seed, stop_token_ids=ends)
                spy.drafts.clear()
                ids = tried.generate(PROMPT, params).token_ids
                rows = judge.logits(PROMPT + ids)[len(PROMPT) - 1 : -1]
                for place, token in enumerate(ids):
                    exact = h.exact_law(rows[place], params, PROMPT, ids[:place], [*ends, h.NANO_EOS])
                    yield Drawn(token, exact, spy.drafts[place])

        p, liked, total = judged(drawn())
        assert total == 600 and p > PASS and liked > PASS


class TestSeeds:
    VALUES: tuple[dict[str, Any], ...] = ({"seed": 11}, {"seed": 11, "top_k": 6, "presence_penalty": 0.5})

    @pytest.mark.parametrize("values", VALUES)
    def test_same_seed_same_ids_at_every_depth_and_after_anything(self, values: dict[str, Any]) -> None:
        params = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=1, **values)
        expected = None
        for depth, reuse in itertools.product((0, 1, 2, 4), ("fast", "off")):
            tried = h.engine(h.nano(), max_context=512, run_ahead=depth, prefix_reuse=reuse, **NEXTN)
            for _ in range(2):
                got = h.facts(tried.generate(PROMPT, params))
                expected = expected or got
                assert got == expected
                tried.generate([9, 9], SamplingParams(max_tokens=7, seed=1, ignore_eos=True))
                next(tried.stream([3, 3, 3], SamplingParams(max_tokens=20, seed=2, ignore_eos=True)))

    def test_other_seeds_other_ids(self) -> None:
        tried = h.engine(h.nano(), max_context=512, **NEXTN)
        seen = {
            tuple(tried.generate(PROMPT, SamplingParams(max_tokens=20, seed=s, ignore_eos=True)).token_ids)
            for s in (0, 1, 2, 2**32, 2**62, 2**63 - 1, -1)
        }
        assert len(seen) == 6, "-1 and 2**63 - 1 are the same seed, all others differ"

    def test_no_seed_means_another_one_each_time(self) -> None:
        tried = h.engine(h.nano(), max_context=512, **NEXTN)
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        assert tried.generate(PROMPT, params).token_ids != tried.generate(PROMPT, params).token_ids

    def test_the_engines_own_seed(self) -> None:
        tried = h.engine(h.nano(), max_context=512, seed=11, **NEXTN)
        bare = tried.generate(PROMPT, SamplingParams(max_tokens=20, ignore_eos=True)).token_ids
        assert bare == tried.generate(PROMPT, SamplingParams(max_tokens=20, ignore_eos=True)).token_ids
        assert bare == tried.generate(PROMPT, SamplingParams(max_tokens=20, seed=11, ignore_eos=True)).token_ids
        assert bare != tried.generate(PROMPT, SamplingParams(max_tokens=20, seed=12, ignore_eos=True)).token_ids

    def test_top_k_1_is_greedy(self) -> None:
        tried = h.engine(h.nano(), max_context=512, **NEXTN)
        best = tried.generate(PROMPT, h.greedy(20)).token_ids
        assert tried.generate(PROMPT, SamplingParams(max_tokens=20, top_k=1, ignore_eos=True)).token_ids == best
        cold = SamplingParams(max_tokens=20, temperature=1e-6, ignore_eos=True)
        assert tried.generate(PROMPT, cold).token_ids == best
