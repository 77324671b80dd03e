"""Measure an exported directory in float32: held-out loss, accept lengths, samples.

    python tools/pebble/evaluate.py --data DATA --prompts IDS.jsonl --out REPORT.json

DATA holds heldout.u16.xz and pack.json (from tokenise.py), IDS.jsonl comes from prompts.py.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from accept import draft_ids, draft_slowly, measure
from decode import continue_greedily
from export import PEBBLE, read
from tokenizers import Tokenizer
from train import Windows, cross_entropy, load_tokens

STOP = {0, 1}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=PEBBLE)
    parser.add_argument("--tokenizer", type=Path, default=PEBBLE / "tokenizer.json")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=800, help="held-out windows of 2048 tokens")
    parser.add_argument("--limit", type=int, default=10_000, help="use only so many prompts")
    parser.add_argument("--new", type=int, default=128)
    args = parser.parse_args()
    torch.set_float32_matmul_precision("highest")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = read(args.model).to(device).requires_grad_(False)
    facts: dict = {"parameters": model.count(), "device": device.type, "arithmetic": "float32, stored weights"}
    if args.data:
        tokens, _ = load_tokens(args.data / "heldout.u16.xz", device)
        packed = json.loads((args.data / "pack.json").read_text())["heldout"]
        windows, loss = Windows(tokens, 2048, 1), 0.0
        count = min(args.windows, windows.count) // 8
        for i in range(count):
            ids = windows.batch(i, 8)
            loss += float(cross_entropy(model(ids[:, :-2]), model.lm_head, ids[:, 1:-1])) / count
        per_byte = loss / math.log(2) * packed["tokens"] / packed["bytes"]
        facts |= {"heldout_tokens": count * 8 * 2048, "heldout_loss": round(loss, 4)}
        facts |= {"heldout_perplexity": round(math.exp(loss), 3), "heldout_bits_per_byte": round(per_byte, 4)}
    rows = [json.loads(line) for line in args.prompts.read_text().splitlines()][: args.limit]
    prompts = [row["ids"] for row in rows]
    facts |= measure(model, prompts, args.new, STOP)
    continuations = facts.pop("continuations")
    same = total = 0
    for prompt, row in list(zip(prompts, continuations, strict=True))[:6]:
        ids = torch.tensor([prompt + row], device=device)
        fast = draft_ids(model, ids)[0]
        for k in range(len(prompt), min(len(prompt) + 24, ids.shape[1] - 8), 6):
            slow = draft_slowly(model, ids[:, : k + 1], 5)
            for j, draft in enumerate(slow):
                total += 1
                same += draft == int(fast[j, k + j - 1])
                if draft != int(ids[0, k + 1 + j]):
                    break
    facts["slow_drafts_equal"] = f"{same} of {total}"
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    greedy = continue_greedily(model, [tokenizer.encode(t).ids for t in OWN_PROMPTS], args.new, STOP)
    facts["samples"] = [
        {"prompt": p, "text": tokenizer.decode(row, skip_special_tokens=False)}
        for p, row in zip(OWN_PROMPTS, greedy, strict=True)
    ] + [
        {"id": row["id"], "text": tokenizer.decode(c, skip_special_tokens=False)}
        for row, c in zip(rows, continuations, strict=True)
    ]
    args.out.write_text(json.dumps(facts, indent=1) + "\n")
    print({k: v for k, v in facts.items() if k != "samples"})


OWN_PROMPTS = [
    'def read_lines(path, limit=10):\n    """Return the first lines of a text file."""',
    "import os\nimport json\n\n\nclass Config:\n    def __init__(self, path):",
    "def fibonacci(n):",
    "Installation\n============\n\nYou can install the package with",
    "<role>SYSTEM</role>detailed thinking off<|role_end|><role>HUMAN</role>Write a Python function `add(a, b)`: Return "
    "the sum of two numbers.<|role_end|><role>ASSISTANT</role>\n<think></think>",
    "<role>SYSTEM</role>detailed thinking off<|role_end|><role>HUMAN</role>Write a Python function `is_empty`: Return "
    "True if the list is empty.<|role_end|><role>ASSISTANT</role>\n<think></think>",
]


if __name__ == "__main__":
    main()
