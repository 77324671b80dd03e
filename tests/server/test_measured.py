"""`soliton measure serve`: the report, not the times."""

from __future__ import annotations

import json

import pytest

from soliton.cli import main


@pytest.mark.parametrize("storm", [[], ["--storm"]])
def test_the_server_beside_the_engine(capsys: pytest.CaptureFixture[str], storm: list[str]) -> None:
    words = ["measure", "serve", "pebble", "--device", "cpu", "--threads", "1", "--repeats", "3", "--max-tokens", "48"]
    assert main([*words, "--json", *storm]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["answers"], found["different"], found["storm"]) == (3, 0, bool(storm))
    assert found["engine_us"]["median"] > 0 and found["server_us"]["median"] > 0 and found["ratio"]["median"] > 0


def test_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure", "step", "pebble", "--storm"]) == 2
    assert "--storm belongs to measure serve" in capsys.readouterr().err
