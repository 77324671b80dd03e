"""The verdict: exact cases, poisoned rows, row counts, residuals."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from soliton.sampling import accept, law

NAN = float("nan")


def i64(*values):
    return torch.tensor(values, dtype=torch.int64)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=8), st.data())
def test_greedy_chain(target, data):
    size = len(target)
    draft = data.draw(st.lists(st.integers(0, 2), min_size=size - 1, max_size=size - 1))
    rows = data.draw(st.integers(1, size))
    n = 0
    while n < rows - 1 and draft[n] == target[n]:
        n += 1
    want = [*draft[:n], target[n]] + [-1] * (size - n - 1)
    # Behind the rows in use: a target that agrees with the draft, and one that is out of range.
    for tail_target, tail_draft in ((5, 5), (-(2**40), 2**40), (-1, -1)):
        t = i64(*target[:rows], *[tail_target] * (size - rows))
        d = i64(*draft[: rows - 1], *[tail_draft] * (size - rows))
        verdict = accept.greedy_chain(t, d, i64(rows))
        assert verdict.n_accepted.tolist() == [n] and verdict.final.tolist() == [target[n]]
        assert verdict.tokens.tolist() == want and verdict.tokens.dtype == torch.int64


@pytest.mark.parametrize("vocab", [1, 7, 320, 321, 4097, 157_184])
def test_argmax_takes_the_lowest_of_equals(vocab):
    logits = torch.zeros(3, vocab)
    places = sorted({vocab // 3, vocab // 2, vocab - 1})
    logits[1, places] = 1.0
    logits[2, -1] = 2.0
    assert accept.argmax_lowest(logits).tolist() == [0, places[0], vocab - 1]
    assert accept.argmax_lowest(logits[1:2]).tolist() == [places[0]]


def scalar_rule(p, q, draft, rows, u, final_u):
    """The rule in plain Python over lists of probabilities."""
    for i in range(rows - 1):
        d = draft[i]
        if not u[i] * q[i][d] < p[i][d]:
            weights = [max(a - b, 0.0) for a, b in zip(p[i], q[i])]
            weights = weights if max(weights) > 0 else p[i]
            return i, weights
    return rows - 1, p[rows - 1]


@settings(max_examples=150, deadline=None)
@given(st.integers(2, 9), st.integers(1, 5), st.integers(0, 10**6), st.sampled_from(["random", "near", "equal", "one"]))
def test_sampled_chain_against_the_scalar_rule(vocab, size, seed, kind):
    g = torch.Generator().manual_seed(seed)
    p = torch.softmax(torch.randn(size, vocab, generator=g) * 2, -1)
    q = {
        "random": torch.softmax(torch.randn(size - 1, vocab, generator=g) * 2, -1),
        "near": torch.softmax(p[:-1].log() + torch.randn(size - 1, vocab, generator=g) * 0.1, -1),
        "equal": p[:-1].clone(),
        "one": p[:-1].clone(),
    }[kind]
    draft = law.pick(q, torch.rand(size - 1, generator=g))
    if kind == "one":
        q = accept.one_hot(draft, vocab)
    u, final_u = torch.rand(size - 1, generator=g), torch.rand(1, generator=g, dtype=torch.float64)
    for rows in range(1, size + 1):
        n, weights = scalar_rule(
            p.double().tolist(), q.double().tolist(), draft.tolist(), rows, u.double().tolist(), final_u.item()
        )
        want = law.pick(torch.tensor([weights], dtype=torch.float64), final_u).item()
        # Everything behind the rows in use is poison.
        bad_p, bad_q, bad_u, bad_d = p.clone(), q.clone(), u.clone(), draft.clone()
        bad_p[rows:], bad_q[rows - 1 :], bad_u[rows - 1 :], bad_d[rows - 1 :] = NAN, NAN, NAN, 2**40
        for args in ((p, q, draft, u), (bad_p, bad_q, bad_d, bad_u)):
            verdict = accept.sampled_chain(args[0], args[1], args[2], i64(rows), args[3], final_u)
            assert verdict.n_accepted.tolist() == [n] and verdict.final.tolist() == [want]
            assert verdict.tokens.tolist() == [*draft.tolist()[:n], want] + [-1] * (size - n - 1)
        if kind == "one":
            same = accept.sampled_chain(bad_p, None, bad_d, i64(rows), bad_u, final_u)
            assert torch.equal(same.tokens, verdict.tokens)
        each = torch.full((size,), NAN, dtype=torch.float64)
        each[n] = final_u
        assert torch.equal(accept.sampled_chain(p, q, draft, i64(rows), u, each).tokens, verdict.tokens)


def test_equal_laws_always_accept():
    p = torch.softmax(torch.randn(4, 50), -1)
    u = torch.full((3,), 1 - 2.0**-24)
    for _ in range(20):
        draft = law.pick(p[:3], torch.rand(3))
        assert accept.sampled_chain(p, p[:3].clone(), draft, i64(4), u, torch.rand(1)).n_accepted.item() == 3


def test_impossible_draft_is_refused_even_at_zero():
    p = torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    q = torch.tensor([[1.0, 0.0]])
    verdict = accept.sampled_chain(p, q, i64(0), i64(2), torch.zeros(1), torch.zeros(1))
    assert verdict.tokens.tolist() == [1, -1]


def test_no_residual_falls_back_to_the_target():
    # Rounding can leave q >= p everywhere, p(d) < q(d) at the draft, and nothing to draw from.
    p = torch.tensor([[0.0, 0.25, 0.7499999], [1.0, 0.0, 0.0]])
    q = torch.tensor([[0.0, 0.25, 0.75]])
    u = torch.tensor([1 - 2.0**-53], dtype=torch.float64)
    verdict = accept.sampled_chain(p, q, i64(2), i64(2), u, torch.zeros(1))
    assert verdict.tokens.tolist() == [1, -1]


def test_greedy_draft_keeps_the_residual_off_the_draft():
    p = torch.tensor([[0.4, 0.6], [0.5, 0.5]])
    for draft_probs in (None, accept.one_hot(i64(1), 2)):
        kept = accept.sampled_chain(p, draft_probs, i64(1), i64(2), torch.tensor([0.59]), torch.tensor([0.9]))
        assert kept.tokens.tolist() == [1, 1]
        refused = accept.sampled_chain(p, draft_probs, i64(1), i64(2), torch.tensor([0.61]), torch.tensor([0.9]))
        assert refused.tokens.tolist() == [0, -1]


def test_plain_decoding_is_one_row():
    p = torch.tensor([[0.5, 0.5]])
    empty = torch.empty(0)
    for u, want in ((0.1, 0), (0.6, 1)):
        args = (i64(1), empty, torch.tensor([u]))
        for draft_probs in (None, torch.empty(0, 2)):
            verdict = accept.sampled_chain(p, draft_probs, torch.empty(0, dtype=torch.int64), *args)
            assert verdict.tokens.tolist() == [want] and verdict.n_accepted.tolist() == [0]


def test_longer_buffers_are_read_up_to_the_rows():
    p = torch.softmax(torch.randn(3, 5), -1)
    q = torch.full((3, 5), NAN)
    q[:2] = p[:2]
    verdict = accept.sampled_chain(p, q, i64(1, 2, -7), i64(3), torch.tensor([0.5, 0.5, NAN]), torch.tensor([0.5]))
    assert verdict.n_accepted.tolist() == [2]
