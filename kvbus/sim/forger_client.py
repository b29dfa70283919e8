"""A client on the bus that hears everything and publishes what :mod:`kvbus.sim.forge` makes of it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

from kvbus.bus import Bus
from kvbus.sim.forge import Forger
from kvbus.sim.realtime_bus import unwrap, wrap
from kvbus.sim.realtime_engine import SUBJECTS
from kvbus.sim.realtime_runtime import RealTimeRuntime
from kvbus.sim.timing import REAL_TIME

HOST = "forger"
INTERVAL_S = 0.005
MAX_BURST = 64


@contextlib.asynccontextmanager
async def forging(bus: Bus, runtime: RealTimeRuntime, seed: int) -> AsyncIterator[None]:
    """Forge messages while this is entered, as often as the runtime's faults say at the time."""
    forger = Forger(random.Random(seed), late_s=REAL_TIME.block_lease_s)
    async with bus:
        await bus.subscribe(
            SUBJECTS.everything, lambda subject, payload: forger.hear(subject, unwrap(payload)[1], runtime.now)
        )
        task = asyncio.create_task(_forge(bus, runtime, forger), name="forger")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if not task.cancelled():
            task.result()


async def _forge(bus: Bus, runtime: RealTimeRuntime, forger: Forger) -> None:
    owed = 0.0
    while True:
        await asyncio.sleep(INTERVAL_S)
        every_s = runtime.faults.forge_every_s
        owed = min(owed + INTERVAL_S / every_s, MAX_BURST) if every_s else 0.0
        for _ in range(int(owed)):
            owed -= 1
            if (forged := forger.forge(runtime.now)) is not None and bus.publish(
                forged.subject, wrap(HOST, forged.payload)
            ):
                runtime.counts["messages forged"] += 1
