"""Admission: so many requests are at the engines at once. The others wait in a fair queue, or are refused.

Lives in one event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from kvbus.router.http import OVERLOADED, RefusedError, error

T = TypeVar("T")


class FairQueue(Generic[T]):
    """A bounded queue, round robin over those who wait: a client with many requests does not hold up one with one.

    Args:
        limit: how many items may wait in all.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, payer: str, item: T) -> bool:
        """Let ``item`` wait; False if the queue is full."""
        if self._length >= self._limit:
            return False
        self._waiting.setdefault(payer, deque()).append(item)
        self._length += 1
        return True

    def pop(self) -> T | None:
        """Take the item whose turn it is; None if nothing waits."""
        if not self._waiting:
            return None
        payer, items = self._waiting.popitem(last=False)
        item = items.popleft()
        self._length -= 1
        if items:
            self._waiting[payer] = items  # behind the others
        return item

    def remove(self, payer: str, item: T) -> None:
        """It waits no longer; ignored if it does not wait."""
        items = self._waiting.get(payer)
        if items is None or item not in items:
            return
        items.remove(item)
        self._length -= 1
        if not items:
            del self._waiting[payer]


class Gate:
    """Admission to the engines of one model.

    Args:
        room: how many requests may be at the engines now; it changes as engines join and leave.
        max_queue: how many may wait.
        max_wait_s: how long one may wait.
    """

    def __init__(self, room: Callable[[], int], max_queue: int, max_wait_s: float) -> None:
        self._room, self._max_queue, self._max_wait_s = room, max_queue, max_wait_s
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue(max_queue)
        self._in_flight = 0

    @property
    def queued(self) -> int:
        return len(self._queue)

    @asynccontextmanager
    async def enter(self, payer: str) -> AsyncIterator[None]:
        """Wait for a place, and hold it.

        Raises:
            RefusedError: the queue is full, or the wait was too long.
        """
        if self._queue or self._in_flight >= self._room():
            await self._wait(payer)
        else:
            self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1
            self.admit()

    def admit(self) -> None:
        """Let in as many as there is room for; called whenever there may be more of it."""
        while self._in_flight < self._room() and (waiting := self._queue.pop()) is not None:
            if not waiting.done():
                self._in_flight += 1
                waiting.set_result(None)

    async def _wait(self, payer: str) -> None:
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not self._queue.push(payer, waiting):
            raise self._refusal(429, f"{self._max_queue} requests are waiting already, as many as are allowed")
        try:
            done, _ = await asyncio.wait({waiting}, timeout=self._max_wait_s)
        except asyncio.CancelledError:
            self._leave(payer, waiting)
            raise
        if not done:
            self._leave(payer, waiting)
            raise self._refusal(503, f"no engine had room within {self._max_wait_s:g} s")

    def _leave(self, payer: str, waiting: asyncio.Future[None]) -> None:
        self._queue.remove(payer, waiting)
        if waiting.done() and not waiting.cancelled():  # it was let in just now
            self._in_flight -= 1
            self.admit()
        waiting.cancel()

    def _refusal(self, status: int, message: str) -> RefusedError:
        retry_after_s = max(1, math.ceil(self._max_wait_s / 2))
        return RefusedError(error(status, message, OVERLOADED, headers={"Retry-After": str(retry_after_s)}))
