"""The engine in a process of its own, and the server's end of the pipe to it.

The decode loop shares an interpreter with nothing but a thread that sleeps in a read: JSON, templates, sockets and
metrics are all on the other side. Requests arrive as token ids; every step sends one small message back.
"""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from ..config import EngineConfig
from ..errors import RequestError, SolitonError
from ..prompt import Encoded
from ..sampling.params import SamplingParams

if TYPE_CHECKING:
    from ..engine import Engine, Piece

JOIN_S = 10.0  # an engine that does not end by itself in this time is killed


@dataclasses.dataclass(frozen=True)
class Job:
    """One answer to make."""

    number: int
    prompt: Encoded
    params: SamplingParams


class EngineLost(SolitonError, RuntimeError):
    """The engine's process is not there: loading failed, or it died."""


# -- the engine's process ----------------------------------------------------------------------------------------------


def serve(connection: Connection, config: EngineConfig) -> None:
    """Load the engine and answer jobs until the pipe closes. Messages out: (what, number, value)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when to end
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        from ..engine import Engine

        engine = Engine.from_config(config, progress=lambda done, total: _say(connection, "progress", done, total))
    except BaseException as error:
        known = isinstance(error, SolitonError)
        _say(connection, "failed", 0, str(error) if known else traceback.format_exc())
        return
    _say(connection, "ready", 0, _about(engine))
    desk = _Desk(connection, engine)
    threading.Thread(target=desk.listen, name="listen", daemon=True).start()
    while (job := desk.jobs.get()) is not None:
        if isinstance(job, Job):
            desk.answer(job)
        else:
            engine.reset()
            _say(connection, "flushed", job, None)
    engine.close()


def _about(engine: Engine) -> dict[str, Any]:
    return {
        "config": engine.config,
        "decisions": [str(decision) for decision in engine.decisions],
        "memory": dict(engine.plan.rows()),
        "pid": os.getpid(),
    }


def _say(connection: Connection, what: str, number: int, value: Any) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # the server is gone; the listener ends this process
        connection.send((what, number, value))


class _Desk:
    """Jobs in order, and which of them nobody wants any more."""

    def __init__(self, connection: Connection, engine: Engine) -> None:
        self._connection, self._engine = connection, engine
        self.jobs: SimpleQueue[Job | int | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._current: int | None = None
        self._gone: set[int] = set()
        self._last = 0  # the newest job that has ended

    def listen(self) -> None:
        """In a thread: what the server says, at once."""
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                with self._lock:
                    self._engine.abort()
                self.jobs.put(None)
                return
            if message[0] == "abort":
                with self._lock:
                    if message[1] > self._last:
                        self._gone.add(message[1])
                    if self._current == message[1]:
                        self._engine.abort()
            else:
                self.jobs.put(message[1])

    def answer(self, job: Job) -> None:
        """Make one answer and send it piece by piece; a failure is this request's alone."""
        try:
            stream = self._engine.stream(job.prompt, job.params)
            with self._lock:
                self._current = job.number
                if job.number in self._gone:
                    self._engine.abort()
            for piece in stream:
                _say(self._connection, "piece", job.number, piece)
        except SolitonError as error:
            _say(self._connection, "refused", job.number, (str(error), getattr(error, "param", None)))
        except Exception as error:
            _say(self._connection, "error", job.number, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        finally:
            with self._lock:
                self._current, self._last = None, job.number
                self._gone.discard(job.number)


# -- the server's end --------------------------------------------------------------------------------------------------


class EngineProcess:
    """Starts the engine's process and talks with it from an event loop. One answer at a time (see ``queue.Line``)."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._numbers = 0
        self._sender = ThreadPoolExecutor(1, "send")
        self._inbox: asyncio.Queue[tuple[int | None, str, Any]] = asyncio.Queue()
        self._current = 0
        self._loaded: asyncio.Future[dict[str, Any]] | None = None
        self.progress = (0, 0)
        self.lost: asyncio.Event = asyncio.Event()
        self.fault = ""

    async def start(self) -> None:
        """Start the process; ``loaded`` waits for the engine."""
        spawn = multiprocessing.get_context("spawn")
        self._connection, theirs = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(theirs, self._config), name="engine", daemon=True)
        self._process.start()
        theirs.close()
        self._loop = asyncio.get_running_loop()
        self._loaded = self._loop.create_future()
        self._loaded.add_done_callback(lambda future: future.exception())  # whoever waits hears of it; nobody must
        self._loop.add_reader(self._connection.fileno(), self._read)

    async def loaded(self) -> dict[str, Any]:
        """What the engine says of itself; EngineLost with the reason when it could not be loaded."""
        assert self._loaded is not None
        return await asyncio.shield(self._loaded)

    @property
    def ready(self) -> bool:
        """Whether requests can be answered now."""
        loaded = self._loaded
        return loaded is not None and loaded.done() and loaded.exception() is None and not self.lost.is_set()

    async def answer(self, prompt: Encoded, params: SamplingParams) -> AsyncIterator[Piece]:
        """The pieces of one answer. Closing it early aborts the answer and waits for the engine, which takes a step."""
        self._check()
        self._numbers += 1
        number = self._current = self._numbers
        ended = False
        self._send(("run", Job(number, prompt, params)))
        try:
            while True:
                what, value = await self._next(number)
                ended = what != "piece" or value.finish_reason is not None
                if what == "piece":
                    yield value
                    if ended:
                        return
                    continue
                if what == "refused":
                    raise RequestError(value[0], param=value[1])
                raise EngineLost(value) if what == "lost" else RuntimeError(value)
        finally:
            if not ended and not self.lost.is_set():
                self._send(("abort", number))
                await self._free(number)

    async def _next(self, number: int) -> tuple[str, Any]:
        """The next message of a job, or that the engine is lost; what others left behind is dropped."""
        while True:
            whose, what, value = await self._inbox.get()
            if whose in (number, None):
                return what, value

    async def _free(self, number: int) -> None:
        """Read on until the answer in progress has ended, whatever is cancelled meanwhile."""
        cancelled = False
        while True:
            waiting = asyncio.ensure_future(self._next(number))
            while not waiting.done():
                try:
                    await asyncio.shield(waiting)
                except asyncio.CancelledError:
                    cancelled = True
            what, value = waiting.result()
            if what != "piece" or value.finish_reason is not None:
                break
        if cancelled:
            raise asyncio.CancelledError

    def abort(self) -> None:
        """End the answer in progress at its next step; its last piece says "abort"."""
        if self.ready:
            self._send(("abort", self._current))

    async def flush(self) -> None:
        """Forget all prefix checkpoints; only while no answer is being made."""
        self._check()
        self._numbers += 1
        self._current = self._numbers
        self._send(("flush", self._current))
        what, value = await self._next(self._current)
        if what == "lost":
            raise EngineLost(value)

    async def stop(self) -> None:
        """Close the pipe, which ends the process after its current step; kill it if it does not."""
        if not hasattr(self, "_process"):
            return
        self._loop.remove_reader(self._connection.fileno())
        self._connection.close()
        await asyncio.to_thread(self._process.join, JOIN_S)
        if self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join)
        self._sender.shutdown(wait=False)
        self._lose("the engine's process was ended")  # whoever still waits for it

    def _send(self, message: tuple[str, Any]) -> None:
        """In order, by a thread: an engine that does not read must not stop the event loop."""
        self._sender.submit(self._write, message)

    def _write(self, message: tuple[str, Any]) -> None:
        with suppress(OSError):  # the engine is gone, of which the reader hears
            self._connection.send(message)

    def _check(self) -> None:
        if self.lost.is_set():
            raise EngineLost(self.fault)

    def _read(self) -> None:
        """In the event loop, when the pipe has something."""
        try:
            what, number, value = self._connection.recv()
        except (EOFError, OSError):
            code = self._process.exitcode
            self._lose(f"the engine's process has ended{'' if code is None else f' with code {code}'}")
            return
        assert self._loaded is not None
        if what == "progress":
            self.progress = (number, value)
        elif what == "ready":
            self._loaded.set_result(value)
        elif what == "failed":
            self._lose(value)
        elif number == self._current:
            self._inbox.put_nowait((number, what, value))

    def _lose(self, fault: str) -> None:
        if self.lost.is_set():
            return
        if not self._connection.closed:
            self._loop.remove_reader(self._connection.fileno())
        self.fault = fault
        self.lost.set()
        assert self._loaded is not None
        if not self._loaded.done():
            self._loaded.set_exception(EngineLost(fault))
        self._inbox.put_nowait((None, "lost", fault))
