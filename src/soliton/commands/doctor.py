"""This machine, and with MODEL: its settings and why, the memory plan, the op variants, all without loading weights.

Also whether the matrix product of this CPU keeps a row's bits for every row count, on which equal output rests.
Exit code 1 when something would keep an engine from its word here.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..config import EngineConfig, flags_given
from ..errors import ConfigError
from . import common

GIB = 1 << 30


def add_flags(parser: argparse.ArgumentParser) -> None:
    """MODEL and the flags of the engine."""
    common.add_engine(parser)
    parser.add_argument("--json", action="store_true", help="one JSON document instead of tables")


def run(args: argparse.Namespace) -> int:
    """Examine, print."""
    common.take_model(args)
    named, flags = common.names_model(args), flags_given(args, EngineConfig)
    if flags and not named:
        raise ConfigError(f"{', '.join(flags)}: settings are examined for a model; give MODEL as well")
    config = common.config_given(args) if named else None
    from ..measure.doctor import examine

    report = examine(config)
    if args.json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        _print(report)
    return 1 if report["problems"] else 0


def _print(report: dict[str, Any]) -> None:
    found = report["machine"]
    gpus = ", ".join(f"{gpu['name']} ({_bytes(gpu['memory'])})" for gpu in found["gpus"]) or "none"
    rows = [
        ("processor", f"{found['cpu']} ({found['vectors']})"),
        ("cores", f"{found['usable_cores']} of {found['cores']}, {report['threads']} torch threads"),
        ("memory", f"{_bytes(found['memory'])}, {_bytes(found['memory_free'])} free"),
        ("GPUs", gpus),
        *((name, version or "not installed") for name, version in report["versions"].items()),
    ]
    common.table("machine", (), rows)
    model = report.get("model")
    if model:
        settings = [(row["key"], row["value"], row["reason"]) for row in model["settings"]]
        common.table(f"settings for {model['name']}", ("setting", "value", "why"), settings)
        memory = [(name, f"{value:,}", _bytes(value)) for name, value in model["memory"].items()]
        budget = model["memory_budget"]
        memory.append(("budget", "-" if budget is None else f"{budget:,}", _bytes(budget)))
        common.table("memory plan", ("purpose", "bytes", ""), memory)
        variants = [(row["op"], row["variant"], row["reason"]) for row in model["variants"]]
        common.table("op variants", ("op", "variant", "why"), variants)
    words = {True: "yes", False: "no", None: "not probed, too large"}
    products = [
        (row["inputs"], row["outputs"], words[row["torch"]], words[row["soliton"]]) for row in report["products"]
    ]
    heads = ("inputs", "outputs", "torch.mm", "soliton's product")
    common.table("a row keeps its bits in products of 2 to 32 rows", heads, products)
    for problem in report["problems"]:
        print(f"problem: {problem}")


def _bytes(value: int | None) -> str:
    return "-" if value is None else f"{value / GIB:.2f} GiB"
