"""Whose turn it is among requests that wait: round robin over those who sent them. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """A bounded queue in which somebody with many requests does not hold up somebody with one.

    Args:
        limit: how many may wait in all.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def wait(self, payer: str, item: T) -> bool:
        """Let ``item`` wait; False if the queue is full."""
        if self._length >= self._limit:
            return False
        self._waiting.setdefault(payer, deque()).append(item)
        self._length += 1
        return True

    def next(self) -> T | None:
        """Take whose turn it is; None if nobody waits."""
        if not self._waiting:
            return None
        payer, items = self._waiting.popitem(last=False)
        item = items.popleft()
        self._length -= 1
        if items:
            self._waiting[payer] = items  # behind the others
        return item

    def leave(self, payer: str, item: T) -> None:
        """It waits no longer; ignored if it does not wait."""
        items = self._waiting.get(payer)
        if items is None or item not in items:
            return
        items.remove(item)
        self._length -= 1
        if not items:
            del self._waiting[payer]
