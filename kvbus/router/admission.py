"""The gate before the engines: so many requests at once, the others wait or are turned away. In one event loop."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from kvbus.router.fair_queue import Turns
from kvbus.router.http import OVERLOADED, Answer, error


class TurnedAwayError(Exception):
    """There is no room; ``answer`` says so to the client."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        super().__init__(f"status {answer.status}")


class Gate:
    """For the engines of one model.

    Args:
        room: how many requests may be at the engines now; it changes as engines come and go.
        max_queue, max_wait_s: of those that wait; in all, and each.
    """

    def __init__(self, room: Callable[[], int], max_queue: int, max_wait_s: float) -> None:
        self._room, self._max_queue, self._max_wait_s = room, max_queue, max_wait_s
        self._turns: Turns[asyncio.Future[None]] = Turns(max_queue)
        self.in_flight = 0

    @property
    def queued(self) -> int:
        return len(self._turns)

    @asynccontextmanager
    async def enter(self, payer: str) -> AsyncIterator[None]:
        """Wait for a place, and hold it.

        Raises:
            TurnedAwayError: the queue is full, or the wait was too long.
        """
        if self._turns or self.in_flight >= self._room():
            await self._wait(payer)
        else:
            self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
            self.admit()

    def admit(self) -> None:
        """Let in who has room; called whenever there may be more of it."""
        while self.in_flight < self._room() and (waiting := self._turns.next()) is not None:
            if not waiting.done():
                self.in_flight += 1
                waiting.set_result(None)

    async def _wait(self, payer: str) -> None:
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not self._turns.wait(payer, waiting):
            raise TurnedAwayError(
                self._sorry(429, f"{self._max_queue} requests are waiting already, as many as are allowed")
            )
        try:
            done, _ = await asyncio.wait({waiting}, timeout=self._max_wait_s)
        except asyncio.CancelledError:
            self._leave(payer, waiting)
            raise
        if not done:
            self._leave(payer, waiting)
            raise TurnedAwayError(self._sorry(503, f"no engine had room within {self._max_wait_s:g} s"))

    def _leave(self, payer: str, waiting: asyncio.Future[None]) -> None:
        self._turns.leave(payer, waiting)
        if waiting.done() and not waiting.cancelled():  # it was just let in
            self.in_flight -= 1
            self.admit()
        waiting.cancel()

    def _sorry(self, status: int, message: str) -> Answer:
        retry_after_s = max(1, math.ceil(self._max_wait_s / 2))
        return error(status, message, OVERLOADED, headers={"Retry-After": str(retry_after_s)})
