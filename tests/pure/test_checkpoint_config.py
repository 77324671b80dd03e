"""config.json -> ModelSpec: every published form is read, everything else is refused by name."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

from soliton.checkpoint import spec_from_config
from soliton.checkpoint.published import PUBLISHED
from soliton.errors import ConfigError, UnsupportedError
from soliton.model.spec import DenseSpec, KdaSpec, MlaSpec, MoeSpec

SHARED = Path(__file__).parents[2].parent / "shared" / "conformance"
LING, KIMI = "ling-3.0-flash", "kimi-linear-48b"


def config(name: str = LING, **changes: Any) -> dict[str, Any]:
    """A published config with ``changes``; a value of ``...`` removes the key."""
    made = copy.deepcopy(PUBLISHED[name]) | changes
    return {k: v for k, v in made.items() if v is not ...}


def refused(data: dict[str, Any], kind: type[Exception], *parts: str) -> None:
    with pytest.raises(kind) as caught:
        spec_from_config(data, where="dir/config.json")
    for part in ("dir/config.json", *parts):
        assert part in str(caught.value), str(caught.value)


@pytest.mark.parametrize("name", ["ling-micro", "kimi-micro", "ling-mini-128"])
def test_conformance_configs(name: str) -> None:
    if not SHARED.exists():
        pytest.skip(f"conformance data absent at {SHARED}: the configs there are not checked")
    data = json.loads((SHARED / name / "config.json").read_text())
    spec = spec_from_config(data, where=name)
    assert len(spec.layers) == data["num_hidden_layers"] and spec.eos_ids == (data["eos_token_id"],)
    if name == "kimi-micro":
        # The golden latents were normalised with the config's 1e-5.
        kda, mla = spec.layers[0].mixer, spec.layers[3].mixer
        assert isinstance(kda, KdaSpec) and (kda.gate, kda.gate_rank, kda.eps) == ("softplus", 16, 1e-5)
        assert isinstance(mla, MlaSpec) and (mla.eps, mla.rope, mla.head_gate, mla.value_dim) == (1e-5, None, False, 24)
        assert spec.mla_layers == (3, 6) and mla.scale == 24**-0.5
    if name == "ling-micro":
        moe = [s.mlp for s in spec.layers if isinstance(s.mlp, MoeSpec)]
        assert [(m.limit, m.shared_limit) for m in moe] == [(0, 0), (0, 0), (0, 2), (1, 2), (2, 1)]
        assert isinstance(spec.layers[0].mlp, DenseSpec) and spec.mtp is not None and spec.mtp.index == 6


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ling-micro-fp8", ["fp8", "e4m3"]),
        ("ling-mini-128-fp8", ["fp8"]),
        ("ling-micro-int4", ["compressed-tensors", "int4"]),
    ],
)
def test_conformance_quantised_is_refused(name: str, words: list[str]) -> None:
    if not SHARED.exists():
        pytest.skip(f"conformance data absent at {SHARED}: the configs there are not checked")
    data = json.loads((SHARED / name / "config.json").read_text())
    refused(data, UnsupportedError, *words, "not supported yet", "use the bf16 checkpoint")


def test_mxfp4_is_named() -> None:
    quant = {"quant_method": "fp8", "fmt": "e4m3", "routed_experts_quant_method": "mxfp4"}
    refused(config(quantization_config=quant), UnsupportedError, "mxfp4", "bf16")


def test_flash_numbers() -> None:
    spec = spec_from_config(config(), where="x")
    mla = spec.layers[5].mixer
    assert isinstance(mla, MlaSpec) and mla.rope is not None
    assert mla.scale == 192**-0.5 and mla.head_gate
    assert (mla.rope.dim, mla.rope.theta, mla.rope.factor, mla.rope.mscale) == (64, 6e6, 1, 1)  # no partial factor
    kda = spec.layers[0].mixer
    assert isinstance(kda, KdaSpec) and (kda.gate, kda.lower_bound, kda.gate_rank) == ("bounded", -5.0, None)


def test_ling_2_6_is_another_model() -> None:
    kda_keys = dict.fromkeys(("kda_lower_bound", "kda_safe_gate", "short_conv_kernel_size", "no_kda_lora"), ...)
    refused(config(architectures=["BailingMoeV2_5ForCausalLM"], **kda_keys), UnsupportedError, "Ling-2.6", "GLA", "KDA")
    refused(config(**kda_keys), UnsupportedError, "Ling-2.6", "kda_lower_bound")
    refused(config(architectures=["LlamaForCausalLM"]), UnsupportedError, "LlamaForCausalLM", "BailingMoeV3ForCausalLM")
    refused(config(model_type="llama"), UnsupportedError, "'llama'", "bailing_hybrid")
    refused(config(KIMI, architectures=["OtherForCausalLM"]), UnsupportedError, "OtherForCausalLM", "KimiLinear")


@pytest.mark.parametrize("key", ["hidden_size", "num_experts", "kda_lower_bound", "rms_norm_eps", "head_dim"])
def test_missing_key(key: str) -> None:
    refused(config(**{key: ...}), ConfigError, f"'{key}' is missing")


@pytest.mark.parametrize("name", [LING, KIMI])
@pytest.mark.parametrize("key", ["num_experts", "num_hidden_layers", "hidden_size", "vocab_size"])
def test_absurd_sizes_are_refused_at_once(key: str, name: str) -> None:
    refused(config(name, **{key: 10**12}), ConfigError, f"'{key}' is {10**12}", "no model has more than")
    if key.startswith("num"):
        refused(config(name, **{key: 10**7}), ConfigError, f"'{key}' is {10**7}", "no model has more than")


def test_misspelt_required_key_is_pointed_at() -> None:
    refused(config(num_experts=..., num_expert=512), ConfigError, "'num_experts' is missing", "'num_expert'")


def test_unknown_key_offers_nearest() -> None:
    refused(config(expert_swiglu_limits_list=[0] * 42), ConfigError, "unknown key", "'expert_swiglu_limit_list'")
    refused(config(KIMI, expert_swiglu_limit_list=[0] * 27), ConfigError, "unknown key 'expert_swiglu_limit_list'")
    nested = copy.deepcopy(PUBLISHED[KIMI]["linear_attn_config"]) | {"head_dims": 1}
    refused(config(KIMI, linear_attn_config=nested), ConfigError, "linear_attn_config", "did you mean 'head_dim'")


def test_housekeeping_and_dead_keys_are_silent() -> None:
    extra = {"transformers_version": "5.0", "auto_map": {}, "torch_dtype": "bfloat16", "_name_or_path": "x"}
    extra |= {"use_qk_norm": True, "linear_silu": True, "max_window_layers": 20, "id2label": {}, "top_k": 50}
    assert spec_from_config(config(**extra), where="x") == spec_from_config(config(), where="x")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "2560"),
        ("hidden_size", True),
        ("hidden_size", 2560.5),
        ("num_experts", 0),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", math.nan),
        ("kda_lower_bound", 5),
        ("norm_topk_prob", 1),
        ("architectures", "BailingMoeV3ForCausalLM"),
        ("eos_token_id", 157184),
        ("eos_token_id", [1, -1]),
        ("pad_token_id", "x"),
        ("layer_group_size", [1, 0]),
        ("qk_head_dim", 128),
        ("rotary_dim", 32),
        ("num_key_value_heads", 8),
        ("n_group", 7),
        ("topk_group", 9),
        ("num_experts_per_tok", 300),
        ("tie_word_embeddings", "no"),
    ],
)
def test_wrong_value_names_key_and_value(key: str, value: Any) -> None:
    refused(config(**{key: value}), ConfigError, f"'{key}'")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kda_safe_gate", False),
        ("use_kda_lora", True),
        ("no_kda_lora", False),
        ("use_qkv_bias", True),
        ("use_bias", True),
        ("mtp_use_kda", True),
        ("score_function", "softmax"),
        ("scoring_func", "softmax"),
        ("topk_method", "greedy"),
        ("gated_attention_proj_granularity_type", "element_wise"),
        ("hidden_act", "gelu"),
        ("use_mla_nope", True),
        ("rope_interleave", False),
        ("num_nextn_predict_layers", 2),
        ("moe_router_enable_expert_bias", False),
        ("dtype", "float64"),
    ],
)
def test_unsupported_feature_is_named(key: str, value: Any) -> None:
    refused(config(**{key: value}), UnsupportedError, f"'{key}'", str(value))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mla_use_nope", False),
        ("moe_router_activation_func", "softmax"),
        ("moe_layer_freq", 2),
        ("num_nextn_predict_layers", 1),
    ],
)
def test_unsupported_kimi_feature_is_named(key: str, value: Any) -> None:
    refused(config(KIMI, **{key: value}), UnsupportedError, f"'{key}'", str(value))


def test_limit_lists() -> None:
    refused(config(expert_swiglu_limit_list=[0] * 43), ConfigError, "43 entries", "num_hidden_layers is 42")
    refused(config(share_expert_swiglu_limit_list=[-1] * 42), ConfigError, "share_expert_swiglu_limit_list[0]", "-1")
    spec = spec_from_config(config(expert_swiglu_limit_list=None, share_expert_swiglu_limit_list=...), where="x")
    assert all((s.mlp.limit, s.mlp.shared_limit) == (0, 0) for s in spec.layers if isinstance(s.mlp, MoeSpec))


def test_layer_rule() -> None:
    none = {"expert_swiglu_limit_list": None, "share_expert_swiglu_limit_list": None}
    tail = spec_from_config(config(num_hidden_layers=8, layer_group_size=3, **none), where="x")
    assert tail.mla_layers == (2, 5, 6, 7)  # the incomplete last group is MLA throughout
    listed = spec_from_config(config(num_hidden_layers=4, layer_group_size=[1, 0, 1, 1], **none), where="x")
    assert listed.kda_layers == (0, 2, 3) and listed.mla_layers == (1,)
    refused(config(layer_types=["full_attention"] * 42), ConfigError, "'layer_types'")


@pytest.mark.parametrize(
    ("kda", "mla", "parts"),
    [
        ([1, 2], [4], ["missing [3]"]),
        ([1, 2, 3], [3, 4], ["twice [3]"]),
        ([0, 1, 2], [3], ["missing [4]", "outside 1..4 [0]"]),
        ([1, 2, 3], [4, 5], ["outside 1..4 [5]"]),
    ],
)
def test_kimi_lists_cover_every_layer_once(kda: list[int], mla: list[int], parts: list[str]) -> None:
    linear = PUBLISHED[KIMI]["linear_attn_config"] | {"kda_layers": kda, "full_attn_layers": mla}
    refused(config(KIMI, num_hidden_layers=4, linear_attn_config=linear), ConfigError, "exactly once", *parts)


def test_yarn_only_when_asked() -> None:
    yarn = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 131072, "rope_theta": 6e6}
    spec = spec_from_config(config(rope_scaling=yarn, max_position_embeddings=131072), where="x")
    mla = spec.layers[5].mixer
    assert isinstance(mla, MlaSpec) and mla.rope is not None and mla.scale == 192**-0.5
    assert (mla.rope.factor, mla.rope.original_max_position, spec.max_position) == (2.0, 131072, 262144)
    assert mla.rope.mscale == pytest.approx(1.0693147)
    spec = spec_from_config(config(rope_scaling=yarn | {"mscale": 1.0, "mscale_all_dim": 1.0}), where="x")
    mla = spec.layers[5].mixer
    assert isinstance(mla, MlaSpec) and mla.rope is not None
    assert mla.rope.mscale == 1.0 and mla.scale == pytest.approx(192**-0.5 * 1.0693147**2)
    same = spec_from_config(
        config(rope_theta=..., rope_parameters={"rope_type": "default", "rope_theta": 6e6}), where="x"
    )
    assert same == spec_from_config(config(), where="x")


def test_other_rope_is_refused() -> None:
    refused(config(rope_scaling={"type": "linear", "factor": 2}), UnsupportedError, "'linear'", "yarn")
    refused(config(rope_scaling={"type": "yarn"}), ConfigError, "rope_scaling", "'factor' is missing")
    refused(config(rope_scaling={"type": "yarn", "factor": 2, "beta_fats": 1}), ConfigError, "did you mean 'beta_fast'")
    refused(config(rope_scaling={"type": "yarn", "factor": 0.5}), ConfigError, "0.5")


def test_token_ids_may_be_lists() -> None:
    spec = spec_from_config(config(eos_token_id=[5, 6, 5], bos_token_id=1, pad_token_id=None), where="x")
    assert (spec.eos_ids, spec.bos_id, spec.pad_id) == ((5, 6), 1, None)


def test_not_an_object() -> None:
    refused([], ConfigError, "JSON object")  # type: ignore[arg-type]
