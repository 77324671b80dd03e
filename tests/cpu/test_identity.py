"""Greedy output is the same, byte for byte, however it is decoded: plain or with drafts, at any depth, after anything.

The reference of every test is plain decoding at run-ahead depth 0 of a cold engine. On a CPU every op keeps its bits
for any number of rows, so equality also holds across thread counts, chunks and cold or warm; what is promised across
those is less (same tokens except at near ties), and the test for it counts the near ties.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import helpers as h
from draft_cases import costs
from helpers import threads_as_before  # noqa: F401 - takes effect by being here
from soliton import Engine, RequestError, SamplingParams
from soliton.speculation.verify import Mode
from soliton.step.executor import EagerExecutor
from soliton.step.loop import Loop
from soliton.step.program import MODES

STEPS = (1, 2, 3, 4, 5)
DEPTHS = (0, 1, 2, 4)
NANO = "nano"
PLAIN: dict[str, Any] = {"speculation": "off", "run_ahead": 0}
Facts = tuple[Any, ...]


def model(name: str) -> str | Path:
    return {"nano": h.nano, "ling-micro": h.micro, "kimi-micro": lambda: h.micro("kimi-micro")}.get(
        name, lambda: name
    )()


def nextn(steps: int, **settings: Any) -> dict[str, Any]:
    return {"speculation": "nextn", "speculative_num_steps": steps, **settings}


def text_prompts(count: int) -> list[str]:
    """Held-out prompts, spread over the kinds."""
    texts = [p["prompt"] for p in h.heldout() if "prompt" in p]
    return texts[:: len(texts) // count][:count]


@functools.cache
def reference(name: str, prompts: tuple[Any, ...], tokens: int, context: int, dtype: str = "auto") -> list[Facts]:
    plain = h.engine(model(name), max_context=context, dtype=dtype, **PLAIN)
    out = []
    for prompt in prompts:
        plain.reset()
        out.append(h.facts(plain.generate(prompt, h.greedy(tokens, logprobs=3))))
    return out


def same(
    name: str,
    prompts: Sequence[Any],
    tokens: int,
    settings: dict[str, Any],
    *,
    context: int = 1024,
    between: Callable[[Engine], None] | None = None,
    rounds: int = 1,
) -> float:
    """Check every prompt under ``settings`` against the reference; returns the mean accept length seen."""
    dtype = settings.get("dtype", "auto")
    frozen = tuple(tuple(p) if isinstance(p, list) else p for p in prompts)
    expected = reference(name, frozen, tokens, context, dtype)
    tried = h.engine(model(name), max_context=context, **settings)
    lengths: list[float] = []
    for _ in range(rounds):
        for prompt, want in zip(frozen, expected, strict=True):
            if between is not None:
                between(tried)
            got = tried.generate(prompt, h.greedy(tokens, logprobs=3))
            assert h.facts(got) == want, f"{name} {settings}: other than plain for {str(prompt)[:60]!r}"
            lengths += got.stats.accept_lengths[1:]
    return sum(lengths) / max(len(lengths), 1)


class TestSteps:
    @pytest.mark.parametrize("depth", DEPTHS)
    @pytest.mark.parametrize("steps", STEPS)
    def test_nano_at_every_number_of_steps_and_depth(self, steps: int, depth: int) -> None:
        prompts = h.prompts_of(64, (1, 9, 40))
        mean = same(NANO, prompts, 40, nextn(steps, run_ahead=depth))
        assert mean > 1.3, "drafts must be accepted for this test to mean something"

    @pytest.mark.parametrize("drafter", ["fair", "bad"])
    def test_the_quality_of_drafts_changes_nothing(self, drafter: str) -> None:
        prompt = h.prompts_of(64, (12,))[0]
        expected = reference(NANO, (tuple(prompt),), 64, 1024)[0]
        other = h.engine(h.nano(drafter), max_context=1024, **nextn(3))
        answer = other.generate(prompt, h.greedy(64, logprobs=3))
        assert h.facts(answer) == expected
        assert answer.stats.accept_length is not None
        assert answer.stats.accept_length < 2.2

    @pytest.mark.parametrize("steps", [1, 3, 5])
    def test_ling_micro(self, steps: int) -> None:
        mean = same("ling-micro", h.prompts_of(320, (5, 33)), 48, nextn(steps, run_ahead=steps - 1))
        assert mean > 1.2

    @pytest.mark.parametrize("depth", DEPTHS)
    def test_plain_at_every_depth(self, depth: int) -> None:
        same("kimi-micro", h.prompts_of(300, (4, 17)), 24, {"speculation": "off", "run_ahead": depth})

    @pytest.mark.parametrize(("steps", "depth"), [(1, 0), (3, 2), (5, 4)])
    def test_pebble(self, steps: int, depth: int) -> None:
        same("pebble", text_prompts(3), 64, nextn(steps, run_ahead=depth))

    @pytest.mark.parametrize("settings", [{}, {"draft_verify": "threshold", "draft_threshold": 0.5, "run_ahead": 3}])
    def test_pebble_and_its_block_drafter(self, settings: dict[str, Any]) -> None:
        assert same("pebble", text_prompts(6), 64, {"speculation": "dspark", **settings}) > 2

    @pytest.mark.parametrize("steps", [1, 4])
    @pytest.mark.parametrize("name", [NANO, "ling-micro"])
    def test_bfloat16(self, name: str, steps: int) -> None:
        same(name, h.prompts_of(64, (1, 21)), 40, nextn(steps, dtype="bfloat16"))

    def test_each_step_verifies_what_it_should(self) -> None:
        """The first step has no drafts; a step gives 1 to S + 1 tokens; all of them add up."""
        tried = h.engine(model(NANO), max_context=1024, **nextn(4))
        answer = tried.generate(h.prompts_of(64, (1,))[0], h.greedy(60))
        lengths = answer.stats.accept_lengths
        assert lengths[0] == 1 and sum(lengths) == 60
        assert all(1 <= n <= 5 for n in lengths) and max(lengths) > 2


class TestPrompts:
    def test_every_length_from_1_to_130(self) -> None:
        prompts = [h.prompts_of(64, (n,), seed=n)[0] for n in range(1, 131)]
        same(NANO, prompts, 5, nextn(3), context=256)

    @pytest.mark.parametrize("chunk", [1, 2, 3, 64, 512])
    @pytest.mark.parametrize("settings", [PLAIN, nextn(2)], ids=["plain", "nextn"])
    def test_prefill_chunks(self, settings: dict[str, Any], chunk: int) -> None:
        prompts = h.prompts_of(320, (1, 2, 3, 4, 33, 65, 130))
        same("ling-micro", prompts, 6, {**settings, "prefill_chunk": chunk}, context=256)

    @pytest.mark.parametrize("chunk", [1, 3, 512])
    def test_prefill_chunks_of_a_model_without_rotation(self, chunk: int) -> None:
        same("kimi-micro", h.prompts_of(300, (1, 34, 70)), 4, {**PLAIN, "prefill_chunk": chunk}, context=256)

    @pytest.mark.parametrize("steps", [0, *STEPS])
    def test_up_to_the_exact_end_of_the_context(self, steps: int) -> None:
        """max_context 67 is no multiple of anything; the last steps want rows beyond it."""
        settings = nextn(steps) if steps else PLAIN
        tried = h.engine(model(NANO), max_context=67, **settings)
        wide = h.engine(model(NANO), max_context=1024, **PLAIN)
        for length in (1, 40, 62, 63, 64, 65, 66):
            prompt = h.prompts_of(64, (length,), seed=3)[0]
            answer = tried.generate(prompt, SamplingParams(temperature=0.0, ignore_eos=True, logprobs=1))
            assert len(prompt) + len(answer.token_ids) == 67
            assert answer.finish_reason == "length"
            assert h.facts(answer) == h.facts(wide.generate(prompt, h.greedy(67 - length, logprobs=1)))
        with pytest.raises(RequestError, match="67 tokens, but max_context is 67"):
            tried.generate([1] * 67)


def sampled_between(engine: Engine) -> None:
    engine.generate([3, 1, 2], SamplingParams(max_tokens=9, temperature=1.3, seed=5, presence_penalty=0.5))


def closed_between(engine: Engine) -> None:
    stream = engine.stream([9, 8, 7, 6], h.greedy(40, logit_bias={5: 4.0}))
    next(stream), next(stream)
    stream.close()  # type: ignore[attr-defined]


def refused_between(engine: Engine) -> None:
    with pytest.raises(RequestError):
        engine.generate([1, 2], SamplingParams(max_tokens=3, top_p=7.0))
    with pytest.raises(RequestError):
        engine.generate([1, 10**6])


def failed_between(engine: Engine) -> None:
    with h.failing(engine, "commit"), pytest.raises(h.Injected):
        engine.generate([4, 4, 4], h.greedy(30))


def aborted_between(engine: Engine) -> None:
    stream = engine.stream([2, 2, 9], h.greedy(40))
    next(stream)
    engine.abort()
    assert [p.finish_reason for p in stream][-1] == "abort"


BETWEEN = [sampled_between, closed_between, refused_between, failed_between, aborted_between]


class TestHistory:
    @pytest.mark.parametrize("between", BETWEEN)
    @pytest.mark.parametrize("settings", [{**PLAIN, "run_ahead": 2}, nextn(3)], ids=["plain", "nextn"])
    def test_nothing_that_came_before_leaves_a_trace(
        self, settings: dict[str, Any], between: Callable[[Engine], None]
    ) -> None:
        prompts = h.prompts_of(64, (2, 35))
        same(NANO, prompts, 24, settings, between=between, rounds=2)

    @pytest.mark.parametrize("phase", ["refill", "draft", "verify", "verdict", "commit", "extend", "publish"])
    def test_an_error_inside_a_step_leaves_an_engine_that_answers(self, phase: str) -> None:
        """Also where the failed request's prefix is asked for again: no half-made checkpoint is used."""
        prompt = h.prompts_of(64, (6,))[0]
        tried, cold = (h.engine(model(NANO), max_context=1024, prefix_reuse=m, **nextn(3)) for m in ("fast", "off"))
        expected = cold.generate(prompt, h.greedy(30, logprobs=2))
        with h.failing(tried, phase) as calls, pytest.raises(h.Injected):
            tried.generate(prompt, h.greedy(30, logprobs=2))
        assert calls[0] >= 3
        assert h.facts(tried.generate(prompt, h.greedy(30, logprobs=2))) == h.facts(expected)
        for cut in range(1, 14):
            longer = prompt + expected.token_ids[:cut] + [7]
            got = tried.generate(longer, h.greedy(6, logprobs=2))
            assert h.facts(got) == h.facts(cold.generate(longer, h.greedy(6, logprobs=2)))
            tried.reset()
            with h.failing(tried, phase), pytest.raises(h.Injected):
                tried.generate(prompt, h.greedy(30, logprobs=2))


class TestWarm:
    """`fast` and `exact` restore checkpoints; on a CPU both equal a cold run, log-probabilities to the last bit."""

    @pytest.mark.parametrize("reuse", ["exact", "fast"])
    @pytest.mark.parametrize("steps", [0, 1, 4])
    def test_warm_equals_cold(self, steps: int, reuse: str) -> None:
        settings = nextn(steps) if steps else PLAIN
        prompts = h.prompts_of(320, (40, 97))
        prompts += [prompts[1][:70] + prompts[0], prompts[0] + [5], prompts[1]]
        settings = {**settings, "prefix_reuse": reuse, "prefill_chunk": 16}
        tried = h.engine(model("ling-micro"), max_context=256, **settings)
        frozen = tuple(map(tuple, prompts))
        expected = reference("ling-micro", frozen, 10, 256)
        cached = []
        for _ in range(2):
            for prompt, want in zip(frozen, expected, strict=True):
                got = tried.generate(prompt, h.greedy(10, logprobs=3))
                assert h.facts(got) == want
                cached.append(got.stats.cached_tokens)
        assert cached[0] == 0 and all(cached[5:]), "the second round is warm"

    def test_exact_takes_only_what_prefill_made_at_multiples_of_the_chunk(self) -> None:
        tried = h.engine(model(NANO), max_context=512, prefix_reuse="exact", prefill_chunk=16, **nextn(3))
        prompt = h.prompts_of(64, (50,))[0]
        first = tried.generate(prompt, h.greedy(40))
        assert first.stats.cached_tokens == 0
        assert tried.generate(prompt, h.greedy(4)).stats.cached_tokens == 48
        followed = tried.generate(prompt + first.token_ids + [3], h.greedy(4))
        assert followed.stats.cached_tokens == 48, "the answer was made by decoding"


class TestAcross:
    """Across settings: the same tokens except from a near tie on. Near ties are counted, differences too."""

    NEAR = 1e-4

    def check(self, name: str, prompts: Sequence[Any], tokens: int, variants: Sequence[dict[str, Any]]) -> None:
        base = h.engine(model(name), max_context=1024, **PLAIN)
        expected = [base.generate(p, h.greedy(tokens)) for p in prompts]
        margins = []
        for answer in expected:
            whole = answer.prompt_ids + answer.token_ids
            top = base.logits(whole)[len(answer.prompt_ids) - 1 : -1].topk(2).values
            margins.append(((top[:, 0] - top[:, 1]) / top[:, 0].abs()).tolist())
        near = sum(m < self.NEAR for row in margins for m in row)
        differences = 0
        for settings in variants:
            threads = settings.get("threads", 1)
            rest = {k: v for k, v in settings.items() if k != "threads"}
            tried = h.engine(model(name), threads=threads, max_context=1024, **rest)
            for want, row in zip(expected, margins, strict=True):
                got = tried.generate(want.prompt_ids, h.greedy(tokens)).token_ids
                if got != want.token_ids:
                    differences += 1
                    place = next(i for i, (a, b) in enumerate(zip(got, want.token_ids, strict=True)) if a != b)
                    assert row[place] < self.NEAR, f"{name} {settings}: token {place} differs, margin {row[place]:.2e}"
        total = sum(map(len, margins))
        print(
            f"\n{name}: {near} near ties in {total} tokens, {differences} answers differ over {len(variants)} settings"
        )

    VARIANTS: tuple[dict[str, Any], ...] = (
        {**PLAIN, "threads": 2},
        {**nextn(3), "threads": 2},
        {**nextn(2), "prefill_chunk": 3},
        {**nextn(5), "prefix_reuse": "exact", "prefill_chunk": 64},
        {**nextn(1), "prefix_reuse": "off", "run_ahead": 4},
    )

    def test_ling_micro(self) -> None:
        self.check("ling-micro", h.prompts_of(320, (3, 90)), 24, self.VARIANTS)

    def test_pebble(self) -> None:
        self.check("pebble", text_prompts(1), 16, self.VARIANTS[1:3])

    @pytest.mark.full
    @pytest.mark.timeout(3600)
    def test_pebble_whole(self) -> None:
        self.check("pebble", text_prompts(20), 256, self.VARIANTS)

    def test_reading_equals_decoding(self) -> None:
        """engine.logits over prompt and answer has the bits of the steps that made the answer."""
        for name, vocab in ((NANO, 64), ("ling-micro", 320)):
            tried = h.engine(model(name), max_context=1024, **nextn(3))
            answer = tried.generate(h.prompts_of(vocab, (20,))[0], h.greedy(40, logprobs=20))
            rows = tried.logits(answer.prompt_ids + answer.token_ids)[19:-1]
            laws = torch.log_softmax(rows.double(), -1)
            assert rows.argmax(-1).tolist() == answer.token_ids
            assert answer.logprobs is not None
            for row, told in zip(laws, answer.logprobs, strict=True):
                assert told.logprob == pytest.approx(float(row[told.token_id]), abs=1e-6)
                assert [i for i, _ in told.top] == row.topk(20).indices.tolist()


SCHEDULES = (
    {}, {"draft_verify": "fixed", "draft_verify_tokens": 3}, {"draft_verify": "threshold", "draft_threshold": 0.6},
    {"draft_costs": costs([10.0, 11.0, 12.0, 13.0, 20.0, 21.0, 22.0, 40.0, 41.0], 5.0)},
)  # fmt: skip


@pytest.mark.full
@pytest.mark.timeout(7200)
class TestWholeGrid:
    """The acceptance grid: pebble, 20 prompts, 256 tokens; each axis in full, the others at their defaults."""

    TOKENS, COUNT = 256, 20

    @pytest.mark.parametrize("depth", DEPTHS)
    @pytest.mark.parametrize("steps", [0, *STEPS])
    def test_steps_and_depths(self, steps: int, depth: int) -> None:
        settings = nextn(steps, run_ahead=depth) if steps else {"speculation": "off", "run_ahead": depth}
        mean = same("pebble", text_prompts(self.COUNT), self.TOKENS, settings, context=2048)
        print(f"\npebble, {steps} steps, depth {depth}: accept length {mean:.2f}")

    @pytest.mark.parametrize("depth", DEPTHS)
    @pytest.mark.parametrize("schedule", SCHEDULES)
    def test_schedules_and_depths(self, schedule: dict[str, Any], depth: int) -> None:
        settings = {"speculation": "dspark", "run_ahead": depth, **schedule}
        mean = same("pebble", text_prompts(self.COUNT), self.TOKENS, settings, context=2048)
        print(f"\npebble, DSpark {schedule}, depth {depth}: accept length {mean:.2f}")

    @pytest.mark.parametrize("steps", [0, 3])
    def test_two_threads(self, steps: int) -> None:
        """Within two threads; that this equals one thread too is TestAcross's."""
        prompts = text_prompts(self.COUNT)
        plain = h.engine("pebble", threads=2, max_context=2048, **PLAIN)
        expected = [h.facts(plain.generate(p, h.greedy(self.TOKENS, logprobs=3))) for p in prompts]
        for s in STEPS if steps else ():
            tried = h.engine("pebble", threads=2, max_context=2048, **nextn(s))
            for prompt, want in zip(prompts, expected, strict=True):
                assert h.facts(tried.generate(prompt, h.greedy(self.TOKENS, logprobs=3))) == want

    @pytest.mark.parametrize("between", BETWEEN)
    @pytest.mark.parametrize("steps", [0, 3])
    def test_history(self, steps: int, between: Callable[[Engine], None]) -> None:
        settings = nextn(steps) if steps else {"speculation": "off"}
        same("pebble", text_prompts(self.COUNT), self.TOKENS, settings, context=2048, between=between)

    @pytest.mark.parametrize("steps", STEPS)
    def test_every_prompt_length(self, steps: int) -> None:
        prompts = [h.prompts_of(4096, (n,), seed=n)[0] for n in range(1, 131)]
        same("pebble", prompts, 16, nextn(steps))

    @pytest.mark.parametrize("chunk", [1, 2, 3, 64, 512])
    @pytest.mark.parametrize("steps", [0, *STEPS])
    def test_chunks(self, steps: int, chunk: int) -> None:
        settings = nextn(steps, prefill_chunk=chunk) if steps else {**PLAIN, "prefill_chunk": chunk}
        same("pebble", text_prompts(self.COUNT), 32, settings, context=2048)

    @pytest.mark.parametrize("reuse", ["exact", "fast", "off"])
    @pytest.mark.parametrize("steps", [0, *STEPS])
    def test_cold_and_warm(self, steps: int, reuse: str) -> None:
        settings = nextn(steps) if steps else {"speculation": "off"}
        settings |= {"prefix_reuse": reuse, "prefill_chunk": 32}
        same("pebble", text_prompts(self.COUNT), 64, settings, context=2048, rounds=2)

    @pytest.mark.parametrize("steps", [0, *STEPS])
    def test_the_end_of_the_context(self, steps: int) -> None:
        settings = nextn(steps) if steps else PLAIN
        tried = h.engine("pebble", max_context=333, **settings)
        wide = h.engine("pebble", max_context=1024, **PLAIN)
        for length in (1, 70, 200, 300, 327, 328, 329, 330, 331, 332):
            prompt = h.prompts_of(4096, (length,), seed=3)[0]
            got = tried.generate(prompt, SamplingParams(temperature=0.0, ignore_eos=True))
            assert h.facts(got) == h.facts(wide.generate(prompt, h.greedy(333 - length)))

    @pytest.mark.parametrize("steps", STEPS)
    def test_bfloat16(self, steps: int) -> None:
        same("pebble", text_prompts(5), 128, nextn(steps, dtype="bfloat16"))


# relay fields and stream parts that say what has been committed: a frozen step may touch none of them
STANDING = (
    "anchor", "length", "drafted", "stopped", "generated", "limit", "min_tokens", "stop_mask", "temperature", "top_k",
    "top_p", "min_p", "presence", "frequency", "repetition", "generator_seed", "counts", "prompt_seen", "bias", "seed",
)  # fmt: skip


def standing(engine: Engine) -> dict[str, torch.Tensor]:
    runtime = engine._runtime
    assert runtime is not None
    relay, stream = runtime.relay, runtime.stream
    length = int(relay.length)
    kept = {name: getattr(relay, name) for name in STANDING}
    kept |= {"kv": stream.kv[:, :length], "state": stream.states[0], "tail": stream.windows[: stream.tail]}
    kept |= {"boundary": stream.boundary}
    if stream.draft_kv is not None:
        kept["draft_kv"] = stream.draft_kv[:length]
    return {name: t.clone() for name, t in kept.items()}


class TestFrozen:
    @pytest.mark.parametrize("early", [False, True])
    @pytest.mark.parametrize("mode", MODES, ids=str)
    def test_a_frozen_step_leaves_stream_and_relay_as_they_were(self, mode: Mode, early: bool) -> None:
        tried = h.engine(model(NANO), max_context=256, **nextn(3))
        runtime = tried._runtime
        assert runtime is not None
        values: dict[str, Any] = {"temperature": 0.9 if mode.sampled else 0.0, "seed": 4, "ignore_eos": True}
        if mode.processors:
            values |= {"frequency_penalty": 0.2, "logit_bias": {3: 1.0}}
        tried.generate([5, 6, 7], SamplingParams(max_tokens=21, **values))
        assert int(runtime.relay.stopped) == 1
        before = standing(tried)
        executor = EagerExecutor(runtime.relay, runtime.stream, early=early)
        with torch.inference_mode():
            for _ in range(3):
                executor.launch(runtime.programs[mode])
                assert int(runtime.relay.taken) == 0 and int(runtime.relay.reason) == 0
                assert runtime.relay.new_tokens.tolist() == [-1] * 4
        after = standing(tried)
        changed = [name for name, value in before.items() if not torch.equal(value, after[name])]
        assert changed == []

    def test_steps_that_never_leave_early_give_the_same_answers(self) -> None:
        """What a captured graph will do: every phase of every step runs."""
        whole, early = (h.load(model(NANO), max_context=256, run_ahead=4, **nextn(3)) for _ in range(2))
        runtime = whole._runtime
        assert runtime is not None
        runtime.loop = Loop(runtime.relay, EagerExecutor(runtime.relay, runtime.stream, early=False), 4)
        for values in ({"temperature": 0.0}, {"seed": 8, "temperature": 0.8}, {"seed": 8, "presence_penalty": 0.7}):
            params = SamplingParams(max_tokens=30, logprobs=2, ignore_eos=True, **values)
            for prompt in ([1], [5, 6, 7], [5, 6, 7]):
                assert h.facts(whole.generate(prompt, params)) == h.facts(early.generate(prompt, params))


class TestAddresses:
    def test_stay_as_they_are(self) -> None:
        tried = h.engine(model(NANO), max_context=256, **nextn(3))
        runtime = tried._runtime
        assert runtime is not None
        before = runtime.relay.addresses() | {n: t.data_ptr() for n, t in runtime.stream.tensors().items()}
        for disturb in BETWEEN:
            disturb(tried)
        tried.generate([1, 2], h.greedy(20))
        assert before == runtime.relay.addresses() | {n: t.data_ptr() for n, t in runtime.stream.tensors().items()}

    def test_a_replaced_buffer_is_noticed(self) -> None:
        tried = h.load(model(NANO), max_context=256, **nextn(2))
        runtime = tried._runtime
        assert runtime is not None
        for holder, names in ((runtime.relay, runtime.relay.tensors()), (runtime.stream, runtime.stream.tensors())):
            for name, buffer in names.items():
                object.__setattr__(holder, name, buffer.clone())
                with pytest.raises(AssertionError, match="buffer moved"):
                    tried.generate([1, 2], h.greedy(4))
                object.__setattr__(holder, name, buffer)
        assert len(tried.generate([1, 2], h.greedy(4)).token_ids) == 4


class TestProgram:
    def test_two_loads_record_the_same_steps(self) -> None:
        one, two = (h.load(model(NANO), max_context=256, **nextn(3))._runtime for _ in range(2))
        assert one is not None and two is not None
        for mode in MODES:
            assert one.programs[mode].dump() == two.programs[mode].dump() != []

    def test_the_four_modes_exist_and_differ_where_they_should(self) -> None:
        runtime = h.engine(model(NANO), max_context=256, **nextn(3))._runtime
        assert runtime is not None
        assert set(runtime.programs) == {Mode(sampled=s, processors=p) for s in (False, True) for p in (False, True)}
        names = ["refill", "draft", "verify", "verdict", "commit", "extend", "publish"]
        for program in runtime.programs.values():
            assert [phase.name for phase in program.phases] == names
        modes = {
            mode: [
                arg for phase in program.phases for e in phase.tape.entries for arg in e.args if isinstance(arg, Mode)
            ]
            for mode, program in runtime.programs.items()
        }
        for mode, found in modes.items():
            assert found and set(found) == {mode}

    def test_plain_has_no_phases_of_a_draft(self) -> None:
        runtime = h.engine(model(NANO), max_context=256, **PLAIN)._runtime
        assert runtime is not None
        for program in runtime.programs.values():
            assert [p.name for p in program.phases] == ["refill", "verify", "verdict", "commit", "publish"]
            assert not [line for line in program.dump() if "draft" in line or "extend" in line]

    def test_the_request_picks_its_mode(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tried = h.engine(model(NANO), max_context=256, **nextn(3))
        runtime = tried._runtime
        assert runtime is not None
        used: list[Mode] = []
        original = Loop.run
        monkeypatch.setattr(Loop, "run", lambda self, p, **k: (used.append(p.mode), original(self, p, **k))[1])
        values: list[dict[str, Any]] = [
            {"temperature": 0.0},
            {"top_k": 1},
            {"temperature": 0.0, "repetition_penalty": 1.2},
            {},
            {"min_tokens": 2},
        ]
        for given in values:
            tried.generate([1, 2], SamplingParams(max_tokens=2, **given))
        assert used == [Mode(False, False), Mode(False, False), Mode(False, True), Mode(True, False), Mode(True, True)]

    def test_a_dump_says_more_than_names(self) -> None:
        """A changed shape, dtype or variant shows."""
        runtime = h.engine(model(NANO), max_context=256, **nextn(3))._runtime
        wider = h.engine(model(NANO), max_context=256, **nextn(4))._runtime
        assert runtime is not None and wider is not None
        program = runtime.programs[MODES[0]]
        assert program.dump() != wider.programs[MODES[0]].dump()
        entry = program.phases[2].tape.entries[0]
        assert str(entry) != str(dataclasses.replace(entry, variant="other"))
        assert "[4, 32]" in " ".join(program.dump())
