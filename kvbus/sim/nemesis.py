"""The nemesis: partitions, kills, stalls, and a bus server that goes away, at times drawn from the seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol

from kvbus.sim.cluster import Cluster
from kvbus.sim.engine import Engine
from kvbus.sim.network import Network
from kvbus.sim.world import World


class Server(Protocol):
    """The bus server, as far as it can fail."""

    def outage(self, away_s: float) -> None:
        """Go away for so many seconds."""
        ...

    def freeze(self, for_s: float) -> None:
        """Hang for so many seconds."""
        ...


class Nemesis:
    """See the module's docstring.

    Args:
        on_killed: called with the name of an engine that was killed.
    """

    def __init__(
        self,
        world: World,
        cluster: Cluster,
        network: Network,
        server: Server,
        rng: random.Random,
        on_killed: Callable[[str], None],
    ) -> None:
        self._runtime, self._timing, self._cluster = world.runtime, world.timing, cluster
        self._network, self._server, self._rng, self._on_killed = network, server, rng, on_killed

    def schedule(self, duration_s: float) -> None:
        """Inject faults from the first request on, for so many seconds."""
        faults = self._runtime.faults
        for mean_s, inject in (
            (faults.partition_every_s, self._partition),
            (faults.kill_every_s, self._kill),
            (faults.outage_every_s, self._outage),
            (faults.freeze_every_s, self._freeze),
            (faults.stall_every_s, self._stall),
        ):
            at = 0.0
            while mean_s > 0 and (at := at + self._rng.expovariate(1 / (mean_s * self._timing.work))) < duration_s:
                self._runtime.call_later(self._timing.lead_s + at, inject)

    def _partition(self) -> None:
        self._runtime.counts["partitions"] += 1
        one, other = self._rng.sample([*self._cluster.engines], 2)
        for_s = self._duration_s(0.5, 12.0)
        self._network.partition(one, other, both_ways=self._rng.random() < 0.5, for_s=for_s)

    def _kill(self) -> None:
        """Kill an engine; its next incarnation starts after a while."""
        boot_s = (0.2 + self._rng.expovariate(0.25)) * self._timing.wait
        name = self._rng.choice([*self._cluster.engines])
        victim = self._cluster.engines[name]
        if not victim.alive:
            return
        self._runtime.counts["kills"] += 1
        victim.kill()
        self._on_killed(name)
        self._runtime.call_later(boot_s, lambda: self._restart(victim))

    def _restart(self, dead: Engine) -> None:
        self._runtime.counts["restarts"] += 1
        self._cluster.restart(dead)

    def _outage(self) -> None:
        self._runtime.counts["outages"] += 1
        self._server.outage(self._duration_s(0.2, 8.0))

    def _freeze(self) -> None:
        self._runtime.counts["freezes"] += 1
        self._server.freeze(self._duration_s(0.2, 8.0))

    def _stall(self) -> None:
        self._runtime.counts["stalls"] += 1
        for_s = self._duration_s(0.2, 6.0)
        self._network.stall(self._rng.choice([*self._cluster.engines]), for_s)

    def _duration_s(self, least: float, most: float) -> float:
        return self._rng.uniform(least, most) * self._timing.wait
