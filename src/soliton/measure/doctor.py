"""What this machine is, how a model would run on it, and whether its matrix product keeps a row's bits.

Nothing here takes memory for a model: settings, plan and op variants follow from file headers, shapes from a model
built without data.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import Checkpoint, open_checkpoint
from ..config import EngineConfig, settings
from ..drafting import doubts, find_draft
from ..errors import MemoryPlanError
from ..model.weights import Builder, MoeWeights
from ..ops.device import name as device_name
from ..ops.linear import product
from ..ops.weight import Weight
from ..runtime import DTYPES, choose_ops, plan_memory, settle

ROWS = 32  # most rows of a step
DEFAULT_SHAPES = ((256, 256), (256, 1024), (768, 768), (1024, 4096), (2048, 2048), (4096, 1024))
PROBE_LIMIT = 16_000_000  # elements of the largest matrix that a probe makes


def examine(config: EngineConfig | None) -> dict[str, Any]:
    """The whole report as plain values. ``problems``: what would keep an engine from its word here."""
    report: dict[str, Any] = {"machine": machine(), "versions": versions()}
    problems: list[str] = []
    shapes: list[tuple[int, int]] = list(DEFAULT_SHAPES)
    if config is not None:
        report["model"], shapes, found = _model(config)
        problems += found
    report["threads"] = torch.get_num_threads()
    report["products"] = [probe(inputs, outputs) for inputs, outputs in shapes]
    unstable = [f"{row['inputs']} x {row['outputs']}" for row in report["products"] if row["soliton"] is False]
    if unstable:
        problems.append(f"products change a row's bits with the row count: {', '.join(unstable)}")
    return {**report, "problems": problems}


def machine() -> dict[str, Any]:
    """Processor, cores, memory and GPUs; None for what cannot be told."""
    cores = os.cpu_count()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    memory = _fields("/proc/meminfo")
    gpus = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(index)
            gpus.append({"name": found.name, "memory": found.total_memory, "capability": [found.major, found.minor]})
    return {
        "cpu": device_name(torch.device("cpu")),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "cores": cores,
        "usable_cores": usable,
        "memory": _kib(memory.get("MemTotal")),
        "memory_free": _kib(memory.get("MemAvailable")),
        "gpus": gpus,
    }


def versions() -> dict[str, str | None]:
    """Versions of what computes; None: not installed."""
    return {"python": platform.python_version(), **{name: _version(name) for name in ("torch", "triton", "soliton")}}


def probe(inputs: int, outputs: int) -> dict[str, Any]:
    """Whether a row's bits are the same in products of 2 to 32 rows, and at another place in some of them.

    ``torch``: of torch.mm with a contiguous [inputs, outputs]; ``soliton``: of the engine's own product on a CPU.
    None: too large to make here.
    """
    row: dict[str, Any] = {"inputs": inputs, "outputs": outputs, "torch": None, "soliton": None}
    if inputs * outputs > PROBE_LIMIT:
        return row
    maker = torch.Generator().manual_seed(0)
    x, w = torch.randn(ROWS, inputs, generator=maker), torch.randn(inputs, outputs, generator=maker)
    return {**row, "torch": _steady(torch.mm, x, w), "soliton": _steady(_own, x, w)}


def _own(x: Tensor, w: Tensor) -> Tensor:
    out = torch.empty(x.shape[0], w.shape[1])
    product(out, x, w)
    return out


def _steady(multiply: Callable[[Tensor, Tensor], Tensor], x: Tensor, w: Tensor) -> bool:
    whole = multiply(x, w)
    first = all(torch.equal(multiply(x[:m], w), whole[:m]) for m in range(2, len(x) + 1))
    return first and all(torch.equal(multiply(x[-m:].contiguous(), w), whole[-m:]) for m in (2, 3, 17))


def _model(config: EngineConfig) -> tuple[dict[str, Any], list[tuple[int, int]], list[str]]:
    checkpoint = open_checkpoint(config.model)
    settled, decisions = settle(config, checkpoint)
    if settled.device == "cpu" and settled.threads is not None:
        torch.set_num_threads(settled.threads)
    reasons = {decision.key: decision.reason for decision in decisions}
    draft = find_draft(settled, checkpoint)
    found = {}  # what no setting names
    if draft is not None and settled.draft is None:
        found, reasons["draft"] = {"draft": draft.name}, "comes with the model"
    rows = []
    for leaf in settings(EngineConfig):
        given = getattr(config, leaf.key)
        reason = reasons.get(leaf.key) or ("as given" if given != leaf.default else "the default")
        rows.append({"key": leaf.key, "value": found.get(leaf.key, getattr(settled, leaf.key)), "reason": reason})
    problems = doubts(settled, checkpoint, draft) if draft is not None else []
    try:
        plan = plan_memory(settled, checkpoint)
    except MemoryPlanError as error:
        problems.append(str(error))
        plan = plan_memory(dataclasses.replace(settled, memory_budget=None), checkpoint)
    choices = choose_ops(settled, checkpoint.spec)
    variants = [{"op": c.op, "variant": c.variant, "reason": c.reason} for c in choices.values()]
    body = {
        "name": checkpoint.name,
        "settings": rows,
        "memory": dict(plan.rows()),
        "memory_budget": settled.memory_budget,
        "variants": variants,
    }
    shapes = sorted(set(product_shapes(settled, checkpoint, merge=choices["moe"].variant == "dense")))
    return body, shapes, problems


def product_shapes(config: EngineConfig, checkpoint: Checkpoint, *, merge: bool) -> Iterator[tuple[int, int]]:
    """(inputs, outputs as stored) of every matrix product of a model, from weights without data."""
    nowhere = torch.device("meta")
    mtp = (config.speculative_num_steps or 0) > 0
    builder = Builder(_Shapes(checkpoint), nowhere, DTYPES[config.dtype], merge_experts=merge)
    yield from _weights(builder.model(checkpoint.spec, mtp=mtp))


class _Shapes:
    """A provider of tensors without data."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def tensor(self, role: str, device: torch.device) -> Tensor:
        return torch.empty(self._checkpoint.table[role].shape, device=device, dtype=torch.bfloat16)

    def has(self, role: str) -> bool:
        return self._checkpoint.has(role)


def _weights(node: Any) -> Iterator[tuple[int, int]]:
    if isinstance(node, Weight):
        yield node.inputs, node.padded
    elif isinstance(node, tuple):
        for item in node:
            yield from _weights(item)
    elif dataclasses.is_dataclass(node):
        for field in dataclasses.fields(node):
            value = getattr(node, field.name)
            if isinstance(node, MoeWeights) and field.name in ("up", "down") and isinstance(value, Tensor):
                yield value.shape[1], value.shape[2]  # a product for each expert of a stack
            else:
                yield from _weights(value)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _fields(path: str) -> dict[str, str]:
    """The first value of each "key: value" line of a file of the system; empty where there is none."""
    found: dict[str, str] = {}
    try:
        with open(path, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                key, colon, value = line.partition(":")
                if colon:
                    found.setdefault(key.strip(), value.strip())
    except OSError:
        pass  # not Linux
    return found


def _kib(text: str | None) -> int | None:
    return int(text.split()[0]) * 1024 if text else None
