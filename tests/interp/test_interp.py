"""The small kernels of a step and of prompts against the torch code they stand for."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from soliton.ops import bulk, kda, moe, norm, router
from soliton.ops.law import Law
from soliton.ops.weight import Weight
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
    apart, want = [torch.full((count, n), float("nan")) for n in (184, 184, 232)], torch.empty(count, 600)
    window = torch.cat([tail, proj[:, :600]])
    kda.conv_reference(want, window, weight)
    kernels.mix(*apart, proj, tail, weight)
    close(torch.cat(apart, 1), want)
    assert torch.equal(tail, window[-3:])


def test_gated_norm() -> None:
    from soliton.ops import bulk_triton as kernels

    o, wide, scale = torch.randn(9, 4, 128), torch.randn(9, 520), torch.randn(128)
    gate = wide[:, 8:].unflatten(1, (4, 128))
    out, want = torch.full((9, 4, 128), float("nan")), torch.empty(9, 4, 128)
    kernels.gated_norm(out, o, gate, scale, 1e-5)
    norm.gated_reference(want, o, gate, scale, 1e-5)
    close(out, want)


@pytest.mark.parametrize("limit", [0.0, 0.5])
def test_swiglu(limit: float) -> None:
    from soliton.ops import bulk_triton as kernels

    for width in (96, 1040):
        both = torch.randn(7, 2 * width + 8)[:, : 2 * width]
        out, want = torch.full((7, width), float("nan")), torch.empty(7, width)
        kernels.swiglu(out, both, limit)
        moe.swiglu_reference(want, both[:, 0::2], both[:, 1::2], limit)
        close(out, want)
        again = torch.full((7, width), float("nan"))
        bulk.swiglu(again, both[:, 0::2], both[:, 1::2], limit)
        assert torch.equal(out, again)


@pytest.mark.parametrize(
    ("experts", "groups", "kept", "k"), [(256, 1, 1, 8), (64, 8, 4, 8), (24, 4, 2, 3), (12, 12, 5, 5)]
)
@pytest.mark.parametrize("ties", [False, True])
def test_route(experts: int, groups: int, kept: int, k: int, ties: bool) -> None:
    torch.manual_seed(experts)
    logits = torch.randint(-1, 2, (6, experts + 8)).float() if ties else torch.randn(6, experts + 8)
    bias = torch.zeros(experts) if ties else torch.randn(experts) * 0.3 - 1.0
    ids, weights = torch.full((6, k), -1), torch.full((6, k), float("nan"))
    want, share = torch.full((6, k), -1), torch.full((6, k), float("nan"))
    before = logits.clone()
    bulk.route(ids, weights, logits, bias, groups, kept, not ties, 2.5)
    assert torch.equal(logits, before)
    router.reference(want, share, logits, bias, groups, kept, not ties, 2.5)
    assert torch.equal(ids, want)
    close(weights, share)


def test_experts() -> None:
    """Pairs sorted by expert, one expert without a row and one with many, against the sweep over experts."""
    torch.manual_seed(1)
    experts, hidden, width, rows, k = 6, 64, 32, 19, 3
    whole = lambda *shape: (torch.randn(*shape) * shape[-1] ** -0.5).bfloat16()  # noqa: E731
    up, down, x = whole(experts, 2 * width, hidden), whole(experts, hidden, width), torch.randn(rows, hidden).bfloat16()
    gates, ups, last = whole(width, hidden), whole(width, hidden), whole(hidden, width)
    ids = torch.stack([torch.randperm(experts - 1)[:k] for _ in range(rows)])
    ids[:, 0] = torch.where((ids == 2).any(1), ids[:, 0], 2)
    weights = torch.rand(rows, k)
    turns = torch.stack([gates, ups], 1).view(2 * width, hidden)
    shared_up = Weight(data=turns.t(), inputs=hidden, outputs=2 * width, paired=True)
    shared_down = Weight(data=last.t(), inputs=width, outputs=hidden)
    out = torch.full((rows, hidden), float("nan"), dtype=torch.bfloat16)
    bulk.experts(out, x, ids, weights, up, down, shared_up, shared_down, 0.5, 0.0, None)
    stacks = torch.cat([up[:, 0::2], up[:, 1::2]], 1).transpose(1, 2), down.transpose(1, 2)
    apart = Weight(data=torch.cat([gates, ups]).t(), inputs=hidden, outputs=2 * width)
    want = torch.empty(rows, hidden)
    moe.grouped_reference(want, x, ids, weights, *stacks, apart, shared_down, 0.5, 0.0, None)
    assert float((out - want).norm() / want.norm()) < 8e-3


def test_spread() -> None:
    from soliton.ops import bulk_triton as kernels

    x, order = torch.randn(5, 72)[:, :70], torch.randperm(15)
    out, place = torch.full((15, 70), float("nan")), torch.full((15,), -1)
    kernels.spread(out, place, x, order, 3)
    assert torch.equal(out, x[order // 3]) and torch.equal(place[order], torch.arange(15))


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


@pytest.mark.parametrize("vocab", [90, 96, 5000])
def test_masks(vocab: int) -> None:
    """Of raw logits into rows of their own, and in place; rows that are not live stay as they are."""
    from soliton.ops import verdict_triton as kernels
    from soliton.sampling import penalties

    torch.manual_seed(vocab)
    logits = torch.randn(4, vocab + 6)
    masks = torch.randint(-(2**31), 2**31, (4, -(-vocab // 32)), dtype=torch.int32)
    want = penalties.restrict(logits[:, :vocab], masks)
    out = torch.full((4, vocab), 7.0)
    kernels.restrict(out, logits, masks, torch.tensor([3]))
    assert torch.equal(out[:3], want[:3]) and bool((out[3] == 7.0).all())
    own = logits[:, :vocab].clone()
    kernels.restrict(own, own, masks, torch.tensor([4]))
    assert torch.equal(own, want)


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


def law_of(logits: Tensor, sets: tuple[Tensor, ...], chunk: int) -> Law:
    """What law.cu leaves, by sampling.law: weights of the likeliest 1, masses of parts of ``chunk``."""
    from soliton.sampling import law, rowwise

    probs = law.distribution(logits, *sets)
    weights = torch.where(probs > 0, rowwise.exp_weights(logits / sets[0]), 0.0)
    held = torch.nn.functional.pad(rowwise.fixed_mass(weights), (0, -logits.shape[1] % chunk))
    return Law(weights, held.unflatten(1, (-1, chunk)).sum(-1), held.sum(-1))


@pytest.mark.parametrize("seed", range(8))
def test_a_sampled_verdict(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts drawn and judged as sampling.law and sampling.accept do with the same numbers."""
    from soliton.ops import draws_triton as draws
    from soliton.sampling import law, philox

    monkeypatch.setattr(draws, "CHUNK", 64)
    draw = random.Random(seed)
    torch.manual_seed(seed)
    rows, vocab, drafted = draw.choice([2, 4]), 100, seed < 6
    a = relay(rows, vocab)
    a.length.fill_(draw.choice([3, 510]))
    a.limit.fill_(50)
    a.rows.fill_(rows if drafted else 1)
    a.generator_seed.fill_(draw.randrange(1 << 40))
    a.positions.copy_(torch.arange(rows) + a.length)
    target = torch.randn(rows, vocab) * 2
    draft = target[: rows - 1] + torch.randn(rows - 1, vocab) * draw.choice([0.3, 2.0])
    sets = tuple(torch.tensor([v]) for v in (1.0, draw.choice([0, 10]), 0.9, 0.0))
    ours = law_of(target, sets, 64)
    theirs = law_of(draft, sets, 64)
    q = law.distribution(draft, *sets)
    for j in range(rows - 1):
        draws.draft(a.tokens, theirs.row(j), a.length, a.generator_seed, j + 1, philox.STREAM_DRAFT)
        u = philox.uniform(a.generator_seed, a.length + j + 1, philox.STREAM_DRAFT)
        assert int(a.tokens[j + 1]) == int(law.pick(q[j : j + 1], u))
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
    draws.sampled(scratch, rest, ours, theirs if drafted else None, *state, *given, streams, ROLLING)
    for name in a.tensors():
        assert torch.equal(getattr(a, name), getattr(b, name)), name


@pytest.mark.parametrize("sizes", [(300, 40), (64, 16)])
def test_product_with_float32_weights(sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    from soliton.ops import norm_triton

    for word in ("gdc_wait", "gdc_launch_dependents"):
        monkeypatch.setattr(norm_triton, word, lambda: None)
    inputs, outputs = sizes
    x, w = torch.randn(3, inputs).to(torch.bfloat16), torch.randn(outputs, inputs).t()
    out = torch.full((3, outputs + 8), float("nan"))
    norm_triton.product(out[:, :outputs], x, w)
    assert torch.allclose(out[:, :outputs].double(), x.double() @ w.double(), rtol=1e-5, atol=1e-4)
    assert out[:, outputs:].isnan().all()
