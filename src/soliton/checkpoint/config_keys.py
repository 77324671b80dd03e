"""Reading a config.json key by key: types, ranges, and the keys that mean nothing to a decoder.

A key is *read* (its value decides something), *dead* (published configs carry it, no computation uses it) or
*housekeeping* (written by the library that saved the file). Anything else is refused: a key nobody reads may be a
misspelt one that somebody meant.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any

from soliton.errors import ConfigError, UnsupportedError, nearest


def words(text: str) -> frozenset[str]:
    """The set of the words in ``text``."""
    return frozenset(text.split())


# What Hugging Face's PretrainedConfig writes beside a model's own keys, of any version still found in the wild.
HOUSEKEEPING = words(
    """
    _name_or_path _commit_hash _attn_implementation _attn_implementation_autoset attn_implementation auto_map
    architectures model_type transformers_version torch_dtype dtype use_cache return_dict return_dict_in_generate
    output_attentions output_hidden_states output_scores output_router_logits torchscript use_bfloat16 tf_legacy_loss
    pruned_heads chunk_size_feed_forward is_encoder_decoder is_decoder is_composition cross_attention_hidden_size
    add_cross_attention tie_encoder_decoder finetuning_task id2label label2id num_labels task_specific_params
    problem_type tokenizer_class prefix sep_token_id decoder_start_token_id max_length min_length do_sample
    early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty
    length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences
    forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens attention_dropout hidden_dropout embedding_dropout output_dropout initializer_range
    pretraining_tp unsloth_version unsloth_fixed
    """
)

DTYPES = ("bfloat16", "float16", "float32")
# Far beyond any model: a count above it is a typing error, found before anything of that size is built.
MOST = 1 << 31
MOST_LAYERS, MOST_EXPERTS = 1 << 10, 1 << 18  # experts: of all layers together

_MISSING = object()


class Reader:
    """Typed access to one JSON object; remembers which keys were read so that the rest can be refused.

    Every getter raises ConfigError naming file, key and value. ``where`` is the file (and object) in messages.
    """

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data = data
        self.where = where
        self.seen: set[str] = set()

    def raw(self, key: str, default: Any = _MISSING) -> Any:
        """The value as it is; ConfigError when it is absent and there is no default."""
        self.seen.add(key)
        if key in self.data:
            return self.data[key]
        if default is _MISSING:
            close = difflib.get_close_matches(key, [k for k in self.data if k not in self.seen], n=1, cutoff=0.8)
            hint = f" (it has '{close[0]}': a misspelling?)" if close else ""
            raise ConfigError(f"{self.where}: the key '{key}' is missing{hint}; take config.json from the checkpoint")
        return default

    def fault(self, key: str, value: Any, want: str) -> ConfigError:
        return ConfigError(f"{self.where}: '{key}' is {value!r}, but {want}")

    def integer(self, key: str, default: Any = _MISSING, *, low: int = 1, high: int = MOST) -> int:
        value = self.raw(key, default)
        # A float such as 4.0 comes from tools that rewrite JSON; 4.5 and true do not mean a count.
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self.fault(key, value, f"a whole number of at least {low} is needed")
        if value > high:
            raise self.fault(key, value, f"no model has more than {high}; take config.json from the checkpoint")
        return value

    def optional_integer(self, key: str, default: int | None = None) -> int | None:
        return None if self.raw(key, default) is None else self.integer(key)

    def number(self, key: str, default: Any = _MISSING) -> float:
        value = self.raw(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.fault(key, value, "a finite number is needed")
        return float(value)

    def positive(self, key: str, default: Any = _MISSING) -> float:
        value = self.number(key, default)
        if value <= 0:
            raise self.fault(key, value, "a number above 0 is needed")
        return value

    def flag(self, key: str, default: Any = _MISSING) -> bool:
        value = self.raw(key, default)
        if not isinstance(value, bool):
            raise self.fault(key, value, "true or false is needed")
        return value

    def integers(self, key: str) -> list[int]:
        value = self.raw(key)
        if not isinstance(value, list) or any(isinstance(v, bool) or not isinstance(v, int) for v in value):
            raise self.fault(key, value, "a list of whole numbers is needed")
        return value

    def must(self, key: str, allowed: Any, default: Any, why: str) -> None:
        """Accept only ``allowed`` (a value or a tuple of them); UnsupportedError otherwise, with the reason."""
        choices = allowed if isinstance(allowed, tuple) else (allowed,)
        value = self.raw(key, default)
        if not any(type(value) is type(c) and value == c for c in choices):
            listed = " or ".join(repr(c) for c in choices)
            raise UnsupportedError(f"{self.where}: '{key}' is {value!r}; only {listed} is supported: {why}")

    def object(self, key: str) -> Reader:
        value = self.raw(key)
        if not isinstance(value, dict):
            raise self.fault(key, value, "an object is needed")
        return Reader(value, f"{self.where}: {key}")

    def finish(self, dead: frozenset[str] = frozenset()) -> None:
        """Refuse every key that is neither read, dead nor housekeeping."""
        known = self.seen | dead
        extra = [k for k in self.data if k not in known]
        if extra:
            key = extra[0]
            more = f" (and {len(extra) - 1} more: {', '.join(extra[1:5])})" if len(extra) > 1 else ""
            raise ConfigError(
                f"{self.where}: unknown key '{key}'{nearest(key, known)}{more}; "
                "correct or remove it, because a key that nothing reads may change what the model computes"
            )


def token_ids(reader: Reader, key: str, vocab: int) -> tuple[int, ...]:
    """``key`` as token ids: null, one id or a list; each must be below ``vocab``."""
    value = reader.raw(key, None)
    listed = [] if value is None else value if isinstance(value, list) else [value]
    for token in listed:
        if isinstance(token, bool) or not isinstance(token, int):
            raise reader.fault(key, value, "a token id or a list of them is needed")
        if not 0 <= token < vocab:
            raise reader.fault(key, value, f"token ids run from 0 to vocab_size - 1 = {vocab - 1}")
    return tuple(dict.fromkeys(listed))


def single_id(reader: Reader, key: str, vocab: int) -> int | None:
    """``key`` as one token id or None."""
    ids = token_ids(reader, key, vocab)
    if len(ids) > 1:
        raise reader.fault(key, list(ids), "one token id is needed")
    return ids[0] if ids else None


def dtype_name(reader: Reader) -> str:
    """The checkpoint's own dtype from `dtype` or the older `torch_dtype`; bfloat16 when neither is there."""
    new, old = reader.raw("dtype", None), reader.raw("torch_dtype", None)
    value = new if new is not None else old
    if value is None:
        return "bfloat16"
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        key = "dtype" if new is not None else "torch_dtype"
        raise UnsupportedError(f"{reader.where}: '{key}' is {value!r}; supported are {', '.join(DTYPES)}")
    return name


def limits(reader: Reader, key: str, layers: int) -> tuple[float, ...]:
    """``key`` as one clamp per layer, 0 for none; null or absent: no clamp anywhere."""
    value = reader.raw(key, None)
    if value is None:
        return (0.0,) * layers
    if not isinstance(value, list):
        raise reader.fault(key, value, "a list or null is needed")
    if len(value) != layers:
        raise ConfigError(
            f"{reader.where}: '{key}' has {len(value)} entries, but num_hidden_layers is {layers}; "
            "one limit per layer is needed (0 or null: no clamp)"
        )
    found = []
    for i, entry in enumerate(value):
        entry = 0 if entry is None else entry
        if isinstance(entry, bool) or not isinstance(entry, int | float) or not 0 <= entry < math.inf:
            raise reader.fault(f"{key}[{i}]", entry, "a finite number of at least 0, or null, is needed")
        found.append(float(entry))
    return tuple(found)


def refuse_quantised(reader: Reader) -> None:
    """UnsupportedError naming method and format when the config describes quantised weights."""
    value = reader.raw("quantization_config", None)
    if value is None:
        return
    if not isinstance(value, dict):
        raise reader.fault("quantization_config", value, "an object or null is needed")
    method = value.get("quant_method", "unnamed")
    parts = [str(value[k]) for k in ("format", "fmt", "routed_experts_quant_method") if value.get(k)]
    groups = value.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            parts.append(f"{weights.get('type', '?')}{weights.get('num_bits', '?')}")
    detail = f" ({', '.join(parts)})" if parts else ""
    raise UnsupportedError(
        f"{reader.where}: quantization_config says {method}{detail}; quantised formats are not supported yet by this "
        "version; use the bf16 checkpoint"
    )
