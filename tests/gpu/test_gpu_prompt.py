"""The ops of a prompt on a GPU against their references, and that a pass over one never waits for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_cases import error
from soliton import Engine
from soliton.model.prefill import target_pass
from soliton.ops import bulk, kda, moe, norm, router
from soliton.ops.weight import Weight, pack

CUDA = torch.device("cuda")
BF16 = torch.bfloat16
COUNTS = (1, 2, 63, 777)


def rand(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = BF16) -> Tensor:
    maker = torch.Generator(device="cuda").manual_seed(seed)
    return (torch.randn(*shape, generator=maker, device="cuda") * scale).to(dtype)


def poisoned(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device="cuda")


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("heads", [2, 32])
def test_mix_and_gated_norm(count: int, heads: int) -> None:
    width = heads * 128
    proj, past = rand(count, 3 * width + 264), rand(3, 3 * width, seed=2)
    conv = rand(4, 3 * width, seed=3, scale=0.5, dtype=torch.float32)
    window, want = torch.cat([past, proj[:, : 3 * width]]), poisoned(count, 3 * width)
    kda.conv_reference(want, window, conv)
    apart = [poisoned(count, width) for _ in range(3)]
    bulk.mix(*apart, proj, past, conv)
    assert error(torch.cat(apart, 1), want) < 3e-3 and torch.equal(past, window[-3:])
    o, gate, scale = (
        rand(count, heads, 128, seed=4),
        proj[:, 264 : 264 + width].unflatten(1, (heads, 128)),
        conv[0, :128],
    )
    out, normed = poisoned(count, heads, 128), poisoned(count, heads, 128)
    bulk.gated_norm(out, o, gate, scale, 1e-5)
    norm.gated_reference(normed, o, gate, scale, 1e-5)
    assert error(out, normed) < 3e-3


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("width", [512, 1024, 4608, 9216])
def test_norm_and_swiglu(count: int, width: int) -> None:
    both, scale = rand(count, 2 * width, scale=2.0), rand(width, seed=2, dtype=torch.float32)
    out, want = poisoned(count, width), poisoned(count, width)
    bulk.swiglu(out, both[:, 0::2], both[:, 1::2], 0.5)
    moe.swiglu_reference(want, both[:, 0::2], both[:, 1::2], 0.5)
    assert error(out, want) < 3e-3
    bulk.norm(out, both[:, width:], scale, 1e-6)
    norm.reference(want, both[:, width:], scale, 1e-6)
    assert error(out, want) < 3e-3


@pytest.mark.parametrize("sizes", [(256, 1, 1, 8), (128, 8, 4, 8), (512, 8, 4, 8)], ids=str)
def test_route(sizes: tuple[int, int, int, int]) -> None:
    experts, groups, kept, k = sizes
    logits, bias = rand(4096, experts, dtype=torch.float32), rand(experts, seed=2, scale=0.3, dtype=torch.float32)
    ids, want = (torch.full((4096, k), -7, dtype=torch.int64, device="cuda") for _ in range(2))
    weights, share = poisoned(4096, k, dtype=torch.float32), poisoned(4096, k, dtype=torch.float32)
    bulk.route(ids, weights, logits, bias, groups, kept, True, 2.5)
    router.reference(want, share, logits.clone(), bias, groups, kept, True, 2.5)
    same = (ids == want).all(1)
    assert float(same.float().mean()) > 0.99, "near ties alone may fall either way"
    assert error(weights[same], share[same]) < 1e-5


@pytest.mark.parametrize("count", [2, 777])
@pytest.mark.parametrize("sizes", [(16, 4, 256, 64, 128), (256, 8, 2304, 1024, 1024)], ids=str)
def test_experts(count: int, sizes: tuple[int, ...]) -> None:
    experts, k, hidden, width, inner = sizes
    up = rand(experts, 2 * width, hidden, seed=6, scale=hidden**-0.5)
    down = rand(experts, hidden, width, seed=7, scale=width**-0.5)
    gates, ups = rand(inner, hidden, seed=8, scale=hidden**-0.5), rand(inner, hidden, seed=9, scale=hidden**-0.5)
    shared_up = pack([gates, ups], device=CUDA, dtype=BF16, paired=True)
    shared_down = pack([rand(hidden, inner, seed=10, scale=inner**-0.5)], device=CUDA, dtype=BF16)
    x, scores = rand(count, hidden), rand(count, experts - 1, seed=3)  # the last expert has no row
    weights, ids = scores.float().softmax(1).topk(k)
    ids[:, 0] = torch.where((ids == 3).any(1), ids[:, 0], 3)  # one has nearly all
    out, want = poisoned(count, hidden), poisoned(count, hidden, dtype=torch.float32)
    bulk.experts(out, x, ids, weights, up, down, shared_up, shared_down, 0.5, 0.0, None)
    stacks = torch.cat([up[:, 0::2], up[:, 1::2]], 1).transpose(1, 2), down.transpose(1, 2)
    apart = Weight(data=torch.cat([gates, ups]).t(), inputs=hidden, outputs=2 * inner)
    moe.grouped_reference(want, x, ids, weights, *stacks, apart, shared_down, 0.5, 0.0, None)
    assert error(out, want) < 8e-3


def tuned_only() -> None:
    if not bulk.has_fla() or not bulk.tuned().is_dir():
        pytest.skip("no tuned configurations of flash-linear-attention for this GPU: tuning takes over a minute")


@pytest.mark.parametrize("law", ["bounded", "softplus"])
@pytest.mark.parametrize("heads", [2, 16, 32])
def test_recurrence(heads: int, law: Any) -> None:
    tuned_only()
    width, count = heads * 128, 333
    q, k, v, f = (rand(count, width, seed=s) for s in range(4))
    b, dt = rand(count, heads, seed=5), rand(width, seed=6, dtype=torch.float32)
    a = rand(heads, seed=7, dtype=torch.float32).abs().repeat_interleave(128) + 0.1
    states = [rand(heads, 128, 128, seed=8, scale=0.1, dtype=torch.float32) for _ in range(2)]
    out, want = poisoned(count, heads, 128), poisoned(count, heads, 128)
    bulk.recurrence(out, q, k, v, f, b, a, dt, states[0], law, -5.0, 1e-6)
    bulk.recurrence_reference(want, q, k, v, f, b, a, dt, states[1], law, -5.0, 1e-6)
    assert error(out, want) < 2e-2 and error(*states) < 2e-2


@pytest.mark.parametrize("model", ["kimi-linear-48b?layers=4&experts=32", "ling-3.0-tiny?layers=4"])
def test_a_pass_waits_for_nothing(model: str) -> None:
    tuned_only()
    with Engine.load("synthetic:" + model, device="cuda", speculation="off", max_context=600) as engine:
        runtime = engine._runtime
        assert runtime is not None
        parts = runtime.parts
        with torch.inference_mode():
            ids = torch.arange(512, device="cuda")
            torch.cuda.set_sync_debug_mode("error")
            try:
                for start in (0, 256):
                    given = (parts.immediate, parts.weights, parts.spec, ids[start : start + 256], start)
                    target_pass(*given, parts.stream.committed, parts.stream.keep, parts.turn)
            finally:
                torch.cuda.set_sync_debug_mode("default")
