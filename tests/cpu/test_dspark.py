"""DSpark in whole engines: greedy output is plain's whatever is drafted, cut or reused, and sampled answers have the
target's law."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import draft_cases as d
import helpers as h
from helpers import threads_as_before  # noqa: F401 - takes effect by being here
from law_cases import CASES, PASS, Spy, joint, judged, walk
from soliton import Engine, SamplingParams
from soliton.errors import CheckpointError, ConfigError
from soliton.speculation import dspark

COSTS = [100.0, 110.0, 118.0, 160.0, 161.0, 230.0]
SCHEDULES: dict[str, dict[str, Any]] = {
    "all": {},
    "fixed": {"draft_verify": "fixed", "draft_verify_tokens": 2},
    "threshold": {"draft_verify": "threshold", "draft_threshold": 0.45},
    "cost": {"draft_costs": d.costs(COSTS)},
}
DRAFTS = {"golden": lambda: d.DATA / "dspark-ling-micro", "random": lambda: d.random_draft(h.micro())}
HEADS = {"none": {"markov_rank": 0}, "gated": {"markov_head_type": "gated"}, "rnn": {"markov_head_type": "rnn"}}
for form, changes in HEADS.items():
    DRAFTS[form] = lambda c=changes: d.random_draft(h.micro(), confidence_head_with_markov=False, **c)
DRAFTS |= {"dflash": d.dflash_draft, "few tokens": d.few_tokens_draft}
PROMPTS = [[5, 6, 7, 8], [9], [i % 300 for i in range(70)]]


def prompts() -> list[list[int]]:
    golden = load_file(h.micro() / "golden.safetensors")["prompt.2.ids"]
    return [*PROMPTS, golden.tolist()]


def tried(draft: Path, **settings: Any) -> Engine:
    return h.engine(h.micro(), max_context=256, speculation="dspark", draft=str(draft), **settings)


def plain(tokens: int) -> list[Any]:
    engine = h.engine(h.micro(), max_context=256, speculation="off", prefix_reuse="off")
    return [h.facts(engine.generate(p, h.greedy(tokens, logprobs=2))) for p in prompts()]


class TestGreedy:
    @pytest.mark.parametrize("schedule", list(SCHEDULES))
    @pytest.mark.parametrize("draft", ["golden", "random"])
    def test_every_schedule_at_every_depth(self, draft: str, schedule: str) -> None:
        want = plain(48)
        for depth in (0, 1, 4):
            engine = tried(DRAFTS[draft](), run_ahead=depth, **SCHEDULES[schedule])
            for prompt, expected in zip(prompts(), want, strict=True):
                answer = engine.generate(prompt, h.greedy(48, logprobs=2))
                assert h.facts(answer) == expected
                most = 3 if schedule == "fixed" else 6
                assert max(answer.stats.accept_lengths) <= most

    @pytest.mark.parametrize("draft", list(DRAFTS))
    def test_every_head(self, draft: str) -> None:
        engine = tried(DRAFTS[draft]())
        assert [h.facts(engine.generate(p, h.greedy(40, logprobs=2))) for p in prompts()] == plain(40)

    def test_a_draft_of_few_tokens_drafts_those_alone(self) -> None:
        engine = tried(DRAFTS["few tokens"]())
        engine.generate(PROMPTS[0], h.greedy(12))
        drafts = engine._ready().relay.tokens[1:].tolist()
        assert all(token % 4 == 0 for token in drafts) and len(drafts) == 5

    @pytest.mark.parametrize("reuse", ["fast", "exact"])
    def test_the_past_changes_nothing(self, reuse: str) -> None:
        """Prefixes of answers, sampled requests and readers that leave, before each; rejected rows lie everywhere."""
        engine = tried(DRAFTS["golden"](), prefix_reuse=reuse, prefill_chunk=16, **SCHEDULES["cost"])
        for prompt, want in zip(prompts(), plain(48), strict=True):
            engine.generate(prompt, SamplingParams(max_tokens=20, temperature=1.1, seed=4, presence_penalty=0.3))
            stream = engine.stream([*prompt, 3], h.greedy(30))
            next(stream)
            stream.close()  # type: ignore[attr-defined]
            first = engine.generate(prompt, h.greedy(48, logprobs=2))
            assert h.facts(first) == want
            longer = [*prompt, *first.token_ids[:29]]
            again = engine.generate(longer, h.greedy(19, logprobs=2))
            assert again.token_ids == first.token_ids[29:]

    def test_what_a_checkpoint_brings_back_drafts_as_before(self) -> None:
        """Context rows made of saved features are those that the prompt made: the same drafts, bit by bit."""
        engine = tried(DRAFTS["golden"]())
        prompt = prompts()[2]
        cold = engine.generate(prompt, h.greedy(48))
        warm = engine.generate(prompt, h.greedy(48))
        assert warm.stats.cached_tokens > 60 and warm.stats.accept_lengths == cold.stats.accept_lengths

    def test_the_end_of_the_context(self) -> None:
        engine = h.engine(h.micro(), max_context=40, speculation="dspark", draft=str(DRAFTS["golden"]()))
        want = h.engine(h.micro(), max_context=40, speculation="off")
        for length in (33, 38, 39):
            prompt = [i % 50 for i in range(length)]
            one, other = (e.generate(prompt, h.greedy(None)) for e in (engine, want))  # type: ignore[arg-type]
            assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)

    def test_confidences_decide(self) -> None:
        """A high threshold leaves plain decoding, a step of one row each; none at all verifies the block."""
        lengths = {}
        for threshold in (0.0, 0.999999):
            engine = tried(DRAFTS["golden"](), draft_verify="threshold", draft_threshold=threshold)
            lengths[threshold] = engine.generate(prompts()[0], h.greedy(40)).stats.accept_lengths
        assert max(lengths[0.999999]) == 1 and max(lengths[0.0]) > 1


class TestSampled:
    @pytest.mark.parametrize("schedule", list(SCHEDULES))
    @pytest.mark.parametrize("case", ["plain", "mixture"])
    def test_walks(self, case: str, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Long answers, each token against its exact law, the draft's confidences hanging on what was drawn."""
        engine = h.load(
            h.nano(),
            max_context=512,
            prefix_reuse="off",
            speculation="dspark",
            draft=str(d.bigram_draft()),
            **SCHEDULES[schedule],
        )
        p, liked, total = judged(walk(engine, Spy(monkeypatch), CASES[case], tokens=150, seeds=range(4)))
        assert total == 600 and min(p, liked) > PASS

    def test_joint_of_the_first_tokens(self) -> None:
        engine = h.engine(
            h.nano(), max_context=64, speculation="dspark", draft=str(d.bigram_draft()), **SCHEDULES["cost"]
        )
        p, cells = joint(engine, {"top_k": 4}, tokens=3, seeds=range(200))
        assert cells > 8 and p > PASS

    def test_the_same_seed_at_every_depth(self) -> None:
        params = SamplingParams(max_tokens=60, temperature=0.9, top_k=20, seed=3, ignore_eos=True)
        found = []
        for depth in (0, 2, 4):
            engine = h.engine(
                h.nano(), max_context=128, speculation="dspark", draft=str(d.bigram_draft()), run_ahead=depth,
                **SCHEDULES["threshold"],
            )  # fmt: skip
            found.append([engine.generate([5, 6, 7], params).token_ids for _ in range(2)])
        assert all(one == found[0] for one in found) and found[0][0] == found[0][1]

    def test_a_sampled_step_stops_early(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What a step hands its schedule: whether tokens are drawn, which forbids looking at the whole block."""
        seen: list[bool] = []
        inner = dspark._schedule

        def spy(scheduler: Any, logits: torch.Tensor, out: torch.Tensor, sampled: bool) -> None:
            seen.append(sampled)
            inner(scheduler, logits, out, sampled)

        monkeypatch.setattr(dspark, "_schedule", spy)
        engine = h.load(h.micro(), speculation="dspark", draft=str(DRAFTS["golden"]()), **SCHEDULES["cost"])
        engine.generate([1, 2, 3], h.greedy(8))
        assert seen and not any(seen)
        seen.clear()
        engine.generate([1, 2, 3], SamplingParams(max_tokens=8, temperature=1.0, seed=1, ignore_eos=True))
        assert seen and all(seen)


class TestRefused:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"hidden_size": 128}, "128"),
            ({"vocab_size": 512}, "512"),
            ({"num_target_layers": 30}, "30"),
            ({"target_layer_ids": [0, 5]}, "5"),
        ],
    )
    def test_a_draft_of_another_target(self, changes: dict[str, Any], message: str) -> None:
        draft = d.write(h.micro(), d.config_for(h.micro(), **changes), 0, {})
        with pytest.raises(ConfigError, match=message):
            Engine.load(str(h.micro()), device="cpu", draft=str(draft))

    def test_files_at_fault(self, tmp_path: Path) -> None:
        with pytest.raises((CheckpointError, ConfigError), match="nowhere"):
            Engine.load(str(h.micro()), device="cpu", draft=str(tmp_path / "nowhere"))
        spoiled = d.copied("dspark-ling-micro")
        (spoiled / "calibration.json").write_text('{"temperatures": [1.0, 2.0]}', encoding="utf-8")
        with pytest.raises(ConfigError, match="2 temperatures, but a block of this draft has 5"):
            Engine.load(str(h.micro()), device="cpu", draft=str(spoiled), draft_verify="threshold", draft_threshold=0.5)
        with pytest.raises(ConfigError, match="cover 2 rows, but a block of 5 drafts needs 6"):
            Engine.load(str(h.micro()), device="cpu", draft=str(DRAFTS["golden"]()), draft_costs=d.costs([1.0, 2.0]))
