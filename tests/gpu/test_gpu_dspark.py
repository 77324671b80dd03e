"""DSpark on a GPU: kernels against references, and plain's bytes whatever is drafted, scheduled or in flight."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import draft_cases as d
import helpers as h
import soliton.pebble
from gpu_engines import gpu, plain, prompts, same
from kernel_cases import error
from soliton import Engine, SamplingParams
from soliton.checkpoint.draft import open_draft
from soliton.errors import ConfigError
from soliton.ops import draft
from soliton.train.evaluate import replace_draft

NAN = float("nan")
SIZES = {"head_dim": 32, "intermediate_size": 64, "markov_rank": 32, "block_size": 8, "target_layer_ids": [0, 2, 4]}
SCHEDULES: dict[str, dict[str, Any]] = {
    "all": {},
    "fixed": {"draft_verify": "fixed", "draft_verify_tokens": 3},
    "threshold": {"draft_verify": "threshold", "draft_threshold": 0.4},
    "cost": {"draft_costs": d.costs([100.0, 110.0, 118.0, 160.0, 161.0, 230.0, 231.0, 300.0, 390.0])},
}


def random_draft(**changes: Any) -> str:
    return str(d.random_draft(Path(soliton.pebble.path()), **{**SIZES, **changes}))


def poisoned(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.full(shape, NAN, dtype=dtype, device="cuda")


@pytest.mark.parametrize(("heads", "groups", "width"), [(32, 32, 128), (8, 2, 128), (8, 8, 32)])
@pytest.mark.parametrize(("length", "rows"), [(0, 8), (63, 8), (64, 5), (1000, 16), (8190, 8)])
def test_attention(heads: int, groups: int, width: int, length: int, rows: int) -> None:
    from soliton.ops import draft_triton as kernels

    g = torch.Generator("cuda").manual_seed(length)
    cache = torch.randn(2, 8320, groups, width, generator=g, device="cuda").bfloat16()
    q = torch.randn(rows, heads, width, generator=g, device="cuda").bfloat16()
    cache[:, length + rows :] = NAN
    want, got = poisoned(rows, heads, width, dtype=torch.float32), poisoned(rows, heads, width)
    at = torch.tensor([length], device="cuda")
    draft.attend_reference(want, q, cache, at)
    scratch = kernels.scratch(q, cache)
    for t in scratch:
        t.fill_(NAN)
    kernels.attend(got, q, cache, at, *scratch)
    assert error(got, want) < 6e-3


def test_queries_and_keys() -> None:
    from soliton.ops import draft_triton as kernels

    g = torch.Generator("cuda").manual_seed(1)
    rows, heads, groups, width = 8, 32, 8, 128

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device="cuda")

    wide, turn, weight = rand(rows, heads * width + 64).bfloat16(), rand(rows, width // 2, 2), rand(width)
    want, got = poisoned(rows, heads, width, dtype=torch.float32), poisoned(rows, heads, width)
    draft.query_reference(want, wide[:, : heads * width], weight, turn, 1e-6)
    kernels.query(got, wide[:, : heads * width], weight, turn, 1e-6)
    assert error(got, want) < 4e-3
    kv, positions = rand(rows, 2 * groups * width).bfloat16(), torch.arange(11, 11 + rows, device="cuda")
    caches = [torch.full((2, 40, groups, width), 7.0, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    draft.store_reference(caches[0], kv, weight, turn, positions, 1e-6)
    kernels.store(caches[1], kv, weight, turn, positions, 1e-6)
    assert error(caches[1], caches[0]) < 4e-3 and bool((caches[1][:, :11] == 7).all())


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_every_schedule(schedule: str) -> None:
    for depth in (0, 2, 4):
        engine = gpu("pebble", speculation="dspark", draft=random_draft(), run_ahead=depth, **SCHEDULES[schedule])
        same("pebble", engine, 96, 4)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize(("vocab", "rank"), [(4096, 64), (157_184, 256), (300, 8)])
def test_a_chain_of_greedy_drafts(vocab: int, rank: int, kind: str) -> None:
    """Rows one after another against the reference of each, with the tokens that the kernels chose."""
    from soliton.model.dspark import DraftWeights, _markov_in
    from soliton.ops import markov_triton as kernels

    torch.manual_seed(vocab + rank)
    g, hidden = 8, 512
    count = -(-vocab // 8) * 8
    made: dict[str, Any] = dict.fromkeys(DraftWeights.__dataclass_fields__)
    made["markov_in"] = torch.randn(vocab, rank, device="cuda").bfloat16()
    rows, columns = (rank, hidden + rank) if kind == "gated" else (3 * rank, 2 * rank + hidden)
    if kind != "vanilla":
        made["mix"] = torch.randn(rows, columns, device="cuda") * columns**-0.5
        made["mix_bias"] = torch.randn(rows, device="cuda")
    weights, spec = DraftWeights(**made), SimpleNamespace(markov=kind)
    base, x = torch.randn(g, count + 24, device="cuda"), torch.randn(g, hidden, device="cuda").bfloat16()
    base[:, vocab:] = NAN
    w = torch.randn(count, rank, device="cuda").bfloat16()
    tokens = torch.tensor([5] + [-1] * g, device="cuda")
    parts = kernels.parts_of(base.shape[1])
    states, mixed, zero = poisoned(2, rank, dtype=torch.float32), poisoned(1, rank, dtype=torch.float32), tokens[:1] * 0
    found, outs, last = [], [], None
    for k in range(g):
        out, best = poisoned(1, count + 24, dtype=torch.float32), poisoned(parts, dtype=torch.float32)
        found.append((best, torch.full((parts,), -1, dtype=torch.int32, device="cuda")))
        if kind == "vanilla":
            kernels.chain(out, base, weights.markov_in, w.t(), tokens, k, k, vocab, found[k], last)
        else:
            given = (weights.markov_in, x, weights.mix, weights.mix_bias, tokens, k, k, last)
            kernels.mix(mixed[0], states[(k + 1) % 2], states[k % 2], *given)
            kernels.chain(out, base, mixed, w.t(), zero, 0, k, vocab, found[k], None)
        outs.append(out)
        last = found[k]
    kernels.chosen(tokens, last, g, vocab)
    e, state = torch.zeros(2, rank, device="cuda"), torch.zeros(1, rank, device="cuda")
    for k in range(g):
        _markov_in(e, state, weights, spec, x, tokens, k, k)
        want = base[k, :vocab] + (w[:vocab].float() @ e[0])
        assert error(outs[k][0, :vocab], want) < 1e-4
        assert int(tokens[k + 1]) == int(outs[k][0, :vocab].argmax())


@pytest.mark.parametrize(
    "changes",
    [{"markov_rank": 0}, {"markov_head_type": "gated"}, {"markov_head_type": "rnn"}, {"block_size": 16}],
    ids=str,
)
def test_every_head(changes: dict[str, Any]) -> None:
    given = {**changes, "confidence_head_with_markov": "markov_rank" not in changes}
    same("pebble", gpu("pebble", speculation="dspark", draft=random_draft(**given)), 64, 3)


def test_executors_and_seeds() -> None:
    params = SamplingParams(max_tokens=64, temperature=0.9, top_p=0.95, top_k=20, seed=11, ignore_eos=True)
    found = []
    for kind in ({"executor": "eager", "run_ahead": 0}, {"run_ahead": 0}, {"run_ahead": 2}, {"run_ahead": 4}):
        engine = gpu("pebble", speculation="dspark", draft=random_draft(), **SCHEDULES["cost"], **kind)
        found.append([engine.generate(prompt, params).token_ids for prompt in prompts("pebble", 3)])
        same("pebble", engine, 48, 3)
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize("reuse", ["fast", "exact"])
def test_the_past(reuse: str) -> None:
    engine = gpu("pebble", speculation="dspark", draft=random_draft(), prefix_reuse=reuse, **SCHEDULES["threshold"])
    for prompt, want in zip(prompts("pebble", 3), plain("pebble", 96, 3), strict=True):
        engine.generate(prompt, SamplingParams(max_tokens=20, temperature=1.3, seed=4, presence_penalty=0.5))
        stream = engine.stream([*prompt, 5], h.greedy(64))
        next(stream)
        stream.close()
        assert h.facts(engine.generate(prompt, h.greedy(96, logprobs=3))) == want


def test_weights_replaced_under_a_captured_graph() -> None:
    """What the trainer's evaluation does: the same buffers, so the graphs stay; then it drafts as if loaded so."""
    engine = gpu("pebble", speculation="dspark", draft=random_draft(), prefix_reuse="off")
    other = random_draft(seed=5)
    fresh = gpu("pebble", speculation="dspark", draft=other, prefix_reuse="off")
    replace_draft(engine._ready(), open_draft(other))
    for prompt in prompts("pebble", 2):
        engine.generate(prompt, h.greedy(20))
        fresh.generate(prompt, h.greedy(20))
        assert torch.equal(engine._ready().relay.tokens, fresh._ready().relay.tokens), "the last step's drafts"
    same("pebble", engine, 48, 2)
    replace_draft(engine._ready(), open_draft(random_draft()))


def test_the_published_shape() -> None:
    """A draft in Ling-3.0-flash-dspark's true sizes onto a flash of all its layers with fewer experts; none onto fewer
    layers than its taps need."""
    draft_name = "synthetic:ling-3.0-flash-dspark"
    engine = Engine.load(
        "synthetic:ling-3.0-flash?experts=64", device="cuda", max_context=512, draft=draft_name, memory_budget="100GiB"
    )
    with engine:
        answer = engine.generate(list(range(40)), h.greedy(24))
        assert len(answer.token_ids) == 24 and len(answer.stats.accept_lengths) > 2
    with pytest.raises(ConfigError, match="42"):
        Engine.load("synthetic:ling-3.0-flash?layers=24&experts=64", device="cuda", draft=draft_name)
