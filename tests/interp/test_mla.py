"""The attention of one step against its reference: both ways to cut it, tails of the cache and scratch poisoned."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from soliton.ops import mla, norm
from soliton.ops.rope import reference as rope

LATENT, ROPE, HEADS = 64, 16, 16


def poisoned(*shape: int) -> Tensor:
    return torch.full(shape, float("nan"))


def attend(count: int, length: int, live: int, query: Tensor, cache: Tensor) -> Tensor:
    """Rows at ``length`` on; what lies behind the last live one is not a number, nor is the scratch."""
    from soliton.ops import mla_triton as kernels

    table = cache.clone()
    table[length + live :] = float("nan")
    out, given = poisoned(count, HEADS, LATENT), query[:count].clone()
    given[live:] = float("nan")
    scratch = kernels.scratch(count, HEADS, LATENT, table)
    for t in scratch:
        t.fill_(float("nan"))
    positions = torch.arange(length, length + count)
    kernels.attend(out, given, table, positions, torch.tensor([live]), 0.2, *scratch)
    return out


@pytest.mark.parametrize(("length", "capacity"), [(0, 640), (63, 640), (64, 640), (500, 640), (500, 20000)])
def test_attention(length: int, capacity: int) -> None:
    from soliton.ops import mla_triton as kernels

    torch.manual_seed(length)
    most = 6
    cache, query = torch.randn(capacity, LATENT + ROPE), torch.randn(most, HEADS, LATENT + ROPE)
    # one row has programs of its own for every block where six rows have them for every group
    fine = kernels.parts_of(HEADS, capacity)
    assert kernels.parts_of(most * HEADS, capacity)[0] == kernels.GROUP and (fine[0] == 1) == (capacity == 640)
    want = poisoned(most, HEADS, LATENT)
    mla.attend_reference(want, query, cache.clone(), torch.arange(length, length + most), torch.tensor([most]), 0.2)
    full = attend(most, length, most, query, cache)
    assert float((full - want).abs().max()) < 1e-5
    for count, live in ((1, 1), (4, 4), (4, 2), (6, 5), (6, 0)):
        got = attend(count, length, live, query, cache)
        assert bool(got[live:].isnan().all())
        # products of the interpreter's own have other sums for other shapes
        assert float((got[:live] - full[:live]).abs().max() if live else 0.0) < 1e-6


def test_heads() -> None:
    from soliton.ops import mla_triton as kernels

    torch.manual_seed(1)
    wide, w, gate = torch.randn(5, 3, 100), torch.randn(3, 64, 32), torch.randn(5, 9)
    out = poisoned(5, 3, 32)
    kernels.heads(out, wide[..., :64], w, torch.tensor([4]), gate[:, 2:5])
    want = torch.einsum("rnk,nkm->rnm", wide[..., :64], w) * gate[:, 2:5].sigmoid().unsqueeze(-1)
    assert float((out[:4] - want[:4]).abs().max()) < 1e-4 and bool(out[4:].isnan().all())


@pytest.mark.parametrize("turned", [True, False])
def test_enter(turned: bool) -> None:
    from soliton.ops import mla_triton as kernels

    torch.manual_seed(2)
    rows, heads, nope = 5, 3, 32
    q, w, scale = torch.randn(rows, heads, nope + ROPE), torch.randn(heads, nope, LATENT), torch.randn(LATENT)
    kv = torch.randn(rows, 100)[:, : LATENT + ROPE]
    turn, positions = torch.randn(rows, ROPE // 2, 2) if turned else None, torch.arange(rows) + 5
    query, cache = poisoned(rows, heads, LATENT + ROPE), poisoned(16, LATENT + ROPE)
    kernels.enter(query, q, w, cache, kv, scale, turn, positions, torch.tensor([4]), 1e-6)
    want = torch.empty(rows, heads, LATENT + ROPE)
    want[..., :LATENT] = torch.einsum("rnk,nkm->rnm", q[..., :nope], w)
    rope(want[..., LATENT:], q[..., nope:], turn)
    entries = torch.empty(rows, LATENT + ROPE)
    norm.reference(entries[:, :LATENT], kv[:, :LATENT], scale, 1e-6)
    rope(entries[:, LATENT:].unsqueeze(1), kv[:, LATENT:].unsqueeze(1), turn)
    assert float((query[:4] - want[:4]).abs().max()) < 1e-4 and bool(query[4:].isnan().all())
    assert float((cache[5:9] - entries[:4]).abs().max()) < 1e-5
    assert bool(cache[:5].isnan().all() and cache[9:].isnan().all())
