"""The settings of an engine, and ``resolve``, which replaces every "auto" and None by a value and says why.

A config is never changed after it is made. ``bind``, ``add_arguments`` and ``flags_given`` (see ``binder``) build one
from the outside. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from soliton.binder import OTHER_VARIABLES, add_arguments, bind, check, flags_given, parse_size, setting, settings
from soliton.errors import ConfigError, UnsupportedError

__all__ = [
    "OTHER_VARIABLES",
    "Decision",
    "EngineConfig",
    "Facts",
    "add_arguments",
    "bind",
    "flags_given",
    "parse_size",
    "resolve",
    "settings",
]

DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("bfloat16",)}
DEFAULT_STEPS = 3
DRAFT_VERIFY = ("auto", "all", "fixed", "threshold", "cost")
# what only a block drafter has
DRAFT_KEYS = ("draft_verify_tokens", "draft_threshold", "draft_costs", "draft_calibration")
DEFAULT_MAX_CONTEXT = 8192
PREFILL_CHUNK = {"cpu": 512, "cuda": 8192}
MIB = 1 << 20
# bytes of weights up to which a second thread brings a few per cent and, on a busy machine, costs ten times that
SMALL_MODEL = 64 * MIB


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How one engine is built: which checkpoint, where, and how its steps run. Requests have SamplingParams."""

    model: str = setting("checkpoint directory, name of a bundled model, or synthetic:NAME", aliases=("--model-path",))
    draft: str | None = setting(
        "directory of a DSpark draft that fits the model", default=None, aliases=("--speculative-draft-model-path",)
    )
    speculation: str = setting(
        "how a step drafts; auto takes the model's own MTP layer where there is one",
        default="auto",
        choices=("auto", "off", "nextn", "dspark"),
        aliases=("--speculative-algorithm",),
    )
    speculative_num_steps: int | None = setting(
        f"drafted tokens per step; {DEFAULT_STEPS} when unset, a block drafter's own number",
        default=None,
        unit="tokens",
        low=1,
        high=16,
        aliases=("--speculative-dspark-block-size",),
    )
    speculative_eagle_topk: int = setting("candidates per drafted position; a chain has exactly 1", default=1)
    speculative_num_draft_tokens: int | None = setting(
        "rows the target verifies per step, always speculative_num_steps + 1", default=None, unit="rows", low=2, high=17
    )
    draft_verify: str = setting(
        "which of a block's drafts a step verifies: all, a fixed number, those before the first that is too unsure, or "
        "as many as bring most tokens a second by a measured table of costs; auto takes the costs that are given, else "
        "all",
        default="auto",
        choices=DRAFT_VERIFY,
    )
    draft_verify_tokens: int | None = setting(
        "drafts verified per step with draft_verify = fixed", default=None, unit="tokens", low=1, high=16
    )
    draft_threshold: float | None = setting(
        "least confidence of a verified draft with draft_verify = threshold", default=None, low=0, high=1
    )
    draft_costs: str | None = setting(
        "file of step costs by rows on this machine, from soliton measure costs", default=None
    )
    draft_calibration: str | None = setting(
        "file of the confidence head's temperatures; calibration.json beside the draft when unset",
        default=None,
        aliases=("--speculative-dspark-confidence-sts-path",),
    )
    device: str = setting("auto, cpu, cuda or cuda:N", default="auto")
    dtype: str = setting(
        "type of weights and activations", default="auto", choices=("auto", "bfloat16", "float32", "float16")
    )
    router_dtype: str = setting(
        "type of the routers' weights; auto is dtype", default="auto", choices=("auto", "bfloat16", "float32")
    )
    lm_head_dtype: str = setting(
        "type of the output head's weights; auto is dtype", default="auto", choices=("auto", "bfloat16", "float32")
    )
    max_context: int | None = setting(
        f"longest prompt plus answer; the model's own limit, at most {DEFAULT_MAX_CONTEXT}, when unset",
        default=None,
        unit="tokens",
        low=2,
        aliases=("--context-length",),
    )
    run_ahead: int | None = setting(
        "steps in flight before the oldest one is read; 2 on a GPU and 0 on a CPU when unset",
        default=None,
        unit="steps",
        low=0,
        high=4,
    )
    executor: str = setting(
        "how a step is launched: its calls one by one, as one CUDA graph, or as a graph for each phase; auto takes one "
        "graph on a GPU",
        default="auto",
        choices=("auto", "eager", "graph", "phased"),
    )
    prefix_reuse: str = setting(
        "reuse of earlier prompts; exact equals a cold run byte for byte",
        default="fast",
        choices=("fast", "exact", "off"),
    )
    memory_budget: int | str | None = setting(
        "memory for weights, context and checkpoints together; nine tenths of what is free when unset",
        default=None,
        unit="bytes",
        low=0,
    )
    memory_fraction: float | None = setting(
        "share of the free memory that weights, context and checkpoints may take together; 0.9 when unset",
        default=None,
        low=0,
        high=1,
        aliases=("--mem-fraction-static",),
    )
    checkpoint_budget: int | str | None = setting(
        "memory for prefix checkpoints; 256MiB on a CPU and 2GiB on a GPU when unset", default=None, unit="bytes", low=0
    )
    prefill_chunk: int | None = setting(
        "prompt tokens computed at once; prompts are cut at absolute multiples of it; 512 on a CPU and where reuse is "
        "exact, else 8192 on a GPU, when unset",
        default=None,
        unit="tokens",
        low=1,
        high=65536,
        aliases=("--chunked-prefill-size",),
    )
    threads: int | None = setting(
        "torch threads on a CPU; 1 for a small model, else as found, when unset", default=None, low=1, high=1024
    )
    seed: int | None = setting(
        "seed of sampled requests that bring none; drawn afresh for each when unset",
        default=None,
        low=0,
        high=2**63 - 1,
        aliases=("--random-seed",),
    )

    def __post_init__(self) -> None:
        check(self)
        if not self.model:
            raise ConfigError("model is empty: name a checkpoint directory or a bundled model")
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ConfigError(f"device = {self.device!r}: expected auto, cpu, cuda or cuda:N")
        if self.speculative_eagle_topk != 1:
            raise ConfigError(
                f"speculative_eagle_topk = {self.speculative_eagle_topk}: only 1 is possible. Soliton drafts a chain: "
                "a chain has one accepted prefix, so recurrent state can be staged by position; a tree of candidates "
                "would need a state per branch"
            )
        steps, rows = self.speculative_num_steps, self.speculative_num_draft_tokens
        if steps is not None and rows is not None and rows != steps + 1:
            raise ConfigError(
                f"speculative_num_draft_tokens = {rows} contradicts speculative_num_steps = {steps}: a chain verifies "
                f"its drafts and the token before them, {steps + 1} rows; leave one of the two unset"
            )
        if self.speculation == "off":
            for key in ("draft", "speculative_num_steps", "speculative_num_draft_tokens", *DRAFT_KEYS):
                if getattr(self, key) is not None:
                    raise ConfigError(f"{key} = {getattr(self, key)!r} contradicts speculation = 'off': leave one out")
        if self.speculation == "nextn" and self.draft is not None:
            raise ConfigError(
                f"draft = {self.draft!r} contradicts speculation = 'nextn', which drafts with the model's own MTP "
                "layer: use speculation = 'dspark', or leave draft out"
            )
        if self.speculation == "nextn":
            for key in DRAFT_KEYS:
                if getattr(self, key) is not None:
                    raise ConfigError(
                        f"{key} = {getattr(self, key)!r} is of a DSpark draft's confidences, and a chain of NEXTN has "
                        "none: leave it out, or use speculation = 'dspark'"
                    )
        if self.memory_budget is not None and self.memory_fraction is not None:
            raise ConfigError(
                f"memory_budget = {self.memory_budget!r} and memory_fraction = {self.memory_fraction:g} both limit the "
                "memory: leave one out"
            )
        self._check_verify()

    def _check_verify(self) -> None:
        """Each way of choosing drafts has one value of its own."""
        for mode, key in (("fixed", "draft_verify_tokens"), ("threshold", "draft_threshold"), ("cost", "draft_costs")):
            given = getattr(self, key) is not None
            if self.draft_verify == mode and not given:
                raise ConfigError(f"draft_verify = {mode!r} needs {key}: set it")
            if given and self.draft_verify != mode and not (mode == "cost" and self.draft_verify == "auto"):
                raise ConfigError(
                    f"{key} = {getattr(self, key)!r} means something with draft_verify = {mode!r} only, and that is "
                    f"{self.draft_verify!r}: set both or neither"
                )


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What ``resolve`` must know of the checkpoint and the machine; the engine measures it."""

    model: str  # the checkpoint, as messages name it
    has_mtp: bool
    max_position: int
    has_draft: bool = False  # a DSpark draft was read and fits the model
    draft_tokens: int = 0  # that it drafts a step
    draft_confidence: bool = False  # whether it has a confidence head
    cuda_devices: int = 0
    free_memory: Mapping[str, int] = field(default_factory=dict)  # bytes free now, by "cpu", "cuda:0", ...
    torch_threads: int = 1
    weight_bytes: int | None = None  # of the checkpoint, in its own type


@dataclass(frozen=True)
class Decision:
    """One value that ``resolve`` chose."""

    key: str
    value: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.key} = {self.value}: {self.reason}"


def resolve(config: EngineConfig, facts: Facts) -> tuple[EngineConfig, list[Decision]]:
    """A new config without "auto" (None stays only where the reason says so), and each choice with its reason."""
    decided: list[Decision] = []

    def decide(key: str, value: Any, reason: str) -> Any:
        decided.append(Decision(key, value, reason))
        return value

    device = config.device
    if device == "auto":
        found = facts.cuda_devices
        device = decide(
            "device", "cuda:0" if found else "cpu", f"{found} CUDA devices found" if found else "no CUDA device found"
        )
    elif device == "cuda":
        device = decide("device", "cuda:0", "the first CUDA device")
    kind, _, index = device.partition(":")
    if kind == "cuda" and int(index) >= facts.cuda_devices:
        raise ConfigError(f"device = {config.device!r}: this machine has {facts.cuda_devices} CUDA devices; use cpu")

    dtype = config.dtype
    if dtype == "auto":
        reason = "the default on a CPU" if kind == "cpu" else "the checkpoint's own type"
        dtype = decide("dtype", DTYPES[kind][0], reason)
    if dtype not in DTYPES[kind]:
        raise UnsupportedError(
            f"dtype = {dtype!r} is not supported on {kind}: the models are trained in bfloat16, whose range {dtype} "
            f"does not have; use {' or '.join(DTYPES[kind])}"
        )

    router, head = config.router_dtype, config.lm_head_dtype
    if router == "auto":
        router = decide("router_dtype", dtype, "as the other weights")
    if head == "auto":
        head = decide("lm_head_dtype", dtype, "as the other weights")

    speculation = _resolve_speculation(config, facts, decide)
    steps, rows = config.speculative_num_steps, config.speculative_num_draft_tokens
    if speculation == "nextn":
        if steps is None:
            steps = DEFAULT_STEPS if rows is None else rows - 1
            reason = "the default" if rows is None else f"speculative_num_draft_tokens = {rows} less one"
            decide("speculative_num_steps", steps, reason)
        if rows is None:
            rows = decide("speculative_num_draft_tokens", steps + 1, "the drafts and the token before them")
    elif speculation == "dspark":
        for key, given, own in (
            ("speculative_num_steps", steps, facts.draft_tokens),
            ("speculative_num_draft_tokens", rows, facts.draft_tokens + 1),
        ):
            if given is None:
                decide(key, own, "the draft's own block")
            elif given != own:
                raise ConfigError(
                    f"{key} = {given}, but the draft's block gives {own}; to verify fewer of its drafts set "
                    "draft_verify = 'fixed' and draft_verify_tokens"
                )
        steps, rows = facts.draft_tokens, facts.draft_tokens + 1
    elif speculation == "off" and (steps is not None or rows is not None):
        key = "speculative_num_steps" if steps is not None else "speculative_num_draft_tokens"
        raise ConfigError(f"{key} is set, but {facts.model} has no MTP layer to draft with: leave it out")

    verify = config.draft_verify
    if speculation == "dspark":
        verify = _resolve_verify(config, facts, decide)
    elif verify == "auto":
        verify = decide("draft_verify", "all", "no block drafter is at work")
    elif verify != "all":
        raise ConfigError(
            f"draft_verify = {verify!r} is of a DSpark draft, and speculation is {speculation!r}: leave it out"
        )

    max_context = config.max_context
    if max_context is None:
        reason = "the model's own limit"
        if facts.max_position > DEFAULT_MAX_CONTEXT:
            reason = f"the default; the model could take {facts.max_position}"
        max_context = decide("max_context", min(facts.max_position, DEFAULT_MAX_CONTEXT), reason)
    elif max_context > facts.max_position:
        raise ConfigError(f"max_context = {max_context}: {facts.model} goes to {facts.max_position} tokens")

    memory = parse_size(config.memory_budget, "memory_budget")
    if memory is None:
        free = facts.free_memory.get(device)
        if free is None:
            decide("memory_budget", None, f"free memory on {device} is not known, so the plan has no limit")
        elif config.memory_fraction is not None:
            share = config.memory_fraction
            memory = decide("memory_budget", int(free * share), f"{share:g} of the {free} bytes free on {device}")
        else:
            memory = decide("memory_budget", free * 9 // 10, f"nine tenths of the {free} bytes free on {device}")
    checkpoints = parse_size(config.checkpoint_budget, "checkpoint_budget")
    if checkpoints is None:
        checkpoints = 256 * MIB if kind == "cpu" else 2048 * MIB
        decide("checkpoint_budget", checkpoints, f"the default on {kind}")

    depth = config.run_ahead
    if depth is None:
        if kind == "cpu":
            depth = decide("run_ahead", 0, "a CPU runs the step and the host in turn: reading late would only delay")
        else:
            depth = decide("run_ahead", 2, "the default: a host stall of a step or two never reaches the GPU")
    chunk = config.prefill_chunk
    if chunk is None:
        chunk = decide("prefill_chunk", *_chunk_for(kind, config.prefix_reuse))
    executor = config.executor
    if executor == "auto":
        reason = "one replay a step" if kind == "cuda" else "graphs need a CUDA device"
        executor = decide("executor", "graph" if kind == "cuda" else "eager", reason)
    elif executor != "eager" and kind != "cuda":
        raise ConfigError(f"executor = {executor!r}: graphs need a CUDA device, the device is {device}; use eager")
    threads = config.threads
    if kind == "cpu" and threads is None:
        small = facts.weight_bytes is not None and facts.weight_bytes <= SMALL_MODEL
        if small:
            reason = f"{facts.weight_bytes:,} bytes of weights: too small a step to share among threads"
            threads = decide("threads", 1, reason)
        else:
            threads = decide("threads", facts.torch_threads, "torch's own setting, left as found")
    elif kind == "cuda" and threads is None:
        decide("threads", None, "no work of a step runs on the CPU")
    if config.seed is None:
        decide("seed", None, "drawn afresh for each request that brings none")

    new = dataclasses.replace(
        config,
        device=device,
        dtype=dtype,
        router_dtype=router,
        lm_head_dtype=head,
        speculation=speculation,
        speculative_num_steps=steps,
        speculative_num_draft_tokens=rows,
        draft_verify=verify,
        max_context=max_context,
        run_ahead=depth,
        executor=executor,
        prefill_chunk=chunk,
        memory_budget=memory,
        memory_fraction=None,
        checkpoint_budget=checkpoints,
        threads=threads,
    )
    return new, decided


def _chunk_for(kind: str, reuse: str) -> tuple[int, str]:
    """The prefill chunk on a kind of device, and why."""
    if kind == "cpu":
        return PREFILL_CHUNK["cpu"], "the default on a CPU"
    if reuse == "exact":
        return PREFILL_CHUNK["cpu"], "exact reuse starts at multiples of it only, so they must be close together"
    return PREFILL_CHUNK[kind], "the default on a GPU: every pass reads all weights, whatever its rows"


def _resolve_verify(config: EngineConfig, facts: Facts, decide: Callable[[str, Any, str], Any]) -> str:
    mode, fixed = config.draft_verify, config.draft_verify_tokens
    if mode == "auto":
        if config.draft_costs is not None:
            mode = decide("draft_verify", "cost", f"draft_costs = {config.draft_costs!r} is given")
        else:
            mode = decide("draft_verify", "all", "no table of costs is given")
    if mode in ("threshold", "cost") and not facts.draft_confidence:
        raise ConfigError(
            f"draft_verify = {mode!r} needs a confidence head, and the draft has none: use 'all' or 'fixed'"
        )
    if fixed is not None and fixed > facts.draft_tokens:
        raise ConfigError(f"draft_verify_tokens = {fixed}, but the draft's block has {facts.draft_tokens} drafts")
    return mode


def _resolve_speculation(config: EngineConfig, facts: Facts, decide: Callable[[str, Any, str], Any]) -> str:
    speculation = config.speculation
    if speculation == "auto":
        if config.draft is not None:
            speculation = decide("speculation", "dspark", f"draft = {config.draft!r} is given")
        elif facts.has_mtp:
            speculation = decide("speculation", "nextn", f"{facts.model} has an MTP layer")
        else:
            speculation = decide("speculation", "off", f"{facts.model} has no MTP layer and no draft is given")
    if speculation == "nextn" and not facts.has_mtp:
        raise ConfigError(f"speculation = 'nextn': {facts.model} has no MTP layer; use speculation = 'off'")
    if speculation == "dspark" and not facts.has_draft:
        raise ConfigError(
            f"speculation = 'dspark': no draft is given and none is bundled with {facts.model}; set draft to its "
            "directory"
        )
    return speculation
