"""open_checkpoint on small directories made here: what is right opens, every fault is named with its number."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from soliton.checkpoint import open_checkpoint, spec_from_config, tensor_table
from soliton.checkpoint.published import PUBLISHED
from soliton.errors import CheckpointError, ConfigError, UnsupportedError

SHARED = Path(__file__).parents[2].parent / "shared" / "conformance"
SIZES: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 3, "layer_group_size": 3, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 24, "first_k_dense_replace": 1, "num_experts": 4,
    "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    "moe_shared_expert_intermediate_size": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "qk_head_dim": 12, "rotary_dim": 4, "v_head_dim": 8, "vocab_size": 32, "eos_token_id": 31, "pad_token_id": 30,
    "max_position_embeddings": 128, "expert_swiglu_limit_list": [0, 0, 4],
    "share_expert_swiglu_limit_list": None,
}  # fmt: skip
NORM = "model.norm.weight"


def micro(**changes: Any) -> dict[str, Any]:
    return PUBLISHED["ling-3.0-flash"] | SIZES | changes


def weights(config: dict[str, Any]) -> dict[str, Tensor]:
    table = tensor_table(spec_from_config(config, where="x"))
    return {e.names[0]: torch.randn(e.file_shapes[-1]).bfloat16() for e in table.values()}


def write(path: Path, config: dict[str, Any] | None = None, tensors: dict[str, Tensor] | None = None) -> Path:
    config = micro() if config is None else config
    (path / "config.json").write_text(json.dumps(config))
    save_file(weights(config) if tensors is None else tensors, path / "model.safetensors")
    return path


def write_shards(path: Path, edit: Callable[[list[dict[str, Tensor]], dict[str, str]], None] | None = None) -> Path:
    config = micro()
    (path / "config.json").write_text(json.dumps(config))
    items = sorted(weights(config).items())
    parts = [dict(items[:20]), dict(items[20:])]
    index = {n: f"model-{i}.safetensors" for i, part in enumerate(parts) for n in part}
    if edit:
        edit(parts, index)
    for i, part in enumerate(parts):
        save_file(part, path / f"model-{i}.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return path


def refused(path: Path | str, kind: type[Exception], *parts: str) -> None:
    with pytest.raises(kind) as caught:
        open_checkpoint(path)
    for part in parts:
        assert part in str(caught.value), str(caught.value)


@pytest.mark.parametrize("name", ["ling-micro", "kimi-micro", "ling-mini-128"])
def test_conformance_checkpoints_open(name: str) -> None:
    if not SHARED.exists():
        pytest.skip(f"conformance data absent at {SHARED}: the checkpoints there are not opened")
    checkpoint = open_checkpoint(SHARED / name)
    for role in checkpoint.roles():
        assert checkpoint.tensor(role).shape == checkpoint.table[role].shape
    total = sum(f.stat().st_size for f in (SHARED / name).glob("model*.safetensors"))
    assert 0 < total - checkpoint.weight_bytes() < 200_000  # the rest is headers
    assert checkpoint.tensor("layers.0.kda.A_log").dtype == torch.float32


def test_roles_and_shapes(tmp_path: Path) -> None:
    tensors = weights(micro())
    checkpoint = open_checkpoint(write(tmp_path, tensors=tensors))
    conv = tensors["model.layers.0.attention.q_conv1d.weight"]
    assert conv.shape == (16, 1, 4) and torch.equal(checkpoint.tensor("layers.0.kda.q_conv"), conv[:, 0])
    assert checkpoint.has("mtp.eh") and checkpoint.has("layers.2.mla.gate") and not checkpoint.has("layers.2.kda.q")
    assert checkpoint.weight_bytes() == sum(t.numel() * 2 for t in tensors.values())
    assert checkpoint.tokenizer is None and checkpoint.chat_template is None and checkpoint.eos_ids == (31,)
    with pytest.raises(KeyError, match=r"layers\.9\.kda\.q"):
        checkpoint.tensor("layers.9.kda.q")


def test_other_layouts_are_accepted(tmp_path: Path) -> None:
    tensors = weights(micro())
    for name in [n for n in tensors if n.endswith("conv1d.weight")]:
        tensors[name] = tensors[name].squeeze(1)
    for name in [n for n in tensors if n.endswith("expert_bias")]:
        tensors[name.replace("expert_bias", "e_score_correction_bias")] = tensors.pop(name)
    tensors["model.layers.0.attention.A_log"] = torch.zeros(2)
    tensors["model.layers.3.shared_head.head.weight"] = torch.zeros(1)
    tensors["model.layers.0.attention.rotary_emb.inv_freq"] = torch.zeros(2)
    checkpoint = open_checkpoint(write(tmp_path, tensors=tensors))
    assert checkpoint.tensor("layers.0.kda.A_log").shape == (2,) and checkpoint.tensor("mtp.moe.bias").shape == (4,)


def test_mtp_tensors_are_ignored_without_mtp(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path, micro(num_nextn_predict_layers=0), weights(micro())))
    assert not checkpoint.has("mtp.eh") and checkpoint.spec.mtp is None


def test_tied_head(tmp_path: Path) -> None:
    tied = micro(tie_word_embeddings=True)
    tensors = weights(tied)
    checkpoint = open_checkpoint(write(tmp_path, tied, tensors))
    assert checkpoint.spec.tied and not checkpoint.has("head")
    tensors["lm_head.weight"] = tensors["model.word_embeddings.weight"].clone()
    assert not open_checkpoint(write(tmp_path, tied, tensors)).has("head")
    tensors["lm_head.weight"][3, 3] += 1
    refused(write(tmp_path, tied, tensors), CheckpointError, "tie_word_embeddings", "'lm_head.weight' differs")
    refused(write(tmp_path, tied, tensors | {"lm_head.weight": torch.zeros(1)}), CheckpointError, "differs")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_no_number(tmp_path: Path, bad: float) -> None:
    tensors = weights(micro())
    tensors[NORM][5] = bad
    checkpoint = open_checkpoint(write(tmp_path, tensors=tensors))
    checkpoint.tensor("embed")
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' holds NaN or infinity"):
        checkpoint.tensor("norm")


def test_text_files_that_are_no_text(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"top_k": ' + "9" * 5000 + "}")
    refused(tmp_path, CheckpointError, "generation_config.json", "not readable as JSON")
    (tmp_path / "generation_config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_bytes(b"{{ x }}\xff")
    refused(tmp_path, CheckpointError, "chat_template.jinja", "not UTF-8 text at byte 7")


def test_missing_extra_and_both(tmp_path: Path) -> None:
    tensors = weights(micro())
    del tensors[NORM], tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    refused(write(tmp_path, tensors=tensors), CheckpointError, "2 tensors are missing", NORM, "experts.3.up_proj")
    tensors = weights(micro()) | {"model.layers.0.attention.q_proj.bias": torch.zeros(16)}
    refused(write(tmp_path, tensors=tensors), CheckpointError, "1 tensors are unknown", "q_proj.bias")
    tensors = weights(micro()) | {"model.layers.7.input_layernorm.weight": torch.zeros(16)}
    refused(write(tmp_path, tensors=tensors), CheckpointError, "unknown", "model.layers.7")
    tensors = weights(micro()) | {"model.layers.0.attention.q_proj.weight_scale_inv": torch.zeros(1)}
    refused(write(tmp_path, tensors=tensors), UnsupportedError, "quantised", "bf16")
    tensors = weights(micro()) | {"model.layers.1.mlp.gate.e_score_correction_bias": torch.zeros(4)}
    refused(write(tmp_path, tensors=tensors), CheckpointError, "same tensor", "expert_bias")


def test_wrong_shape_and_dtype(tmp_path: Path) -> None:
    tensors = weights(micro()) | {NORM: torch.zeros(17)}
    refused(write(tmp_path, tensors=tensors), CheckpointError, NORM, "[17]", "[16]")
    tensors = weights(micro()) | {NORM: torch.zeros(16, dtype=torch.float8_e4m3fn)}
    refused(write(tmp_path, tensors=tensors), UnsupportedError, NORM, "float8_e4m3fn", "bf16")


def test_truncated_file_names_both_sizes(tmp_path: Path) -> None:
    file = write(tmp_path) / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-100])
    refused(tmp_path, CheckpointError, "model.safetensors", "truncated", str(len(data)), str(len(data) - 100))
    file.write_bytes(data[:200])
    refused(tmp_path, CheckpointError, "truncated", "200 bytes")
    file.write_bytes(data + b"x")
    refused(tmp_path, CheckpointError, str(len(data) + 1), str(len(data)))
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    refused(tmp_path, CheckpointError, "not a safetensors file")
    file.write_bytes((10).to_bytes(8, "little") + b"not json!!")
    refused(tmp_path, CheckpointError, "header is not readable")
    file.write_bytes(b"")
    refused(tmp_path, CheckpointError, "not a safetensors file", "0 bytes")


def test_shards(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_shards(tmp_path))
    assert checkpoint.tensor("head").shape == (32, 16) and checkpoint.tensor("norm").shape == (16,)


def test_missing_shard(tmp_path: Path) -> None:
    (write_shards(tmp_path) / "model-1.safetensors").unlink()
    refused(tmp_path, CheckpointError, "1 of 2 shards", "model-1.safetensors", "finish the download")


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    write_shards(tmp_path, lambda parts, index: parts[1].update(dict(list(parts[0].items())[:1])))
    refused(tmp_path, CheckpointError, "is in model-0.safetensors and in model-1.safetensors")


def test_index_and_shards_disagree(tmp_path: Path) -> None:
    write_shards(tmp_path, lambda parts, index: parts[1].__delitem__(NORM))
    refused(tmp_path, CheckpointError, NORM, "no shard has it")
    write_shards(tmp_path, lambda parts, index: index.update({NORM: "model-0.safetensors"}))
    refused(tmp_path, CheckpointError, NORM, "it is in model-1.safetensors")
    write_shards(tmp_path, lambda parts, index: index.__delitem__(NORM))
    refused(tmp_path, CheckpointError, "index.json", "1 tensors of the shards are not listed", NORM)
    write_shards(tmp_path, lambda parts, index: index.update({NORM: "../model-0.safetensors"}))
    refused(tmp_path, CheckpointError, NORM, "plain file name")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    refused(tmp_path, CheckpointError, "weight_map")


def test_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(micro()))
    refused(tmp_path, CheckpointError, "no weights", "model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    refused(tmp_path, CheckpointError, "pytorch_model.bin", "convert them to safetensors")
    for name in ("a.safetensors", "b.safetensors"):
        save_file({name: torch.zeros(1)}, tmp_path / name)
    refused(tmp_path, CheckpointError, "2 safetensors files", "index")


def test_config_file_faults(tmp_path: Path) -> None:
    refused(tmp_path, CheckpointError, "no config.json")
    (tmp_path / "config.json").write_text('{"a": 1,\n oops}')
    refused(tmp_path, CheckpointError, "config.json", "line 2")
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    refused(tmp_path, CheckpointError, "UTF-8")
    refused(tmp_path / "config.json", CheckpointError, "directory")


def test_config_is_checked_before_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(micro(hidden_siz=3)))
    refused(tmp_path, ConfigError, "hidden_siz", "did you mean 'hidden_size'")


def test_names_that_mean_nothing() -> None:
    refused("no-such-model", ConfigError, "no-such-model", "pebble", "synthetic:", "org/name")
    refused("/no/such/dir/at/all", ConfigError, "/no/such/dir/at/all")
    refused("synthetic:ling", ConfigError, "synthetic:ling")


def test_hub_id_without_and_with_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sys
    import types

    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refused("some-org/some-model", ConfigError, "soliton[hub]", "some-org/some-model")
    hub = types.SimpleNamespace(snapshot_download=lambda repo, allow_patterns: str(write(tmp_path)))
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert open_checkpoint("some-org/some-model").name == "some-org/some-model"

    def fails(repo: str, allow_patterns: list[str]) -> str:
        raise OSError("unreachable\nlong trace")

    hub.snapshot_download = fails
    refused("some-org/some-model", CheckpointError, "some-org/some-model", "unreachable", "local directory")


def test_local_path_wins_over_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    write(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert open_checkpoint("org/name").path == Path("org/name")


def test_generation_defaults_and_stop_ids(tmp_path: Path) -> None:
    write(tmp_path)
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"temperature": 0.6, "eos_token_id": [31, 30], "future_key": 1}))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.eos_ids == (31, 30) and checkpoint.generation["temperature"] == 0.6
    file.write_text(json.dumps({"top_p": 0.9}))
    assert open_checkpoint(tmp_path).eos_ids == (31,)
    file.write_text(json.dumps({"eos_token_id": 32}))
    refused(tmp_path, ConfigError, "generation_config.json", "32", "31")
    file.write_text("[]")
    refused(tmp_path, CheckpointError, "generation_config.json", "object")


def test_where_the_chat_template_comes_from(tmp_path: Path) -> None:
    write(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({"chat_template": "one", "bos_token": {"content": "<s>"}, "eos_token": "</s>"}))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.chat_template == "one" and checkpoint.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    named = [{"name": "tool_use", "template": "two"}, {"name": "default", "template": "three"}]
    file.write_text(json.dumps({"chat_template": named}))
    assert open_checkpoint(tmp_path).chat_template == "three"
    file.write_text(json.dumps({"chat_template": [named[0], {"name": "rag", "template": "x"}]}))
    refused(tmp_path, CheckpointError, "'default'", "tool_use")
    (tmp_path / "chat_template.jinja").write_text("four")
    assert open_checkpoint(tmp_path).chat_template == "four"


def entry(*offsets: int, shape: Any = (1,)) -> dict[str, Any]:
    return {"dtype": "F32", "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"a": entry(0, 4), "b": entry(2, 6)}, "begins at byte"),
        ({"a": entry(0, 4), "b": entry(8, 12)}, "begins at byte"),
        ({"a": entry(-4, 0)}, "no counts"),
        ({"a": entry(0, 4, shape=(1.0,))}, "no counts"),
        ({"a": entry(0, 4, shape=("1",))}, "no counts"),
        ({"__metadata__": {"a": 5}}, "no object of texts"),
        ({"__metadata__": 5}, "no object of texts"),
    ],
)
def test_headers_that_the_library_would_refuse(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    from soliton.checkpoint.shards import read_header

    raw = json.dumps(change).encode()
    data = max(
        (e["data_offsets"][1] for e in change.values() if isinstance(e, dict) and "data_offsets" in e), default=0
    )
    file = tmp_path / "x.safetensors"
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(max(data, 0)))
    with pytest.raises(CheckpointError, match=says):
        read_header(file)
