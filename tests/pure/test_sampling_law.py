"""The token law against float64 numpy, the two searches against each other, row independence, and the draw."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from soliton.sampling import law
from soliton.sampling.rowwise import exp_weights, fixed_mass, mass_bits, order_key


def f32(value):
    return torch.tensor([value], dtype=torch.float32)


def i64(value):
    return torch.tensor([value], dtype=torch.int64)


def dist(logits, t=1.0, k=0, p=1.0, m=0.0, method=None):
    return law.distribution(logits, f32(t), i64(k), f32(p), f32(m), method=method)


def reference(row, t, k, p, m):
    """One row in float64, by the words of the law. Returns the probabilities and how near an edge was."""
    z = row.astype(np.float64) / np.float64(np.float32(t))
    order = np.argsort(-row / np.float32(t), kind="stable")
    if k > 0:
        z[order[k:]] = -np.inf
    w = np.exp(z - z.max())
    probs = w / w.sum()
    margin = np.inf
    if p < 1:
        order = np.argsort(-probs, kind="stable")
        total = np.cumsum(probs[order])
        margin = np.abs(total - np.float32(p)).min()
        size = int(np.searchsorted(total, np.float64(np.float32(p)), side="left")) + 1
        probs[order[size:]] = 0
    edge = np.float64(np.float32(m)) * probs.max()
    if m > 0:
        margin = min(margin, np.abs(probs[probs > 0] / probs.max() - np.float64(np.float32(m))).min())
    probs[probs < edge] = 0
    return probs / probs.sum(), margin


SETTINGS = [
    (1.0, 0, 1.0, 0.0), (0.7, 0, 1.0, 0.0), (1.0, 5, 1.0, 0.0), (1.0, 0, 0.8, 0.0), (1.0, 0, 1.0, 0.1),
    (0.6, 20, 0.95, 0.0), (1.5, 50, 0.5, 0.02), (0.3, 1, 0.9, 0.0), (2.0, 10**6, 0.001, 1.0),
]  # fmt: skip


@pytest.mark.parametrize("method", ["sort", "threshold"])
@pytest.mark.parametrize("vocab", [1, 2, 13, 320, 4097])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_against_float64(setting, vocab, method):
    t, k, p, m = setting
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    got = dist(logits, t, k, p, m, method)
    assert got.dtype == torch.float32
    for i in range(4):
        want, margin = reference(logits[i].numpy(), t, k, p, m)
        if margin > 1e-6:
            np.testing.assert_array_equal(got[i].numpy() > 0, want.astype(np.float32) > 0)
            np.testing.assert_allclose(got[i].numpy(), want, rtol=3e-6, atol=1e-12)


def test_off_is_the_plain_softmax():
    logits = torch.randn(3, 999) * 20
    for method in ("sort", "threshold"):
        got = dist(logits, k=-1, method=method)
        torch.testing.assert_close(got, torch.softmax(logits.double(), -1).float(), rtol=1e-5, atol=1e-12)
        assert torch.equal(got > 0, torch.softmax(logits.double(), -1).float() > 0)


def test_ties_go_to_the_lower_index():
    row = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0, 1.0, -0.0]])
    for method in ("sort", "threshold"):
        assert dist(row, k=2, method=method).gt(0).nonzero()[:, 1].tolist() == [1, 2]
        assert dist(row, k=4, method=method).gt(0).nonzero()[:, 1].tolist() == [0, 1, 2, 4]
        assert dist(row, k=6, method=method).gt(0).nonzero()[:, 1].tolist() == [0, 1, 2, 3, 4, 5]
        # 0.0 and -0.0 are equal: the first of them stays.
        flat = torch.zeros(1, 8)
        assert dist(flat, p=0.5, method=method).tolist() == [[0.25] * 4 + [0.0] * 4]
        assert dist(flat, p=0.51, method=method).gt(0).sum() == 5
        assert dist(flat, p=1e-9, method=method).tolist() == [[1.0] + [0.0] * 7]
        assert dist(flat, m=1.0, method=method).gt(0).all()


def test_masked_tokens_never_come_back():
    row = torch.full((1, 50), float("-inf"))
    row[0, [3, 40]] = torch.tensor([1.0, 0.0])
    for method in ("sort", "threshold"):
        for k, p in ((0, 1.0), (10, 1.0), (0, 0.999), (10, 0.999)):
            assert dist(row, k=k, p=p, method=method).gt(0).nonzero()[:, 1].tolist() == [3, 40]


values = st.sampled_from([-3.0, -1.0, -0.0, 0.0, 0.5, 0.5000001, 1.0, 7.25, 1e-40, -1e-40, float("-inf"), -90.0])
rows = st.lists(st.one_of(values, st.floats(-30, 30, width=32)), min_size=1, max_size=60)


@settings(max_examples=300, deadline=None)
@given(
    rows,
    st.integers(-1, 70),
    st.floats(2.0**-20, 1, width=32),
    st.floats(0, 1, width=32),
    st.floats(0.125, 3, width=32),
)
def test_searches_keep_the_same_sets(row, k, p, m, t):
    logits = torch.tensor([[*row, 0.25]])
    sorted_k = law.top_k_sorted(logits, i64(k))
    assert torch.equal(sorted_k, law.top_k_threshold(logits, i64(k)))
    assert int(sorted_k.sum()) == (len(row) + 1 if k <= 0 else min(k, len(row) + 1))
    weights = torch.where(sorted_k, exp_weights(logits), 0.0)
    sorted_p = law.top_p_sorted(weights, f32(p))
    assert torch.equal(sorted_p, law.top_p_threshold(weights, f32(p)))
    assert torch.equal(dist(logits, t, k, p, m, "sort"), dist(logits, t, k, p, m, "threshold"))
    if p < 1:  # the smallest set: it reaches the mass, and does not without its last member
        mass = fixed_mass(weights)[0]
        kept, need = mass[sorted_p[0]], float(mass.sum()) * float(f32(p).double())
        assert float(kept.sum()) >= need * (1 - 1e-15)
        assert float(kept.sum() - kept.min()) < need or len(kept) == 1
        assert int(kept.min()) >= int(mass[~sorted_p[0]].max()) if not bool(sorted_p.all()) else True


def test_searches_agree_on_a_large_vocabulary():
    logits = torch.randn(2, 157_184, generator=torch.Generator().manual_seed(3)) * 2
    logits[1] = (logits[1] * 4).round() / 4  # many ties
    for t, k, p, m in ((1.0, 0, 0.95, 0.0), (0.8, 1000, 0.9, 0.001)):
        assert torch.equal(dist(logits, t, k, p, m, "sort"), dist(logits, t, k, p, m, "threshold"))


@pytest.mark.parametrize(
    ("method", "vocab"),
    [*(("sort", v) for v in (12, 13, 320, 321, 4096, 4097)), *(("threshold", v) for v in (12, 13, 320, 321))],
)
def test_rows_do_not_depend_on_company(method, vocab):
    logits = torch.randn(32, vocab, generator=torch.Generator().manual_seed(vocab)) * 4
    args = (0.7, 40, 0.97, 0.001, method)
    full, soft = dist(logits, *args), dist(logits, 0.7, method=method)
    u = torch.rand(32, generator=torch.Generator().manual_seed(1))
    tokens = law.pick(full, u)
    for count in range(1, 33) if vocab in (13, 321) else (1, 2, 3, 4, 7, 16, 31):
        start = (count * 11) % (33 - count)
        here = slice(start, start + count)
        part = logits[here].clone()
        assert torch.equal(dist(part, *args), full[here])
        if count < 4:
            assert torch.equal(dist(part, 0.7, method=method), soft[here])
        assert torch.equal(law.pick(full[here].clone(), u[here]), tokens[here])


def test_rows_do_not_depend_on_company_at_157k():
    logits = torch.randn(8, 157_184, generator=torch.Generator().manual_seed(5)) * 4
    full = dist(logits, 0.9, 100, 0.95)
    for start, count in ((0, 1), (3, 1), (7, 1), (1, 3)):
        assert torch.equal(dist(logits[start : start + count].clone(), 0.9, 100, 0.95), full[start : start + count])


def test_poisoned_rows_harm_nobody():
    logits = torch.randn(6, 321)
    for method in ("sort", "threshold"):
        want = dist(logits, 0.7, 40, 0.9, 0.01, method)
        bad = logits.clone()
        bad[3:] = float("nan")
        got = dist(bad, 0.7, 40, 0.9, 0.01, method)
        assert torch.equal(got[:3], want[:3])
        tokens = law.pick(got, torch.rand(6))
        assert bool(((tokens >= 0) & (tokens < 321)).all())


def test_order_key():
    x = torch.tensor([-float("inf"), -3e38, -1.0, -1e-45, 0.0, 1e-45, 1.0, 3e38, float("inf")])
    key = order_key(x)
    assert bool((key[1:] > key[:-1]).all()) and order_key(torch.tensor([-0.0])) == order_key(torch.tensor([0.0]))


@pytest.mark.parametrize("vocab", [1, 2, 3, 320, 157_184, 2**18, 2**18 + 1])
def test_mass_cannot_overflow(vocab):
    assert vocab * 2 ** mass_bits(vocab) <= 2**62


def test_pick_is_the_inverse_of_the_cumulative_sum():
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]])
    for u, want in ((0.0, 1), (0.2499999, 1), (0.25, 3), (0.7499999, 3), (0.75, 4), (0.9999999, 4)):
        assert law.pick(probs, torch.tensor([u], dtype=torch.float64)).item() == want
    assert law.pick(probs, torch.tensor([1.0])).item() == 4  # even outside the range
    assert law.pick(probs * 1e-30, torch.tensor([0.3])).item() == 3  # scale does not matter


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([0.0, 1e-30, 1e-9, 0.1, 0.5, 1.0]), min_size=1, max_size=40), st.floats(0, 1))
def test_pick_never_takes_an_impossible_token(weights, u):
    if not any(weights):
        weights.append(0.1)
    row = torch.tensor([weights])
    for at in (u, 0.0, 1 - 2.0**-53):
        token = law.pick(row, torch.tensor([at], dtype=torch.float64)).item()
        assert weights[token] > 0
    cumulative = np.cumsum(np.array(weights, dtype=np.float64))
    inner = int(np.searchsorted(cumulative / cumulative[-1], u, side="right"))
    if np.abs(cumulative / cumulative[-1] - u).min() > 1e-9 and inner < len(weights):
        assert law.pick(row, torch.tensor([u], dtype=torch.float64)).item() == inner


def test_pick_takes_many_rows():
    probs: Tensor = dist(torch.randn(1, 33)).expand(5000, 33)
    tokens = law.pick(probs, (torch.arange(5000, dtype=torch.float64) + 0.5) / 5000)
    share = torch.bincount(tokens, minlength=33).double() / 5000
    assert float((share - probs[0].double()).abs().max()) <= 1.01 / 5000
