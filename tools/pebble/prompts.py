"""Make tests/data/heldout.jsonl from the held-out packages, and its README.

    python tools/pebble/prompts.py --store STORE [--ids FILE]

Kinds: ``function`` ends where a body begins, ``middle`` inside a body, ``docs`` inside prose, ``chat``
is a request. --ids also writes the prompts as token ids, for measuring during training.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
from collections import defaultdict
from pathlib import Path

from chats import functions, render, requests
from tokenise import PEBBLE
from tokenizers import Tokenizer

DATA = Path(__file__).parents[2] / "tests" / "data"
SEED = 33
COUNTS = {"function": 140, "middle": 110, "docs": 44, "chat": 50}
REFERENCE = 320


def code_cuts(source: str, kind: str, rng: random.Random) -> list[tuple[int, int]]:
    """(line to cut after, last line of the function) of usable functions; lines count from 1."""
    cuts = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef) or node.end_lineno - node.lineno < 5:
            continue
        has_doc = ast.get_docstring(node) is not None
        body = node.body[1:] if has_doc else node.body
        if not body:
            continue
        begin = node.body[0].end_lineno if has_doc else body[0].lineno - 1
        if begin < node.lineno or (not has_doc and not source.split("\n")[begin - 1].rstrip().endswith(":")):
            continue
        if kind == "function":
            cuts.append((begin, node.end_lineno))
        elif node.end_lineno - begin > 5:
            cuts.append((rng.randint(begin + 2, node.end_lineno - 2), node.end_lineno))
    return cuts


def tail_of(lines: list[str], tokenizer: Tokenizer, limit: int) -> str:
    """The last whole lines that fit into a number of tokens."""
    kept: list[str] = []
    for line in reversed(lines):
        if len(tokenizer.encode("\n".join([line, *kept])).ids) > limit:
            break
        kept.insert(0, line)
    while kept and not kept[0].strip():
        kept.pop(0)
    return "\n".join(kept)


def candidates(rows: list[dict], kind: str, tokenizer: Tokenizer, rng: random.Random) -> list[dict]:
    """All prompts of a kind that one package offers, shuffled, at most one a document."""
    out = []
    for row in rows:
        text, path = row["text"], row["path"]
        if (kind == "docs") != (row["kind"] == "docs"):
            continue
        limit = rng.randint(60, 300)
        if kind == "chat":
            found = [f for f in functions(text) if len(f[3]) < 900]
            if found:
                messages = requests(*rng.choice(found), rng)
                answer = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
                prompt = {"messages": messages[:answer], "reference": messages[answer]["content"]}
                out.append({"path": path, **prompt})
            continue
        lines = text.split("\n")
        if kind == "docs":
            places = [i for i in range(6, len(lines) - 4) if len(lines[i]) > 50 and lines[i][0].isalpha()]
            if not places:
                continue
            at = rng.choice(places)
            words = lines[at].split(" ")
            cut = " ".join(words[: len(words) // 2])
            prompt = tail_of([*lines[:at], cut], tokenizer, limit)
            after = "\n".join([lines[at][len(cut) :], *lines[at + 1 :]])
        else:
            cuts = [c for c in code_cuts(text, kind, rng) if lines[c[0] - 1].strip()]
            if not cuts:
                continue
            at, end = rng.choice(cuts)
            prompt = tail_of(lines[:at], tokenizer, limit)
            after = "\n" + "\n".join(lines[at:end])
        if kind == "docs" and "license" in prompt.lower():
            continue
        if 40 <= len(tokenizer.encode(prompt).ids) <= 300 and len(after.strip()) > 30:
            out.append({"path": path, "prompt": prompt, "reference": after})
    rng.shuffle(out)
    return out


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--ids", type=Path)
    args = parser.parse_args()
    rng = random.Random(SEED)
    tokenizer = Tokenizer.from_file(str(PEBBLE / "tokenizer.json"))
    packages: dict[str, list[dict]] = defaultdict(list)
    for line in (args.store / "heldout.jsonl").open():
        row = json.loads(line)
        packages[row["package"]].append(row)
    sources = {s["name"]: s for s in json.loads((Path(__file__).parent / "SOURCES.json").read_text())}
    chosen = []
    for kind, count in COUNTS.items():
        offers = {name: candidates(rows, kind, tokenizer, rng) for name, rows in sorted(packages.items())}
        while count and any(offers.values()):
            for name, offer in offers.items():
                if offer and count:
                    found = offer.pop()
                    s = sources[name]
                    row = {
                        "id": f"{kind}-{COUNTS[kind] - count:03d}",
                        "kind": kind,
                        "source": f"{name} {s['version']}: {found.pop('path')}",
                        "licence": s["licence"],
                    }
                    found["reference"] = found["reference"][:REFERENCE]
                    chosen.append(row | found)
                    count -= 1
    DATA.mkdir(parents=True, exist_ok=True)
    with (DATA / "heldout.jsonl").open("w") as out:
        out.writelines(json.dumps(row) + "\n" for row in chosen)
    used = sorted({row["source"].split(" ")[0] for row in chosen})
    table = "\n".join(
        f"| {n} | {sources[n]['version']} | {sources[n]['licence']} | {sources[n]['copyright'] or 'see the package'} |"
        for n in used
    )
    (DATA / "heldout.md").write_text(
        f"""# Held-out prompts

`heldout.jsonl` has {len(chosen)} prompts for pebble, the bundled model, cut from packages that it never saw.
One JSON object a line: `id`, `kind`, `source` (package, version, file), `licence`, `prompt` (text) or
`messages` (chats), `reference` (the start of what really follows).

Kinds: {", ".join(f"{v} {k}" for k, v in COUNTS.items())}. A `function` prompt ends where a body begins,
a `middle` prompt inside a body, a `docs` prompt inside prose. Text prompts have 40 to 300 tokens.
Made by `tools/pebble/prompts.py`.

`calibration.jsonl.gz` has 2400 more prompts of the same packages, cut elsewhere: many rounds are needed to see how
well a draft's confidences are calibrated. Made by `tools/pebble/draft_prompts.py make --held-out --count 2400`.

The excerpts stay under the licences of their packages:

| package | version | licence | copyright |
| --- | --- | --- | --- |
{table}
"""
    )
    if args.ids:
        with args.ids.open("w") as out:
            for row in chosen:
                text = row["prompt"] if "prompt" in row else render(row["messages"], open_turn=True)
                ids = tokenizer.encode(text, add_special_tokens=False).ids
                out.write(json.dumps({"id": row["id"], "ids": ids}) + "\n")
    print(len(chosen), "prompts")


if __name__ == "__main__":
    main()
