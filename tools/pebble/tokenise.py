"""Train pebble's byte-level BPE, render the chats, and pack everything into token files.

    python tools/pebble/tokenise.py train --store STORE
    python tools/pebble/tokenise.py pack --store STORE --limit-bytes 300000000

``train`` writes tokenizer.json and tokenizer_config.json into src/soliton/pebble.
``pack`` writes STORE/train.u16.xz and STORE/heldout.u16.xz: little-endian 16-bit ids, documents
shuffled with a fixed seed and separated by ``<|endoftext|>``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import random
from pathlib import Path

import numpy as np
from chats import functions, render, requests
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

PEBBLE = Path(__file__).parents[2] / "src" / "soliton" / "pebble"
VOCAB = 4096
SEED = 20
HIDDEN = ["<|endoftext|>", "<|role_end|>", "<role>", "</role>", "<|mask|>"]
VISIBLE = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>"]
VISIBLE += ["</arg_value>", "<tools>", "</tools>", "<tool_response>", "</tool_response>"]
# A line break takes the next line's indentation along; words take one space and leading underscores.
PATTERN = r"(?:\r?\n)+[ \t]*| ?_*\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|[ \t]+(?!\S)|\s+"
CHAT_SHARE = 0.09

CHAT_TEMPLATE = """\
{%- macro said(m) -%}
{%- if m.content is string -%}{{ m.content }}
{%- else -%}{%- for part in m.content or [] -%}{{ part.text if part.text is defined else '' }}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- set mode = 'detailed thinking on' if enable_thinking is defined and enable_thinking else 'detailed thinking off' -%}
{%- set given = said(messages[0]) if messages and messages[0].role == 'system' else '' -%}
<role>SYSTEM</role>
{%- if given -%}{{ given }}{%- endif -%}
{%- if tools -%}
{{- '\\n' if given else '' }}{{ '<tools>' }}
{%- for tool in tools -%}{{ '\\n' + (tool | tojson) }}{%- endfor -%}
{{- '\\n</tools>\\n' -}}
To use a tool, answer with <tool_call>NAME, then <arg_key>KEY</arg_key> and <arg_value>VALUE</arg_value>
{{- ' for each argument, then </tool_call>.' -}}
{%- endif -%}
{%- if 'detailed thinking on' not in given and 'detailed thinking off' not in given -%}
{{- '\\n' if given or tools else '' }}{{ mode }}
{%- endif -%}
{{- '<|role_end|>' -}}
{%- for m in messages -%}
{%- if m.role == 'user' -%}
{{- '<role>HUMAN</role>' + said(m) + '<|role_end|>' -}}
{%- elif m.role == 'system' and not loop.first -%}
{{- '<role>SYSTEM</role>' + said(m) + '<|role_end|>' -}}
{%- elif m.role == 'assistant' -%}
{%- set thought = m.reasoning_content if m.reasoning_content is defined and m.reasoning_content else '' -%}
{{- '<role>ASSISTANT</role>\\n<think>' + thought + '</think>' + said(m) -}}
{%- for call in m.tool_calls or [] -%}
{%- set f = call.function if call.function is defined else call -%}
{{- '\\n<tool_call>' + f.name -}}
{%- for key, value in f.arguments.items() -%}
{{- '\\n<arg_key>' + key + '</arg_key>\\n<arg_value>' -}}
{{- value if value is string else value | tojson -}}
{{- '</arg_value>' -}}
{%- endfor -%}
{{- '\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|role_end|>' -}}
{%- elif m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<role>OBSERVATION</role>' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' + said(m) + '\\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|role_end|>' -}}{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<role>ASSISTANT</role>\\n<think>' + ('' if mode == 'detailed thinking on' else '</think>') -}}
{%- endif -%}
"""


def documents(path: Path, seed: int) -> list[dict]:
    """All documents of a file, shuffled."""
    rows = [json.loads(line) for line in path.open()]
    random.Random(seed).shuffle(rows)
    return rows


def train(store: Path, sample_bytes: int) -> None:
    """Fit the merges on a sample and write the two tokenizer files."""
    texts, size = [], 0
    for row in documents(store / "train.jsonl", SEED):
        texts.append(row["text"])
        size += len(row["text"])
        if size > sample_bytes:
            break
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = [AddedToken(t, special=True, normalized=False) for t in HIDDEN]
    added += [AddedToken(t, special=False, normalized=False) for t in VISIBLE]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=added,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=40,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == VOCAB, tokenizer.get_vocab_size()
    PEBBLE.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(PEBBLE / "tokenizer.json"))
    config = {
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(t)): {
                "content": t,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": t in HIDDEN,
            }
            for t in HIDDEN + VISIBLE
        },
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|role_end|>",
        "mask_token": "<|mask|>",
        "model_max_length": 4096,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (PEBBLE / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def chats(rows: list[dict], budget: int, rng: random.Random) -> list[str]:
    """Rendered chats up to a number of bytes."""
    out, size = [], 0
    for row in rows:
        if row["kind"] != "code":
            continue
        for found in list(functions(row["text"]))[:6]:
            out.append(render(requests(*found, rng)))
            size += len(out[-1])
        if size > budget:
            break
    return out


def pack(store: Path, limit: int) -> None:
    """Encode both splits and write them compressed."""
    tokenizer = Tokenizer.from_file(str(PEBBLE / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")
    summary = {}
    for split in ("heldout", "train"):
        rows = documents(store / f"{split}.jsonl", SEED + 1)
        rows.sort(key=lambda row: row["kind"] != "docs")  # all the documentation, then code up to the limit
        texts, size = [], 0
        for row in rows:
            if size > limit:
                break
            texts.append(row["text"])
            size += len(row["text"].encode())
        count = len(texts)
        if split == "train":
            random.Random(SEED + 3).shuffle(rows)
            texts += chats(rows, int(size * CHAT_SHARE / (1 - CHAT_SHARE)), random.Random(SEED + 2))
            random.Random(SEED + 4).shuffle(texts)
        ids: list[np.ndarray] = []
        for start in range(0, len(texts), 500):
            for e in tokenizer.encode_batch(texts[start : start + 500], add_special_tokens=False):
                ids.append(np.asarray([*e.ids, end], dtype="<u2"))
        packed = np.concatenate(ids)
        raw = packed.tobytes()
        (store / f"{split}.u16.xz").write_bytes(lzma.compress(raw, preset=6))
        summary[split] = {
            "documents": count,
            "chats": len(texts) - count,
            "bytes": sum(len(t.encode()) for t in texts),
            "tokens": len(packed),
            "sha256": hashlib.sha256(raw).hexdigest(),
        }
        print(split, summary[split], flush=True)
    (store / "pack.json").write_text(json.dumps(summary, indent=1) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["train", "pack"])
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--sample-bytes", type=int, default=40_000_000)
    parser.add_argument("--limit-bytes", type=int, default=300_000_000)
    args = parser.parse_args()
    train(args.store, args.sample_bytes) if args.action == "train" else pack(args.store, args.limit_bytes)


if __name__ == "__main__":
    main()
