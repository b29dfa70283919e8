"""Containers with a cap, and deadlines. Pure; with them nothing in the state machines grows without a bound."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class BoundedDict(dict[K, V], Generic[K, V]):
    """A dict that forgets its oldest entry when a new one would exceed ``cap``."""

    def __init__(self, cap: int) -> None:
        super().__init__()
        self._cap = cap

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._cap,), None, None, iter(self.items())

    def __setitem__(self, key: K, value: V) -> None:
        if key not in self and len(self) >= self._cap:
            del self[next(iter(self))]
        super().__setitem__(key, value)

    def setdefault(self, key: K, default: V) -> V:
        """As of dict, whose own would pass by the cap."""
        if key not in self:
            self[key] = default
        return self[key]


class Deadlines(Generic[K]):
    """Keys with a deadline each, in seconds of whatever clock the caller uses. Setting a key again moves it."""

    def __init__(self) -> None:
        self._at: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._tie = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return _deadlines, (sorted(self._at.items(), key=repr),)

    def set(self, key: K, at: float) -> None:
        self._at[key] = at
        self._tie += 1
        heapq.heappush(self._heap, (at, self._tie, key))
        if len(self._heap) > 64 + 4 * len(self._at):  # moved entries stay behind in the heap until then
            self._heap = [(at, tie, key) for tie, (key, at) in enumerate(self._at.items())]
            self._tie = len(self._heap)
            heapq.heapify(self._heap)

    def get(self, key: K) -> float | None:
        return self._at.get(key)

    def drop(self, key: K) -> None:
        self._at.pop(key, None)

    def next(self) -> float | None:
        """The earliest deadline, None if there is none."""
        while self._heap:
            at, _, key = self._heap[0]
            if self._at.get(key) == at:
                return at
            heapq.heappop(self._heap)
        return None

    def pop_due(self, now: float) -> list[K]:
        """Remove and return the keys whose deadline has come, earliest first."""
        due: list[K] = []
        while (at := self.next()) is not None and at <= now:
            _, _, key = heapq.heappop(self._heap)
            del self._at[key]
            due.append(key)
        return due

    def __len__(self) -> int:
        return len(self._at)


def _deadlines(items: list[tuple[K, float]]) -> Deadlines[K]:
    made: Deadlines[K] = Deadlines()
    for key, at in items:
        made.set(key, at)
    return made
