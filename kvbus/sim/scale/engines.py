"""``python -m kvbus.sim.scale.engines PLAN``: some of the engines of ``kvbus scale``, in one process and event loop."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvbus.bus import NatsBus
from kvbus.config import Config
from kvbus.sim.faults import NO_FAULTS
from kvbus.sim.realtime_engine import RealTimeEngine
from kvbus.sim.realtime_runtime import RealTimeRuntime
from kvbus.sim.scale.engine_api import EngineApi
from kvbus.sim.scale.process import MODEL, run_process, write_json
from kvbus.sim.socket_fabric import SocketFabric
from kvbus.sim.timing import Timing
from kvbus.sim.world import World
from kvbus.wire import Heartbeat, Role, State

MEAN_WRITE_S = 0.002


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """What one process of engines is told.

    Attributes:
        name: of the process; its files in ``folder`` have this name.
        engines: the role of each, by name.
        groups: the names of all such processes.
        work: see :class:`kvbus.sim.timing.Timing`.
    """

    name: str
    nats_url: str
    folder: str
    engines: Mapping[str, str]
    groups: Sequence[str]
    seed: int
    work: float


def production_timing(work: float) -> Timing:
    """Heartbeats, death and block leases as engines have them by default; a short prompt is computed in a few ms."""
    config = Config(nats_url="nats://127.0.0.1")
    return Timing(
        work=work,
        heartbeat_s=config.heartbeat_interval_s,
        dead_after_s=config.dead_after_s,
        block_lease_s=config.block_lease_s,
    )


class Group:
    """The engines of one process."""

    def __init__(self, plan: GroupPlan) -> None:
        self._plan, self._folder = plan, Path(plan.folder)
        timing = production_timing(plan.work)
        self._runtime = RealTimeRuntime(plan.seed, replace(NO_FAULTS, mean_write_s=MEAN_WRITE_S))
        self._fabric = SocketFabric(self._runtime, timing, self._folder / f"{plan.name}.sock")
        self._world = World(self._runtime, timing, self._fabric)
        self._counts: Counter[str] = Counter()
        self._prefill_way_s: list[float] = []
        self._apis: list[EngineApi] = []
        self._engines: list[RealTimeEngine] = []
        self._buses: list[NatsBus] = []

    async def start(self) -> None:
        await self._fabric.open()
        addresses = {name: await self._make_engine(name, Role(role)) for name, role in self._plan.engines.items()}
        write_json(self._folder / f"{self._plan.name}.ready", addresses)
        sockets = [self._folder / f"{name}.sock" for name in self._plan.groups]
        while not all(path.exists() for path in sockets):  # noqa: ASYNC110 - no event comes from other processes
            await asyncio.sleep(0.05)
        await self._fabric.connect([str(path) for path in sockets])
        for engine in self._engines:
            await engine.start()

    async def wait(self, stop: asyncio.Event) -> None:
        """Return at ``stop``; raises what went wrong in an engine."""
        await self._runtime.until(stop.is_set, float("inf"))

    async def close(self) -> None:
        for api in self._apis:
            await api.close()
        write_json(self._folder / f"{self._plan.name}.json", self._figures())
        await self._runtime.close()
        await asyncio.gather(*(engine.close() for engine in self._engines), return_exceptions=True)
        await self._fabric.close()

    async def _make_engine(self, name: str, role: Role) -> str:
        """Returns the address of its HTTP API."""
        api = EngineApi(self._counts, self._prefill_way_s)
        self._apis.append(api)
        address = await api.open()
        own = Heartbeat(name, time.time_ns(), 0, role, State.READY, 1, MODEL, address)
        api.engine = RealTimeEngine(self._world, self._runtime, own, self._make_bus)
        self._engines.append(api.engine)
        return address

    def _make_bus(self, name: str) -> NatsBus:
        self._buses.append(NatsBus([self._plan.nats_url], name))
        return self._buses[-1]

    def _figures(self) -> dict[str, object]:
        return {
            "counts": self._counts,
            "bus": sum((Counter(bus.counters.snapshot()) for bus in self._buses), Counter()),
            "ranks": self._world.counters.snapshot(),
            "leftovers": sum(sum(engine.leftovers().values()) for engine in self._engines),
            "prefill_way_s": self._prefill_way_s,
        }


async def run_group(plan: GroupPlan) -> None:
    """Run until SIGTERM."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    group = Group(plan)
    try:
        await group.start()
        await group.wait(stop)
    finally:
        await group.close()


def deal_engines(count: int, processes: int) -> list[dict[str, str]]:
    """So many engines, half of them for prefill, dealt to so many processes: the role of each, by name."""
    every = [(f"P{number}", Role.PREFILL.value) for number in range(count // 2)]
    every += [(f"D{number}", Role.DECODE.value) for number in range(count - count // 2)]
    return [dict(every[number::processes]) for number in range(processes)]


if __name__ == "__main__":
    run_process(run_group(GroupPlan(**json.loads(sys.argv[1]))))
