"""Penalties against a plain loop, bit-exact neutrality, and counts."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from soliton.sampling import penalties


def f32(value):
    return torch.tensor([value], dtype=torch.float32)


def i64(value):
    return torch.tensor([value], dtype=torch.int64)


def setup(vocab, rows, seed=0, **over):
    g = torch.Generator().manual_seed(seed)
    args = {
        "counts": torch.randint(0, 3, (vocab,), generator=g, dtype=torch.int32),
        "prompt_seen": torch.rand(vocab, generator=g) < 0.3,
        "bias": torch.zeros(vocab),
        "presence": f32(0.0),
        "frequency": f32(0.0),
        "repetition": f32(1.0),
        "generated": i64(5),
        "min_tokens": i64(0),
        "stop_mask": torch.rand(vocab, generator=g) < 0.2,
        "draft_tokens": torch.randint(0, vocab, (rows,), generator=g),
    }
    args.update(over)
    return torch.randn(rows, vocab, generator=g) * 3, args


def loop(logits, a):
    """One row at a time, one token at a time, in float32."""
    out = logits.numpy().copy()
    rows, vocab = out.shape
    for i in range(rows):
        count = a["counts"].numpy().copy()
        for j in range(i):
            count[int(a["draft_tokens"][j])] += 1
        for v in range(vocab):
            x = out[i, v]
            if count[v] > 0 or a["prompt_seen"][v]:
                r = np.float32(a["repetition"].item())
                x = x / r if x > 0 else x * r
            x = x - np.float32(a["frequency"].item()) * np.float32(count[v])
            x = x - np.float32(a["presence"].item()) * np.float32(count[v] > 0)
            x = x + a["bias"].numpy()[v]
            if a["stop_mask"][v] and a["generated"].item() + i < a["min_tokens"].item():
                x = np.float32(-np.inf)
            out[i, v] = x
    return torch.from_numpy(out)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40), st.integers(1, 6), st.integers(0, 10**6), st.floats(-2, 2, width=32),
    st.floats(-2, 2, width=32), st.floats(0.125, 2, width=32), st.integers(0, 12),
)  # fmt: skip
def test_equals_the_loop(vocab, rows, seed, presence, frequency, repetition, least):
    over = {"presence": f32(presence), "frequency": f32(frequency), "repetition": f32(repetition)}
    logits, a = setup(vocab, rows, seed, min_tokens=i64(least), **over)
    a["bias"] = torch.where(torch.rand(vocab, generator=torch.Generator().manual_seed(seed)) < 0.5, 1.5, 0.0)
    assert torch.equal(penalties.process(logits, **a), loop(logits, a))


def test_neutral_is_bit_identical():
    logits, a = setup(321, 5)
    logits[0, :6] = torch.tensor([0.0, -0.0, float("-inf"), float("inf"), 1e-42, -1e-42])
    a["counts"][:6] = 3
    got = penalties.process(logits, **a)
    assert torch.equal(got.view(torch.int32), logits.view(torch.int32))


@pytest.mark.parametrize("vocab", [13, 320, 321, 4097])
def test_rows_do_not_depend_on_company(vocab):
    over = {"presence": f32(0.3), "frequency": f32(0.7), "repetition": f32(1.3), "min_tokens": i64(20)}
    logits, a = setup(vocab, 32, **over)
    full = penalties.process(logits, **a)
    for rows in (1, 2, 3, 7, 31):
        assert torch.equal(penalties.process(logits[:rows].clone(), **a), full[:rows])
    # A later row equals plain decoding's single row once the drafts before it are counted.
    for i in (1, 6, 31):
        alone = dict(a)
        alone["counts"] = a["counts"] + penalties.draft_counts(a["draft_tokens"], i + 1, vocab)[i]
        alone["generated"] = a["generated"] + i
        assert torch.equal(penalties.process(logits[i : i + 1].clone(), **alone)[0], full[i])


def test_rows_behind_a_garbage_draft_only():
    logits, a = setup(20, 5, frequency=f32(1.0))
    want = penalties.process(logits, **a)
    for junk in (-1, 20, 2**40, -(2**40)):
        a["draft_tokens"][2:] = junk
        assert torch.equal(penalties.process(logits, **a)[:3], want[:3])


def test_commit_counts():
    counts = torch.tensor([1, 0, 0, 2], dtype=torch.int32)
    before = counts.data_ptr()
    penalties.commit_counts(counts, torch.tensor([3, 3, 1, -1]), i64(2))
    assert counts.tolist() == [1, 1, 0, 4] and counts.data_ptr() == before
    penalties.commit_counts(counts, torch.tensor([0, 3, 1, -1]), i64(0))
    assert counts.tolist() == [2, 1, 0, 4]
    penalties.commit_counts(counts, torch.tensor([0, 3, 1, 99]), i64(-1))
    assert counts.tolist() == [2, 1, 0, 4]
