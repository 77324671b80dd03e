"""Write weights.pt as the package's checkpoint directory, and read such a directory back.

    python tools/pebble/export.py --weights RUN/weights.pt
    python tools/pebble/export.py --random          # an untrained model of the same shape

Matrices are stored as bfloat16; A_log, dt_bias and expert_bias as float32. Two shards and an index.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import torch
from model import Config, Pebble
from safetensors.torch import load_file, save_file
from torch import Tensor

PEBBLE = Path(__file__).parents[2] / "src" / "soliton" / "pebble"
FLOAT32 = ("A_log", "dt_bias", "expert_bias")
SHARDS = 2


def published(state: dict[str, Tensor], c: Config) -> dict[str, Tensor]:
    """The checkpoint's names and shapes from the model's own."""
    out: dict[str, Tensor] = {}
    for name, value in state.items():
        if name == "lm_head":
            out["lm_head.weight"] = value
            continue
        if name in ("word_embeddings", "norm"):
            out[f"model.{name}.weight"] = value
            continue
        name = re.sub(r"^mtp\.(block\.)?", f"blocks.{c.layers}.", name)
        prefix, key = re.match(r"blocks\.(\d+)\.(.*)", name).groups()
        prefix = f"model.layers.{prefix}."
        if stacked := re.match(r"mlp\.experts_(gate|up|down)$", key):
            for e in range(c.experts):
                out[f"{prefix}mlp.experts.{e}.{stacked[1]}_proj.weight"] = value[e]
        elif shared := re.match(r"mlp\.shared_(gate|up|down)$", key):
            out[f"{prefix}mlp.shared_experts.{shared[1]}_proj.weight"] = value
        elif key == "expert_bias":
            out[f"{prefix}mlp.gate.expert_bias"] = value
        elif key.endswith(("A_log", "dt_bias")):
            out[prefix + key] = value
        elif key.endswith("conv1d"):
            out[f"{prefix}{key}.weight"] = value[:, None]
        else:
            out[f"{prefix}{key}.weight"] = value
    return {
        k: v.detach().cpu().to(torch.float32 if k.endswith(FLOAT32) else torch.bfloat16).contiguous()
        for k, v in out.items()
    }


def read(directory: Path = PEBBLE) -> Pebble:
    """The exported directory as a trainable model holding exactly the stored values, in float32."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    stored: dict[str, Tensor] = {}
    for file in sorted(set(index.values())):
        stored |= load_file(directory / file)
    model = Pebble()
    state = {}
    for name, value in model.state_dict().items():
        parts = published({name: value}, model.c)
        found = [stored.pop(key).float() for key in parts]
        if len(found) == 1 and "experts_" not in name:
            state[name] = found[0].reshape(value.shape)
        else:
            state[name] = torch.stack(found)
    assert not stored, sorted(stored)
    model.load_state_dict(state)
    return model


def config_of(c: Config) -> dict:
    """config.json, with the keys of the published configurations, the dead ones included."""
    return {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "embedding_dropout": 0.0,
        "eos_token_id": 1,
        "expert_swiglu_limit_list": None,
        "first_k_dense_replace": c.first_dense,
        "gated_attention_proj_granularity_type": "head_wise",
        "group_norm_size": 1,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "hidden_size": c.hidden,
        "initializer_range": 0.02,
        "intermediate_size": c.dense,
        "kda_lower_bound": -5.0,
        "kda_safe_gate": True,
        "kv_lora_rank": c.kv_lora,
        "layer_group_size": c.group,
        "linear_silu": True,
        "max_position_embeddings": 4096,
        "max_window_layers": 20,
        "model_type": "bailing_hybrid",
        "moe_intermediate_size": c.expert_dim,
        "moe_router_enable_expert_bias": True,
        "moe_shared_expert_intermediate_size": c.expert_dim,
        "mtp_loss_scaling_factor": 0,
        "mtp_use_kda": False,
        "n_group": c.groups,
        "no_kda_lora": True,
        "norm_topk_prob": True,
        "num_attention_heads": c.heads,
        "num_experts": c.experts,
        "num_experts_per_tok": c.top_k,
        "num_hidden_layers": c.layers,
        "num_key_value_heads": c.heads,
        "num_kv_heads_for_linear_attn": 0,
        "num_nextn_predict_layers": 1,
        "num_shared_experts": c.shared // c.expert_dim,  # one of 128 in all; transformers counts in routed widths
        "output_dropout": 0.0,
        "output_router_logits": False,
        "pad_token_id": 0,
        "partial_rotary_factor": 0.5,
        "q_lora_rank": None,
        "qk_head_dim": c.nope + c.rope,
        "qk_nope_head_dim": c.nope,
        "qk_rope_head_dim": c.rope,
        "rms_norm_eps": 1e-6,
        "rope_interleave": True,
        "rope_scaling": None,
        "rope_theta": int(c.rope_theta),
        "rotary_dim": c.rope,
        "routed_scaling_factor": c.scale,
        "router_dtype": "fp32",
        "scale_router_input": False,
        "score_function": "sigmoid",
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "share_expert_swiglu_limit_list": None,
        "short_conv_kernel_size": 4,
        "tie_word_embeddings": False,
        "topk_group": c.kept_groups,
        "topk_method": "noaux_tc",
        "up_proj_norm": False,
        "use_bias": False,
        "use_cache": True,
        "use_kda_lora": False,
        "use_mla_nope": False,
        "use_nGPT": False,
        "use_qk_norm": True,
        "use_qkv_bias": False,
        "v_head_dim": c.v_dim,
        "value_norm": False,
        "vocab_size": c.vocab,
    }


def write(model: Pebble, directory: Path = PEBBLE) -> None:
    """Shards, index, config.json and generation_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = published(model.state_dict(), model.c)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    shards: list[dict[str, Tensor]] = [{} for _ in range(SHARDS)]
    seen = 0
    for name, tensor in tensors.items():
        shards[min(seen * SHARDS // total, SHARDS - 1)][name] = tensor
        seen += tensor.numel() * tensor.element_size()
    weight_map = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{SHARDS:05d}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    (directory / "config.json").write_text(json.dumps(config_of(model.c), indent=2) + "\n")
    generation = {"do_sample": False, "eos_token_id": [1, 0], "pad_token_id": 0}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--weights", type=Path)
    source.add_argument("--random", action="store_true")
    parser.add_argument("--out", type=Path, default=PEBBLE)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Pebble()
    if args.weights:
        model.load_state_dict(torch.load(args.weights, map_location="cpu", weights_only=True))
    write(model, args.out)
    print(f"{model.count()} values written to {args.out.name}")


if __name__ == "__main__":
    main()
