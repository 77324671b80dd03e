"""A whole step as a GPU runs it, on a CPU: its sweeps through the real sweep.cu (emulated), its small kernels through
Triton's interpreter, attention and the law as torch code."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import soliton.pebble
from draft_cases import random_draft
from emulated_sweep import execute
from soliton import Engine, SamplingParams
from soliton.checkpoint.draft import open_draft
from soliton.ops import device, embed, kda, linear, mla, moe, norm, rope, select, sweep
from soliton.train.evaluate import replace_draft

TRITON = ("kda_triton", "norm_triton", "verdict_triton", "draws_triton", "draft_triton", "markov_triton")


def enter(
    query: Tensor, q: Tensor, k_up: Tensor, cache: Tensor, kv: Tensor, weight: Tensor, turn: Tensor | None,
    positions: Tensor, rows: Tensor, eps: float,
) -> None:  # fmt: skip
    """mla_triton.enter as the calls that it stands for."""
    latent = weight.shape[0]
    linear.heads_reference(query[..., :latent], q[..., : k_up.shape[1]], k_up)
    rope.reference(query[..., latent:], q[..., k_up.shape[1] :], turn)
    c = torch.empty(q.shape[0], latent, dtype=query.dtype)
    norm.reference(c, kv[:, :latent], weight, eps)
    key = torch.empty(q.shape[0], 1, query.shape[2] - latent, dtype=query.dtype)
    rope.reference(key, kv[:, latent:].unsqueeze(1), turn)
    mla.store_reference(cache, c, key[:, 0], positions)


def attend(out: Tensor, query: Tensor, cache: Tensor, positions: Tensor, rows: Tensor, scale: float) -> None:
    if int(rows) > 0:
        mla.attend_reference(out, query, cache, positions, rows, scale)


def heads(out: Tensor, x: Tensor, w: Tensor, rows: Tensor, gate: Tensor | None = None) -> None:
    linear.heads_reference(out, x, w)
    if gate is not None:
        mla.gate_reference(out, out, gate)


def experts(
    out: Tensor, x: Tensor, ids: Tensor, weights: Tensor, up: Tensor, down: Tensor, shared_up: Any, shared_down: Any,
    limit: float, shared_limit: float, rows: Tensor | None,
) -> None:  # fmt: skip
    """A prompt's experts over stacks as sweeps read them."""

    def act(both: Tensor, most: float) -> Tensor:
        made = torch.empty(both.shape[0], both.shape[1] // 2)
        moe.swiglu_reference(made, both[:, 0::2], both[:, 1::2], most)
        return made

    wide = x.float()
    total = act((wide @ shared_up.data.float())[:, : shared_up.outputs], shared_limit) @ shared_down.data.float()
    for row in range(x.shape[0]):
        for slot, expert in enumerate(ids[row].tolist()):
            one = act(wide[row : row + 1] @ up[expert].float().t(), limit) @ down[expert].float().t()
            total[row, : x.shape[1]] += weights[row, slot] * one[0]
    out.copy_(total[:, : x.shape[1]])


@pytest.fixture
def case(shared_dir: Path) -> Path:
    """A small checkpoint with heads of 128."""
    return shared_dir / "conformance" / "ling-mini-128"


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = select._choose_cuda
    monkeypatch.setattr(select.bulk, "has_fla", lambda: False)
    functions = {
        "add": norm.add_reference, "kda.norm": norm.gated_reference, "moe": experts,
        "mla.enter": enter, "mla.attend": attend, "mla.heads": heads, "embed": embed.reference, "norm": norm.reference,
        "kda.prefill": kda.sweep_reference,
    }  # fmt: skip

    def choose() -> dict[str, select.Choice]:
        kept = usual()
        replaced = {op: select.Choice(op, "emulated", function, "") for op, function in functions.items()}
        replaced["linear"] = replace(kept["linear"], function=linear.reference)
        return kept | replaced

    monkeypatch.setattr(select, "_choose_cuda", choose)
    monkeypatch.setattr(device, "has_kernels", lambda device: True)
    monkeypatch.setattr(sweep.Sweep, "__call__", lambda self: execute(self, self.live, grid=9))
    for name in TRITON:
        module = importlib.import_module(f"soliton.ops.{name}")
        for word in ("gdc_wait", "gdc_launch_dependents"):
            monkeypatch.setattr(module, word, lambda: None)


PARAMS = (
    SamplingParams(max_tokens=8, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, presence_penalty=0.5, logprobs=2),
)


def engine(case: Path, **settings: Any) -> Engine:
    return Engine.load(str(case), device="cpu", threads=1, max_context=256, dtype="bfloat16", **settings)


def prompt() -> list[int]:
    return [(i * 37 + 11) % 240 for i in range(21)]


@cache
def answers(case: Path, which: int) -> list[int]:
    """Of the CPU's own step."""
    with engine(case, speculation="off") as plain:
        return plain.generate(prompt(), PARAMS[which]).token_ids


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("which", [0, 1])
def test_a_step(emulated: None, case: Path, steps: int, which: int) -> None:
    drafts = {"speculation": "nextn", "speculative_num_steps": steps} if steps else {"speculation": "off"}
    with engine(case, **drafts) as made:
        got = made.generate(prompt(), PARAMS[which])
    assert len(got.token_ids) == PARAMS[which].max_tokens
    KEPT.setdefault(which, got.token_ids)
    assert got.token_ids == KEPT[which], "drafts change nothing"
    if got.logprobs:
        assert all(-20 < one.logprob < 0 for one in got.logprobs)


def test_a_longer_answer_by_routed_experts(emulated: None) -> None:
    """Many launches over the same words, some of them for fewer rows."""
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, presence_penalty=0.5)
    found = []
    for drafts in ({"speculation": "off"}, {"speculation": "nextn", "speculative_num_steps": 3}):
        with Engine.load("pebble", device="cpu", threads=1, max_context=256, dtype="bfloat16", **drafts) as made:
            found.append(made.generate("def add(a, b):\n", params).token_ids)
    assert found[0] == found[1] and len(found[0]) == 24


COSTS = '{"draft_us": 300, "verify_us": [1, 2, 3, 4, 5, 6, 7, 900, 901], "model": "", "draft": "", "device": "", \
"commit": null, "versions": {}}'


@pytest.mark.parametrize("settings", [{}, {"draft_verify": "fixed", "draft_verify_tokens": 3}, {"draft_costs": COSTS}])
@pytest.mark.parametrize("which", [0, 1])
def test_a_block_drafter(emulated: None, case: Path, tmp_path: Path, settings: dict[str, Any], which: int) -> None:
    """Its kernels, and rows that the schedule takes away."""
    if "draft_costs" in settings:
        (tmp_path / "costs.json").write_text(COSTS)
        settings = {"draft_costs": str(tmp_path / "costs.json")}
    draft = str(case.parent / "dspark-ling-mini-128")
    with engine(case, speculation="dspark", draft=draft, **settings) as made:
        got = made.generate(prompt(), PARAMS[which])
        lengths = got.stats.accept_lengths
    with engine(case, speculation="off") as plain:
        want = KEPT.setdefault(which, plain.generate(prompt(), PARAMS[which]).token_ids)
    assert got.token_ids == want, "drafts change nothing"
    assert "draft_verify_tokens" not in settings or max(lengths) <= 4


@pytest.mark.parametrize("markov", ["vanilla", "rnn"])
def test_a_draft_put_in_another_s_place(emulated: None, markov: str) -> None:
    """Norm weights among them, of which sweeps keep copies."""
    path = Path(soliton.pebble.path())
    sizes = {"head_dim": 32, "intermediate_size": 64, "markov_rank": 32, "target_layer_ids": [0, 2, 4]}
    sizes |= {"markov_head_type": markov}
    old, new = (str(random_draft(path, seed=seed, **sizes)) for seed in (0, 5))
    drafts = []
    for first in (new, old):
        with engine(path, speculation="dspark", draft=first, prefix_reuse="off") as made:
            replace_draft(made._ready(), open_draft(new))
            made.generate(prompt(), replace(PARAMS[0], max_tokens=3))
            drafts.append(made._ready().relay.tokens.tolist())
    assert drafts[0] == drafts[1]


@pytest.mark.parametrize("steps", [0, 2])
def test_float32_routers_and_head(emulated: None, case: Path, steps: int) -> None:
    """Products of their own between the sweeps; the weights of this checkpoint are bfloat16, so the tokens stay."""
    drafts = {"speculation": "nextn", "speculative_num_steps": steps} if steps else {"speculation": "off"}
    with engine(case, **drafts, router_dtype="float32", lm_head_dtype="float32") as made:
        program = made._ready().program(PARAMS[0].resolve({}, vocab=made._ready().checkpoint.spec.vocab))
        assert sum(e.op == "linear" for phase in program.phases for e in phase.tape.entries) >= 3
        got = made.generate(prompt(), PARAMS[0])
    assert got.token_ids == KEPT.get(0, got.token_ids)


@pytest.mark.parametrize(("which", "steps"), [(0, (0, 3)), (1, (0,))])
def test_a_grammar(emulated: None, which: int, steps: tuple[int, ...]) -> None:
    """Masks of the host before the verdict, on raw logits and on processed ones."""
    pytest.importorskip("llguidance")
    path, found = Path(soliton.pebble.path()), []
    params = replace(PARAMS[which], regex="([a-m]+[0-9][ ,.])*", max_tokens=10)
    for count in steps:
        drafts = {"speculation": "nextn", "speculative_num_steps": count} if count else {"speculation": "off"}
        with engine(path, **drafts) as made:
            program = made._ready().program(params.resolve({}, vocab=4096, eos_ids=(1, 0)))
            (verdict,) = (phase.tape for phase in program.phases if phase.name == "verdict")
            assert [e.op for e in verdict.entries].count("grammar") == 1
            found.append(made.generate(prompt(), params))
    for one in found:
        assert one.token_ids == found[0].token_ids and len(one.token_ids) == 10
        assert re.fullmatch("([a-m]+[0-9][ ,.])*([a-m]+[0-9]?)?", one.text)


KEPT: dict[int, list[int]] = {}


def test_its_tokens_are_the_cpus(case: Path) -> None:
    """After the emulated steps, whose patches are gone. Near ties could part them; on this prompt there are none."""
    for which, tokens in KEPT.items():
        assert tokens == answers(case, which)
