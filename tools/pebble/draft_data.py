"""What a block drafter for pebble is trained on: pebble's own answers to prompts, decoded in batches.

    python tools/pebble/draft_data.py --prompts PROMPTS.jsonl[.gz] --out DATA.jsonl [--temperatures 0 0.6 1]

A file such as `soliton train data` makes by answering one prompt after another, only sooner. Prompts take the
temperatures in turn; answers that repeat themselves (some 8-gram three times) are cut where the third copy begins.
With --supervise all the prompts are learnt from as well.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from decode import continue_greedily
from export import PEBBLE, read

from soliton import Engine
from soliton.train.data import LEAST, Sample, save

STOP = {0, 1}


def prompts_of(path: Path, limit: int | None) -> list[tuple[list[int], str]]:
    """(ids, kind) of each prompt, tokenised as the engine would."""
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    rows = [json.loads(line) for line in text.splitlines() if line.strip()][:limit]
    with Engine.load("pebble", device="cpu", speculation="off", threads=1, max_context=4096) as engine:
        return [(engine._encode(row.get("messages") or row["prompt"], {})[0], row.get("kind", "")) for row in rows]


def cut(ids: list[int], n: int = 8, times: int = 3) -> list[int]:
    """Up to where the third copy of an n-gram begins: what follows would be copies of copies."""
    seen: dict[tuple[int, ...], int] = {}
    for at in range(len(ids) - n + 1):
        gram = tuple(ids[at : at + n])
        seen[gram] = seen.get(gram, 0) + 1
        if seen[gram] == times:
            return ids[:at]
    return ids


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.6, 1.0])
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--supervise", choices=("answers", "all"), default="answers")
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--longest", type=int, default=384, help="longer prompts are left out")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so long, with what there is")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    began = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    model = read(PEBBLE).to(device).requires_grad_(False)
    given = [(ids, kind) for ids, kind in prompts_of(args.prompts, args.limit) if len(ids) <= args.longest]
    batches: list[tuple[float, list[tuple[list[int], str]]]] = []
    for turn, temperature in enumerate(args.temperatures):
        part = sorted(given[turn :: len(args.temperatures)], key=lambda one: len(one[0]))
        batches += [(temperature, part[at : at + args.batch]) for at in range(0, len(part), args.batch)]
    random.Random(args.seed).shuffle(batches)
    samples: list[Sample] = []
    tokens = 0
    for number, (temperature, batch) in enumerate(batches, 1):
        if time.monotonic() - began > args.seconds:
            break
        with torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16"):
            rows = continue_greedily(model, [ids for ids, _ in batch], args.new, STOP, temperature)
        for (ids, kind), row in zip(batch, rows, strict=True):
            kept = cut(row)
            if len(kept) >= LEAST:
                source: dict[str, Any] = {"kind": kind, "temperature": temperature}
                start = len(ids) if args.supervise == "answers" else 1
                samples.append(Sample((*ids, *kept), ((start, len(ids) + len(kept)),), source))
                tokens += len(kept)
        spent = time.monotonic() - began
        print(f"{number} of {len(batches)} batches, {tokens:,} tokens, {tokens / spent:,.0f} a second", flush=True)
    random.Random(args.seed).shuffle(samples)
    digest = hashlib.sha256(args.prompts.read_bytes()).hexdigest()
    head = {
        "target": "pebble",
        "temperatures": args.temperatures,
        "new": args.new,
        "prompts": digest,
        "seed": args.seed,
    }
    made = save(samples, args.out, head)
    print(json.dumps({"sequences": len(made.samples), "tokens": tokens, "sha256": made.digest}))


if __name__ == "__main__":
    main()
