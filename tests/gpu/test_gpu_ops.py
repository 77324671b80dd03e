"""Kernels against their references on a GPU: poisoned outputs, every number of rows, bits that do not depend on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_cases import error, recurrence
from soliton.ops import instructions, mla, moe, norm, router, sweep
from soliton.ops.weight import Weight, pack

CUDA = torch.device("cuda")
BF16 = torch.bfloat16
ROWS = (1, 2, 6, 8, 9, 16, 17, 32)


def rand(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = BF16) -> Tensor:
    maker = torch.Generator(device="cuda").manual_seed(seed)
    return (torch.randn(*shape, generator=maker, device="cuda") * scale).to(dtype)


def weight(outputs: int, inputs: int, seed: int = 1, paired: bool = False) -> Weight:
    full = rand(outputs, inputs, seed=seed, scale=inputs**-0.5)
    parts = [full[: outputs // 2], full[outputs // 2 :]] if paired else [full]
    return pack(parts, device=CUDA, dtype=BF16, paired=paired)


def whole(number: int) -> Tensor:
    return torch.tensor([number], dtype=torch.int64, device="cuda")


def poisoned(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device="cuda")


def launch(rows: int, live: Tensor | None, *items: sweep.Instruction) -> None:
    made = sweep.Sweep(rows, live)
    for item in items:
        made.add(item)
    made()


def rows_agree(make: Callable[[int], Tensor], most: int = 32, tolerance: float = 0.0) -> Tensor:
    """make(R) for several R: each equals the first rows of make(most), bit for bit."""
    full = make(most)
    assert not full.isnan().any()
    for rows in ROWS:
        got = make(rows)
        assert torch.equal(got[:rows], full[:rows]), f"{rows} rows have other bits"
    return full


SHAPES = [
    (1288, 256),
    (256, 512),
    (2560, 4096),
    (513 * 8, 2560),
    (2304, 9216),
    (16, 32),
    (64, 128),
    (12576, 2304),
    (4096, 96),
]


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_product(outputs: int, inputs: int) -> None:
    x, w = rand(32, inputs), weight(outputs, inputs)

    def make(rows: int) -> Tensor:
        out = poisoned(rows, w.padded)
        launch(rows, None, instructions.product(out, x[:rows], w))
        return out

    full = rows_agree(make)
    assert error(full, x.double() @ w.data.double()) < 3e-3
    out = poisoned(9, w.padded, dtype=torch.float32)
    launch(9, whole(4), instructions.product(out, x[:9], w))
    assert error(out[:4], x[:4].double() @ w.data.double()) < 1e-5 and bool(out[4:].isnan().all())


def test_a_view_as_input_and_output() -> None:
    wide, w = rand(6, 1024), weight(256, 128)
    out = poisoned(6, 512)
    launch(6, None, instructions.product(out[:, 256:], wide[:, 512:640], w))
    assert error(out[:, 256:], wide[:, 512:640].double() @ w.data.double()) < 3e-3 and bool(out[:, :256].isnan().all())


@pytest.mark.parametrize("inputs", [256, 1536, 2304, 2560])
def test_norm_before(inputs: int) -> None:
    x, w = rand(32, inputs, scale=3.0), weight(512, inputs)
    scale = rand(inputs, seed=4, dtype=torch.float32).to(BF16).float()
    wide = x.double()
    normed = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * scale.double()

    def make(rows: int) -> Tensor:
        out = poisoned(rows, 512, dtype=torch.float32)
        launch(rows, None, instructions.product(out, x[:rows], w, norm=(scale, 1e-6)))
        return out

    assert error(rows_agree(make), normed @ w.data.double()) < 3e-3


@pytest.mark.parametrize("heads", [2, 4, 16, 32])
def test_scaled_heads_before_and_residual_after(heads: int) -> None:
    size = heads * 128
    y, w, before = rand(32, heads, 128), weight(512, size), rand(32, 512, seed=5)
    stats = rand(32, heads, 4, seed=6, dtype=torch.float32).abs() * 30
    normed = (y.double() * (stats.double().sum(-1, keepdim=True) / 128 + 1e-5).rsqrt()).flatten(1)

    def make(rows: int) -> Tensor:
        out = before[:rows].clone()
        launch(
            rows,
            None,
            instructions.product(out, y[:rows].flatten(1), w, scaled=(stats[:rows].contiguous(), 1e-5), add=True),
        )
        return out

    assert error(rows_agree(make), before.double() + normed @ w.data.double()) < 5e-3


@pytest.mark.parametrize(("outputs", "inputs"), [(2304, 9216), (1536, 4608), (2560, 4096), (1056, 5120), (256, 6144)])
def test_sums_over_several_terms(outputs: int, inputs: int) -> None:
    """Blocks hand sums on to one another; twice in one launch, and again and again."""
    x, w = rand(32, inputs), weight(outputs, inputs)

    def make(rows: int) -> Tensor:
        out, again = poisoned(rows, w.padded), poisoned(rows, w.padded)
        launch(rows, None, instructions.product(out, x[:rows], w), instructions.product(again, x[:rows], w))
        assert torch.equal(out, again)
        return out

    for _ in range(5):
        assert error(rows_agree(make), x.double() @ w.data.double()) < 3e-3


def test_what_is_foreseen_changes_nothing() -> None:
    x, first, second = rand(6, 2304), weight(12576, 2304), weight(2304, 4096, seed=3)
    y = rand(6, 4096, seed=4)

    def run(ahead: bool) -> tuple[Tensor, Tensor]:
        outs = poisoned(6, first.padded), poisoned(6, second.padded)
        one, two = sweep.Sweep(6, None), sweep.Sweep(6, None)
        one.add(instructions.product(outs[0], x, first))
        two.add(instructions.product(outs[1], y, second))
        one.ahead = two if ahead else None
        one(), two()
        return outs

    for a, b in zip(run(True), run(False), strict=True):
        assert torch.equal(a, b) and not a.isnan().any()


@pytest.mark.parametrize("limit", [0.0, 0.5])
def test_swiglu_after_equals_the_unfused_form(limit: float) -> None:
    x, w = rand(32, 512), weight(256, 512, paired=True)

    def make(rows: int) -> Tensor:
        out = poisoned(rows, 128)
        launch(rows, None, instructions.product(out, x[:rows], w, limit=limit))
        return out

    full = rows_agree(make)
    both = poisoned(32, 256, dtype=torch.float32)
    launch(32, None, instructions.product(both, x, w))
    want = poisoned(32, 128)
    moe.swiglu_reference(want, both[:, 0::2], both[:, 1::2], limit)
    assert torch.equal(full, want)


def test_swiglu_bits_over_all_gates() -> None:
    """Every finite bf16 gate with several ups: the product is an identity, so gate and up arrive as they are."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(BF16).cuda()
    gates = every[every.isfinite()]
    gates = torch.cat([gates, gates.new_zeros(-len(gates) % 64)])
    for rise in (1.0, -0.3330078125, 3.0e38, 1e-30, 0.0):
        for at in range(0, len(gates), 64 * 256):
            g = gates[at : at + 64 * 256].view(-1, 64)
            for part in g.split(32):
                x = torch.zeros(len(part), 128, dtype=BF16, device="cuda")
                x[:, 0::2], x[:, 1::2] = part, rise
                eye = Weight(data=torch.eye(128, dtype=BF16, device="cuda").t(), inputs=128, outputs=128, paired=True)
                out, want = poisoned(len(part), 64), poisoned(len(part), 64)
                launch(len(part), None, instructions.product(out, x, eye, limit=0.0))
                moe.swiglu_reference(want, part, torch.full_like(part, rise), 0.0)
                assert torch.equal(out.view(torch.int16), want.view(torch.int16)) or torch.equal(
                    out.isnan(), want.isnan()
                )


def stacked_experts(
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
    """As ops.moe.grouped_reference, with torch's products, for stacks as sweeps read them: up [E, 2 I, H], gate and up
    rows in turn; down [E, H, I]. The activations are rounded before the down product, sums over slots are float32."""
    count, k = ids.shape
    order = ids.flatten().sort(stable=True).indices
    starts = torch.bincount(ids.flatten(), minlength=up.shape[0]).tolist()
    by_slot = torch.empty(count * k, x.shape[1], dtype=x.dtype, device=x.device)
    at = 0
    for expert, size in enumerate(starts):
        which = order[at : at + size]
        at += size
        if size:
            both = x[which // k] @ up[expert].t()
            act = both.new_empty(size, down.shape[2])
            moe.swiglu_reference(act, both[:, 0::2], both[:, 1::2], limit)
            by_slot[which] = act @ down[expert].t()
    both = x @ shared_up.data
    act = both.new_empty(count, shared_down.inputs)
    moe.swiglu_reference(act, *moe.halves(both, shared_up, shared_down.inputs), shared_limit)
    total = (act @ shared_down.data).float()[:, : x.shape[1]]
    total += (by_slot.view(count, k, -1).float() * weights.unsqueeze(-1)).sum(1)
    out.copy_(total)


EXPERTS = [  # experts, k, groups, kept, hidden, width, shared
    (16, 4, 4, 2, 256, 32, 128),
    (32, 8, 8, 4, 256, 64, 64),
    (128, 8, 8, 4, 1536, 512, 512),
    (256, 8, 1, 1, 2304, 1024, 1024),
    (64, 8, 8, 4, 2560, 768, 768),
]


@pytest.mark.parametrize("sizes", EXPERTS, ids=str)
@pytest.mark.parametrize("limit", [0.0, 0.25])
def test_experts(sizes: tuple[int, ...], limit: float) -> None:
    experts, k, groups, kept, hidden, width, inner = sizes
    x, router_w, bias = rand(32, hidden), weight(experts, hidden), rand(experts, seed=9, scale=0.2, dtype=torch.float32)
    up, down = (
        rand(experts, 2 * width, hidden, seed=6, scale=hidden**-0.5),
        rand(experts, hidden, width, seed=7, scale=width**-0.5),
    )
    shared_up, shared_down = weight(2 * inner, hidden, seed=8, paired=True), weight(hidden, inner, seed=10)
    scale = rand(hidden, seed=4, dtype=torch.float32).to(BF16).float()
    norms: dict[str, Any] = {"norm": (scale, 1e-6)}

    def run(rows: int, merged: bool, signed: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        residual = x[:rows].clone()
        logits = poisoned(rows, router_w.padded, dtype=torch.float32)
        ids = torch.full((rows, k), -7, dtype=torch.int64, device="cuda")
        weights, act, act2 = poisoned(rows, k, dtype=torch.float32), poisoned(rows, k, width), poisoned(rows, inner)
        items = [
            [instructions.product(logits, residual, router_w, **norms)],
            [instructions.product(act2, residual, shared_up, limit=limit, **norms)],
            [instructions.route(ids, weights, logits, bias, groups, kept, True, 2.5)],
            [instructions.up(act, residual, up, limit=limit, **norms)],
            [instructions.down(residual, act, down, (act2, shared_down), add=True)],
        ]
        if signed:
            items[1], items[2] = items[2], items[1]
            words = torch.zeros(logits.shape, dtype=torch.int64, device="cuda")
            instructions.tagged(items[0][0], items[1][0], words)
        if merged:
            launch(rows, whole(rows), *(i for part in items for i in part))
        else:
            for i, part in enumerate(items):
                launch(rows, None, *([instructions.load_route(ids, weights)] if i > 2 else []), *part)
        return residual, ids, weights

    full, ids, weights = run(32, True)
    normed, logits = poisoned(32, hidden), poisoned(32, router_w.padded, dtype=torch.float32)
    norm.reference(normed, x, scale, 1e-6)
    launch(32, None, instructions.product(logits, x, router_w, **norms))
    want_ids, want_weights = torch.zeros_like(ids), torch.zeros_like(weights)
    router.reference(want_ids, want_weights, logits.clone(), bias, groups, kept, True, 2.5)
    same = (ids == want_ids).all(1)
    assert same.float().mean() > 0.9, "near ties may fall either way, most rows must agree"
    assert error(weights[same], want_weights[same]) < 1e-4
    delta = torch.zeros_like(x)
    stacked_experts(delta, normed, ids, weights, up, down, shared_up, shared_down, limit, limit, None)
    assert error(full, x.float() + delta.float()) < 5e-3
    for rows in ROWS:
        for merged, signed in ((True, False), (False, False), (True, True), (True, True)):
            got = run(rows, merged, signed)
            for a, b in zip(got, (full, ids, weights), strict=True):
                assert torch.equal(a, b[:rows]), f"{rows} rows, merged {merged}, signed {signed}"


@pytest.mark.parametrize("groups", [1, 8])
def test_ties_go_to_the_lower_index(groups: int) -> None:
    logits = torch.zeros(3, 128, device="cuda")
    logits[1, 100:] = 1.0
    logits[2, ::3] = 2.0
    bias = torch.zeros(128, device="cuda")
    ids, weights = torch.zeros(3, 8, dtype=torch.int64, device="cuda"), poisoned(3, 8, dtype=torch.float32)
    launch(3, None, instructions.route(ids, weights, logits, bias, groups, min(groups, 4), True, 1.0))
    want, want_weights = torch.zeros_like(ids), torch.zeros_like(weights)
    router.reference(want, want_weights, logits.clone(), bias, groups, min(groups, 4), True, 1.0)
    assert torch.equal(ids, want) and error(weights, want_weights) < 1e-6


@pytest.mark.parametrize("variant", ["triton", "sweep"])
@pytest.mark.parametrize("law", ["bounded", "softplus"])
@pytest.mark.parametrize("heads", [2, 32])
def test_kda_step(heads: int, law: Any, variant: str) -> None:
    from soliton.ops import kda_triton

    width, most = heads * 128, 17
    proj = rand(most, 5 * width + 64)
    past, conv = rand(3, 3 * width, seed=2), rand(4, 3 * width, seed=3, scale=0.5, dtype=torch.float32)
    a, dt = rand(width, seed=4, dtype=torch.float32).abs(), rand(width, seed=5, dtype=torch.float32)
    state = rand(heads, 128, 128, seed=6, dtype=torch.float32)
    f, b = proj[:, 3 * width : 4 * width], proj[:, 5 * width : 5 * width + heads]

    def run(rows: int, at: int) -> tuple[Tensor, Tensor, Tensor]:
        states = poisoned(rows + 1, 3, heads, 128, 128, dtype=torch.float32)
        states[at, 1] = state
        windows = poisoned(3 + rows, 3, 3 * width)
        windows[:3, 1] = past
        o = poisoned(rows, heads, 128)
        given = (o, proj[:rows], f[:rows], b[:rows], windows[:, 1], conv, a, dt, states[:, 1], whole(at))
        if variant == "triton":
            kda_triton.step(*given, whole(rows), law, -5.0, 1e-6)
        else:
            launch(rows, whole(rows), instructions.kda(*given, law, -5.0, 1e-6))
        order = [(at + 1 + r) % (rows + 1) for r in range(rows)]
        assert torch.equal(states[at, 1], state) and bool(states[:, 0].isnan().all() and states[:, 2].isnan().all())
        assert torch.equal(windows[3:, 1], proj[:rows, : 3 * width])
        return o, states[order, 1], windows

    full, post, _ = run(most, 0)
    for rows in (1, 2, 6, 9):
        for at in (0, rows):
            got, states, _ = run(rows, at)
            assert torch.equal(got, full[:rows]) and torch.equal(states, post[:rows])
    o, chain = recurrence(proj, f, b, past, conv, a, dt, state, law)
    assert error(post, chain[1:]) < 1e-4 and error(full, o) < 4e-3


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("heads", [16, 32, 48])
def test_kda_opened(heads: int, low: bool) -> None:
    """The recurrence with its output gate, alone and behind two low-rank products: the bits of the plain one, gated."""
    width, most = heads * 128, 17
    proj = rand(most, 5 * width + 64)
    past, conv = rand(3, 3 * width, seed=2), rand(4, 3 * width, seed=3, scale=0.5, dtype=torch.float32)
    a, dt = rand(width, seed=4, dtype=torch.float32).abs(), rand(width, seed=5, dtype=torch.float32)
    scale = rand(128, seed=8, dtype=torch.float32)
    up_f, up_g = weight(width, 128, seed=11), weight(width, 128, seed=12)
    f, b = proj[:, 3 * width : 4 * width], proj[:, 5 * width : 5 * width + heads]
    g = proj[:, 4 * width : 5 * width]
    if low:
        f_low, g_low = proj[:, 3 * width : 3 * width + 128], proj[:, 3 * width + 128 : 3 * width + 256]
        f, g = poisoned(most, width), poisoned(most, width)
        launch(most, None, instructions.product(f, f_low, up_f), instructions.product(g, g_low, up_g))

    def run(rows: int, opened: bool) -> tuple[Tensor, Tensor, Tensor]:
        states = poisoned(rows + 1, 1, heads, 128, 128, dtype=torch.float32)
        states[0, 0] = rand(heads, 128, 128, seed=6, dtype=torch.float32)
        windows = poisoned(3 + rows, 1, 3 * width)
        windows[:3, 0] = past
        o, stats = poisoned(rows, width), poisoned(rows, heads, 4, dtype=torch.float32)
        inner = low and opened
        given = (f_low if inner else f)[:rows], b[:rows], windows[:, 0], conv, a, dt, states[:, 0], whole(0)
        more: dict[str, Any] = {}
        if opened:
            more = {"opened": ((g_low if inner else g)[:rows], scale, stats), "low": (up_f, up_g) if low else None}
        launch(rows, whole(rows), instructions.kda(o, proj[:rows], *given, "softplus", -5.0, 1e-6, **more))
        return o, states, stats

    plain, want, _ = run(most, False)
    got, states, stats = run(most, True)
    assert error(states, want) < 1e-3 if low else torch.equal(states, want)
    squares = plain.double().unflatten(1, (heads, 4, 32)).square().sum(-1)
    assert error(stats, squares) < (1e-2 if low else 1e-5)
    gated = plain.double() * g.double().sigmoid() * scale.double().repeat(heads)
    assert error(got, gated) < (1e-2 if low else 4e-3)
    for rows in (1, 2, 6, 9, 16):
        for x, y in zip(run(rows, True), (got, states[: rows + 1], stats), strict=True):
            assert torch.equal(x, y[: len(x)])


def test_kda_commit() -> None:
    from soliton.ops import kda_triton

    for taken in range(4):
        windows = rand(3 + 6, 2, 1500)
        want = windows[taken : taken + 3].clone()
        states, current = torch.zeros(7, 1, device="cuda"), whole(5)
        kda_triton.commit(states, windows, whole(taken), current)
        assert torch.equal(windows[:3], want) and int(current) == (5 + taken) % 7


def attended(heads: int, length: int, capacity: int, most: int, several: tuple[int, ...]) -> None:
    """Few rows have other programs than many: the bits must be the same."""
    from soliton.ops import mla_triton

    cache = poisoned(capacity, 576)
    cache[: length + most] = rand(length + most, 576)
    query = rand(most, heads, 576, seed=2)
    positions = torch.arange(length, length + most, device="cuda")

    def make(rows: int, live: int) -> Tensor:
        out, given = poisoned(rows, heads, 512), query[:rows].clone()
        table = cache.clone()
        table[length + live :] = float("nan")
        given[live:] = float("nan")
        scratch = mla_triton.scratch(rows, heads, 512, table)
        for t in scratch:
            t.fill_(float("nan"))
        mla_triton.attend(out, given, table, positions[:rows], whole(live), 0.07, *scratch)
        return out

    want = poisoned(most, heads, 512)
    mla.attend_reference(want, query, cache.clone(), positions, whole(most), 0.07)

    def close(got: Tensor, rows: int, live: int) -> None:
        form = "grouped" if mla_triton.parts_of(rows * heads, capacity)[0] > 1 else "fine"
        off = (got[:live].double() - want[:live].double()).norm(dim=-1) / want[:live].double().norm(dim=-1)
        worst = float(off.max())
        assert worst < 2e-2, f"{form} form, {live} of {rows} rows: a head is off by {worst:.1e}"  # nan is not less
        assert error(got[:live], want[:live]) < 8e-3, f"{form} form, {live} of {rows} rows"

    # every form is right before any two are compared: the first failure names the wrong one
    cases = [(most, most), *((rows, live) for rows in several for live in sorted({rows, max(1, rows - 3)}))]
    found = [make(*case) for case in cases]
    for got, case in zip(found, cases, strict=True):
        close(got, *case)
    full = found[0]
    for got, (rows, live) in zip(found[1:], cases[1:], strict=True):
        assert torch.equal(got[:live], full[:live]), f"{live} of {rows} rows have other bits"
        assert bool(got[live:].isnan().all())


@pytest.mark.parametrize("heads", [2, 16, 32])
@pytest.mark.parametrize("length", [0, 63, 64, 319, 700, 8100])
def test_attention(heads: int, length: int) -> None:
    attended(heads, length, 8192 + 128, 32, (1, 2, 3, 4, 6, 9, 16, 17))


@pytest.mark.parametrize(("length", "capacity"), [(12_000, 16_384), (30_000, 40_960), (60_000, 262_144)])
def test_attention_in_a_long_cache(length: int, capacity: int) -> None:
    attended(16, length, capacity, 6, (1, 2, 4))


@pytest.mark.parametrize(("inner", "outer"), [(128, 512), (512, 128)])
def test_heads(inner: int, outer: int) -> None:
    from soliton.ops import mla_triton

    wide, w, gate = rand(32, 16, inner + 64), rand(16, inner, outer, seed=2, scale=inner**-0.5), rand(32, 40, seed=3)
    x = wide[..., :inner]

    def make(rows: int) -> Tensor:
        out = poisoned(rows, 16, outer)
        mla_triton.heads(out, x[:rows], w, whole(rows), gate[:rows, 8:24])
        return out

    full = rows_agree(make)
    want = torch.einsum("rnk,nkm->rnm", x.double(), w.double()) * gate[:, 8:24].double().sigmoid().unsqueeze(-1)
    assert error(full, want) < 5e-3


@pytest.mark.parametrize("heads", [4, 16, 32])
def test_enter(heads: int) -> None:
    from soliton.ops import mla_triton
    from soliton.ops.rope import reference as rope

    most = 32
    kv, q, scale = rand(most, 600)[:, :576], rand(most, heads, 192, seed=2), rand(512, seed=3, dtype=torch.float32)
    turn, positions = rand(most, 32, 2, seed=4, dtype=torch.float32), torch.arange(most, device="cuda") + 5
    w = rand(heads, 128, 512, seed=6, scale=128**-0.5)

    def make(rows: int, live: int, turned: Tensor | None) -> tuple[Tensor, Tensor]:
        query, cache = poisoned(rows, heads, 576), poisoned(64, 576)
        given = None if turned is None else turned[:rows]
        mla_triton.enter(query, q[:rows], w, cache, kv[:rows], scale, given, positions[:rows], whole(live), 1e-6)
        assert bool(query[live:].isnan().all() and cache[:5].isnan().all() and cache[5 + live :].isnan().all())
        return query[:live], cache[5 : 5 + live]

    for turned in (turn, None):
        query, entries = make(most, most, turned)
        want, key, latent = poisoned(most, heads, 64), poisoned(most, 1, 64), poisoned(most, 512)
        rope(want, q[..., 128:], turned)
        rope(key, kv[:, 512:].unsqueeze(1), turned)
        norm.reference(latent, kv[:, :512], scale, 1e-6)
        product = torch.einsum("rnk,nkm->rnm", q[..., :128].double(), w.double())
        assert error(query[..., :512], product) < 3e-3 and error(query[..., 512:], want) < 3e-3
        assert error(entries[:, :512], latent) < 3e-3 and error(entries[:, 512:], key[:, 0]) < 3e-3
        for rows, live in ((1, 1), (2, 2), (9, 7), (17, 17)):
            for got, full in zip(make(rows, live, turned), (query, entries), strict=True):
                assert torch.equal(got, full[:live]), f"{live} of {rows} rows have other bits"


def test_norm_alone() -> None:
    from soliton.ops import norm_triton

    x, scale = rand(9, 2304), rand(2304, seed=2, dtype=torch.float32)
    out, want = poisoned(9, 4608), poisoned(9, 2304)
    norm_triton.norm(out[:, 2304:], x, scale, 1e-6)
    norm.reference(want, x, scale, 1e-6)
    assert error(out[:, 2304:], want) < 2e-3


def test_rows_of_a_table() -> None:
    from soliton.ops import norm_triton

    table, ids = rand(1000, 2304), torch.tensor([3, 999, 0, 3], device="cuda")
    out = poisoned(4, 2304)
    norm_triton.rows(out, ids, table)
    assert torch.equal(out, table[ids])


@pytest.mark.parametrize("sizes", [(2304, 256), (1024, 20480), (200, 24)], ids=str)
def test_product_with_float32_weights(sizes: tuple[int, int]) -> None:
    from soliton.ops import norm_triton

    inputs, outputs = sizes
    x, w = rand(17, inputs), rand(outputs, inputs, seed=1, dtype=torch.float32).t()
    out = poisoned(17, outputs, dtype=torch.float32)
    norm_triton.product(out, x, w)
    assert error(out, x.double() @ w.double()) < 1e-5
    for rows in (1, 6):
        few = poisoned(rows, outputs, dtype=torch.float32)
        norm_triton.product(few, x[:rows], w)
        assert torch.equal(few, out[:rows])
