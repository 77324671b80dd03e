"""sweep.cu on a CPU: compiled by the machine's C++ compiler, its threads as fibers in a random order, its copies
landing late (see emulated/grid/chip.h)."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from soliton.ops import sweep

LAUNCHES = itertools.count()
HERE = Path(__file__).parent / "emulated" / "grid"


@cache
def directory() -> str:
    return tempfile.mkdtemp()


@cache
def library(halves: int) -> Any:
    """The kernel for up to ``halves`` * 8 rows."""
    if shutil.which("g++") is None:
        pytest.skip("no g++: sweep.cu is not emulated")
    made = Path(directory()) / f"sweep{halves}.so"
    constants = [f"-D{name}={value}" for name, value in sweep.defines(halves).items()]
    options = ["-std=c++17", "-O2", "-w", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE", "-shared", "-fPIC", *constants]
    include = ["-I", str(HERE), "-I", str(Path(sweep.__file__).parent)]
    command = ["g++", *options, "-DSOLITON_EMULATED=1", *include, "-o", made, HERE / "sweep.cpp"]
    subprocess.run(command, check=True, timeout=200)
    return ctypes.CDLL(str(made))


def execute(made: sweep.Sweep, live: torch.Tensor | None = None, grid: int = 5, seed: int = 0) -> None:
    """One launch. live: int64 [1] or None."""
    halves = sweep.halves_of(made.rows)
    parts = [item.packed(start, grid, halves) for item, start in made._starts(grid)]
    if made.ahead is not None:
        parts += made.ahead.foreseen(grid)[: sweep.LIST - len(parts)]
    # words that say of which launch they are outlive it, so no launch may have the sign of an earlier one
    counter = torch.tensor([0, next(LAUNCHES) * sweep.LIST], dtype=torch.int32)
    carry = torch.zeros(grid, 32, 8, dtype=torch.int64)
    size = (sweep.SHARED - sweep._beside(halves)) // 128 * 128
    places = [ctypes.c_void_p(t.data_ptr() if t is not None else 0) for t in (live, counter, carry)]
    run = library(halves).run
    ended = run(ctypes.c_char_p(b"".join(parts)), len(parts), places[0], made.rows, *places[1:], size, grid, seed)
    assert ended == 0, f"nobody can go on: {made}"
    assert int(carry.abs().max()) == 0, "every sum was taken over"
