"""Compiles every kernel that waits for the ones in front of it for sm_90, without a GPU; see ``main``.

    python tests/pdl_compile.py triton | cuda

One JSON document: kernel to what it accesses before it has waited (see pdl_check). A process of its own, since Triton
either compiles or interprets in one.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from pdl_check import unwaited

Found = dict[str, list[tuple[str, list[int]]]]

BLOCKS = {"COUNT": 6, "ROWS": 8}

# By module and kernel: the types of the arguments that are no constants, the constants.
KERNELS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "norm_triton": {
        "_norm": ("*bf16 *bf16 *fp32 i32 i32 i32 fp32", {"BLOCK": 4096}),
        "_rows": ("*bf16 *i64 *bf16 i32 i32 i32", {"BLOCK": 4096}),
        "_product": ("*fp32 *bf16 *fp32 i32 i32 i32 i32 i32", {"BLOCK_N": 16, "BLOCK_K": 256}),
    },
    "kda_triton": {
        "_chain": (
            "*bf16 *bf16 *bf16 *fp32 *bf16 *bf16 *fp32 *fp32 *fp32 *i64 *i64 " + "i32 " * 7 + "fp32 fp32 fp32",
            {"K": 128, "V": 128, "BV": 32, "TAPS": 4, "BOUNDED": True},
        ),
        "_commit_window": ("*bf16 *i64 i32 i32 i32", {"TAPS": 4, "BLOCK": 1024}),
        "_advance": ("*i64 *i64 i32", {}),
        "_keep": ("*fp32 *fp32 *i64 *i64 *i64 i32 i32 i32", {"BLOCK": 4096}),
    },
    "mla_triton": {
        "_heads": (
            "*bf16 *bf16 *bf16 *bf16 i32 i32 i32 i32 i32 i32 *i64",
            {"K": 512, "N": 128, "BR": 16, "BN": 32, "GATED": True},
        ),
        "_enter": (
            "*bf16 *bf16 *bf16 *bf16 *bf16 *fp32 *fp32 *i64 *i64 i32 i32 i32 i32 i32 fp32",
            {"n": 32, "HEADS": 32, "NOPE": 128, "C": 512, "ROPE": 64, "TURNED": True, "BR": 16, "BN": 64},
        ),
        "_attend": (
            "*fp32 *fp32 *bf16 *bf16 *i64 *i64 i32 i32 fp32 i32 i32",
            {"n": 32, "C": 512, "ROPE": 64, "ROWS": 32, "TILE": 64, "BLOCK": 64, "GROUPED": True},
        ),
        "_combine": (
            "*bf16 *fp32 *i64 *i64 *i64 i32",
            {"n": 32, "C": 512, "SPAN": 64, "SLOTS": 160, "STEPS": 5, "TOGETHER": 32, "COLUMNS": 32},
        ),
    },
    "draft_triton": {
        "_query": ("*bf16 *bf16 *fp32 *fp32 i32 fp32", {"HEADS": 32, "D": 128}),
        "_store": ("*bf16 *bf16 *fp32 *fp32 *i64 i32 i32 fp32", {"GROUPS": 32, "D": 128}),
        "_attend": (
            "*fp32 *fp32 *bf16 *bf16 *i64 i32 fp32",
            {"B": 8, "SPLITS": 8, "G": 1, "GROUPS": 32, "M": 16, "D": 128, "BLOCK": 64},
        ),
        "_combine": (
            "*bf16 *fp32 *fp32",
            {"SPLITS": 8, "PARTS": 8, "G": 1, "GROUPS": 32, "M": 16, "D": 128},
        ),
        "_block_rows": ("*i64 *i64 *fp32 *i64 *i64 *fp32", {"D": 128}),
        "_context_rows": ("*i64 *i64 *fp32 *i64 *i64 *fp32", {"D": 128}),
        "_confide": (
            "*fp32 *bf16 *fp32 *fp32 *bf16 *i64 i32",
            {"FIRST": 0, "H": 2560, "R": 256, "HP": 4096, "RP": 256},
        ),
        "_schedule": ("*i64 *fp32 *fp32 *fp32 fp32", {"SLOTS": 8, "MODE": 1, "EARLY": True}),
    },
    "markov_triton": {
        "_mix": (
            "*fp32 *fp32 *fp32 *bf16 *bf16 *fp32 *fp32 *i64 *fp32 *i32 i32 i32 i32 i32 i32",
            {"R": 64, "H": 256, "HP": 256, "BLOCK": 8, "RNN": True, "FIRST": False, "P": 64, "CHOSEN": True},
        ),
        "_chain": (
            "*fp32 *fp32 *i32 *fp32 *i32 *fp32 *bf16 *bf16 *i64 i32 i32 i32 i32 i32 i32",
            {"R": 256, "TILES": 5, "BLOCK": 64, "P": 512, "CHOSEN": True},
        ),
        "_chosen": ("*i64 *fp32 *i32 i32 i32", {"P": 64}),
    },
    "verdict_triton": {
        "_refill": ("*i64 *i64 *i64 *fp32 *i64 *i64 *i64 *i64 *fp32 i32", {"WIDTH": 64, "TURNED": True}),
        "_best": ("*fp32 *i32 *fp32 *i64 i32 i32", {"CHUNK": 4096, "SPLITS": 64}),
        "_greedy": ("*fp32 *i32 " + "*i64 " * 10 + "*u8 i32 i32", {"SPLITS": 64, **BLOCKS}),
        "_keep_row": ("*bf16 *bf16 *i64 *i64 i32", {"FLAGGED": True, "BLOCK": 1024}),
        "_publish": ("*i64 " * 8 + "i32", BLOCKS),
        "_process": (
            "*fp32 *fp32 *i32 *u8 *fp32 *fp32 *fp32 *fp32 *i64 *i64 *u8 *i64 *i64 i32 i32 i32",
            {"DRAFTS": 5, "CHUNK": 2048},
        ),
        "_restrict": ("*fp32 *fp32 *i32 *i64 i32 i32 i32 i32", {"CHUNK": 2048}),
        "_choose": ("*i64 *fp32 *i32 i32", {"SPLITS": 64}),
        "_chain_row": ("*i64 *i64 *fp32 *i64 *i64 *fp32 i32", {"WIDTH": 64, "TURNED": True}),
        "_extend": ("*i64 *i64 *i64 *i64", BLOCKS),
    },
    "draws_triton": {
        "_draft": ("*i64 *fp32 *i64 *i64 *i64 fp32 i32 i32 i32 i32", {"SPLITS": 256, "CHUNK": 1024}),
        "_residual": (
            "*i64 *i64 *fp32 *i64 *i64 *fp32 " + "*i64 " * 5 + "fp32 i32 i32 i32",
            {"CHUNK": 1024, **BLOCKS},
        ),
        "_settle_verdict": (
            "*i64 " * 8 + "*u8 i32 *i64 *i64 *fp32 *i64 *i64 *fp32 " + "*i64 " * 5 + "fp32 i32 i32 i32",
            {"SPLITS": 256, "CHUNK": 1024, "DRAFTED": True, **BLOCKS},
        ),
    },
}


def triton_kernels() -> Found:
    """Every Triton kernel of the package that takes part in a chain; one that is not listed here reads "not listed"."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    found: Found = {}
    package = importlib.import_module("soliton.ops").__path__[0]
    for path in sorted(Path(package).glob("*_triton.py")):
        module, text = importlib.import_module(f"soliton.ops.{path.stem}"), path.read_text(encoding="utf-8")
        for name, function in vars(module).items():
            if not isinstance(function, triton.runtime.JITFunction) or function.fn.__module__ != module.__name__:
                continue
            if f"{name}[" not in text or "launch_pdl" not in text:
                continue  # called by other kernels, or of a module that chains nothing
            if name not in KERNELS.get(path.stem, {}):
                found[f"{path.stem}.{name}"] = [("not listed", [])]
                continue
            types, constants = KERNELS[path.stem][name]
            constants = {**constants, "PDL": True} if "PDL" in function.arg_names else constants
            given = iter(types.split())
            signature = {arg: "constexpr" if arg in constants else next(given) for arg in function.arg_names}
            source = ASTSource(
                function, signature, {(function.arg_names.index(arg),): value for arg, value in constants.items()}
            )
            made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"launch_pdl": True})
            for kernel, early in unwaited(made.asm["ptx"]).items():
                found[f"{path.stem}.{kernel}"] = early
    return found


def cuda_kernels() -> Found:
    """The sweep, at all widths, and the law."""
    from cuda.bindings import nvrtc

    from soliton.ops import cuda, law, sweep

    found = {}
    variants = [("sweep.cu", f" {tiles}", sweep.defines(tiles)) for tiles in sweep.HALVES]
    for source, variant, defines in [*variants, ("law.cu", "", law.defines())]:
        program = nvrtc.nvrtcCreateProgram(cuda.whole(source), source.encode(), 0, [], [])[1]
        options = [b"--gpu-architecture=compute_90a", b"--std=c++17"]
        options += [f"-D{name}={value}".encode() for name, value in defines.items()]
        assert int(nvrtc.nvrtcCompileProgram(program, len(options), options)[0]) == 0
        ptx = b" " * int(nvrtc.nvrtcGetPTXSize(program)[1])
        nvrtc.nvrtcGetPTX(program, ptx)
        for kernel, early in unwaited(ptx.rstrip(b"\0").decode()).items():
            found[kernel + variant] = early
    return found


def main() -> None:
    print(json.dumps({"triton": triton_kernels, "cuda": cuda_kernels}[sys.argv[1]]()))


if __name__ == "__main__":
    main()
