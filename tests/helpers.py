"""Shared by the tests of whole engines: models small enough to load in a moment, engines, exact laws, statistics."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from soliton import Engine, Generation, SamplingParams
from soliton.checkpoint.config_json import spec_from_config
from soliton.checkpoint.names import tensor_table
from soliton.ops.tape import Entry

TESTS = Path(__file__).resolve().parent
DATA = TESTS / "data"
_TEMPORARY = tempfile.TemporaryDirectory(prefix="soliton-tests-")
NANO_EOS, NANO_PAD = 62, 63


def micro(name: str = "ling-micro") -> Path:
    """Directory of a small conformance checkpoint: ling-micro (with MTP) or kimi-micro (without)."""
    return DATA / name


# -- nano: two layers and a drafter whose quality can be chosen, made on the spot -------------------------------------


def nano_config() -> dict[str, Any]:
    """config.json of a model with one KDA layer, one MLA layer and an MTP layer, vocabulary 64."""
    config: dict[str, Any] = json.loads((micro() / "config.json").read_text(encoding="utf-8"))
    config.update(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, layer_group_size=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, v_head_dim=16, kv_lora_rank=32, num_experts=4, num_experts_per_tok=2,
        n_group=2, topk_group=1, moe_intermediate_size=32, moe_shared_expert_intermediate_size=32, vocab_size=64,
        eos_token_id=NANO_EOS, pad_token_id=NANO_PAD, expert_swiglu_limit_list=[0, 0],
        share_expert_swiglu_limit_list=[0, 2], max_position_embeddings=4096,
    )  # fmt: skip
    return config


# how the drafter relates to the target: the MTP's input takes `good` of the token's embedding and `noise` of anything
DRAFTERS = {"good": (1.0, 0.03), "fair": (1.0, 0.4), "bad": (0.0, 1.5)}


def nano(drafter: str = "good") -> Path:
    """A checkpoint whose next token depends mostly on the one before, and by a good part on everything before that.

    drafter: a key of DRAFTERS. The target is the same for all of them.
    """
    return _nano(drafter)


@functools.cache
def _nano(drafter: str) -> Path:
    config = nano_config()
    spec = spec_from_config(config, where="nano")
    of_target, of_draft = torch.Generator().manual_seed(11), torch.Generator().manual_seed(12)
    tensors: dict[str, Tensor] = {}
    for role, entry in tensor_table(spec).items():
        g = of_draft if role.startswith("mtp.") else of_target
        value = torch.randn(entry.shape, generator=g)
        if len(entry.shape) == 1:
            value = 1 + 0.1 * value if "norm" in role else 0.3 * value
        elif role not in ("embed", "head"):
            value *= 0.2 * entry.shape[-1] ** -0.5 if role.endswith((".o", ".down")) else entry.shape[-1] ** -0.5
        if role == "head":
            value *= 2.0 * entry.shape[-1] ** -0.5
            value[[NANO_EOS, NANO_PAD]] = 0.0
        if role == "mtp.eh":
            good, noise = DRAFTERS[drafter]
            value *= noise
            value[:, : spec.hidden] += good * torch.eye(spec.hidden)
        tensors[entry.names[0]] = value.contiguous()
    path = Path(_TEMPORARY.name) / f"nano-{drafter}"
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    _write_tokenizer(path)
    return path


def nano_alphabet() -> list[str]:
    """Tokens of nano's tokenizer by id, as byte-level BPE writes them: letters, pieces of words and of characters."""
    words = [
        "Ġ",
        "Ġa",
        "Ġthe",
        "ab",
        "abc",
        "bc",
        "th",
        "he",
        "in",
        "ing",
        "STOP",
        "ST",
        "OP",
        "Ċ",
        "Ã",
        "©",
        "â",
        "Ĥ",
        "¬",
    ]
    return [*"abcdefghijklmnopqrstuvwxyz", *words, *"0123456789.,:;!?<"]


def _write_tokenizer(path: Path) -> None:
    tokens = nano_alphabet()
    assert len(tokens) <= NANO_EOS
    tokens += [f"x{i}" for i in range(len(tokens), NANO_EOS)] + ["<|end|>", "<|pad|>"]
    added = [
        {"id": NANO_EOS + i, "content": tokens[NANO_EOS + i], "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for i in range(2)
    ]  # fmt: skip
    pre = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": {t: i for i, t in enumerate(tokens[:NANO_EOS])}, "merges": []}
    body = {"version": "1.0", "added_tokens": added, "pre_tokenizer": pre, "decoder": pre, "model": model}
    (path / "tokenizer.json").write_text(json.dumps(body), encoding="utf-8")
    template = (
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}), encoding="utf-8")


# -- engines ----------------------------------------------------------------------------------------------------------


def load(model: str | Path, *, threads: int = 1, **settings: Any) -> Engine:
    """A new engine on the CPU. Its thread count is the process's own, so it answers on as many as were set last."""
    torch.set_num_threads(threads)
    return Engine.load(str(model), device="cpu", threads=threads, **settings)


@functools.lru_cache(maxsize=48)
def _kept(model: str, threads: int, settings: tuple[tuple[str, Any], ...]) -> Engine:
    return load(model, threads=threads, **dict(settings))


def engine(model: str | Path, *, threads: int = 1, **settings: Any) -> Engine:
    """An engine with these settings that earlier tests may have used, its prefix checkpoints forgotten."""
    found = _kept(str(model), threads, tuple(sorted(settings.items())))
    torch.set_num_threads(threads)
    found.reset()
    return found


@contextlib.contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Run torch on ``count`` threads, then on as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    """Engines set the process's thread count; give it back. A test file takes this fixture by importing it."""
    with on_threads(torch.get_num_threads()):
        yield


def greedy(max_tokens: int = 64, **values: Any) -> SamplingParams:
    """Greedy decoding that runs to its limit unless told otherwise."""
    return SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, "ignore_eos": True, **values})


def facts(answer: Generation) -> tuple[Any, ...]:
    """What must be equal when two answers are the same: ids, text, reason, log-probabilities to the last bit."""
    logged = None
    if answer.logprobs is not None:
        logged = [(t.token_id, t.logprob, tuple(t.top)) for t in answer.logprobs]
    scored = None
    if answer.prompt_logprobs is not None:
        scored = [None if t is None else (t.token_id, t.logprob, tuple(t.top)) for t in answer.prompt_logprobs]
    return (answer.token_ids, answer.text, answer.finish_reason, logged, scored, answer.stats.completion_tokens)


def joined(engine_: Engine, prompt: Any, params: SamplingParams | None = None, **chat: Any) -> tuple[Any, ...]:
    """As ``facts`` of ``generate`` (without prompt scores), put together from ``stream``."""
    ids: list[int] = []
    text, logged, last = "", [], None
    for piece in engine_.stream(prompt, params, **chat):
        assert last is None or last.finish_reason is None
        last = piece
        ids += piece.token_ids
        text += piece.text
        logged += [(t.token_id, t.logprob, tuple(t.top)) for t in piece.logprobs or []]
    assert last is not None and last.stats is not None
    asked = params is not None and params.logprobs is not None
    return (ids, text, last.finish_reason, logged if asked else None, None, last.stats.completion_tokens)


@contextlib.contextmanager
def failing(engine_: Engine, phase: str, at: int = 3) -> Iterator[list[int]]:
    """Make the last call of ``phase`` raise Injected at its ``at``-th launch (from 1), after doing its work.

    Yields the number of calls so far, as a list of one.
    """
    runtime = engine_._runtime
    assert runtime is not None
    tapes = {id(p.tape): p.tape for program in runtime.programs.values() for p in program.phases if p.name == phase}
    calls = [0]

    def wrap(entry: Entry) -> Entry:
        def ready() -> None:
            entry.ready()
            calls[0] += 1
            if calls[0] == at:
                raise Injected(phase)

        return dataclasses.replace(entry, ready=ready)

    saved = {key: tape.entries[-1] for key, tape in tapes.items()}
    for tape in tapes.values():
        tape.entries[-1] = wrap(tape.entries[-1])
    try:
        yield calls
    finally:
        for key, tape in tapes.items():
            tape.entries[-1] = saved[key]


class Injected(Exception):
    """Raised on purpose inside a step."""


@functools.cache
def heldout() -> tuple[dict[str, Any], ...]:
    """The held-out prompts of the bundled model: records with "prompt" (text) or "messages"."""
    lines = (DATA / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(json.loads(line) for line in lines)


def prompts_of(vocab: int, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Random prompts of the given lengths over a vocabulary (its last four ids, the special ones, left out)."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab - 4, (n,), generator=g).tolist() for n in lengths]


# -- the exact law and what to hold against it ------------------------------------------------------------------------


def exact_law(
    logits: Tensor, params: SamplingParams, prompt: Sequence[int], answer: Sequence[int], stops: Sequence[int] = ()
) -> Tensor:
    """float64 [V]: the law of the token after ``answer``, written down plainly from the documented definition."""
    x = logits.double().clone()
    seen = set(prompt) | set(answer)
    repetition = params.repetition_penalty or 1.0
    for token in seen:
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
    for token in set(answer):
        x[token] -= params.frequency_penalty * list(answer).count(token) + params.presence_penalty
    for token, value in (params.logit_bias or {}).items():
        x[token] += value
    if len(answer) < params.min_tokens:
        x[list(stops)] = -math.inf
    temperature = 1.0 if params.temperature is None else params.temperature
    if temperature < 1e-5 or params.top_k == 1:
        return torch.nn.functional.one_hot(x.argmax(), x.shape[0]).double()
    x = x / temperature
    order = sorted(range(x.shape[0]), key=lambda i: (-float(x[i]), i))
    if params.top_k is not None and params.top_k > 0:
        order = order[: params.top_k]
    weight = torch.zeros_like(x)
    weight[order] = (x[order] - x.max()).exp()
    weight /= weight.sum()
    kept, mass = [], 0.0
    for token in order:
        if mass >= (1.0 if params.top_p is None else params.top_p):
            break
        kept.append(token)
        mass += float(weight[token])
    best = float(weight.max())
    kept = [t for t in kept if float(weight[t]) >= (params.min_p or 0.0) * best]
    law = torch.zeros_like(x)
    law[kept] = weight[kept]
    return law / law.sum()


def chi_square(observed: Sequence[float], expected: Sequence[float], *, least: float = 8.0) -> tuple[float, int]:
    """(p value, cells) of counts against expected counts; cells expected less than ``least`` times are pooled.

    Anything observed where nothing can occur gives p = 0.
    """
    if any(o and not e for o, e in zip(observed, expected, strict=True)):
        return 0.0, len(observed)
    cells = [(o, e) for o, e in zip(observed, expected, strict=True) if e >= least]
    rest = [(o, e) for o, e in zip(observed, expected, strict=True) if 0 < e < least]
    pooled = (sum(o for o, _ in rest), sum(e for _, e in rest))
    if pooled[1] >= least:
        cells.append(pooled)
    elif pooled[1] and cells:
        cells[-1] = (cells[-1][0] + pooled[0], cells[-1][1] + pooled[1])
    value = sum((o - e) ** 2 / e for o, e in cells)
    freedom = len(cells) - 1
    if freedom < 1:
        return 1.0, len(cells)
    upper = torch.special.gammaincc(torch.tensor(freedom / 2.0).double(), torch.tensor(value / 2.0).double())
    return float(upper), len(cells)


def two_sided(z: float) -> float:
    """p value of a standard normal deviate."""
    return math.erfc(abs(z) / math.sqrt(2.0))
