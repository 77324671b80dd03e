"""Make the prompts that pebble answers to train a block drafter, from pebble's own training sources.

    python tools/pebble/draft_prompts.py fetch --store STORE                 # pip download, the trained versions
    python tools/pebble/draft_prompts.py make --store STORE --out FILE.jsonl.gz [--held-out]

``fetch`` takes the packages with documentation, a random part of the others, and the held-out ones, which are
only compared with. ``make`` cuts prompts as prompts.py does, in the same proportions, evenly over packages, and
writes FILE.jsonl.gz and FILE.sha256. No prompt shares a run of 50 characters of a line with a held-out prompt or
reference, or six lines with any file of a held-out package. ``--held-out`` cuts them from the held-out packages
instead, elsewhere than the held-out prompts: many rounds are needed to see how well confidences are calibrated.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import random
import re
import subprocess
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from chats import functions, requests
from collect import Package, listed, read_package, standard_library, windows
from prompts import COUNTS, DATA, code_cuts, tail_of
from tokenise import HIDDEN, PEBBLE, VISIBLE
from tokenizers import Tokenizer

SEED = 34
PACKAGES = 120
TOKENS = (20, 300)
SHARED = 50


def sources() -> dict[str, dict]:
    """What pebble was made from, by package."""
    return {s["name"]: s for s in json.loads((Path(__file__).parent / "SOURCES.json").read_text())}


def chosen(count: int) -> list[tuple[str, set[str]]]:
    """The packages to fetch and their marks: held-out ones, then `count` that pebble was trained on."""
    known = sources()
    marks = {name: marks for name, marks in listed() if name in known}
    held = [name for name in marks if known[name]["use"] == "held out"]
    documented = [name for name in marks if name not in held and "sdist" in marks[name]]
    rest = sorted(name for name in marks if name not in held and name not in documented)
    random.Random(SEED).shuffle(rest)
    return [(name, marks[name]) for name in held + [*documented, *rest][:count]]


def fetch(store: Path, count: int) -> None:
    """Download the versions of SOURCES.json; failures are listed and skipped."""
    known = sources()
    for name, marks in chosen(count):
        for kind in ["wheel", *(["sdist"] if "sdist" in marks else [])]:
            only = "--only-binary=:all:" if kind == "wheel" else f"--no-binary={name}"
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", only, "-d", str(store / kind)]
            if subprocess.run([*command, f"{name}=={known[name]['version']}"], check=False).returncode:
                print(f"skipped: {kind} of {name}")


def packages(store: Path) -> tuple[list[Package], list[Package], set[int]]:
    """The training packages, without files that repeat or share text with held-out ones; the latter and their
    windows."""
    known = sources()
    archives: dict[str, list[Path]] = defaultdict(list)
    for archive in sorted([*store.glob("wheel/*"), *store.glob("sdist/*")]):
        name = archive.name.split("-")[0] if archive.suffix == ".whl" else archive.name.rpartition("-")[0]
        archives[re.sub(r"[-_.]+", "-", name).lower()].append(archive)
    read = [standard_library()]
    for name in known:
        found = archives.get(re.sub(r"[-_.]+", "-", name).lower())
        if found:
            read.append(read_package(name, found, known[name]["use"] == "held out"))
    missing = {n for n in known if known[n]["use"] == "held out"} - {p.name for p in read if p.documents}
    if missing:
        raise SystemExit(f"held-out packages are missing from {store}: {', '.join(sorted(missing))}")
    held = {w for p in read if p.heldout for _, _, text in p.documents for w in windows(text)}
    seen = {" ".join(text.split()) for p in read if p.heldout for _, _, text in p.documents}
    training = [p for p in read if p.licence and not p.heldout]
    for package in training:
        kept = []
        for path, kind, text in package.documents:
            own, words = windows(text), " ".join(text.split())
            if words not in seen and len(own & held) <= max(2, 0.05 * len(own)):
                seen.add(words)
                kept.append((path, kind, text))
        package.documents = kept
    return [p for p in training if p.documents], [p for p in read if p.heldout], held


def pieces(text: str) -> Iterator[str]:
    """Runs of SHARED characters within lines."""
    for line in map(str.strip, text.split("\n")):
        for at in range(len(line) - SHARED + 1):
            piece = line[at : at + SHARED]
            if any(map(str.isalnum, piece)):
                yield piece


def said(row: dict) -> str:
    """All text of a prompt."""
    return row["prompt"] if "prompt" in row else "\n".join(m["content"] for m in row["messages"])


class Cutter:
    """Makes prompts of one kind out of a package's documents."""

    def __init__(self, held: set[int], tokenizer: Tokenizer, rng: random.Random) -> None:
        self.held, self.tokenizer, self.rng = held, tokenizer, rng
        rows = map(json.loads, (DATA / "heldout.jsonl").open())
        self.refused = {piece for row in rows for piece in pieces(said(row) + "\n" + row["reference"])}
        self.marks = re.compile("|".join(map(re.escape, HIDDEN + VISIBLE)))
        self.seen: set[str] = set()
        self.dropped: Counter[str] = Counter()

    def places(self, package: Package, kind: str) -> list[tuple]:
        """Where prompts of a kind can be cut, shuffled."""
        out: list[tuple] = []
        for path, form, text in package.documents:
            if (kind == "docs") != (form == "docs"):
                continue
            lines = text.split("\n")
            if kind == "chat":
                out += [(path, f) for f in functions(text) if len(f[3]) < 900]
            elif kind == "docs":
                found = [i for i in range(6, len(lines) - 4) if len(lines[i]) > 50 and lines[i][0].isalpha()]
                out += [(path, lines, i) for i in found]
            else:
                try:
                    cuts = code_cuts(text, kind, self.rng)
                except (SyntaxError, ValueError, RecursionError):
                    continue
                out += [(path, lines, at) for at, _ in cuts if lines[at - 1].strip()]
        self.rng.shuffle(out)
        return out

    def cut(self, kind: str, place: tuple) -> dict | None:
        """The prompt at a place, unless it is unfit."""
        limit = self.rng.randint(TOKENS[0] + 4, TOKENS[1])
        if kind == "chat":
            messages = requests(*place[1], self.rng)
            row = {"messages": messages[: next(i for i, m in enumerate(messages) if m["role"] == "assistant")]}
        else:
            _, lines, at = place
            if kind == "docs":
                words = lines[at].split(" ")
                lines = [*lines[:at], " ".join(words[: len(words) // 2])]
                at += 1
            row = {"prompt": tail_of(lines[max(at - 120, 0) : at], self.tokenizer, limit)}
        text = said(row)
        size = len(self.tokenizer.encode(text, add_special_tokens=False).ids)
        unfit = {
            "length": not (TOKENS[0] <= size or kind == "chat") or size > TOKENS[1],
            "licence": kind == "docs" and "license" in text.lower(),
            "special tokens": self.marks.search(text),
            "repeated": text in self.seen,
            "shares text with held-out": not self.held.isdisjoint(windows(text))
            or any(piece in self.refused for piece in pieces(text)),
        }
        for reason, holds in unfit.items():
            if holds:
                self.dropped[reason] += 1
                return None
        self.seen.add(text)
        return row | {"kind": kind, "tokens": size}


def make(store: Path, out: Path, count: int, held_out: bool) -> None:
    """Write the prompts, their digest, and say what they are."""
    warnings.simplefilter("ignore")
    rng = random.Random(SEED)
    read, apart, held = packages(store)
    if held_out:
        read, held = apart, set()
    cutter = Cutter(held, Tokenizer.from_file(str(PEBBLE / "tokenizer.json")), rng)
    rows: list[dict] = []
    for kind, share in COUNTS.items():
        left = round(count * share / sum(COUNTS.values()))
        offers = [(package, cutter.places(package, kind)) for package in read]
        while left and offers:
            for package, places in offers:
                row = None
                while places and left and row is None:
                    place = places.pop()
                    row = cutter.cut(kind, place)
                if row:
                    rows.append(row | {"source": f"{package.name} {package.version}: {place[0]}"})
                    left -= 1
            offers = [offer for offer in offers if offer[1]]
    rng.shuffle(rows)
    if any(piece in cutter.refused for row in rows for piece in pieces(said(row))):
        raise SystemExit("a prompt shares text with a held-out one")
    for kind in COUNTS:
        sizes = sorted(row["tokens"] for row in rows if row["kind"] == kind)
        quarters = [sizes[len(sizes) * i // 4] for i in range(4)] + sizes[-1:] if sizes else []
        print(f"{kind}: {len(sizes)} prompts, {sum(sizes)} tokens, quartiles {quarters}")
    names = Counter(row["source"].split(" ")[0] for row in rows)
    print(f"{len(rows)} prompts of {len(names)} packages, {min(names.values())} to {max(names.values())} each")
    print("dropped", dict(cutter.dropped))
    lines = [json.dumps({k: v for k, v in row.items() if k != "tokens"}) + "\n" for row in rows]
    out.write_bytes(gzip.compress("".join(lines).encode(), 9, mtime=0))
    digest = hashlib.sha256(out.read_bytes()).hexdigest()
    out.with_name(out.name.split(".")[0] + ".sha256").write_text(f"{digest}  {out.name}\n")
    print(f"{out}: {out.stat().st_size} bytes, sha256 {digest}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["fetch", "make"])
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--packages", type=int, default=PACKAGES, help="training packages to fetch")
    parser.add_argument("--count", type=int, default=60_000, help="prompts to make")
    parser.add_argument("--held-out", action="store_true", help="cut them from the held-out packages")
    parser.add_argument("--out", type=Path, help="a file that ends with .jsonl.gz")
    args = parser.parse_args()
    if args.action == "fetch":
        fetch(args.store, args.packages)
    elif args.out is None:
        parser.error("make needs --out")
    else:
        make(args.store, args.out, args.count, args.held_out)


if __name__ == "__main__":
    main()
