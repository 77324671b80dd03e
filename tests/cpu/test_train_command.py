"""`soliton train` as a user runs it, and that what a draft learnt is what the engine serves."""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import draft_cases as d
from helpers import engine, facts, greedy, load, micro, nano, prompts_of, threads_as_before  # noqa: F401
from soliton import Engine
from soliton.checkpoint.draft import open_draft
from soliton.cli import main, parser_for
from soliton.config import EngineConfig
from soliton.errors import ConfigError
from soliton.train import data, losses
from soliton.train.evaluate import draft_latency, engine_for, evaluator_for, replace_draft
from soliton.train.features import features
from soliton.train.options import TrainOptions
from soliton.train.run import drafter, train

pytestmark = pytest.mark.usefixtures("threads_as_before")

BLOCK, BLOCKS = 4, 7
PROMPT = prompts_of(320, (5,))[0]


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    for name in [name for name in os.environ if name.startswith("SOLITON_")]:
        monkeypatch.delenv(name)


def sizes(out: Path, **values: Any) -> dict[str, Any]:
    given = {"target": str(micro()), "data": str(out / "d.jsonl"), "out": str(out / "run"), "device": "cpu"}
    small = {"block": BLOCK, "layers": 1, "rank": 8, "width": 64, "batch": 1, "anchors": 64, "holdout": 0, "threads": 1}
    return {**given, **small, **values}


def flags(values: dict[str, Any]) -> list[str]:
    return [word for key, value in values.items() for word in ("--" + key.replace("_", "-"), str(value))]


def lines(out: Path, split: str | None = None) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in found if split in (None, line["split"])]


class TestOneSequence:
    def test_what_is_learnt_is_what_is_served(self, tmp_path: Path) -> None:
        options = TrainOptions(
            **sizes(tmp_path), steps=120, lr=5e-3, ce=1.0, l1=1.0, conf=0.0, temperatures="0", decay=0.0, eval_every=8,
            save_every=1000,
        )  # fmt: skip
        count = 1 + BLOCKS * (BLOCK + 1)
        evaluator = evaluator_for(options, [PROMPT], tokens=count, context=64, load=Engine.from_config)
        with evaluator.engine as target:
            ids = [*PROMPT, *target.generate(PROMPT, greedy(count)).token_ids]
            data.save([data.Sample(ids, ((len(PROMPT), len(ids)),))], options.data, {"target": "ling-micro"})
            seen: list[tuple[list[int], list[int]]] = []

            def evaluate(folder: Path, step: int) -> dict[str, Any]:
                found = evaluator(folder, step)
                served = list(target.generate(PROMPT, greedy(count)).stats.accept_lengths)[1:]
                seen.append((served, learnt(target, options, folder, ids)))
                return found

            result = train(options, engine=target, evaluate=evaluate)
        # at every stage the same blocks are accepted, place by place
        assert all(served == known for served, known in seen)
        assert len({sum(served) / len(served) for served, _ in seen}) > 2
        # and at the end all of them, whole
        assert seen[-1][0] == [BLOCK + 1] * BLOCKS
        ev, tr = result.lines["eval"], result.lines["train"]
        assert ev["accept_length"] == BLOCK + 1 and ev["accepted"] == [1.0] * BLOCK
        assert (ev["steps"], ev["prompts"], ev["excluded"]) == (BLOCKS, 1, 0)
        # the trainer's own number over all anchors, of which the last few have less than a block left to draft
        anchors = range(len(PROMPT), len(ids) - 1)
        most = 1 + sum(min(BLOCK, len(ids) - 1 - at) for at in anchors) / len(anchors)
        assert tr["tau_greedy"] == pytest.approx(most)


def learnt(target: Any, options: TrainOptions, folder: Path, ids: Sequence[int]) -> list[int]:
    """Accept lengths along ``ids`` by the trainer's metric tau_greedy: block after block, each from where the one
    before was cut."""
    values = {**vars(options), "start": str(folder)}
    model = drafter(TrainOptions(**values), target._ready())
    taps, hidden = features(target._ready(), ids, model.spec.taps)
    row, at, found = torch.tensor([list(ids)]), len(PROMPT), []
    mask = torch.ones(1, len(ids), dtype=torch.bool)
    while at < len(ids) - 1:
        anchors = torch.tensor([[at]])
        with torch.no_grad():
            block = model(taps[None], row, anchors, torch.ones(1, 1, dtype=torch.bool))
            places = (at + torch.arange(BLOCK)).clamp(max=len(ids) - 1)
            law = model.target_logits(hidden[places])[None]
        live = losses.supervised(mask, anchors, torch.ones(1, 1, dtype=torch.bool), BLOCK)[0]
        labels = row[0][(places + 1).clamp(max=len(ids) - 1)][None]
        sums = losses.sums(options.objective(), block.logits[0], law, None, labels, live)
        tau = losses.metrics(sums, losses.totals([live], None))["tau_greedy"]
        assert isinstance(tau, float)
        # the token after the last accepted one is the target's own, where the answer goes on
        found.append(min(round(tau), len(ids) - 1 - at))
        at += found[-1]
    return found


class TestReplace:
    def test_it_serves_as_if_it_had_been_loaded(self, tmp_path: Path) -> None:
        first, second = d.random_draft(micro(), seed=1), d.DATA / "dspark-ling-micro"
        like = d.write(micro(), json.loads((second / "config.json").read_text(encoding="utf-8")), 1, {})
        common: dict[str, Any] = {"speculation": "dspark", "max_context": 128}
        prompts = [*prompts_of(320, (5, 40)), list(range(60))]
        with load(micro(), draft=str(like), **common) as one, load(micro(), draft=str(second), **common) as other:
            runtime = one._ready()
            assert runtime.parts.drafter is not None
            before = [t.data_ptr() for t in tensors(runtime.parts.drafter.weights)]
            worse = [one.generate(p, greedy(40)).stats.accept_lengths for p in prompts]
            replace_draft(runtime, open_draft(second))
            assert [t.data_ptr() for t in tensors(runtime.parts.drafter.weights)] == before
            for _ in range(2):  # the second answers come from prefixes, which hold the new features
                mine, theirs = ([e.generate(p, greedy(40)) for p in prompts] for e in (one, other))
                assert [facts(a) for a in mine] == [facts(a) for a in theirs]
                assert [a.stats.accept_lengths for a in mine] == [a.stats.accept_lengths for a in theirs]
            assert [a.stats.accept_lengths for a in mine] != worse
            draft_latency(one, context=50)
            assert [one.generate(p, greedy(40)).stats.accept_lengths for p in prompts] == [
                a.stats.accept_lengths for a in mine
            ]
            with pytest.raises(ConfigError, match=r"its block is 5|its \w+ is .* that of the loaded draft"):
                replace_draft(runtime, open_draft(first))

    def test_calibration_comes_with_the_draft(self) -> None:
        drafts = [d.write(micro(), d.config_for(micro()), seed, {}) for seed in (1, 2)]
        values = {"temperatures": [1.5] * open_draft(drafts[1]).spec.drafts}
        (drafts[1] / "calibration.json").write_text(json.dumps(values), encoding="utf-8")
        settings: dict[str, Any] = {"draft_verify": "threshold", "draft_threshold": 0.4, "speculation": "dspark"}
        with load(micro(), draft=str(drafts[0]), max_context=64, **settings) as target:
            scheduler = target._ready().parts.drafter.scheduler  # type: ignore[union-attr]
            assert scheduler is not None and scheduler.temperatures.tolist() == [1.0] * len(values["temperatures"])
            replace_draft(target._ready(), open_draft(drafts[1]))
            assert scheduler.temperatures.tolist() == values["temperatures"]

    def test_an_engine_without_a_draft(self) -> None:
        with pytest.raises(ConfigError, match="no draft is loaded"):
            replace_draft(
                engine(micro(), speculation="off", max_context=64)._ready(), open_draft(d.random_draft(micro()))
            )

    def test_a_draft_that_knows_nothing_is_lossless(self) -> None:
        config = EngineConfig(model=str(micro()), device="cpu", threads=1, max_context=64, speculation="off")
        plain = engine(micro(), speculation="off", max_context=64)
        with engine_for(config, open_draft(d.DATA / "dspark-ling-micro").spec, Engine.from_config) as made:
            assert facts(made.generate(PROMPT, greedy(20))) == facts(plain.generate(PROMPT, greedy(20)))


def tensors(weights: Any) -> list[torch.Tensor]:
    from soliton.train.evaluate import _tensors

    return list(_tensors(weights))


class TestEvaluator:
    def test_it_counts_what_it_leaves_out(self, tmp_path: Path) -> None:
        draft = d.DATA / "dspark-ling-micro"
        with load(micro(), draft=str(draft), speculation="dspark", max_context=64) as target:
            prompts = [PROMPT, list(range(64)), [999999], *prompts_of(320, (3, 4))]
            evaluator = evaluator_of(target, prompts, 30)
            found = evaluator(draft, 0)
            answers = [target.generate(p, greedy(30, ignore_eos=False)) for p in (PROMPT, *prompts_of(320, (3, 4)))]
        later = [n for a in answers for n in a.stats.accept_lengths[1:]]
        assert (found["prompts"], found["refused"], found["excluded"], found["steps"]) == (3, 2, 0, len(later))
        assert found["accept_length"] == sum(later) / len(later)
        assert found["accepted"] == [sum(n > k for n in later) / len(later) for k in range(1, 6)]
        assert found["accept_length"] == pytest.approx(1 + sum(found["accepted"]))

    def test_no_prompt_is_left(self) -> None:
        with pytest.raises(ConfigError, match="none of 1 prompts"):
            evaluator_of(engine(micro(), speculation="off", max_context=64), [list(range(64))], 30)


def evaluator_of(target: Engine, prompts: list[Any], tokens: int) -> Any:
    from soliton.train.evaluate import Evaluator

    return Evaluator(target, prompts, tokens=tokens)


def write_prompts(path: Path, prompts: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), encoding="utf-8")
    return path


def make_data(out: Path, prompts: int = 5) -> Path:
    """Data of the target's own, and prompts beside them."""
    file = write_prompts(out / "p.jsonl", prompts_of(320, tuple(range(3, 3 + prompts))))
    words = ["train", "data", str(micro()), "--prompts", str(file), "--out", str(out / "d.jsonl"), "--device", "cpu"]
    assert main([*words, "--max-tokens", "20", "--max-context", "64", "--json"]) == 0
    return file


class TestData:
    def test_parts_joined_are_the_whole(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        prompts = write_prompts(
            tmp_path / "p.jsonl", ["abc", "the thing in the abc", "a" * 200, "b", "ST", "xyz", "in"]
        )
        packed = tmp_path / "p.jsonl.gz"
        packed.write_bytes(gzip.compress(prompts.read_bytes()))
        words = ["train", "data", str(nano()), "--device", "cpu", "--max-context", "128", "--max-tokens", "24"]
        words += ["--seed", "5", "--answers", "2", "--temperatures", "0,0.8", "--top-p", "1,0.9", "--json", "--out"]
        assert main([*words, str(tmp_path / "whole.jsonl"), "--prompts", str(prompts)]) == 0
        parts = [tmp_path / f"part{i}.jsonl" for i in range(3)]
        for i, part in enumerate(parts):
            assert main([*words, str(part), "--prompts", str(packed), "--part", f"{i}/3"]) == 0
        joined = tmp_path / "joined.jsonl"
        assert main(["train", "data", "--merge", *map(str, reversed(parts)), "--out", str(joined)]) == 0
        report = json.loads(capsys.readouterr().out.splitlines()[-1])
        whole = data.load(tmp_path / "whole.jsonl")
        assert data.load(joined) == whole and report["sha256"] == whole.digest
        assert 8 < len(whole.samples) < 14 and {s.source["setting"] for s in whole.samples} == {0, 1}
        assert joined.read_text().splitlines()[:-1] == (tmp_path / "whole.jsonl").read_text().splitlines()[:-1]
        for files, word in (([parts[0], parts[0]], "both answer prompt 0"), ([parts[0], other(tmp_path)], "no part")):
            assert main(["train", "data", "--merge", *map(str, files), "--out", str(tmp_path / "no.jsonl")]) == 2
            assert word in capsys.readouterr().err

    def test_a_part_goes_on_and_knows_its_own(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file = make_data(tmp_path)
        words = ["train", "data", str(micro()), "--prompts", str(file), "--device", "cpu", "--max-tokens", "20"]
        words += ["--max-context", "64", "--json", "--out"]
        assert main([*words, str(tmp_path / "a.jsonl"), "--part", "1/2"]) == 0
        made = (tmp_path / "a.jsonl").read_text().splitlines()
        begun = tmp_path / "b.jsonl.part"  # as a killed process leaves it, in the middle of a line
        begun.write_text("\n".join([made[0], "null", made[1], "null", made[2][:9]]))
        assert main([*words, str(tmp_path / "b.jsonl"), "--part", "0/2"]) == 2
        assert "answers of another part than 0/2" in capsys.readouterr().err
        assert main([*words, str(tmp_path / "b.jsonl"), "--part", "1/2"]) == 0
        assert (tmp_path / "b.jsonl").read_text().splitlines() == made

    def test_texts(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "a.txt").write_text("the thing in the abc " * 9)
        words = ["train", "data", str(nano()), "--texts", str(tmp_path / "a.txt"), "--max-length", "30"]
        assert main([*words, "--device", "cpu", "--out", str(tmp_path / "t.jsonl")]) == 0
        said = capsys.readouterr().out
        assert "supervised tokens" in said and json.loads(said.splitlines()[-1])["longest"] == 30


def other(folder: Path) -> Path:
    data.save([data.Sample((1, 2, 3), ((1, 3),), {"prompt": 1})], folder / "other.jsonl", {"target": "x"})
    return folder / "other.jsonl"


class TestDraft:
    def test_interrupted_it_goes_on(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prompts = make_data(tmp_path)
        values = sizes(tmp_path, steps=6, batch=2, holdout=1, eval_every=2, save_every=100, max_length=60)
        extra = ["--eval-prompts", str(prompts), "--eval-limit", "2", "--eval-tokens", "16", "--eval-context", "64"]
        whole = {**values, "out": str(tmp_path / "whole")}
        capsys.readouterr()
        assert main(["train", "dspark", *flags(whole), *extra]) == 0
        said = capsys.readouterr()
        assert "accepted by position" in said.out and "step 2: accept length" in said.err
        assert json.loads(said.out.splitlines()[-1])["eval"]["step"] == 6
        from soliton.train.trainer import Trainer

        advance = Trainer._advance

        def interrupted(self: Trainer) -> dict[str, Any]:
            if self.step == 3:
                signal.raise_signal(signal.SIGINT)
            return advance(self)

        handler = signal.getsignal(signal.SIGINT)
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "_advance", interrupted)
            assert main(["train", "dspark", *flags(values), *extra, "--json"]) == 130
        assert signal.getsignal(signal.SIGINT) == handler
        said = capsys.readouterr()
        stopped = json.loads(said.out)
        assert (stopped["steps"], stopped["finished"]) == (4, False) and "stopping after this step" in said.err
        assert main(["train", "dspark", *flags(values), *extra, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["finished"] and found["steps"] == 6 and found["draft"] == str(tmp_path / "run/draft")
        assert lines(tmp_path / "run") == lines(tmp_path / "whole")
        assert main(["train", "dspark", *flags(values), *extra, "--json"]) == 0  # nothing is left to do
        assert json.loads(capsys.readouterr().out) == found

    def test_two_processes_at_one_place(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        make_data(tmp_path, 3)
        values = sizes(tmp_path, steps=1)
        (tmp_path / "run").mkdir()
        with (tmp_path / "run/.lock").open("w") as held:
            held.write("4711\n")
            held.flush()
            fcntl.flock(held, fcntl.LOCK_EX)
            assert main(["train", "dspark", *flags(values)]) == 2
            assert "process 4711 writes there" in capsys.readouterr().err
        assert main(["train", "dspark", *flags(values)]) == 0
        said = capsys.readouterr()
        assert "eval" not in said.out and "steps" in said.out


class TestAblate:
    def test_the_table(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        prompts = make_data(tmp_path)
        values = sizes(tmp_path, steps=2, batch=2, holdout=1)
        words = ["train", "ablate", *flags(values), "--eval-prompts", str(prompts), "--eval-limit", "2"]
        words += ["--eval-tokens", "16", "--eval-context", "64", "--seeds", "0,1"]
        capsys.readouterr()
        assert main([*words, "--grid", "markov=vanilla,none", "layers=1"]) == 0
        said = capsys.readouterr().out
        assert "draft µs" in said and "over the seeds" in said and "markov=none,layers=1,seed=1" in said
        found = json.loads(said.splitlines()[-1])
        assert [run["run"] for run in found["runs"]] == [
            f"markov={markov},layers=1,seed={seed}" for markov in ("vanilla", "none") for seed in (0, 1)
        ]
        assert all(run["eval"]["draft_us"] > 0 and run["eval"]["accept_length"] >= 1 for run in found["runs"])
        assert json.loads((tmp_path / "run/ablation.json").read_text()) == found["runs"]
        assert [mean["setting"] for mean in found["means"]] == ["markov=vanilla,layers=1", "markov=none,layers=1"]
        grid = tmp_path / "grid.json"
        grid.write_text(json.dumps([{"markov": "none", "layers": 1}]))
        assert main([*words, "--grid", str(grid), "--json"]) == 0  # finished ones are not trained again
        again = json.loads(capsys.readouterr().out)
        assert [run["eval"] for run in again["runs"]] == [run["eval"] for run in found["runs"][2:]]


ABLATE = ["train", "ablate", "pebble", "--data", "d", "--out", "o", "--eval-prompts", "p", "--grid"]


class TestFlags:
    def test_no_two_arguments_of_one_name(self) -> None:
        for part in ("data", "dspark", "ablate"):
            parser = parser_for("train", part)
            names = [action.dest for action in parser._actions]
            assert len(names) == len(set(names)) and "SOLITON_STEPS" not in parser.format_help()

    @pytest.mark.parametrize(
        ("words", "says"),
        [
            (["train"], "what"),
            (["train", "model"], "invalid choice: 'model'"),
            (["train", "data"], "found none"),
            (["train", "data", "x", "--prompts", "p", "--texts", "t"], "found --prompts and --texts"),
            (["train", "data", "x", "--prompts", "p"], "--out is not set"),
            (["train", "data", "--prompts", "p", "--out", "o.jsonl"], "no target"),
            (["train", "data", "x", "--prompts", "p", "--out", "."], "there is a file already"),
            (["train", "data", "x", "--prompts", "p", "--out", "o.jsonl", "--temperatures", "0,x"], "'0,x'"),
            (["train", "data", "x", "--prompts", "p", "--out", "o.jsonl", "--top-p", "1,1"], "has 2 values beside 3"),
            (["train", "data", "x", "--prompts", "p", "--out", "o.jsonl", "--temperatures", "-1"], "temperature is -1"),
            (["train", "data", "x", "--prompts", "p", "--out", "o.jsonl", "--part", "2/2"], "from 0 to N - 1"),
            (["train", "data", "x", "--prompts", "p", "--out", "o.jsonl", "--answers", "0"], "--answers 0"),
            (["train", "data", "x", "--texts", "t", "--out", "o.jsonl", "--part", "0/2"], "leave it out"),
            (["train", "data", "x", "--prompts", "no.jsonl.gz", "--out", "o.jsonl"], "no.jsonl.gz: cannot be read"),
            (["train", "data", "--merge", "no.jsonl", "--out", "o.jsonl"], "no.jsonl: cannot be read"),
            (["train", "dspark"], "target is not set"),
            (["train", "dspark", "pebble"], "data is not set"),
            (["train", "dspark", "pebble", "--data", "no.jsonl", "--out"], "--out"),
            (["train", "dspark", "pebble", "--target", "pebble"], "two targets"),
            (["train", "dspark", "pebble", "--data", "d", "--out", "o", "--markov", "lstm"], "lstm"),
            (["train", "dspark", "pebble", "--data", "d", "--out", "o", "--stepz", "3"], "did you mean '--steps'"),
            (["train", "dspark", "pebble", "--data", "d", "--out", "o", "--eval-tokens", "1"], "--eval-tokens 1"),
            (["train", "dspark", "pebble", "--data", "d", "--out", "o", "--eval-prompts", "no"], "no: cannot be read"),
            (["train", "ablate", "pebble", "--data", "d", "--out", "o"], "--grid is not set"),
            ([*ABLATE, "layers"], "key=a,b"),
            ([*ABLATE, "layer=1,2"], "did you mean 'layers'"),
            ([*ABLATE, "layers=1,x"], "--layers = 'x'"),
            ([*ABLATE, "steps=1,2"], "part of what all runs share"),
            ([*ABLATE, "layers=1", "layers=2"], "names layers twice"),
            ([*ABLATE, "no.json"], "no.json: no JSON can be read"),
            ([*ABLATE, "layers=1", "--seeds", "a"], "'a'"),
        ],
    )
    def test_refusals(
        self, words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:  # fmt: skip
        monkeypatch.chdir(tmp_path)
        assert main(words) == 2
        said = capsys.readouterr()
        assert says in said.err and said.out == "" and said.err.count("\n") == 1
        assert not list(tmp_path.iterdir())
