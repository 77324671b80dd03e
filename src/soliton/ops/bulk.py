"""The many rows of a prompt on a GPU: libraries where they have it (flash-linear-attention, SDPA, grouped products)."""

from __future__ import annotations

import functools
import importlib
import os
import re
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from . import kda
from .building import building
from .moe import halves, swiglu_reference
from .weight import Weight


def kernels() -> Any:
    """Our own kernels for prompts; they import triton, which only a GPU's machine has."""
    return importlib.import_module(f"{__package__}.bulk_triton")


def tuned() -> Path:
    """Where the configurations of flash-linear-attention's kernels lie that were tuned on this kind of GPU."""
    name = re.sub(r"[^0-9A-Za-z]+", "_", torch.cuda.get_device_name()).strip("_")
    return Path(__file__).parent / "tuned" / name


@functools.cache
def say_untuned() -> None:
    """Say once that the library is about to try its kernels' configurations, where none are kept."""
    if "FLA_CONFIG_DIR" not in os.environ:
        building(
            f"flash-linear-attention's kernels, tuned for {torch.cuda.get_device_name()}: none are kept for it, the "
            "first time takes over a minute"
        )


def has_fla() -> bool:
    """Whether the chunked recurrence of flash-linear-attention can be imported. Points it to ``tuned``, unless the user
    has chosen otherwise: without, its first prompt tunes for over a minute."""
    if tuned().is_dir():  # read when the library is imported
        os.environ.setdefault("FLA_CONFIG_DIR", str(tuned()))
        os.environ.setdefault("FLA_CACHE_MODE", "fuzzy")
    try:
        importlib.import_module("fla.ops.kda")
    except ImportError:
        return False
    return True


def add(x: Tensor, delta: Tensor) -> None:
    """x += delta, one rounding."""
    x.add_(delta)


def norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """See norm_triton.norm, whose kernel takes any number of rows."""
    importlib.import_module(f"{__package__}.norm_triton").norm(out, x, weight, eps)


def route(ids: Tensor, weights: Tensor, logits: Tensor, bias: Tensor, *law: Any) -> None:
    """See bulk_triton.route."""
    kernels().route(ids, weights, logits, bias, *law)


def swiglu(out: Tensor, gate: Tensor, up: Tensor, limit: float) -> None:
    """See ops.moe.swiglu_reference; one kernel where gate and up are columns in turn of one product."""
    if gate.stride(1) == 2 and up.data_ptr() == gate.data_ptr() + gate.element_size():
        kernels().swiglu(out, gate, limit)
    else:
        swiglu_reference(out, gate, up, limit)


def mix(q: Tensor, k: Tensor, v: Tensor, proj: Tensor, tail: Tensor, weight: Tensor) -> None:
    """See bulk_triton.mix."""
    kernels().mix(q, k, v, proj, tail, weight)


def gated_norm(out: Tensor, o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> None:
    """See bulk_triton.gated_norm."""
    kernels().gated_norm(out, o, gate, weight, eps)


def recurrence(
    o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    b: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    law: Literal["bounded", "softplus"],
    lower_bound: float,
    eps: float,
) -> None:
    """The KDA recurrence over a prompt's rows, gates and norms inside; state [n, K, V] float32 is updated.

    o: [T, n, V]; q, k: [T, n*K], v: [T, n*V], contiguous, after convolution and SiLU; f: [T, n*K]; b: [T, n]; a,
    dt_bias: [n*K] float32.
    By flash-linear-attention's chunk_kda (arXiv 2510.26692), whose norms have their epsilon, 1e-6, inside the root too.
    """
    heads, key, value = state.shape
    rows = q.shape[0]
    bounded = law == "bounded"
    say_untuned()
    chunk_kda = importlib.import_module("fla.ops.kda").chunk_kda
    out, final = chunk_kda(
        q=q.view(1, rows, heads, key),
        k=k.view(1, rows, heads, key),
        v=v.view(1, rows, heads, value),
        g=f.reshape(1, rows, heads, key),
        beta=b.reshape(1, rows, heads).float(),
        scale=key**-0.5,
        initial_state=state.unsqueeze(0),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        safe_gate=bounded,
        lower_bound=lower_bound if bounded else None,
        A_log=a.view(heads, key)[:, 0].log(),
        dt_bias=dt_bias,
    )
    o.copy_(out[0])
    state.copy_(final[0])


def recurrence_reference(
    o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    b: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    law: Literal["bounded", "softplus"],
    lower_bound: float,
    eps: float,
) -> None:
    """As recurrence, from the references of ops.kda."""
    heads, key, value = state.shape
    rows, width = q.shape[0], heads * key
    qk = torch.empty(rows, 2 * heads, key, dtype=torch.float32, device=q.device)
    kda.l2norm_reference(qk, torch.cat([q, k], 1).view(rows, 2 * heads, key), eps, key**-0.5)
    decay, beta = qk.new_empty(rows, width), qk.new_empty(rows, heads)
    kda.gates_reference(decay, beta, f, b, a, dt_bias, law, lower_bound)
    out = qk.new_empty(rows, heads, value)
    values = v.view(rows, heads, value).float()
    kda.chunk_reference(out, qk[:, :heads], qk[:, heads:], values, decay.view(rows, heads, key), beta, state)
    o.copy_(out)


def attend(out: Tensor, q: Tensor, cache: Tensor, start: int, k_up: Tensor, v_up: Tensor, scale: float) -> None:
    """Attention of a prompt's rows at positions start .. over the cache up to their own, keys and values made of it.

    out: [T, n, V]; q: [T, n, nope + rope], rotated; cache: [max_len, C + rope]; k_up: [n, nope, C]; v_up: [n, C, V].
    """
    rows, heads, wide = q.shape
    nope, latent = k_up.shape[1:]
    seen = cache[: start + rows]
    keys = seen.new_empty(1, heads, start + rows, wide)
    low = seen[:, :latent]
    keys[0, :, :, :nope] = (low @ k_up.reshape(heads * nope, latent).t()).view(-1, heads, nope).transpose(0, 1)
    keys[0, :, :, nope:] = seen[:, latent:]
    values = torch.matmul(low, v_up).unsqueeze(0)
    if values.shape[-1] != wide:  # the fast kernels take one width
        values = F.pad(values, (0, wide - values.shape[-1]))
    query = q.transpose(0, 1).unsqueeze(0)
    if start:
        mask = causal_lower_right(rows, start + rows)
        got = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
    else:
        got = F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scale)
    out.copy_(got[0, :, :, : out.shape[2]].transpose(0, 1))


def experts(
    out: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    shared_up: Weight,
    shared_down: Weight,
    limit: float,
    shared_limit: float,
    rows: Tensor | None,
) -> None:
    """As ops.moe.grouped_reference, with torch's grouped product over the pairs sorted by expert.

    up: [E, 2 I, H], gate and up rows in turn; down: [E, H, I]. No count of an expert's rows reaches the host.
    """
    count, k = ids.shape
    # 16 bits: a radix sort goes over every byte of its keys. Not bincount: it waits for the largest id on the host.
    ranked, order = ids.flatten().to(torch.int16).sort(stable=True)
    each = torch.arange(up.shape[0], dtype=torch.int16, device=ids.device)
    ends = torch.searchsorted(ranked, each, right=True, out_int32=True)
    ours = kernels()
    spread, place = x.new_empty(count * k, x.shape[1]), torch.empty_like(order)
    ours.spread(spread, place, x, order, k)
    both = torch._grouped_mm(spread, up.transpose(1, 2), offs=ends)
    act = both.new_empty(count * k, down.shape[2])
    ours.swiglu(act, both, limit)
    pairs = torch._grouped_mm(act, down.transpose(1, 2), offs=ends)
    wide = x @ shared_up.data
    inner = both.new_empty(count, shared_down.inputs)
    swiglu(inner, *halves(wide, shared_up, inner.shape[1]), shared_limit)
    shared = (inner @ shared_down.data)[:, : x.shape[1]].contiguous()
    ours.combine(out, shared, pairs, place.view(count, k), weights)
