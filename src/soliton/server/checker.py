"""Whether a grammar can be followed, asked of a process that can be killed.

A schema of a kilobyte can take minutes and all memory to compile, and nothing interrupts that. So each new grammar is
compiled here first, and refused where that takes too much; the engine then compiles what is known to be small.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections import OrderedDict
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from ..checkpoint import Checkpoint
from ..errors import RequestError, SolitonError
from ..sampling.grammar import MOST_KEPT, Grammar, Grammars
from .line import LineFullError

SECONDS, BYTES = 5.0, 1 << 30  # that compiling may take
START_S = 120.0  # that the process may take to read the tokenizer


class Checker:
    """One process, started at the first grammar; ``limit``: how many may wait for it."""

    def __init__(self, checkpoint: Checkpoint, limit: int) -> None:
        tokenizer = checkpoint.tokenizer
        text = tokenizer.json() if tokenizer is not None else None
        self._model = (checkpoint.name, text, checkpoint.spec.vocab, tuple(checkpoint.eos_ids))
        self._passed: OrderedDict[Grammar, None] = OrderedDict()
        self._lock = asyncio.Lock()
        self._limit, self._waiting = limit, 0
        self._process: Any = None

    async def check(self, grammar: Grammar) -> None:
        """RequestError where the engine would refuse it, or could not bear it; LineFullError."""
        if grammar in self._passed:
            self._passed.move_to_end(grammar)
            return
        if self._waiting > self._limit:
            raise LineFullError(f"{self._waiting} grammars wait to be compiled; try again in a moment")
        task = asyncio.ensure_future(self._one(grammar))  # goes on when the client leaves: the pipe is in use
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.shield(task)

    async def _one(self, grammar: Grammar) -> None:
        self._waiting += 1
        try:
            async with self._lock:
                fault = await asyncio.to_thread(self._ask, grammar)
        finally:
            self._waiting -= 1
        if fault is not None:
            raise RequestError(fault, param=grammar.kind)
        self._passed[grammar] = None
        if len(self._passed) > MOST_KEPT:
            self._passed.popitem(last=False)

    def _ask(self, grammar: Grammar) -> str | None:
        if self._process is None:
            spawn = multiprocessing.get_context("spawn")
            self._connection, theirs = spawn.Pipe()
            self._process = spawn.Process(target=_compile, args=(theirs, self._model), name="grammars", daemon=True)
            self._process.start()
            theirs.close()
            if (fault := self._heard(START_S)) is not None:
                self.stop()
                return fault
        self._connection.send(grammar)
        try:
            return self._heard(SECONDS)
        except TimeoutError:
            self.stop()
            return f"{grammar.kind} is too much: it was not compiled in {SECONDS:g} s; give a simpler one"
        except (EOFError, OSError):
            self.stop()
            return f"{grammar.kind} is too much: compiling it took more than {BYTES >> 20} MiB; give a simpler one"

    def _heard(self, seconds: float) -> str | None:
        if not self._connection.poll(seconds):
            raise TimeoutError
        fault: str | None = self._connection.recv()
        return fault

    def stop(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.join()
            self._connection.close()


def _compile(connection: Connection, model: tuple[str, str | None, int, tuple[int, ...]]) -> None:
    """In the process: a fault, or None, for each grammar."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    grammars = Grammars(*model)
    try:
        grammars.ready()
    except SolitonError as error:
        connection.send(str(error))
        return
    _bound()
    connection.send(None)
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            grammar = connection.recv()
            try:
                grammars.compiled(grammar.kind, grammar.text)
                connection.send(None)
            except SolitonError as error:
                connection.send(str(error))


def _bound() -> None:
    """No more memory than now and BYTES."""
    try:
        import resource

        with open("/proc/self/statm", encoding="ascii") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + BYTES, size + BYTES))
    except (ImportError, OSError, ValueError):
        pass  # no Linux: the time alone is bounded
