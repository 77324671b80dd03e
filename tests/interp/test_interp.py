"""The small kernels of a step and of prompts against the torch code they stand for."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from soliton.ops import kda, moe, norm
from soliton.sampling import accept
from soliton.speculation import verify
from soliton.speculation.verify import ROLLING
from soliton.step.relay import Relay

CPU = torch.device("cpu")


def relay(rows: int, vocab: int) -> Relay:
    return Relay.allocate(
        rows=rows, vocab=vocab, padded_vocab=vocab + 8, hidden=16, rope_pairs=2, slots=8, device=CPU,
        dtype=torch.float32,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_a_greedy_step(seed: int) -> None:
    """refill, verdict, boundary and publish leave every field of the relay as the torch functions do."""
    from soliton.ops import verdict_triton as kernels

    draw = random.Random(seed)
    torch.manual_seed(seed)
    rows, vocab = draw.choice([2, 3, 4, 6, 9, 17]), draw.choice([64, 100, 300])
    a, b = relay(rows, vocab), relay(rows, vocab)
    for field, value in (
        ("anchor", draw.randrange(vocab)), ("length", draw.choice([0, 5, 509, 510, 511, 700])),
        ("generated", draw.randrange(20)), ("limit", draw.randrange(1, 30)), ("drafted", draw.randrange(2)),
        ("stopped", int(draw.random() < 0.15)), ("step", draw.randrange(20)),
    ):  # fmt: skip
        getattr(a, field).fill_(value)
    a.logits.copy_(torch.randint(0, 6, a.logits.shape).float())
    a.hidden.normal_()
    for _ in range(draw.randrange(4)):
        a.stop_mask[draw.randrange(vocab)] = True
    best = a.logits[:, :vocab].argmax(-1)
    for i in range(rows - 1):
        a.tokens[i + 1] = best[i] if draw.random() < 0.8 else draw.randrange(vocab)
    for name, tensor in a.tensors().items():
        getattr(b, name).copy_(tensor)
    turn = torch.randn(1024, 2, 2)

    verify._refill(a, turn, rows - 1)
    if int(a.stopped):
        a.rows.zero_()  # a frozen step has no rows on a GPU
    raw = a.logits[:, :vocab]
    verdict = accept.greedy_chain(accept.argmax_lowest(raw), a.tokens[1:], a.rows)
    a.new_tokens.copy_(verdict.tokens)
    verify._cut(a, torch.minimum(verdict.n_accepted + 1, ROLLING - a.length % ROLLING))
    boundary = torch.zeros(2, 16)
    verify.commit_boundary(boundary, a.hidden, a.taken)
    verify.publish(a)

    into = (b.tokens, b.positions, b.rows, b.turn, b.anchor, b.length, b.drafted, b.stopped)
    kernels.refill(*into, turn, rows - 1, pdl=False)
    values = torch.full((rows, kernels.SPLITS), float("nan"))
    indices = torch.full((rows, kernels.SPLITS), -5, dtype=torch.int32)
    state = (b.new_tokens, b.taken, b.reason, b.anchor, b.length, b.generated, b.stopped)
    kernels.greedy(values, indices, b.logits, *state, b.tokens, b.rows, b.limit, b.stop_mask, vocab, ROLLING, pdl=False)
    kept = torch.zeros(2, 16)
    kernels.commit_boundary(kept, b.hidden, b.taken, pdl=False)
    kernels.publish(b.ring_tokens, b.ring_meta, b.new_tokens, b.taken, b.reason, b.length, b.rows, b.step, pdl=False)
    assert torch.equal(boundary, kept)
    for name in a.tensors():
        assert torch.equal(getattr(a, name), getattr(b, name)), name


def close(got: Tensor, want: Tensor) -> None:
    assert float((got - want).abs().max()) < 2e-6


@pytest.mark.parametrize("count", [1, 2, 3, 5, 40])
def test_mix(count: int) -> None:
    from soliton.ops import bulk_triton as kernels

    torch.manual_seed(count)
    proj, tail, weight = torch.randn(count, 624), torch.randn(3, 600), torch.randn(4, 600)
    out, want = torch.full((count, 600), float("nan")), torch.empty(count, 600)
    window = torch.cat([tail, proj[:, :600]])
    kda.conv_reference(want, window, weight)
    kernels.mix(out, proj, tail, weight)
    close(out, want)
    assert torch.equal(tail, window[-3:])


def test_gated_norm() -> None:
    from soliton.ops import bulk_triton as kernels

    o, wide, scale = torch.randn(5, 4, 128), torch.randn(5, 520), torch.randn(128)
    gate = wide[:, 8:].unflatten(1, (4, 128))
    out, want = torch.full((5, 4, 128), float("nan")), torch.empty(5, 4, 128)
    kernels.gated_norm(out, o, gate, scale, 1e-5)
    norm.gated_reference(want, o, gate, scale, 1e-5)
    close(out, want)


@pytest.mark.parametrize("limit", [0.0, 0.5])
def test_swiglu(limit: float) -> None:
    from soliton.ops import bulk_triton as kernels

    both = torch.randn(7, 192)
    out, want = torch.full((7, 96), float("nan")), torch.empty(7, 96)
    kernels.swiglu(out, both, limit)
    moe.swiglu_reference(want, both[:, 0::2], both[:, 1::2], limit)
    close(out, want)


def test_combine() -> None:
    from soliton.ops import bulk_triton as kernels

    pairs, place, weights = torch.randn(15, 70), torch.randint(0, 15, (5, 3)), torch.rand(5, 3)
    shared, out = torch.randn(5, 70), torch.full((5, 70), float("nan"))
    kernels.combine(out, shared, pairs, place, weights)
    close(out, shared + (pairs[place] * weights.unsqueeze(-1)).sum(1))


@pytest.mark.parametrize(("length", "taken", "copies"), [(511, 1, False), (512, 0, False), (512, 3, True)])
def test_marks(length: int, taken: int, copies: bool) -> None:
    from soliton.ops import kda_triton as kernels

    states, windows, boundary = torch.randn(4, 2, 2, 8, 8), torch.randn(5, 2, 30), torch.randn(2, 16)
    marks = torch.zeros(2, 2, 8, 8), torch.zeros(3, 2, 30), torch.zeros(2, 16)
    scalars = (torch.tensor([n]) for n in (length, taken, 2, 0))
    kernels.mark(marks, states, windows, boundary, *scalars, 512, pdl=False)
    for mark, source in zip(marks, (states[2], windows[:3], boundary), strict=True):
        assert torch.equal(mark, source if copies else torch.zeros_like(source))
