"""A block drafter's kernels against their references; what they must not read is poisoned."""

from __future__ import annotations

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


def test_markov() -> None:
    from soliton.ops import draft_triton as kernels

    torch.manual_seed(4)
    count, rank = 200, 16
    base, embedding, w = torch.randn(5, count), torch.randn(count, rank), torch.randn(count, rank)
    tokens = torch.tensor([3, 150, 7])
    got = torch.full((2, count), NAN)
    kernels.markov(got, base, embedding, w.t(), tokens, 1, 4)
    assert float((got[0] - (base[4] + embedding[150] @ w.t())).abs().max()) < 1e-5
    assert bool(got[1].isnan().all())
