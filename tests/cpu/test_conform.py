"""The engine against the reference outputs of every case, in both dtypes; and that each comparison can fail."""

from __future__ import annotations

import filecmp
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from conftest import ABSENT, shared_path
from soliton.cli import main
from soliton.errors import CheckpointError, ConfigError
from soliton.measure import conform as module
from soliton.measure.conform import Report, conform, find_cases
from soliton.measure.golden import Exact, Golden, Rounded, margins, same

OWN = ("ling-micro", "kimi-micro")
OTHERS = ("ling-mini-128",)
DRAFTS = ("dspark-ling-micro", "dspark-ling-mini-128")
UNSUPPORTED = ("ling-micro-fp8", "ling-micro-int4", "ling-mini-128-fp8")


def failures(report: Report) -> list[str]:
    return [f"{c.quantity}: {c.worst:.3g} > {c.tolerance} {c.note}" for c in report.checks if c.passed is False]


def case(name: str, data: Path) -> Path:
    if name in OWN or name == DRAFTS[0]:
        return data / name
    path = shared_path() / "conformance" / name
    if not path.is_dir():
        pytest.skip(f"{ABSENT}: no {path}")
    return path


class TestCases:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("name", [*OWN, *OTHERS])
    def test_agrees(self, name: str, dtype: str, data_dir: Path) -> None:
        report = conform(case(name, data_dir), dtype=dtype)
        assert not report.skipped and failures(report) == []
        judged = {c.quantity for c in report.checks if c.passed}
        assert {"continuation, plain", "trace router_experts"} <= judged
        if dtype == "float32":
            traces = {"embed", "resid", "attn", "mlp", "kda_state", "mla_latent", "mla_krope", "router_weights"}
            assert {f"trace {kind}" for kind in (*traces, "conv_state.q", "conv_state.k", "conv_state.v")} <= judged
        if name.startswith("ling"):
            assert "continuation, NEXTN = plain, token by token" in judged
            exact = {"accept lengths, one piece", "MTP drafts of every round", "trace mtp_hidden"}
            assert dtype != "float32" or exact <= judged

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("name", DRAFTS)
    def test_a_draft_agrees(self, name: str, dtype: str, data_dir: Path) -> None:
        report = conform(case(name, data_dir), dtype=dtype)
        assert not report.skipped and failures(report) == []
        judged = {c.quantity for c in report.checks if c.passed}
        assert {"continuation, DSpark = plain", "continuation, DSpark"} <= judged
        if dtype == "bfloat16":
            assert {"logits median, given features", "logits p90, given features"} <= judged
            return
        of_blocks = {f"block {part}" for part in ("hidden", "base_logits", "logits", "confidence_logits", "residuals")}
        of_rounds = {"drafts of every round", "confidence logits of every round", "accept lengths", "first drafts"}
        assert {"taps", "features", "ctx_k", "ctx_v"} | of_blocks | of_rounds <= judged

    @pytest.mark.parametrize("name", [*OWN, DRAFTS[0]])
    def test_our_copies_are_the_published_ones(self, name: str, data_dir: Path, shared_dir: Path) -> None:
        ours, theirs = data_dir / name, shared_dir / "conformance" / name
        names = sorted(file.name for file in theirs.iterdir())
        assert sorted(file.name for file in ours.iterdir()) == names
        assert filecmp.cmpfiles(ours, theirs, names, shallow=False) == (names, [], [])

    def test_every_published_case_is_compared_or_known_to_be_unsupported(self, shared_dir: Path) -> None:
        found = {path.name for path in find_cases([shared_dir / "conformance"])}
        assert found == {*OWN, *OTHERS, *DRAFTS, *UNSUPPORTED}

    @pytest.mark.parametrize("name", UNSUPPORTED)
    def test_unsupported_kinds_are_named(self, name: str, shared_dir: Path) -> None:
        report = conform(shared_dir / "conformance" / name)
        assert report.skipped.startswith("not supported yet") and not report.failed and not report.checks


@pytest.fixture
def copy(tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """A case of our own to spoil, compared with one way of cutting prompts, for time."""
    monkeypatch.setattr(module, "PIECES", {"one piece": 65536})
    return lambda name: Path(shutil.copytree(data_dir / name, tmp_path / name))


def spoil(file: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    arrays = {name: array.clone() for name, array in load_file(file).items()}
    change(arrays)
    save_file(arrays, file)


class TestFails:
    """One number wrong in an array is enough, in every array that float32 judges."""

    # What a wrong number of the reference cannot reach: only shown, or the engine against itself.
    UNTOUCHED = ("near ties of logits", "close choices of logits", "close choices of experts")
    OWN_WORD = "continuation, NEXTN = plain, one piece"

    def test_one_number_in_every_array(self, copy: Callable[[str], Path]) -> None:
        def change(arrays: dict[str, Tensor]) -> None:
            for name, array in arrays.items():
                kind = name.rpartition(".")[2]
                if kind in ("ids", "logit_positions", "round_start") or "margin" in name:
                    continue  # what is fed in, and what only explains
                flat = array.view(-1)
                if name.startswith("trace.router_experts"):
                    row = set(array[-1].tolist())
                    flat[-1] = next(expert for expert in range(len(row) + 1) if expert not in row)
                elif array.dtype == torch.int32:
                    flat[0 if kind == "accepted" else -1] += -1 if flat[-1] > 1 else 1
                else:
                    flat[-1] += 0.003 * (1 + flat[-1].abs())
            arrays["prompt.2.cont_logits"][0, arrays["prompt.2.cont_ids"][0].item()] -= 20  # a law of its own

        path = copy("ling-micro")
        spoil(path / "golden.safetensors", change)
        report = conform(path)
        passed = [c.quantity for c in report.checks if c.passed is not False]
        assert passed == [self.OWN_WORD, *self.UNTOUCHED]

    def test_one_weight(self, copy: Callable[[str], Path]) -> None:
        path = copy("kimi-micro")
        assert not conform(path).failed

        def change(arrays: dict[str, Tensor]) -> None:
            arrays["model.layers.2.input_layernorm.weight"][5] *= 1.25

        spoil(path / "model.safetensors", change)
        failed = " ".join(failures(conform(path)))
        assert "trace attn" in failed and "logits, one piece" in failed and "trace embed" not in failed

    def test_bfloat16(self, copy: Callable[[str], Path]) -> None:
        def change(arrays: dict[str, Tensor]) -> None:
            for name in arrays:
                if name.endswith("layers.2.post_attention_layernorm.weight"):
                    arrays[name].zero_()
            arrays["model.norm.weight"].neg_()  # other answers from the first token on, also where no choice was close

        path = copy("kimi-micro")
        spoil(path / "model.safetensors", change)
        failed = " ".join(failures(conform(path, dtype="bfloat16")))
        for quantity in ("logits median", "logits p90", "argmax", "continuation, plain", "trace router_experts"):
            assert quantity in failed, quantity

    @pytest.mark.parametrize("judge", [Exact, Rounded])
    def test_what_is_no_number(self, judge: type[Exact] | type[Rounded], data_dir: Path) -> None:
        golden = Golden.read(data_dir / "kimi-micro")
        good = torch.ones(3, 4)
        bad = good.clone()
        bad[1, 2] = float("nan")
        for pair in ((bad, good), (good, bad)):
            check = judge(golden).near("trace resid", [(good, good), pair])
            assert check.passed is False
            document = Report(case="x", dtype="y", checks=(check,)).document()
            assert document["failed"] and document["checks"][0]["worst"] is None

    def test_another_shape(self, data_dir: Path) -> None:
        golden = Golden.read(data_dir / "kimi-micro")
        with pytest.raises(AssertionError, match="against the reference"):
            Exact(golden).near("trace resid", [(torch.ones(1, 4), torch.ones(3, 4))])

    def test_same_names_the_first(self) -> None:
        check = same("ids", [[1], [2], [3]], [[1], [9], [8]])
        assert (check.passed, check.worst, check.note) == (False, 2, "first at 1: [2] is not [9]")

    def test_margins_are_counted_only(self, data_dir: Path) -> None:
        checks = list(margins(Golden.read(data_dir / "ling-micro")))
        assert [c.worst for c in checks][:1] == [0] and all(c.passed is None for c in checks)


class TestRoundedRules:
    """Where bfloat16 may part from the reference, on its own numbers."""

    @pytest.mark.parametrize(("margin", "route", "passes"), [(0.5, 0.5, False), (0.02, 0.5, True), (0.5, 0.009, True)])
    def test_continuations(self, margin: float, route: float, passes: bool) -> None:
        arrays = {
            "prompt.0.cont_ids": torch.tensor([1, 2, 3], dtype=torch.int32),
            "prompt.0.cont_rel_margin": torch.tensor([0.5, margin, 0.001]),
            "prompt.0.cont_route_margin": torch.tensor([0.5, route, 0.001]),
            "prompt.0.route_margin": torch.tensor([0.001]),
        }
        golden = Golden(data={"prompts": [{}]}, arrays=arrays)
        assert Rounded(golden).continuation("x", [[1, 2, 3]]).passed
        assert Rounded(golden).continuation("x", [[1, 7, 3]]).passed is passes

    def test_experts(self) -> None:
        wanted = torch.tensor([[0, 1], [2, 3], [4, 5]], dtype=torch.int32)
        arrays = {f"trace.router_experts.{layer}": wanted for layer in (1, 2)}
        arrays |= {f"trace.router_margin.{layer}": torch.tensor([0.5, 0.005, 0.5]) for layer in (1, 2)}
        golden = Golden(data={}, arrays=arrays)

        def passes(first: list[list[int]], second: list[list[int]]) -> bool | None:
            trace = {"router_experts.1": torch.tensor(first), "router_experts.2": torch.tensor(second)}
            return Rounded(golden).experts(trace).passed

        right, close, far = [[1, 0], [3, 2], [5, 4]], [[0, 1], [2, 9], [4, 5]], [[0, 1], [2, 3], [4, 9]]
        assert passes(right, right) and passes(close, right)
        assert not passes(far, right) and not passes(right, far)
        assert passes(close, far), "after a flip in a layer below, the inputs are others"


class TestCommand:
    def test_good_and_bad(self, copy: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
        path = copy("kimi-micro")
        assert main(["conform", str(path)]) == 0
        said = capsys.readouterr().out
        assert "continuation, plain" in said and "FAIL" not in said and "failed: none" in said
        spoil(path / "golden.safetensors", lambda arrays: arrays["trace.embed"].add_(1))
        assert main(["conform", str(path.parent), "--json"]) == 1
        document = json.loads(capsys.readouterr().out)
        assert document["failed"] == ["kimi-micro"]
        failed = [c["quantity"] for c in document["reports"][0]["checks"] if c["passed"] is False]
        assert failed == ["trace embed"]
        assert main(["conform", str(path)]) == 1
        said = capsys.readouterr().out
        assert "FAIL" in said and "failed: kimi-micro" in said

    def test_a_broken_reference(self, copy: Callable[[str], Path]) -> None:
        path = copy("kimi-micro")
        (path / "golden.safetensors").write_bytes(b"x")
        with pytest.raises(CheckpointError, match="golden"):
            conform(path)
        with pytest.raises(ConfigError, match="no such directory"):
            find_cases([path / "nowhere"])


class TestReferenceFiles:
    """What is missing or malformed is named with exit code 2; it never counts as agreement."""

    def copy(self, data: Path, tmp_path: Path) -> Path:
        return shutil.copytree(data / "ling-micro", tmp_path / "case")

    @pytest.mark.parametrize("gone", ["mtp.0.draft_ids", "trace.router_experts.1", "prompt.0.hidden"])
    def test_an_array_that_is_missing(
        self, gone: str, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = self.copy(data_dir, tmp_path)
        arrays = load_file(path / "golden.safetensors")
        del arrays[gone]
        save_file(arrays, path / "golden.safetensors")
        assert main(["conform", str(path)]) == 2
        assert f"has no array '{gone}'" in capsys.readouterr().err

    @pytest.mark.parametrize("text", ["{}", "[]", '{"prompts": []}', '{"target": 1}'])
    def test_a_reference_of_another_form(
        self, text: str, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = self.copy(data_dir, tmp_path)
        (path / "golden.json").write_text(text)
        assert main(["conform", str(path)]) == 2
        assert "golden.json" in capsys.readouterr().err

    def test_no_case_at_all(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["conform", str(tmp_path)]) == 2
        assert "no golden.json here or one level below" in capsys.readouterr().err
