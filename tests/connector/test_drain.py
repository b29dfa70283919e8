"""An operator drains an engine: it says so, keeps what it has, and is reported empty only when nobody needs its KV."""

from __future__ import annotations

import asyncio

import pytest
from support.fake_engine import FakeEngine, legs
from support.waiting import eventually

from kvbus.local.drain import DrainError, drain
from kvbus.memory_bus import MemoryBroker, MemoryBus
from kvbus.messages import State
from kvbus.subjects import Subjects

SUBJECTS = Subjects("default")


async def test_it_is_empty_when_nobody_needs_its_kv(broker: MemoryBroker, pair: tuple[FakeEngine, FakeEngine]) -> None:
    prefill, decode = pair
    said: list[str] = []
    p_leg, d_leg = legs()
    prefill.prefill(p_leg, [1, 2, 3])
    draining = asyncio.create_task(drain(MemoryBus(broker), SUBJECTS, "P", 20.0, said.append))
    await eventually(lambda: said == ["P is draining: 1 requests left"])
    beat = decode.scheduler.node.membership.get("P")
    assert beat is not None
    assert beat.state is State.DRAINING
    decode.allocate(d_leg, [10, 11, 12])
    await eventually(lambda: decode.has_received(d_leg.request_id) and prefill.has_released(p_leg.request_id))
    await draining
    assert said[-1] == "P is drained: it has no requests, and nobody needs its KV; it can be stopped"


async def test_what_cannot_be_drained_is_named(broker: MemoryBroker, pair: tuple[FakeEngine, FakeEngine]) -> None:
    with pytest.raises(DrainError, match="no engine 'X' is on the bus; engines: D, P"):
        await drain(MemoryBus(broker), SUBJECTS, "X", 20.0, print)
    pair[0].prefill(legs()[0], [1, 2, 3])
    with pytest.raises(DrainError, match="P is not empty after 0 s; it goes on draining"):
        await drain(MemoryBus(broker), SUBJECTS, "P", 0.3, print)
    pair[0].die()
    with pytest.raises(DrainError, match=r"no engine 'P' is on the bus|engine P does not answer"):
        await drain(MemoryBus(broker), SUBJECTS, "P", 20.0, print)
