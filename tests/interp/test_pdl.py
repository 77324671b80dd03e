"""Every kernel that may start before the ones in front of it have ended waits before it touches what they write."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdl_compile import KERNELS

SCRIPT = Path(__file__).parent.parent / "pdl_compile.py"


def early(which: str) -> dict[str, list[tuple[str, list[int]]]]:
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, str(SCRIPT), which], env=clean, capture_output=True, text=True, timeout=300)
    if "DynamicLibNotFoundError" in done.stderr or "No module named 'cuda" in done.stderr:
        pytest.skip("NVRTC is not installed: CUDA sources are not compiled")
    assert done.returncode == 0, done.stderr
    found: dict[str, list[tuple[str, list[int]]]] = json.loads(done.stdout)
    return found


def test_triton_kernels() -> None:
    found = early("triton")
    assert set(found) == {f"{module}.{name}" for module, names in KERNELS.items() for name in names}
    # the decay and its bias are weights: nothing in a step writes them
    assert found.pop("kda_triton._chain") == [["ld.global.b32", [6]], ["ld.global.b32", [7]]]
    for name in ("_enter", "_heads"):  # the heads' weights likewise
        assert {tuple(places) for _, places in found.pop(f"mla_triton.{name}")} == {(2,)}
    assert {tuple(places) for _, places in found.pop("markov_triton._chain")} == {(7,)}  # and the Markov head's
    assert {name: accesses for name, accesses in found.items() if accesses} == {}


def test_cuda_kernels() -> None:
    if importlib.util.find_spec("cuda") is None:
        pytest.skip("cuda-bindings is not installed: CUDA sources are not compiled")
    found = early("cuda")
    assert found.pop("soliton_law") == []
    assert set(found) == {"soliton_sweep 1", "soliton_sweep 2", "soliton_sweep 4"}
    for accesses in found.values():
        # the list of instructions and the weights: nothing in a step writes them
        assert any(operation.startswith("ld.global.nc") for operation, _ in accesses)
        rest = {operation for operation, _ in accesses if not operation.startswith("ld.global.nc")}
        copies = ("cp.async.bulk.shared::cluster.global.mbarrier", "cp.async.bulk.prefetch.L2.global")
        assert rest and all(operation.startswith(copies) for operation in rest)
