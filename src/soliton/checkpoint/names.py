"""Canonical tensor roles and the names and shapes under which checkpoints store them.

A *role* is what ``model`` asks for (``layers.3.kda.q``); an Entry says where a file keeps it. All Linear weights are
[out, in], none has a bias. Sources: the published Ling-3.0 and Kimi-Linear layouts.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from soliton.model.spec import DenseSpec, KdaSpec, LayerSpec, MlaSpec, ModelSpec, MoeSpec

Shape = tuple[int, ...]
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: file ``names`` in order of preference, canonical ``shape``, ``file_shapes`` that reshape to it."""

    names: tuple[str, ...]
    shape: Shape
    file_shapes: tuple[Shape, ...]
    required: bool = True

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class _Naming:
    embed: str
    mixer: str  # module of KDA and MLA
    mla_out: str
    moe: str
    gate: str  # of a routed expert
    up: str
    down: str
    bias: tuple[str, ...]


_FAMILIES = {
    "bailing_hybrid": _Naming(
        embed="model.word_embeddings",
        mixer="attention",
        mla_out="dense",
        moe="mlp",
        gate="gate_proj",
        up="up_proj",
        down="down_proj",
        bias=("expert_bias", "e_score_correction_bias"),
    ),
    "kimi_linear": _Naming(
        embed="model.embed_tokens",
        mixer="self_attn",
        mla_out="o_proj",
        moe="block_sparse_moe",
        gate="w1",
        up="w3",
        down="w2",
        bias=("e_score_correction_bias",),
    ),
}


class _Table(dict[str, Entry]):
    def put(self, role: str, names: str | tuple[str, ...], *shape: int, also: tuple[Shape, ...] = ()) -> None:
        listed = (names,) if isinstance(names, str) else names
        self[role] = Entry(listed, shape, (shape, *also))


def tensor_table(spec: ModelSpec) -> dict[str, Entry]:
    """Every tensor of ``spec`` by role, MTP included: ``layers.{i}.*`` for the target, ``mtp.*`` for the MTP layer."""
    names, table, hidden = _FAMILIES[spec.family], _Table(), spec.hidden
    table.put("embed", f"{names.embed}.weight", spec.vocab, hidden)
    for layer in spec.layers:
        _layer(table, names, layer, f"layers.{layer.index}.", hidden)
    table.put("norm", "model.norm.weight", hidden)
    if not spec.tied:
        table.put("head", HEAD, spec.vocab, hidden)
    if spec.mtp is not None:
        file = f"model.layers.{spec.mtp.index}."
        table.put("mtp.enorm", f"{file}enorm.weight", hidden)
        table.put("mtp.hnorm", f"{file}hnorm.weight", hidden)
        table.put("mtp.eh", f"{file}eh_proj.weight", hidden, 2 * hidden)
        _layer(table, names, spec.mtp, "mtp.", hidden)
        table.put("mtp.out_norm", f"{file}final_layernorm.weight", hidden)
    return dict(table)


def _layer(table: _Table, names: _Naming, layer: LayerSpec, role: str, hidden: int) -> None:
    file = f"model.layers.{layer.index}."
    table.put(f"{role}input_norm", f"{file}input_layernorm.weight", hidden)
    table.put(f"{role}post_norm", f"{file}post_attention_layernorm.weight", hidden)
    mixer = f"{file}{names.mixer}."
    if isinstance(layer.mixer, KdaSpec):
        _kda(table, layer.mixer, f"{role}kda.", mixer, hidden)
    else:
        _mla(table, names, layer.mixer, f"{role}mla.", mixer, hidden)
    if isinstance(layer.mlp, DenseSpec):
        _swiglu(table, f"{role}mlp.", f"{file}mlp.", layer.mlp.width, hidden)
    else:
        _moe(table, names, layer.mlp, f"{role}moe.", f"{file}{names.moe}.", hidden)


def _kda(table: _Table, kda: KdaSpec, role: str, file: str, hidden: int) -> None:
    keys, values, width = kda.heads * kda.key_dim, kda.heads * kda.value_dim, kda.conv_width
    channels = {"q": keys, "k": keys, "v": values}
    for x, rows in channels.items():
        table.put(f"{role}{x}", f"{file}{x}_proj.weight", rows, hidden)
    for x, rows in channels.items():
        # Depthwise Conv1d keeps a middle axis of 1; converters drop it.
        table.put(f"{role}{x}_conv", f"{file}{x}_conv1d.weight", rows, width, also=((rows, 1, width),))
    for x, rows in (("f", keys), ("g", values)):
        if kda.gate_rank is None:
            table.put(f"{role}{x}", f"{file}{x}_proj.weight", rows, hidden)
        else:
            table.put(f"{role}{x}_a", f"{file}{x}_a_proj.weight", kda.gate_rank, hidden)
            table.put(f"{role}{x}_b", f"{file}{x}_b_proj.weight", rows, kda.gate_rank)
    table.put(f"{role}b", f"{file}b_proj.weight", kda.heads, hidden)
    table.put(f"{role}A_log", f"{file}A_log", kda.heads, also=((1, 1, kda.heads, 1),))
    table.put(f"{role}dt_bias", f"{file}dt_bias", keys)
    table.put(f"{role}o_norm", f"{file}o_norm.weight", kda.value_dim)
    table.put(f"{role}o", f"{file}o_proj.weight", hidden, values)


def _mla(table: _Table, names: _Naming, mla: MlaSpec, role: str, file: str, hidden: int) -> None:
    queries = mla.heads * (mla.nope_dim + mla.rope_dim)
    if mla.q_rank is None:
        table.put(f"{role}q", f"{file}q_proj.weight", queries, hidden)
    else:
        table.put(f"{role}q_a", f"{file}q_a_proj.weight", mla.q_rank, hidden)
        table.put(f"{role}q_norm", f"{file}q_a_layernorm.weight", mla.q_rank)
        table.put(f"{role}q_b", f"{file}q_b_proj.weight", queries, mla.q_rank)
    table.put(f"{role}kv_a", f"{file}kv_a_proj_with_mqa.weight", mla.kv_rank + mla.rope_dim, hidden)
    table.put(f"{role}kv_norm", f"{file}kv_a_layernorm.weight", mla.kv_rank)
    table.put(f"{role}kv_b", f"{file}kv_b_proj.weight", mla.heads * (mla.nope_dim + mla.value_dim), mla.kv_rank)
    if mla.head_gate:
        table.put(f"{role}gate", f"{file}g_proj.weight", mla.heads, hidden)
    table.put(f"{role}o", f"{file}{names.mla_out}.weight", hidden, mla.heads * mla.value_dim)


def _swiglu(table: _Table, role: str, file: str, width: int, hidden: int) -> None:
    table.put(f"{role}gate", f"{file}gate_proj.weight", width, hidden)
    table.put(f"{role}up", f"{file}up_proj.weight", width, hidden)
    table.put(f"{role}down", f"{file}down_proj.weight", hidden, width)


def _moe(table: _Table, names: _Naming, moe: MoeSpec, role: str, file: str, hidden: int) -> None:
    table.put(f"{role}router", f"{file}gate.weight", moe.experts, hidden)
    table.put(f"{role}bias", tuple(f"{file}gate.{b}" for b in names.bias), moe.experts)
    for e in range(moe.experts):
        expert = f"{file}experts.{e}."
        table.put(f"{role}experts.{e}.gate", f"{expert}{names.gate}.weight", moe.width, hidden)
        table.put(f"{role}experts.{e}.up", f"{expert}{names.up}.weight", moe.width, hidden)
        table.put(f"{role}experts.{e}.down", f"{expert}{names.down}.weight", hidden, moe.width)
    _swiglu(table, f"{role}shared.", f"{file}shared_experts.", moe.shared_width, hidden)


def ignorable(name: str, spec: ModelSpec) -> bool:
    """Whether a tensor that no role names may lie in the files: nothing in the decoder would use it."""
    if name.endswith("rotary_emb.inv_freq") or (spec.tied and name == HEAD):
        return True
    count = len(spec.layers)
    if spec.mtp is not None:
        # Some savers repeat the shared embedding and head inside the MTP layer.
        return re.match(rf"model\.layers\.{count}\.(shared_head\.head|embed_tokens)\b", name) is not None
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return name.startswith("model.mtp") or (layer is not None and int(layer[1]) == count)
