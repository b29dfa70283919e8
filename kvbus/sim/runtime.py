"""Time and randomness of a simulation."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from kvbus.sim.faults import Faults


class Runtime(Protocol):
    """Virtual time (:class:`VirtualRuntime`) or real time (:class:`kvbus.sim.realtime_runtime.RealTimeRuntime`).

    Threading: everything in a simulation happens in one thread.
    """

    faults: Faults
    rng: random.Random
    counts: Counter[str]
    """What happened, for the summary."""

    @property
    def now(self) -> float:
        """Seconds since the start."""
        ...

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> object: ...


class VirtualRuntime:
    """Runs callbacks in the order of their time; time passes only from one callback to the next."""

    def __init__(self, seed: int, faults: Faults) -> None:
        self.faults = faults
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._tie = itertools.count()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + delay_s, next(self._tie), callback))

    def run(self, until_s: float) -> None:
        while self._due and self._due[0][0] <= until_s:
            self.now, _, callback = heapq.heappop(self._due)
            callback()
        self.now = max(self.now, until_s)
