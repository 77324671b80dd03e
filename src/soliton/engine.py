"""The engine: one model, one stream, one request at a time, from prompt to text."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from .answer import Answer
from .checkpoint import Checkpoint, open_checkpoint
from .config import Decision, EngineConfig
from .config import settings as config_settings
from .errors import BusyError, ConfigError, nearest
from .plan import MemoryPlan
from .prompt import Encoded, Prompt, checked_ids, encode, prepare
from .runtime import Runtime, load_runtime
from .sampling.logprobs import TokenLogprob
from .sampling.params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Stats:
    """How a request went. ttft_s: start to first token; tpot_s: mean time of the later tokens, None with fewer than
    two; accept_lengths: new tokens of every step (the bonus token counts), the first being the prompt's own; grammar:
    the field of SamplingParams that gave one (the depth is 0 then)."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    ttft_s: float
    tpot_s: float | None
    accept_lengths: tuple[int, ...]
    run_ahead_depth: int
    grammar: str | None = None

    @property
    def accept_length(self) -> float | None:
        """Mean new tokens a step after the first (which has no drafts); None without one."""
        later = self.accept_lengths[1:]
        return sum(later) / len(later) if later else None


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of a stream: the accepted block of one step, and the text that became certain with it (half a character
    or a possible stop string waits). The first piece carries prompt_logprobs if asked for, the last one reason and
    stats."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stats: Stats | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A finished request. finish_reason: "stop", "length" or "abort". prompt_logprobs: one entry a prompt token, the
    first None (nothing predicts it)."""

    token_ids: list[int]
    text: str
    finish_reason: str
    logprobs: list[TokenLogprob] | None
    prompt_logprobs: list[TokenLogprob | None] | None
    stats: Stats
    prompt_ids: list[int] = field(repr=False, default_factory=list)


class Engine:
    """Decodes one stream. Make one with ``Engine.load``; a context manager closes it. One request at a time, from one
    thread at a time: a second gets BusyError. ``abort`` may come from anywhere."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime: Runtime | None = runtime
        self._lock = threading.Lock()
        self._abort = threading.Event()

    @classmethod
    def load(
        cls,
        model: str | Path,
        *,
        draft: str | Path | None = None,
        speculation: str = "auto",
        speculative_num_steps: int | None = None,
        device: str = "auto",
        dtype: str = "auto",
        max_context: int | None = None,
        run_ahead: int | None = None,
        prefix_reuse: str = "fast",
        memory_budget: int | str | None = None,
        **settings: Any,
    ) -> Engine:
        """Open, check, plan and load a model: everything that can be refused is refused before memory is taken.

        model: a checkpoint directory, a hub id, ``synthetic:NAME``, or ``pebble``. ``settings``: further fields of
        EngineConfig by name. Raises ConfigError, CheckpointError, UnsupportedError or MemoryPlanError.
        """
        known = {leaf.key for leaf in config_settings(EngineConfig)}
        for name in settings:
            if name not in known:
                raise ConfigError(f"unknown setting {name!r}{nearest(name, known)}")
        return cls.from_config(
            EngineConfig(
                model=str(model),
                draft=None if draft is None else str(draft),
                speculation=speculation,
                speculative_num_steps=speculative_num_steps,
                device=device,
                dtype=dtype,
                max_context=max_context,
                run_ahead=run_ahead,
                prefix_reuse=prefix_reuse,
                memory_budget=memory_budget,
                **settings,
            )
        )

    @classmethod
    def from_config(cls, config: EngineConfig, *, progress: Any = None) -> Engine:
        """As ``load``, from a bound config. progress: a callable(done, total) told of tensors read, or None."""
        runtime = load_runtime(config, open_checkpoint(config.model), progress=progress)
        runtime.warm()
        return cls(runtime)

    @property
    def config(self) -> EngineConfig:
        """The resolved settings: no "auto" is left."""
        return self._ready().config

    @property
    def decisions(self) -> list[Decision]:
        """What was decided at load for every setting left open, with reasons."""
        return list(self._ready().decisions)

    @property
    def plan(self) -> MemoryPlan:
        """Bytes by purpose, as planned before loading."""
        return self._ready().plan

    @property
    def checkpoint(self) -> Checkpoint:
        """The opened checkpoint: spec, tokenizer, chat template, generation defaults."""
        return self._ready().checkpoint

    def generate(self, prompt: Prompt | Encoded, params: SamplingParams | None = None, **chat: Any) -> Generation:
        """Answer one prompt: text, token ids, or chat messages ({"role", "content"}). Raises RequestError, BusyError.

        ``chat``: keyword arguments of the chat template (with messages only), ``tools`` among them.
        """
        answer = self._answer(prompt, params, chat)
        ids: list[int] = []
        text: list[str] = []
        logged: list[TokenLogprob] = []
        last: Piece | None = None
        for last in self._pieces(answer):
            ids += last.token_ids
            text.append(last.text)
            logged += last.logprobs or []
        assert last is not None and last.finish_reason is not None and last.stats is not None
        return Generation(
            token_ids=ids,
            text="".join(text),
            finish_reason=last.finish_reason,
            logprobs=logged if answer.params.logprobs is not None else None,
            prompt_logprobs=answer.prompt_logprobs,
            stats=last.stats,
            prompt_ids=list(answer.prompt),
        )

    def stream(self, prompt: Prompt | Encoded, params: SamplingParams | None = None, **chat: Any) -> Iterator[Piece]:
        """As ``generate``, piece by piece, one a step. Closing the iterator early leaves the engine ready.

        Bad requests are refused here, before the first piece is asked for.
        """
        return self._pieces(self._answer(prompt, params, chat))

    def encode(self, prompt: Prompt, **chat: Any) -> list[int]:
        """The token ids a prompt becomes: text through the tokenizer, messages through the chat template first."""
        return encode(self._ready().checkpoint, prompt, chat)[0]

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """float32 [T, vocab] on the CPU: row t predicts the token after token_ids[t]. Leaves no prefix checkpoint."""
        with self._alone():
            return self._ready().logits(self._checked(token_ids))

    def draft_chain(self, token_ids: Sequence[int], n: int) -> list[int]:
        """The MTP's greedy chain of ``n`` drafts after the prompt and the target's greedy next token."""
        with self._alone():
            return self._ready().draft_chain(self._checked(token_ids), n)[0]

    def abort(self) -> None:
        """End the request in progress at its next step, with finish_reason "abort". From any thread; else nothing."""
        self._abort.set()

    def reset(self) -> None:
        """Forget all prefix checkpoints."""
        with self._alone():
            self._ready().tree.clear()

    def close(self) -> None:
        """Give the memory back. Further calls raise BusyError; a stream in progress ends as aborted and frees what it
        holds then. Twice is the same as once."""
        self._runtime = None
        self._abort.set()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _ready(self) -> Runtime:
        if self._runtime is None:
            raise BusyError("this engine is closed; load a new one")
        return self._runtime

    def _alone(self) -> _Held:
        if not self._lock.acquire(blocking=False):
            raise BusyError(
                "this engine is serving a request: it decodes one stream at a time. Finish or close the stream in "
                "progress, or load a second engine"
            )
        return _Held(self._lock)

    def _answer(self, prompt: Prompt | Encoded, params: SamplingParams | None, chat: Mapping[str, Any]) -> Answer:
        runtime = self._ready()
        limit = runtime.config.max_context
        assert limit is not None
        ready = prepare(runtime.checkpoint, limit, prompt, params, chat)
        resolved = ready.params
        if (params is None or params.seed is None) and runtime.config.seed is not None:
            resolved = runtime.reseeded(resolved)
        return Answer(runtime, ready.ids, resolved, ready.boundary, ready.room)

    def _checked(self, token_ids: Sequence[int]) -> list[int]:
        runtime = self._ready()
        assert runtime.config.max_context is not None
        return checked_ids(token_ids, runtime.checkpoint.spec.vocab, runtime.config.max_context)

    def _pieces(self, answer: Answer) -> Iterator[Piece]:
        if not self._lock.locked():  # an abort from now on is meant for this answer, begun or not
            self._abort.clear()
        return self._run(answer)

    def _run(self, answer: Answer) -> Iterator[Piece]:
        started = time.perf_counter()
        held = self._alone()
        clean = False
        try:
            self._ready()  # closed since the stream was made?
            scored = answer.prompt_logprobs
            for block in answer.run(self._abort.is_set):
                reason = block.finish_reason
                yield Piece(
                    token_ids=block.token_ids,
                    text=block.text,
                    logprobs=block.logprobs,
                    finish_reason=reason,
                    stats=None if reason is None else _stats(answer, started),
                    prompt_logprobs=scored,
                )
                scored = None
            clean = True
        except GeneratorExit:
            clean = True  # the reader left between two steps
            raise
        finally:
            try:
                answer.finish(save=clean)
            finally:
                held.release()


class _Held:
    """The engine's lock, held; releases once."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock: threading.Lock | None = lock

    def release(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def __enter__(self) -> _Held:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _stats(answer: Answer, started: float) -> Stats:
    count = answer.emitted
    first = answer.first_token_at or time.perf_counter()
    last = answer.last_token_at or first
    return Stats(
        prompt_tokens=len(answer.prompt),
        completion_tokens=count,
        cached_tokens=answer.cached_tokens,
        ttft_s=first - started,
        tpot_s=(last - first) / (count - 1) if count > 1 else None,
        accept_lengths=tuple(answer.accept_lengths),
        run_ahead_depth=answer.depth,
        grammar=None if answer.params.grammar is None else answer.params.grammar.kind,
    )
