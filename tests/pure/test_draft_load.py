"""open_draft on stored and made drafts: four layouts give the same, every fault is named with its number."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draft_cases import random_draft
from soliton.checkpoint import draft as draft_module
from soliton.checkpoint import open_checkpoint, spec_from_config
from soliton.checkpoint.draft import bundled_draft, check_fit, check_shared, open_draft
from soliton.checkpoint.draft_config import draft_from_config
from soliton.checkpoint.published import PUBLISHED
from soliton.errors import CheckpointError, ConfigError, UnsupportedError
from soliton.model.draft_spec import DraftSpec, shapes
from soliton.model.spec import ModelSpec

DATA = Path(__file__).parents[1] / "data"
MICRO = DATA / "dspark-ling-micro"
EMBED, HEAD = "embed_tokens.weight", "lm_head.weight"
METHOD = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
Config = dict[str, Any]


def stored(layout: str = "") -> Config:
    name = f"dspark-ling-micro-{layout}" if layout else "dspark-ling-micro"
    config: Config = json.loads((DATA / name / "config.json").read_text())
    return config


def native(**changes: Any) -> Config:
    return stored() | changes


def specforge(**changes: Any) -> Config:
    config = stored("specforge")
    return config | {"dflash_config": config["dflash_config"] | changes}


def speculators(**changes: Any) -> Config:
    return stored("speculators") | changes


def without(config: Config, *keys: str) -> Config:
    return {k: v for k, v in config.items() if k not in keys}


def dflash(**changes: Any) -> Config:
    """DFlash's own config: ids in dflash_config, no Markov and no confidence keys."""
    nested = {"mask_token_id": 318, "target_layer_ids": [0, 2, 4]}
    plain = without(native(), *METHOD, "mask_token_id", "target_layer_ids", "num_anchors")
    return plain | {"architectures": ["DFlashDraftModel"], "dflash_config": nested} | changes


def spec_of(config: Config) -> DraftSpec:
    return draft_from_config(config, where="config.json", name="d")[0]


def weights(config: Config) -> dict[str, Tensor]:
    return {n: torch.randn(s).bfloat16() for n, s in shapes(spec_of(config)).items()}


def write(path: Path, config: Config | None = None, tensors: dict[str, Tensor] | None = None) -> Path:
    config = native() if config is None else config
    (path / "config.json").write_text(json.dumps(config))
    save_file(weights(config) if tensors is None else tensors, path / "model.safetensors")
    return path


def refused(call: Callable[[], Any], kind: type[Exception], *parts: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    for part in parts:
        assert part in str(caught.value), str(caught.value)


def bad_config(config: Config, kind: type[Exception], *parts: str) -> None:
    refused(lambda: spec_of(config), kind, "config.json", *parts)


def bad_files(path: Path, kind: type[Exception], *parts: str) -> None:
    refused(lambda: open_draft(path), kind, str(path), *parts)


class TestLayouts:
    def test_three_layouts_of_one_draft_are_equal(self) -> None:
        drafts = {w: open_draft(DATA / f"dspark-ling-micro{w}") for w in ("", "-specforge", "-speculators")}
        assert [d.layout for d in drafts.values()] == ["native", "specforge", "speculators"]
        first, *others = drafts.values()
        assert first.spec.taps == (0, 2, 4) and first.spec.drafts == 5 and first.spec.theta == 1e6
        assert first.spec.confidence_markov and (first.spec.markov, first.spec.rank) == ("vanilla", 16)
        assert drafts["-speculators"].spec.target_layers == 0  # its config does not say
        for other in others:
            assert dataclasses.replace(other.spec, name=first.name, target_layers=6) == first.spec
            for name in shapes(first.spec):
                assert torch.equal(other.tensor(name), first.tensor(name)), name

    def test_stored_tensors_are_counted(self) -> None:
        for path, shared in ((DATA / "dspark-ling-micro", True), (random_draft(DATA / "ling-micro"), False)):
            draft, tensors = open_draft(path), load_file(path / "model.safetensors")
            assert draft.parameters() == sum(t.numel() for t in tensors.values())
            own = sum(t.numel() for n, t in tensors.items() if n not in (EMBED, HEAD))
            assert draft.weight_bytes() == 2 * own and draft.d2t is None
            assert draft.has(EMBED) == draft.has(HEAD) == shared
            assert all(torch.equal(draft.tensor(n), t) for n, t in tensors.items())

    def test_rope_parameters_alone(self) -> None:
        config = json.loads((DATA / "rope-parameters.json").read_text(encoding="utf-8"))
        spec, _ = draft_from_config(config, where="config.json")
        assert spec.theta == 10000.0 and (spec.heads, spec.kv_heads) == (4, 2)

    def test_specforge_prepared_for_serving(self) -> None:
        """Four keys lifted to the top, the others still nested."""
        nested = specforge()["dflash_config"]
        lifted = {k: nested[k] for k in METHOD}
        mixed = specforge() | lifted | {"architectures": ["Qwen3DSparkModel"]}
        assert draft_from_config(mixed, where="x", name="d") == (spec_of(native()), "specforge")
        moved = mixed | {"dflash_config": without(nested, *METHOD)}
        assert spec_of(moved) == spec_of(native())
        own = without(moved, *METHOD) | {"dspark_config": lifted}
        assert spec_of(own) == spec_of(native())
        bad_config(mixed | {"markov_rank": 8}, ConfigError, "'markov_rank' is 8, but 16 in dflash_config")

    def test_keys_left_out_mean_none(self) -> None:
        config = specforge()
        del config["dflash_config"]["confidence_head_with_markov"]
        assert not spec_of(config).confidence_markov
        assert spec_of(without(native(), "enable_confidence_head")).confidence is False
        assert spec_of(without(native(), "max_position_embeddings")).max_position == 1 << 30
        assert spec_of(native(markov_rank=0, confidence_head_with_markov=False)).markov == "none"
        bad_config(without(native(), "markov_rank"), ConfigError, "'markov_rank' is missing")

    def test_speculators_without_the_anchor(self) -> None:
        config = without(speculators(), "sample_from_anchor", "speculators_config")
        spec = spec_of(config)
        assert not spec.anchor_first and spec.drafts == 4 and spec.taps == (0, 2, 4)
        wrong = without(speculators(), "sample_from_anchor")
        bad_config(wrong, ConfigError, "'speculative_tokens' is 5", "makes 4 drafts")
        assert spec_of(config | {"aux_hidden_state_layer_ids": [0, 2]}).taps == (-1, 1)

    def test_dflash(self, tmp_path: Path) -> None:
        draft = open_draft(write(tmp_path, dflash()))
        assert draft.layout == "dflash" and not draft.spec.anchor_first and draft.spec.drafts == 4
        assert draft.spec.markov == "none" and not draft.has("confidence_head.proj.bias")
        named = without(dflash(), "architectures")
        named["dflash_config"] = named["dflash_config"] | {"projector_type": "dflash", "block_size": 5}
        assert spec_of(without(named, "block_size")) == spec_of(dflash())
        spec = spec_of(without(speculators(speculators_model_type="dflash"), *METHOD, "speculators_config"))
        assert spec.drafts == 5 and spec.markov == "none"

    def test_a_draft_of_either_kind_may_say_where_it_starts(self) -> None:
        assert spec_of(dflash(sample_from_anchor=True)).drafts == 5
        assert spec_of(native(sample_from_anchor=False)).drafts == 4


class TestConfig:
    @pytest.mark.parametrize(
        ("changes", "parts"),
        [
            ({"sliding_window": 128}, ("'sliding_window' is 128", "sliding windows are not supported")),
            ({"use_sliding_window": True}, ("'use_sliding_window' is True",)),
            ({"layer_types": ["full_attention", "sliding_attention"]}, ("layer 1 is 'sliding_attention'",)),
            ({"layer_types": ["linear_attention", "full_attention"]}, ("layer 0 is 'linear_attention'",)),
            ({"is_causal": True}, ("'is_causal' is True", "causal drafts are not supported")),
            ({"dflash_config": {"causal": True}}, ("dflash_config: 'causal' is True", "causal drafts")),
            ({"kv_lora_rank": 512}, ("'kv_lora_rank' is 512", "MLA drafts are not supported")),
            ({"attention_mode": "mla"}, ("'attention_mode' is 'mla'", "MLA drafts are not supported")),
            ({"num_experts": 16}, ("'num_experts' is 16", "draft layers are dense")),
            ({"quantization_config": {"quant_method": "fp8"}}, ("quantization_config says fp8",)),
            ({"attention_bias": True}, ("'attention_bias' is True",)),
            ({"hidden_act": "gelu"}, ("'hidden_act' is 'gelu'",)),
            ({"target_hidden_size": 128}, ("'target_hidden_size' is 128", "hidden_size is 64")),
            ({"markov_head_type": "lstm"}, ("'markov_head_type' is 'lstm'", "'vanilla' or 'gated' or 'rnn'")),
            ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, ("rope type 'yarn'",)),
            ({"projector_type": "domino"}, ("'projector_type' is 'domino'",)),
            ({"architectures": ["Gemma4DSparkModel"]}, ("Gemma4DSparkModel", "LingDSparkModel")),
            ({"architectures": None}, ("architecture not given",)),
        ],
    )
    def test_unsupported(self, changes: Config, parts: tuple[str, ...]) -> None:
        bad_config(native(**changes), UnsupportedError, *parts)

    def test_unsupported_inside_speculators(self) -> None:
        inner = speculators()["transformer_layer_config"]
        for changes, part in (
            ({"sliding_window": 64}, "transformer_layer_config: 'sliding_window' is 64"),
            ({"layer_types": ["sliding_attention"] * 2}, "layer 0 is 'sliding_attention'"),
        ):
            config = speculators(transformer_layer_config=inner | changes)
            bad_config(config, UnsupportedError, part)
        bad_config(
            speculators(speculators_model_type="eagle3"), UnsupportedError, "'speculators_model_type' is 'eagle3'"
        )

    @pytest.mark.parametrize(
        ("changes", "parts"),
        [
            ({"num_key_value_heads": 3}, ("'num_key_value_heads' is 3", "num_attention_heads = 4")),
            ({"head_dim": 31}, ("'head_dim' is 31",)),
            ({"layer_types": ["full_attention"]}, ("'layer_types'", "2 in all")),
            ({"target_layer_ids": []}, ("'target_layer_ids' is []",)),
            ({"target_layer_ids": [0, "2"]}, ("'target_layer_ids'", "whole numbers")),
            ({"block_size": 0}, ("'block_size' is 0",)),
            ({"mask_token_id": None}, ("'mask_token_id' is None",)),
            ({"draft_vocab_size": 321}, ("'draft_vocab_size' is 321", "vocab_size = 320")),
            ({"markov_rank": 0}, ("'confidence_head_with_markov' is True", "markov_rank is 0")),
            ({"projector_type": "dflash"}, ("LingDSparkModel is DSpark", "'dflash'")),
            ({"attention_mode": "mha", "num_key_value_heads": 2}, ("4 query heads and 2 key-value heads",)),
            ({"architectures": "LingDSparkModel"}, ("'architectures'", "a list of names")),
            ({"markov_rnak": 3}, ("unknown key 'markov_rnak'", "did you mean 'markov_rank'")),
        ],
    )
    def test_faults(self, changes: Config, parts: tuple[str, ...]) -> None:
        bad_config(native(**changes), ConfigError, *parts)

    def test_missing_and_ambiguous(self) -> None:
        for key in ("block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "rope_theta", "vocab_size"):
            bad_config(without(native(), key), ConfigError, f"'{key}' is missing")
        bad_config(without(speculators(), "aux_hidden_state_layer_ids"), ConfigError, "'aux_hidden_state_layer_ids'")
        bad_config(dflash(markov_rank=16), ConfigError, "no Markov head", "projector_type to 'dspark'")
        bad_config(dflash(enable_confidence_head=True), ConfigError, "no confidence head")
        wrong = speculators(speculators_model_type="dflash")
        bad_config(wrong, ConfigError, "no Markov head", "speculators_model_type to 'dspark'")
        assert spec_of(dflash(markov_rank=16, projector_type="dspark")).anchor_first
        refused(lambda: draft_from_config([], where="config.json"), ConfigError, "object is needed, not list")


class TestFiles:
    @pytest.mark.parametrize("prefix", ["model.", "draft_model.", "draft_model.model."])
    def test_prefixes(self, tmp_path: Path, prefix: str) -> None:
        tensors = load_file(MICRO / "model.safetensors")
        draft = open_draft(write(tmp_path, native(), {prefix + n: t for n, t in tensors.items()}))
        assert all(torch.equal(draft.tensor(n), t) for n, t in tensors.items())
        write(tmp_path, native(), tensors | {prefix + "norm.weight": torch.ones(64)})
        bad_files(tmp_path, CheckpointError, f"'{prefix}norm.weight'", "are the same tensor")

    def test_shards(self, tmp_path: Path) -> None:
        items = sorted(load_file(MICRO / "model.safetensors").items())
        parts = [dict(items[:9]), dict(items[9:])]
        for i, part in enumerate(parts):
            save_file(part, tmp_path / f"model-{i}.safetensors")
        index = {n: f"model-{i}.safetensors" for i, part in enumerate(parts) for n in part}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
        (tmp_path / "config.json").write_text(json.dumps(native()))
        draft = open_draft(tmp_path)
        assert all(torch.equal(draft.tensor(n), t) for n, t in items)

    def test_heads_of_every_kind(self, tmp_path: Path) -> None:
        for kind in ("gated", "rnn"):
            config = native(markov_head_type=kind, confidence_head_with_markov=False)
            draft = open_draft(write(tmp_path, config))
            assert draft.spec.markov == kind and draft.tensor("confidence_head.proj.weight").shape == (1, 64)
            name = {"gated": "gate_proj", "rnn": "joint_proj"}[kind]
            short = without(weights(config), f"markov_head.{name}.bias")
            bad_files(
                write(tmp_path, config, short), CheckpointError, f"1 tensors are missing: markov_head.{name}.bias"
            )

    def test_no_confidence_bias_is_zero(self, tmp_path: Path) -> None:
        tensors = without(weights(native()), "confidence_head.proj.bias")
        draft = open_draft(write(tmp_path, native(), tensors | {"rotary_emb.inv_freq": torch.ones(16)}))
        bias = draft.tensor("confidence_head.proj.bias")
        assert draft.has("confidence_head.proj.bias") and bias.tolist() == [0.0] and bias.dtype == torch.bfloat16
        assert draft.parameters() == sum(t.numel() for t in tensors.values())
        assert draft.weight_bytes() == 2 * draft.parameters()
        with pytest.raises(KeyError, match=r"embed_tokens\.weight"):
            draft.tensor(EMBED)

    def test_files_that_do_not_fit(self, tmp_path: Path) -> None:
        tensors = weights(native())
        less = without(tensors, "markov_head.markov_w1.weight", "confidence_head.proj.weight")
        bad_files(write(tmp_path, native(), less), CheckpointError, "2 tensors are missing", "markov_w1", "confidence")
        more = tensors | {"draft_adapter.0.weight": torch.ones(2)}
        bad_files(write(tmp_path, native(), more), CheckpointError, "1 tensors are unknown: draft_adapter.0.weight")
        off = native(enable_confidence_head=False)
        bad_files(write(tmp_path, off, tensors), CheckpointError, "2 tensors are unknown: confidence_head.proj.bias")
        wide = tensors | {"fc.weight": torch.ones(64, 128).bfloat16()}
        bad_files(write(tmp_path, native(), wide), CheckpointError, "'fc.weight'", "[64, 128]", "[64, 192]")
        wide = tensors | {HEAD: torch.ones(300, 64).bfloat16()}
        bad_files(write(tmp_path, native(), wide), CheckpointError, "'lm_head.weight'", "[300, 64]", "[320, 64]")

    def test_quantised_files(self, tmp_path: Path) -> None:
        tensors = weights(native())
        packed = tensors | {"layers.0.mlp.up_proj.weight_scale": torch.ones(1)}
        bad_files(
            write(tmp_path, native(), packed), UnsupportedError, "'layers.0.mlp.up_proj.weight_scale'", "quantised"
        )
        eight = tensors | {"fc.weight": torch.ones(64, 192).to(torch.float8_e4m3fn)}
        bad_files(write(tmp_path, native(), eight), UnsupportedError, "'fc.weight'", "float8_e4m3fn", "quantised")

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_a_weight_that_is_no_number(self, tmp_path: Path, bad: float) -> None:
        tensors = weights(native())
        tensors["norm.weight"][3] = bad
        draft = open_draft(write(tmp_path, native(), {"model." + n: t for n, t in tensors.items()}))
        refused(lambda: draft.tensor("norm.weight"), CheckpointError, "'model.norm.weight' holds NaN or infinity")

    def test_places(self, tmp_path: Path) -> None:
        refused(lambda: open_draft("no/such/draft"), ConfigError, "no draft 'no/such/draft'", "synthetic:")
        refused(lambda: open_draft("x" * 5000), ConfigError, "no draft")
        bad_files(tmp_path, CheckpointError, "no config.json")
        (tmp_path / "config.json").write_text("{")
        bad_files(tmp_path, CheckpointError, "not valid JSON at line 1")
        bad_files(tmp_path / "config.json", CheckpointError, "this is a file")
        (tmp_path / "config.json").write_text(json.dumps(native()))
        bad_files(tmp_path, CheckpointError, "no weights")

    def test_the_bundled_draft(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(draft_module, "__file__", str(tmp_path / "checkpoint" / "draft.py"))
        assert bundled_draft("pebble") is None
        (tmp_path / "pebble" / "dspark").mkdir(parents=True)
        assert bundled_draft("pebble") == (tmp_path / "pebble" / "dspark").resolve()
        assert bundled_draft("other") is None

    def test_pebble_s_own(self) -> None:
        path = bundled_draft("pebble")
        assert path is not None and sum(file.stat().st_size for file in path.iterdir()) <= 6_000_000
        draft = open_draft(path)
        check_fit(draft.spec, open_checkpoint("pebble").spec)
        assert (draft.spec.block, draft.spec.layers, draft.spec.confidence, draft.layout) == (8, 2, True, "native")
        assert f"{draft.parameters():,}" in (path / "README.md").read_text(encoding="utf-8")
        assert json.loads((path / "provenance.json").read_text(encoding="utf-8"))["step"] > 0


class TestDraftVocabulary:
    IDS = torch.arange(0, 320, 4)
    CONFIG = speculators(draft_vocab_size=80)

    def files(self, **changes: Tensor) -> dict[str, Tensor]:
        mask = torch.zeros(320, dtype=torch.bool)
        mask[self.IDS] = True
        maps = {"d2t": self.IDS - torch.arange(80), "t2d": mask}
        return weights(self.CONFIG) | maps | {EMBED: torch.randn(320, 64).bfloat16()} | changes

    def test_offsets_become_ids(self, tmp_path: Path) -> None:
        draft = open_draft(write(tmp_path, self.CONFIG, self.files()))
        assert draft.spec.draft_vocab == 80 and draft.d2t is not None and draft.d2t.dtype == torch.int64
        assert torch.equal(draft.d2t, self.IDS) and draft.tensor(HEAD).shape == (80, 64)
        assert draft.tensor("markov_head.markov_w2.weight").shape == (80, 16) and not draft.has("d2t")
        assert draft.weight_bytes() == 2 * (draft.parameters() - 320 * 64)
        alone = open_draft(write(tmp_path, self.CONFIG, without(self.files(), "t2d")))
        assert alone.d2t is not None and torch.equal(alone.d2t, self.IDS)

    def test_ids_where_the_mask_says_so(self, tmp_path: Path) -> None:
        draft = open_draft(write(tmp_path, self.CONFIG, self.files(d2t=self.IDS.int())))
        assert draft.d2t is not None and torch.equal(draft.d2t, self.IDS)

    def test_faults(self, tmp_path: Path) -> None:
        offsets = self.IDS - torch.arange(80)
        for tensors, parts in (
            (without(self.files(), "d2t"), ("draft_vocab_size is 80 of 320", "'d2t'")),
            (without(self.files(), HEAD), ("missing: lm_head.weight",)),
            (self.files(d2t=offsets[:70]), ("'d2t' is [70] int64", "[80] whole numbers")),
            (self.files(d2t=offsets.float()), ("'d2t' is [80] float32",)),
            (self.files(t2d=torch.ones(320, dtype=torch.bool)), ("'d2t' and 't2d' disagree",)),
            (without(self.files(d2t=offsets + 9), "t2d"), ("80 different ids, 9 to 325", "0 to 319")),
            (without(self.files(d2t=-torch.arange(80)), "t2d"), ("leads 80 tokens to 1 different ids",)),
        ):
            bad_files(write(tmp_path, self.CONFIG, tensors), CheckpointError, *parts)

    def test_maps_of_the_whole_vocabulary(self, tmp_path: Path) -> None:
        whole = weights(speculators()) | {"d2t": torch.zeros(320).long(), "t2d": torch.ones(320).bool()}
        assert open_draft(write(tmp_path, speculators(), whole)).d2t is None
        bad_files(
            write(tmp_path, speculators(), without(whole, "t2d") | {"d2t": torch.ones(320).long()}),
            CheckpointError,
            "'d2t' renames tokens",
            "320",
        )


def target(**changes: Any) -> ModelSpec:
    spec = spec_from_config(json.loads((DATA / "ling-micro" / "config.json").read_text()), where="x", name="ling-micro")
    return dataclasses.replace(spec, **changes)


class TestFit:
    def test_stored_drafts_fit(self) -> None:
        for layout in ("", "-specforge", "-speculators"):
            draft = open_draft(DATA / f"dspark-ling-micro{layout}")
            check_fit(draft.spec, target())
            check_shared(draft, open_checkpoint(DATA / "ling-micro"))

    @pytest.mark.parametrize(
        ("changes", "parts"),
        [
            ({"vocab": 256}, ("vocabulary is 256", "is 320")),
            ({"hidden": 128}, ("hidden size is 128", "is 64")),
            ({"target_layers": 42}, ("number of target layers is 42", "is 6")),
            ({"taps": (2, 0, 4)}, ("[2, 0, 4]", "ascend")),
            ({"taps": (0, 2, 2)}, ("[0, 2, 2]", "ascend")),
            ({"taps": ()}, ("[]", "ascend")),
            ({"taps": (-1, 2)}, ("layer -1", "0 to 4")),
            ({"taps": (-3, 2)}, ("layer -3", "0 to 4")),
            ({"taps": (0, 5)}, ("layer 5", "6 layers", "0 to 4")),
            ({"taps": (0, 9)}, ("layer 9", "6 layers", "0 to 4")),
            ({"mask_id": 320}, ("mask id 320", "0 to 319")),
            ({"mask_id": -1}, ("mask id -1", "0 to 319")),
            ({"block": 1, "anchor_first": False}, ("0 drafts", "block of 1", "1 to 16")),
            ({"block": 17}, ("17 drafts", "1 to 16")),
        ],
    )
    def test_refused(self, changes: dict[str, Any], parts: tuple[str, ...]) -> None:
        spec = dataclasses.replace(open_draft(MICRO).spec, **changes)
        refused(lambda: check_fit(spec, target()), ConfigError, "the draft 'dspark-ling-micro'", *parts)

    def test_edges(self) -> None:
        spec = open_draft(MICRO).spec
        for changes in ({"block": 1}, {"block": 16}, {"block": 17, "anchor_first": False}, {"target_layers": 0}):
            check_fit(dataclasses.replace(spec, **changes), target())


class TestShared:
    def stored_with(self, path: Path, **changes: Tensor) -> Path:
        return write(path, native(), load_file(MICRO / "model.safetensors") | changes)

    def test_other_values(self, tmp_path: Path) -> None:
        theirs = open_checkpoint(DATA / "ling-micro")
        for name, other in ((EMBED, "word_embeddings"), (HEAD, "lm_head")):
            changed = load_file(MICRO / "model.safetensors")[name].clone()
            changed[319, 5] += 1
            draft = open_draft(self.stored_with(tmp_path, **{name: changed}))
            refused(lambda d=draft: check_shared(d, theirs), CheckpointError, f"row 319 of '{name}'", other, "another")

    def test_another_dtype_is_compared_within_rounding(self, tmp_path: Path) -> None:
        theirs = open_checkpoint(DATA / "ling-micro")
        exact = load_file(MICRO / "model.safetensors")[EMBED].float()
        check_shared(open_draft(self.stored_with(tmp_path, **{EMBED: exact * 1.002})), theirs)
        draft = open_draft(self.stored_with(tmp_path, **{EMBED: exact * 1.05}))
        refused(lambda: check_shared(draft, theirs), CheckpointError, "row 0", "another target")

    def test_other_shapes(self) -> None:
        kimi = open_checkpoint(DATA / "kimi-micro")
        refused(lambda: check_shared(open_draft(MICRO), kimi), CheckpointError, "[320, 64]", "[320, 96]", "kimi-micro")

    def test_a_tied_target_has_its_head_in_the_embedding(self, tmp_path: Path) -> None:
        shutil.copytree(DATA / "ling-micro", tmp_path / "tied")
        config = json.loads((DATA / "ling-micro" / "config.json").read_text()) | {"tie_word_embeddings": True}
        (tmp_path / "tied" / "config.json").write_text(json.dumps(config))
        tensors = load_file(DATA / "ling-micro" / "model.safetensors")
        save_file(without(tensors, HEAD), tmp_path / "tied" / "model.safetensors")
        theirs = open_checkpoint(tmp_path / "tied")
        embed = theirs.tensor("embed")
        check_shared(open_draft(self.stored_with(tmp_path, **{HEAD: embed.clone()})), theirs)
        refused(lambda: check_shared(open_draft(MICRO), theirs), CheckpointError, "'lm_head.weight'", "word_embeddings")

    def test_what_is_not_compared(self) -> None:
        check_shared(open_draft(DATA / "dspark-ling-micro-specforge"), open_checkpoint(DATA / "ling-micro"))
        check_shared(open_draft("synthetic:ling-3.0-tiny-dspark"), open_checkpoint(DATA / "ling-micro"))
        check_shared(open_draft(MICRO), open_checkpoint("synthetic:ling-3.0-tiny?layers=4&experts=16"))


class TestSynthetic:
    SMALL = "synthetic:ling-3.0-tiny-dspark?layers=1&vocab=64&rank=8"

    @pytest.mark.parametrize(("name", "parameters"), [("flash", 1_363_707_905), ("tiny", 728_519_681)])
    def test_published_sizes(self, name: str, parameters: int) -> None:
        draft = open_draft(f"synthetic:ling-3.0-{name}-dspark")
        assert draft.parameters() == parameters and draft.layout == "synthetic" and draft.path is None
        shared = 2 * draft.spec.vocab * draft.spec.hidden
        assert draft.weight_bytes() == 2 * (parameters - shared) and draft.spec.drafts == 8
        model = PUBLISHED[f"ling-3.0-{name}"]
        check_fit(draft.spec, spec_from_config(model, where="x", name=name))

    def test_tensors_are_made_one_by_one_and_again_the_same(self) -> None:
        first, second = open_draft(self.SMALL), open_draft(self.SMALL)
        for name, shape in shapes(first.spec).items():
            value = first.tensor(name)
            assert value.shape == shape and value.dtype == torch.bfloat16
        for name in reversed(list(shapes(first.spec))):
            assert torch.equal(second.tensor(name), first.tensor(name)), name
        other = open_draft(self.SMALL + "&seed=1")
        assert not torch.equal(other.tensor("fc.weight"), first.tensor("fc.weight"))
        assert first.tensor(HEAD).shape == (64, 1536) and abs(float(first.tensor(EMBED).float().std()) - 1) < 0.05
        assert float(first.tensor("norm.weight").float().mean()) == pytest.approx(1, abs=0.02)
        joint = open_draft(self.SMALL + "&markov=rnn").tensor("markov_head.joint_proj.bias")
        assert joint.shape == (24,) and float(joint.float().std()) < 0.3

    def test_options(self) -> None:
        spec = open_draft("synthetic:ling-3.0-flash-dspark?layers=2&rank=16&markov=gated&block=4").spec
        assert (spec.layers, spec.rank, spec.markov, spec.block) == (2, 16, "gated", 4)
        bare = open_draft("synthetic:ling-3.0-flash-dspark?markov=none").spec
        assert (bare.markov, bare.rank, bare.confidence, bare.confidence_markov) == ("none", 0, True, False)
        cut = open_draft("synthetic:ling-3.0-tiny-dspark?vocab=512&target_layers=8").spec
        assert cut.vocab == 512 and cut.mask_id == 510 and cut.taps == (0, 1, 3, 4, 6)
        small = open_checkpoint("synthetic:ling-3.0-tiny?layers=8&experts=16&vocab=512").spec
        assert cut.mask_id == small.pad_id
        check_fit(cut, small)

    @pytest.mark.parametrize(
        ("text", "parts"),
        [
            ("ling-3.0-flash-dsprak", ("no synthetic draft", "did you mean 'ling-3.0-flash-dspark'")),
            ("ling-3.0-flash-dspark?layer=2", ("unknown key 'layer'", "did you mean 'layers'")),
            ("ling-3.0-flash-dspark?layers=2&layers=3", ("'layers' is given twice",)),
            ("ling-3.0-flash-dspark?layers=two", ("'layers' is 'two'", "a whole number")),
            ("ling-3.0-flash-dspark?layers=0", ("'num_hidden_layers' is 0",)),
            ("ling-3.0-flash-dspark?block=0", ("'block_size' is 0",)),
            ("ling-3.0-flash-dspark?rank=-1", ("'markov_rank' is -1",)),
            ("ling-3.0-flash-dspark?markov=lstm", ("'markov' is 'lstm'", "none, vanilla, gated, rnn")),
            ("ling-3.0-flash-dspark?markov=none&rank=8", ("'rank' is 8", "'markov' is none")),
            ("ling-3.0-flash-dspark?vocab=7", ("'vocab' is 7", "at least 8")),
            ("ling-3.0-flash-dspark?target_layers=5", ("'target_layers' is 5", "at least 6")),
        ],
    )
    def test_refused(self, text: str, parts: tuple[str, ...]) -> None:
        refused(lambda: open_draft("synthetic:" + text), ConfigError, "synthetic:" + text, *parts)
