"""Another engine takes over: the router names another prefill engine, or sends the request to another decode engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.fake_engine import Boot, FakeEngine, Request, legs
from support.waiting import eventually_sync

from kvbus.bus import MemoryBroker, MemoryBus
from kvbus.wire import Rebind, RebindReply, decode, encode

P_BLOCKS, D_BLOCKS, NEW_BLOCKS = [1, 2, 3], [10, 11, 12], [20, 21, 22]


def rebind(broker: MemoryBroker, sink: str, transfer_id: str, attempt: int, source: str) -> str:
    """Ask as a router does; returns why not."""

    async def ask() -> str:
        async with MemoryBus(broker) as bus:
            asked = encode(Rebind(transfer_id, attempt, source))
            reply = decode(await bus.request(f"kvbus.v1.default.rebind.{sink}.router", asked, 2.0))
            assert isinstance(reply, RebindReply)
            return reply.refused

    return asyncio.run(ask())


def d_leg_of(transfer_id: str = "t", hint: str = "P", **params: Any) -> Request:
    _, leg = legs(transfer_id, hint)
    assert leg.kv_transfer_params is not None
    leg.kv_transfer_params.update(params)
    return leg


def ask_again(decode: FakeEngine, leg: Request) -> int | None:
    """What vLLM does in each step with what is in its queue."""
    decode.step()
    return decode.scheduler.tokens_from_outside(leg, 0)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_another_prefill_engine_takes_over(boot: Boot, broker: MemoryBroker, ranks: int) -> None:
    """kill -9 of the first one before it is done; decode keeps the request, with new blocks."""
    first, second, sink = boot("P", ranks=ranks), boot("Q", ranks=ranks), boot("D", ranks=ranks)
    eventually_sync(lambda: sink.knows(first) and sink.knows(second) and second.knows(sink))
    leg = d_leg_of(takeover_s=5)
    sink.allocate(leg, D_BLOCKS)
    sink.step()
    first.die()
    assert rebind(broker, "D", "t", 2, "Q") == ""
    second.prefill(legs()[0], P_BLOCKS)
    eventually_sync(lambda: sink.has_received(leg.request_id))
    assert sink.received.pop(leg.request_id) is False, "vLLM is told that the first attempt is over"
    assert ask_again(sink, leg) == 96
    sink.scheduler.allocated(leg, [NEW_BLOCKS], 96)
    sink.expect_again(leg.request_id)
    eventually_sync(lambda: sink.has_received(leg.request_id) and second.has_released(legs()[0].request_id))
    assert sink.received[leg.request_id] is True
    assert sink.planes[0].content == {20: "Q:1", 21: "Q:2", 22: "Q:3"}


def test_without_the_routers_word_decode_computes_itself(boot: Boot, broker: MemoryBroker) -> None:
    source, sink = boot("P"), boot("D")
    eventually_sync(lambda: sink.knows(source))
    leg = d_leg_of(takeover_s=0.5)
    sink.allocate(leg, D_BLOCKS)
    source.prefill(legs()[0], P_BLOCKS, well=False)
    eventually_sync(lambda: sink.has_received(leg.request_id))
    assert ask_again(sink, leg) is None, "the router may still name another one"
    eventually_sync(lambda: ask_again(sink, leg) == 0)
    assert rebind(broker, "D", "t", 2, "P") == "unknown transfer"


def test_a_router_that_has_no_prefill_engine_lets_decode_compute_at_once(boot: Boot, broker: MemoryBroker) -> None:
    source, sink = boot("P"), boot("D")
    eventually_sync(lambda: sink.knows(source))
    leg = d_leg_of(takeover_s=30)
    sink.allocate(leg, D_BLOCKS)
    sink.step()
    assert rebind(broker, "D", "t", 2, "") == ""
    eventually_sync(lambda: sink.has_received(leg.request_id))
    assert ask_again(sink, leg) == 0


def test_another_decode_engine_takes_over_without_a_second_prefill(boot: Boot) -> None:
    """kill -9 of the first one when the KV was there and the first token was not out."""
    source, first, second = boot("P"), boot("D", decodes_at_once=False), boot("E")
    eventually_sync(lambda: all(engine.knows(source) and source.knows(engine) for engine in (first, second)))
    p_leg, leg = legs()[0], d_leg_of()
    first.allocate(leg, D_BLOCKS)
    source.prefill(p_leg, P_BLOCKS)
    eventually_sync(lambda: first.has_received(leg.request_id) and source.step() is not None)
    first.die()
    again = d_leg_of(attempt=2)
    second.allocate(again, NEW_BLOCKS)
    eventually_sync(lambda: second.has_received(again.request_id))
    assert second.received[again.request_id] is True
    assert second.planes[0].content == {20: "P:1", 21: "P:2", 22: "P:3"}
    eventually_sync(lambda: second.step() is not None and source.has_released(p_leg.request_id))


def test_a_prefill_engine_that_was_named_for_nothing_is_told_so(boot: Boot, broker: MemoryBroker) -> None:
    """The KV had come when the router gave the request away, and vLLM did not know of it yet."""
    first, second, sink = boot("P"), boot("Q"), boot("D")
    eventually_sync(lambda: sink.knows(first) and sink.knows(second) and first.knows(sink))
    p_leg, leg, again = legs()[0], d_leg_of(takeover_s=5), legs()[0]
    sink.allocate(leg, D_BLOCKS)
    sink.step()
    first.prefill(p_leg, P_BLOCKS)
    eventually_sync(lambda: sink.planes[0].heard)
    assert rebind(broker, "D", "t", 2, "Q") == ""
    second.prefill(again, P_BLOCKS)
    eventually_sync(lambda: sink.has_received(leg.request_id) and second.has_released(again.request_id))
    assert sink.received[leg.request_id] is True


def test_what_cannot_be_rebound_is_refused_with_the_reason(boot: Boot, broker: MemoryBroker) -> None:
    source, sink = boot("P"), boot("D", decodes_at_once=False)
    eventually_sync(lambda: sink.knows(source))
    leg = d_leg_of(attempt=3)
    assert rebind(broker, "D", "t", 4, "Q") == "unknown transfer"
    sink.arrive(leg)
    assert rebind(broker, "D", "t", 3, "Q") == "attempt 3 is not later than 3"
    assert "cannot be an engine's id" in rebind(broker, "D", "t", 4, "a b")
    assert rebind(broker, "D", "t", 4, "P") == "", "though it has no blocks yet"
    assert sink.scheduler.tokens_from_outside(leg, 0) == 96
    assert rebind(broker, "D", "t", 4, "P") == "", "asked again, because the answer was lost"
    sink.allocate(leg, D_BLOCKS)
    source.prefill(legs()[0], P_BLOCKS)
    eventually_sync(lambda: sink.has_received(leg.request_id))
    assert rebind(broker, "D", "t", 5, "Q") == "its KV is here"
