"""One run: a few engines, some hundred requests and faults, all drawn from the seed; then no faults; then the checks.

The invariants: no WRITE lands in a block that changed owner (checked when it lands); nothing is released or reported
twice, and what was received is of the right prompt (checked when it happens); every request and every history ends in
time; at the end every block is free and every table is empty.

:mod:`kvbus.sim.virtual` and :mod:`kvbus.sim.realtime` run it, each in its own kind of time.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from kvbus.sim.cluster import Cluster
from kvbus.sim.engine import Engine
from kvbus.sim.fabric import NUM_BLOCKS
from kvbus.sim.faults import Violation
from kvbus.sim.nemesis import Nemesis, Server
from kvbus.sim.network import Network
from kvbus.sim.workload import Workload
from kvbus.sim.world import World
from kvbus.wire import Heartbeat


@dataclass(frozen=True, slots=True)
class Summary:
    """What happened in one run or in several. ``worst_wait_s``: the longest that a request took."""

    transfers: int
    counts: Counter[str]
    worst_wait_s: float

    def __add__(self, other: Summary) -> Summary:
        return Summary(
            self.transfers + other.transfers,
            self.counts + other.counts,
            max(self.worst_wait_s, other.worst_wait_s),
        )


class Scenario:
    """Draws the cluster, the requests and the faults from the seed.

    Args:
        make_engine: makes an engine and starts it.
    """

    def __init__(
        self,
        seed: int,
        world: World,
        transfers: int,
        make_engine: Callable[[Heartbeat], Engine],
        network: Network,
        server: Server,
    ) -> None:
        rng = random.Random(seed)
        self._world = world
        self._cluster = Cluster(make_engine, rng)
        self.workload = Workload(world, self._cluster, transfers, rng, random.Random(~seed))
        self._nemesis = Nemesis(world, self._cluster, network, server, rng, self.workload.on_engine_killed)

    def start(self) -> float:
        """Let requests and faults happen from now on; returns for how many seconds they do."""
        self.workload.schedule()
        self._nemesis.schedule(self.workload.duration_s)
        return self._world.timing.lead_s + self.workload.duration_s

    @property
    def done(self) -> bool:
        """Whether every request has ended and no engine remembers any."""
        return self.workload.done and not self._cluster.leftovers()

    def check(self) -> Summary:
        """Check the invariants that hold at the end.

        Raises:
            Violation: one is broken.
        """
        worst_s, max_s = 0.0, self._world.timing.max_request_s
        for request in self.workload.requests:
            if not request.ended:
                raise Violation(f"{request.transfer_id} never ended")
            took_s = request.ended_at - request.started
            if took_s > max_s:
                raise Violation(f"{request.transfer_id} took {took_s:.1f} s: {request.ended}")
            worst_s = max(worst_s, took_s)
        if leftovers := self._cluster.leftovers():
            name, left = next(iter(leftovers.items()))
            raise Violation(f"{name} still remembers {left}")
        for name, engine in self._cluster.engines.items():
            if (free := engine.vllm.pool.free_blocks) != NUM_BLOCKS:
                raise Violation(f"{name} has {free} of {NUM_BLOCKS} blocks free")
        counts = self._world.runtime.counts + Counter({"writes overdue": self._world.counters["writes_overdue"]})
        return Summary(len(self.workload.requests), counts, worst_s)
