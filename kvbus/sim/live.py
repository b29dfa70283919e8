"""A play in real time: real shells over a nats-server of its own, or over a bus in memory.

The seed gives the requests and the faults; what comes of them depends on the machine, so a life may differ from the
one before.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path

from kvbus.signals import run
from kvbus.sim.faults import CALM, Faults, Violation
from kvbus.sim.life import TRANSFERS_PER_LIFE, Account, Play
from kvbus.sim.live_bus import MemoryServer, RealServer, Server
from kvbus.sim.live_engine import LiveEngine
from kvbus.sim.live_stage import LiveStage, LogEar
from kvbus.sim.lying import lying
from kvbus.sim.plane import Fabric
from kvbus.sim.scene import Scene
from kvbus.sim.stage import LIVE
from kvbus.sim.weather import Weather
from kvbus.wire import Heartbeat

MEET_S = 15.0


def _ignore(_: int) -> None:
    pass


def live_once(
    seed: int, faults: Faults, bus: str, transfers: int = TRANSFERS_PER_LIFE, progress: Callable[[int], None] = _ignore
) -> Account:
    """Run one life to its end; ``bus`` is ``nats`` or ``memory``. ``progress`` is told how many requests have ended.

    Raises:
        Violation: a law was broken.
        KeyboardInterrupt: Ctrl-C or SIGTERM; everything has ended.
    """

    with tempfile.TemporaryDirectory(prefix="kvbus-sim-") as folder:
        return run(_live(seed, faults, bus, transfers, progress, Path(folder)))


async def _live(
    seed: int, faults: Faults, bus: str, transfers: int, progress: Callable[[int], None], folder: Path
) -> Account:
    stage = LiveStage(seed, faults)
    weather = Weather(stage, LIVE)
    scene = Scene(stage, LIVE, Fabric(stage), weather)
    server: Server = RealServer(stage, folder) if bus == "nats" else MemoryServer(stage, weather)
    engines: list[LiveEngine] = []

    def make(own: Heartbeat) -> LiveEngine:
        engine = LiveEngine(scene, stage, own, server.make_bus)
        engines.append(engine)
        stage.spawn(engine.start(), f"start-of-{own.engine}")
        return engine

    with LogEar(stage):
        try:
            play = Play(seed, scene, transfers, make, server.outage, server.freeze)
            stage.faults = CALM
            await stage.until(lambda: _acquainted(engines), stage.now + MEET_S)
            if not _acquainted(engines):
                raise Violation(f"engines do not know each other after {MEET_S} s")
            stage.faults = faults
            async with contextlib.AsyncExitStack() as liar:
                if faults.forge_every_s:
                    await liar.enter_async_context(lying(server.make_bus("forger"), stage, seed))
                return await _perform(play, stage, progress)
        finally:
            await stage.close()
            await asyncio.gather(*(engine.close() for engine in engines), return_exceptions=True)
            server.close()


async def _perform(play: Play, stage: LiveStage, progress: Callable[[int], None]) -> Account:
    def over() -> bool:
        progress(play.ended)
        return play.over()

    play.begin()
    busy_until = stage.now + play.pace.lead_s + play.busy_s
    await stage.until(lambda: over() and stage.now >= busy_until, busy_until)
    stage.faults = CALM
    await stage.until(over, stage.now + play.pace.calm_s)
    return play.take_stock()


def _acquainted(engines: list[LiveEngine]) -> bool:
    return all(one.knows(other.own) for one in engines for other in engines)
