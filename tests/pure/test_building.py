"""What is being built is told to whoever listens, once, and only while it listens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from soliton.commands.common import Once
from soliton.ops import building


def test_listeners_come_and_go() -> None:
    heard: list[str] = []
    building.building("nobody hears this")
    with building.told(heard.append):
        building.building("a kernel")
        with pytest.raises(ZeroDivisionError), building.told(heard.append):
            building.building("another")
            1 / 0  # noqa: B018
        building.building("the last")
    building.building("nor this")
    assert heard == ["a kernel", "another", "another", "the last"]


def test_what_triton_had_in_its_cache_is_not_built() -> None:
    heard: list[str] = []
    with building.told(heard.append):
        building._heard(src=SimpleNamespace(name="kept"), cache_hit=True, times=None)
        building._heard(src=SimpleNamespace(name="_norm"), cache_hit=False, times=None)
    assert len(heard) == 1 and heard[0].startswith("Triton kernels, ") and heard[0].endswith(" _norm")
    building.hear_compiles()  # with or without Triton


def test_each_kind_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    say = Once()
    for what in ("sweep.cu for sm_90a", "Triton kernels, 1 so far, the last a", "Triton kernels, 2 so far, the last b"):
        say(what)
    assert capsys.readouterr().err == "building sweep.cu for sm_90a\nbuilding Triton kernels\n"
