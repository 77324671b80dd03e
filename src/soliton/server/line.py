"""The line in front of the engine: one answer at a time, first come first served, and only so many wait."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ..errors import SolitonError


class LineFullError(SolitonError, RuntimeError):
    """So many requests wait already that this one may not."""


class DrainingError(SolitonError, RuntimeError):
    """The server is about to end and takes nothing more."""


class AbortedError(SolitonError, RuntimeError):
    """The request was aborted while it waited."""


@dataclass
class Turn:
    """A request's place. position: requests in front of it when it came; waited_s: seconds until its turn."""

    position: int
    waited_s: float = 0.0


class Line:
    """``limit``: requests that may wait, beside the one being answered."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.running = False
        self.draining = False
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    @asynccontextmanager
    async def turn(self, aborted: asyncio.Future[None] | None = None) -> AsyncIterator[Turn]:
        """Wait for the turn, have it, give it back. aborted: ends the waiting with AbortedError. A cancelled waiter
        leaves the line at once."""
        turn = Turn(position=len(self._waiting) + self.running)
        if self.draining:
            raise DrainingError("the server is ending and takes no more requests; send it to another one")
        if self.running:
            if len(self._waiting) >= self.limit:
                raise LineFullError(
                    f"{len(self._waiting)} requests wait already and at most {self.limit} may; try again later"
                )
            came = time.perf_counter()
            await self._wait(aborted)
            turn.waited_s = time.perf_counter() - came
        self.running = True
        self._idle.clear()
        try:
            yield turn
        finally:
            self._pass_on()

    async def drained(self) -> None:
        """Take nothing more and wait until nobody is served or waits."""
        self.draining = True
        await self._idle.wait()

    async def _wait(self, aborted: asyncio.Future[None] | None) -> None:
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
        try:
            await asyncio.wait([mine, *([aborted] if aborted else [])], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._leave(mine)
            raise
        if not mine.done():
            self._leave(mine)
            raise AbortedError("the request was aborted while it waited")

    def _leave(self, mine: asyncio.Future[None]) -> None:
        if mine.done():  # the turn came in the same moment
            self._pass_on()
        else:
            self._waiting.remove(mine)

    def _pass_on(self) -> None:
        """Straight to the next, so that nobody who comes now gets in between."""
        if self._waiting:
            self._waiting.popleft().set_result(None)
        else:
            self.running = False
            self._idle.set()
