"""A block drafter's kernels against their references; what they must not read is poisoned."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from soliton.ops import draft

NAN = float("nan")


@pytest.mark.parametrize(("heads", "groups", "width"), [(4, 4, 32), (8, 2, 64), (6, 3, 16)])
@pytest.mark.parametrize(("length", "rows"), [(0, 8), (1, 5), (63, 8), (64, 8), (200, 16), (300, 3)])
def test_attention(heads: int, groups: int, width: int, length: int, rows: int) -> None:
    from soliton.ops import draft_triton as kernels

    torch.manual_seed(length + heads)
    cache, q = torch.randn(2, 384, groups, width), torch.randn(rows, heads, width)
    cache[:, length + rows :] = NAN
    want, got = (torch.full((rows, heads, width), NAN) for _ in range(2))
    draft.attend_reference(want, q, cache, torch.tensor([length]))
    scratch = kernels.scratch(q, cache)
    for t in scratch:
        t.fill_(NAN)
    kernels.attend(got, q, cache, torch.tensor([length]), *scratch)
    assert float((got - want).abs().max()) < 1e-5


def test_queries_and_keys() -> None:
    from soliton.ops import draft_triton as kernels

    torch.manual_seed(3)
    rows, heads, groups, width = 7, 6, 3, 32
    wide = torch.randn(rows, heads * width + 40)
    turn, weight = torch.randn(rows, width // 2, 2), torch.rand(width) + 0.5
    want, got = (torch.full((rows, heads, width), NAN) for _ in range(2))
    draft.query_reference(want, wide[:, : heads * width], weight, turn, 1e-6)
    kernels.query(got, wide[:, : heads * width], weight, turn, 1e-6)
    assert float((got - want).abs().max()) < 1e-5
    kv, positions = torch.randn(rows, 2 * groups * width + 8)[:, : 2 * groups * width], torch.arange(11, 11 + rows)
    caches = [torch.full((2, 40, groups, width), 7.0) for _ in range(2)]
    draft.store_reference(caches[0], kv, weight, turn, positions, 1e-6)
    kernels.store(caches[1], kv, weight, turn, positions, 1e-6)
    assert float((caches[1] - caches[0]).abs().max()) < 1e-5
    assert bool((caches[1][:, :11] == 7).all()) and bool((caches[1][:, 11 + rows :] == 7).all())


@pytest.mark.parametrize("kind", ["gated", "rnn"])
@pytest.mark.parametrize("width", [40, 64])
def test_markov_mixed(kind: str, width: int) -> None:
    """A whole block of three rows, the recurrent state handed on."""
    from soliton.model.dspark import DraftWeights, _markov_in
    from soliton.ops import markov_triton as kernels

    torch.manual_seed(5)
    rank, vocab = 16, 50
    shape = (rank, width + rank) if kind == "gated" else (3 * rank, 2 * rank + width)
    hidden, tokens = torch.randn(4, width + 8)[:, :width], torch.tensor([3, 49, 7])
    names = DraftWeights.__dataclass_fields__
    weights = DraftWeights(
        **dict.fromkeys(names, None)
        | {"markov_in": torch.randn(vocab, rank), "mix": torch.randn(shape) * 0.2, "mix_bias": torch.randn(shape[0])}
    )
    want, state = torch.full((2, rank), NAN), torch.full((1, rank), NAN)
    got, states = torch.full((rank,), NAN), torch.full((2, rank), NAN)
    for k in range(3):
        _markov_in(want, state, weights, SimpleNamespace(markov=kind), hidden, tokens, k + 1, k)
        given = (weights.markov_in, hidden, weights.mix, weights.mix_bias, tokens, k, k + 1)
        kernels.mix(got, states[(k + 1) % 2], states[k % 2], *given)
        assert float((got - want[0]).abs().max()) < 1e-5, k
        assert kind == "gated" or float((states[(k + 1) % 2] - state[0]).abs().max()) < 1e-5


@pytest.mark.parametrize("kind", ["vanilla", "rnn"])
@pytest.mark.parametrize(("vocab", "parts"), [(200, 4), (1000, 2), (1000, 16), (130, 8)])
def test_a_chain_of_greedy_drafts(kind: str, vocab: int, parts: int) -> None:
    """A row's token is chosen where the next row is made; of equal logits the lower index; padding is never chosen."""
    from soliton.ops import markov_triton as kernels

    torch.manual_seed(vocab + parts)
    rank, width, count, drafts = 16, 40, vocab + 24, 4
    base, w = torch.randn(drafts, count), torch.zeros(count, rank)
    base[:, vocab:], w[:vocab] = 100.0, torch.randn(vocab, rank)
    base[1, [20, 90]] = 60.0
    embedding, hidden = torch.randn(vocab, rank), torch.randn(drafts, width)
    mix, bias = torch.randn(3 * rank, 2 * rank + width) * 0.2, torch.randn(3 * rank)
    tokens, want = torch.tensor([7, -1, -1, -1, -1]), [7]
    states, mixed, last = torch.full((2, rank), NAN), torch.full((1, rank), NAN), None
    plain = torch.full((2, rank), NAN)
    w[[20, 90]] = 0
    for k in range(drafts):
        found = (torch.full((parts,), NAN), torch.full((parts,), -5, dtype=torch.int32))
        out = torch.full((1, count), NAN)
        if kind == "rnn":
            other, now = torch.full((rank,), NAN), torch.tensor(want)
            kernels.mix(other, plain[(k + 1) % 2], plain[k % 2], embedding, hidden, mix, bias, now, k, k)
            e = other
            given = (embedding, hidden, mix, bias, tokens, k, k, last)
            kernels.mix(mixed[0], states[(k + 1) % 2], states[k % 2], *given)
            kernels.chain(out, base, mixed, w.t(), torch.zeros(1, dtype=torch.int64), 0, k, vocab, found, None)
        else:
            e = embedding[want[-1]]
            kernels.chain(out, base, embedding, w.t(), tokens, k, k, vocab, found, last)
        logits = base[k] + w @ e
        assert float((out[0] - logits).abs().max()) < 1e-5
        want.append(int(logits[:vocab].argmax()))
        last = found
    kernels.chosen(tokens, last, drafts, vocab)
    assert tokens.tolist() == want and want[2] == 20


def test_rows_of_block_and_context() -> None:
    from soliton.ops import draft_triton as kernels

    table, tokens = torch.randn(50, 8, 2), torch.tensor([9, 1, 1])
    ids, positions, turn = torch.full((5,), 3), torch.full((5,), -1), torch.full((5, 8, 2), NAN)
    kernels.block_rows(ids, positions, turn, tokens, torch.tensor([20]), table)
    assert ids.tolist() == [9, 3, 3, 3, 3] and positions.tolist() == [20, 21, 22, 23, 24]
    assert torch.equal(turn, table[20:25])
    for taken, before in ((0, 0), (0, 1), (3, 0)):
        live, drafted, turn = torch.tensor([-1]), torch.tensor([before]), torch.full((5, 8, 2), NAN)
        kernels.context_rows(live, drafted, turn, torch.tensor([taken]), positions, table)
        assert (int(live), int(drafted)) == (max(taken, 1), max(before, int(taken > 0)))
        assert torch.equal(turn, table[20:25])


@pytest.mark.parametrize("markov", [True, False])
@pytest.mark.parametrize("first", [0, 1])
def test_confidences(markov: bool, first: int) -> None:
    from soliton.ops import draft_triton as kernels

    torch.manual_seed(first)
    count, hidden, w, bias = 6, torch.randn(6 + first, 40), torch.randn(1, 40 + 12 * markov), torch.randn(1)
    embedding, tokens = torch.randn(30, 12), torch.randint(0, 30, (7,))
    rows = hidden[first:]
    if markov:
        rows = torch.cat([rows, embedding[tokens[:count]]], 1)
    got = torch.full((count,), NAN)
    kernels.confide(got, hidden, w, bias, embedding if markov else None, tokens)
    assert float((got - ((rows * w).sum(1) + bias)).abs().max()) < 1e-4


@pytest.mark.parametrize("seed", range(30))
def test_schedules(seed: int) -> None:
    """As the rules of speculation.schedule, for any confidences; a step with fewer rows keeps them."""
    from soliton.ops import draft_triton as kernels
    from soliton.speculation import schedule as rules

    torch.manual_seed(seed)
    drafts = 1 + seed % 9
    logits, temperatures = torch.randn(drafts) * 3, torch.rand(drafts) + 0.5
    conditional, survival = rules.confidences(logits, temperatures)
    cost = torch.rand(drafts + 1).cumsum(0) + 1
    wanted = {
        "threshold": rules.rows_threshold(conditional, 0.4),
        "early": rules.rows_cost(survival, 0.0, cost, early_stop=True),
        "best": rules.rows_cost(survival, 0.0, cost, early_stop=False),
    }
    for name, want in wanted.items():
        for before in (drafts + 1, 1, 0):
            rows = torch.tensor([before])
            given = None if name == "threshold" else cost
            kernels.schedule(rows, logits, temperatures, given, 0.4, name == "early")
            assert int(rows) == min(before, int(want))
