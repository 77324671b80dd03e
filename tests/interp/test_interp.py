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
    kernels.refill(*into, turn, rows - 1)
    values = torch.full((rows, kernels.SPLITS), float("nan"))
    indices = torch.full((rows, kernels.SPLITS), -5, dtype=torch.int32)
    state = (b.new_tokens, b.taken, b.reason, b.anchor, b.length, b.generated, b.stopped)
    kernels.greedy(values, indices, b.logits, *state, b.tokens, b.rows, b.limit, b.stop_mask, vocab, ROLLING)
    kept = torch.zeros(2, 16)
    kernels.commit_boundary(kept, b.hidden, b.taken)
    kernels.publish(b.ring_tokens, b.ring_meta, b.new_tokens, b.taken, b.reason, b.length, b.rows, b.step)
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
    kernels.mark(marks, states, windows, boundary, *scalars, 512)
    for mark, source in zip(marks, (states[2], windows[:3], boundary), strict=True):
        assert torch.equal(mark, source if copies else torch.zeros_like(source))


@pytest.mark.parametrize("seed", range(8))
def test_processors(seed: int) -> None:
    from soliton.ops import verdict_triton as kernels
    from soliton.sampling import penalties

    torch.manual_seed(seed)
    rows, vocab = 4, 90
    logits, drafts = torch.randn(rows, vocab + 6), torch.randint(0, vocab, (rows - 1,))
    counts, seen = torch.randint(0, 2, (vocab,), dtype=torch.int32), torch.rand(vocab) < 0.3
    bias = torch.where(torch.rand(vocab) < 0.1, torch.randn(vocab), 0.0)
    values = [torch.tensor([v]) for v in (0.5, -0.3, 1.4)]
    generated, least, stops = torch.tensor([3]), torch.tensor([5]), torch.rand(vocab) < 0.2
    want = penalties.process(
        logits[:, :vocab], counts=counts, prompt_seen=seen, bias=bias, presence=values[0], frequency=values[1],
        repetition=values[2], generated=generated, min_tokens=least, stop_mask=stops, draft_tokens=drafts,
    )  # fmt: skip
    out = torch.full((rows, vocab), float("nan"))
    given = (counts, seen, bias, *values, generated, least, stops)
    kernels.process(out, logits, *given, drafts, torch.tensor([rows]), 0)
    assert torch.equal(out, want)
    one = torch.full((1, vocab), float("nan"))
    kernels.process(one, logits[2:3], *given, drafts[:0], torch.tensor([1]), 2)
    alone = penalties.process(
        logits[2:3, :vocab], counts=counts, prompt_seen=seen, bias=bias, presence=values[0], frequency=values[1],
        repetition=values[2], generated=generated + 2, min_tokens=least, stop_mask=stops, draft_tokens=drafts[:0],
    )  # fmt: skip
    assert torch.equal(one, alone)


def test_between_the_forwards_of_a_chain() -> None:
    from soliton.ops import verdict_triton as kernels
    from soliton.speculation import nextn

    r = relay(5, 70)
    r.tokens.copy_(torch.tensor([4, 9, 2, 7, 1]))
    r.length.fill_(33)
    r.new_tokens.copy_(torch.tensor([9, 2, -1, -1, -1]))
    turn = torch.randn(64, 2, 2)
    made = [torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), torch.zeros(2, 2, 2)]
    want = [t.clone() for t in made]
    nextn._draft_row(*want, r, turn, 3)
    kernels.draft_row(*made, r.tokens, r.length, turn, 3)
    assert all(torch.equal(a, b) for a, b in zip(made, want, strict=True))
    out = torch.randn(5, 16)
    for taken in (0, 2):
        r.taken.fill_(taken)
        ids, live, wanted, least = (torch.zeros(n, dtype=torch.int64) for n in (5, 1, 5, 1))
        kernels.extend_rows(ids, live, r.new_tokens, r.taken)
        nextn._extend_rows(wanted, least, r)
        assert torch.equal(ids, wanted) and int(live) == taken
        other = relay(5, 70)
        other.taken.fill_(taken)
        nextn._keep_seed(other, out)
        kernels.keep_seed(r.seed, r.drafted, out, r.taken)
        assert torch.equal(r.seed, other.seed) and torch.equal(r.drafted, other.drafted)
    logits = torch.randint(0, 4, (2, 76)).float()
    values, indices = torch.zeros(1, kernels.SPLITS), torch.zeros(1, kernels.SPLITS, dtype=torch.int32)
    kernels.choose(r.tokens, values, indices, logits, torch.tensor([1]), 2, 70)
    assert int(r.tokens[2]) == int(logits[0, :70].argmax())


@pytest.mark.parametrize("style", ["smooth", "ties", "peak"])
@pytest.mark.parametrize("sets", [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.9, 0.0), (20, 0.5, 0.05), (300, 0.1, 0.0)])
def test_law(style: str, sets: tuple[int, float, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same sets as sampling.law, ties and all, and the same probabilities."""
    from soliton.ops import sampling_triton as kernels
    from soliton.sampling import law

    monkeypatch.setattr(kernels, "CHUNK", 64)
    torch.manual_seed(sets[0])
    rows, vocab = 2, 130
    logits = torch.randn(rows, vocab + 5) * 3 if style != "ties" else torch.randint(-3, 4, (rows, vocab + 5)).float()
    if style == "peak":
        logits[:, 17] += 20
    logits[1, 3] = float("-inf")
    heat, k, p, least = (torch.tensor([v]) for v in (0.6, *sets))
    made, space = kernels.Law.allocate(rows, vocab, CPU), kernels.Space.allocate(rows, vocab, CPU)
    space.hits.fill_(7)
    kernels.distribution(made, space, logits, heat, k, p, least, torch.tensor([rows]), vocab)
    want = law.distribution(logits[:, :vocab], heat, k, p, least)
    total = made.total.double() * 2.0 ** -kernels.mass_bits(vocab)
    got = (made.weights.double() / total.unsqueeze(1)).float()
    assert torch.equal(got > 0, want > 0)
    close(got, want)


@pytest.mark.parametrize("seed", range(6))
def test_a_sampled_verdict(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts drawn and judged as sampling.law and sampling.accept do with the same numbers."""
    from soliton.ops import draws_triton as draws
    from soliton.ops import sampling_triton as kernels
    from soliton.sampling import law, philox

    monkeypatch.setattr(kernels, "CHUNK", 64)
    monkeypatch.setattr(draws, "CHUNK", 64)
    draw = random.Random(seed)
    torch.manual_seed(seed)
    rows, vocab = draw.choice([2, 4]), 100
    a = relay(rows, vocab)
    a.length.fill_(draw.choice([3, 510]))
    a.limit.fill_(50)
    a.rows.fill_(rows)
    a.generator_seed.fill_(draw.randrange(1 << 40))
    a.positions.copy_(torch.arange(rows) + a.length)
    target = torch.randn(rows, vocab) * 2
    draft = target[: rows - 1] + torch.randn(rows - 1, vocab) * draw.choice([0.3, 2.0])
    sets = tuple(torch.tensor([v]) for v in (1.0, draw.choice([0, 10]), 0.9, 0.0))
    ours, space = kernels.Law.allocate(rows, vocab, CPU), kernels.Space.allocate(rows, vocab, CPU)
    kernels.distribution(ours, space, target, *sets, torch.tensor([rows]), vocab)
    theirs, small = kernels.Law.allocate(rows - 1, vocab, CPU), kernels.Space.allocate(1, vocab, CPU)
    q = law.distribution(draft, *sets)
    for j in range(rows - 1):
        part = slice(j, j + 1)
        one = kernels.Law(theirs.weights[part], theirs.masses[part], theirs.total[part])
        kernels.distribution(one, small, draft[part], *sets, torch.tensor([1]), vocab)
        draws.draft(a.tokens, one, a.length, a.generator_seed, j + 1, philox.STREAM_DRAFT)
        u = philox.uniform(a.generator_seed, a.length + j + 1, philox.STREAM_DRAFT)
        assert int(a.tokens[j + 1]) == int(law.pick(q[part], u))
    b = relay(rows, vocab)
    for name, tensor in a.tensors().items():
        getattr(b, name).copy_(tensor)
    uniforms = [
        philox.uniform(a.generator_seed, a.positions + 1, s) for s in (philox.STREAM_ACCEPT, philox.STREAM_FINAL)
    ]
    verdict = accept.sampled_chain(law.distribution(target, *sets), q, a.tokens[1:], a.rows, *uniforms)
    a.new_tokens.copy_(verdict.tokens)
    verify._cut(a, torch.minimum(verdict.n_accepted + 1, ROLLING - a.length % ROLLING))
    scratch, rest = torch.zeros(2, dtype=torch.int64), torch.zeros(ours.masses.shape[1], dtype=torch.int64)
    state = (b.new_tokens, b.taken, b.reason, b.anchor, b.length, b.generated, b.stopped)
    given = (b.tokens, b.positions, b.rows, b.generator_seed, b.limit, b.stop_mask)
    streams = (philox.STREAM_ACCEPT, philox.STREAM_FINAL)
    draws.sampled(scratch, rest, ours, theirs, *state, *given, streams, ROLLING)
    for name in a.tensors():
        assert torch.equal(getattr(a, name), getattr(b, name)), name
