"""Sequential temperature scaling: the numbers of the conformance file, the error it lowers, the file it makes."""

import json

import pytest
import torch

from helpers import DATA
from soliton.errors import ConfigError
from soliton.measure.calibrate import BINS, GRID, Calibration, calibration_error, fit
from soliton.speculation.schedule import Schedule, Scheduler, confidences

CASES = json.loads((DATA / "scheduler.json").read_text(encoding="utf-8"))["sts"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_sts(case):
    found = fit(case["logits"], case["accepted"], grid=case["grid"], bins=case["bins"], dataset="file")
    assert found.temperatures == pytest.approx(case["temperatures"], rel=1e-14)
    assert found.ece_before == pytest.approx(case["ece_before"], abs=1e-12)
    assert found.ece_after == pytest.approx(case["ece_after"], abs=1e-12)
    assert (found.num_samples, found.dataset) == (case["num_samples"], "file")
    tensors = fit(torch.tensor(case["logits"]), torch.tensor(case["accepted"]), grid=case["grid"], bins=case["bins"])
    assert tensors.temperatures == found.temperatures, "float32 logits stay off the edges of bins here"


def test_defaults_are_sglang_s():
    case = CASES[2]
    assert pytest.approx(case["grid"], rel=1e-14) == GRID and len(GRID) == 41 and GRID[20] == 1.0
    assert case["bins"] == BINS
    assert fit(case["logits"], case["accepted"]).temperatures == pytest.approx(case["temperatures"], rel=1e-14)


def plain_error(predicted, happened, bins):
    gaps = [0.0] * bins
    for p, y in zip(predicted, happened, strict=True):
        gaps[min(bins - 1, int(bins * p))] += p - y
    return sum(map(abs, gaps)) / len(predicted)


def test_calibration_error_against_plain_floats():
    predicted = torch.rand(200, 3, dtype=torch.float64)
    predicted[:4] = torch.tensor([0.0, 1.0, 0.5, 0.25], dtype=torch.float64).unsqueeze(1)  # edges of bins
    happened = (torch.rand(200, 3) < predicted).double()
    happened[:4] = 0.0
    for bins in (1, 4, 15):
        want = [plain_error(predicted[:, j].tolist(), happened[:, j].tolist(), bins) for j in range(3)]
        assert calibration_error(predicted, happened, bins).tolist() == pytest.approx(want, abs=1e-12)
    assert calibration_error(torch.ones(5), torch.ones(5)).item() == 0.0


def test_finds_the_temperature_that_logits_were_scaled_by():
    true, g = torch.tensor([2.0, 0.5, 1.0]), torch.Generator().manual_seed(3)
    logits = torch.randn(60_000, 3, generator=g) * 1.5 + 1.0
    kept = torch.rand(60_000, 3, generator=g) < torch.sigmoid(logits)
    accepted = kept.to(torch.int64).cumprod(1).sum(1)
    found = fit(logits * true, accepted, bins=20)
    for got, want in zip(found.temperatures, true.tolist(), strict=True):
        assert abs(torch.tensor(got / want).log().item()) < 0.24  # two steps of the grid
    assert all(after < 0.02 for after in found.ece_after) and found.ece_before[0] > 0.05


def test_one_sample_one_slot():
    found = fit([[3.0]], [1])
    assert found.temperatures == (GRID[0],) and found.num_samples == 1
    assert fit([[3.0]], [0]).temperatures == (GRID[-1],)


@pytest.mark.parametrize(
    ("logits", "accepted", "other", "told"),
    [
        ([1.0, 2.0], [1, 1], {}, r"the shape \[2\]"),
        (torch.empty(0, 3), [], {}, r"the shape \[0, 3\]"),
        ([[1.0, 2.0]], [1, 1], {}, r"\[2\] beside 1 samples"),
        ([[1.0, 2.0]], [1.0], {}, "one whole number for each"),
        ([[1.0, 2.0], [0.0, float("nan")]], [1, 2], {}, "sample 1, draft 2 is no number"),
        ([[1.0, 2.0]], [3], {}, "sample 0 has 3 accepted drafts, but a block has 2"),
        ([[1.0, 2.0]], [-1], {}, "sample 0 has -1 accepted"),
        ([[1.0, 2.0]], [1], {"grid": ()}, "the grid of temperatures"),
        ([[1.0, 2.0]], [1], {"grid": (1.0, 0.0)}, "numbers above 0"),
        ([[1.0, 2.0]], [1], {"bins": 0}, "bins is 0"),
    ],
)
def test_samples_that_will_not_do(logits, accepted, other, told):
    with pytest.raises(ConfigError, match=told):
        fit(logits, accepted, **other)


def test_goes_to_a_file_and_back(tmp_path):
    case, path = CASES[2], tmp_path / "sts.json"
    names = {"dataset": "chat", "temperature": 0.8, "model": "m", "draft": "d"}
    found = fit(case["logits"], case["accepted"], **names)
    found.save(path)
    assert Calibration.load(path) == found
    # what SGLang reads from it
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data["temperatures"] == list(found.temperatures) and data["dataset"] == "chat"
    assert data["num_samples"] == 300 and len(data["ece_before"]) == len(data["ece_after"]) == 7
    assert {key: data[key] for key in names} == names


def test_reads_sglang_s_file_and_serves_it(tmp_path):
    path = tmp_path / "sts.json"
    path.write_text('{"temperatures": [2, 1.5]}', encoding="utf-8")  # it leaves out whatever is at its default
    found = Calibration.load(path)
    assert found == Calibration(temperatures=(2.0, 1.5)) and found.block(2) == (2.0, 1.5)
    scheduler = Scheduler(Schedule(), 2, "cpu", found)
    assert scheduler.temperatures.tolist() == [2.0, 1.5] and scheduler.temperatures.dtype == torch.float32
    conditional, _ = confidences(torch.tensor([2.0, 3.0]), scheduler.temperatures)
    torch.testing.assert_close(conditional, torch.sigmoid(torch.tensor([1.0, 2.0])))
    with pytest.raises(ConfigError, match="has 2 temperatures, but a block of this draft has 7"):
        found.block(7)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"temperatures": []}, "'temperatures' is empty"),
        ({"temperatures": [1.0, 0.0]}, "'temperatures[1]' is 0.0"),
        ({"temperatures": "1.0"}, "'temperatures' is '1.0', but a list"),
        ({"ece_after": [0.1]}, "'ece_after' has 1 numbers beside 2 temperatures"),
        ({"ece_before": [0.1, -0.1]}, "'ece_before[1]' is -0.1"),
        ({"num_samples": 1.5}, "'num_samples' is 1.5"),
        ({"num_samples": -1}, "'num_samples' is -1"),
        ({"dataset": None}, "'dataset' is None"),
        ({"temperature": -0.5}, "'temperature' is -0.5"),
        ({"data_set": "x"}, "the key 'data_set' is unknown (did you mean 'dataset'?)"),
    ],
)
def test_files_that_will_not_do(tmp_path, change, told):
    path = tmp_path / "sts.json"
    path.write_text(json.dumps({"temperatures": [1.0, 2.0], **change}), encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        Calibration.load(path)
    assert told in str(error.value) and str(error.value).startswith(f"{path}: ")
