"""A run in real time: real shells over a nats-server of its own, or over a bus in memory.

The seed gives the requests and the faults. What comes of them depends on the machine, so two runs of a seed may differ.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path

from kvbus.signals import run
from kvbus.sim.fabric import Fabric
from kvbus.sim.faults import NO_FAULTS, Faults, Violation
from kvbus.sim.forger_client import forging
from kvbus.sim.network import Network
from kvbus.sim.realtime_bus import BusServer, MemoryServer, RestartableNats
from kvbus.sim.realtime_engine import RealTimeEngine
from kvbus.sim.realtime_runtime import LogWatcher, RealTimeRuntime
from kvbus.sim.scenario import Scenario, Summary
from kvbus.sim.timing import REAL_TIME
from kvbus.sim.world import World
from kvbus.wire import Heartbeat

MEET_TIMEOUT_S = 15.0
Progress = Callable[[int], None]


def run_real_time(
    seed: int, faults: Faults, bus: str, transfers: int, progress: Progress = lambda ended: None
) -> Summary:
    """Run to the end; ``bus`` is ``nats`` or ``memory``. ``progress`` is called with how many requests have ended.

    Raises:
        Violation: an invariant was broken.
        KeyboardInterrupt: Ctrl-C or SIGTERM; everything has ended.
    """
    with tempfile.TemporaryDirectory(prefix="kvbus-sim-") as folder:
        return run(_run(seed, faults, bus, transfers, progress, Path(folder)))


async def _run(seed: int, faults: Faults, bus: str, transfers: int, progress: Progress, folder: Path) -> Summary:
    runtime = RealTimeRuntime(seed, faults)
    network = Network(runtime, REAL_TIME)
    world = World(runtime, REAL_TIME, Fabric(runtime, REAL_TIME))
    server: BusServer = RestartableNats(runtime, folder) if bus == "nats" else MemoryServer(runtime, network)
    engines: list[RealTimeEngine] = []

    def make_engine(own: Heartbeat) -> RealTimeEngine:
        engine = RealTimeEngine(world, runtime, own, server.make_bus, network)
        engines.append(engine)
        runtime.spawn(engine.start(), f"start-of-{own.engine}")
        return engine

    def all_met() -> bool:
        return all(one.knows(other.own) for one in engines for other in engines)

    with LogWatcher(runtime):
        try:
            scenario = Scenario(seed, world, transfers, make_engine, network, server)
            runtime.faults = NO_FAULTS
            await runtime.until(all_met, runtime.now + MEET_TIMEOUT_S)
            if not all_met():
                raise Violation(f"engines do not know each other after {MEET_TIMEOUT_S} s")
            runtime.faults = faults
            async with contextlib.AsyncExitStack() as forger:
                if faults.forge_every_s:
                    await forger.enter_async_context(forging(server.make_bus("forger"), runtime, seed))
                return await _perform(scenario, runtime, progress)
        finally:
            await runtime.close()
            await asyncio.gather(*(engine.close() for engine in engines), return_exceptions=True)
            server.close()


async def _perform(scenario: Scenario, runtime: RealTimeRuntime, progress: Progress) -> Summary:
    def done() -> bool:
        progress(scenario.workload.ended)
        return scenario.done

    busy_until = runtime.now + scenario.start()
    await runtime.until(lambda: done() and runtime.now >= busy_until, busy_until)
    runtime.faults = NO_FAULTS
    await runtime.until(done, runtime.now + REAL_TIME.settle_s)
    return scenario.check()
