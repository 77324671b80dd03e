"""Settings: precedence, strictness, contradictions, and what ``resolve`` decides. Equality level: exact values."""

from __future__ import annotations

import argparse
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soliton.binder import check, setting
from soliton.config import (
    EngineConfig,
    Facts,
    add_arguments,
    bind,
    flags_given,
    parse_size,
    resolve,
    settings,
)
from soliton.errors import ConfigError, UnsupportedError

FACTS = Facts(model="ling", has_mtp=True, max_position=131072, free_memory={"cpu": 1000, "cuda:0": 2000})
PLAIN = dataclasses.replace(FACTS, model="kimi", has_mtp=False, max_position=4096)
GPU = dataclasses.replace(FACTS, cuda_devices=2)
DRAFTED = dataclasses.replace(FACTS, has_draft=True, draft_tokens=7, draft_confidence=True)


def engine(**values: Any) -> EngineConfig:
    return EngineConfig(**{"model": "m", **values})


def parsed(line: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_arguments(parser, EngineConfig)
    return flags_given(parser.parse_args(line.split()), EngineConfig)


def write(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


class TestPrecedence:
    def test_flags_over_environment_over_file_over_default(self, tmp_path: Path) -> None:
        file = write(tmp_path, "s.toml", 'model = "f"\nrun_ahead = 1\nprefill_chunk = 64\nmax_context = 100\n')
        env = {"SOLITON_RUN_AHEAD": "3", "SOLITON_PREFILL_CHUNK": "128", "HOME": "/elsewhere"}
        config = bind(EngineConfig, flags=parsed("--run-ahead 4"), env=env, file=file)
        assert (config.model, config.run_ahead, config.prefill_chunk, config.max_context) == ("f", 4, 128, 100)
        assert config.dtype == "auto"

    def test_json_and_toml_give_the_same(self, tmp_path: Path) -> None:
        values = {"model": "m", "memory_budget": "8GiB", "threads": 2}
        file = write(tmp_path, "s.json", json.dumps(values))
        other = write(tmp_path, "s.toml", "".join(f"{k} = {json.dumps(v)}\n" for k, v in values.items()))
        assert bind(EngineConfig, file=file) == bind(EngineConfig, file=other) == engine(**values)

    def test_none_as_text_undoes_a_weaker_source(self, tmp_path: Path) -> None:
        file = write(tmp_path, "s.toml", 'model = "m"\nmax_context = 100\n')
        assert bind(EngineConfig, env={"SOLITON_MAX_CONTEXT": "none"}, file=file).max_context is None

    def test_a_wrong_value_is_refused_even_where_a_stronger_source_replaces_it(self) -> None:
        with pytest.raises(ConfigError, match="SOLITON_RUN_AHEAD"):
            bind(EngineConfig, flags=parsed("--model m --run-ahead 2"), env={"SOLITON_RUN_AHEAD": "two"})


class TestFlags:
    def test_only_given_flags_are_in_the_namespace(self) -> None:
        assert parsed("--model pebble") == {"model": "pebble"}
        assert parsed("") == {}

    @pytest.mark.parametrize(
        "line",
        [
            "--model-path m --speculative-algorithm NEXTN --speculative-num-steps 2 --speculative-eagle-topk 1"
            " --speculative-num-draft-tokens 3 --context-length 4096 --chunked-prefill-size 256 --random-seed 7",
            "--model-path m --speculation nextn --speculative-num-steps 2 --speculative-num-draft-tokens 3"
            " --max-context 4096 --prefill-chunk 256 --seed 7",
        ],
        ids=["sglang", "own"],
    )
    def test_sglang_spellings_mean_the_same(self, line: str) -> None:
        assert bind(EngineConfig, flags=parsed(line)) == engine(
            speculation="nextn",
            speculative_num_steps=2,
            speculative_num_draft_tokens=3,
            max_context=4096,
            prefill_chunk=256,
            seed=7,
        )

    def test_help_names_every_environment_variable(self) -> None:
        parser = argparse.ArgumentParser()
        add_arguments(parser, EngineConfig)
        assert all(leaf.env in parser.format_help() for leaf in settings(EngineConfig))


class TestStrictness:
    def test_unknown_file_key_offers_the_nearest(self, tmp_path: Path) -> None:
        file = write(tmp_path, "s.toml", 'model = "m"\nmax_contex = 4\n')
        with pytest.raises(ConfigError, match=r"s\.toml: unknown key 'max_contex' \(did you mean 'max_context'\?\)"):
            bind(EngineConfig, file=file)

    def test_unknown_variable_offers_the_nearest(self) -> None:
        with pytest.raises(ConfigError, match=r"SOLITON_DTYP is not known \(did you mean 'SOLITON_DTYPE'\?\)"):
            bind(EngineConfig, env={"SOLITON_MODEL": "m", "SOLITON_DTYP": "float32"})

    def test_unknown_flag_key_offers_the_nearest(self) -> None:
        with pytest.raises(ConfigError, match="unknown setting 'devise'.*'device'"):
            bind(EngineConfig, flags={"model": "m", "devise": "cpu"})

    def test_variables_of_the_tests_are_not_settings(self) -> None:
        assert bind(EngineConfig, env={"SOLITON_MODEL": "m", "SOLITON_SHARED": "x"}) == engine()

    def test_missing_model_names_all_three_ways(self) -> None:
        with pytest.raises(ConfigError, match="model is not set: give --model, SOLITON_MODEL, or model in a file"):
            bind(EngineConfig)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ('model = "m"\nrun_ahead = "2"', "run_ahead = '2': expected a whole number of steps from 0 to 4"),
            ('model = "m"\nrun_ahead = 2.0', "run_ahead = 2.0: expected a whole number"),
            ('model = "m"\nrun_ahead = true', "run_ahead = True: expected a whole number"),
            ('model = "m"\nspeculation = "NEXTN"', "speculation = 'NEXTN': expected one of.*did you mean 'nextn'"),
            (
                'model = "m"\nmax_context = "none"',
                "max_context = 'none': expected a whole number of tokens, at least 2",
            ),
            ("model = 3", "model = 3: expected a text"),
            ("[model]\nname = 1", "model = {'name': 1}: expected a text"),
        ],
    )
    def test_a_file_has_to_use_the_types(self, tmp_path: Path, text: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            bind(EngineConfig, file=write(tmp_path, "s.toml", text))

    @pytest.mark.parametrize(
        ("name", "text", "message"),
        [
            ("s.yaml", "", "ends in .toml or .json"),
            ("s.toml", "model = ", "not valid TOML"),
            ("s.json", "{", "not valid JSON"),
            ("s.json", "[1]", "expected a table of settings, found list"),
        ],
    )
    def test_files_that_cannot_be_used(self, tmp_path: Path, name: str, text: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            bind(EngineConfig, file=write(tmp_path, name, text))

    def test_absent_file(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"none\.toml: cannot be read"):
            bind(EngineConfig, file=tmp_path / "none.toml")

    @pytest.mark.parametrize("text", ["", "two", "2.5", "5", "-1", "0x2"])
    def test_texts_that_are_no_run_ahead(self, text: str) -> None:
        with pytest.raises(ConfigError, match=r"SOLITON_RUN_AHEAD = .*: expected a whole number of steps from 0 to 4"):
            bind(EngineConfig, env={"SOLITON_MODEL": "m", "SOLITON_RUN_AHEAD": text})

    def test_nothing_changes_after_construction(self) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            engine().run_ahead = 1  # type: ignore[misc]
        with pytest.raises(TypeError):
            EngineConfig("m")  # type: ignore[misc]

    @given(st.sampled_from([leaf.env for leaf in settings(EngineConfig)]), st.text(max_size=12))
    def test_any_text_binds_or_is_refused_by_name(self, name: str, text: str) -> None:
        try:
            bind(EngineConfig, env={"SOLITON_MODEL": "m", name: text})
        except ConfigError as error:
            assert name in str(error) or name.removeprefix("SOLITON_").lower() in str(error)


class TestContradictions:
    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"model": ""}, "model is empty"),
            ({"speculation": "off", "draft": "d"}, "draft = 'd' contradicts speculation = 'off'"),
            ({"speculation": "off", "speculative_num_steps": 3}, "speculative_num_steps = 3 contradicts"),
            ({"speculation": "off", "speculative_num_draft_tokens": 4}, "speculative_num_draft_tokens = 4 contradicts"),
            ({"speculation": "nextn", "draft": "d"}, "draft = 'd' contradicts speculation = 'nextn'"),
            ({"speculative_num_steps": 3, "speculative_num_draft_tokens": 3}, "before them, 4 rows"),
            ({"speculative_eagle_topk": 4}, "speculative_eagle_topk = 4.*one accepted prefix.*staged by position"),
            ({"speculative_num_steps": 0}, "speculative_num_steps = 0: expected a whole number of tokens from 1 to 16"),
            ({"run_ahead": 5}, "run_ahead = 5: expected a whole number of steps from 0 to 4"),
            ({"run_ahead": -1}, "run_ahead = -1"),
            ({"device": "gpu"}, "device = 'gpu': expected auto, cpu, cuda or cuda:N"),
            ({"device": "cuda:"}, "device = 'cuda:'"),
            ({"dtype": "bf16"}, r"dtype = 'bf16': expected one of .*did you mean 'bfloat16'"),
            ({"max_context": 1}, "max_context = 1: expected a whole number of tokens, at least 2, or none"),
            ({"prefill_chunk": 0}, "prefill_chunk = 0"),
            ({"threads": 0}, "threads = 0"),
            ({"memory_budget": "8 gigs"}, "memory_budget = '8 gigs': expected bytes"),
            ({"memory_budget": -1}, "memory_budget = -1: expected bytes"),
            ({"checkpoint_budget": 1.5}, "checkpoint_budget = 1.5: expected bytes"),
        ],
    )
    def test_refused_with_the_reason(self, values: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            engine(**values)


class TestSizes:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("0", 0),
            ("123", 123),
            ("8GiB", 8 << 30),
            ("1.5 MiB", 3 << 19),
            ("2kb", 2000),
            ("7B", 7),
            ("1TiB", 1 << 40),
            (5, 5),
            (None, None),
        ],
    )
    def test_read(self, text: Any, expected: int | None) -> None:
        assert parse_size(text, "k") == expected

    @pytest.mark.parametrize("text", ["", "GiB", "-1", "1.5", "1e9", "8 G", "1 GiB GiB", "inf"])
    def test_refused(self, text: str) -> None:
        with pytest.raises(ConfigError, match="k = "):
            parse_size(text, "k")


class TestResolve:
    def test_each_auto_becomes_a_value_with_a_reason(self) -> None:
        config = engine()
        new, decided = resolve(config, FACTS)
        assert config == engine(), "the given config is left alone"
        assert new == engine(
            device="cpu",
            dtype="float32",
            router_dtype="float32",
            lm_head_dtype="float32",
            speculation="nextn",
            speculative_num_steps=3,
            speculative_num_draft_tokens=4,
            draft_verify="all",
            executor="eager",
            max_context=8192,
            run_ahead=0,
            prefill_chunk=512,
            memory_budget=900,
            checkpoint_budget=256 << 20,
            threads=1,
        )
        by_key = {decision.key: decision for decision in decided}
        left = {k for k, v in dataclasses.asdict(config).items() if v in (None, "auto")}
        left -= {"draft", "draft_verify_tokens", "draft_threshold", "draft_costs", "draft_calibration"}
        left -= {"memory_fraction"}  # one way to say memory_budget
        assert set(by_key) == left
        assert all(getattr(new, key) == decision.value for key, decision in by_key.items())
        assert str(by_key["speculation"]) == "speculation = nextn: ling has an MTP layer"

    def test_resolving_twice_changes_and_decides_nothing_more(self) -> None:
        once, _ = resolve(engine(seed=1), FACTS)
        assert resolve(once, FACTS) == (once, [])

    def test_on_a_gpu(self) -> None:
        new, _ = resolve(engine(), GPU)
        assert (new.device, new.dtype, new.memory_budget, new.checkpoint_budget) == (
            "cuda:0",
            "bfloat16",
            1800,
            2 << 30,
        )
        assert resolve(engine(device="cuda"), GPU)[0].device == "cuda:0"
        assert new.prefill_chunk == 8192
        assert resolve(engine(prefix_reuse="exact"), GPU)[0].prefill_chunk == 512, "it starts at multiples only"
        assert resolve(engine(prefill_chunk=64), GPU)[0].prefill_chunk == 64
        assert resolve(engine(device="cuda:1"), GPU)[0].device == "cuda:1"

    def test_without_an_mtp_layer(self) -> None:
        new, decided = resolve(engine(), PLAIN)
        assert (new.speculation, new.speculative_num_steps, new.max_context) == ("off", None, 4096)
        assert "kimi has no MTP layer and no draft is given" in [decision.reason for decision in decided]

    def test_rows_alone_fix_the_steps(self) -> None:
        assert resolve(engine(speculative_num_draft_tokens=6), FACTS)[0].speculative_num_steps == 5

    def test_sizes_become_bytes(self) -> None:
        new, _ = resolve(engine(memory_budget="1GiB", checkpoint_budget="0"), FACTS)
        assert (new.memory_budget, new.checkpoint_budget) == (1 << 30, 0)

    def test_a_share_of_the_free_memory(self) -> None:
        free = FACTS.free_memory["cpu"]
        assert resolve(engine(memory_fraction=0.5), FACTS)[0].memory_budget == free // 2
        with pytest.raises(ConfigError, match="both limit the memory"):
            engine(memory_fraction=0.5, memory_budget="1GiB")

    def test_unknown_free_memory_is_said(self) -> None:
        new, decided = resolve(engine(), dataclasses.replace(FACTS, free_memory={}))
        assert new.memory_budget is None
        assert any(d.key == "memory_budget" and "not known" in d.reason for d in decided)

    @pytest.mark.parametrize(
        ("values", "facts", "kind", "message"),
        [
            ({"speculation": "nextn"}, PLAIN, ConfigError, "speculation = 'nextn': kimi has no MTP layer"),
            ({"speculative_num_steps": 2}, PLAIN, ConfigError, "speculative_num_steps is set, but kimi has no MTP"),
            ({"speculation": "dspark"}, FACTS, ConfigError, "no draft is given and none is bundled with ling"),
            ({"draft": "d", "speculative_num_steps": 5}, DRAFTED, ConfigError, "= 5, but the draft's block gives 7"),
            ({"draft": "d", "speculative_num_draft_tokens": 7}, DRAFTED, ConfigError, "but the draft's block gives 8"),
            (
                {"draft": "d", "draft_verify": "fixed", "draft_verify_tokens": 8},
                DRAFTED,
                ConfigError,
                "draft_verify_tokens = 8, but the draft's block has 7",
            ),
            (
                {"draft": "d", "draft_costs": "c"},
                dataclasses.replace(DRAFTED, draft_confidence=False),
                ConfigError,
                "needs a confidence head, and the draft has none",
            ),
            ({"draft_verify": "fixed", "draft_verify_tokens": 2}, FACTS, ConfigError, "is of a DSpark draft, and"),
            ({"dtype": "float16"}, FACTS, UnsupportedError, "dtype = 'float16' is not supported on cpu"),
            ({"dtype": "float16"}, GPU, UnsupportedError, "dtype = 'float16' is not supported on cuda"),
            ({"device": "cuda"}, FACTS, ConfigError, "device = 'cuda': this machine has 0 CUDA devices"),
            ({"device": "cuda:2"}, GPU, ConfigError, "device = 'cuda:2': this machine has 2 CUDA devices"),
            ({"max_context": 5000}, PLAIN, ConfigError, "max_context = 5000: kimi goes to 4096 tokens"),
        ],
    )
    def test_refused(self, values: dict[str, Any], facts: Facts, kind: type[Exception], message: str) -> None:
        with pytest.raises(kind, match=message):
            resolve(engine(**values), facts)

    def test_a_draft_that_fits_is_used(self) -> None:
        new, decided = resolve(engine(draft="d"), DRAFTED)
        assert (new.speculation, new.speculative_num_steps, new.speculative_num_draft_tokens) == ("dspark", 7, 8)
        assert new.draft_verify == "all" and any(d.key == "draft_verify" for d in decided)
        assert resolve(new, DRAFTED)[0] == new
        assert resolve(engine(draft="d", draft_costs="c"), DRAFTED)[0].draft_verify == "cost"


@dataclass(frozen=True, kw_only=True)
class Serving:
    engine: EngineConfig
    port: int = setting("port to listen on", default=8000, low=0, high=65535)
    quiet: bool = setting("say nothing", default=False)
    patience: float = setting("wait for the engine", default=1.0, unit="seconds")

    def __post_init__(self) -> None:
        check(self)


class TestTree:
    """A config inside a config: a table in the file, the same flags and variables as alone."""

    def test_bound_from_all_sources(self, tmp_path: Path) -> None:
        file = write(tmp_path, "s.toml", 'port = 9000\npatience = 2\n[engine]\nmodel = "m"\nrun_ahead = 1\n')
        parser = argparse.ArgumentParser()
        add_arguments(parser, Serving)
        given_flags = flags_given(parser.parse_args(["--model", "n", "--max-context", "77", "--quiet"]), Serving)
        config = bind(Serving, flags=given_flags, env={"SOLITON_PORT": "9001"}, file=file)
        inner = EngineConfig(model="n", run_ahead=1, max_context=77)
        assert config == Serving(engine=inner, port=9001, quiet=True, patience=2)

    def test_unknown_key_in_the_table(self, tmp_path: Path) -> None:
        file = write(tmp_path, "s.toml", '[engine]\nmodel = "m"\nrun_ahed = 1\n')
        with pytest.raises(ConfigError, match=r"'engine\.run_ahed' \(did you mean 'engine\.run_ahead'\?\)"):
            bind(Serving, file=file)

    @pytest.mark.parametrize(("text", "expected"), [("yes", True), ("0", False), ("FALSE", False)])
    def test_truth_from_text(self, text: str, expected: bool) -> None:
        assert bind(Serving, env={"SOLITON_MODEL": "m", "SOLITON_QUIET": text}).quiet is expected

    def test_no_truth_in_other_words(self) -> None:
        with pytest.raises(ConfigError, match="SOLITON_QUIET = 'maybe': expected true or false"):
            bind(Serving, env={"SOLITON_MODEL": "m", "SOLITON_QUIET": "maybe"})


def test_a_small_model_takes_one_thread() -> None:
    for weights, threads in ((17_800_000, 1), (15_800_000_000, 8), (None, 8)):
        facts = dataclasses.replace(FACTS, torch_threads=8, weight_bytes=weights)
        assert resolve(engine(), facts)[0].threads == threads
        assert resolve(engine(threads=3), facts)[0].threads == 3
