"""law.cu on a GPU: exact sets, weights near the softmax, and bits that do not depend on the number of rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernel_cases import draw_logits
from soliton.errors import UnsupportedError
from soliton.ops import law as kernel
from soliton.ops.chain import unchained
from soliton.ops.law import Law
from soliton.sampling import law

CUDA = torch.device("cuda")
Sets = tuple[float, int, float, float]  # temperature, top_k, top_p, min_p
OFF: Sets = (0.7, 0, 1.0, 0.0)
SETS: list[Sets] = [
    (1.0, 5, 1.0, 0.1), (0.8, 0, 0.9, 0.0), (0.6, 20, 0.5, 0.05), (1.3, 300, 0.1, 0.0), (1.0, 10**6, 1e-9, 1.0),
    (1.7, 1000, 0.99, 0.001), (1.0, 0, 0.99999, 0.0), (1.0, 1, 0.5, 0.0),
]  # fmt: skip
VOCABS = [1, 2, 320, 1025, 4096, 8193, 157_184, 163_840, 262_144, kernel.MOST]


def whole(number: int) -> Tensor:
    return torch.tensor([number], dtype=torch.int64, device="cuda")


def fill(logits: Tensor, vocab: int, sets: Sets, live: int | None = None) -> Law:
    """The law of all rows of logits; outputs are poisoned first."""
    rows = logits.shape[0]
    made = Law.allocate(rows, vocab, CUDA)
    made.weights.fill_(float("nan"))
    made.masses.fill_(-7)
    made.total.fill_(-7)
    heat, k, p, least = (torch.tensor([value], device="cuda") for value in sets)
    kernel.distribution(made, logits, heat, k, p, least, whole(rows if live is None else live), vocab)
    return made


def draw(style: str, rows: int, vocab: int) -> Tensor:
    torch.manual_seed(vocab + rows)
    return draw_logits(style, rows, vocab).cuda()


def mass(weights: Tensor) -> Tensor:
    scale = float(2 ** kernel.mass_bits(weights.shape[-1]))
    held = (weights.double() * scale + 0.5).floor().to(torch.int64)
    held = torch.nn.functional.pad(held, (0, -weights.shape[-1] % kernel.CHUNK))
    return held.unflatten(1, (-1, kernel.CHUNK)).sum(-1)


def consistent(made: Law) -> None:
    assert torch.equal(made.masses, mass(made.weights)) and torch.equal(made.total, made.masses.sum(-1))


@pytest.mark.parametrize("style", ["smooth", "ties", "equal", "near", "peak", "masked"])
@pytest.mark.parametrize("vocab", VOCABS)
def test_sets_are_exact(vocab: int, style: str) -> None:
    """All weights are the softmax's within its rounding; from those, the same sets as sampling.law's, ties and all."""
    logits = draw(style, 2, vocab)
    on_cpu = logits[:, :vocab].cpu()
    for sets in SETS if vocab < 10_000 else SETS[:4]:
        plain, made = fill(logits, vocab, (sets[0], 0, 1.0, 0.0)), fill(logits, vocab, sets)
        heat, k, p, least = (torch.tensor([value]) for value in sets)
        scaled = on_cpu / heat
        soft = (scaled.double() - scaled.double().amax(-1, keepdim=True)).exp()
        # the exponent's rounding, which grows with its size, and two units of expf
        near = 3e-7 + 2.0**-24 * (scaled - scaled.amax(-1, keepdim=True)).abs().nan_to_num(posinf=0.0).double()
        all_weights = plain.weights.cpu()
        assert bool(((all_weights.double() - soft).abs() <= near * soft + 1e-37).all())
        kept = torch.where(law.top_k_sorted(scaled.cuda(), k.cuda()), plain.weights, 0.0)
        kept = torch.where(law.top_p_sorted(kept, p.cuda()) & (kept >= least.cuda()), kept, 0.0)
        assert torch.equal(made.weights, kept)
        consistent(plain)
        consistent(made)


@pytest.mark.parametrize("vocab", [1025, 163_840])
def test_probabilities(vocab: int) -> None:
    """Against sampling.law in float32 and the softmax in float64."""
    logits = draw("smooth", 2, vocab)
    for sets in (OFF, *SETS[1:3]):
        made = fill(logits, vocab, sets)
        got = made.weights.double() / (made.total.double() * 2.0 ** -kernel.mass_bits(vocab)).unsqueeze(1)
        want = law.distribution(logits[:, :vocab].cpu(), *(torch.tensor([value]) for value in sets))
        assert float((got.cpu() - want.double()).abs().max()) < 2e-6
        if sets == OFF:
            soft = torch.softmax(logits[:, :vocab].double() / torch.tensor(OFF[0]).double(), -1)
            assert float((got - soft).abs().max()) < 2e-6


@pytest.mark.parametrize("style", ["smooth", "ties"])
@pytest.mark.parametrize("vocab", [320, 163_840])
def test_rows_do_not_depend_on_company(vocab: int, style: str) -> None:
    logits = draw(style, 32, vocab)
    for sets in (OFF, SETS[1], SETS[2]):
        full = fill(logits, vocab, sets)
        for rows in (1, 2, 9, 17, 32):
            for first in {0, 32 - rows}:
                part = slice(first, first + rows)
                got = fill(logits[part], vocab, sets)
                assert torch.equal(got.weights, full.weights[part]), f"{rows} rows have other bits"
                assert torch.equal(got.masses, full.masses[part]) and torch.equal(got.total, full.total[part])


def test_rows_behind_the_live_ones_are_left() -> None:
    logits = draw("smooth", 9, 5000)
    full = fill(logits, 5000, SETS[2])
    for live in (0, 1, 4, 9):
        made = fill(logits, 5000, SETS[2], live)
        assert torch.equal(made.weights[:live], full.weights[:live]) and bool(made.weights[live:].isnan().all())
        assert torch.equal(made.total[:live], full.total[:live]) and bool((made.total[live:] == -7).all())
        assert torch.equal(made.masses[:live], full.masses[:live]) and bool((made.masses[live:] == -7).all())


def test_a_row_of_nan_harms_nobody() -> None:
    logits = draw("smooth", 4, 5000)
    for sets in (OFF, SETS[2], SETS[5]):
        full = fill(logits, 5000, sets)
        bad = logits.clone()
        bad[::2] = float("nan")
        made = fill(bad, 5000, sets)
        assert torch.equal(made.weights[1::2], full.weights[1::2]) and torch.equal(made.total[1::2], full.total[1::2])


def test_chained_and_replayed() -> None:
    """In a graph behind the kernel that writes its logits, many times, chained and not."""
    vocab = 20_000
    many = draw("smooth", 8, vocab)[:, :vocab].contiguous()
    heat, k, p, least = (torch.tensor([value], device="cuda") for value in SETS[2])
    want = fill(many, vocab, SETS[2])
    logits, made, one = torch.zeros(1, vocab, device="cuda"), Law.allocate(8, vocab, CUDA), whole(1)

    def run() -> None:
        for i in range(8):
            logits.copy_(many[i : i + 1])
            kernel.distribution(made.row(i), logits, heat, k, p, least, one, vocab)

    run()
    with unchained():
        apart = torch.cuda.CUDAGraph()
        with torch.cuda.graph(apart):
            run()
    chained = torch.cuda.CUDAGraph()
    with torch.cuda.graph(chained):
        run()
    for graph in (apart, chained):
        made.weights.fill_(float("nan"))
        for _ in range(50):
            graph.replay()
        assert torch.equal(made.weights, want.weights) and torch.equal(made.total, want.total)


def test_too_large_a_vocabulary() -> None:
    with pytest.raises(UnsupportedError, match="too large to sample from"):
        Law.allocate(1, kernel.MOST + 1, CUDA)


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("sets", [OFF, (0.7, 0, 0.95, 0.0), (0.7, 50, 1.0, 0.0), (0.7, 50, 0.95, 0.01)], ids=str)
def test_speed(rows: int, sets: Sets) -> None:
    """A generous bound of the time of a launch in a graph of many; the number is printed."""
    vocab = 163_840
    logits, made = draw("smooth", rows, vocab), Law.allocate(rows, vocab, CUDA)
    given = [torch.tensor([value], device="cuda") for value in sets]
    args = (made, logits, *given, whole(rows), vocab)
    kernel.distribution(*args)  # type: ignore[arg-type]
    graph = torch.cuda.CUDAGraph()
    with unchained(), torch.cuda.graph(graph):
        for _ in range(50):
            kernel.distribution(*args)  # type: ignore[arg-type]
    times = []
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / 50)
    print(f"{rows} rows, {sets}: {min(times):.1f} us a launch")
    assert min(times) < 60
