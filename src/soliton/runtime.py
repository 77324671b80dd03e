"""What a loaded engine holds: weights, buffers, programs, and the things that run them."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from .checkpoint import Checkpoint
from .checkpoint.draft import check_shared
from .config import Decision, EngineConfig, Facts, resolve
from .context import CheckpointTree, Stream
from .context.stream import positions_for
from .drafting import doubts, draft_elements, find_draft, make_drafter
from .errors import RequestError, UnsupportedError
from .model.decoder import turn_table
from .model.prefill import logits_in_parts, logits_of
from .model.spec import KdaSpec, ModelSpec, MoeSpec
from .model.weights import Builder, ModelWeights, expert_elements, state_elements
from .ops import device as where
from .ops.building import hear_compiles
from .ops.runs import VECTOR
from .ops.select import Choice, choose
from .ops.select import Facts as OpFacts
from .plan import MemoryPlan, make_plan
from .sampling.grammar import Grammars, Matcher
from .sampling.params import Resolved, SamplingParams
from .speculation.verify import Mode
from .step.executor import EagerExecutor, Executor, GraphExecutor
from .step.loop import Loop
from .step.prefill import Prefill
from .step.program import Parts, Program, build, guided
from .step.relay import Relay

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
RING_SLOTS = 8  # steps in flight at most, with room


@dataclass(kw_only=True)
class Runtime:
    """One loaded model with its one stream."""

    checkpoint: Checkpoint
    config: EngineConfig
    decisions: list[Decision]
    plan: MemoryPlan
    choices: dict[str, Choice]
    weights: ModelWeights
    parts: Parts
    programs: dict[Mode, Program]
    loop: Loop
    prefill: Prefill
    tree: CheckpointTree
    guided: dict[Mode, Program] = field(default_factory=dict)

    @property
    def stream(self) -> Stream:
        """The stream's buffers."""
        return self.parts.stream

    @property
    def relay(self) -> Relay:
        """The relay."""
        return self.parts.relay

    @property
    def on_gpu(self) -> bool:
        """Whether steps run on a CUDA device."""
        return where.has_kernels(self.parts.device)

    def program(self, params: Resolved) -> Program:
        """The variant of the step that serves a request. On a GPU the one with processors also logs.

        Variants within a grammar are made, and captured, when a request first needs one: few engines do, and at load
        they would double the captures. That leaves nothing of what relay and stream held."""
        processors = params.processors or (self.on_gpu and params.logprobs is not None)
        plain = self.programs[Mode(sampled=not params.greedy, processors=processors)]
        if params.grammar is None:
            return plain
        if plain.mode not in self.guided:
            self.guided[plain.mode] = guided(self.parts, plain)
            self.loop.executor.capture([self.guided[plain.mode]])
        return self.guided[plain.mode]

    def matcher(self, params: Resolved) -> Matcher | None:
        """What keeps a request's answer in its grammar, or None; refusals are Grammars.matcher's."""
        return None if params.grammar is None else self._grammars.matcher(params)

    @cached_property
    def _grammars(self) -> Grammars:
        checkpoint = self.checkpoint
        text = None if checkpoint.tokenizer is None else checkpoint.tokenizer.json()
        return Grammars(checkpoint.name, text, checkpoint.spec.vocab, checkpoint.eos_ids)

    def hold_threads(self) -> None:
        """Go back to the engine's thread count, with which its bits were made, if somebody changed torch's."""
        threads = self.config.threads
        if self.parts.device.type == "cpu" and threads is not None and torch.get_num_threads() != threads:
            torch.set_num_threads(threads)

    def reseeded(self, params: Resolved) -> Resolved:
        """``params`` with the engine's own seed, for a request that brought none."""
        assert self.config.seed is not None
        return dataclasses.replace(params, seed=self.config.seed)

    @torch.inference_mode()
    def logits(self, ids: Sequence[int], trace: dict[str, Tensor] | None = None) -> Tensor:
        """float32 [T, vocab] on the CPU after each of ``ids``, from an empty stream."""
        self.hold_threads()
        self.stream.clear()
        spec = self.checkpoint.spec
        passes = self.prefill.read(ids, 0, len(ids), trace=trace)
        return torch.cat([part.cpu() for p in passes for part in logits_in_parts(self.weights, spec, p)])

    @torch.inference_mode()
    def warm(self) -> None:
        """On a GPU read a prompt of a whole chunk and forget it, so that its kernels are compiled, and tuned for such a
        length, at load and not in a first request."""
        if not self.on_gpu or self.choices["kda.recurrence"].variant != "fla":
            return
        assert self.config.max_context is not None
        rows = min(self.prefill.chunk, self.config.max_context)
        for _ in self.prefill.read([i % self.checkpoint.spec.vocab for i in range(rows)], 0, rows):
            pass
        self.stream.clear()
        torch.cuda.synchronize()

    @torch.inference_mode()
    def draft_chain(self, ids: Sequence[int], n: int) -> tuple[list[int], Tensor]:
        """``n`` greedy drafts after ``ids`` and the target's next token, and their logits float32 [n, vocab]."""
        self._check_chain(len(ids), n)
        return self._chain(int(self.logits(ids)[-1].argmax()), len(ids), n)

    @torch.inference_mode()
    def drafts_after(self, ids: Sequence[int], anchor: int, n: int, *, read: int = 0) -> list[int]:
        """``n`` greedy drafts after ``ids`` and ``anchor``, whatever the target would have chosen. ``read``: how many
        of ``ids`` the call before has read already."""
        self._check_chain(len(ids), n)
        self.hold_threads()
        if not read:
            self.stream.clear()
        for _ in self.prefill.read(ids, read, len(ids)):
            pass
        boundary = self.stream.boundary.clone()
        chain = self._chain(anchor, len(ids), n)[0]
        self.stream.boundary.copy_(boundary)
        return chain

    def _check_chain(self, length: int, n: int) -> None:
        if self.stream.draft_kv is None:
            raise UnsupportedError(
                f"draft_chain needs the MTP layer of {self.checkpoint.name} loaded; load with speculation='nextn'"
            )
        if isinstance(n, bool) or not isinstance(n, int):
            raise RequestError(f"n is {n!r}; a chain needs a whole number of drafts", param="n")
        if n < 1:
            raise RequestError(f"n is {n}; a chain has at least one draft", param="n")
        assert self.config.max_context is not None
        room = max(self.config.max_context - length, 0)
        if n > room:
            raise RequestError(
                f"n is {n}, but max_context {self.config.max_context} leaves {room} after the prompt", param="n"
            )

    def _chain(self, token: int, length: int, n: int) -> tuple[list[int], Tensor]:
        """The MTP over its own outputs from the stream's boundary; it leaves entries past ``length`` behind."""
        chain: list[int] = []
        rows: list[Tensor] = []
        for place in range(n):
            out = self.prefill.seal(token, length + place)
            assert out is not None, "a chain starts after at least one token"
            row = logits_of(self.weights, self.checkpoint.spec, out, self.parts.immediate())[0]
            rows.append(row)
            token = int(row.argmax())
            chain.append(token)
            self.stream.boundary.copy_(out.expand(2, -1))
        return chain, torch.stack(rows).cpu()


def settle(config: EngineConfig, checkpoint: Checkpoint) -> tuple[EngineConfig, list[Decision]]:
    """The config as it will hold on this machine, and what was decided."""
    draft = find_draft(config, checkpoint)
    if draft is not None:
        check_shared(draft, checkpoint)  # reads rows of both, so here alone
    facts = Facts(
        model=checkpoint.name,
        has_draft=draft is not None,
        draft_tokens=draft.spec.drafts if draft is not None else 0,
        draft_confidence=draft is not None and draft.spec.confidence,
        has_mtp=checkpoint.spec.mtp is not None,
        max_position=checkpoint.spec.max_position,
        cuda_devices=torch.cuda.device_count() if torch.cuda.is_available() else 0,
        free_memory=_free_memory(),
        torch_threads=torch.get_num_threads(),
        weight_bytes=checkpoint.weight_bytes(),
    )
    return resolve(config, facts)


def plan_memory(config: EngineConfig, checkpoint: Checkpoint) -> MemoryPlan:
    """The plan of a settled config; MemoryPlanError when it is over the budget."""
    drafts = config.speculative_num_steps or 0
    draft = find_draft(config, checkpoint)
    mtp = drafts > 0 and draft is None
    budget, kept = config.memory_budget, config.checkpoint_budget
    assert config.max_context is not None and not isinstance(budget, str) and isinstance(kept, int)
    assert config.prefill_chunk is not None
    return make_plan(
        checkpoint.spec,
        weight_elements=_weight_elements(checkpoint, mtp, config)
        + (draft_elements(draft.spec) if draft is not None else 0),
        rows=max(drafts + 1, 2),
        mtp=mtp,
        drafter=draft.spec if draft is not None else None,
        max_context=config.max_context,
        chunk=config.prefill_chunk,
        checkpoints=kept if config.prefix_reuse != "off" else 0,
        budget=budget,
        device=torch.device(config.device),
        dtype=DTYPES[config.dtype],
    )


def choose_ops(config: EngineConfig, spec: ModelSpec) -> dict[str, Choice]:
    """The op variants of a settled config; UnsupportedError for a shape whose rows would not keep their bits."""
    if config.device == "cpu":
        _check_widths(spec)
    return choose(
        OpFacts(
            device=torch.device(config.device),
            dtype=DTYPES[config.dtype],
            expert_elements=expert_elements(spec),
            state_elements=state_elements(spec),
        )
    )


def _check_widths(spec: ModelSpec) -> None:
    """Elementwise functions on a CPU keep a row's bits only in whole vectors (ops.runs)."""
    for layer in (*spec.layers, *([spec.mtp] if spec.mtp else [])):
        widths = {"the feed-forward width": layer.mlp.width}
        if isinstance(layer.mlp, MoeSpec):
            widths["the shared expert's width"] = layer.mlp.shared_width
        if isinstance(layer.mixer, KdaSpec):
            widths["heads x key channels"] = layer.mixer.heads * layer.mixer.key_dim
            widths["heads x value channels"] = layer.mixer.heads * layer.mixer.value_dim
        for name, width in widths.items():
            if width % VECTOR:
                raise UnsupportedError(
                    f"{spec.name}: {name} of layer {layer.index} is {width}, no multiple of {VECTOR}: on a CPU a row's "
                    "bits would depend on the rows beside it, and output on the speculation"
                )


def load_runtime(
    config: EngineConfig,
    checkpoint: Checkpoint,
    *,
    progress: Callable[[int, int], None] | None = None,
    verify: int | None = None,
) -> Runtime:
    """Resolve, plan, then read weights and build the programs. ``verify``: rows of a step that has no drafter, for
    measuring; whoever sets it provides the tokens."""
    spec = checkpoint.spec
    SamplingParams().resolve(checkpoint.generation, vocab=spec.vocab)  # its defaults are refused now or never
    config, decisions = settle(config, checkpoint)
    plan = plan_memory(config, checkpoint)
    choices = choose_ops(config, spec)
    device, dtype = torch.device(config.device), DTYPES[config.dtype]
    drafts, kept = config.speculative_num_steps or 0, config.checkpoint_budget
    draft = find_draft(config, checkpoint)
    for doubt in doubts(config, checkpoint, draft) if draft is not None else ():
        warnings.warn(doubt, stacklevel=2)
    mtp = drafts > 0 and draft is None
    assert verify is None or not drafts, "the drafter decides how many rows are verified"
    verified = drafts if verify is None else verify - 1
    rows = max(verified + 1, 2)
    assert config.max_context is not None and config.run_ahead is not None and isinstance(kept, int)
    assert config.prefill_chunk is not None
    if device.type == "cpu" and config.threads is not None:
        torch.set_num_threads(config.threads)  # before the first product
    if device.type == "cuda":
        hear_compiles()
    provider = _Counted(checkpoint, mtp, progress) if progress is not None else checkpoint
    builder = Builder(
        provider,
        device,
        dtype,
        merge_experts=choices["moe"].variant == "dense",
        router=DTYPES[config.router_dtype],
        head=DTYPES[config.lm_head_dtype],
    )
    weights = builder.model(spec, mtp=mtp)
    stream = Stream(
        spec,
        max_context=config.max_context,
        rows=rows,
        draft=mtp,
        device=device,
        dtype=dtype,
        drafter=draft.spec if draft is not None else None,
    )
    turn = turn_table(spec, positions_for(config.max_context), device)
    relay = Relay.allocate(
        rows=rows,
        vocab=spec.vocab,
        padded_vocab=weights.head.padded,
        hidden=spec.hidden,
        rope_pairs=turn.shape[1] if turn is not None else 0,
        slots=RING_SLOTS,
        device=device,
        dtype=dtype,
        taps=len(draft.spec.taps) if draft is not None else 0,
    )
    parts = Parts(
        spec=spec,
        weights=weights,
        stream=stream,
        relay=relay,
        choices=choices,
        turn=turn,
        drafts=drafts,
        verify=verified,
        device=device,
        dtype=dtype,
        drafter=make_drafter(config, draft, device, dtype) if draft is not None else None,
    )
    programs = build(parts)
    executor: Executor = EagerExecutor(relay, stream, early=device.type == "cpu")
    if config.executor != "eager":
        executor = GraphExecutor(relay, stream, phased=config.executor == "phased")
        executor.capture(programs.values())
        stream.clear()
    return Runtime(
        checkpoint=checkpoint,
        config=config,
        decisions=decisions,
        plan=plan,
        choices=choices,
        weights=weights,
        parts=parts,
        programs=programs,
        loop=Loop(relay, executor, config.run_ahead),
        prefill=Prefill(parts, config.prefill_chunk),
        tree=CheckpointTree(kept if config.prefix_reuse != "off" else 0),
    )


class _Counted:
    """A provider that reports each tensor it reads."""

    def __init__(self, checkpoint: Checkpoint, mtp: bool, progress: Callable[[int, int], None]) -> None:
        self._checkpoint, self._progress = checkpoint, progress
        self._total = sum(1 for role in checkpoint.roles() if mtp or not role.startswith("mtp."))
        self._done = 0

    def tensor(self, role: str, device: torch.device) -> Tensor:
        self._done += 1
        self._progress(self._done, self._total)
        return self._checkpoint.tensor(role, device)

    def has(self, role: str) -> bool:
        return self._checkpoint.has(role)


def _weight_elements(checkpoint: Checkpoint, mtp: bool, config: EngineConfig) -> int:
    """In elements of the config's dtype as a device keeps it; a CPU keeps all in float32."""
    wide = {"router": config.router_dtype, "head": config.lm_head_dtype}
    double = {name for name, dtype in wide.items() if dtype == "float32" and config.device != "cpu"}
    return sum(
        entry.numel * (2 if role.rpartition(".")[2] in double else 1)
        for role, entry in checkpoint.table.items()
        if checkpoint.has(role) and (mtp or not role.startswith("mtp."))
    )


def _free_memory() -> dict[str, int]:
    """Bytes free now, by device name; what cannot be told is left out."""
    free = {}
    try:
        free["cpu"] = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    free["cpu"] = int(line.split()[1]) * 1024
    except (OSError, ValueError, AttributeError):
        pass  # not Linux: whatever was found so far stands
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            free[f"cuda:{index}"] = torch.cuda.mem_get_info(index)[0]
    return free
