"""sweep.cu on a CPU: compiled by the machine's C++ compiler, its threads as fibers in a random order, its copies
landing late (see grid/chip.h). Kernels against references, bits that depend on the row alone, and no dead end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from emulated_sweep import execute
from kernel_cases import error, recurrence
from soliton.ops import fuse as fuse_module
from soliton.ops import instructions, moe, norm, router, sweep
from soliton.ops.fuse import fuse
from soliton.ops.tape import Entry
from soliton.ops.weight import Weight

BF16 = torch.bfloat16
GRIDS = (3, 5)


def launch(rows: int, live: int | None, *items: sweep.Instruction, grid: int = 5, seed: int = 0) -> None:
    made = sweep.Sweep(rows, None)
    for item in items:
        made.add(item)
    execute(made, None if live is None else torch.tensor([live]), grid, seed)


def rand(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = BF16) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def weight(outputs: int, inputs: int, seed: int = 1, paired: bool = False) -> Weight:
    full = rand(outputs, inputs, seed=seed, scale=inputs**-0.5)
    if paired:
        full = torch.stack([full[: outputs // 2], full[outputs // 2 :]], dim=1).reshape(outputs, inputs)
    return Weight(data=full.contiguous().t(), inputs=inputs, outputs=outputs, paired=paired)


def poisoned(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def rows_agree(make: Callable[[int, int], Tensor], rows: tuple[int, ...] = (1, 3, 9)) -> Tensor:
    """make(rows, grid): equal bits for every number of rows and every grid."""
    full = make(max(rows), GRIDS[0])
    assert not full.isnan().any()
    for count in rows:
        for grid in GRIDS:
            assert torch.equal(make(count, grid), full[:count]), f"{count} rows on {grid} blocks have other bits"
    return full


@pytest.mark.parametrize(("outputs", "inputs"), [(64, 32), (72, 96), (256, 128), (64, 320), (40, 992), (104, 2304)])
def test_product(outputs: int, inputs: int) -> None:
    x, w = rand(9, inputs), weight(outputs, inputs)

    def make(rows: int, grid: int) -> Tensor:
        out = poisoned(rows, outputs)
        launch(rows, None, instructions.product(out, x[:rows], w), grid=grid, seed=rows)
        return out

    assert error(rows_agree(make), x.double() @ w.data.double()) < 3e-3
    out = poisoned(9, outputs, dtype=torch.float32)
    launch(9, 4, instructions.product(out, x, w))
    assert error(out[:4], x[:4].double() @ w.data.double()) < 1e-5 and bool(out[4:].isnan().all())
    launch(9, 0, instructions.product(out, x, w))


@pytest.mark.parametrize(("outputs", "inputs"), [(40, 2592), (64, 5120), (56, 6400)])
def test_sums_over_several_terms(outputs: int, inputs: int) -> None:
    x, w, before = rand(9, inputs), weight(outputs, inputs), rand(9, outputs, seed=5)

    def make(rows: int, grid: int) -> Tensor:
        out = before[:rows].clone()
        items = [instructions.product(out, x[:rows], w, add=True)]
        again = poisoned(rows, outputs)
        launch(rows, None, *items, instructions.product(again, x[:rows], w), grid=grid, seed=rows)
        assert error(again, x[:rows].double() @ w.data.double()) < 3e-3
        return out

    delta = (x.double() @ w.data.double()).to(BF16).double()
    assert error(rows_agree(make), before.double() + delta) < 4e-3


EXPERTS = [(16, 4, 4, 2, 64, 32, 96), (8, 4, 1, 1, 64, 512, 512), (32, 8, 1, 1, 96, 64, 64), (24, 8, 1, 1, 64, 64, 32)]


@pytest.mark.parametrize("sizes", EXPERTS, ids=str)
@pytest.mark.parametrize("signed", [False, True])
def test_experts(sizes: tuple[int, ...], signed: bool) -> None:
    experts, k, groups, kept, hidden, width, inner = sizes
    x, router_w, bias = rand(9, hidden), weight(experts, hidden), rand(experts, seed=9, scale=0.2, dtype=torch.float32)
    up, down = (
        rand(experts, 2 * width, hidden, seed=6, scale=hidden**-0.5),
        rand(experts, hidden, width, seed=7, scale=0.2),
    )
    shared_up, shared_down = weight(2 * inner, hidden, seed=8, paired=True), weight(hidden, inner, seed=10)
    norms: dict[str, Any] = {"norm": (rand(hidden, seed=4).float(), 1e-6)}

    def run(rows: int, grid: int) -> tuple[Tensor, Tensor, Tensor]:
        residual, logits = x[:rows].clone(), poisoned(rows, experts, dtype=torch.float32)
        ids, weights = torch.full((rows, k), -7), poisoned(rows, k, dtype=torch.float32)
        act, act2 = poisoned(rows, k, width), poisoned(rows, inner)
        scores = instructions.product(logits, residual, router_w, **norms)
        choice = instructions.route(ids, weights, logits, bias, groups, kept, True, 2.5)
        if signed:
            instructions.tagged(scores, choice, torch.zeros(logits.shape, dtype=torch.int64))
        launch(
            rows,
            rows,
            scores,
            choice,
            instructions.product(act2, residual, shared_up, limit=0.25, **norms),
            instructions.up(act, residual, up, limit=0.25, **norms),
            instructions.down(residual, act, down, (act2, shared_down), add=True),
            grid=grid,
            seed=rows,
        )
        return residual, ids, weights

    full, ids, weights = run(9, 3)
    twice = x.clone()  # a choice that is taken again in the same launch
    act, act2 = poisoned(9, k, width), poisoned(9, inner)
    launch(
        9,
        None,
        instructions.product(act2, x, shared_up, limit=0.25, **norms),
        instructions.load_route(ids, weights),
        instructions.up(act, x, up, limit=0.25, **norms),
        instructions.load_route(ids, weights),
        instructions.down(twice, act, down, (act2, shared_down), add=True),
    )
    assert torch.equal(twice, full)
    wide = x.double()
    normed = (wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norms["norm"][0].double()).float()
    want_ids, want_weights = torch.zeros_like(ids), torch.zeros_like(weights)
    router.reference(want_ids, want_weights, normed @ router_w.data.float(), bias, groups, kept, True, 2.5)
    same = (ids == want_ids).all(1)
    assert same.float().mean() > 0.7 and error(weights[same], want_weights[same]) < 1e-2
    delta = torch.zeros(9, hidden)
    act = torch.empty(9, inner)
    both = normed @ shared_up.data.float()
    moe.swiglu_reference(act, both[:, 0::2], both[:, 1::2], 0.25)
    delta += act @ shared_down.data.float()
    for row in range(9):
        for slot in range(k):
            both = normed[row : row + 1] @ up[ids[row, slot]].float().t()
            one = torch.empty(1, width)
            moe.swiglu_reference(one, both[:, 0::2], both[:, 1::2], 0.25)
            delta[row] += weights[row, slot] * (one @ down[ids[row, slot]].float().t())[0]
    assert error(full, x.float() + delta) < 8e-3
    for rows in (1, 2, 9):
        for a, b in zip(run(rows, 5), (full, ids, weights), strict=True):
            assert torch.equal(a, b[:rows]), f"{rows} rows"


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("law", ["bounded", "softplus"])
def test_recurrence(low: bool, law: Any) -> None:
    heads, most, width = 2, 10, 256
    proj = rand(most, 5 * width + 64)
    past, conv = rand(3, 3 * width, seed=2), rand(4, 3 * width, seed=3, scale=0.5, dtype=torch.float32)
    a, dt = rand(width, seed=4, dtype=torch.float32).abs(), rand(width, seed=5, dtype=torch.float32)
    scale, state = rand(128, seed=8, dtype=torch.float32), rand(heads, 128, 128, seed=6, dtype=torch.float32)
    up_f, up_g = weight(width, 128, seed=11), weight(width, 128, seed=12)
    b = proj[:, 5 * width : 5 * width + heads]
    f_in, g_in = proj[:, 3 * width : 4 * width], proj[:, 4 * width : 5 * width]
    f, g = f_in, g_in
    if low:
        f_in, g_in = proj[:, 3 * width : 3 * width + 128], proj[:, 3 * width + 128 : 3 * width + 256]
        f, g = (f_in.float() @ up_f.data.float()).to(BF16), (g_in.float() @ up_g.data.float()).to(BF16)

    def run(rows: int, grid: int) -> tuple[Tensor, Tensor, Tensor]:
        states, windows = poisoned(rows + 1, heads, 128, 128, dtype=torch.float32), poisoned(3 + rows, 3 * width)
        states[0], windows[:3] = state, past
        o, stats = poisoned(rows, width), poisoned(rows, heads, 4, dtype=torch.float32)
        given = f_in[:rows], b[:rows], windows, conv, a, dt, states, torch.tensor([0])
        more = {"opened": (g_in[:rows], scale, stats), "low": (up_f, up_g) if low else None}
        launch(rows, rows, instructions.kda(o, proj[:rows], *given, law, -5.0, 1e-6, **more), grid=grid, seed=rows)
        assert torch.equal(windows[3:], proj[:rows, : 3 * width]) and torch.equal(states[0], state)
        return o, states, stats

    got, states, stats = run(most, 3)
    for rows in (1, 8, 9):
        for one, full in zip(run(rows, 5), (got, states, stats), strict=True):
            assert torch.equal(one, full[: len(one)])
    o, chain = recurrence(proj, f, b, past, conv, a, dt, state, law)
    loose = 1e-2 if low else 1e-3
    assert error(states[1:], chain[1:]) < loose
    assert error(stats.sum(-1), o.square().sum(-1)) < loose * 2
    opened = o.flatten(1).double() * g.double().sigmoid() * scale.double().repeat(heads)
    assert error(got, opened) < 1e-2


def test_the_last_norm_goes_into_the_head() -> None:
    """A tape that ends with norm, copy and head becomes one sweep, and a norm of what is kept behind it."""
    x, head, scale = rand(3, 64), weight(96, 64), rand(64, seed=4).float()
    hidden, kept, logits = poisoned(3, 64), poisoned(3, 64), poisoned(3, 96, dtype=torch.float32)

    def entry(op: str, *args: Any) -> Entry:
        return Entry(op, "", norm.reference, args, partial(norm.reference, *args))

    tape = [entry("norm", hidden, x, scale, 1e-6), entry("copy", kept, hidden), entry("linear", logits, hidden, head)]
    made = fuse(tape, None, entry=lambda op, call: Entry(op, "", call, (), call))
    assert [item.op for item in made] == ["sweep", "norm"] and bool(hidden.isnan().all())
    execute(made[0].function)
    made[1].ready()
    wide = x.double()
    want = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * scale.double()
    assert error(kept, want) < 4e-3 and error(logits, want @ head.data.double()) < 5e-3


@pytest.mark.parametrize("left_out", ["", "signs", "route", "ahead"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_layer_from_its_tape(rows: int, left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts as a step records them: the same bits whichever technique is left out, and those of the single calls."""
    experts, hidden, width, k = 24, 64, 32, 8
    router_w, up, down = (
        weight(experts, hidden),
        rand(experts, 2 * width, hidden, scale=0.1),
        rand(experts, hidden, width),
    )
    shared_up, shared_down = weight(2 * width, hidden, seed=8, paired=True), weight(hidden, width, seed=10)
    bias, scale = rand(experts, seed=9, dtype=torch.float32), rand(hidden, seed=4).float()

    def step(left: set[str]) -> tuple[Tensor, list[str]]:
        monkeypatch.setattr(fuse_module, "LEFT_OUT", left)
        x, normed, out = rand(rows, hidden, seed=3), poisoned(rows, hidden), poisoned(rows, hidden)
        logits, weights = poisoned(rows, experts, dtype=torch.float32), poisoned(rows, k, dtype=torch.float32)
        ids, act, act_shared = torch.zeros(rows, k, dtype=torch.int64), poisoned(rows, k, width), poisoned(rows, width)
        parts = (up, down, shared_up, shared_down, 0.0, 0.0, None, act, act_shared)
        calls: list[tuple[str, tuple[Any, ...]]] = [
            ("norm", (normed, x, scale, 1e-6)),
            ("linear", (logits, normed, router_w)),
            ("router", (ids, weights, logits, bias, 1, 1, True, 2.5)),
            ("moe", (out, normed, ids, weights, *parts)),
            ("add", (x, out)),
        ]
        tape = [Entry(op, "", norm.reference, args, partial(norm.reference, *args)) for op, args in calls]
        made = fuse(tape, None, entry=lambda op, call: Entry(op, "", call, (), call))
        for item in made:
            execute(item.function)
        return x, [str(item.function) for item in made]

    want, _ = step(set())
    got, words = step({left_out})
    assert torch.equal(got, want) and not got.isnan().any()
    assert len(words) == (3 if left_out == "route" else 1)
    assert ("|route" in " ".join(words)) == (left_out == "signs")
    if left_out == "":
        for seed in range(6):  # other orders of who comes first
            monkeypatch.setattr(sys.modules[__name__], "execute", partial(execute, seed=seed, grid=3 + seed))
            assert torch.equal(step(set())[0], want)


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_recurrence_from_its_tape(rows: int, low: bool) -> None:
    """Forget rows, gates, recurrence, gated norm and output projection become two instructions."""
    heads, width, hidden = 2, 256, 64
    source, into = rand(rows, 96, seed=21), weight(5 * width + 64, 96, seed=22)
    proj, out_w, x = poisoned(rows, into.padded), weight(hidden, width, seed=13), rand(rows, hidden, seed=14)
    f, g = proj[:, 3 * width : 4 * width], proj[:, 4 * width : 5 * width]
    b, up_f, up_g = proj[:, 5 * width : 5 * width + heads], weight(width, 128, seed=11), weight(width, 128, seed=12)
    calls: list[tuple[str, tuple[Any, ...]]] = [("linear", (proj, source, into))]
    if low:
        f_in, g_in = proj[:, 3 * width : 3 * width + 128], proj[:, 3 * width + 128 : 3 * width + 256]
        f, g = poisoned(rows, width), poisoned(rows, width)
        calls += [("linear", (f, f_in, up_f)), ("linear", (g, g_in, up_g))]
    conv, states = (
        rand(4, 3 * width, seed=3, dtype=torch.float32),
        poisoned(rows + 1, heads, 128, 128, dtype=torch.float32),
    )
    window, o, y, out = (
        poisoned(3 + rows, 3 * width),
        poisoned(rows, heads, 128),
        poisoned(rows, width),
        poisoned(rows, hidden),
    )
    states[0], window[:3] = rand(heads, 128, 128, seed=6, dtype=torch.float32), rand(3, 3 * width, seed=2)
    a, dt = rand(width, seed=4, dtype=torch.float32).abs(), rand(width, seed=5, dtype=torch.float32)
    scale = rand(128, seed=8, dtype=torch.float32)
    law = ("softplus", -5.0, 1e-6)
    memory = (window, conv, a, dt, states, torch.tensor([0]), torch.tensor([rows]))
    calls += [
        ("kda.step", (o, proj, f, b, *memory, *law)),
        ("kda.norm", (y.view(rows, heads, 128), o, g.unflatten(1, (heads, 128)), scale, 1e-6)),
        ("linear", (out, y, out_w)),
        ("add", (x, out)),
        ("verdict", (1, 2)),
    ]
    tape = [Entry(op, "", norm.reference, args, partial(norm.reference, *args)) for op, args in calls]
    made = fuse(tape, None, entry=lambda op, call: Entry(op, "", call, (), call))
    assert [item.op for item in made] == ["sweep", "verdict"]
    assert str(made[0].function) == f"product[{into.padded}] |kda[{heads}] |product[{hidden}]"
    before, kept, past = x.clone(), states.clone(), window.clone()
    execute(made[0].function)
    want, stats = poisoned(rows, width), poisoned(rows, heads, 4, dtype=torch.float32)
    again = (past, conv, a, dt, kept, torch.tensor([0]))
    given = (f_in, g_in, (up_f, up_g)) if low else (f, g, None)
    launch(
        rows,
        None,
        instructions.kda(want, proj, given[0], b, *again, *law, opened=(given[1], scale, stats), low=given[2]),
    )
    assert torch.equal(y, want)
    factor = (stats.double().sum(-1, keepdim=True) / 128 + 1e-6).rsqrt()
    normed = (want.double().unflatten(1, (heads, 128)) * factor).flatten(1)
    assert error(x, before.double() + normed @ out_w.data.double()) < 6e-3


def test_a_norm_with_other_readers_stays() -> None:
    """A tape that goes on after its norm, with arguments of any kind, keeps the norm where something else reads it."""
    x, head, scale = rand(3, 64), weight(96, 64), rand(64, seed=4).float()
    hidden, logits = poisoned(3, 64), poisoned(3, 96, dtype=torch.float32)
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("norm", (hidden, x, scale, 1e-6)),
        ("linear", (logits, hidden, head)),
        ("verdict", (3, hidden)),
    ]
    tape = [Entry(op, "", norm.reference, args, partial(norm.reference, *args)) for op, args in calls]
    made = fuse(tape, None, entry=lambda op, call: Entry(op, "", call, (), call))
    assert [item.op for item in made] == ["norm", "sweep", "verdict"]
