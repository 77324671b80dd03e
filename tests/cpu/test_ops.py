"""Every op against a plain float64 computation, outputs and dead rows poisoned; and each row's bits alone.

Row independence is the ground under everything else here: what a row computes may not depend on how many rows stand
beside it, on its place among them, or on what the dead ones hold.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import helpers as h
from helpers import threads_as_before  # noqa: F401 - takes effect by being here
from soliton import Engine
from soliton.model.decoder import Memory, Rows, decoder
from soliton.model.mtp import mtp
from soliton.ops import kda, linear, mla, moe, norm, rope, router, select
from soliton.ops.embed import reference as embed
from soliton.ops.tape import Tape
from soliton.ops.weight import pack

CPU = torch.device("cpu")
NAN = float("nan")
R = 5


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, NAN, dtype=dtype) if dtype.is_floating_point else torch.full(shape, -(2**40), dtype=dtype)


def close(got: Tensor, want: Tensor, tolerance: float = 2e-6) -> None:
    """Within ``tolerance`` of the scale of ``want``; bfloat16 results may be off by one rounding as well."""
    assert not got.isnan().any()
    if got.dtype == torch.bfloat16:
        tolerance = max(tolerance, 2.0**-8)
    torch.testing.assert_close(
        got.double(), want.double(), rtol=tolerance, atol=tolerance * float(want.abs().max() + 1e-30)
    )


BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


class TestValues:
    @BOTH
    @pytest.mark.parametrize(("inputs", "outputs"), [(64, 64), (32, 100), (640, 256), (1100, 72)])
    def test_linear(self, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        matrix, x = randn(outputs, inputs).to(dtype), randn(R, inputs, dtype=dtype)
        weight = pack([matrix[:30], matrix[30:]], device=CPU, dtype=dtype)
        out = poisoned(R, weight.padded, dtype=dtype)
        linear.reference(out, x, weight)
        close(out[:, :outputs], x.double() @ matrix.double().t())
        assert not out[:, outputs:].any(), "padding columns are zero"

    def test_linear_over_many_rows(self) -> None:
        """Also where the last tile would have one row."""
        weight = pack([randn(64, 96)], device=CPU, dtype=torch.float32)
        for rows in (2, 63, 64, 65, 66, 129, 200):
            x = randn(rows, 96)
            out = poisoned(rows, weight.padded)
            linear.reference(out, x, weight)
            close(out, x.double() @ weight.data.double())

    @BOTH
    def test_linear_heads(self, dtype: torch.dtype) -> None:
        x, w = randn(R, 3, 16, dtype=dtype), randn(3, 16, 24)
        out = poisoned(R, 3, 24, dtype=dtype)
        linear.heads_reference(out, x, w)
        close(out, torch.einsum("rnk,nkm->rnm", x.double(), w.double()))

    @BOTH
    @pytest.mark.parametrize("eps", [1e-6, 0.5])
    def test_norm(self, eps: float, dtype: torch.dtype) -> None:
        x, weight = randn(R, 64, dtype=dtype) * 3, randn(64)
        out = poisoned(R, 64, dtype=dtype)
        norm.reference(out, x, weight, eps)
        wide = x.double()
        close(out, wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double())

    def test_norm_of_a_slice(self) -> None:
        x, weight = randn(R, 80), randn(32)
        out = poisoned(R, 64)
        norm.reference(out[:, 32:], x[:, 8:40], weight, 1e-6)
        wide = x[:, 8:40].double()
        close(out[:, 32:], wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double())
        assert out[:, :32].isnan().all()

    @BOTH
    def test_add(self, dtype: torch.dtype) -> None:
        x, delta = randn(R, 64, dtype=dtype), randn(R, 80, dtype=dtype)[:, :64]
        want = x.double() + delta.double()
        norm.add_reference(x, delta)
        close(x, want)
        if dtype == torch.bfloat16:
            assert torch.equal(x, want.to(dtype)), "one rounding"

    @BOTH
    def test_norm_after_the_recurrence(self, dtype: torch.dtype) -> None:
        o, gate, weight = randn(R, 4, 16, dtype=dtype), randn(R, 80, dtype=dtype), randn(16)
        out = poisoned(R, 64, dtype=dtype)
        norm.gated_reference(out.view(R, 4, 16), o, gate[:, 8:72].unflatten(1, (4, 16)), weight, 1e-5)
        wide = o.double()
        want = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        close(out.view(R, 4, 16), want * gate[:, 8:72].double().sigmoid().view(R, 4, 16))

    @BOTH
    @pytest.mark.parametrize(("heads", "dim"), [(1, 8), (4, 8), (1, 64), (3, 16)])
    def test_rope(self, heads: int, dim: int, dtype: torch.dtype) -> None:
        table = rope.table(300, rope.inverse_frequencies(dim, 6e6), 1.0, CPU)
        places = torch.tensor([0, 1, 7, 100, 299])
        x = randn(R, heads, dim, dtype=dtype)
        out = poisoned(R, heads, dim, dtype=dtype)
        rope.reference(out, x, table[places])
        angle = places.double()[:, None] * 6e6 ** (-torch.arange(0, dim, 2).double() / dim)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        a, b = x.double()[..., 0::2], x.double()[..., 1::2]
        want = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        close(out, want)

    def test_rope_none_copies(self) -> None:
        x, out = randn(R, 2, 8), poisoned(R, 2, 8)
        rope.reference(out, x, None)
        assert torch.equal(out, x)

    def test_rope_vector(self) -> None:
        """Published: d = 8, theta 6e6, position 3, x = 1..8; half-split order there, pairs in place here."""
        want = [-1.2722325, 2.7521769, 4.9926478, 6.9998020, -1.8388650, 4.1743888, 6.0061192, 8.0001732]
        x = torch.arange(1.0, 9.0).view(1, 1, 8)
        out = poisoned(1, 1, 8)
        rope.reference(out, x, rope.table(4, rope.inverse_frequencies(8, 6e6), 1.0, CPU)[3:])
        assert torch.cat([out[0, 0, 0::2], out[0, 0, 1::2]]).tolist() == pytest.approx(want, abs=1e-6)

    def test_yarn_keeps_fast_pairs_and_stretches_slow_ones(self) -> None:
        plain, yarn = (rope.inverse_frequencies(64, 6e6, f, 131072) for f in (1.0, 2.0))
        assert torch.equal(plain[:4], yarn[:4]) and torch.allclose(yarn[-4:], plain[-4:] / 2)
        assert ((yarn <= plain) & (yarn >= plain / 2)).all()

    @BOTH
    def test_conv(self, dtype: torch.dtype) -> None:
        window, weight = randn(3 + R, 64, dtype=dtype), randn(4, 64)
        out = poisoned(R, 64, dtype=dtype)
        before = window.clone()
        kda.conv_reference(out, window, weight)
        want = torch.stack([sum(weight[j].double() * window[i + j].double() for j in range(4)) for i in range(R)])
        close(out, want * want.sigmoid())
        assert torch.equal(window, before)

    @BOTH
    @pytest.mark.parametrize("gate_law", ["bounded", "softplus"])
    def test_gates(self, gate_law: Any, dtype: torch.dtype) -> None:
        f, b, a, bias = randn(R, 64, dtype=dtype) * 4, randn(R, 4, dtype=dtype), randn(64).exp(), randn(64)
        decay, beta = poisoned(R, 64), poisoned(R, 4)
        kda.gates_reference(decay, beta, f, b, a, bias, gate_law, -5.0)
        x = f.double() + bias.double()
        if gate_law == "bounded":
            g = -5.0 * (a.double() * x).sigmoid()
        else:
            g = -a.double() * torch.nn.functional.softplus(x)
        close(decay, g.exp(), 1e-5)
        close(beta, b.double().sigmoid())

    def test_gate_vector(self) -> None:
        """Published: A_log .3, f .7, dt .1: -3.73236304 bounded, -1.58082055 with softplus."""
        for gate_law, want in (("bounded", -3.73236304), ("softplus", -1.58082055)):
            decay, beta = poisoned(2, 32), poisoned(2, 1)
            values = torch.full((2, 32), 0.7), torch.zeros(2, 1), torch.full((32,), 0.3).exp(), torch.full((32,), 0.1)
            kda.gates_reference(decay, beta, *values, gate_law, -5.0)  # type: ignore[arg-type]
            assert decay.log().tolist()[0] == pytest.approx([want] * 32, abs=2e-6)

    @BOTH
    def test_l2norm(self, dtype: torch.dtype) -> None:
        x = randn(R, 6, 16, dtype=dtype)
        x[2] *= 1e-4  # the epsilon counts: it is inside the root, on the sum
        out = poisoned(R, 6, 16)
        kda.l2norm_reference(out, x, 1e-6, 0.25)
        want = x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt()
        want[:, :3] *= 0.25
        close(out, want)

    @BOTH
    @pytest.mark.parametrize("limit", [0.0, 1.0])
    def test_swiglu(self, limit: float, dtype: torch.dtype) -> None:
        both = randn(R, 128, dtype=dtype) * 2
        out = poisoned(R, 64, dtype=dtype)
        moe.swiglu_reference(out, both[:, :64], both[:, 64:], limit)
        close(out, swiglu(both[:, :64], both[:, 64:], limit))

    def test_mla_store(self) -> None:
        cache = poisoned(16, 12)
        latent, key = randn(R, 8), randn(R, 4)
        mla.store_reference(cache, latent, key, torch.arange(3, 3 + R))
        assert torch.equal(cache[3 : 3 + R], torch.cat([latent, key], 1))
        assert cache[:3].isnan().all() and cache[3 + R :].isnan().all()

    @BOTH
    def test_mla_gate(self, dtype: torch.dtype) -> None:
        o, gate = randn(R, 3, 16, dtype=dtype), randn(R, 70, dtype=dtype)[:, 60:63]
        want = o.double() * gate.double().sigmoid().unsqueeze(-1)
        mla.gate_reference(o, o, gate)
        close(o, want)

    def test_embed(self) -> None:
        table = randn(20, 8)
        for dtype in (torch.float32, torch.bfloat16):
            out = poisoned(3, 8, dtype=dtype)
            embed(out, torch.tensor([19, 0, 0]), table)
            assert torch.equal(out, table[[19, 0, 0]].to(dtype))


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    g = gate.double() * gate.double().sigmoid()
    u = up.double()
    return (g.clamp(max=limit) * u.clamp(-limit, limit)) if limit else g * u


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """(o, the states after each row) in float64, in the order of the paper: decay, read, write, read."""
    s, outputs, states = state.double(), [], []
    for r in range(q.shape[0]):
        s = s * decay[r].double().unsqueeze(-1)
        error = v[r].double() - torch.einsum("nkv,nk->nv", s, k[r].double())
        s = s + torch.einsum("nk,nv->nkv", k[r].double(), beta[r].double().unsqueeze(-1) * error)
        outputs.append(torch.einsum("nkv,nk->nv", s, q[r].double()))
        states.append(s)
    return torch.stack(outputs), states


def operands(rows: int, heads: int = 3, keys: int = 16, values: int = 24, seed: int = 0) -> dict[str, Tensor]:
    unit = torch.nn.functional.normalize
    return {
        "q": unit(randn(rows, heads, keys, seed=seed), dim=-1) * keys**-0.5,
        "k": unit(randn(rows, heads, keys, seed=seed + 1), dim=-1),
        "v": randn(rows, heads, values, seed=seed + 2),
        "decay": torch.exp(-5 * randn(rows, heads, keys, seed=seed + 3).sigmoid()),
        "beta": randn(rows, heads, seed=seed + 4).sigmoid(),
    }


class TestRecurrence:
    @pytest.mark.parametrize("live", [1, 3, 6])
    def test_chain(self, live: int) -> None:
        x, start = operands(6), randn(3, 16, 24)
        for value in x.values():
            value[live:] = NAN
        states, o = poisoned(7, 3, 16, 24), poisoned(6, 3, 24)
        states[0] = start
        kda.chain_reference(o, *x.values(), states, torch.tensor([live]))
        want, after = recurrence(*(t[:live] for t in x.values()), start)
        close(o[:live], want)
        for row in range(live):
            close(states[row + 1], after[row])
        assert torch.equal(states[0], start), "the committed state is only read"
        assert states[live + 1 :].isnan().all() and o[live:].isnan().all()

    def test_sweep_has_the_bits_of_the_chain(self) -> None:
        x, start = operands(9), randn(3, 16, 24)
        states = poisoned(10, 3, 16, 24)
        states[0] = start
        one, two, state = poisoned(9, 3, 24), poisoned(9, 3, 24), start.clone()
        kda.chain_reference(one, *x.values(), states, torch.tensor([9]))
        kda.sweep_reference(two, *x.values(), state)
        assert torch.equal(one, two) and torch.equal(state, states[9])

    @pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 50])
    @pytest.mark.parametrize("fast", [False, True], ids=["bounded", "vanishing"])
    def test_chunk_against_sweep(self, rows: int, fast: bool) -> None:
        """Within 1e-4; also with decays that underflow, which the softplus law can make."""
        x, start = operands(rows, seed=5), randn(3, 16, 24)
        if fast:
            x["decay"][:, 0] = 1e-30
            x["decay"][:, 1, :8] = 0.0
        one, two = poisoned(rows, 3, 24), poisoned(rows, 3, 24)
        swept, chunked = start.clone(), start.clone()
        kda.sweep_reference(one, *x.values(), swept)
        kda.chunk_reference(two, *x.values(), chunked)
        torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(chunked, swept, rtol=1e-4, atol=1e-4)

    def test_toy_vector(self) -> None:
        """Published: two rows, K = V = 2, one head."""
        q, k = torch.tensor([[[1.0, 2], [0, 0]]]), torch.tensor([[[2.0, 1], [0, 0]]])
        q, k = torch.tensor([[1.0, 2], [0.5, -1]]).view(2, 1, 2), torch.tensor([[2.0, 1], [1, 1]]).view(2, 1, 2)
        both = torch.cat([q, k], 1)
        normed = poisoned(2, 2, 2)
        kda.l2norm_reference(normed, both, 1e-6, 2**-0.5)
        v = torch.tensor([[1.0, -1], [0.5, 2]]).view(2, 1, 2)
        g = torch.tensor([[-0.1, -0.7], [-1.2, -0.3]]).view(2, 1, 2)
        beta = torch.tensor([[0.6], [0.9]])
        o, state = poisoned(2, 1, 2), torch.zeros(1, 2, 2)
        for function in (kda.sweep_reference, kda.chunk_reference):
            o.fill_(NAN)
            state.zero_()
            function(o, normed[:, :1], normed[:, 1:], v, g.exp(), beta, state)
            assert o.flatten().tolist() == pytest.approx([0.33941119, -0.33941119, -0.12394099, -0.37917398], abs=1e-6)
            want = [0.31764676, 1.27334310, 0.35479136, 1.23619850]
            assert state.flatten().tolist() == pytest.approx(want, abs=1e-6)

    @pytest.mark.parametrize("taken", [0, 1, 2, 4])
    def test_commit(self, taken: int) -> None:
        states, window = randn(5, 2, 3, 4, 4), randn(3 + 4, 2, 24)
        states[taken + 1 :] = NAN
        window[3 + taken :] = NAN
        want = states[taken].clone(), window[taken : taken + 3].clone()
        kda.commit_reference(states, window, torch.tensor([taken]), torch.tensor([0]))
        assert torch.equal(states[0], want[0]) and torch.equal(window[:3], want[1])


class TestAttention:
    @pytest.mark.parametrize("last", [0, 4, 62, 63, 64, 127, 128, 255, 256, 300])
    @BOTH
    def test_against_a_softmax(self, last: int, dtype: torch.dtype) -> None:
        rows = min(R, last + 1)
        positions = torch.arange(last - rows + 1, last + 1)
        cache, q = randn(4 * mla.BLOCK, 40, dtype=dtype), randn(rows, 2, 40, dtype=dtype)
        cache[last + 1 :] = NAN  # what was never written, or by a chain that was dropped
        out = poisoned(rows, 2, 32, dtype=dtype)
        mla.attend_reference(out, q, cache, positions, torch.tensor([rows]), 0.3)
        for row, place in enumerate(positions.tolist()):
            seen = cache[: place + 1].double()
            weights = torch.softmax(0.3 * torch.einsum("nd,pd->np", q[row].double(), seen), -1)
            close(out[row], weights @ seen[:, :32], 5e-6)

    @pytest.mark.parametrize("live", [1, 2, 4])
    def test_dead_rows_change_nothing(self, live: int) -> None:
        start = mla.BLOCK - 3
        cache, q = randn(3 * mla.BLOCK, 40), randn(6, 2, 40)
        positions = torch.arange(start, start + 6)
        cache[start + live :] = NAN
        want = poisoned(6, 2, 32)
        mla.attend_reference(want, q, cache.clone(), positions, torch.tensor([live]), 0.3)
        q[live:] = NAN
        out = poisoned(6, 2, 32)
        mla.attend_reference(out, q, cache, positions, torch.tensor([live]), 0.3)
        assert torch.equal(out[:live], want[:live]) and not out[:live].isnan().any()

    def test_what_is_visible_is_left_alone(self) -> None:
        cache, q = randn(2 * mla.BLOCK, 40), randn(3, 2, 40)
        before = cache[:70].clone()
        mla.attend_reference(poisoned(3, 2, 32), q, cache, torch.arange(67, 70), torch.tensor([3]), 0.3)
        assert torch.equal(cache[:70], before)

    def test_large_scores_do_not_overflow(self) -> None:
        cache, q = randn(mla.BLOCK, 40) * 100, randn(2, 2, 40) * 100
        out = poisoned(2, 2, 32)
        mla.attend_reference(out, q, cache, torch.tensor([40, 41]), torch.tensor([2]), 1.0)
        assert torch.isfinite(out).all()

    @pytest.mark.parametrize("threads", [1, 2])
    @pytest.mark.parametrize(("heads", "latent", "dim"), [(2, 32, 40), (4, 32, 40), (2, 512, 576), (3, 16, 24)])
    def test_bits_of_a_row(self, heads: int, latent: int, dim: int, threads: int) -> None:
        """At the end of short and long sequences, over a block's edge, for every number of rows."""
        with h.on_threads(threads):
            for base in (3, mla.BLOCK - 4, 500, 2100):
                cache, q = randn(-(-(base + 32) // mla.BLOCK) * mla.BLOCK, dim), randn(32, heads, dim)
                positions = torch.arange(base, base + 32)
                alone = []
                for row in range(32):
                    out = poisoned(2, heads, latent)
                    pair = q[[row, row]]
                    mla.attend_reference(out, pair, cache.clone(), positions[[row, row]], torch.tensor([1]), 0.3)
                    alone.append(out[0].clone())
                for rows in (*range(2, 10), 17, 32) if base < 500 else (3, 6, 32):
                    out = poisoned(rows, heads, latent)
                    mla.attend_reference(out, q[:rows], cache.clone(), positions[:rows], torch.tensor([rows]), 0.3)
                    assert all(torch.equal(out[r], alone[r]) for r in range(rows)), f"{rows} rows at {base}"


def route(
    logits: Tensor, bias: Tensor, groups: int, keep: int, k: int, renormalize: bool, scaling: float
) -> list[dict[int, float]]:
    """The law in words, row by row: {expert: weight} in the order of choice."""
    out = []
    for row in logits.double():
        score = row.sigmoid()
        choice = score + bias.double()
        size = len(choice) // groups
        worth = [sum(sorted(choice[g * size : (g + 1) * size].tolist())[-2:]) for g in range(groups)]
        kept = sorted(range(groups), key=lambda g: (-worth[g], g))[: keep if groups > 1 else groups]
        order = sorted((e for e in range(len(choice)) if e // size in kept), key=lambda e: (-float(choice[e]), e))[:k]
        total = float(score[order].sum()) + 1e-20 if renormalize else 1.0
        out.append({e: float(score[e]) / total * scaling for e in order})
    return out


class TestRouter:
    @pytest.mark.parametrize(
        ("experts", "groups", "keep", "k"), [(16, 4, 2, 4), (16, 1, 1, 4), (8, 2, 1, 2), (64, 8, 4, 8)]
    )
    @pytest.mark.parametrize("renormalize", [True, False])
    def test_against_the_law(self, experts: int, groups: int, keep: int, k: int, renormalize: bool) -> None:
        padded = -(-experts // 64) * 64
        logits, bias = randn(40, padded) * 2, randn(experts) - 1.5  # many biased scores are negative
        want = route(logits[:, :experts], bias, groups, keep, k, renormalize, 2.5)
        logits[:, experts:] = NAN
        ids, weights = poisoned(40, k, dtype=torch.int64), poisoned(40, k)
        router.reference(ids, weights, logits, bias, groups, keep, renormalize, 2.5)
        assert ids.tolist() == [list(row) for row in want]
        close(weights, torch.tensor([list(row.values()) for row in want]))

    def test_vector(self) -> None:
        """Published: E = 8, two groups of which one is kept, k = 2, scale 2."""
        logits, bias = torch.zeros(2, 64), torch.zeros(8)
        logits[:, :8] = torch.tensor([0.5, -1, 2, 0.1, -0.3, 3, 0.2, 0.4])
        bias[2] = 0.1
        ids, weights = poisoned(2, 2, dtype=torch.int64), poisoned(2, 2)
        router.reference(ids, weights, logits, bias, 2, 1, True, 2.0)
        assert ids.tolist() == [[2, 0]] * 2
        assert weights[0].tolist() == pytest.approx([1.1718521, 0.8281479], abs=1e-6)

    def test_ties_go_to_the_lower_index(self) -> None:
        ids, weights = poisoned(2, 4, dtype=torch.int64), poisoned(2, 4)
        router.reference(ids, weights, torch.zeros(2, 64), torch.zeros(16), 4, 2, True, 1.0)
        assert ids.tolist() == [[0, 1, 2, 3]] * 2


@dataclass
class Experts:
    """A MoE layer's numbers: per expert and for the shared one, [out, in] as files hold them."""

    gates: list[Tensor]
    ups: list[Tensor]
    downs: list[Tensor]
    ids: Tensor
    weights: Tensor
    x: Tensor

    @classmethod
    def make(cls, rows: int, hidden: int, experts: int, width: int, shared: int, k: int, dtype: torch.dtype) -> Experts:
        sizes = [width] * experts + [shared]
        g = torch.Generator().manual_seed(rows)
        return cls(
            gates=[randn(n, hidden, seed=i, dtype=dtype) for i, n in enumerate(sizes)],
            ups=[randn(n, hidden, seed=100 + i, dtype=dtype) for i, n in enumerate(sizes)],
            downs=[randn(hidden, n, seed=200 + i, dtype=dtype) * 0.2 for i, n in enumerate(sizes)],
            ids=torch.stack([torch.randperm(experts, generator=g)[:k] for _ in range(rows)]),
            weights=torch.rand(rows, k, generator=g),
            x=randn(rows, hidden, dtype=dtype),
        )

    def want(self, limit: float, shared_limit: float) -> Tensor:
        x = self.x.double()

        def expert(e: int, bound: float, row: Tensor) -> Tensor:
            act = swiglu(self.gates[e].double() @ row, self.ups[e].double() @ row, bound)
            return self.downs[e].double() @ act

        rows = []
        for r in range(x.shape[0]):
            total = expert(-1, shared_limit, x[r])
            for slot in range(self.ids.shape[1]):
                total = total + float(self.weights[r, slot]) * expert(int(self.ids[r, slot]), limit, x[r])
            rows.append(total)
        return torch.stack(rows)

    def dense(self, limit: float, shared_limit: float, dtype: torch.dtype) -> Callable[..., Tensor]:
        up = pack([*self.gates, *self.ups], device=CPU, dtype=dtype)
        down = pack([torch.cat(self.downs, 1)], device=CPU, dtype=dtype)

        def run(x: Tensor, ids: Tensor, weights: Tensor, live: int | None) -> Tensor:
            out = poisoned(x.shape[0], down.padded, dtype=dtype)
            sizes = (len(self.gates) - 1, self.gates[0].shape[0], limit, shared_limit)
            moe.dense_reference(out, x, ids, weights, up, down, *sizes, None if live is None else torch.tensor([live]))
            return out[:, : x.shape[1]]

        return run

    def grouped(self, limit: float, shared_limit: float, dtype: torch.dtype) -> Callable[..., Tensor]:
        up = torch.stack(
            [torch.cat([g.t(), u.t()], 1) for g, u in zip(self.gates[:-1], self.ups[:-1], strict=True)]
        ).float()
        down = torch.stack([d.t() for d in self.downs[:-1]]).float()
        shared_up = pack([self.gates[-1], self.ups[-1]], device=CPU, dtype=dtype)
        shared_down = pack([self.downs[-1]], device=CPU, dtype=dtype)

        def run(x: Tensor, ids: Tensor, weights: Tensor, live: int | None) -> Tensor:
            out = poisoned(x.shape[0], x.shape[1], dtype=dtype)
            rest = (shared_up, shared_down, limit, shared_limit, None if live is None else torch.tensor([live]))
            moe.grouped_reference(out, x, ids, weights, up, down, *rest)
            return out

        return run


class TestExperts:
    @BOTH
    @pytest.mark.parametrize("variant", ["dense", "grouped"])
    @pytest.mark.parametrize(("limit", "shared_limit"), [(0.0, 0.0), (1.0, 2.0), (1.0, 1.0), (0.0, 1.0)])
    def test_against_the_sum(self, limit: float, shared_limit: float, variant: str, dtype: torch.dtype) -> None:
        made = Experts.make(7, 64, 8, 32, 32, 3, dtype)
        out = getattr(made, variant)(limit, shared_limit, dtype)(made.x, made.ids, made.weights, None)
        want = made.want(limit, shared_limit)
        if dtype == torch.bfloat16:  # activations are rounded as well
            assert float((out.double() - want).norm() / want.norm()) < 0.02
        else:
            close(out, want, 1e-5)

    @pytest.mark.parametrize("variant", ["dense", "grouped"])
    @pytest.mark.parametrize("live", [1, 2, 5])
    def test_dead_rows_change_nothing(self, live: int, variant: str) -> None:
        made = Experts.make(7, 64, 8, 32, 32, 3, torch.float32)
        run = getattr(made, variant)(0.0, 0.0, torch.float32)
        want = run(made.x, made.ids, made.weights, live)[:live].clone()
        made.x[live:] = NAN
        made.weights[live:] = NAN
        assert torch.equal(run(made.x, made.ids, made.weights, live)[:live], want)

    @pytest.mark.parametrize("threads", [1, 2])
    @pytest.mark.parametrize("variant", ["dense", "grouped"])
    @pytest.mark.parametrize(("hidden", "width", "shared"), [(64, 32, 32), (256, 32, 128), (1024, 32, 32)])
    def test_bits_of_a_row(self, hidden: int, width: int, shared: int, variant: str, threads: int) -> None:
        """Also when all rows want the same expert, or none shares one."""
        with h.on_threads(threads):
            made = Experts.make(32, hidden, 16, width, shared, 4, torch.float32)
            made.ids[5:12] = made.ids[5]
            run = getattr(made, variant)(0.0, 1.0, torch.float32)
            pairs = [run(*(t[[r, r]] for t in (made.x, made.ids, made.weights)), 1)[0].clone() for r in range(32)]
            for rows in range(2, 33) if hidden < 1000 else SOME:
                out = run(made.x[:rows], made.ids[:rows], made.weights[:rows], rows)
                assert all(torch.equal(out[r], pairs[r]) for r in range(rows)), f"{rows} rows"


class TestRowsOfProducts:
    SHAPES = ((32, 64), (64, 320), (96, 64), (256, 4096), (512, 256), (640, 256), (768, 64), (1024, 64), (2560, 512))

    @pytest.mark.parametrize("threads", [1, 2])
    @pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
    def test_linear(self, inputs: int, outputs: int, threads: int) -> None:
        with h.on_threads(threads):
            weight, x = pack([randn(outputs, inputs)], device=CPU, dtype=torch.float32), randn(70, inputs)
            alone = poisoned(70, weight.padded)
            for row in range(70):
                pair = poisoned(2, weight.padded)
                linear.reference(pair, x[[row, row]], weight)
                alone[row] = pair[0]
            for rows in (*(range(2, 33) if inputs < 1000 else SOME), 63, 64, 65, 66, 70):
                for start in (0, 70 - rows):
                    out = poisoned(rows, weight.padded)
                    linear.reference(out, x[start : start + rows], weight)
                    assert torch.equal(out, alone[start : start + rows]), f"{rows} rows from {start}"

    @pytest.mark.parametrize("threads", [1, 2])
    @pytest.mark.parametrize(
        ("heads", "inputs", "outputs"), [(2, 16, 32), (4, 32, 16), (2, 128, 512), (2, 512, 128), (4, 32, 24)]
    )
    def test_heads(self, heads: int, inputs: int, outputs: int, threads: int) -> None:
        with h.on_threads(threads):
            w, x = randn(heads, inputs, outputs), randn(32, heads, inputs)
            alone = poisoned(32, heads, outputs)
            for row in range(32):
                pair = poisoned(2, heads, outputs)
                linear.heads_reference(pair, x[[row, row]], w)
                alone[row] = pair[0]
            for rows in range(2, 33):
                out = poisoned(rows, heads, outputs)
                linear.heads_reference(out, x[:rows], w)
                assert torch.equal(out, alone[:rows]), f"{rows} rows"

    @pytest.mark.parametrize("dim", [8, 16, 24, 64])
    @pytest.mark.parametrize("heads", [1, 2, 3, 4])
    def test_rope(self, heads: int, dim: int) -> None:
        """Few pairs and few rows end in the middle of a vector, where a complex product would round otherwise."""
        x, turn = randn(1, heads, dim), rope.table(8, rope.inverse_frequencies(dim, 6e6), 1.0, CPU)[5:6]
        alone = poisoned(2, heads, dim)
        rope.reference(alone, x.expand(2, heads, dim).contiguous(), turn.expand(2, -1, 2).contiguous())
        for rows in range(2, 33):
            out = poisoned(rows, heads, dim)
            rope.reference(out, x.expand(rows, heads, dim).contiguous(), turn.expand(rows, -1, 2).contiguous())
            assert all(torch.equal(row, alone[0]) for row in out), f"{rows} rows"


# -- whole decoder passes ---------------------------------------------------------------------------------------------

START, COUNT = mla.BLOCK - 14, 32  # chains begin here, in a block of the attention, and cross into the next
SOME = (2, 3, 4, 5, 6, 9, 17, 32)
OUTPUTS = {"router": 2, "kda.gates": 2}
SILENT = {"mla.store"}  # no output of their own rows


class Logged(Tape):
    """An immediate tape that keeps the outputs of every op, by row. bound: make each call as a recording would."""

    def __init__(self, *args: Any, bound: bool) -> None:
        super().__init__(*args, record=False)
        self.bound = bound
        self.log: list[tuple[str, list[Tensor]]] = []

    def call(self, op: str, *args: Any) -> None:
        bind = self.choices[op].bind
        if self.bound and bind is not None:
            bind(*args)()
        else:
            super().call(op, *args)
        if op not in SILENT:
            self.log.append((op, [t.clone() for t in args[: OUTPUTS.get(op, 1)]]))


@functools.cache
def engine_of(name: str, dtype: str, grouped: bool) -> Engine:
    path = {"nano": h.nano, "pebble": lambda: "pebble"}.get(name, lambda: h.micro(name))()
    before = select.DENSE_EXPERTS_LIMIT
    select.DENSE_EXPERTS_LIMIT = 0 if grouped else before
    try:
        return h.load(path, max_context=256, dtype=dtype)
    finally:
        select.DENSE_EXPERTS_LIMIT = before


def one_pass(
    engine: Engine, ids: list[int], start: int, rows: int, live: int, *, bound: bool
) -> tuple[Logged, Tensor, list[Tensor]]:
    """A decode pass (verify) of ``rows`` rows at ``start`` over the engine's stream, whose committed state is there."""
    runtime = engine._runtime
    assert runtime is not None
    parts, stream, spec = runtime.parts, runtime.stream, runtime.checkpoint.spec
    tape = Logged(runtime.choices, parts.device, parts.dtype, bound=bound)
    states = poisoned(rows + 1, *stream.states.shape[1:])
    states[0] = stream.states[0]
    windows = poisoned(stream.tail + rows, *stream.windows.shape[1:], dtype=parts.dtype)
    windows[: stream.tail] = stream.windows[: stream.tail]
    memory = Memory(
        windows={layer: windows[:, i] for i, layer in enumerate(spec.kda_layers)},
        states={layer: states[:, i] for i, layer in enumerate(spec.kda_layers)},
        caches={layer: stream.kv[i] for i, layer in enumerate(spec.mla_layers)},
    )
    turn = None if parts.turn is None else parts.turn[start : start + rows]
    where = Rows(positions=torch.arange(start, start + rows), live=torch.tensor([live]), turn=turn, decode=True)
    hidden = decoder(tape, runtime.weights, spec, torch.tensor(ids), memory, where)
    return tape, hidden, [states[live], windows[live : live + stream.tail]]


def at_start(engine: Engine, ids: list[int]) -> None:
    runtime = engine._runtime
    assert runtime is not None
    runtime.stream.clear()
    for tensor in (runtime.stream.kv, runtime.stream.draft_kv):
        if tensor is not None:
            tensor.fill_(NAN)
    for _ in runtime.prefill.read(ids, 0, len(ids)):
        pass


MODELS = [
    ("nano", "float32", False), ("nano", "float32", True), ("ling-micro", "float32", False),
    ("ling-micro", "float32", True), ("ling-micro", "bfloat16", False), ("ling-micro", "bfloat16", True),
    ("kimi-micro", "float32", False), ("kimi-micro", "float32", True), ("pebble", "float32", False),
]  # fmt: skip


def check_decoder(
    name: str, dtype: str, grouped: bool, threads: int, counts: Iterable[int], steps: int = COUNT
) -> None:
    """Every op's output row i of R rows, called as a recording calls it, against that token alone (held twice, one
    live), called as prefill calls it."""
    engine = engine_of(name, dtype, grouped)
    runtime = engine._runtime
    assert runtime is not None
    assert runtime.choices["moe"].variant == ("grouped" if grouped else "dense")
    prompt, ids = h.prompts_of(min(runtime.checkpoint.spec.vocab, 300), (START, COUNT), seed=4)
    ids = ids[:steps]
    with h.on_threads(threads), torch.inference_mode():
        at_start(engine, prompt)
        singles: list[list[list[Tensor]]] = []
        ends = []
        for step, token in enumerate(ids):
            tape, _, (state, tail) = one_pass(engine, [token, token], START + step, 2, 1, bound=False)
            runtime.stream.states[0] = state
            runtime.stream.windows[: runtime.stream.tail] = tail
            singles.append([[t[0] for t in outputs] for _, outputs in tape.log])
            ends.append((state.clone(), tail.clone()))
        alone = [[torch.stack(rows) for rows in zip(*call, strict=True)] for call in zip(*singles, strict=True)]
        at_start(engine, prompt)
        for rows in (n for n in counts if n <= steps):
            tape, _, (state, tail) = one_pass(engine, ids[:rows], START, rows, rows, bound=True)
            assert len(tape.log) == len(alone)
            for place, ((op, outputs), wanted) in enumerate(zip(tape.log, alone, strict=True)):
                for got, want in zip(outputs, wanted, strict=True):
                    if not torch.equal(got, want[:rows]):
                        wrong = [r for r in range(rows) if not torch.equal(got[r], want[r])]
                        pytest.fail(f"{op} (call {place}): rows {wrong} of {rows}")
            assert torch.equal(state, ends[rows - 1][0]) and torch.equal(tail, ends[rows - 1][1])


def check_mtp(name: str, dtype: str, grouped: bool, threads: int, counts: Iterable[int]) -> None:
    engine = engine_of(name, dtype, grouped)
    runtime = engine._runtime
    assert runtime is not None
    parts, spec, cache = runtime.parts, runtime.checkpoint.spec, runtime.stream.draft_kv
    if cache is None:
        assert name == "kimi-micro"
        return
    hidden = randn(COUNT, spec.hidden, dtype=parts.dtype)
    prompt, ids = h.prompts_of(min(spec.vocab, 300), (START, COUNT), seed=4)

    def run(at: int, rows: int, live: int) -> Tensor:
        tape = Tape(runtime.choices, parts.device, parts.dtype, record=False)
        turn = None if parts.turn is None else parts.turn[START + at : START + at + rows]
        positions = torch.arange(START + at, START + at + rows)
        where = Rows(positions=positions, live=torch.tensor([live]), turn=turn, decode=True)
        index = [at + min(i, live - 1) for i in range(rows)]
        out = mtp(tape, runtime.weights, spec, torch.tensor([ids[i] for i in index]), hidden[index], cache, where)
        return out[:live].clone()

    with h.on_threads(threads), torch.inference_mode():
        at_start(engine, prompt)
        cache[:START] = randn(START, cache.shape[1], dtype=parts.dtype)
        alone = torch.cat([run(step, 2, 1) for step in range(COUNT)])
        entries = cache[START : START + COUNT].clone()
        for rows in counts:
            cache[START:] = NAN
            assert torch.equal(run(0, rows, rows), alone[:rows]), f"{rows} rows"
            assert torch.equal(cache[START : START + rows], entries[:rows])


@pytest.mark.parametrize("name", ["ling-micro", "pebble"])
def test_whole_passes_on_two_threads(name: str) -> None:
    check_decoder(name, "float32", False, 2, (3, 6, 32), steps=32 if name == "ling-micro" else 8)


@pytest.mark.parametrize(("name", "dtype", "grouped"), MODELS)
class TestWholePasses:
    def test_one_thread(self, name: str, dtype: str, grouped: bool) -> None:
        check_decoder(name, dtype, grouped, 1, SOME)
        check_mtp(name, dtype, grouped, 1, SOME)

    @pytest.mark.full
    @pytest.mark.timeout(3600)
    @pytest.mark.parametrize("threads", [1, 2])
    def test_every_count(self, name: str, dtype: str, grouped: bool, threads: int) -> None:
        check_decoder(name, dtype, grouped, threads, range(2, COUNT + 1))
        check_mtp(name, dtype, grouped, threads, range(2, COUNT + 1))


class TestPrefillPasses:
    @pytest.mark.parametrize(("name", "dtype", "grouped"), MODELS)
    def test_one_thread(self, name: str, dtype: str, grouped: bool) -> None:
        self.check(name, dtype, grouped, 1)

    @pytest.mark.full
    @pytest.mark.timeout(3600)
    @pytest.mark.parametrize(("name", "dtype", "grouped"), MODELS)
    def test_two_threads(self, name: str, dtype: str, grouped: bool) -> None:
        self.check(name, dtype, grouped, 2)

    def check(self, name: str, dtype: str, grouped: bool, threads: int) -> None:
        """Logits, caches and states after reads in one pass, in passes of a few rows, and token by token."""
        engine = engine_of(name, dtype, grouped)
        runtime = engine._runtime
        assert runtime is not None
        ids = h.prompts_of(min(runtime.checkpoint.spec.vocab, 300), (71,), seed=6)[0]
        kept = []
        before = runtime.prefill.chunk
        with h.on_threads(threads), torch.inference_mode():
            for chunk in (512, 32, 7, 3, 2, 1):
                runtime.prefill.chunk = chunk
                for tensor in runtime.stream.tensors().values():
                    if tensor.is_floating_point():
                        tensor.fill_(NAN)
                logits = runtime.logits(ids)
                stream = runtime.stream
                parts = [logits, stream.kv[:, :71], stream.states[0], stream.windows[: stream.tail], stream.boundary]
                parts += [stream.draft_kv[:70]] if stream.draft_kv is not None else []
                kept.append([t.clone() for t in parts])
        runtime.prefill.chunk = before
        for other in kept[1:]:
            assert [torch.equal(a, b) for a, b in zip(kept[0], other, strict=True)] == [True] * len(other)
        assert not any(t.isnan().any() for t in kept[0])


class TestSelection:
    def test_every_choice_has_a_reason(self) -> None:
        for experts, state in ((0, 0), (1000, 1000), (10**8, 10**8)):
            facts = select.Facts(device=CPU, dtype=torch.float32, expert_elements=experts, state_elements=state)
            for op, choice in select.choose(facts).items():
                assert choice.op == op and choice.reason and callable(choice.function)

    def test_sizes_pick_the_variant(self) -> None:
        def variant(op: str, **sizes: int) -> str:
            return select.choose(select.Facts(device=CPU, dtype=torch.float32, **sizes))[op].variant

        assert variant("moe", expert_elements=1000) == "dense"
        assert variant("moe", expert_elements=10**8) == "grouped"
        assert variant("kda.prefill", state_elements=1000) == "sweep"
        assert variant("kda.prefill", state_elements=32 * 128 * 128) == "chunk"

    def test_a_model_of_true_head_sizes_reads_in_chunks(self) -> None:
        """The chunk form rounds otherwise, so there reading and decoding agree within a tolerance, not in bits."""
        x, start = operands(40, heads=2, keys=128, values=128, seed=9), randn(2, 128, 128) * 0.1
        one, two = poisoned(40, 2, 128), poisoned(40, 2, 128)
        swept, chunked = start.clone(), start.clone()
        kda.sweep_reference(one, *x.values(), swept)
        kda.chunk_reference(two, *x.values(), chunked)
        torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(chunked, swept, rtol=1e-4, atol=1e-4)
        assert math.isfinite(float(chunked.abs().max()))
