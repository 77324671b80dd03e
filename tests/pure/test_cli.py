"""The command's flags and refusals: one line and exit code 2, before torch is imported."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from soliton.cli import COMMANDS, Parser, main, parser_for
from soliton.commands import common
from soliton.commands.generate import take_words
from soliton.config import EngineConfig, settings
from soliton.sampling.params import SamplingParams


def parsed(*words: str) -> argparse.Namespace:
    return parser_for("generate").parse_intermixed_args(list(words))


class TestWithoutTorch:
    def run(self, *lines: str) -> None:
        script = "\n".join(["import sys", "from soliton.cli import main", *lines, "assert 'torch' not in sys.modules"])
        subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=60)

    def test_help_of_every_command(self) -> None:
        lines = ["def end(words):", "    try: main(words)", "    except SystemExit as stop: assert stop.code == 0"]
        self.run(*lines, *(f"end([{name!r}, '--help'])" for name in COMMANDS), "end(['--help'])", "end(['--version'])")

    def test_refusals(self) -> None:
        wrong = [
            ["generate", "pebble", "hi", "--top-p", "3"],
            ["generate", "pebble", "hi", "--dtype", "float8"],
            ["chat", "--run-ahead", "9"],
            ["conform", "x", "--threads", "none of them"],
        ]
        self.run(*(f"assert main({words!r}) == 2" for words in wrong))


class TestRefusals:
    @pytest.mark.parametrize(
        ("words", "says"),
        [
            (["generat"], "did you mean 'generate'"),
            (["generate"], "give one prompt"),
            (["generate", "pebble"], "found none"),
            (["generate", "pebble", "hi", "--demo"], "found PROMPT and --demo"),
            (["generate", "pebble", "--ids", "1", "--prompt-file", "x"], "found --prompt-file and --ids"),
            (["generate", "pebble", "hi", "--tempratur", "1"], "did you mean '--temperature'"),
            (["generate", "pebble", "hi", "--temp", "1"], "--temp"),  # nothing is guessed from a beginning
            (["generate", "pebble", "hi", "--temperature", "warm"], "--temperature"),
            (["generate", "pebble", "hi", "--temperature", "-1"], "temperature is -1"),
            (["generate", "pebble", "hi", "--max-tokens", "0"], "max_tokens is 0"),
            (["generate", "pebble", "hi", "--logit-bias", "1:2"], "ID=VALUE"),
            (["generate", "pebble", "--ids", "1,x"], "'1,x'"),
            (["generate", "pebble", "--ids", ""], "prompt is empty"),
            (["generate", "pebble", "one", "two"], "'two'"),
            (["generate", "--model", "pebble", "one", "two"], "two models: 'one' and --model 'pebble'"),
            (["chat", "pebble", "--model-path", "x"], "two models: 'pebble' and --model 'x'"),
            (["generate", "--wat"], "unknown argument '--wat'"),
            (["generate", "pebble", "--prompt-file", "nowhere.txt"], "nowhere.txt: cannot be read"),
            (["generate", "pebble", "--messages", "nowhere.json"], "nowhere.json: cannot be read"),
            (["generate", "pebble", "hi", "--speculation", "off", "--draft", "x"], "contradicts"),
            (["generate", "pebble", "hi", "--config", "x.yaml"], ".toml or .json"),
            (["generate", "no such model", "hi"], "no model 'no such model'"),
            (["chat", "--run-ahead", "many"], "--run-ahead"),
            (["doctor", "--max-context", "100"], "give MODEL as well"),
            (["conform"], "DIR"),
            (["conform", "nowhere"], "nowhere: no such directory"),
            (["conform", ".", "--dtype", "float16"], "float16"),
        ],
    )
    def test_one_line_and_code_2(self, words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(words) == 2
        said = capsys.readouterr()
        assert said.out == "" and says in said.err
        assert said.err.startswith("soliton: ") and said.err.count("\n") == 1

    @pytest.mark.parametrize(
        ("text", "says"), [("{", "not valid JSON"), ("{}", "JSON list"), ("[]", "JSON list"), ('["hi"]', "JSON list")]
    )
    def test_messages(self, text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file = tmp_path / "messages.json"
        file.write_text(text)
        assert main(["generate", "pebble", "--messages", str(file)]) == 2
        assert says in capsys.readouterr().err

    def test_no_words(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([]) == 2
        assert "generate" in capsys.readouterr().err

    def test_ctrl_c(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        def stop(args: argparse.Namespace) -> int:
            raise KeyboardInterrupt

        monkeypatch.setattr("soliton.commands.doctor.run", stop)
        assert main(["doctor"]) == 130
        assert capsys.readouterr().err == "interrupted\n"


class TestSamplingFlags:
    def test_each_field_is_a_flag_with_help_or_left_out_on_purpose(self) -> None:
        fields = {field.name for field in dataclasses.fields(SamplingParams)}
        assert set(common.HELP) == fields - set(common.NOT_FLAGS)
        assert set(common.NOT_FLAGS) <= fields

    def test_none_given_is_the_default(self) -> None:
        assert common.sampling_given(parsed("m", "p")) == SamplingParams()

    def test_every_one(self) -> None:
        words = shlex.split(
            "--max-new-tokens 9 --temperature 0.5 --top-p 0.9 --logprobs 2 --presence-penalty 1 --frequency-penalty -1 "
            "--logit-bias 3=1.5,4=-2 --top-k 5 --min-p 0.1 --repetition-penalty 1.1 --min-tokens 2 --ignore-eos "
            "--stop-token-ids 7,8 --no-skip-special-tokens --prompt-logprobs 0 --regex a+ --grammar-after 6"
        )
        assert common.sampling_given(parsed("m", "p", *words, "--stop", "a b", "--stop", "c")) == SamplingParams(
            max_tokens=9,
            temperature=0.5,
            top_p=0.9,
            stop=["a b", "c"],
            logprobs=2,
            presence_penalty=1.0,
            frequency_penalty=-1.0,
            logit_bias={3: 1.5, 4: -2.0},
            top_k=5,
            min_p=0.1,
            repetition_penalty=1.1,
            min_tokens=2,
            ignore_eos=True,
            stop_token_ids=[7, 8],
            skip_special_tokens=False,
            prompt_logprobs=0,
            regex="a+",
            grammar_after=6,
        )

    @pytest.mark.parametrize(
        ("words", "field", "value"),
        [("--json-schema {}", "json_schema", "{}"), ("--json-object", "json_object", True), ("--ebnf x", "ebnf", "x")],
    )
    def test_grammars(self, words: str, field: str, value: object) -> None:
        assert getattr(common.sampling_given(parsed("m", "p", *words.split())), field) == value

    def test_flags_over_a_commands_own_defaults(self) -> None:
        params = common.sampling_given(parsed("--temperature", "1"), temperature=0.0, max_tokens=96)
        assert (params.temperature, params.max_tokens) == (1.0, 96)


class TestEngineFlags:
    def test_settings_between_model_and_prompt(self) -> None:
        args = parsed("m", "--run-ahead", "1", "p", "--dtype", "float32")
        assert args.prompt == "p" and common.config_given(args).model == "m"

    def test_flags_over_environment_over_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / "engine.toml"
        file.write_text('model = "file"\nrun_ahead = 1\nthreads = 3\nprefill_chunk = 7\n')
        monkeypatch.setenv("SOLITON_RUN_AHEAD", "3")
        monkeypatch.setenv("SOLITON_THREADS", "4")
        config = common.config_given(parsed("--config", str(file), "--run-ahead", "0"))
        assert (config.model, config.run_ahead, config.threads, config.prefill_chunk) == ("file", 0, 4, 7)

    def test_the_bundled_model_when_nothing_names_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("SOLITON_MODEL", raising=False)
        assert common.config_given(parsed()).model == "pebble"
        monkeypatch.setenv("SOLITON_MODEL", "other")
        assert common.config_given(parsed()).model == "other"

    @pytest.mark.parametrize(
        ("words", "model", "prompt"),
        [
            (["m", "p"], "m", "p"),
            (["--model", "m", "p"], "m", "p"),
            (["p", "--model-path", "m"], "m", "p"),
            (["-"], "pebble", "-"),
            (["--config", "FILE", "p"], "file", "p"),
            (["--config", "FILE", "m", "p"], "m", "p"),
            (["--config", "FILE", "m", "--ids", "1"], "m", None),
        ],
    )
    def test_a_bare_word_is_the_prompt_where_something_else_names_the_model(
        self, words: list[str], model: str, prompt: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("SOLITON_MODEL", raising=False)
        file = tmp_path / "engine.toml"
        file.write_text('model = "file"\n')
        args = parsed(*(str(file) if word == "FILE" else word for word in words))
        take_words(args)
        assert (common.config_given(args).model, args.prompt) == (model, prompt)

    def test_a_bare_word_beside_the_variable_is_the_prompt(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SOLITON_MODEL", "m")
        args = parsed("p")
        take_words(args)
        assert (common.config_given(args).model, args.prompt) == ("m", "p")

    def test_no_two_arguments_of_one_name(self) -> None:
        for command in COMMANDS:
            names = [action.dest for action in parser_for(command)._actions]
            assert len(names) == len(set(names))

    def test_each_setting_is_there(self) -> None:
        parser = Parser()
        common.add_engine(parser)
        assert {leaf.key for leaf in settings(EngineConfig)} <= {action.dest for action in parser._actions}
