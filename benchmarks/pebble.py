"""pebble on this CPU: accept length on held-out prompts, NEXTN against plain, and transformers beside it.

    python benchmarks/pebble.py [accept|speed|peer|all] [--json] [--threads N] [--limit N] [--prompts FILE]

accept: mean accept length (the bonus token counts), greedy and at temperature 0.8 over S = 1..8, and teacher-forced
        along the true continuation. Greedy continuations that hold an 8-gram three times are excluded and counted.
speed:  plain, on its smallest bit-stable tile, against NEXTN, in turns within one run.
peer:   transformers' own generate on the same checkpoint, dtype and threads (needs transformers >= 5.24).
The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from soliton import Engine, SamplingParams
from soliton.measure.accept import count

ROOT = Path(__file__).resolve().parents[1]
NEW_TOKENS = 128
PROMPT_TOKENS = 128
REPEATS = 5
console = Console(stderr=True)


def load_prompts(path: Path, limit: int | None) -> list[dict[str, Any]]:
    """The held-out prompts, at most ``limit`` spread over the file."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return rows if limit is None or limit >= len(rows) else rows[:: max(len(rows) // limit, 1)][:limit]


def accept_lengths(
    prompts: list[dict[str, Any]], steps: int, threads: int, temperature: float, progress: Callable[[], None]
) -> dict[str, Any]:
    """Mean accept length over all steps that had drafts, by total tokens over total steps."""
    given = [row.get("messages") or row["prompt"] for row in prompts]
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=temperature, top_k=0, top_p=1.0)
    with Engine.load("pebble", speculative_num_steps=steps, threads=threads, prefix_reuse="off") as engine:
        found = count(engine, given, params, exclude=temperature == 0, progress=lambda done, total: progress())
    return {"steps": steps, "temperature": temperature, **found.report(steps)}


def teacher_forced(
    prompts: list[dict[str, Any]], steps: int, threads: int, progress: Callable[[], None]
) -> dict[str, Any]:
    """Accept length when the true continuation takes the place of the target's choice."""
    tokens = count = 0
    with Engine.load("pebble", speculative_num_steps=steps, threads=threads, prefix_reuse="off") as engine:
        runtime = engine._runtime
        assert runtime is not None
        for row in prompts:
            progress()
            if "prompt" not in row:
                continue
            start = len(engine.encode(row["prompt"]))
            ids = engine.encode(row["prompt"] + row["reference"])[: start + NEW_TOKENS]
            at, read = max(start, 1), 0
            while at < len(ids) - steps:
                # state: tokens before ``at`` are read, ids[at] is the anchor
                chain = runtime.drafts_after(ids[:at], ids[at], steps, read=read)
                read = at
                good = 0
                while good < steps and chain[good] == ids[at + 1 + good]:
                    good += 1
                tokens, count = tokens + good + 1, count + 1
                at += good + 1
    return {"steps": steps, "accept_length": tokens / count if count else None, "rounds": count}


def speed(threads: int, progress: Callable[[], None]) -> dict[str, Any]:
    """Tokens/s of plain and NEXTN in turns: the same prompts, greedy, the same ids required."""
    text = (ROOT / "src/soliton/engine.py").read_text(encoding="utf-8")
    engines = {
        name: Engine.load("pebble", threads=threads, run_ahead=0, prefix_reuse="off", **setting)
        for name, setting in (
            ("plain", {"speculation": "off"}),
            *((f"nextn S={s}", {"speculation": "nextn", "speculative_num_steps": s}) for s in (1, 2, 3, 4, 5)),
        )
    }
    ids = next(iter(engines.values())).encode(text)
    starts = [i * len(ids) // 8 for i in range(6)]
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    rates: dict[str, list[float]] = {name: [] for name in engines}
    lengths: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(REPEATS + 1):
        answers = {}
        for name, engine in engines.items():
            spent, made = 0.0, 0
            got = []
            for start in starts:
                answer = engine.generate(ids[start : start + PROMPT_TOKENS], params)
                assert answer.stats.tpot_s is not None
                spent += answer.stats.tpot_s * (len(answer.token_ids) - 1)
                made += len(answer.token_ids) - 1
                got.append(answer.token_ids)
                lengths[name].append(answer.stats.accept_length or 1.0)
            answers[name] = got
            if turn:
                rates[name].append(made / spent)
            progress()
        assert all(a == answers["plain"] for a in answers.values()), "greedy output differs with speculation"
    for engine in engines.values():
        engine.close()
    plain = statistics.median(rates["plain"])
    return {
        name: {
            "tokens_per_s": statistics.median(values),
            "spread": [min(values), max(values)],
            "accept_length": statistics.mean(lengths[name]),
            "over_plain": statistics.median(values) / plain,
        }
        for name, values in rates.items()
    }


def peer(threads: int, progress: Callable[[], None]) -> dict[str, Any]:
    """transformers and our plain decode in turns: prompt 128, 128 new tokens, greedy, median of 5 after a warm-up."""
    try:
        import transformers
    except ImportError:
        return {"skipped": "transformers is not installed: pip install 'transformers>=5.24'"}
    import soliton.pebble

    torch.set_num_threads(threads)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(soliton.pebble.path(), dtype=torch.float32).eval()
    ours = Engine.load("pebble", speculation="off", threads=threads, run_ahead=0, prefix_reuse="off")
    ids = ours.encode((ROOT / "src/soliton/runtime.py").read_text(encoding="utf-8"))[:PROMPT_TOKENS]
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    times: dict[str, list[float]] = {"transformers": [], "soliton plain": []}
    same = True
    for turn in range(REPEATS + 1):
        started = time.perf_counter()
        with torch.inference_mode():
            out = theirs.generate(
                torch.tensor([ids]), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        middle = time.perf_counter()
        answer = ours.generate(ids, params)
        ended = time.perf_counter()
        same = same and out[0, len(ids) :].tolist() == answer.token_ids
        if turn:
            times["transformers"].append(middle - started)
            times["soliton plain"].append(ended - middle)
        progress()
    ours.close()
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "transformers_version": transformers.__version__,
        "same_tokens": same,
        "seconds": medians,
        "spread": {name: [min(v), max(v)] for name, v in times.items()},
        "ratio": medians["transformers"] / medians["soliton plain"],
    }


def _versions() -> dict[str, str]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    cpu = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass  # the machine's name stands
    return {"commit": commit, "torch": torch.__version__, "python": platform.python_version(), "cpu": cpu}


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*(f"{c:.3f}" if isinstance(c, float) else str(c) for c in row))
    Console().print(table)


def main() -> int:
    """Run what was asked and print tables and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="all", choices=("accept", "speed", "peer", "all"))
    parser.add_argument("--prompts", type=Path, default=ROOT / "tests/data/heldout.jsonl")
    parser.add_argument("--limit", type=int, default=None, help="at most this many prompts")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, nargs="*", default=[1, 2, 3, 4, 5, 6, 7, 8])
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    args = parser.parse_args()
    prompts = load_prompts(args.prompts, args.limit)
    result: dict[str, Any] = {"model": "pebble", "threads": args.threads, **_versions()}
    with Progress(console=console, transient=True) as progress:

        def bar(name: str, total: int) -> Callable[[], None]:
            task = progress.add_task(name, total=total)
            return lambda: progress.advance(task)

        if args.what in ("accept", "all"):
            greedy = [accept_lengths(prompts, s, args.threads, 0.0, bar(f"greedy S={s}", len(prompts)))
                      for s in args.steps]  # fmt: skip
            warm = [accept_lengths(prompts, s, args.threads, 0.8, bar(f"T=0.8 S={s}", len(prompts)))
                    for s in args.steps]  # fmt: skip
            forced = [teacher_forced(prompts, s, args.threads, bar(f"forced S={s}", len(prompts)))
                      for s in args.steps]  # fmt: skip
            result["accept"] = {"greedy": greedy, "t0.8": warm, "teacher_forced": forced}
        if args.what in ("speed", "all"):
            result["speed"] = speed(args.threads, bar("speed", (REPEATS + 1) * 6))
        if args.what in ("peer", "all"):
            result["peer"] = peer(args.threads, bar("peer", REPEATS + 1))
    if not args.json:
        if "accept" in result:
            rows = [
                (g["steps"], g["accept_length"], w["accept_length"], f["accept_length"], g["excluded"],
                 " ".join(f"{p:.2f}" for p in g["accepted_at_position"]))
                for g, w, f in zip(greedy, warm, forced, strict=True)
            ]  # fmt: skip
            columns = ("S", "greedy", "T=0.8", "teacher-forced", "excluded", "accepted by position (greedy)")
            _table(f"accept length, {len(prompts)} held-out prompts", columns, rows)
        if "speed" in result:
            rows = [(n, v["tokens_per_s"], *v["spread"], v["accept_length"], v["over_plain"])
                    for n, v in result["speed"].items()]  # fmt: skip
            _table("tokens/s, greedy", ("", "median", "least", "most", "accept length", "over plain"), rows)
        if "peer" in result:
            Console().print(result["peer"])
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
