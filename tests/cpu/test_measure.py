"""`soliton measure`: what it counts, what it prints, what it refuses. Times are not tested."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import helpers as h
from helpers import threads_as_before  # noqa: F401 - takes effect by being here
from soliton import Engine
from soliton.cli import main
from soliton.config import EngineConfig
from soliton.measure.ahead import LoopTimes
from soliton.measure.step import measure_step
from soliton.measure.ttft import measure_ttft, process_age

CPU = {"device": "cpu", "threads": 1, "max_context": 128}
KEYS = {
    "model", "device", "dtype", "tp", "speculation", "sampling", "rows", "context", "step_us", "spread_us", "bytes",
    "read_tb_s", "floor_us", "ratio", "idle_us", "kernels", "simulated", "commit", "versions",
}  # fmt: skip


def report(model: str | Path, *, rows: int | None = None, **settings: object) -> dict[str, object]:
    config = EngineConfig(model=str(model), **{**CPU, **settings})  # type: ignore[arg-type]
    return measure_step(config, rows=rows, context=40, repeats=1)


def test_bytes_of_a_plain_step() -> None:
    """pebble, merged experts on a CPU: every matrix once, in float32, the embedding and the MTP layer left out."""
    found = report("pebble", speculation="off")
    checkpoint = h.engine("pebble", speculation="off").checkpoint
    matrices = sum(
        checkpoint.table[role].numel * 4
        for role in checkpoint.roles()
        if len(checkpoint.table[role].shape) == 2 and not role.startswith(("mtp.", "embed")) and "conv" not in role
    )
    assert matrices <= found["weight_bytes"] <= 1.03 * matrices  # type: ignore[operator]  # columns are padded
    spec = checkpoint.spec
    assert found["kv_bytes"] == len(spec.mla_layers) * 41 * 576 * 4
    assert found["state_bytes"] == len(spec.kda_layers) * 2 * 128 * 128 * 4
    assert found["rows"] == 1 and found["experts"] == [4, 4]


def test_rows_without_a_drafter() -> None:
    one, six = report(h.micro("kimi-micro"), rows=1), report(h.micro("kimi-micro"), rows=6)
    assert (one["rows"], six["rows"]) == (1, 6)
    assert six["written_bytes"] == 6 * one["written_bytes"]  # type: ignore[operator]
    assert six["experts"][1] > one["experts"][1]  # type: ignore[index]


def test_a_chain_reads_the_draft_layer_again_and_again() -> None:
    plain, one, three = (
        report(h.nano(), **settings)
        for settings in (
            {"speculation": "off"},
            {"speculation": "nextn", "speculative_num_steps": 1},
            {"speculation": "nextn", "speculative_num_steps": 3},
        )
    )
    assert plain["weight_bytes"] < one["weight_bytes"] < three["weight_bytes"]  # type: ignore[operator]
    assert three["rows"] == 4 and three["speculation"] == "nextn S=3"


def test_the_last_line_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["measure", "step", str(h.nano()), "--device", "cpu", "--threads", "1", "--max-context", "64"]
    assert main([*words, "--context", "20", "--repeats", "1", "--simulate-accept", "2.5"]) == 0
    said = capsys.readouterr().out
    found = json.loads(said.splitlines()[-1])
    assert set(found) >= KEYS and found["simulated"] and "SIMULATED" in said
    assert found["tpot_us"] == pytest.approx(found["step_us"] / 2.5, abs=0.01)
    assert main([*words, "--context", "20", "--repeats", "1", "--json", "--temperature", "0.6", "--top-k", "20"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert not found["simulated"] and found["sampling"] == "T=0.6 p=1 k=20"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["measure", "step"], "nothing to measure: give MODEL"),
        (["measure", "walk", "pebble"], "step"),
        (["measure", "step", "pebble", "--context", "99999"], "goes to 4096; the model takes 4096: choose no more"),
        (["measure", "step", "pebble", "--context", "80", "--max-context", "64"], "64; set --max-context as well"),
        (["measure", "step", "pebble", "--context", "0"], "context is 0; at least 1 token is needed"),
        (["measure", "step", "pebble", "--simulate-accept", "-1"], "a step of 4 rows gives 1 to 4 tokens; choose one"),
        (["measure", "step", "pebble", "--simulate-accept", "nan"], "an accept length of nan is impossible"),
        (["measure", "step", "pebble", "--max-tokens", "4"], "--max-tokens changes nothing that is measured"),
        (["measure", "step", "pebble", "--speculation", "off", "--rows", "33"], "rows is 33; a step verifies 1 to 32"),
        (["measure", "step", "pebble", "--rows", "3"], "rows"),
        (["measure", "step", "pebble", "--repeats", "0"], "at least 1"),
        (["measure", "ttft"], "nothing to measure: give MODEL"),
        (
            ["measure", "ttft", "pebble", "--repeats", "4"],
            "repeats is 4: a time to first token is a median of at least",
        ),
        (["measure", "ttft", "pebble", "--context", "99999"], "goes to 4096; the model takes 4096: choose no more"),
        (["measure", "ttft", "pebble", "--context", "64", "--max-context", "64"], "set --max-context"),
        (["measure", "ttft", "pebble", "--rows", "2"], "--rows belongs to measure step"),
        (["measure", "ttft", "pebble", "--simulate-accept", "2"], "--simulate-accept belongs to measure step"),
    ],
)
def test_refusals(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert says in capsys.readouterr().err


TTFT_KEYS = {
    "model", "device", "dtype", "context", "ttft_ms", "spread_ms", "prefill_tokens_s", "prefill_chunk", "load_s",
    "first_token_s", "commit", "versions",
}  # fmt: skip


def test_a_first_token(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["measure", "ttft", str(h.nano()), "--device", "cpu", "--threads", "1", "--context", "40"]
    assert main([*words, "--repeats", "5"]) == 0
    said = capsys.readouterr().out
    found = json.loads(said.splitlines()[-1])
    assert set(found) >= TTFT_KEYS and "time to first token" in said
    assert (found["context"], found["prefill_chunk"], found["runs"]) == (40, 512, 5)
    low, high = found["spread_ms"]
    assert 0 < low <= found["ttft_ms"] <= high
    assert found["prefill_tokens_s"] == pytest.approx(40e3 / found["ttft_ms"], rel=1e-3)
    assert main([*words, "--json", "--speculation", "off"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["runs"] == 7 and found["speculation"] == "off"


def test_prompts_are_counted_and_the_engine_is_the_given_one() -> None:
    seen: list[tuple[int, int]] = []
    loaded: list[Engine] = []

    def load(config: EngineConfig) -> Engine:
        loaded.append(Engine.from_config(config))
        return loaded[0]

    config = EngineConfig(model=str(h.micro("kimi-micro")), device="cpu", threads=1)
    measure_ttft(config, context=9, repeats=5, load=load, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, 6) for done in range(7)] and len(loaded) == 1
    age = process_age()
    assert age is None or 0 < age < 1e6


def test_leads_are_counted_once() -> None:
    found = LoopTimes(idle=(), lead=(-3.0, 0.0, 0.5, 50.0, 51.0, 10000.0, 10001.0), whole=1.0).histogram()
    assert {edge: count for edge, count in found.items() if count} == {
        "<=0": 2, "<=50": 2, "<=100": 1, "<=10000": 1, ">10000": 1,
    }  # fmt: skip
