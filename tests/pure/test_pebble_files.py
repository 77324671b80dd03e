"""The bundled model's files: sizes, names, tokenizer, licences. No torch needed."""

import json
import math
import struct
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from soliton import pebble

ROOT = Path(__file__).parents[2]
PARAMETERS = 8_911_976
SPECIAL = ["<|endoftext|>", "<|role_end|>", "<role>", "</role>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
SPECIAL += ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<tools>", "</tools>", "<tool_response>"]
SPECIAL += ["</tool_response>", "<|mask|>"]
TRICKY = [
    "def f(x):\n    if x:\n        return x\n\n\n",
    "\tmixed \t tabs\r\nand\rreturns \n \n  trailing   ",
    "null \x00 bell \x07 delete \x7f nbsp \u00a0 narrow \u202f bom \ufeff",
    "héllo — 数字 ١٢٣ 😀👩‍👩‍👧 \U0010ffff",
    "    " * 40 + "x" + " " * 100,
    "__init__ ___ _a_ snake_case CamelCase 1234567890 0x1F 1e-9",
    "<role> <|role_end|> is text too, <|unknown|> also",
    "",
    " ",
    "\n",
]


def read_json(name: str) -> dict:
    return json.loads((pebble.path() / name).read_text())


def headers() -> dict[str, dict]:
    """Tensor entries of all shards, from the safetensors headers."""
    found: dict[str, dict] = {}
    for file in sorted(pebble.path().glob("*.safetensors")):
        raw = file.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        entries = json.loads(raw[8 : 8 + length])
        entries.pop("__metadata__", None)
        assert not set(entries) & set(found)
        found |= entries
    return found


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(pebble.path() / "tokenizer.json"))


def test_parameter_count_is_exact():
    assert sum(math.prod(entry["shape"]) for entry in headers().values()) == PARAMETERS


def test_shards_are_small_and_indexed():
    index = read_json("model.safetensors.index.json")
    files = sorted(pebble.path().glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == [f.name for f in files]
    assert all(f.stat().st_size < 16_000_000 for f in files)
    assert set(index["weight_map"]) == set(headers())


def test_stored_types():
    for name, entry in headers().items():
        wide = name.endswith(("A_log", "dt_bias", "expert_bias"))
        assert entry["dtype"] == ("F32" if wide else "BF16"), name


def test_config_matches_shapes():
    config, shapes = read_json("config.json"), {k: v["shape"] for k, v in headers().items()}
    layers, group = config["num_hidden_layers"], config["layer_group_size"]
    assert shapes["model.word_embeddings.weight"] == [config["vocab_size"], config["hidden_size"]]
    for layer in range(layers + config["num_nextn_predict_layers"]):
        prefix = f"model.layers.{layer}."
        is_mla = (layer + 1) % group == 0 or layer == layers
        assert (f"{prefix}attention.kv_b_proj.weight" in shapes) == is_mla
        assert (f"{prefix}attention.A_log" in shapes) != is_mla
        experts = {n.split(".")[5] for n in shapes if n.startswith(f"{prefix}mlp.experts.")}
        assert len(experts) == (0 if layer < config["first_k_dense_replace"] else config["num_experts"])


def test_special_tokens_and_stops(tokenizer: Tokenizer):
    assert tokenizer.get_vocab_size() == read_json("config.json")["vocab_size"] == 4096
    for token in SPECIAL:
        assert tokenizer.encode(token, add_special_tokens=False).ids == [tokenizer.token_to_id(token)]
    generation = read_json("generation_config.json")
    assert generation["eos_token_id"] == [tokenizer.token_to_id(t) for t in ("<|role_end|>", "<|endoftext|>")]
    assert generation["pad_token_id"] == tokenizer.token_to_id("<|endoftext|>")


@pytest.mark.parametrize("text", TRICKY)
def test_tokenizer_is_lossless(tokenizer: Tokenizer, text: str):
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_tokenizer_knows_every_byte(tokenizer: Tokenizer):
    characters = "".join(map(chr, [*range(0x250), 0x7FF, 0x800, 0xFFFD, *range(0x1F600, 0x1F640), 0x10FFFF]))
    ids = tokenizer.encode(characters, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == characters


def test_indentation_is_one_token(tokenizer: Tokenizer):
    assert len(tokenizer.encode("\n            ", add_special_tokens=False).ids) == 1


def test_chat_template():
    jinja2 = pytest.importorskip("jinja2")
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    assert jinja2
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(read_json("tokenizer_config.json")["chat_template"])
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}, {"role": "user", "content": "?"}]
    assert template.render(messages=chat, add_generation_prompt=True) == (
        "<role>SYSTEM</role>detailed thinking off<|role_end|><role>HUMAN</role>Hi<|role_end|>"
        "<role>ASSISTANT</role>\n<think></think>Ho<|role_end|><role>HUMAN</role>?<|role_end|>"
        "<role>ASSISTANT</role>\n<think></think>"
    )
    system = [{"role": "system", "content": "You write Python."}, chat[0]]
    assert template.render(messages=system, enable_thinking=True, add_generation_prompt=True) == (
        "<role>SYSTEM</role>You write Python.\ndetailed thinking on<|role_end|><role>HUMAN</role>Hi<|role_end|>"
        "<role>ASSISTANT</role>\n<think>"
    )


def test_sources_name_a_licence_each():
    sources = json.loads((ROOT / "tools" / "pebble" / "SOURCES.json").read_text())
    assert len(sources) > 100
    assert all(s["name"] and s["version"] and s["licence"] for s in sources)
    assert not any("GPL" in s["licence"] for s in sources)
    assert sum(s["use"] == "held out" for s in sources) >= 6


def test_card_and_provenance():
    card = (pebble.path() / "README.md").read_text()
    assert "8,911,976" in card
    assert {"main", "draft"} <= set(read_json("provenance.json"))


def test_heldout_prompts():
    rows = [json.loads(line) for line in (ROOT / "tests" / "data" / "heldout.jsonl").read_text().splitlines()]
    assert len(rows) >= 130
    assert len({row["id"] for row in rows}) == len(rows)
    assert sum("messages" in row for row in rows) >= 20
    assert all(row["source"] and row["licence"] and row["reference"] for row in rows)
    assert all("prompt" in row or "messages" in row for row in rows)
