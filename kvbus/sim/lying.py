"""A client of a life's bus that hears everything, and says what :mod:`kvbus.sim.forge` makes of it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

from kvbus.bus import Bus
from kvbus.sim.forge import Forger
from kvbus.sim.live_bus import unwrap, wrap
from kvbus.sim.live_engine import SUBJECTS
from kvbus.sim.live_stage import LiveStage
from kvbus.sim.stage import LIVE

HOST = "forger"
EVERY_S = 0.005
MOST_AT_ONCE = 64


@contextlib.asynccontextmanager
async def lying(bus: Bus, stage: LiveStage, seed: int) -> AsyncIterator[None]:
    """Lie while this is entered, as often as the stage's faults say at the time."""
    forger = Forger(random.Random(seed), late_s=LIVE.block_lease_s)
    async with bus:
        await bus.subscribe(
            SUBJECTS.everything, lambda subject, payload: forger.hear(subject, unwrap(payload)[1], stage.now)
        )
        task = asyncio.create_task(_lie(bus, stage, forger), name="forger")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if not task.cancelled():
            task.result()


async def _lie(bus: Bus, stage: LiveStage, forger: Forger) -> None:
    owed = 0.0
    while True:
        await asyncio.sleep(EVERY_S)
        every_s = stage.faults.forge_every_s
        owed = min(owed + EVERY_S / every_s, MOST_AT_ONCE) if every_s else 0.0
        for _ in range(int(owed)):
            owed -= 1
            if (forged := forger.forge(stage.now)) is not None and bus.publish(
                forged.subject, wrap(HOST, forged.payload)
            ):
                stage.counts["messages forged"] += 1
