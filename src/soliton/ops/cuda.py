"""CUDA C++ kernels of this package: compiled by NVRTC when first needed, kept on disk, launched by the driver.

No torch header, no nvcc: NVRTC and the driver come with CUDA builds of torch, ``cuda.bindings`` calls them.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import UnsupportedError
from .building import building


def cache_directory() -> Path:
    """Where compiled kernels are kept: ``soliton`` under XDG_CACHE_HOME, ~/.cache when that is unset."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "soliton"


class Kernel:
    """One ``extern "C"`` kernel of a source file beside this module. Loaded at once; see ``launch``.

    defines: preprocessor constants. shared: bytes of dynamic shared memory. Raises UnsupportedError with the
    compiler's words when the source does not compile for this device.
    """

    def __init__(
        self, source: str, name: str, *, defines: Mapping[str, int], shared: int, device: torch.device
    ) -> None:
        self._driver = _bindings("driver")
        self.name, self.shared = name, shared
        torch.cuda.current_stream(device)  # makes the context that the module is loaded into
        major, minor = torch.cuda.get_device_capability(device)
        image = compiled(source, f"sm_{major}{minor}{'a' if major >= 9 else ''}", tuple(sorted(defines.items())))
        self._module = self._ok(self._driver.cuModuleLoadData(image))
        self._function = self._ok(self._driver.cuModuleGetFunction(self._module, name.encode()))
        attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._ok(self._driver.cuFuncSetAttribute(self._function, attribute, shared))

    def launch(self, grid: int, block: int, args: Sequence[tuple[Any, Any]], *, pdl: bool) -> None:
        """Enqueue on torch's current stream. args: (value, ctypes type). pdl: may start before what precedes it ends;
        the kernel waits where it must."""
        d = self._driver
        config = d.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.sharedMemBytes, config.hStream = self.shared, torch.cuda.current_stream().cuda_stream
        if pdl:
            attribute = d.CUlaunchAttribute()
            attribute.id = d.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        values, kinds = zip(*args, strict=True)
        self._ok(d.cuLaunchKernelEx(config, self._function, (values, kinds), 0))

    def _ok(self, result: tuple[Any, ...]) -> Any:
        if int(result[0]) != 0:
            raise RuntimeError(f"{self.name}: the CUDA driver says {result[0]!r}")
        return result[1] if len(result) > 1 else None


def whole(source: str) -> bytes:
    """A source file beside this module with what it includes in place, so that one text makes one kernel."""
    text = (Path(__file__).parent / source).read_bytes()
    put = lambda found: whole(found[1].decode())  # noqa: E731
    return re.sub(rb'^#include "([\w.]+)"$', put, text, flags=re.MULTILINE)


@functools.cache
def compiled(source: str, target: str, defines: tuple[tuple[str, int], ...]) -> bytes:
    """The cubin of ``source`` for ``target`` (such as sm_90a), from the cache on disk or the compiler."""
    text = whole(source)
    nvrtc = _bindings("nvrtc")
    version = nvrtc.nvrtcVersion()[1:]
    key = hashlib.sha256(repr((text, target, defines, version)).encode()).hexdigest()[:24]
    kept = cache_directory() / f"{Path(source).stem}-{target}-{key}.cubin"
    if kept.exists():
        return kept.read_bytes()
    building(f"{source} for {target}")
    options = [f"--gpu-architecture={target}", "--std=c++17", *(f"-D{name}={value}" for name, value in defines)]
    program = nvrtc.nvrtcCreateProgram(text, source.encode(), 0, [], [])[1]
    error = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])[0]
    if int(error) != 0:
        size = nvrtc.nvrtcGetProgramLogSize(program)[1]
        words = b" " * size
        nvrtc.nvrtcGetProgramLog(program, words)
        raise UnsupportedError(f"{source} does not compile for {target}: {words.decode(errors='replace').strip()}")
    image = b" " * int(nvrtc.nvrtcGetCUBINSize(program)[1])
    nvrtc.nvrtcGetCUBIN(program, image)
    kept.parent.mkdir(parents=True, exist_ok=True)
    fresh = kept.with_suffix(f".{os.getpid()}")
    fresh.write_bytes(image)
    fresh.replace(kept)
    return image


def _bindings(name: str) -> Any:
    try:
        return importlib.import_module(f"cuda.bindings.{name}")
    except ImportError as error:
        raise UnsupportedError(
            f"cuda.bindings.{name} is not installed ({error}), and the CUDA kernels need it: pip install cuda-bindings"
        ) from error


POINTER, INTEGER = ctypes.c_void_p, ctypes.c_int
