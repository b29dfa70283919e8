"""An operator drains an engine: it says so, keeps what it has, and is reported empty only when nobody needs its KV."""

from __future__ import annotations

import asyncio

import pytest
from support.fake_engine import Boot, FakeEngine, legs
from support.waiting import eventually

from kvbus.bus import MemoryBroker, MemoryBus
from kvbus.local.drain import DrainError, Outcome, drain, take_back
from kvbus.wire import State, Subjects

SUBJECTS = Subjects("default")


async def test_it_is_empty_when_nobody_needs_its_kv(broker: MemoryBroker, pair: tuple[FakeEngine, FakeEngine]) -> None:
    prefill, decode = pair
    said: list[str] = []
    p_leg, d_leg = legs()
    prefill.prefill(p_leg, [1, 2, 3])
    draining = asyncio.create_task(drain(MemoryBus(broker), SUBJECTS, "P", 20.0, said.append, force=True))
    await eventually(lambda: said == ["left for model m: prefill none; decode D", "P is draining: 1 requests left"])
    beat = decode.scheduler.node.membership.get("P")
    assert beat is not None
    assert beat.state is State.DRAINING
    decode.allocate(d_leg, [10, 11, 12])
    await eventually(lambda: decode.has_received(d_leg.request_id) and prefill.has_released(p_leg.request_id))
    outcome, report = await draining
    assert (outcome, report.requests, report.decode_left) == (Outcome.DRAINED, 0, ["D"])
    assert said[-1] == "P is drained: it has no requests, and nobody needs its KV; it can be stopped"


@pytest.mark.slow
async def test_what_cannot_be_drained_is_named(broker: MemoryBroker, pair: tuple[FakeEngine, FakeEngine]) -> None:
    with pytest.raises(DrainError, match="no engine 'X' is on the bus; engines: D, P"):
        await drain(MemoryBus(broker), SUBJECTS, "X", 20.0, print)
    pair[0].prefill(legs()[0], [1, 2, 3])
    with pytest.raises(DrainError, match="P is not empty after 0 s; it goes on draining"):
        await drain(MemoryBus(broker), SUBJECTS, "P", 0.3, print, force=True)
    pair[0].die()
    with pytest.raises(DrainError, match=r"no engine 'P' is on the bus|engine P does not answer"):
        await drain(MemoryBus(broker), SUBJECTS, "P", 20.0, print, force=True)


@pytest.mark.slow
async def test_the_last_of_its_kind_is_drained_only_by_who_means_it(
    broker: MemoryBroker, boot: Boot, pair: tuple[FakeEngine, FakeEngine]
) -> None:
    """S7."""
    with pytest.raises(DrainError, match="P is the last ready prefill engine: without it decode engines compute") as no:
        await drain(MemoryBus(broker), SUBJECTS, "P", 20.0, print)
    assert (no.value.outcome.status, no.value.report and no.value.report.decode_left) == (3, ["D"])
    with pytest.raises(DrainError, match=r"D is the last ready decode engine: .* 503 \(model m\); --force drains it"):
        await drain(MemoryBus(broker), SUBJECTS, "D", 20.0, print)
    assert state_of(pair[1], "P") is State.READY
    boot("Q")
    await eventually(lambda: pair[1].scheduler.node.membership.get("Q") is not None)
    outcome, report = await drain(MemoryBus(broker), SUBJECTS, "P", 20.0, print)
    assert (outcome, report.prefill_left) == (Outcome.DRAINED, ["Q"])


@pytest.mark.slow
async def test_it_is_taken_back(broker: MemoryBroker, pair: tuple[FakeEngine, FakeEngine]) -> None:
    said: list[str] = []
    await drain(MemoryBus(broker), SUBJECTS, "P", 20.0, said.append, force=True)
    assert state_of(pair[1], "P") is State.DRAINING
    outcome, _ = await take_back(MemoryBus(broker), SUBJECTS, "P", said.append)
    assert (outcome, said[-1]) == (Outcome.TAKEN_BACK, "P takes requests again")
    await eventually(lambda: state_of(pair[1], "P") is State.READY)
    await take_back(MemoryBus(broker), SUBJECTS, "P", said.append)  # as it is
    with pytest.raises(DrainError, match="no engine 'X'"):
        await take_back(MemoryBus(broker), SUBJECTS, "X", said.append)


def state_of(seen_by: FakeEngine, name: str) -> State | None:
    beat = seen_by.scheduler.node.membership.get(name)
    return beat.state if beat is not None else None
