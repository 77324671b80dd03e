"""Log-probabilities against float64, ties, padding and row independence."""

import math

import numpy as np
import pytest
import torch

from soliton.sampling.logprobs import TokenLogprob, assemble, gather


@pytest.mark.parametrize("vocab", [5, 320, 321, 4097])
def test_against_float64(vocab):
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(6, vocab, generator=g) * 5
    chosen = torch.randint(0, vocab, (6,), generator=g)
    lp, ids, top = gather(logits, chosen)
    x = logits.numpy().astype(np.float64)
    want = x - (x.max(-1, keepdims=True) + np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)))
    k = min(20, vocab)
    assert ids.shape == top.shape == (6, k) and lp.dtype == top.dtype == torch.float32
    order = np.argsort(-x, axis=-1, kind="stable")[:, :k]
    np.testing.assert_array_equal(ids.numpy(), order)
    np.testing.assert_allclose(top.numpy(), np.take_along_axis(want, order, -1), rtol=2e-7, atol=2e-7)
    np.testing.assert_allclose(lp.numpy(), want[np.arange(6), chosen.numpy()], rtol=2e-7, atol=2e-7)


def test_ties_take_the_lower_index_and_infinities_work():
    row = torch.tensor([[1.0, 3.0, -0.0, 3.0, 0.0, float("-inf"), 3.0]])
    lp, ids, top = gather(row, torch.tensor([5]), top=7)
    assert ids.tolist() == [[1, 3, 6, 0, 2, 4, 5]]
    assert lp.item() == -math.inf and top[0, -1].item() == -math.inf
    flat = gather(torch.zeros(1, 1000), torch.tensor([0]))
    assert flat[1].tolist() == [list(range(20))]
    assert flat[0].item() == pytest.approx(-math.log(1000), rel=1e-7)


def test_padding_and_zero_alternatives():
    lp, ids, top = gather(torch.randn(2, 9), torch.tensor([-1, 3]), top=0)
    assert math.isnan(lp[0].item()) and not math.isnan(lp[1].item())
    assert ids.shape == top.shape == (2, 0)


@pytest.mark.parametrize("vocab", [13, 320, 321, 4097])
def test_rows_do_not_depend_on_company(vocab):
    g = torch.Generator().manual_seed(2)
    logits = torch.randn(32, vocab, generator=g) * 4
    chosen = torch.randint(0, vocab, (32,), generator=g)
    full = gather(logits, chosen)
    poisoned = logits.clone()
    poisoned[7:] = float("nan")
    for a, b in zip(gather(poisoned, chosen), full, strict=True):
        assert torch.equal(a[:7], b[:7])
    for rows in (1, 2, 3, 5, 8, 31):
        for start in (0, 32 - rows):
            part = gather(logits[start : start + rows].clone(), chosen[start : start + rows])
            for a, b in zip(part, full, strict=True):
                assert torch.equal(a, b[start : start + rows])


def test_assemble():
    lp, ids, top = gather(torch.tensor([[0.0, 1.0, 2.0]] * 3), torch.tensor([2, 0, -1]))
    out = assemble([2, 0, -1], lp.tolist(), ids.tolist(), top.tolist(), count=2, top=2)
    assert [t.token_id for t in out] == [2, 0]
    assert [i for i, _ in out[1].top] == [2, 1] and out[0].logprob == out[0].top[0][1]
    assert isinstance(out[0], TokenLogprob)
