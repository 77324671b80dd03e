"""Whether a grammar can be followed, asked of a process that can be killed.

A schema of a kilobyte can take minutes and all memory to compile, and nothing interrupts that. So each new grammar is
compiled here first, and refused where that takes too much; the engine then compiles what is known to be small.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from collections import OrderedDict
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from ..checkpoint import Checkpoint
from ..errors import RequestError, SolitonError
from ..sampling.grammar import MOST_KEPT, Grammar, Grammars
from .line import DrainingError, LineFullError

SECONDS, BYTES = 5.0, 1 << 30  # that compiling may take
START_S = 120.0  # that the process may take to read the tokenizer


class Checker:
    """One process, started at the first grammar; ``limit``: how many may wait for it."""

    def __init__(self, checkpoint: Checkpoint, limit: int) -> None:
        tokenizer = checkpoint.tokenizer
        text = tokenizer.json() if tokenizer is not None else None
        self._model = (checkpoint.name, text, checkpoint.spec.vocab, tuple(checkpoint.eos_ids))
        self._known: OrderedDict[Grammar, str | None] = OrderedDict()  # what was found of each
        self._lock = asyncio.Lock()
        self._limit, self._waiting = limit, 0
        self._process: Any = None
        self._ended = False

    async def check(self, grammar: Grammar) -> None:
        """RequestError where the engine would refuse it, or could not bear it; LineFullError."""
        if grammar not in self._known:
            if self._waiting > self._limit:
                raise LineFullError(f"{self._waiting} grammars wait to be compiled; try again in a moment")
            self._waiting += 1
            try:
                await self._lock.acquire()
            finally:
                self._waiting -= 1
            task = asyncio.ensure_future(self._one(grammar))  # goes on when the client leaves: the pipe is in use
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            await asyncio.shield(task)
        self._known.move_to_end(grammar)
        if (fault := self._known[grammar]) is not None:
            raise RequestError(fault, param=grammar.kind)

    async def _one(self, grammar: Grammar) -> None:
        try:
            if grammar not in self._known:
                self._known[grammar] = await asyncio.to_thread(self._ask, grammar)
                if len(self._known) > MOST_KEPT:
                    self._known.popitem(last=False)
        finally:
            self._lock.release()

    def _ask(self, grammar: Grammar) -> str | None:
        """In a thread: its fault, or None. A process that ends is started once more: others may have ended it."""
        for last in (False, True):
            if self._ended:
                break
            try:
                if self._process is None:
                    self._start()
                return self._asked(grammar, SECONDS)
            except TimeoutError:
                self._drop()
                return f"{grammar.kind} is too much: it was not compiled in {SECONDS:g} s; give a simpler one"
            except (EOFError, OSError):
                self._drop()
                if last and not self._ended:
                    return f"{grammar.kind} is too much: its compiler ended twice ({BYTES >> 20} MiB are allowed)"
        raise DrainingError("the server is ending")

    def _start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._connection, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_compile, args=(theirs,), name="grammars", daemon=True)
        self._process.start()
        theirs.close()
        if (fault := self._asked(self._model, START_S)) is not None:
            self._drop()
            raise RequestError(fault)

    def _asked(self, what: Any, seconds: float) -> str | None:
        timer = threading.Timer(seconds + 1, self._process.kill)  # one that does not even read
        timer.start()
        try:
            self._connection.send(what)
            if not self._connection.poll(seconds):
                raise TimeoutError
            fault: str | None = self._connection.recv()
            return fault
        finally:
            timer.cancel()

    def _drop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.join()
            self._connection.close()

    def stop(self) -> None:
        """End the process; whoever waits for it hears that the server is ending."""
        self._ended = True
        if (process := self._process) is not None:
            process.kill()


def _compile(connection: Connection) -> None:
    """In the process: a fault, or None, for the model and each grammar that comes."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the server ends it
    grammars = Grammars(*connection.recv())
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
