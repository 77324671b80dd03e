"""config.json -> ModelSpec, for Ling-3.0 (BailingMoeV3, model_type bailing_hybrid) and Kimi-Linear.

Where public engines differ the owner's law is followed: partial_rotary_factor is ignored (RoPE covers the whole rope
slice), SwiGLU limits come from two lists with one entry per layer, the MTP layer has none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from soliton.checkpoint.config_keys import (
    HOUSEKEEPING,
    MOST_EXPERTS,
    MOST_LAYERS,
    Reader,
    dtype_name,
    limits,
    refuse_quantised,
    single_id,
    token_ids,
    words,
)
from soliton.errors import ConfigError, UnsupportedError
from soliton.model.spec import DenseSpec, KdaSpec, LayerSpec, MlaSpec, ModelSpec, MoeSpec, RopeSpec

# Published Ling configs carry these; no tensor and no formula of the V3 architecture depends on them.
_BAILING_DEAD = words(
    """
    use_qk_norm group_norm_size linear_silu up_proj_norm value_norm use_nGPT scale_router_input partial_rotary_factor
    num_kv_heads_for_linear_attn max_window_layers mtp_loss_scaling_factor seq_aux aux_loss_alpha router_dtype
    router_aux_loss_coef use_rmsnorm norm_head norm_softmax ep_size head_dtype
    """
)
# head_dim of a published Kimi config is hidden/heads and describes no tensor.
_KIMI_DEAD = words("head_dim rope_theta partial_rotary_factor seq_aux aux_loss_alpha router_aux_loss_coef")

_KDA_KEYS = ("kda_lower_bound", "kda_safe_gate", "short_conv_kernel_size", "no_kda_lora")
_BAILING_ARCHITECTURES = ("BailingMoeV3ForCausalLM", "BailingHybridForCausalLM")


def spec_from_config(config: Mapping[str, Any], *, where: str, name: str = "") -> ModelSpec:
    """The model that ``config`` (a parsed config.json) describes. ``where`` names the file in messages.

    Raises ConfigError for missing, mistyped, contradictory and unknown keys, UnsupportedError for a well-formed
    config of something else: another architecture, quantised weights, a feature without an implementation.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(f"{where}: a JSON object is needed, not {type(config).__name__}")
    reader = Reader(config, where)
    model_type = reader.raw("model_type", None)
    architectures = reader.raw("architectures", None)
    if architectures is not None and not isinstance(architectures, list):
        raise reader.fault("architectures", architectures, "a list of names is needed")
    named = [str(a) for a in architectures or ()]
    label = name or "model"
    if model_type == "bailing_hybrid":
        _check_bailing(config, named, where)
        return _bailing(reader, label)
    if model_type == "kimi_linear":
        if named and "KimiLinearForCausalLM" not in named:
            raise UnsupportedError(f"{where}: architecture {named}; only KimiLinearForCausalLM is supported")
        return _kimi(reader, label)
    raise UnsupportedError(
        f"{where}: model_type {model_type!r} (architectures {named or 'not given'}) is not supported; "
        "supported are bailing_hybrid (BailingMoeV3ForCausalLM) and kimi_linear (KimiLinearForCausalLM)"
    )


def _check_bailing(config: Mapping[str, Any], named: list[str], where: str) -> None:
    # Ling-2.6 shares the model_type but is another model: its linear layers are gated linear attention, and a
    # decoder that does not look further writes fluent nonsense.
    kda = [k for k in _KDA_KEYS if k in config]
    known = not named or any(a in _BAILING_ARCHITECTURES for a in named)
    if kda and not known and not any(a.startswith("Bailing") for a in named):
        raise UnsupportedError(
            f"{where}: architecture {', '.join(named)}; supported with model_type bailing_hybrid is "
            f"{_BAILING_ARCHITECTURES[0]}"
        )
    if not known or not kda:
        fault = f"architecture {', '.join(named)}" if not known else f"none of the keys {', '.join(_KDA_KEYS)}"
        raise UnsupportedError(
            f"{where}: model_type bailing_hybrid with {fault}: this looks like a Ling-2.6 checkpoint, whose linear "
            "layers are gated linear attention (GLA), not KDA; use a Ling-3.0 checkpoint (BailingMoeV3ForCausalLM)"
        )


def _mla_sizes(reader: Reader, *, rope: RopeSpec | None, scale: float, head_gate: bool, eps: float) -> MlaSpec:
    return MlaSpec(
        heads=reader.integer("num_attention_heads"),
        q_rank=reader.optional_integer("q_lora_rank"),
        kv_rank=reader.integer("kv_lora_rank"),
        nope_dim=reader.integer("qk_nope_head_dim"),
        rope_dim=reader.integer("qk_rope_head_dim"),
        value_dim=reader.integer("v_head_dim"),
        scale=scale,
        rope=rope,
        head_gate=head_gate,
        eps=eps,
    )


def _common_refusals(reader: Reader) -> None:
    refuse_quantised(reader)
    reader.must("hidden_act", "silu", "silu", "the experts are SwiGLU")
    for key in ("attention_bias", "mlp_bias"):
        reader.must(key, False, False, "no projection has a bias")
    reader.must("use_sliding_window", False, False, "every MLA layer attends to the whole context")
    reader.must("sliding_window", None, None, "every MLA layer attends to the whole context")
    heads = reader.integer("num_attention_heads")
    kv_heads = reader.integer("num_key_value_heads", heads)
    if kv_heads != heads:
        raise reader.fault("num_key_value_heads", kv_heads, f"MLA needs num_attention_heads = {heads}")
    if reader.optional_integer("qk_head_dim") not in (None, _qk_dim(reader)):
        raise reader.fault("qk_head_dim", reader.raw("qk_head_dim"), f"nope + rope is {_qk_dim(reader)}")


def _qk_dim(reader: Reader) -> int:
    return reader.integer("qk_nope_head_dim") + reader.integer("qk_rope_head_dim")


def _check_moe(reader: Reader, moe: MoeSpec, group_key: str, kept_key: str, top_key: str) -> None:
    if moe.experts % moe.groups:
        raise reader.fault(group_key, moe.groups, f"it must divide num_experts = {moe.experts}")
    per_group = moe.experts // moe.groups
    if moe.groups > 1 and per_group < 2:
        raise reader.fault(group_key, moe.groups, f"a group's score needs 2 experts, num_experts = {moe.experts}")
    if moe.top_groups > moe.groups:
        raise reader.fault(kept_key, moe.top_groups, f"there are only {group_key} = {moe.groups} groups")
    if moe.top_k > moe.top_groups * per_group:
        raise reader.fault(top_key, moe.top_k, f"the kept groups hold only {moe.top_groups * per_group} experts")


def _bailing_mixers(reader: Reader, layers: int) -> list[bool]:
    """True where a layer is MLA. An integer g: every g-th layer and the incomplete group at the end; a list: 0."""
    value = reader.raw("layer_group_size")
    if not isinstance(value, list):
        group = reader.integer("layer_group_size")
        tail = layers // group * group
        return [(i + 1) % group == 0 or i >= tail for i in range(layers)]
    if len(value) != layers or any(type(v) is not int or v not in (0, 1) for v in value):
        raise reader.fault(
            "layer_group_size", value, f"as a list it needs {layers} entries (num_hidden_layers), 1 = KDA and 0 = MLA"
        )
    return [v == 0 for v in value]


def _check_layer_types(reader: Reader, mla: list[bool]) -> None:
    value = reader.raw("layer_types", None)
    want = ["full_attention" if m else "linear_attention" for m in mla]
    if value is not None and value != want:
        raise reader.fault("layer_types", value, f"the other keys give {want}")


def _rope(reader: Reader, dim: int, max_position: int) -> tuple[RopeSpec, float, int]:
    """(rotation, factor on the softmax scale, longest position) from rope_theta and rope_scaling/rope_parameters.

    YaRN as Hugging Face reads it: cos and sin are multiplied by attention_factor, or mscale(factor, mscale) /
    mscale(factor, mscale_all_dim), or 0.1 ln(factor) + 1; the softmax scale changes only with mscale_all_dim.
    """
    old, new = reader.raw("rope_scaling", None), reader.raw("rope_parameters", None)
    if old is not None and new is not None and old != new:
        raise ConfigError(f"{reader.where}: 'rope_scaling' and 'rope_parameters' differ; keep one of them")
    key = "rope_parameters" if old is None else "rope_scaling"
    if old is None and new is None:
        return RopeSpec(dim=dim, theta=reader.positive("rope_theta")), 1.0, max_position
    scaling = reader.object(key)
    theta = scaling.positive("rope_theta") if "rope_theta" in scaling.data else reader.positive("rope_theta")
    reader.raw("rope_theta", None)
    kind = scaling.raw("rope_type", scaling.raw("type", "default"))
    scaling.raw("partial_rotary_factor", None)
    if kind == "default":
        scaling.finish()
        return RopeSpec(dim=dim, theta=theta), 1.0, max_position
    if kind != "yarn":
        raise UnsupportedError(f"{scaling.where}: rope type {kind!r} is not supported; supported are default and yarn")
    factor = scaling.positive("factor")
    if factor < 1:
        raise scaling.fault("factor", factor, "YaRN needs at least 1")
    original = scaling.integer("original_max_position_embeddings", max_position)
    scaling.must("truncate", True, True, "the ramp's ends are whole channels")
    for name in ("mscale", "mscale_all_dim", "attention_factor"):
        if scaling.raw(name, None) is not None:
            scaling.number(name)
    m, m_all, given = (scaling.data.get(k) for k in ("mscale", "mscale_all_dim", "attention_factor"))

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0

    if given is not None:
        amplitude = float(given)
    elif m and m_all:
        amplitude = mscale(m) / mscale(m_all)
    else:
        amplitude = mscale(1.0)
    rope = RopeSpec(
        dim=dim,
        theta=theta,
        factor=factor,
        original_max_position=original,
        beta_fast=scaling.positive("beta_fast", 32.0),
        beta_slow=scaling.positive("beta_slow", 1.0),
        mscale=amplitude,
    )
    scaling.finish()
    return rope, (mscale(m_all) ** 2 if m_all else 1.0), max(max_position, int(original * factor))


def _bailing(reader: Reader, name: str) -> ModelSpec:
    _common_refusals(reader)
    unverified = "no published checkpoint has it otherwise"
    reader.must("use_bias", False, False, "no projection has a bias")
    reader.must("use_qkv_bias", False, False, "no projection has a bias")
    reader.must("use_kda_lora", False, False, "the forget and output gates are full projections")
    reader.must("no_kda_lora", True, True, "the forget and output gates are full projections")
    reader.must("kda_safe_gate", True, True, f"the bounded decay gate is Ling's law; {unverified}")
    reader.must("use_mla_nope", False, False, "Ling's MLA layers rotate their rope channels")
    reader.must("rope_interleave", True, True, "RoPE turns adjacent pairs of channels")
    reader.must("mtp_use_kda", False, False, "the MTP layer is MLA")
    reader.must("score_function", "sigmoid", "sigmoid", "the router is a grouped sigmoid router")
    reader.must("scoring_func", "sigmoid", "sigmoid", "the router is a grouped sigmoid router")
    reader.must("topk_method", "noaux_tc", "noaux_tc", "groups are kept by the sum of their two best scores")
    reader.must("moe_router_enable_expert_bias", True, True, f"selection uses the expert bias; {unverified}")
    granularity = "gated_attention_proj_granularity_type"
    reader.must(granularity, ("head_wise", None), None, "the MLA output gate is one value a head")

    layers, heads = reader.integer("num_hidden_layers", high=MOST_LAYERS), reader.integer("num_attention_heads")
    eps, vocab = reader.positive("rms_norm_eps"), reader.integer("vocab_size")
    rope_dim = reader.integer("qk_rope_head_dim")
    rotary = reader.optional_integer("rotary_dim")
    if rotary not in (None, rope_dim) or rope_dim % 2:
        raise reader.fault("rotary_dim", rotary, f"it must equal qk_rope_head_dim = {rope_dim}, an even number")
    rope, scale_factor, max_position = _rope(reader, rope_dim, reader.integer("max_position_embeddings"))
    lower = reader.number("kda_lower_bound")
    if lower >= 0:
        raise reader.fault("kda_lower_bound", lower, "the log-decay's lower bound is below 0")
    head_dim = reader.integer("head_dim")
    kda = KdaSpec(
        heads=heads,
        key_dim=head_dim,
        value_dim=head_dim,
        conv_width=reader.integer("short_conv_kernel_size", low=2),
        gate="bounded",
        lower_bound=lower,
        eps=eps,
    )
    scale = _qk_dim(reader) ** -0.5 * scale_factor
    gated = reader.raw(granularity, None) == "head_wise"
    mla = _mla_sizes(reader, rope=rope, scale=scale, head_gate=gated, eps=eps)
    dense = DenseSpec(width=reader.integer("intermediate_size"))
    width = reader.integer("moe_intermediate_size")
    shared = reader.integer("moe_shared_expert_intermediate_size", width) * reader.integer("num_shared_experts")
    routed_limits = limits(reader, "expert_swiglu_limit_list", layers)
    shared_limits = limits(reader, "share_expert_swiglu_limit_list", layers)

    def moe(limit: float, shared_limit: float) -> MoeSpec:
        return MoeSpec(
            experts=reader.integer("num_experts", high=MOST_EXPERTS // layers),
            top_k=reader.integer("num_experts_per_tok"),
            groups=reader.integer("n_group", 1),
            top_groups=reader.integer("topk_group", 1),
            width=width,
            shared_width=shared,
            scaling=reader.positive("routed_scaling_factor", 1.0),
            renormalize=reader.flag("norm_topk_prob", True),
            limit=limit,
            shared_limit=shared_limit,
        )

    _check_moe(reader, moe(0.0, 0.0), "n_group", "topk_group", "num_experts_per_tok")
    is_mla, first = _bailing_mixers(reader, layers), reader.integer("first_k_dense_replace", 0, low=0)
    _check_layer_types(reader, is_mla)
    reader.raw("mlp_layer_types", None)
    built = tuple(
        LayerSpec(
            index=i,
            mixer=mla if is_mla[i] else kda,
            mlp=dense if i < first else moe(routed_limits[i], shared_limits[i]),
        )
        for i in range(layers)
    )
    nextn = reader.integer("num_nextn_predict_layers", 0, low=0)
    if nextn > 1:
        raise UnsupportedError(
            f"{reader.where}: 'num_nextn_predict_layers' is {nextn}; one MTP layer at most is supported "
            "(set it to 1 or 0 to decode with the first or with none)"
        )
    # The lists end with the last target layer, so the MTP layer has no clamp.
    mtp = LayerSpec(index=layers, mixer=mla, mlp=moe(0.0, 0.0)) if nextn else None
    return _finish(reader, "bailing_hybrid", name, vocab, eps, built, mtp, max_position, _BAILING_DEAD)


def _kimi_mixers(linear: Reader, layers: int) -> list[bool]:
    """True where a layer is MLA, from two lists of 1-based layer numbers that must cover 1..layers once."""
    kda, mla = linear.integers("kda_layers"), linear.integers("full_attn_layers")
    both = sorted(kda + mla)
    if both != list(range(1, layers + 1)):
        seen = set(both)
        missing = [i for i in range(1, layers + 1) if i not in seen]
        twice = sorted({i for i in both if both.count(i) > 1})
        outside = [i for i in both if not 1 <= i <= layers]
        raise ConfigError(
            f"{linear.where}: 'kda_layers' and 'full_attn_layers' count from 1 and must name each of the {layers} "
            f"layers (num_hidden_layers) exactly once; missing {missing}, twice {twice}, outside 1..{layers} {outside}"
        )
    return [i + 1 in set(mla) for i in range(layers)]


def _kimi(reader: Reader, name: str) -> ModelSpec:
    _common_refusals(reader)
    reader.must("mla_use_nope", True, True, "Kimi-Linear's MLA layers do not rotate")
    reader.must("rope_scaling", None, None, "Kimi-Linear's MLA layers do not rotate")
    reader.raw("rope_parameters", None)  # newer savers write theta here; nothing rotates
    reader.must("moe_router_activation_func", "sigmoid", "sigmoid", "the router is a sigmoid router")
    reader.must("moe_layer_freq", 1, 1, "every layer after the dense ones has experts")
    reader.must("num_nextn_predict_layers", (0, None), 0, "Kimi-Linear is decoded without an MTP layer (set it to 0)")

    layers, eps = reader.integer("num_hidden_layers", high=MOST_LAYERS), reader.positive("rms_norm_eps")
    vocab = reader.integer("vocab_size")
    linear = reader.object("linear_attn_config")
    head_dim = linear.integer("head_dim")
    kda = KdaSpec(
        heads=linear.integer("num_heads"),
        key_dim=head_dim,
        value_dim=head_dim,
        conv_width=linear.integer("short_conv_kernel_size", low=2),
        gate="softplus",
        gate_rank=head_dim,
        eps=eps,
    )
    is_mla = _kimi_mixers(linear, layers)
    linear.finish()
    _check_layer_types(reader, is_mla)
    reader.raw("mlp_layer_types", None)
    mla = _mla_sizes(reader, rope=None, scale=_qk_dim(reader) ** -0.5, head_gate=False, eps=eps)
    width = reader.integer("moe_intermediate_size")
    grouped = reader.flag("use_grouped_topk", True)
    groups, kept = reader.integer("num_expert_group", 1), reader.integer("topk_group", 1)
    moe = MoeSpec(
        experts=reader.integer("num_experts", high=MOST_EXPERTS // layers),
        top_k=reader.integer("num_experts_per_token"),
        groups=groups if grouped else 1,
        top_groups=kept if grouped else 1,
        width=width,
        shared_width=width * reader.integer("num_shared_experts"),
        scaling=reader.positive("routed_scaling_factor", 1.0),
        renormalize=reader.flag("moe_renormalize", True),
    )
    _check_moe(reader, moe, "num_expert_group", "topk_group", "num_experts_per_token")
    first = reader.integer("first_k_dense_replace", 0, low=0)
    dense = DenseSpec(width=reader.integer("intermediate_size"))
    built = tuple(
        LayerSpec(index=i, mixer=mla if is_mla[i] else kda, mlp=dense if i < first else moe) for i in range(layers)
    )
    # Older configs have only model_max_length, newer savers write both; the model itself knows no limit.
    lengths = [n for k in ("model_max_length", "max_position_embeddings") if (n := reader.optional_integer(k))]
    if not lengths:
        raise ConfigError(f"{reader.where}: 'model_max_length' is missing; it is the longest context in tokens")
    return _finish(reader, "kimi_linear", name, vocab, eps, built, None, lengths[0], _KIMI_DEAD)


def _finish(
    reader: Reader,
    family: Any,
    name: str,
    vocab: int,
    eps: float,
    layers: tuple[LayerSpec, ...],
    mtp: LayerSpec | None,
    max_position: int,
    dead: frozenset[str],
) -> ModelSpec:
    spec = ModelSpec(
        family=family,
        name=name,
        hidden=reader.integer("hidden_size"),
        vocab=vocab,
        eps=eps,
        layers=layers,
        mtp=mtp,
        max_position=max_position,
        dtype=dtype_name(reader),
        tied=reader.flag("tie_word_embeddings", False),
        eos_ids=token_ids(reader, "eos_token_id", vocab),
        pad_id=single_id(reader, "pad_token_id", vocab),
        bos_id=single_id(reader, "bos_token_id", vocab),
    )
    reader.finish(dead | HOUSEKEEPING)
    return spec
