"""Prefix reuse: answers are those of a fresh engine, and what was not computed again is exactly what should not be."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import helpers as h
from helpers import threads_as_before  # noqa: F401 - takes effect by being here
from soliton import Engine, SamplingParams
from soliton.checkpoint import open_checkpoint
from soliton.context import CheckpointTree, Saved, Stream

NEXTN: dict[str, Any] = {"speculation": "nextn", "speculative_num_steps": 3}


def engine(model: Path | None = None, *, context: int = 1024, **settings: Any) -> Engine:
    return h.engine(model or h.nano(), max_context=context, **{**NEXTN, "prefill_chunk": 16, **settings})


def cold(prompt: Any, params: SamplingParams, *, model: Path | None = None, context: int = 1024) -> tuple[Any, ...]:
    """The answer of an engine that keeps nothing."""
    off = engine(model, context=context, prefix_reuse="off")
    answer = off.generate(prompt, params)
    assert answer.stats.cached_tokens == 0
    return h.facts(answer)


def checked(tried: Engine, prompt: Any, params: SamplingParams, **where: Any) -> int:
    """Ask, compare with a cold engine, return cached_tokens."""
    answer = tried.generate(prompt, params)
    assert h.facts(answer) == cold(prompt, params, **where)
    return answer.stats.cached_tokens


P = h.prompts_of(64, (40, 40, 40), seed=21)
ASK = h.greedy(12, logprobs=2)


class TestFast:
    def test_exact_repeat(self) -> None:
        tried = engine()
        assert checked(tried, P[0], ASK) == 0
        assert checked(tried, P[0], ASK) == len(P[0]) - 1
        assert checked(tried, P[0], h.greedy(30, logprobs=2)) == len(P[0]) - 1

    def test_a_prompt_of_one_token_has_nothing_to_keep(self) -> None:
        tried = engine()
        assert checked(tried, [7], ASK) == 0
        assert checked(tried, [7], ASK) == 0

    def test_the_answer_is_continued(self) -> None:
        """prompt + answer + more: everything up to the answer's last token but one has been run."""
        tried = engine()
        first = tried.generate(P[0], ASK)
        longer = P[0] + first.token_ids + P[1][:9]
        assert checked(tried, longer, ASK) == len(P[0]) + len(first.token_ids) - 1

    @pytest.mark.parametrize("depth", [0, 2, 4])
    def test_chats_interleaved(self, depth: int) -> None:
        """A, B, A, B, ...: each turn finds its own chat's last answer."""
        tried = engine(run_ahead=depth)
        chats = [list(P[0]), list(P[1])]
        ends = [0, 0]
        for turn in range(6):
            chat = chats[turn % 2]
            cached = checked(tried, chat, ASK)
            assert cached == ends[turn % 2]
            answer = tried.generate(chat, ASK)
            chat += answer.token_ids
            ends[turn % 2] = len(chat) - 1
            chat += h.prompts_of(64, (5,), seed=turn)[0]

    def test_one_system_prompt_and_many_users(self) -> None:
        """Messages: what comes before the final one is a checkpoint of its own."""
        tried = engine()
        system = {"role": "system", "content": "the thing that he hath in the bin and abc"}
        for user in ("he", "in", "the bin", "abc"):
            messages = [system, {"role": "user", "content": user}]
            cached = checked(tried, messages, ASK)
            boundary = len(tried.encode([system], add_generation_prompt=False))
            assert boundary > 16
            assert cached == (0 if user == "he" else boundary)

    def test_system_prompt_of_pebble(self) -> None:
        tried = h.engine("pebble", max_context=512, **NEXTN)
        off = h.engine("pebble", max_context=512, prefix_reuse="off", **NEXTN)
        system = {"role": "system", "content": "You answer questions about Python in few words."}
        cached = []
        for user in ("What is a list?", "What is a dict?"):
            messages = [system, {"role": "user", "content": user}]
            got = tried.generate(messages, h.greedy(10, logprobs=1))
            assert h.facts(got) == h.facts(off.generate(messages, h.greedy(10, logprobs=1)))
            cached.append(got.stats.cached_tokens)
        assert cached == [0, len(tried.encode([system], add_generation_prompt=False))]

    @pytest.mark.parametrize("at", [16, 32, 39])
    def test_divergence_at_the_first_token_after_a_checkpoint(self, at: int) -> None:
        """16 and 32 are multiples of the chunk (32 the last of them), 39 is the prompt's end. The MTP entry at the
        boundary belongs to the token after it, so it must be made anew."""
        tried = engine()
        tried.generate(P[0], ASK)
        other = [*P[0][:at], (P[0][at] + 1) % 60, *P[1][:7]]
        expected = {16: 0, 32: 32, 39: 39}[at]
        assert checked(tried, other, ASK) == expected
        assert checked(tried, P[0], ASK) == 39

    def test_divergence_right_after_a_prompt_that_was_a_prefix(self) -> None:
        tried = engine()
        base = P[0][:33]
        for token in range(6):
            assert checked(tried, [*base, token], ASK) == (33 if token else 0)

    def test_sampled_answers_leave_good_checkpoints_too(self) -> None:
        tried = engine()
        params = SamplingParams(max_tokens=25, temperature=1.0, seed=9, presence_penalty=0.3, ignore_eos=True)
        first = tried.generate(P[2], params)
        assert checked(tried, P[2] + first.token_ids + [5], ASK) == 64

    def test_a_closed_stream_leaves_the_prompts_checkpoint(self) -> None:
        tried = engine(run_ahead=2)
        stream = tried.stream(P[0], h.greedy(60))
        seen = list(itertools.chain.from_iterable(next(stream).token_ids for _ in range(3)))
        stream.close()  # type: ignore[attr-defined]
        assert checked(tried, P[0] + seen + [9, 9], ASK) == len(P[0]) - 1

    def test_prompt_logprobs_read_the_whole_prompt(self) -> None:
        tried = engine()
        tried.generate(P[0], ASK)
        asked = h.greedy(4, prompt_logprobs=2)
        assert checked(tried, P[0], asked) == 0
        assert checked(tried, P[0], ASK) == 39

    def test_reset_forgets(self) -> None:
        tried = engine()
        tried.generate(P[0], ASK)
        tried.reset()
        assert checked(tried, P[0], ASK) == 0

    def test_logits_leave_no_checkpoint_and_harm_none(self) -> None:
        tried = engine()
        tried.generate(P[0], ASK)
        tried.logits(P[1])
        assert checked(tried, P[1], ASK) == 0
        assert checked(tried, P[0], ASK) == 39


class TestModes:
    def test_off_reuses_nothing(self) -> None:
        tried = engine(prefix_reuse="off")
        for _ in range(2):
            assert checked(tried, P[0], ASK) == 0
        assert tried._runtime is not None and len(tried._runtime.tree) == 0

    def test_exact_reuses_multiples_of_the_chunk(self) -> None:
        tried = engine(prefix_reuse="exact")
        assert checked(tried, P[0], ASK) == 0
        assert checked(tried, P[0], ASK) == 32
        first = tried.generate(P[0], ASK)
        assert checked(tried, P[0] + first.token_ids + P[1], ASK) == 32
        assert checked(tried, P[0] + first.token_ids + P[1], ASK) == 80

    @pytest.mark.parametrize("reuse", ["fast", "exact"])
    def test_without_a_draft(self, reuse: str) -> None:
        tried = h.engine(h.micro("kimi-micro"), max_context=256, prefix_reuse=reuse, prefill_chunk=16)
        off = h.engine(h.micro("kimi-micro"), max_context=256, prefix_reuse="off")
        for expected in (0, 32 if reuse == "exact" else 39):
            got = tried.generate(P[0], ASK)
            assert got.stats.cached_tokens == expected
            assert h.facts(got) == h.facts(off.generate(P[0], ASK))


def bytes_of(length: int, *, model: Path | None = None) -> int:
    """Bytes of one checkpoint of ``length`` tokens that has no parent."""
    runtime = engine(model)._runtime
    assert runtime is not None
    tree = CheckpointTree(1 << 40)
    node = tree.save(list(range(length)), runtime.stream)
    assert node is not None
    return node.nbytes


def two_chats() -> int:
    """Bytes that the checkpoints of two prompts and their answers take."""
    roomy = engine()
    for prompt in P[:2]:
        roomy.generate(prompt, ASK)
    assert roomy._runtime is not None
    return roomy._runtime.tree.used_bytes


class TestBudget:
    def test_the_least_recently_used_chat_goes_first(self) -> None:
        tried = engine(checkpoint_budget=two_chats())
        runtime = tried._runtime
        assert runtime is not None
        for prompt in (P[0], P[1], P[0], P[2]):
            checked(tried, prompt, ASK)
            assert runtime.tree.used_bytes <= two_chats()
        assert checked(tried, P[0], ASK) == 39, "used since the other, so it is still there"
        assert checked(tried, P[1], ASK) == 0, "the oldest has gone"

    @pytest.mark.parametrize("budget", [0, 1])
    def test_no_budget_keeps_nothing_and_answers(self, budget: int) -> None:
        tried = engine(checkpoint_budget=budget)
        for _ in range(2):
            assert checked(tried, P[0], ASK) == 0
        assert tried._runtime is not None and tried._runtime.tree.used_bytes == 0

    def test_a_budget_for_one(self) -> None:
        """Room for the prompt's first checkpoint but not for what hangs on it."""
        tried = engine(checkpoint_budget=bytes_of(33))
        for _ in range(3):
            assert checked(tried, P[0], ASK) in (0, 32)
        assert checked(tried, P[1], ASK) == 0


class TestLongAnswers:
    """Rolling checkpoints every 512 committed tokens, at a run-ahead depth of 4, so that snapshots are in flight."""

    LONG = 1300

    @pytest.mark.parametrize("steps", [0, 5])
    def test_rolling_checkpoints(self, steps: int) -> None:
        settings: dict[str, Any] = {"speculative_num_steps": steps} if steps else {"speculation": "off"}
        tried = h.engine(h.nano(), max_context=2048, run_ahead=4, **settings)
        off = h.engine(h.nano(), max_context=2048, prefix_reuse="off", speculation="off", run_ahead=0)
        first = tried.generate(P[0], h.greedy(self.LONG))
        runtime = tried._runtime
        assert runtime is not None
        lengths = sorted(n.length for n in runtime.tree._nodes(runtime.tree._root) if n.length > 100)
        assert len(lengths) == 3, "two on the way and the end"
        assert lengths == [512, 1024, 40 + self.LONG - 1], "whatever the drafts and the depth"
        for length, cut in ((lengths[0], lengths[0] + 3), (lengths[1], lengths[1] + 1), (lengths[2], 1339)):
            whole = P[0] + first.token_ids
            longer = [*whole[:cut], (whole[cut] + 1) % 60, 4]
            got = tried.generate(longer, h.greedy(8, logprobs=2))
            assert got.stats.cached_tokens == length
            assert h.facts(got) == h.facts(off.generate(longer, h.greedy(8, logprobs=2)))

    def test_ling_micro(self) -> None:
        tried = h.engine(h.micro(), max_context=1024, run_ahead=4, **NEXTN)
        off = h.engine(h.micro(), max_context=1024, prefix_reuse="off", **NEXTN)
        first = tried.generate(P[0], h.greedy(560))
        for cut, cached in ((511, 39), (590, 512)):
            longer = [*[*P[0], *first.token_ids][:cut], 3, 5]
            got = tried.generate(longer, h.greedy(8, logprobs=1))
            assert got.stats.cached_tokens == cached
            assert h.facts(got) == h.facts(off.generate(longer, h.greedy(8, logprobs=1)))

    def test_the_place_of_a_checkpoint_depends_on_nothing_but_the_answer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where the recurrence reads prompts in chunks, a prompt's bits depend on where its reading starts: that must
        be the same for every depth and drafter, also after a stream that was left."""
        monkeypatch.setattr("soliton.ops.select.SWEEP_STATE_LIMIT", 0)
        for module in ("soliton.speculation.verify", "soliton.answer"):
            monkeypatch.setattr(f"{module}.ROLLING", 32)
        seen = []
        for steps, depth in ((0, 0), (0, 3), (1, 0), (3, 2), (5, 4)):
            settings: dict[str, Any] = {"speculative_num_steps": steps} if steps else {"speculation": "off"}
            tried = h.load(h.nano(), max_context=512, run_ahead=depth, prefill_chunk=16, **settings)
            assert tried._runtime is not None and tried._runtime.choices["kda.prefill"].variant == "chunk"
            first = tried.generate(P[0], h.greedy(120)).token_ids
            stream = tried.stream(P[1], h.greedy(90))
            left: list[int] = []
            while len(left) < 37:
                left += next(stream).token_ids
            stream.close()  # type: ignore[attr-defined]
            got = []
            for longer in (P[0] + first[:77] + [3, 4], P[0] + first + [5], P[1] + left[:37] + [6, 7]):
                answer = tried.generate(longer, h.greedy(20, logprobs=3))
                got.append((answer.stats.cached_tokens, h.facts(answer)))
            seen.append(got)
        assert [cached for cached, _ in seen[0]] == [96, 159, 64]
        assert all(got == seen[0] for got in seen[1:])

    @pytest.mark.parametrize("depth", [0, 4])
    def test_a_stop_string_cut_far_behind_the_device(self, depth: int) -> None:
        """The device ran past the cut; the chat goes on from a checkpoint at or before it."""
        tried = h.engine(h.nano(), max_context=2048, run_ahead=depth, **NEXTN)
        off = h.engine(h.nano(), max_context=2048, prefix_reuse="off", **NEXTN)
        sampled = {"temperature": 1.0, "top_k": 8, "seed": 2, "ignore_eos": True}
        free = off.generate(P[0], SamplingParams(max_tokens=900, **sampled)).text
        stop = next(free[at : at + 4] for at in range(740, 980) if free.find(free[at : at + 4]) == at)
        cut = tried.generate(P[0], SamplingParams(max_tokens=900, stop=stop, **sampled))
        assert cut.finish_reason == "stop" and cut.text == free[: free.find(stop)]
        longer = P[0] + cut.token_ids + P[1][:5]
        got = tried.generate(longer, ASK)
        assert 512 <= got.stats.cached_tokens <= 40 + len(cut.token_ids)
        assert h.facts(got) == h.facts(off.generate(longer, ASK))

    @pytest.mark.parametrize("depth", [0, 2, 4])
    def test_continuing_after_a_short_stop_string_cut(self, depth: int) -> None:
        tried = engine(run_ahead=depth)
        free = tried.generate(P[0], h.greedy(60)).text
        tried.reset()
        stop = free[20:23]
        cut = tried.generate(P[0], h.greedy(60, stop=stop))
        assert cut.finish_reason == "stop"
        assert checked(tried, P[0] + cut.token_ids + [3], ASK) == 39
        tried.reset()
        cut = tried.generate(P[0], h.greedy(60, stop=stop))
        assert checked(tried, P[0] + cut.token_ids[:-1] + [5], ASK) == 39


def stream_of(length_hint: int = 64) -> Stream:
    spec = open_checkpoint(h.micro()).spec
    made = Stream(spec, max_context=length_hint, rows=4, draft=True, device=torch.device("cpu"), dtype=torch.float32)
    g = torch.Generator().manual_seed(1)
    for tensor in made.tensors().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape, generator=g))
    return made


def contents(stream: Stream, length: int) -> list[torch.Tensor]:
    assert stream.draft_kv is not None
    parts = (stream.kv[:, :length], stream.draft_kv[: length - 1], stream.states[0], stream.windows[: stream.tail])
    return [t.clone() for t in (*parts, stream.boundary)]


def scramble(stream: Stream) -> None:
    for tensor in stream.tensors().values():
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))


def refresh(stream: Stream, length: int, seed: int) -> None:
    """What running tokens up to ``length`` changes: entries behind, state, tail, boundary."""
    g = torch.Generator().manual_seed(seed)
    stream.states[0] = torch.randn(stream.states[0].shape, generator=g)
    stream.windows[: stream.tail] = torch.randn(stream.windows[: stream.tail].shape, generator=g)
    stream.boundary.copy_(torch.randn(stream.boundary.shape, generator=g))
    tail = stream.kv[:, length - 1 :]
    tail.copy_(torch.randn(tail.shape, generator=g))


class TestTree:
    def test_restore_gives_back_every_byte(self) -> None:
        stream, tree = stream_of(), CheckpointTree(1 << 30)
        kept = {}
        for length in (5, 9, 23):
            refresh(stream, length, length)
            tree.save(list(range(length)), stream)
            kept[length] = contents(stream, length)
        for length, want in kept.items():
            node = tree.find(list(range(length)))
            assert node is not None and node.length == length
            scramble(stream)
            tree.restore(node, stream)
            assert all(torch.equal(a, b) for a, b in zip(contents(stream, length), want, strict=True))

    def test_checkpoints_own_their_data(self) -> None:
        stream, tree = stream_of(), CheckpointTree(1 << 30)
        node = tree.save([1, 2, 3], stream)
        want = contents(stream, 3)
        scramble(stream)
        assert node is not None
        tree.restore(node, stream)
        assert all(torch.equal(a, b) for a, b in zip(contents(stream, 3), want, strict=True))

    def test_find_takes_the_longest_that_fits(self) -> None:
        stream, tree = stream_of(), CheckpointTree(1 << 30)
        for ids in ([1, 2], [1, 2, 3, 4], [1, 2, 9], [5]):
            tree.save(ids, stream)
        for ids, length in (([1, 2, 3, 4, 7], 4), ([1, 2, 3], 2), ([1, 2, 9], 3), ([1], 0), ([5, 1], 1), ([7], 0)):
            node = tree.find(ids)
            assert (node.length if node else 0) == length
        assert tree.find([]) is None

    def test_a_shorter_sequence_after_a_longer_one(self) -> None:
        """Saved out of order, both are found; neither is lost or wrong."""
        stream, tree = stream_of(), CheckpointTree(1 << 30)
        tree.save([1, 2, 3, 4, 5], stream)
        long = contents(stream, 5)
        refresh(stream, 3, 8)
        tree.save([1, 2, 3], stream)
        short = contents(stream, 3)
        for ids, want in (([1, 2, 3, 4, 5], long), ([1, 2, 3], short)):
            node = tree.find(ids)
            assert node is not None and node.length == len(ids)
            tree.restore(node, stream)
            assert all(torch.equal(a, b) for a, b in zip(contents(stream, len(ids)), want, strict=True))

    def test_the_same_sequence_is_stored_once(self) -> None:
        stream, tree = stream_of(), CheckpointTree(1 << 30)
        one = tree.save([1, 2, 3], stream)
        used = tree.used_bytes
        assert tree.save([1, 2, 3], stream) is one
        assert tree.used_bytes == used and len(tree) == 1
        assert tree.save([], stream) is None

    def test_bytes_are_counted_and_shared(self) -> None:
        stream, tree = stream_of(), CheckpointTree(1 << 30)
        first = tree.save(list(range(20)), stream)
        assert first is not None and tree.used_bytes == first.nbytes
        second = tree.save(list(range(24)), stream)
        assert second is not None and tree.used_bytes == first.nbytes + second.nbytes
        per_token = stream.kv[:, :1].nbytes
        assert second.kv is not None and second.kv.nbytes == 4 * per_token, "only what the parent does not hold"
        assert second.draft_kv is not None and second.draft_kv.shape[0] == 4
        tree.clear()
        assert tree.used_bytes == 0 and len(tree) == 0 and tree.find([0]) is None

    def test_the_least_recently_used_leaf_goes_first(self) -> None:
        stream = stream_of()
        probe = CheckpointTree(1 << 30)
        sizes = [n.nbytes for ids in ([1], [2], [3]) if (n := probe.save(ids, stream)) is not None]
        tree = CheckpointTree(sum(sizes))
        for token in (1, 2, 3):
            tree.save([token], stream)
        node = tree.find([1])
        assert node is not None
        tree.restore(node, stream)  # use it
        tree.save([4], stream)
        assert [tree.find([t]) is not None for t in (1, 2, 3, 4)] == [True, False, True, True]
        assert tree.used_bytes <= tree.budget

    def test_inner_nodes_stay_while_something_hangs_on_them(self) -> None:
        stream = stream_of()
        probe = CheckpointTree(1 << 30)
        for ids in ([1], [1, 2], [7]):
            probe.save(ids, stream)
        tree = CheckpointTree(probe.used_bytes)
        tree.save([1], stream)
        tree.save([1, 2], stream)
        tree.save([7], stream)
        tree.save([8], stream)  # [1] is the oldest but no leaf: [1, 2] goes
        lengths = [n.length if (n := tree.find(ids)) else 0 for ids in ([1, 2], [7], [8])]
        assert lengths == [1, 1, 1]

    def test_the_path_of_the_new_node_is_kept(self) -> None:
        stream = stream_of()
        probe = CheckpointTree(1 << 30)
        one = probe.save([1], stream)
        two = probe.save([1, 2], stream)
        assert one is not None and two is not None
        tree = CheckpointTree(one.nbytes + two.nbytes - 1)
        tree.save([1], stream)
        assert tree.save([1, 2], stream) is None, "its parent may not be evicted for it"
        assert tree.find([1, 2]) is not None and len(tree) == 1
        assert tree.used_bytes == one.nbytes

    def test_a_refused_save_evicts_nothing_that_it_needed_not(self) -> None:
        """A checkpoint larger than the whole budget cannot fit, whatever is thrown out."""
        stream = stream_of()
        probe = CheckpointTree(1 << 30)
        small = probe.save([1], stream)
        assert small is not None
        tree = CheckpointTree(small.nbytes + 100)
        tree.save([1], stream)
        assert tree.save(list(range(2, 40)), stream) is None
        assert tree.find([1]) is not None, "evicted for nothing"

    def test_a_deep_tree_needs_no_deep_stack(self) -> None:
        tree = CheckpointTree(1 << 40)
        node = tree._root
        for length in range(1, 3000):
            child = Saved(length=length, parent=node, ids=(length,))
            node.children.append(child)
            node = child
        found = tree.find(list(range(1, 3000)))
        assert found is not None and found.length == 2999 and len(tree) == 2999

    def test_no_budget(self) -> None:
        stream, tree = stream_of(), CheckpointTree(0)
        assert tree.save([1, 2], stream) is None
        assert len(tree) == 0 and tree.used_bytes == 0 and tree.find([1, 2]) is None

    def test_random_histories_agree_with_a_list(self) -> None:
        """find against every sequence that is still stored; the byte count against the nodes."""
        stream = stream_of()
        g = torch.Generator().manual_seed(3)
        for budget in (1 << 30, 200_000, 60_000):
            tree = CheckpointTree(budget)
            for _ in range(150):
                length = int(torch.randint(1, 9, (1,), generator=g))
                ids = torch.randint(0, 2, (length,), generator=g).tolist()
                tree.save(ids, stream)
                stored = {}
                for node in tree._nodes(tree._root):
                    path = [i for part in tree._path(node) for i in part.ids]
                    assert len(path) == node.length and tuple(path) not in stored
                    stored[tuple(path)] = node
                assert tree.used_bytes == sum(n.nbytes for n in stored.values()) <= budget
                asked = torch.randint(0, 2, (9,), generator=g).tolist()
                longest = max((n for n in range(10) if tuple(asked[:n]) in stored), default=0)
                found = tree.find(asked)
                assert (found.length if found else 0) == longest
