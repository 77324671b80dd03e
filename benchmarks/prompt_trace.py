"""Where the time of a prompt goes on a GPU: its kernels by name, what the device waits for, and other attentions.

    python benchmarks/prompt_trace.py [MODEL] [--context N] [--top N]

MODEL defaults to synthetic:kimi-linear-48b?layers=5. One fresh prompt after a warm-up, as the profiler sees it: the
time on the device from the first kernel to the last, how much of it no kernel ran, each kernel's count and sum. Then
torch's attentions for such a prompt and the model's heads, each alone: values padded to the width of the keys, and not.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from soliton.checkpoint import open_checkpoint
from soliton.config import EngineConfig
from soliton.measure.bandwidth import microseconds
from soliton.model.spec import MlaSpec, ModelSpec
from soliton.runtime import Runtime, load_runtime

CONSOLE = Console(width=150)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="synthetic:kimi-linear-48b?layers=5")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--top", type=int, default=40, help="kernels to show")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device was found; this measures one")
    config = EngineConfig(
        model=args.model, device="cuda", speculation="off", executor="eager", max_context=args.context + 1024
    )
    runtime = load_runtime(config, open_checkpoint(config.model))
    with torch.inference_mode():
        ids = torch.randint(0, runtime.checkpoint.spec.vocab, (args.context,)).tolist()
        for _ in range(3):
            host, whole = read(runtime, ids)
            print(f"{whole:.2f} ms, of which the host took {host:.2f} to launch it")
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            read(runtime, ids)
        kernels(seen, args.top)
        attentions(runtime.checkpoint.spec, args.context)
    return 0


def read(runtime: Runtime, ids: list[int]) -> tuple[float, float]:
    """(ms until all is launched, ms until it is done) of one prompt from an empty stream."""
    runtime.stream.clear()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in runtime.prefill.read(ids, 0, len(ids)):
        pass
    launched = time.perf_counter()
    torch.cuda.synchronize()
    return (launched - begun) * 1e3, (time.perf_counter() - begun) * 1e3


def kernels(seen: profile, top: int) -> None:
    """The table of kernels, and the gaps between them."""
    on_device = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events = sorted(on_device, key=lambda e: e.time_range.start)
    sums: dict[str, list[float]] = defaultdict(list)
    busy, end = 0.0, events[0].time_range.start
    for event in events:
        span = event.time_range
        sums[event.name].append(span.end - span.start)
        busy += max(span.end - max(span.start, end), 0.0)
        end = max(end, span.end)
    whole = end - events[0].time_range.start
    CONSOLE.print(f"{whole / 1e3:.2f} ms from the first to the last of {len(events)} kernels and copies, idle for "
                  f"{(whole - busy) / 1e3:.2f} ms")  # fmt: skip
    table = Table()
    for head in ("ms", "share", "count", "µs each", "kernel"):
        table.add_column(head)
    for name, times in sorted(sums.items(), key=lambda item: -sum(item[1]))[:top]:
        total = sum(times)
        cells = (f"{total / 1e3:.2f}", f"{total / whole:.1%}", str(len(times)), f"{total / len(times):.1f}", name[:100])
        table.add_row(*cells)
    CONSOLE.print(table)


def attentions(spec: ModelSpec, context: int) -> None:
    """Torch's attentions at the shapes of the model's first MLA layer."""
    mla = next((layer.mixer for layer in spec.layers if isinstance(layer.mixer, MlaSpec)), None)
    if mla is None:
        return
    wide, device = mla.nope_dim + mla.rope_dim, torch.device("cuda")
    q, k = (torch.randn(1, mla.heads, context, wide, device=device, dtype=torch.bfloat16) for _ in range(2))
    v = torch.randn(1, mla.heads, context, mla.value_dim, device=device, dtype=torch.bfloat16)
    padded = F.pad(v, (0, wide - mla.value_dim))

    def timed(values: torch.Tensor, backends: list[SDPBackend] | None) -> str:
        def call() -> object:
            return F.scaled_dot_product_attention(q, k, values, is_causal=True, scale=mla.scale)

        try:
            if backends is None:
                return f"{best(call):.0f} µs"
            with sdpa_kernel(backends):
                return f"{best(call):.0f} µs"
        except RuntimeError as error:
            return f"no: {str(error).splitlines()[0][:60]}"

    def best(call: Callable[[], object]) -> float:
        return min(microseconds(device, call) for _ in range(6))

    table = Table(title=f"attention of {context} rows, {mla.heads} heads, keys {wide}, values {mla.value_dim}")
    for head in ("backend", "values padded", "as they are"):
        table.add_column(head)
    for name, backends in (
        ("torch's choice", None),
        ("flash", [SDPBackend.FLASH_ATTENTION]),
        ("cudnn", [SDPBackend.CUDNN_ATTENTION]),
    ):
        table.add_row(name, timed(padded, backends), timed(v, backends))
    CONSOLE.print(table)


if __name__ == "__main__":
    sys.exit(main())
