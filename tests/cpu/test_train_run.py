"""A run: it learns, goes on bit for bit, and survives kills, full disks and numbers that are none."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helpers import engine, micro, nano, prompts_of, threads_as_before  # noqa: F401
from soliton import SamplingParams
from soliton.checkpoint.draft import check_fit, open_draft
from soliton.errors import CheckpointError, ConfigError
from soliton.model.draft_spec import shapes
from soliton.train import checkpoints, data
from soliton.train.errors import DiskError, NonFiniteError
from soliton.train.export import config_of, export
from soliton.train.features import Features, features
from soliton.train.options import TrainOptions
from soliton.train.run import ablate, default_taps, draft_spec, train
from train_cases import CASE, curve, target, toy, toy_options, toy_source

pytestmark = pytest.mark.usefixtures("threads_as_before")


@contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch, room: int) -> Iterator[None]:
    """Writes of tensors fail after half of the file once ``room`` of them have been made."""
    real, made = checkpoints.save_file, [0]

    def save(tensors: Any, path: Path, **more: Any) -> None:
        real(tensors, path, **more)
        made[0] += 1
        if made[0] > room:
            os.truncate(path, path.stat().st_size // 2)
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "save_file", save)
        yield


class TestLearning:
    def test_one_batch_is_learnt(self, tmp_path: Path) -> None:
        found = toy(tmp_path, steps=60, sequences=3, save_every=100, lr=1e-2).run()
        lines = curve(tmp_path)
        assert found.finished and len(lines) == 60
        assert lines[-1]["loss"] < 0.7 * lines[0]["loss"]
        assert lines[-1]["tau"] > lines[0]["tau"] + 0.3

    @pytest.mark.parametrize(
        "values", [{"accept": 0.5, "accept_ramp": 10}, {"temperatures": "1,0.5,0"}, {"ema": 0.9}, {"optimizer": "muon"}]
    )
    def test_other_objectives_learn_too(self, tmp_path: Path, values: dict[str, Any]) -> None:
        toy(tmp_path, steps=40, sequences=3, save_every=100, lr=1e-2, **values).run()
        lines = curve(tmp_path)
        assert lines[-1]["l1"] < lines[0]["l1"]

    @pytest.mark.parametrize("markov", ["vanilla", "gated", "rnn", "none"])
    def test_bfloat16_products_give_nearly_the_same_curve(self, tmp_path: Path, markov: str) -> None:
        """As on a GPU: autocast, the target's tensors and features in bfloat16, trained weights in float32."""
        plain = toy_source(len(default_taps(6)), 64, 320)
        values = {"steps": 5, "markov": markov, "save_every": 9}
        toy(tmp_path / "wide", **values).run()
        made = toy(tmp_path / "narrow", source=lambda ids: tuple(x.bfloat16() for x in plain(ids)), **values)
        made.model.embed, made.model.head = made.model.embed.bfloat16(), made.model.head.bfloat16()
        made._cast = lambda: torch.autocast("cpu", torch.bfloat16)  # type: ignore[method-assign]
        made.run()
        assert all(p.dtype == torch.float32 for p in made.model.parameters())
        for narrow, wide in zip(curve(tmp_path / "narrow"), curve(tmp_path / "wide"), strict=True):
            assert narrow["loss"] == pytest.approx(wide["loss"], rel=0.01)
            assert narrow["confidence"] == pytest.approx(wide["confidence"], rel=0.02)

    @pytest.mark.parametrize("only", ["confidence_head", "fc,layers.0.mlp", "layers.0.self_attn.q_proj"])
    @pytest.mark.parametrize("optimizer", ["adamw", "muon"])
    def test_only_some_tensors(self, tmp_path: Path, only: str, optimizer: str) -> None:
        toy(tmp_path / "a", steps=2, save_every=1, only=only, start="given", optimizer=optimizer).run()
        one = toy(
            tmp_path / "b", steps=2, save_every=1, only=only, start="given", optimizer=optimizer, stop=lambda: False
        )
        fresh = {name: p.detach().clone() for name, p in one.model.named_parameters()}
        one.run()
        for name, p in one.model.named_parameters():
            assert torch.equal(p, fresh[name]) != name.startswith(tuple(only.split(","))), name
        again = toy(tmp_path / "a", steps=2, save_every=1, only=only, start="given", optimizer=optimizer)
        again.run()  # ended already: what it read back is what the other run has
        assert all(torch.equal(p, q) for p, q in zip(again.model.parameters(), one.model.parameters()))

    @pytest.mark.parametrize(("only", "conf"), [("nothing", 1.0), ("fc,", 1.0), ("", 1.0), ("confidence_head", 0.0)])
    def test_what_cannot_be_trained_alone(self, tmp_path: Path, only: str, conf: float) -> None:
        with pytest.raises(ConfigError, match="only = "):
            toy(tmp_path, only=only, start="given", conf=conf).run()

    def test_the_learning_rate(self, tmp_path: Path) -> None:
        made = toy(tmp_path, steps=100, warmup=0.1, lr=1.0, lr_floor=0.1)
        rates = [made.learning_rate(step) for step in range(100)]
        assert rates[0] == 0.1 and rates[9] == rates[10] == 1.0
        assert rates[10:] == sorted(rates[10:], reverse=True) and 0.1 < rates[-1] < 0.11

    def test_validation_and_the_caller_s_evaluation(self, tmp_path: Path) -> None:
        seen: list[tuple[Path, int]] = []

        def evaluate(folder: Path, step: int) -> dict[str, float]:
            seen.append((folder, step))
            assert open_draft(folder).spec.block == 3
            return {"accept_length": 1.0 + step}

        found = toy(tmp_path, steps=5, holdout=2, eval_every=2, evaluate=evaluate).run()
        assert [step for _, step in seen] == [2, 4, 5] and seen[0][0] == tmp_path / "draft"
        assert found.lines["eval"]["accept_length"] == 6.0 and found.lines["valid"]["step"] == 5


class TestGoingOn:
    @pytest.mark.parametrize("values", [{}, {"ema": 0.9, "save_every": 3}, {"optimizer": "muon"}])
    def test_the_curve_is_the_same_bit_for_bit(self, tmp_path: Path, values: dict[str, Any]) -> None:
        toy(tmp_path / "whole", **values).run()
        for stops in (5, 1, 4, 100):
            left = [stops]

            def stop(left: list[int] = left) -> bool:
                left[0] -= 1
                return left[0] < 0

            found = toy(tmp_path / "parts", stop=stop, **values).run()
        assert found.finished
        assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
        first, second = (load_file(tmp_path / part / "draft/model.safetensors") for part in ("parts", "whole"))
        assert all(torch.equal(first[name], second[name]) for name in second)

    def test_lines_after_the_last_checkpoint_are_written_again(self, tmp_path: Path) -> None:
        toy(tmp_path, save_every=4).run()
        whole = curve(tmp_path)
        for step in (12,):
            shutil.rmtree(tmp_path / f"checkpoints/step-{step:08d}")
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"split": "tra')
        toy(tmp_path, save_every=4).run()
        assert curve(tmp_path) == whole

    @pytest.mark.parametrize("values", [{"lr": 1e-4}, {"sequences": 6, "seed": 9}, {"block": 4}])
    def test_another_run_s_directory_is_refused(self, tmp_path: Path, values: dict[str, Any]) -> None:
        toy(tmp_path, steps=2).run()
        with pytest.raises(ConfigError, match="choose another out"):
            toy(tmp_path, steps=2, **values).run()

    def test_what_changes_no_weight_may_change(self, tmp_path: Path) -> None:
        toy(tmp_path, steps=3).run()
        assert toy(tmp_path, steps=3, save_every=7, keep=9, log_every=2).run().finished

    def test_the_last_ones_are_kept_and_say_what_they_are(self, tmp_path: Path) -> None:
        toy(tmp_path, steps=6, keep=2, provenance={"commit": "abc"}).run()
        root = tmp_path / "checkpoints"
        assert checkpoints.steps(root) == [5, 6] and (root / "latest").read_text() == "step-00000006"
        kept = json.loads((root / "step-00000006/provenance.json").read_text())
        assert kept["commit"] == "abc" and kept["step"] == 6
        assert kept["binding"]["data"] == "toy" and kept["binding"]["target"] == "ling-micro"

    def test_a_broken_newest_checkpoint_falls_back(self, tmp_path: Path) -> None:
        toy(tmp_path, steps=6).run()
        whole = curve(tmp_path)
        os.truncate(tmp_path / "checkpoints/step-00000006/state.safetensors", 1000)
        assert checkpoints.newest(tmp_path / "checkpoints").step == 5
        toy(tmp_path, steps=6).run()
        assert curve(tmp_path) == whole and checkpoints.newest(tmp_path / "checkpoints").step == 6


class TestTrouble:
    def test_a_nan_stops_and_names_step_and_term(self, tmp_path: Path) -> None:
        plain, calls = toy_source(len(default_taps(6)), 64, 320), [0]

        def source(ids: Sequence[int]) -> Any:
            taps, last = plain(ids)
            calls[0] += 1
            return (taps, last * float("nan")) if calls[0] > 12 else (taps, last)

        with pytest.raises(NonFiniteError, match=r"step 5: the term l1 is nan; checkpoint 4 is intact") as caught:
            toy(tmp_path, source=source).run()
        assert caught.value.step == 5 and caught.value.term == "l1"
        toy(tmp_path).run()
        toy(tmp_path / "whole").run()
        assert curve(tmp_path) == curve(tmp_path / "whole")

    def test_a_gradient_that_is_not_finite(self, tmp_path: Path) -> None:
        made = toy(tmp_path)
        p = dict(made.model.named_parameters())["fc.weight"]
        p.register_hook(lambda grad: grad * float("inf"))
        before = {k: v.clone() for k, v in made.model.state_dict().items()}
        with pytest.raises(NonFiniteError, match=r"gradient of fc\.weight is not finite; no checkpoint"):
            made.run()
        assert all(torch.equal(v, before[k]) for k, v in made.model.state_dict().items())

    @pytest.mark.parametrize("room", [0, 1, 4])
    def test_a_full_disk_loses_no_checkpoint(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        root = tmp_path / "checkpoints"
        with full_disk(monkeypatch, room), pytest.raises(DiskError, match="the disk is full"):
            toy(tmp_path, keep=2).run()
        found = checkpoints.newest(root)
        assert (found.step if found else 0) == room
        assert not [path for path in root.iterdir() if path.name.startswith(".")]
        toy(tmp_path, keep=2).run()
        toy(tmp_path / "whole").run()
        assert curve(tmp_path) == curve(tmp_path / "whole")

    def test_too_little_room_is_seen_beforehand(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        usage = shutil.disk_usage(tmp_path)._replace(free=1000)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
        with pytest.raises(DiskError, match=r"step 1 needs [\d,]+ bytes, but .* has 1,000 free"):
            toy(tmp_path).run()

    def test_nothing_to_train_on(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="7 of its 7 sequences"):
            toy(tmp_path, holdout=7)

    @pytest.mark.parametrize(
        ("values", "word"),
        [
            ({"temperatures": "1,x"}, "temperatures"),
            ({"temperatures": "-1"}, "from 0 to 100"),
            ({"ce": 0.0, "l1": 0.0, "conf": 0.0}, "nothing would be trained"),
            ({"warmup": 1.5}, "warmup"),
            ({"markov": "lstm"}, "markov"),
            ({"only": "confidence_head"}, "would stay random"),
            ({"conf_reached": True, "confidence": False}, "no confidence head"),
        ],
    )
    def test_settings_that_cannot_be(self, tmp_path: Path, values: dict[str, Any], word: str) -> None:
        with pytest.raises(ConfigError, match=word):
            toy_options(tmp_path, **values)

    @pytest.mark.parametrize("values", [{"taps": "1,5"}, {"taps": "2,1"}, {"heads": 3, "kv_heads": 2}, {"head_dim": 3}])
    def test_drafts_that_cannot_be(self, tmp_path: Path, values: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=next(reversed(values))):
            draft_spec(toy_options(tmp_path, **values), target())


class TestKilled:
    def test_at_random_moments(self, tmp_path: Path) -> None:
        """Processes killed while they train and save; what they leave goes on to the same curve."""
        toy(tmp_path / "whole", steps=40).run()
        body = (
            "import sys, torch; torch.set_num_threads(1); sys.path.insert(0, sys.argv[1])\n"
            "from pathlib import Path; from train_cases import toy\n"
            "print('ready', flush=True); toy(Path(sys.argv[2]), steps=40).run()"
        )
        command = [sys.executable, "-c", body, str(Path(__file__).parents[1]), str(tmp_path / "killed")]
        dice, ended = random.Random(os.getpid()), False
        steps = []
        for _ in range(4):
            with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
                assert child.stdout is not None and child.stdout.readline() == b"ready\n"
                time.sleep(dice.uniform(0.05, 0.5))
                child.send_signal(signal.SIGKILL)
            kept = checkpoints.newest(tmp_path / "killed/checkpoints")
            steps.append(kept.step if kept else 0)
        assert steps == sorted(steps)
        torch.set_num_threads(1)
        toy(tmp_path / "killed", steps=40).run()
        ended = curve(tmp_path / "killed") == curve(tmp_path / "whole")
        assert ended, f"killed after steps {steps}"
        names = sorted(path.name for path in (tmp_path / "killed/checkpoints").iterdir())
        assert names == ["latest", "step-00000038", "step-00000039", "step-00000040"]


class TestExport:
    def test_the_layout_is_the_conformance_case_s(self, tmp_path: Path) -> None:
        draft, weights = open_draft(CASE), load_file(CASE / "model.safetensors")
        state = {name: weights[name].float() for name in shapes(draft.spec)}
        vocab = (weights["embed_tokens.weight"], weights["lm_head.weight"])
        export(tmp_path, draft.spec, state, target(), anchors=8, vocab=vocab)
        golden = json.loads((CASE / "config.json").read_text())
        assert json.loads((tmp_path / "config.json").read_text()) == golden
        stored = load_file(tmp_path / "model.safetensors")
        assert stored.keys() == weights.keys()
        assert all(torch.equal(stored[name], weights[name]) for name in weights)

    def test_what_a_published_draft_says_of_itself(self, tmp_path: Path) -> None:
        """Names instead of paths, the earlier calls, and no temperatures of other weights."""
        for steps, began in ((2, "first"), (4, "then")):
            arguments = {"out": str(tmp_path), "data": "/some/where/data.jsonl", "lr": 1.0, "features": None}
            given = {"arguments": arguments, "started": began, "commit": began, "versions": {}}
            trained = toy(tmp_path, steps=4, stop=lambda n=[steps]: n.append(n.pop() - 1) or n[0] < 0, provenance=given)
            draft = trained.run().draft
            said = json.loads((draft / "provenance.json").read_text())
            assert not (draft / "calibration.json").exists()
            (draft / "calibration.json").write_text("{}")
        assert said["arguments"] == {"out": tmp_path.name, "data": "data.jsonl", "lr": 1.0, "features": None}
        assert said["started"] == "then" and [one["to_step"] for one in said["earlier"]] == [2]
        assert said["earlier"][0]["commit"] == "first" and str(tmp_path) not in json.dumps(said)

    @pytest.mark.parametrize("markov", ["none", "vanilla", "gated", "rnn"])
    def test_the_engine_opens_it(self, tmp_path: Path, markov: str) -> None:
        found = toy(tmp_path, steps=1, markov=markov, kv_heads=1)
        opened = open_draft(found.run().draft)
        said = json.loads((tmp_path / "draft" / "provenance.json").read_text())
        assert said["step"] == 1 and said["data"] == "toy" and "earlier" not in said
        check_fit(opened.spec, target())
        for key, value in vars(found.model.spec).items():
            assert key == "name" or getattr(opened.spec, key) == value, key
        for name, p in found.model.named_parameters():
            assert torch.equal(opened.tensor(name), p.detach().bfloat16())
        assert not opened.has("lm_head.weight")

    def test_other_families_are_qwen3_s(self) -> None:
        import dataclasses

        spec = dataclasses.replace(target(), family="kimi_linear")
        assert config_of(open_draft(CASE).spec, spec, anchors=1)["architectures"] == ["Qwen3DSparkModel"]

    def test_tensors_that_do_not_fit(self, tmp_path: Path) -> None:
        spec = open_draft(CASE).spec
        with pytest.raises(CheckpointError, match="fc.weight"):
            export(tmp_path, spec, {n: torch.zeros(s) for n, s in shapes(spec).items() if n != "fc.weight"},
                   target(), anchors=1)  # fmt: skip
        assert not list(tmp_path.iterdir())


class TestData:
    def test_answers_of_the_target(self, tmp_path: Path) -> None:
        target_ = engine(micro(), speculation="off", max_context=64)
        settings = [SamplingParams(temperature=t, max_tokens=8, ignore_eos=True) for t in (0.0, 1.0)]
        prompts = prompts_of(320, (3, 5, 4))
        made = data.answer(target_, prompts, settings, tmp_path / "a.jsonl", answers=2, least=2)
        assert len(made.samples) == 6 and made.head["target"] == "ling-micro"
        first = made.samples[0]
        assert list(first.ids[:3]) == prompts[0] and first.spans == ((3, 11),)
        assert [s.source["setting"] for s in made.samples] == [0, 1, 1, 0, 0, 1]
        greedy = target_.generate(prompts[0], settings[0]).token_ids
        assert list(first.ids[3:]) == greedy
        # a call that was interrupted leaves lines, the last perhaps torn, and goes on
        lines = (tmp_path / "a.jsonl").read_text().splitlines()
        (tmp_path / "b.jsonl.part").write_text("\n".join([*lines[:3], lines[3][:9]]))
        again = data.answer(target_, prompts, settings, tmp_path / "b.jsonl", answers=2, least=2)
        assert again == made and not list(tmp_path.glob("*.part"))

    def test_texts_and_completions(self, tmp_path: Path) -> None:
        target_ = engine(nano(), speculation="off", max_context=64)
        (tmp_path / "a.txt").write_text("the thing in the abc " * 4)
        (tmp_path / "b.jsonl").write_text('{"prompt": "abc", "completion": "the thing in"}\n')
        made = data.from_texts(target_, [tmp_path / "a.txt", tmp_path / "b.jsonl"], tmp_path / "d.jsonl",
                               max_length=16, least=3)  # fmt: skip
        whole = target_.encode("the thing in the abc " * 4)
        texts = [s for s in made.samples if s.source["file"] == "a.txt"]
        assert [token for s in texts for token in s.ids] == whole[: 16 * len(texts)]
        assert all(s.spans == ((0, len(s.ids)),) for s in texts)
        start = len(target_.encode("abc"))
        assert made.samples[-1].spans == ((start, len(target_.encode("abcthe thing in"))),)

    def test_a_changed_file_is_refused(self, tmp_path: Path) -> None:
        file = tmp_path / "a.jsonl"
        made = data.save([data.Sample((1, 2, 3), ((1, 3),))], file, {"target": "x"})
        assert made == data.load(file)
        text = file.read_text()
        for wrong in (text.replace("[1,2,3]", "[1,2,4]"), text.rsplit("\n", 2)[0], "", "{}\n"):
            file.write_text(wrong)
            with pytest.raises(ConfigError, match="make it"):
                data.load(file)

    def test_order_and_anchors_follow_from_the_place_alone(self) -> None:
        whole = data.order(3, 5, 0, 20)
        assert whole[7:12] == data.order(3, 5, 7, 5)
        assert [sorted(i for _, i in whole[at : at + 5]) for at in (0, 5, 10, 15)] == [[0, 1, 2, 3, 4]] * 4
        assert len({tuple(whole[at : at + 5]) for at in (0, 5, 10, 15)}) == 4

    def test_prompts_of_a_file(self, tmp_path: Path) -> None:
        file = tmp_path / "p.jsonl"
        file.write_text('{"prompt": "a"}\n\n{"messages": [{"role": "user", "content": "b"}]}\n')
        assert data.read_prompts(file) == ["a", [{"role": "user", "content": "b"}]]
        file.write_text('{"text": "a"}\n')
        with pytest.raises(ConfigError, match="line 1"):
            data.read_prompts(file)


class TestWithATarget:
    def test_features_are_the_prompt_s_taps_and_last_hidden(self) -> None:
        runtime = engine(micro(), speculation="off", max_context=64)._runtime
        assert runtime is not None
        golden = load_file(CASE / "golden.safetensors")
        prompt = json.loads((micro() / "golden.json").read_text())["prompts"][3]
        golden_target = load_file(micro() / "golden.safetensors")
        ids = golden_target.get("prompt.3.ids", torch.tensor(prompt.get("ids", [])))
        if not len(ids):
            pytest.skip("the case keeps its prompts elsewhere")
        taps, hidden = features(runtime, ids.tolist(), (0, 2, 4))
        torch.testing.assert_close(taps, golden["trace.taps"][: len(ids)], rtol=1e-3, atol=1e-3)
        assert hidden.shape == (len(ids), 64) and not taps.is_inference()

    def test_kept_features_are_the_live_ones(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        runtime = engine(micro(), speculation="off", max_context=64)._runtime
        assert runtime is not None
        kept, ids = Features(runtime, (1, 3), tmp_path), [5, 6, 7, 8]
        assert kept.check_space([ids, [1, 2]]) == 6 * 3 * 64 * 4
        first, again, live = kept(ids), kept(ids), features(runtime, ids, (1, 3))
        assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(first, again, live))
        assert kept.check_space([ids, [1, 2]]) == 2 * 3 * 64 * 4
        file = next(tmp_path.glob("*.safetensors"))
        os.truncate(file, 100)
        assert torch.equal(kept(ids)[0], live[0])
        held = Features(runtime, (1, 3), "memory")
        assert held.check_space([ids]) == 4 * 3 * 64 * 4 and held(ids)[0] is held(ids)[0]
        assert torch.equal(held(ids)[1], live[1]) and not Path("memory").exists()
        held = Features(runtime, (1, 3), tmp_path, memory=1e-6)
        assert held(ids)[0] is held(ids)[0] and held(ids[:2])[0] is not held(ids[:2])[0], "one fits"
        usage = shutil.disk_usage(tmp_path)._replace(free=10)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
        with pytest.raises(DiskError, match=r"needs 1,536 bytes, but .* has 10 free"):
            kept.check_space([[1, 2]])

    def test_a_run_and_a_series(self, tmp_path: Path) -> None:
        target_ = engine(micro(), speculation="off", max_context=64)
        settings = [SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)]
        data.answer(target_, prompts_of(320, (3, 4, 5, 6)), settings, tmp_path / "d.jsonl", least=2)
        values = {"target": "ling-micro", "data": str(tmp_path / "d.jsonl"), "block": 3, "layers": 1, "rank": 4}
        base = TrainOptions(**values, out=str(tmp_path / "runs"), steps=2, batch=2, anchors=4, holdout=1)
        rows = ablate([{}, {"markov": "none"}], base, seeds=(0, 1), engine=target_)
        assert [(row["overrides"], row["seed"]) for row in rows] == [
            ({}, 0), ({}, 1), ({"markov": "none"}, 0), ({"markov": "none"}, 1),
        ]  # fmt: skip
        assert all(row["train"]["step"] == 2 and row["valid"]["tau"] > 1 for row in rows)
        assert json.loads((tmp_path / "runs/ablation.json").read_text()) == rows
        again = ablate([{}], base, engine=target_)
        assert again[0]["valid"] == rows[0]["valid"]
        for grid, word in (({"steps": 3}, "budget"), ({"markow": "none"}, "did you mean 'markov'")):
            with pytest.raises(ConfigError, match=word):
                ablate([grid], base, engine=target_)
        # one that starts from another's draft, and keeps features
        start = str(next((tmp_path / "runs").glob("base,seed=0/draft")))
        told: list[str] = []
        options = TrainOptions(
            **values, out=str(tmp_path / "next"), steps=1, batch=1, start=start, features=str(tmp_path / "kept")
        )
        assert train(options, engine=target_, tell=told.append).finished and "bytes more" in told[0]
        said = json.loads((tmp_path / "next/draft/provenance.json").read_text())
        assert said["start"] == json.loads((Path(start) / "provenance.json").read_text())
        with pytest.raises(ConfigError, match="that draft has width"):
            train(TrainOptions(**values, width=16, out=str(tmp_path / "other"), start=start), engine=target_)


def test_default_taps() -> None:
    assert default_taps(36) == (1, 9, 17, 25, 33)
    assert default_taps(6) == (1, 2, 3) and default_taps(4) == (1,) and default_taps(2) == (0,)


class TestRefused:
    def test_data_of_another_target(self, tmp_path: Path) -> None:
        target_ = engine(micro(), speculation="off", max_context=64)
        for name, head, ids, message in (
            ("other", "pebble", [1, 2, 3], "was made for 'pebble', and the target is 'ling-micro'"),
            (
                "high",
                "ling-micro",
                [1, 320, 3],
                "sequence 1 holds token 320, but those of ling-micro run from 0 to 319",
            ),
        ):
            file = tmp_path / f"{name}.jsonl"
            data.save([data.Sample(ids, ((1, 3),))], file, {"target": head})
            options = TrainOptions(target="ling-micro", data=str(file), out=str(tmp_path / name), steps=1, block=2)
            with pytest.raises(ConfigError, match=message):
                train(options, engine=target_)

    def test_an_interrupted_call_with_other_settings(self, tmp_path: Path) -> None:
        out = tmp_path / "d.jsonl"
        part = tmp_path / "d.jsonl.part"
        part.write_text('{"format": 1, "target": "else"}\nnull\nnull\n', encoding="utf-8")
        target_ = engine(micro(), speculation="off", max_context=64)
        with pytest.raises(ConfigError, match="holds 2 answers of an interrupted call with other settings"):
            data.answer(target_, [[1, 2]], [SamplingParams(max_tokens=20, ignore_eos=True)], out)
        assert part.exists()

    def test_separators_inside_texts(self, tmp_path: Path) -> None:
        file = tmp_path / "p.jsonl"
        prompts = ["a\u2028b", "c\x85d"]
        file.write_text(
            "".join(json.dumps({"prompt": p}, ensure_ascii=False) + "\n" for p in prompts), encoding="utf-8"
        )
        assert data.read_prompts(file) == prompts

    def test_no_checkpoint_can_be_read(self, tmp_path: Path) -> None:
        toy(tmp_path / "run", steps=4).run()
        for file in (tmp_path / "run" / "checkpoints").glob("step-*/state.safetensors"):
            os.truncate(file, 10)
        with pytest.raises(ConfigError, match="none of its . checkpoints can be read"):
            toy(tmp_path / "run", steps=4).run()

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"lr": float("nan")}, "lr = nan"),
            ({"lr": float("inf")}, "lr = inf"),
            ({"clip": float("nan")}, "clip = nan"),
            ({"beta2": 1.0}, "beta2 = 1.0: at most"),
            ({"theta": 0.0}, "theta = 0.0: a base above 0"),
            ({"block": 32}, "block = 32: expected a whole number of rows from 1 to 16"),
        ],
    )
    def test_settings(self, values: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            TrainOptions(target="t", data="d", out="o", **values)
