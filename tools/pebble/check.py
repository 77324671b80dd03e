"""Compare the exported directory, loaded by transformers, with this folder's model: float32 logits.

python tools/pebble/check.py            # needs transformers >= 5.24
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from export import PEBBLE, read
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Print the largest difference; fail above 1e-4."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=PEBBLE)
    args = parser.parse_args()
    own = read(args.model)
    theirs = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    text = 'def read_lines(path, limit=10):\n    """Return the first lines of a file."""\n' * 4
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    with torch.no_grad():
        mine = own(ids) @ own.lm_head.T
        other = theirs(ids).logits
    worst = float((mine - other).abs().max())
    print(f"{ids.shape[1]} tokens, logits std {float(mine.std()):.3f}, largest difference {worst:.2e}")
    chat = [{"role": "user", "content": "Hi"}]
    print(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    assert worst < 1e-4


if __name__ == "__main__":
    main()
