"""One request's run over a loaded runtime: reuse a prefix, read the prompt, run the steps, cut the text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .checkpoint.tokenizer import Tokenizer
from .context.checkpoints import Snapshot
from .model.prefill import Pass, logits_in_parts
from .runtime import Runtime
from .sampling.logprobs import TokenLogprob, assemble, gather
from .sampling.params import Resolved
from .speculation.verify import ROLLING
from .step.loop import StepOutput
from .step.relay import STOPPED
from .step.request import begin


@dataclass(frozen=True, kw_only=True)
class Block:
    """What one step adds to the answer after all cuts."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: list[TokenLogprob] | None
    finish_reason: str | None


class Cutter:
    """Turns token ids into text, holding back what may be the start of a stop string, and finds the first one."""

    def __init__(self, tokenizer: Tokenizer | None, params: Resolved) -> None:
        self._stream = tokenizer.stream(params.skip_special_tokens) if tokenizer is not None else None
        self._stops, self._ends, self._least = params.stop_strings, set(params.stop_ids), params.min_tokens
        self._held = ""
        self._count = 0

    def push(self, ids: Sequence[int]) -> tuple[int, str, bool]:
        """(tokens kept, text now certain, whether a stop string ended it). The token that completes a stop string is
        kept, the text before the string is all that shows. A token that ends the answer by its id has no text."""
        for place, token in enumerate(ids):
            self._count += 1
            if self._stream is None or token in self._ends:
                continue
            fresh = self._stream.push([token])
            self._held += fresh
            at = self._find(len(fresh))
            if at is not None:
                text, self._held = self._held[:at], ""
                return place + 1, text, True
        keep = self._possible()
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return len(ids), text, False

    def flush(self) -> tuple[str, bool]:
        """(the rest, whether a stop string is in it) when the answer ends otherwise: held text, and bytes that never
        became a character."""
        fresh = self._stream.flush() if self._stream is not None else ""
        self._held += fresh
        at = self._find(len(fresh))
        rest, self._held = self._held if at is None else self._held[:at], ""
        return rest, at is not None

    def _find(self, fresh: int) -> int | None:
        if self._count < self._least or not fresh:
            return None
        found = [self._held.find(stop, max(len(self._held) - fresh - len(stop) + 1, 0)) for stop in self._stops]
        return min((at for at in found if at >= 0), default=None)

    def _possible(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self._stops):
                return size
        return 0


class Answer:
    """State of one request. ``boundary``: where the final chat message begins, 0 without messages."""

    def __init__(self, runtime: Runtime, prompt: Sequence[int], params: Resolved, boundary: int, room: int) -> None:
        self._runtime, self.prompt, self.params, self._boundary = runtime, list(prompt), params, boundary
        self._limit = room if params.max_tokens is None else min(params.max_tokens, room)
        self._matcher = runtime.matcher(params)
        self.depth = runtime.loop.depth if self._matcher is None else 0
        self.cached_tokens = 0
        self.emitted = 0
        self.accept_lengths: list[int] = []
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.prompt_logprobs: list[TokenLogprob | None] | None = None if params.prompt_logprobs is None else [None]
        self._committed = list(prompt)  # prompt, then every token the device committed, cut or not
        self._running = False
        self._cut = self._ended = False
        self._snapshots: dict[int, Snapshot] = {}
        self._keeps = runtime.config.prefix_reuse == "fast"

    def run(self, aborted: Callable[[], bool]) -> Iterator[Block]:
        """Yield blocks; exactly the last has a finish reason. ``finish`` must be called afterwards, come what may."""
        runtime, params = self._runtime, self.params
        if self._limit >= 1:
            program = runtime.program(params)  # first: where it has to be made, it leaves nothing of what is there
            # before the prompt: its copies to a GPU would wait until that has been read
            with torch.inference_mode():
                begin(runtime.relay, params, prompt=self.prompt, limit=self._limit)
        if not self._read_prompt(aborted):
            yield Block(token_ids=(), text="", logprobs=None, finish_reason="abort")
            return
        if self._limit < 1:
            yield Block(token_ids=(), text="", logprobs=None, finish_reason="length")
            return
        cutter = Cutter(runtime.checkpoint.tokenizer, params)
        steps = runtime.loop.run(
            program,
            limit=self._limit,
            top_logprobs=params.logprobs,
            after_launch=self._after_launch,
            guide=self._matcher,
        )
        self._running = True
        for step in steps:
            self._take(step)
            if aborted():
                self._cut = True
                yield Block(token_ids=(), text=cutter.flush()[0], logprobs=None, finish_reason="abort")
                return
            block = self._block(step, cutter)
            yield block
            if block.finish_reason is not None:
                return
        raise AssertionError("the loop ended without a finish code")

    def finish(self, *, save: bool) -> None:
        """Freeze and drain what is in flight; checkpoint the answer's end if the device ended it and ``save`` allows (a
        step that was interrupted leaves no state worth keeping). Where a reader left, the device stands at a place that
        depends on the depth and the drafts, and a later answer must not."""
        if not self._running:
            return
        self._running = False
        self._cut = self._cut or not self._ended
        for step in self._runtime.loop.drain():
            self._take(step)
        if save and self._keeps and not self._cut:
            assert int(self._runtime.relay.length) == len(self._committed) - 1
            with torch.inference_mode():
                self._runtime.tree.save(self._committed[:-1], self._runtime.stream)

    def _read_prompt(self, aborted: Callable[[], bool]) -> bool:
        """Restore the longest usable checkpoint and read the rest up to the last token; False if aborted."""
        runtime, prompt = self._runtime, self.prompt
        mode, end = runtime.config.prefix_reuse, len(prompt) - 1
        runtime.hold_threads()
        with torch.inference_mode():
            runtime.stream.clear()
            node = None
            if mode != "off" and self.prompt_logprobs is None:
                node = runtime.tree.find(prompt[:end])
            at = 0
            if node is not None:
                runtime.tree.restore(node, runtime.stream)
                runtime.prefill.restored(node.length)
                at = self.cached_tokens = node.length
            for stop in [s for s in self._marks(end) if s > at] + [end]:
                for step in self._passes(at, stop, aborted):
                    if self.prompt_logprobs is not None:
                        self._score(step)
                if aborted():
                    return False
                if mode != "off" and stop in self._marks(end):
                    runtime.tree.save(prompt[:stop], runtime.stream)
                at = max(at, stop)
            runtime.prefill.seal(prompt[-1], end)
        return True

    def _passes(self, at: int, stop: int, aborted: Callable[[], bool]) -> Iterator[Pass]:
        if at >= stop:
            return iter(())
        return self._runtime.prefill.read(self.prompt, at, stop, cancelled=aborted)

    def _marks(self, end: int) -> list[int]:
        """Where the prompt is checkpointed, ascending. "exact" keeps to absolute multiples of the prefill chunk."""
        chunk = self._runtime.prefill.chunk
        marks = {end // chunk * chunk, min(self._boundary, end) // chunk * chunk}
        if self._runtime.config.prefix_reuse == "fast":
            marks |= {min(self._boundary, end), end}
        return sorted(marks - {0})

    def _score(self, step: Pass) -> None:
        """Log-probabilities of the prompt's own tokens that this pass predicts."""
        assert self.prompt_logprobs is not None and self.params.prompt_logprobs is not None
        runtime = self._runtime
        at, top = step.start + 1, self.params.prompt_logprobs
        for logits in logits_in_parts(runtime.weights, runtime.checkpoint.spec, step):
            following = self.prompt[at : at + logits.shape[0]]
            values: tuple[Tensor, Tensor, Tensor] = gather(logits, torch.tensor(following, device=logits.device), top)
            chosen, ids, best = (v.tolist() for v in values)
            self.prompt_logprobs += assemble(following, chosen, ids, best, count=len(following), top=top)
            at += logits.shape[0]

    def _take(self, step: StepOutput) -> None:
        """Note what the device committed, and turn a snapshot of this step into a checkpoint."""
        self._committed += step.tokens
        snapshot = self._snapshots.pop(self._runtime.loop.consumed, None)
        if self._keeps and self._runtime.on_gpu and step.tokens and step.length % ROLLING == 0:
            snapshot = Snapshot.marked(self._runtime.stream)
        if snapshot is not None and not self._cut:
            with torch.inference_mode():
                self._runtime.tree.save(self._committed[: step.length], self._runtime.stream, snapshot)

    def _after_launch(self) -> None:
        """Between launches: at every multiple of ROLLING copy the state out, to be named when its step is read."""
        runtime = self._runtime
        if not self._keeps or runtime.on_gpu:  # there the step itself does it
            return
        with torch.inference_mode():
            if int(runtime.relay.taken) and int(runtime.relay.length) % ROLLING == 0:
                self._snapshots[runtime.loop.launched] = Snapshot.take(runtime.stream)

    def _block(self, step: StepOutput, cutter: Cutter) -> Block:
        now = time.perf_counter()
        end = None if self._matcher is None else self._matcher.advance(step.tokens)
        kept, text, matched = cutter.push(step.tokens[:end])  # a grammar's end token has no text
        reason: str | None = None
        if matched:
            reason, self._cut = "stop", True
        elif step.reason or end is not None:
            if end is not None:
                kept = end + 1
            self._ended = bool(step.reason) and kept == len(step.tokens)
            rest, matched = cutter.flush()
            text += rest
            reason = "stop" if step.reason == STOPPED or matched or end is not None else "length"
        self.emitted += kept
        self.accept_lengths.append(kept)
        if kept:
            self.first_token_at = self.first_token_at or now
            self.last_token_at = now
        logged = step.logprobs[:kept] if step.logprobs is not None else None
        return Block(token_ids=step.tokens[:kept], text=text, logprobs=logged, finish_reason=reason)
