"""Network faults: a message between two engines is lost, duplicated, delayed or held up, on any kind of bus."""

from __future__ import annotations

from kvbus.sim.runtime import Runtime
from kvbus.sim.timing import Timing

EVERYBODY = "*"


class Network:
    """Partitions and stalls between hosts. An engine's scheduler and ranks share a host, named after the engine."""

    def __init__(self, runtime: Runtime, timing: Timing) -> None:
        self._runtime, self._timing = runtime, timing
        self._partitioned_until: dict[tuple[str, str], float] = {}
        self._stalled_until: dict[str, float] = {}

    def delays(self, sender: str, receiver: str) -> list[float]:
        """After how many seconds each copy of a message arrives; empty if the message is lost."""
        runtime, faults, rng = self._runtime, self._runtime.faults, self._runtime.rng
        if self._partitioned_until.get((sender, receiver), 0.0) > runtime.now:
            runtime.counts["messages lost in partitions"] += 1
            return []
        if rng.random() < faults.drop:
            runtime.counts["messages dropped"] += 1
            return []
        duplicated = rng.random() < faults.duplicate
        runtime.counts["messages doubled"] += duplicated
        held_s = max(0.0, *(self._stalled_until.get(host, 0.0) - runtime.now for host in (receiver, EVERYBODY)))
        runtime.counts["messages held up"] += held_s > 0
        delays_s = []
        for _ in range(1 + duplicated):
            delayed = rng.random() < faults.delay
            runtime.counts["messages late"] += delayed
            delays_s.append(held_s + (rng.expovariate(1.0) * self._timing.wait if delayed else 0.0))
        return delays_s

    def partition(self, one: str, other: str, *, both_ways: bool, for_s: float) -> None:
        """Lose what ``one`` sends to ``other`` for a while, and the reverse if ``both_ways``."""
        for pair in [(one, other), (other, one)] if both_ways else [(one, other)]:
            self._partitioned_until[pair] = self._runtime.now + for_s

    def stall(self, host: str, for_s: float) -> None:
        """Hold up everything to this host for a while, then deliver it: a slow consumer."""
        self._stalled_until[host] = self._runtime.now + for_s
