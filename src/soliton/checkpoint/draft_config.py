"""A draft's config.json -> DraftSpec, for DSpark in three layouts and for DFlash in its own.

- native: all keys at the top, architecture Qwen3DSparkModel or LingDSparkModel.
- SpecForge: DSparkDraftModel, the method's keys in `dflash_config` or `dspark_config`; an export for serving renames
  the architecture and lifts some of them to the top. A key may stand in several objects if its values agree.
- speculators: told by `speculators_model_type`; layers in `transformer_layer_config`, taps counted from 1 (0 is the
  embedding), and a block drafts from its anchor only where `sample_from_anchor` says so.
- DFlash: DFlashDraftModel without a Markov head; the anchor's row drafts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

from soliton.checkpoint.config_keys import HOUSEKEEPING, MOST_LAYERS, Reader, refuse_quantised, words
from soliton.errors import ConfigError, UnsupportedError
from soliton.model.draft_spec import DraftSpec, Markov

Layout = Literal["native", "specforge", "speculators", "dflash", "synthetic"]

NATIVE = ("Qwen3DSparkModel", "LingDSparkModel")
SPECFORGE, DFLASH = "DSparkDraftModel", "DFlashDraftModel"
_HEADS: tuple[Markov, ...] = ("vanilla", "gated", "rnn")

# Of training, of the tokenizer, or of the sampler that the files bring along: no tensor of the draft depends on them.
_DEAD = words(
    """
    num_anchors max_window_layers confidence_head_alpha ce_loss_alpha l1_loss_alpha loss_decay_gamma bos_token_id
    eos_token_id pad_token_id mask_token tie_word_embeddings draft_arch num_speculative_tokens
    """
)
_SPECULATORS_DEAD = words(
    """
    speculators_version speculators_config has_no_defaults_at_init sliding_window_non_causal pure_draft_prefix_len
    emb_dim gru_hidden_dim lambda_base_start lambda_base_decay_ratio auf
    """
)
_WINDOW = "draft layers see the whole context, sliding windows are not supported"
_CAUSAL = "the rows of a block see each other both ways, causal drafts are not supported"
_MLA = "draft layers keep full keys and values, MLA drafts are not supported"
_DENSE = "draft layers are dense, experts are not supported"
_BIAS = "no projection has a bias"
# key -> (values that change nothing, why others are refused); looked up in every object of the config.
_FEATURES: dict[str, tuple[tuple[Any, ...], str]] = {
    "sliding_window": ((None,), _WINDOW),
    "use_sliding_window": ((False, None), _WINDOW),
    "is_causal": ((False, None), _CAUSAL),
    "causal": ((False, None), _CAUSAL),
    "kv_lora_rank": ((None,), _MLA),
    "q_lora_rank": ((None,), _MLA),
    "num_experts": ((0, None), _DENSE),
    "n_routed_experts": ((0, None), _DENSE),
    "attention_bias": ((False, None), _BIAS),
    "mlp_bias": ((False, None), _BIAS),
    "hidden_act": (("silu",), "the feed-forward block is SwiGLU"),
    "fc_layernorm": ((False, None), "taps enter the projection without a norm of their own"),
    "shift_label": ((False, None), "where a block starts to draft is read from sample_from_anchor"),
    "partial_rotary_factor": ((1.0, 1, None), "rotation covers the whole head"),
}


class _Scopes:
    """The objects that may hold a key of the method, in order of precedence."""

    def __init__(self, *readers: Reader) -> None:
        self.readers = readers

    def at(self, key: str) -> Reader:
        """The object that holds ``key``, the first if none does; ConfigError where two hold different values."""
        holding = [r for r in self.readers if r.raw(key, None) is not None]
        for other in holding[1:]:
            if other.data[key] != holding[0].data[key]:
                raise ConfigError(
                    f"{holding[0].where}: '{key}' is {holding[0].data[key]!r}, but {other.data[key]!r} in "
                    f"{other.where.rsplit(': ', 1)[-1]}; make them equal or keep one"
                )
        return holding[0] if holding else self.readers[0]


def draft_from_config(config: Any, *, where: str, name: str = "") -> tuple[DraftSpec, Layout]:
    """The draft that ``config`` (a parsed config.json) describes. ``where`` names the file in messages.

    ``target_layers`` is 0 where the config does not say it, as speculators' does not. Raises ConfigError for missing,
    mistyped, contradictory and unknown keys, UnsupportedError for a draft that is well described but another thing.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(f"{where}: a JSON object is needed, not {type(config).__name__}")
    top = Reader(config, where)
    if "speculators_model_type" in config:
        layers, scopes = top.object("transformer_layer_config"), _Scopes(top)
    else:
        nested = [top.object(k) for k in ("dspark_config", "dflash_config") if top.raw(k, None) is not None]
        layers, scopes = top, _Scopes(top, *nested)
    parts = list(dict.fromkeys([*scopes.readers, layers]))
    for reader in parts:
        refuse_quantised(reader)
        for key, (allowed, why) in _FEATURES.items():
            reader.must(key, allowed, allowed[0], why)
    layout, anchor_first = _layout(top, scopes)
    speculators = layout == "speculators"
    spec = _spec(layers, scopes, name or "draft", layout, anchor_first)
    heads = [w for w, there in (("Markov", spec.rank), ("confidence", spec.confidence)) if there]
    if heads and _is_dflash(layout, top):
        raise ConfigError(
            f"{where}: a DFlash draft has no {heads[0]} head, but its keys say so; for a DSpark draft set "
            + ("speculators_model_type" if speculators else "projector_type")
            + " to 'dspark'"
        )
    if speculators:
        _check_tokens(top, spec)
    for reader in parts:
        reader.finish(_DEAD | HOUSEKEEPING | (_SPECULATORS_DEAD if speculators else frozenset()))
    return spec, layout


def _is_dflash(layout: Layout, top: Reader) -> bool:
    return layout == "dflash" or top.raw("speculators_model_type", None) == "dflash"


def _layout(top: Reader, scopes: _Scopes) -> tuple[Layout, bool]:
    """(layout, whether the anchor's row drafts)."""
    architectures = top.raw("architectures", None)
    if architectures is not None and not isinstance(architectures, list):
        raise top.fault("architectures", architectures, "a list of names is needed")
    named = [str(a) for a in architectures or ()]
    projector, anchor = scopes.at("projector_type").raw("projector_type", None), scopes.at("sample_from_anchor")
    if projector not in (None, "dspark", "dflash"):
        raise UnsupportedError(f"{top.where}: 'projector_type' is {projector!r}; supported are dspark and dflash")
    if "speculators_model_type" in top.data:
        top.must("speculators_model_type", ("dspark", "dflash"), None, "other speculators are not block drafters")
        # Files older than the key have the anchor's row draft nothing.
        return "speculators", anchor.flag("sample_from_anchor", False)
    known = next((a for a in named if a in (*NATIVE, SPECFORGE, DFLASH)), None)
    if known is None and (named or projector is None):
        raise UnsupportedError(
            f"{top.where}: architecture {', '.join(named) or 'not given'} is no draft of a supported kind; supported "
            f"are {', '.join(NATIVE)}, {SPECFORGE} and {DFLASH}"
        )
    if projector == "dflash" and known not in (None, DFLASH):
        raise ConfigError(f"{top.where}: architecture {known} is DSpark, but 'projector_type' is 'dflash'; correct one")
    if projector == "dflash" or (projector is None and known == DFLASH):
        return "dflash", anchor.flag("sample_from_anchor", False)
    layout: Layout = "native" if known in NATIVE and "dflash_config" not in top.data else "specforge"
    return layout, anchor.flag("sample_from_anchor", True)


def _spec(layers: Reader, scopes: _Scopes, name: str, layout: Layout, anchor_first: bool) -> DraftSpec:
    speculators = layout == "speculators"
    count, heads = layers.integer("num_hidden_layers", high=MOST_LAYERS), layers.integer("num_attention_heads")
    kv_heads, head_dim = layers.integer("num_key_value_heads"), layers.integer("head_dim")
    if heads % kv_heads:
        raise layers.fault("num_key_value_heads", kv_heads, f"it must divide num_attention_heads = {heads}")
    if head_dim % 2:
        raise layers.fault("head_dim", head_dim, "rotation turns pairs of channels, so an even number is needed")
    mode = scopes.at("attention_mode")
    mode.must("attention_mode", ("mha", "gqa", None), None, _MLA)
    if mode.raw("attention_mode", None) == "mha" and heads != kv_heads:
        raise mode.fault("attention_mode", "mha", f"there are {heads} query heads and {kv_heads} key-value heads")
    _check_layer_types(layers, count)
    hidden, vocab = layers.integer("hidden_size"), layers.integer("vocab_size")
    width = scopes.at("target_hidden_size")
    width.must("target_hidden_size", (None, hidden), None, f"the draft's hidden_size is {hidden} and must be the same")
    markov, rank = _markov(scopes, layout in ("speculators", "dflash"))
    confidence = scopes.at("enable_confidence_head").flag("enable_confidence_head", False)
    reader = scopes.at("confidence_head_with_markov")
    confidence_markov = reader.flag("confidence_head_with_markov", False)
    if confidence and confidence_markov and markov == "none":
        raise reader.fault("confidence_head_with_markov", True, "markov_rank is 0, so there is no Markov embedding")
    return DraftSpec(
        name=name,
        hidden=hidden,
        vocab=vocab,
        layers=count,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        width=layers.integer("intermediate_size"),
        eps=layers.positive("rms_norm_eps"),
        theta=_theta(layers),
        block=scopes.at("block_size").integer("block_size"),
        mask_id=scopes.at("mask_token_id").integer("mask_token_id", low=0),
        taps=_taps(scopes, speculators),
        target_layers=scopes.at("num_target_layers").integer(
            "num_target_layers", *((0,) if speculators else ()), low=0
        ),
        markov=markov,
        rank=rank,
        confidence=confidence,
        confidence_markov=confidence and confidence_markov,
        anchor_first=anchor_first,
        draft_vocab=_draft_vocab(scopes, vocab),
        max_position=layers.integer("max_position_embeddings", 1 << 30),
    )


def _check_layer_types(layers: Reader, count: int) -> None:
    types = layers.raw("layer_types", None)
    if types is None:
        return
    if not isinstance(types, list) or len(types) != count:
        raise layers.fault("layer_types", types, f"a list with one entry a layer is needed, {count} in all")
    for i, kind in enumerate(types):
        if kind != "full_attention":
            raise UnsupportedError(
                f"{layers.where}: layer {i} is {kind!r} in 'layer_types'; only 'full_attention' is supported: draft "
                "layers see the whole context"
            )


def _markov(scopes: _Scopes, optional: bool) -> tuple[Markov, int]:
    rank = scopes.at("markov_rank").integer("markov_rank", *((0,) if optional else ()), low=0)
    reader = scopes.at("markov_head_type")
    kind = reader.raw("markov_head_type", "vanilla")
    if rank == 0:
        return "none", 0
    reader.must("markov_head_type", _HEADS, "vanilla", "these are DSpark's Markov heads")
    return cast(Markov, kind), rank


def _taps(scopes: _Scopes, speculators: bool) -> tuple[int, ...]:
    key = "aux_hidden_state_layer_ids" if speculators else "target_layer_ids"
    reader = scopes.at(key)
    taps = reader.integers(key)
    if not taps:
        raise reader.fault(key, taps, "at least one layer of the target is needed")
    return tuple(t - 1 if speculators else t for t in taps)


def _draft_vocab(scopes: _Scopes, vocab: int) -> int | None:
    """The size of the draft's own vocabulary, None where it is the target's."""
    reader = scopes.at("draft_vocab_size")
    size = reader.optional_integer("draft_vocab_size")
    if size is not None and size > vocab:
        raise reader.fault("draft_vocab_size", size, f"the target's vocabulary has vocab_size = {vocab}")
    return None if size == vocab else size


def _theta(layers: Reader) -> float:
    """The rotation's base: of rope_parameters, of an older rope_scaling, or at the top. Nothing else may turn it."""
    theta: float | None = None
    for key in ("rope_parameters", "rope_scaling"):
        if layers.raw(key, None) is None:
            continue
        rope = layers.object(key)
        kind = rope.raw("rope_type", rope.raw("type", "default"))
        if kind != "default":
            raise UnsupportedError(f"{rope.where}: rope type {kind!r} is not supported for drafts; only default is")
        rope.must("partial_rotary_factor", (1.0, 1, None), None, "rotation covers the whole head")
        if theta is None and "rope_theta" in rope.data:
            theta = rope.positive("rope_theta")
        rope.finish(words("type rope_theta"))
    layers.raw("rope_theta", None)
    return layers.positive("rope_theta") if theta is None else theta


def _check_tokens(top: Reader, spec: DraftSpec) -> None:
    """The drafts of a step that speculators_config gives may not exceed those of a block: then the layout is wrong."""
    methods = top.data.get("speculators_config")
    methods = methods.get("proposal_methods") if isinstance(methods, dict) else None
    for method in methods if isinstance(methods, list) else ():
        tokens = method.get("speculative_tokens") if isinstance(method, dict) else None
        if isinstance(tokens, int) and tokens > spec.drafts:
            raise ConfigError(
                f"{top.where}: 'speculative_tokens' is {tokens}, but block_size {spec.block} with sample_from_anchor "
                f"{str(spec.anchor_first).lower()} makes {spec.drafts} drafts; correct the one that is wrong"
            )
