"""What the routes share: checking a request, waiting for its turn, and the pieces of its answers."""

from __future__ import annotations

import asyncio
import importlib
import re
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from ..binder import parse_size
from ..checkpoint import Checkpoint
from ..config import EngineConfig
from ..errors import RequestError, SolitonError
from ..prompt import Encoded, prepare
from ..sampling.grammar import asked
from .asks import Ask
from .checker import Checker
from .config import ServerConfig
from .line import AbortedError, DrainingError, Line, Turn
from .metrics import Metrics
from .worker import EngineLost, EngineProcess

if TYPE_CHECKING:
    from ..engine import Piece


T = TypeVar("T")
STOP_S = 5.0  # for requests to end by themselves
LARGE = 16384  # bytes of a request that is worth a thread


class NoSuchModel(SolitonError, LookupError):
    """A request for a model that is not served."""

    param = "model"


class LoadingError(SolitonError, RuntimeError):
    """The engine is not loaded yet."""


class DeadlineError(SolitonError, TimeoutError):
    """The request took longer than it may."""


@dataclass(eq=False)
class Active:
    """A request in the house: its ids (one, or one a prompt), when it came, its prompts, and how to end it or some of
    its prompts."""

    rids: tuple[str, ...]
    came: float
    ask: Ask
    prompts: list[Encoded]
    aborted: asyncio.Future[None]
    running: bool = False
    at: int = 0  # the prompt that is being answered
    dropped: set[int] = field(default_factory=set)  # prompts of which no answer is wanted any more
    turn: Turn | None = None
    pieces: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)

    def rid(self, which: int = 0) -> str:
        """The id of a prompt's answers."""
        return self.rids[which if len(self.rids) > 1 else 0]


class Service:
    """One engine, its line, and the requests in the house. The checkpoint is opened here as well, for its tokenizer
    and template: texts become ids outside the engine's process."""

    def __init__(self, config: ServerConfig, engine: EngineConfig, checkpoint: Checkpoint) -> None:
        self.config, self.checkpoint = config, checkpoint
        self.name = config.served_model_name or engine.model
        self.engine = EngineProcess(engine)
        self.line = Line(config.max_queued_requests)
        self._checker = Checker(checkpoint, config.max_queued_requests)
        self.metrics = Metrics(self.name)
        self.started = time.time()
        self.about: dict[str, Any] = {}
        self.active: dict[str, Active] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False

    async def load(self) -> None:
        """Start the engine's process and wait for it. EngineLost with the reason."""
        await self.engine.start()
        # pieces are unpickled in the event loop: what they are made of must be there by then
        await asyncio.to_thread(importlib.import_module, "soliton.engine")
        self.about = await self.engine.loaded()

    @property
    def max_context(self) -> int:
        """Tokens of prompt and answer together."""
        return int(self.about["config"].max_context)

    @property
    def max_body(self) -> int:
        """Bytes of the largest body that is read."""
        size = parse_size(self.config.max_body, "max_body")
        assert size is not None
        return size

    def parses(self, key: str) -> bool:
        """Whether reasoning or calls are read, by a setting that may say auto: where the template has the tags."""
        value = getattr(self.config, key)
        tag = "<think>" if key == "reasoning_parser" else "<tool_call>"
        return value == "ling3" or (value == "auto" and tag in (self.checkpoint.chat_template or ""))

    def check(self, model: str | None) -> None:
        """Whether a request can be taken now, and whether it is for the model that is served."""
        if not self.engine.ready:
            if self.engine.lost.is_set():
                raise EngineLost(f"the engine is gone: {self.engine.fault.splitlines()[-1]}")
            raise LoadingError("the model is being loaded; try again in a moment")
        if model not in (None, self.name, "default"):
            raise NoSuchModel(f"the model {model!r} is not served here; this is {self.name!r}")

    async def aside(self, size: int, work: Callable[[], T]) -> T:
        """``work`` in the event loop, or, for a request of ``size`` bytes that would hold it up, in a thread: a long
        text is cut into tokens without Python's lock."""
        return await asyncio.to_thread(work) if size > LARGE else work()

    async def enter(self, ask: Ask, kind: str, size: int = 0) -> Active:
        """Check everything that can be refused, and take the request in. RequestError."""
        given = ask.rids or (() if ask.rid is None else (ask.rid,))
        if not all(re.fullmatch(r"[!-~]{1,256}", rid) for rid in given):
            raise RequestError("rid has to be 1 to 256 printable ASCII characters without spaces", param="rid")
        seen = await self.aside(size, lambda: self._prepared(ask, kind))
        if (grammar := asked(ask.params)) is not None:
            try:
                async with asyncio.timeout(self.config.request_timeout or None):
                    await self._checker.check(grammar)
            except TimeoutError:
                limit = self.config.request_timeout
                raise DeadlineError(f"the grammar waited longer than {limit:g} s; the server allows no more") from None
        rids = given or (f"{kind}-{uuid.uuid4().hex}",)
        if taken := [rid for rid in rids if rid in self.active]:
            raise RequestError(f"a request with the id {taken[0]!r} is in the house; choose another", param="rid")
        active = Active(rids, time.perf_counter(), ask, seen, asyncio.get_running_loop().create_future())
        self.active |= dict.fromkeys(rids, active)
        return active

    def _prepared(self, ask: Ask, kind: str) -> list[Encoded]:
        seen = []
        for prompt in ask.prompts:
            try:
                ready = prepare(self.checkpoint, self.max_context, prompt, ask.params, ask.chat)
            except RequestError as error:
                if kind == "chatcmpl":
                    error.param = "messages" if error.param == "prompt" else error.param
                raise
            seen.append(Encoded(tuple(ready.ids), ready.boundary))
        return seen

    async def answers(self, active: Active) -> AsyncGenerator[tuple[int, Piece]]:
        """(which answer, its next piece), after ``active.turn`` is set by the first: prompt by prompt, n answers each.

        The engine goes on at its own pace whoever reads slowly, and whoever stops reading frees it within a step.
        """
        task = asyncio.get_running_loop().create_task(self._produce(active))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            while (item := await active.pieces.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            for rid in active.rids:
                self.active.pop(rid, None)
            task.cancel()

    async def turn(self, active: Active) -> tuple[Turn, AsyncGenerator[tuple[int, Piece]]]:
        """Wait for the turn; (it, what ``answers`` gives). Raises what made it fail, so that a stream gets a status."""
        pieces = self.answers(active)
        try:
            first = await anext(pieces)
        except StopAsyncIteration:
            raise RuntimeError("an answer without a piece") from None
        except BaseException:
            await pieces.aclose()
            raise
        assert active.turn is not None
        return active.turn, _again(first, pieces)

    def abort(self, rid: str | None) -> int:
        """End requests: the one with this id, or all for None; of a request with an id for each prompt, that prompt's
        answers. How many there were."""
        found = set(self.active.values()) if rid is None else {self.active[rid]} if rid in self.active else set()
        for active in found:
            if rid is not None and len(active.rids) > 1:
                which = active.rids.index(rid)
                if which in active.dropped or (active.running and which < active.at):
                    return 0  # ended already
                active.dropped.add(which)
                if len(active.dropped) < len(active.rids):
                    if active.running and active.at in active.dropped:
                        self.engine.abort()
                    continue
            if not active.aborted.done():
                active.aborted.set_result(None)
            if active.running:
                self.engine.abort()
        return len(found)

    async def stop(self) -> None:
        """End every request and the engine's process."""
        self._stopping = True
        self._checker.stop()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:  # an engine that does not come to the end of its step is not waited for
            await asyncio.wait(self._tasks, timeout=STOP_S)
        await self.engine.stop()

    async def _produce(self, active: Active) -> None:
        limit, put = self.config.request_timeout, active.pieces.put_nowait
        task, late = asyncio.current_task(), []
        assert task is not None

        def expire() -> None:  # whoever waits hears of it now, not when the engine has ended its step
            late.append(DeadlineError(f"the request took longer than {limit:g} s; the server allows no more"))
            put(late[0])
            task.cancel()

        timer = asyncio.get_running_loop().call_later(limit, expire) if limit else None
        try:
            async with self.line.turn(active.aborted) as active.turn:
                active.running = True
                self.metrics.begun()
                cut = False
                for place in range(len(active.prompts) * active.ask.n):
                    active.at = place // active.ask.n
                    if active.aborted.done() or active.at in active.dropped:
                        put((place, _dropped()))
                        cut = True
                    else:
                        cut |= await self._one(active, active.prompts[active.at], place) == "abort"
                if cut:
                    self.metrics.aborted()
        except asyncio.CancelledError:
            self.metrics.aborted()
            if self._stopping and not late:
                put(DrainingError("the server ended before the answer did"))
            raise
        except AbortedError as error:
            self.metrics.aborted()
            put(error)
        except Exception as error:
            put(error)
        finally:
            if timer is not None:
                timer.cancel()
            active.running = False
            put(None)

    async def _one(self, active: Active, prompt: Encoded, place: int) -> str | None:
        assert active.turn is not None
        first, reason = True, None
        async for piece in self.engine.answer(prompt, active.ask.seeded(place)):
            self.metrics.piece(piece, first)
            first, reason = False, piece.finish_reason
            active.pieces.put_nowait((place, piece))
            if piece.stats is not None:
                total = time.perf_counter() - active.came
                self.metrics.answered(piece.stats, waited_s=active.turn.waited_s, total_s=total)
        return reason


def _dropped() -> Piece:
    from ..engine import Piece

    return Piece(token_ids=(), text="", finish_reason="abort")


async def _again(first: Any, rest: AsyncGenerator[Any]) -> AsyncGenerator[Any]:
    try:
        yield first
        async for item in rest:
            yield item
    finally:
        await rest.aclose()
