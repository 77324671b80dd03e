"""Accept lengths, costs by rows and the calibration of a confidence head, through the command."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import draft_cases as d
import helpers as h
from helpers import threads_as_before  # noqa: F401 - takes effect by being here
from soliton import SamplingParams
from soliton.cli import main
from soliton.config import EngineConfig
from soliton.errors import ConfigError
from soliton.measure.accept import count, repeats
from soliton.measure.costs import measure_costs
from soliton.speculation.schedule import Calibration, Costs

DRAFT = d.DATA / "dspark-ling-micro"
PROMPTS = [[i * 7 % 300, i * 3 % 300, i] for i in range(8)]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


def said(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["measure", *words, "--device", "cpu", "--threads", "1"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return document


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": ids}) + "\n" for ids in PROMPTS), encoding="utf-8")
    return str(path)


def test_counts_are_those_of_the_answers(capsys: pytest.CaptureFixture[str], prompts: str) -> None:
    words = ("--draft", str(DRAFT), "--prompts", prompts, "--max-tokens", "24", "--ignore-eos", "--keep-repeating")
    found = said(capsys, "accept", str(h.micro()), *words)
    engine = h.engine(h.micro(), speculation="dspark", draft=str(DRAFT))
    lengths = [n for p in PROMPTS for n in engine.generate(p, GREEDY).stats.accept_lengths[1:]]
    assert found["accept_length"] == pytest.approx(sum(lengths) / len(lengths), abs=1e-4)
    assert found["steps"] == len(lengths) and found["prompts"] == len(PROMPTS) and found["excluded"] == 0
    for k, share in enumerate(found["accepted_at_position"], 1):
        assert share == pytest.approx(sum(n > k for n in lengths) / len(lengths), abs=1e-4)


def test_answers_that_repeat_themselves() -> None:
    assert repeats([1, 2, 3, 4, 5, 6, 7, 8] * 3) and not repeats(list(range(40))) and not repeats([1, 2])
    engine = h.engine(h.micro(), speculation="dspark", draft=str(DRAFT))
    all_, some = (count(engine, PROMPTS, GREEDY, exclude=e) for e in (False, True))
    assert all_.prompts == some.prompts + some.excluded == len(PROMPTS)


def test_costs_are_of_every_row(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = str(tmp_path / "costs.json")
    words = ("--draft", str(DRAFT), "--context", "40", "--repeats", "2", "--out", out, "--json")
    found = said(capsys, "costs", str(h.micro()), *words)
    assert len(found["verify_us"]) == 6 and found["verify_us"] == sorted(found["verify_us"]) and found["draft_us"] > 0
    assert Costs.load(out).verify_us == tuple(found["verify_us"])
    scheduled = h.load(h.micro(), draft=str(DRAFT), draft_costs=out)
    assert scheduled.config.draft_verify == "cost"
    plain = h.engine(h.micro(), speculation="off")
    assert scheduled.generate(PROMPTS[0], GREEDY).token_ids == plain.generate(PROMPTS[0], GREEDY).token_ids
    with pytest.raises(ConfigError, match="costs by rows are of a DSpark draft, and speculation is 'nextn'"):
        measure_costs(EngineConfig(model=str(h.micro()), device="cpu"))


def test_calibration(capsys: pytest.CaptureFixture[str], prompts: str, tmp_path: Path) -> None:
    """The file is taken from beside the draft, and makes the confidences of other prompts truer."""
    draft = d.copied("dspark-ling-micro")
    words = ("--draft", str(draft), "--prompts", prompts, "--max-tokens", "60", "--ignore-eos")
    found = said(capsys, "calibration", str(h.micro()), *words, "--out", str(draft / "calibration.json"))
    made = Calibration.load(draft / "calibration.json")
    assert list(made.temperatures) == found["temperatures"] and found["dataset"] == "prompts.jsonl"
    assert sum(made.ece_after) <= sum(made.ece_before)
    unseen = found["held_out"]  # the same rounds, each with the temperatures of the other half
    assert unseen["num_samples"] == made.num_samples and unseen["ece_before"] == pytest.approx(made.ece_before)
    assert unseen["ece_after"] != pytest.approx(made.ece_after)
    engine = h.load(h.micro(), draft=str(draft), draft_verify="threshold", draft_threshold=0.3)
    drafter = engine._ready().parts.drafter
    assert drafter is not None and drafter.scheduler is not None
    assert drafter.scheduler.temperatures.tolist() == pytest.approx(made.temperatures)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("accept", "pebble"), "measure accept answers prompts: give --prompts FILE"),
        (("accept", "pebble", "--prompts", "nowhere.jsonl"), "nowhere.jsonl: cannot be read (No such file"),
        (("step", "pebble", "--prompts", "x"), "--prompts belongs to measure accept and measure compare and"),
        (("ttft", "pebble", "--out", "x"), "--out belongs to measure costs and measure calibration"),
        (("costs", "pebble", "--rows", "3"), "--rows belongs to measure step"),
        (("costs", "pebble"), "costs by rows are of a DSpark draft, and speculation is 'nextn'"),
        (("calibration", "pebble", "--prompts", "tests/data/heldout.jsonl", "--limit", "1"), "give more"),
        (("calibration", "pebble", "--prompts", "tests/data/heldout.jsonl", "--limit", "2"), "this engine has none"),
        (("accept", "pebble", "--prompts", "tests/data/heldout.jsonl", "--limit", "0"), "--limit 0"),
    ],
)
def test_refusals(
    words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(d.DATA.parents[1])
    assert main(["measure", *words, "--device", "cpu"]) == 2
    assert says in capsys.readouterr().err


def test_files_made_for_something_else_are_doubted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs = Costs(
        draft_us=1.0, verify_us=tuple(range(1, 7)), model="another", draft="", device="a GPU", commit=None, versions={}
    )
    costs.save(tmp_path / "costs.json")
    given = {"draft": str(DRAFT), "draft_costs": str(tmp_path / "costs.json")}
    with pytest.warns(UserWarning) as told:
        h.load(h.micro(), **given).close()
    assert [w for w in map(str, (one.message for one in told)) if "of model 'another'" in w or "device 'a GPU'" in w]
    assert main(["doctor", str(h.micro()), "--device", "cpu", "--json", *flags(given)]) == 1
    assert any("'a GPU'" in said for said in json.loads(capsys.readouterr().out)["problems"])
    (tmp_path / "costs.json").write_text("{")
    assert main(["doctor", str(h.micro()), "--device", "cpu", "--json", *flags(given)]) == 2


def flags(given: dict[str, str]) -> list[str]:
    return [word for key, value in given.items() for word in (f"--{key.replace('_', '-')}", value)]


class TestWaysBesideEachOther:
    WAYS = ("off", "nextn:2", "dspark", "dspark:fixed=2", "dspark:threshold=0.5", "dspark:cost")

    def test_the_same_answers(self, capsys: pytest.CaptureFixture[str], prompts: str) -> None:
        given = {"draft": str(DRAFT), "draft_costs": d.costs([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])}
        words = (*flags(given), "--prompts", prompts, "--max-tokens", "24", "--ignore-eos", "--keep-repeating")
        found = said(capsys, "compare", str(h.micro()), *words, "--ways", *self.WAYS)
        assert [row["way"] for row in found["ways"]] == list(self.WAYS)
        assert found["different"] == 0 and found["prompts"] == len(PROMPTS)
        first, nextn, *_ = found["ways"]
        assert first["accept_length"] == 1.0 and first["ratio"] == {"median": 1.0, "q1": 1.0, "q3": 1.0}
        engine = h.engine(h.micro(), speculation="nextn", speculative_num_steps=2)
        lengths = [n for p in PROMPTS for n in engine.generate(p, GREEDY).stats.accept_lengths[1:]]
        assert nextn["accept_length"] == pytest.approx(sum(lengths) / len(lengths), abs=1e-3)
        assert all(
            0 < row["tpot_us"]["q1"] <= row["tpot_us"]["median"] <= row["tpot_us"]["q3"] for row in found["ways"]
        )

    @pytest.mark.parametrize(
        "ways",
        [["off"], ["off", "off"], ["off", "nextn"], ["off", "medusa"], ["off", "dspark:fixed=x"], ["off", "nextn:2=3"]],
    )
    def test_ways_that_are_none(self, ways: list[str], prompts: str, capsys: pytest.CaptureFixture[str]) -> None:
        words = ["measure", "compare", str(h.micro()), "--prompts", prompts, "--device", "cpu", "--ways", *ways]
        assert main(words) == 2
        assert "--ways" in capsys.readouterr().err


class TestWhatIsRefused:
    def test_old_temperatures_do_not_stand_in_the_way(self, prompts: str, capsys: pytest.CaptureFixture[str]) -> None:
        for text in ("{", '{"temperatures": [1.0, 2.0]}'):
            draft = d.copied("dspark-ling-micro")
            (draft / "calibration.json").write_text(text)
            words = ("--draft", str(draft), "--prompts", prompts, "--max-tokens", "60", "--ignore-eos")
            out = draft / "calibration.json"
            assert len(said(capsys, "calibration", str(h.micro()), *words, "--out", str(out))["temperatures"]) == 5
            assert len(Calibration.load(out).temperatures) == 5

    def test_too_few_blocks(self, prompts: str, capsys: pytest.CaptureFixture[str]) -> None:
        words = ["measure", "calibration", str(h.micro()), "--draft", str(DRAFT), "--prompts", prompts]
        assert main([*words, "--max-tokens", "2", "--device", "cpu"]) == 2
        assert "whole blocks in one half of the answers" in capsys.readouterr().err

    def test_prompts_that_the_engine_does_not_take(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "prompts.jsonl.gz"
        rows = [{"prompt": []}, *({"prompt": ids} for ids in PROMPTS[:3]), {"prompt": [1] * 5000}]
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
        given = ("--prompts", str(path), "--max-tokens", "24", "--ignore-eos", "--keep-repeating")
        found = said(capsys, "accept", str(h.micro()), "--draft", str(DRAFT), *given)
        assert (found["prompts"], found["refused"], found["draft"]) == (3, 2, "dspark-ling-micro")
        found = said(capsys, "compare", str(h.micro()), *given, "--ways", "off", "nextn:1")
        assert (found["prompts"], found["refused"], found["draft"]) == (3, 2, None)

    @pytest.mark.parametrize("text", ["no json\n", "[1]\n", '{"text": "x"}\n', "", "\x1f\udcff\n"])
    def test_files_that_hold_no_prompts(self, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "prompts.jsonl"
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
        assert main(["measure", "accept", str(h.micro()), "--device", "cpu", "--prompts", str(path)]) == 2
        assert len(capsys.readouterr().err) < 400

    def test_flags_that_no_way_reads(self, prompts: str, capsys: pytest.CaptureFixture[str]) -> None:
        words = [
            "measure",
            "compare",
            str(h.micro()),
            "--prompts",
            prompts,
            "--device",
            "cpu",
            "--ways",
            "off",
            "nextn:2",
        ]
        for more in (["--speculative-num-steps", "3"], ["--draft", str(DRAFT), "--draft-costs", d.costs([1.0] * 6)]):
            assert main([*words, *more]) == 2
            assert "leave it out" in capsys.readouterr().err
        assert main([*words, "nextn:02"]) == 2


def test_doubts_are_one_line_for_a_reader_of_the_command(tmp_path: Path) -> None:
    costs = Costs(
        draft_us=1, verify_us=tuple(range(1, 7)), model="other", draft="", device="", commit=None, versions={}
    )
    costs.save(tmp_path / "costs.json")
    words = ["generate", str(h.micro()), "--device", "cpu", "--draft", str(DRAFT), "--max-tokens", "2", "1 2 3"]
    command = [sys.executable, "-m", "soliton", *words, "--draft-costs", str(tmp_path / "costs.json")]
    told = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    assert told.count("of model 'other'") == 1 and "UserWarning" not in told
