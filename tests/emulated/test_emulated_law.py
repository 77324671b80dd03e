"""law.cu on a CPU: compiled by the machine's C++ compiler, its threads as fibers (see cuda.h)."""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernel_cases import draw_logits
from soliton.ops import law as kernel
from soliton.ops.law import Law
from soliton.sampling import law

CPU, HERE = torch.device("cpu"), Path(__file__).parent
Run = Callable[[Law, Tensor, tuple[float, int, float, float], int], None]


class Arguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weights", "masses", "total", "logits", "temperature")),
        *((name, ctypes.c_void_p) for name in ("top_k", "top_p", "min_p", "live")),
        *((name, ctypes.c_int) for name in ("vocab", "stride", "parts", "bits")),
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Fills a law from logits [R, >= V] and (temperature, top_k, top_p, min_p); the rows from ``live`` on are left."""
    if shutil.which("g++") is None:
        pytest.skip("no g++: law.cu is not emulated")
    library = tmp_path_factory.mktemp("law") / "law.so"
    constants = [f"-D{name}={value}" for name, value in kernel.defines().items()]
    options = ["-std=c++17", "-O2", "-w", "-fno-strict-aliasing", "-shared", "-fPIC", *constants]
    include = ["-I", str(HERE), "-I", str(Path(kernel.__file__).parent)]
    subprocess.run(["g++", *options, *include, "-o", library, HERE / "law.cpp"], check=True, timeout=120)
    call = ctypes.CDLL(str(library)).run

    def fill(made: Law, logits: Tensor, sets: tuple[float, int, float, float], live: int) -> None:
        given = [torch.tensor([value]) for value in (*sets, live)]
        pointers = (made.weights, made.masses, made.total, logits, *given)
        vocab = made.weights.shape[1]
        call(
            ctypes.byref(Arguments(*(t.data_ptr() for t in pointers), vocab, logits.stride(0), *kernel.sizes(vocab))),
            made.total.shape[0],
        )

    return fill


def poisoned(rows: int, vocab: int) -> Law:
    made = Law.allocate(rows, vocab, CPU)
    made.weights.fill_(float("nan"))
    made.masses.fill_(-7)
    made.total.fill_(-7)
    return made


def mass(weights: Tensor) -> Tensor:
    return (weights.double() * float(2 ** kernel.mass_bits(weights.shape[-1])) + 0.5).floor().to(torch.int64)


def expected(logits: Tensor, soft: Tensor, sets: tuple[float, int, float, float]) -> Tensor:
    """The weights of the sets, from those of all tokens: exact."""
    heat, k, p, least = (torch.tensor([value]) for value in sets)
    kept = torch.where(law.top_k_sorted(logits / heat, k), soft, 0.0)
    return torch.where(law.top_p_sorted(kept, p) & (kept >= least), kept, 0.0)


def check(run: Run, logits: Tensor, vocab: int, sets: tuple[float, int, float, float]) -> None:
    rows = logits.shape[0]
    plain, made = poisoned(rows, vocab), poisoned(rows, vocab)
    run(plain, logits, (sets[0], 0, 1.0, 0.0), rows)
    scaled = (logits[:, :vocab] / torch.tensor(sets[0])).double()
    soft = (scaled - scaled.amax(-1, keepdim=True)).exp()
    assert float((plain.weights.double() - soft).abs().max()) < 1e-6
    run(made, logits, sets, rows)
    want = expected(logits[:, :vocab], plain.weights, sets)
    assert torch.equal(made.weights, want)
    for got in (plain, made):
        held = torch.nn.functional.pad(mass(got.weights), (0, -vocab % kernel.CHUNK))
        assert torch.equal(got.masses, held.unflatten(1, (-1, kernel.CHUNK)).sum(-1))
        assert torch.equal(got.total, got.masses.sum(-1))


STYLES = ["smooth", "ties", "equal", "near", "peak", "masked"]
SETS = [(0, 1.0, 0.0), (5, 1.0, 0.1), (0, 0.9, 0.0), (20, 0.5, 0.05), (300, 0.1, 0.0), (10**6, 1e-9, 1.0)]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("seed", range(3))
def test_sets_are_exact(run: Run, style: str, seed: int) -> None:
    draw = random.Random(f"{style}{seed}")
    torch.manual_seed(seed)
    vocab = draw.choice([1, 2, 130, 1024, 1025, 5000, 8192, 20_000])
    check(run, draw_logits(style, 1, vocab), vocab, (draw.choice([0.6, 1.0, 1.3]), *draw.choice(SETS)))


@pytest.mark.parametrize("style", ["smooth", "ties", "near"])
def test_a_large_vocabulary(run: Run, style: str) -> None:
    check(run, draw_logits(style, 1, 157_184), 157_184, (0.8, 1000, 0.9, 0.001))


def test_rows_that_count_for_nothing(run: Run) -> None:
    """Rows behind the live ones are left; a row of NaN ends, and harms nobody."""
    made = poisoned(3, 300)
    logits = torch.full((3, 300), float("nan"))
    logits[1] = torch.randn(300)
    run(made, logits, (0.7, 40, 0.9, 0.01), 2)
    assert bool(made.weights[2].isnan().all()) and made.masses[2].tolist() == [-7] and int(made.total[2]) == -7
    alone = poisoned(1, 300)
    run(alone, logits[1:2], (0.7, 40, 0.9, 0.01), 1)
    assert torch.equal(alone.weights[0], made.weights[1]) and int(alone.total) == int(made.total[1])
