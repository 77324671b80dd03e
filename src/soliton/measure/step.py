"""How long one step takes, how many bytes it has to read, and how far that is from what the memory allows.

A step is measured as it runs: one graph replay (or its calls one by one) over weights that the step before has pushed
out of the cache, between two events. Its bytes are counted from its own tape: every matrix it streams, each routed
expert once for all rows that chose it, the cache up to the length, the committed recurrent state. The floor is those
bytes over the read bandwidth measured in the same run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import open_checkpoint
from ..config import EngineConfig
from ..errors import ConfigError
from ..ops.chain import chained
from ..ops.sweep import DOWN, KDA, PRODUCT, ROUTE, UP, Sweep
from ..ops.tape import Entry, Tape
from ..ops.weight import Weight
from ..runtime import Runtime, load_runtime, settle
from ..sampling.params import Resolved, SamplingParams
from ..step.program import Program
from ..step.request import begin
from .about import commit, device_name, driver, dtypes, sampling_words
from .ahead import LoopTimes, Watched
from .bandwidth import microseconds, read_bandwidth
from .doctor import versions

WARM_UPS = 3  # steps that are not counted
DEFAULT_CONTEXT = 8192


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Bytes of one step. read: weights, kv and state; written: kv rows, staged states and windows."""

    weights: int
    kv: int
    state: int
    written: int
    experts: tuple[int, ...]  # distinct routed experts of each layer

    @property
    def read(self) -> int:
        return self.weights + self.kv + self.state


def measure_step(
    config: EngineConfig,
    *,
    rows: int | None = None,
    context: int | None = None,
    params: SamplingParams | None = None,
    repeats: int = 30,
    loop_steps: int = 64,
    accept: float | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """One report as plain values (times in microseconds, bandwidths in TB/s).

    rows: rows verified a step, for a model without a drafter of its own; with NEXTN it is the drafts and one. context:
    tokens in the cache; 8192 or as many as the engine takes. accept: an accept length to show the time a token at,
    marked as simulated. Raises ConfigError for rows, a context or an accept length that the engine cannot have, before
    anything is loaded.
    """
    if rows is not None and not 1 <= rows <= 32:
        raise ConfigError(f"rows is {rows}; a step verifies 1 to 32 rows")
    progress("loading")
    checkpoint = open_checkpoint(config.model)
    settled = settle(config, checkpoint)[0]
    if rows is not None and settled.speculation != "off":
        raise ConfigError(f"rows is {rows}, but the drafter decides how many are verified; set --speculation off")
    most = settled.max_context
    assert most is not None
    context = context_within(context, most, checkpoint.spec.max_position)
    count = rows or settled.speculative_num_draft_tokens or 1
    if accept is not None and not 1 <= accept <= count:
        raise ConfigError(
            f"an accept length of {accept:g} is impossible: a step of {count} rows gives 1 to {count} tokens; choose "
            "one of those, or more rows"
        )
    runtime = load_runtime(config, checkpoint, verify=rows)
    with torch.inference_mode():
        found = _measure(runtime, context, params or SamplingParams(temperature=0.0), repeats, loop_steps, progress)
    return found if accept is None else simulated(found, accept)


def context_within(context: int | None, most: int, longest: int) -> int:
    """The context to measure at: as given, or 8192 where the engine takes that many. ``longest``: the model's own."""
    if context is None:
        return min(DEFAULT_CONTEXT, most)
    if context < 1:
        raise ConfigError(f"context is {context}; at least 1 token is needed")
    if context > most:
        hint = "set --max-context as well" if context <= longest else f"the model takes {longest}: choose no more"
        raise ConfigError(f"context is {context}, but the engine goes to {most}; {hint}")
    return context


def _measure(
    runtime: Runtime,
    context: int,
    params: SamplingParams,
    repeats: int,
    loop_steps: int,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    device = runtime.parts.device
    resolved = params.resolve({}, vocab=runtime.checkpoint.spec.vocab)
    program = runtime.program(resolved)
    progress("measuring the memory")
    bandwidth = read_bandwidth(device)
    step = Repeated(runtime, program, resolved, context)
    progress("timing steps")
    times = sorted([step.time() for _ in range(repeats + WARM_UPS)][WARM_UPS:])
    middle = statistics.median(times)
    counted = step_bytes(runtime, program, context)
    progress("running the loop")
    loop = step.loop(loop_steps)
    floor = counted.read / bandwidth / 1e6
    speculation = runtime.config.speculation
    return {
        "model": runtime.checkpoint.name,
        "device": device_name(device),
        "dtype": runtime.config.dtype,
        "router_dtype": runtime.config.router_dtype,
        "lm_head_dtype": runtime.config.lm_head_dtype,
        "threads": runtime.config.threads,
        "tp": 1,
        "speculation": speculation if speculation == "off" else f"{speculation} S={runtime.parts.drafts}",
        "sampling": sampling_words(resolved),
        "rows": int(runtime.relay.rows),
        "context": context,
        "step_us": round(middle, 2),
        "spread_us": [round(times[0], 2), round(times[-1], 2)],
        "bytes": counted.read,
        "weight_bytes": counted.weights,
        "kv_bytes": counted.kv,
        "state_bytes": counted.state,
        "written_bytes": counted.written,
        "experts": [min(counted.experts, default=0), max(counted.experts, default=0)],
        "experts_mean": round(statistics.mean(counted.experts), 2) if counted.experts else 0,
        "read_tb_s": round(bandwidth, 3),
        "floor_us": round(floor, 2),
        "ratio": round(middle / floor, 3),
        "weights_ratio": round(middle * bandwidth * 1e6 / counted.weights, 3),
        "idle_us": None if loop is None else round(statistics.median(loop.idle), 2),
        "loop_us": None if loop is None else round(loop.whole, 2),
        "lead_us": None if loop is None else round(statistics.median(loop.lead), 2),
        "lead_histogram": None if loop is None else loop.histogram(),
        "kernels": kernels(program, runtime),
        "phases_us": step.phases(),
        "executor": runtime.config.executor,
        "pdl": chained() if device.type == "cuda" else None,
        "run_ahead": runtime.config.run_ahead,
        "simulated": False,
        "void": device.type == "cuda" and "H200" in device_name(device) and bandwidth < 4.5,
        "commit": commit(),
        "versions": {**versions(), "driver": driver()},
    }


class Repeated:
    """The same step again and again: the stream stands at ``context`` before each."""

    def __init__(self, runtime: Runtime, program: Program, params: Resolved, context: int) -> None:
        self.runtime, self.program, self.params, self.context = runtime, program, params, context
        runtime.stream.clear()
        runtime.hold_threads()
        maker = torch.Generator().manual_seed(0)
        filler = torch.Generator(runtime.parts.device).manual_seed(0)
        for cache in (runtime.stream.kv, runtime.stream.draft_kv):
            if cache is not None and cache.numel():
                cache.normal_(generator=filler)
        vocab = runtime.checkpoint.spec.vocab
        self.tokens = torch.randint(0, vocab, runtime.relay.tokens.shape, generator=maker).to(runtime.parts.device)
        self.prompt = [int(self.tokens[0])]
        self.again()

    def again(self) -> None:
        """Back to the beginning of the step, with drafts to verify."""
        relay = self.runtime.relay
        begin(relay, self.params, prompt=self.prompt, limit=1 << 30)
        relay.stop_mask.zero_()
        relay.length.fill_(self.context)
        relay.tokens.copy_(self.tokens)
        relay.drafted.fill_(1 if self.runtime.parts.verify else 0)

    def time(self) -> float:
        """Microseconds of one step."""
        self.again()
        return microseconds(self.runtime.parts.device, lambda: self.runtime.loop.executor.launch(self.program))

    def loop(self, steps: int, stall: float = 0.0) -> LoopTimes | None:
        """The run-ahead loop over ``steps`` steps; the host sleeps ``stall`` seconds after each that it has read. None
        off a GPU."""
        if self.runtime.parts.device.type != "cuda":
            return None
        self.again()
        loop, relay = self.runtime.loop, self.runtime.relay
        room = self.runtime.config.max_context
        assert room is not None
        relay.length.fill_(max(min(self.context, room - steps * relay.tokens.shape[0] - 1), 1))
        watched = Watched(loop.executor)
        loop.executor = watched
        try:
            for _ in loop.run(self.program, limit=steps, top_logprobs=None):
                if stall:
                    time.sleep(stall)
            loop.drain()
        finally:
            loop.executor = watched.executor
        return watched.times(skip=loop.depth + 1)

    def phases(self) -> dict[str, float]:
        """Microseconds of each phase by itself, as a graph of its own on a GPU."""
        found: dict[str, float] = {}
        for phase in self.program.phases:
            self.again()
            found[phase.name] = round(found.get(phase.name, 0.0) + self._phase(phase.tape), 2)
        return found

    def _phase(self, tape: Tape) -> float:
        device = self.runtime.parts.device
        if device.type != "cuda":
            return microseconds(device, tape.run)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tape.run()
        return statistics.median(microseconds(device, graph.replay) for _ in range(5))


def step_bytes(runtime: Runtime, program: Program, context: int) -> Bytes:
    """What one step reads and writes, after it has run once (its routing is looked at)."""
    weights = kv = state = written = 0
    experts: list[int] = []
    live = max(int(runtime.relay.rows), 1)
    for entry in _entries(program):
        if isinstance(entry.function, Sweep):
            amount, found, held = _sweep_bytes(entry.function)
            weights += amount
            experts += found
            state += held
            written += live * held
        elif entry.op in ("linear", "linear.heads", "mla.enter", "mla.heads", "moe"):
            if entry.op == "moe":
                found = [len(set(entry.args[2][:live].flatten().tolist()))]
                experts += found
                weights += _moe_bytes(entry.args, found[0])
            else:
                weights += _matrix(entry.args[2])
        elif entry.op == "mla.attend":
            cache = entry.args[2]
            kv += (context + live) * cache.shape[1] * cache.element_size()
            written += live * cache.shape[1] * cache.element_size()
        elif entry.op == "draft.attend":
            query, cache = entry.args[1:3]
            kv += 2 * (context + query.shape[0]) * cache[0, 0].numel() * cache.element_size()
        elif entry.op == "draft.store":
            cache, made = entry.args[:2]
            written += made.shape[0] * 2 * cache[0, 0].numel() * cache.element_size()
        elif entry.op == "markov":
            weights += int(entry.args[3].nbytes)
        elif entry.op in ("kda.step", "kda.chain"):
            states = next(a for a in entry.args if isinstance(a, Tensor) and a.dim() == 4 and a.dtype == torch.float32)
            state += states[0].numel() * 4
            written += live * states[0].numel() * 4
    return Bytes(weights=weights, kv=kv, state=state, written=written, experts=tuple(experts))


def _entries(program: Program) -> Iterator[Entry]:
    for phase in program.phases:
        yield from phase.tape.entries


def _matrix(w: Weight | Tensor) -> int:
    return w.nbytes if isinstance(w, Weight) else w.numel() * w.element_size()


def _moe_bytes(args: tuple[Any, ...], distinct: int) -> int:
    up, down = args[4], args[5]
    if isinstance(up, Weight):
        return _matrix(up) + _matrix(down)
    return distinct * (_matrix(up[0]) + _matrix(down[0])) + _matrix(args[6]) + _matrix(args[7])


def _sweep_bytes(sweep: Sweep) -> tuple[int, list[int], int]:
    """(weights, distinct experts of each choice, recurrent state) of one launch."""
    weights = chosen = state = 0
    found: list[int] = []
    rows = sweep.rows if sweep.live is None else min(sweep.rows, max(int(sweep.live), 1))
    for item in sweep.instructions:
        f = item.fields
        if item.kind == PRODUCT:
            weights += f["n"] * f["k"] * 2
        elif item.kind == KDA:
            state += f["weights"][0].numel() * 4
            weights += sum(f[name].numel() * 2 for name in ("up_f", "up_g") if name in f)
        elif item.kind in (UP, DOWN):
            weights += chosen * f["n"] * f["k"] * 2 + (f["n"] * f["k2"] * 2 if "k2" in f else 0)
        else:
            chosen = len(set(f["ids"][:rows].flatten().tolist()))
            if item.kind == ROUTE:
                found.append(chosen)
    return weights, found, state


def kernels(program: Program, runtime: Runtime) -> int | None:
    """Kernels of one step as the profiler counts them; None off a GPU."""
    if runtime.parts.device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for phase in program.phases:
            phase.tape.run()
        torch.cuda.synchronize()
    return sum(1 for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA)


def simulated(report: dict[str, Any], accept: float) -> dict[str, Any]:
    """The report with the time a token that ``accept`` new tokens a step would give, marked as simulated."""
    return {**report, "simulated": True, "accept_length": accept, "tpot_us": round(report["step_us"] / accept, 2)}


def as_table(report: dict[str, Any]) -> list[tuple[str, str]]:
    """The card for people."""
    r = report
    low, high = r["spread_us"]
    few, many = r["experts"]
    rows = [
        ("model", f"{r['model']}, {dtypes(r)}, {r['speculation']}, {r['sampling']}"),
        ("device", f"{r['device']}, {r['executor']}, run-ahead {r['run_ahead']}"),
        ("rows, context", f"{r['rows']}, {r['context']}"),
        ("step", f"{r['step_us']:.1f} µs ({low:.1f} to {high:.1f})"),
        ("reads", f"{r['bytes'] / 1e9:.3f} GB: weights {r['weight_bytes'] / 1e9:.3f}, kv {r['kv_bytes'] / 1e9:.3f}, "
                  f"state {r['state_bytes'] / 1e9:.3f}; writes {r['written_bytes'] / 1e9:.3f}"),
        ("experts a layer", f"{few} to {many}, mean {r['experts_mean']}"),
        ("read bandwidth", f"{r['read_tb_s']:.2f} TB/s" + (" - TOO LOW, THE RUN IS VOID" if r["void"] else "")),
        ("floor", f"{r['floor_us']:.1f} µs, taken {r['ratio']:.2f} times, by weights {r['weights_ratio']:.2f}"),
        ("idle between steps", "-" if r["idle_us"] is None else f"{r['idle_us']:.1f} µs, a step of the loop takes "
                                                                f"{r['loop_us']:.1f} µs"),
        ("launched ahead by", "-" if r["lead_us"] is None else f"{r['lead_us']:.0f} µs; steps by µs: " + ", ".join(
            f"{edge} {count}" for edge, count in r["lead_histogram"].items() if count)),
        ("kernels", "-" if r["kernels"] is None else str(r["kernels"])),
        ("phases", ", ".join(f"{name} {value:.1f}" for name, value in r["phases_us"].items()) + " µs"),
    ]  # fmt: skip
    if r["simulated"]:
        rows.append(("SIMULATED", f"accept length {r['accept_length']:g} gives {r['tpot_us']:.1f} µs a token"))
    return rows
