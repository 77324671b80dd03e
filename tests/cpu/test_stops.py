"""Where answers end: ids, text, log-probabilities and usage are cut at one place, whatever the steps looked like."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import helpers as h
from helpers import threads_as_before  # noqa: F401 - takes effect by being here
from soliton import Engine, SamplingParams
from soliton.answer import Cutter
from soliton.checkpoint import Tokenizer
from soliton.sampling.params import Resolved

DEPTHS = (0, 2, 4)
STEPS = (0, 1, 3, 5)
PROMPT = h.prompts_of(64, (1,))[0]  # nano's greedy answer to it has long accepted blocks


def nano(steps: int, depth: int = 2, **settings: Any) -> Engine:
    way = {"speculation": "nextn", "speculative_num_steps": steps} if steps else {"speculation": "off"}
    return h.engine(h.nano(), max_context=512, run_ahead=depth, **way, **settings)


@functools.cache
def free(**values: Any) -> Any:
    """The uncut answer."""
    return nano(0, 0).generate(PROMPT, h.greedy(60, **values))


@functools.cache
def blocks(steps: int = 5) -> list[tuple[int, ...]]:
    """The accepted blocks of the uncut answer."""
    return [p.token_ids for p in nano(steps, 0).stream(PROMPT, h.greedy(60))]


@functools.cache
def places() -> list[int]:
    """Indices of tokens at the beginning, in the middle and at the end of accepted blocks (five steps)."""
    found, at = [0], 0
    for block in blocks():
        if len(block) >= 4:
            found += [at, at + 1, at + len(block) - 1]
        at += len(block)
    return sorted(set(found))


class TestIds:
    def test_blocks_are_long_enough_to_cut_inside(self) -> None:
        assert max(map(len, blocks())) >= 4 and len(places()) >= 4

    @pytest.mark.parametrize("depth", DEPTHS)
    @pytest.mark.parametrize("steps", STEPS)
    def test_a_stop_id_anywhere(self, steps: int, depth: int) -> None:
        whole = free(logprobs=2)
        for place in places():
            token = whole.token_ids[place]
            first = whole.token_ids.index(token)
            got = nano(steps, depth).generate(PROMPT, h.greedy(60, logprobs=2, stop_token_ids=[token]))
            assert got.token_ids == whole.token_ids[: first + 1], "the stop id is the last one"
            assert got.finish_reason == "stop"
            assert got.stats.completion_tokens == first + 1 == sum(got.stats.accept_lengths)
            assert got.logprobs == whole.logprobs[: first + 1]
            assert got.text == tokenizer().decode(whole.token_ids[:first]), "a stop id has no text"

    @pytest.mark.parametrize("steps", STEPS)
    @pytest.mark.parametrize("depth", DEPTHS)
    def test_max_tokens_anywhere(self, steps: int, depth: int) -> None:
        whole = free(logprobs=2)
        for count in [1, 2, 3, *(p + 1 for p in places())]:
            got = nano(steps, depth).generate(PROMPT, h.greedy(count, logprobs=2))
            assert got.token_ids == whole.token_ids[:count] and got.finish_reason == "length"
            assert got.logprobs == whole.logprobs[:count]
            assert got.stats.completion_tokens == count
            assert got.text == tokenizer().decode(whole.token_ids[:count])

    @pytest.mark.parametrize("steps", STEPS)
    def test_the_end_of_the_context(self, steps: int) -> None:
        way = {"speculation": "nextn", "speculative_num_steps": steps} if steps else {"speculation": "off"}
        short = h.engine(h.nano(), max_context=30, **way)
        got = short.generate(PROMPT, SamplingParams(temperature=0.0, ignore_eos=True))
        assert got.token_ids == free().token_ids[:29] and got.finish_reason == "length"

    @pytest.mark.parametrize("steps", STEPS)
    def test_eos_ends_and_may_be_ignored(self, steps: int) -> None:
        """The model's end id, made likely at the seventh token by a bias that penalties wear down or build up."""
        tried = nano(steps)
        biased: dict[str, Any] = {"logit_bias": {h.NANO_EOS: 4.0}, "temperature": 1.0, "seed": 3}
        lengths = set()
        for seed in range(8):
            values = {**biased, "seed": seed}
            ended = tried.generate(PROMPT, SamplingParams(max_tokens=60, **values))
            on = tried.generate(PROMPT, SamplingParams(max_tokens=60, ignore_eos=True, **values))
            assert ended.finish_reason == "stop" and ended.token_ids[-1] == h.NANO_EOS
            assert h.NANO_EOS not in ended.token_ids[:-1]
            assert on.finish_reason == "length" and len(on.token_ids) == 60
            assert on.token_ids[: len(ended.token_ids)] == ended.token_ids
            assert ended.text == tokenizer().decode(ended.token_ids[:-1])
            lengths.add(len(ended.token_ids))
        assert len(lengths) > 2

    @pytest.mark.parametrize("steps", STEPS)
    def test_min_tokens_masks_ends_and_then_lets_them(self, steps: int) -> None:
        """Inside a block too: the first allowed place may be any row."""
        whole = free()
        token = whole.token_ids[2]
        for least in range(14):
            params = h.greedy(60, min_tokens=least, stop_token_ids=[token], logprobs=1)
            plain = nano(0, 0).generate(PROMPT, params)
            got = nano(steps).generate(PROMPT, params)
            assert h.facts(got) == h.facts(plain)
            assert token not in got.token_ids[:least]
            assert len(got.token_ids) > least or got.finish_reason == "length"

    @pytest.mark.parametrize("steps", STEPS)
    def test_the_earliest_event_names_the_reason(self, steps: int) -> None:
        whole = free()
        token = whole.token_ids[9]
        at = whole.token_ids.index(token)
        tried = nano(steps)
        for limit, reason in ((at, "length"), (at + 1, "stop"), (at + 2, "stop")):
            got = tried.generate(PROMPT, h.greedy(limit, stop_token_ids=[token]))
            assert (got.finish_reason, len(got.token_ids)) == (reason, min(limit, at + 1))
        piece = tokenizer().decode([token])
        text = whole.text.find(piece)
        assert text >= 0
        both = tried.generate(PROMPT, h.greedy(60, stop_token_ids=[token], stop=piece))
        assert both.finish_reason == "stop" and len(both.token_ids) <= at + 1
        assert both.text == whole.text[: whole.text.find(piece)]


def tokenizer() -> Tokenizer:
    found = nano(0, 0).checkpoint.tokenizer
    assert found is not None
    return found


def expected_cut(ids: list[int], stops: list[str]) -> tuple[int, str] | None:
    """(tokens kept, text) of plain decoding with stop strings: token by token, the first token that completes one."""
    for count in range(1, len(ids) + 1):
        stream = tokenizer().stream()
        text = stream.push(ids[:count])
        found = [text.find(stop) for stop in stops if stop in text]
        if found:
            return count, text[: min(found)]
    return None


class TestStrings:
    @pytest.mark.parametrize("depth", DEPTHS)
    @pytest.mark.parametrize("steps", STEPS)
    def test_every_substring_of_the_text(self, steps: int, depth: int) -> None:
        """Strings of one to nine characters from everywhere: within a token, over tokens, over blocks."""
        whole = free(logprobs=1)
        tried = nano(steps, depth)
        stops = {
            whole.text[at : at + size] for at, size in ((0, 1), (0, 3), (5, 2), (11, 4), (18, 9), (27, 6), (40, 3))
        }
        for stop in stops:
            want = expected_cut(whole.token_ids, [stop])
            assert want is not None
            count, text = want
            got = tried.generate(PROMPT, h.greedy(60, stop=stop, logprobs=1))
            assert (got.token_ids, got.text, got.finish_reason) == (whole.token_ids[:count], text, "stop")
            assert got.logprobs == whole.logprobs[:count]
            assert got.stats.completion_tokens == count == sum(got.stats.accept_lengths)
            assert h.joined(tried, PROMPT, h.greedy(60, stop=stop, logprobs=1)) == h.facts(got)

    def test_over_the_seam_of_two_blocks(self) -> None:
        seams = []
        ids: list[int] = []
        for block in blocks():
            ids += block
            seams.append(len(ids))
        stream = tokenizer()
        tested = 0
        for seam in seams[1:-1]:
            stop = stream.decode(ids[seam - 1 : seam + 1])
            if "\ufffd" in stop or len(stop) < 2:
                continue
            want = expected_cut(ids, [stop])
            assert want is not None
            got = nano(5).generate(PROMPT, h.greedy(60, stop=[stop]))
            assert (len(got.token_ids), got.text) == want
            tested += 1
        assert tested > 3

    @pytest.mark.parametrize("steps", [0, 5])
    def test_several_and_overlapping(self, steps: int) -> None:
        whole = free()
        text = whole.text
        for stops in (
            [text[20:24], text[18:22]],
            [text[20:26], text[22:25]],
            [text[30:33], text[10:13], "never there"],
            [text[12:20], text[12:14]],
            [text[15:16] * 2 + "no", text[25:28]],
        ):
            want = expected_cut(whole.token_ids, stops)
            assert want is not None
            got = nano(steps).generate(PROMPT, h.greedy(60, stop=stops))
            assert (len(got.token_ids), got.text, got.finish_reason) == (*want, "stop")

    @pytest.mark.parametrize("steps", [0, 3])
    def test_at_the_first_token(self, steps: int) -> None:
        """A sampled start whose first token has text of its own."""
        tried = nano(steps)
        for seed in range(6):
            params: dict[str, Any] = {"max_tokens": 20, "seed": seed, "ignore_eos": True}
            start = tried.generate(PROMPT, SamplingParams(**params))
            first = tokenizer().decode(start.token_ids[:1])
            if "\ufffd" in first:
                continue
            got = tried.generate(PROMPT, SamplingParams(stop=first, **params))
            assert (got.token_ids, got.text, got.finish_reason) == (start.token_ids[:1], "", "stop")
            assert got.stats.accept_lengths == (1,)

    @pytest.mark.parametrize("steps", [0, 3])
    def test_a_string_that_never_comes_is_held_back_no_longer_than_needed(self, steps: int) -> None:
        whole = free()
        almost = whole.text[20:26] + "\x00"
        pieces = list(nano(steps).stream(PROMPT, h.greedy(60, stop=almost)))
        assert "".join(p.text for p in pieces) == whole.text
        assert pieces[-1].finish_reason == "length"
        shown, ids = "", []
        for piece in pieces[:-1]:
            shown += piece.text
            ids += piece.token_ids
            sure = tokenizer().stream().push(ids)
            assert sure.startswith(shown) and len(sure) - len(shown) < len(almost)

    @pytest.mark.parametrize("steps", [0, 1, 5])
    def test_no_part_of_a_stop_string_is_ever_shown(self, steps: int) -> None:
        whole = free()
        for at in (15, 22, 33, 41):
            stop = whole.text[at : at + 6]
            shown = ""
            for piece in nano(steps, 0).stream(PROMPT, h.greedy(60, stop=stop)):
                shown += piece.text
                assert whole.text[: whole.text.find(stop)].startswith(shown)
            assert shown == whole.text[: whole.text.find(stop)]

    def test_min_tokens_delays_stop_strings(self) -> None:
        whole = free()
        stop = tokenizer().decode(whole.token_ids[1:3])
        plain = nano(0, 0).generate(PROMPT, h.greedy(60, stop=stop))
        assert len(plain.token_ids) < 6
        for steps in STEPS:
            got = nano(steps).generate(PROMPT, h.greedy(60, stop=stop, min_tokens=10))
            assert len(got.token_ids) >= 10

    @pytest.mark.parametrize("depth", DEPTHS)
    def test_pebble(self, depth: int) -> None:
        tried = h.engine("pebble", max_context=512, run_ahead=depth, speculation="nextn", speculative_num_steps=3)
        prompt = next(p["prompt"] for p in h.heldout() if "prompt" in p)
        whole = tried.generate(prompt, h.greedy(24, logprobs=0))
        assert whole.text.strip()
        stop = whole.text[len(whole.text) // 2 :][:3]
        got = tried.generate(prompt, h.greedy(24, logprobs=0, stop=stop))
        assert got.finish_reason == "stop" and got.text == whole.text[: whole.text.find(stop)]
        assert whole.token_ids[: len(got.token_ids)] == got.token_ids
        assert whole.logprobs is not None and got.logprobs == whole.logprobs[: len(got.token_ids)]
        assert h.joined(tried, prompt, h.greedy(24, logprobs=0, stop=stop)) == h.facts(got)


class TestText:
    """nano's vocabulary has bytes that are no characters of their own, so pieces have to wait for one another."""

    @pytest.mark.parametrize("steps", STEPS)
    @pytest.mark.parametrize("values", [{"temperature": 0.0}, {"seed": 5}, {"seed": 6, "top_k": 5}])
    def test_pieces_add_up(self, steps: int, values: dict[str, Any]) -> None:
        tried = nano(steps)
        params = SamplingParams(max_tokens=50, ignore_eos=True, logprobs=2, **values)
        got = tried.generate(PROMPT, params)
        assert h.joined(tried, PROMPT, params) == h.facts(got)
        assert got.text == tokenizer().decode(got.token_ids)

    def test_no_piece_shows_half_a_character(self) -> None:
        """A euro sign is three tokens here; forced by a bias, they and signs like it come out whole or not at all."""
        alphabet = h.nano_alphabet()
        sign = [alphabet.index(c) for c in "âĤ¬"]
        stream = tokenizer().stream()
        assert [stream.push([t]) for t in sign] == ["", "", "€"]
        params = SamplingParams(max_tokens=60, seed=1, logit_bias=dict.fromkeys(sign, 12.0))
        for steps in STEPS:
            texts = [p.text for p in nano(steps).stream(PROMPT, params)]
            got = nano(steps).generate(PROMPT, params)
            assert "".join(texts) == got.text == tokenizer().decode(got.token_ids)
            assert any("\u2000" < character < "\ufff0" for character in got.text)

    def test_an_answer_that_ends_inside_a_character(self) -> None:
        alphabet = h.nano_alphabet()
        params = h.greedy(3, logit_bias={alphabet.index("â"): 100.0})
        for steps in STEPS:
            assert nano(steps).generate(PROMPT, params).text == "\ufffd" * 3

    def test_special_tokens_show_only_when_asked(self) -> None:
        params: dict[str, Any] = {"logit_bias": {h.NANO_PAD: 100.0}}
        for steps in STEPS:
            assert nano(steps).generate(PROMPT, h.greedy(3, **params)).text == ""
            shown = nano(steps).generate(PROMPT, h.greedy(3, skip_special_tokens=False, **params)).text
            assert shown == "<|pad|>" * 3


def resolved(**values: Any) -> Resolved:
    return SamplingParams(**values).resolve(vocab=64)


class TestCutter:
    """The same cutter, fed in any blocks, gives the same answer."""

    @pytest.mark.parametrize("stops", [["STOP"], ["abc", "bc"], ["OPa"], ["aab"], ["ab", "STOPx"]])
    def test_blocks_do_not_matter(self, stops: list[str]) -> None:
        alphabet = h.nano_alphabet()
        g = torch.Generator().manual_seed(len(stops[0]))
        letters = [alphabet.index(t) for t in ("a", "b", "c", "ab", "bc", "abc", "ST", "OP", "STOP", "x")]
        for _ in range(60):
            ids = [letters[i] for i in torch.randint(0, len(letters), (14,), generator=g).tolist()]
            want = expected_cut(ids, stops)
            for size in (1, 2, 3, 5, 14):
                cutter = Cutter(tokenizer(), resolved(stop=stops))
                count, text, ended = 0, "", False
                for at in range(0, len(ids), size):
                    kept, more, ended = cutter.push(ids[at : at + size])
                    count, text = count + kept, text + more
                    if ended:
                        break
                if not ended:
                    text += cutter.flush()[0]
                assert (count, text) == (want or (14, tokenizer().decode(ids)))
                assert ended == (want is not None)

    def test_a_stop_string_that_only_the_end_spells(self) -> None:
        """Half a character becomes U+FFFD when the answer ends there, and that may be what was asked for."""
        half = h.nano_alphabet().index("Ã")
        cutter = Cutter(tokenizer(), resolved(stop="\ufffd"))
        assert cutter.push([half]) == (1, "", False) and cutter.flush() == ("", True)
        answer = nano(3).generate(PROMPT, h.greedy(1, stop="\ufffd", logit_bias={half: 100}))
        assert (answer.text, answer.finish_reason, answer.token_ids) == ("", "stop", [half])

    def test_without_a_tokenizer_there_is_no_text(self) -> None:
        cutter = Cutter(None, resolved())
        assert cutter.push([1, 2, 3]) == (3, "", False)
        assert cutter.flush() == ("", False)


class TestPenaltiesAndScores:
    PENALTIES: tuple[dict[str, Any], ...] = (
        {"repetition_penalty": 1.5},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.9},
        {"frequency_penalty": -0.5, "repetition_penalty": 0.8},
        {"logit_bias": {4: 3.0, 49: -9.0}},
        {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3, "min_tokens": 20,
         "logit_bias": {h.NANO_EOS: 3.0}},
    )  # fmt: skip

    @pytest.mark.parametrize("values", PENALTIES)
    def test_inside_a_block_as_in_plain_decoding(self, values: dict[str, Any]) -> None:
        plain = nano(0, 0).generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=60, logprobs=3, **values))
        uncut = free().token_ids[: len(plain.token_ids)]
        assert plain.token_ids != uncut, "the processors must do something"
        for steps in (1, 2, 3, 4, 5):
            got = nano(steps).generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=60, logprobs=3, **values))
            assert h.facts(got) == h.facts(plain)

    def test_greedy_penalties_follow_the_written_law(self) -> None:
        judge = nano(0, 0)
        for values in self.PENALTIES[:4]:
            params = h.greedy(30, **values)
            got = nano(4).generate(PROMPT, params)
            rows = judge.logits(PROMPT + got.token_ids)
            for place, token in enumerate(got.token_ids):
                law = h.exact_law(rows[len(PROMPT) - 1 + place], params, PROMPT, got.token_ids[:place])
                assert int(law.argmax()) == token

    @pytest.mark.parametrize("model", ["ling-micro", "nano"])
    def test_logprobs_are_of_raw_logits_and_the_same_with_drafts(self, model: str) -> None:
        path: Path = h.nano() if model == "nano" else h.micro()
        params = SamplingParams(
            max_tokens=30, seed=2, temperature=0.7, logprobs=20, presence_penalty=1.0, ignore_eos=True
        )
        tried = h.engine(path, max_context=512, speculation="nextn", speculative_num_steps=4)
        got = tried.generate(PROMPT, params)
        rows = torch.log_softmax(tried.logits(PROMPT + got.token_ids)[len(PROMPT) - 1 : -1].double(), -1)
        assert got.logprobs is not None and len(got.logprobs) == 30
        for row, told, token in zip(rows, got.logprobs, got.token_ids, strict=True):
            assert told.token_id == token
            assert told.logprob == pytest.approx(float(row[token]), abs=2e-6)
            assert len(told.top) == 20
            values = [v for _, v in told.top]
            assert values == sorted(values, reverse=True)
            assert values == pytest.approx(row.topk(20).values.tolist(), abs=2e-6)

    @pytest.mark.parametrize("count", [0, 1, 5])
    def test_as_many_alternatives_as_asked(self, count: int) -> None:
        got = nano(3).generate(PROMPT, h.greedy(9, logprobs=count))
        assert got.logprobs is not None and all(len(t.top) == count for t in got.logprobs)
        assert nano(3).generate(PROMPT, h.greedy(9)).logprobs is None

    @pytest.mark.parametrize("steps", [0, 3])
    @pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 34, 70])
    def test_prompt_logprobs(self, length: int, steps: int) -> None:
        prompt = h.prompts_of(64, (length,), seed=5)[0]
        tried = nano(steps)
        for count in (1, 0):  # max_tokens 0 scores alone
            asked = SamplingParams(temperature=0.0, max_tokens=count, prompt_logprobs=3)
            got = tried.generate(prompt, asked)
            assert got.prompt_logprobs is not None and len(got.prompt_logprobs) == length
            assert got.prompt_logprobs[0] is None
            assert len(got.token_ids) == count and got.finish_reason == "length"
            rows = torch.log_softmax(tried.logits(prompt).double(), -1)
            for place in range(1, length):
                told = got.prompt_logprobs[place]
                assert told is not None and told.token_id == prompt[place]
                assert told.logprob == pytest.approx(float(rows[place - 1, prompt[place]]), abs=2e-6)
                assert [i for i, _ in told.top] == rows[place - 1].topk(3).indices.tolist()

    def test_echo_does_not_change_the_answer(self) -> None:
        prompt = h.prompts_of(64, (40,), seed=5)[0]
        with_scores = nano(3).generate(prompt, h.greedy(20, prompt_logprobs=1, logprobs=1))
        without = nano(3).generate(prompt, h.greedy(20, logprobs=1))
        assert (with_scores.token_ids, with_scores.logprobs) == (without.token_ids, without.logprobs)
