"""A decode engine computes a prompt itself of which its prefix cache has nearly everything."""

from __future__ import annotations

import pytest
from kvbus_connector.short_tails import ShortTails
from support.fake_engine import Boot, FakeEngine, Request, legs
from support.waiting import eventually_sync

from kvbus.bus import MemoryBroker
from kvbus.wire import Cancel
from kvbus.wire import decode as decode_message


@pytest.fixture
def pair(boot: Boot) -> tuple[FakeEngine, FakeEngine]:
    prefill, decode = boot("P"), boot("D", options={"local_prefill_tokens": 32})
    eventually_sync(lambda: decode.knows(prefill) and prefill.knows(decode))
    return prefill, decode


def cancels(broker: MemoryBroker) -> list[Cancel]:
    """What decode engines have said of transfers that they do not want."""
    said = [decode_message(payload) for _, payload in list(broker.log)]
    return [message for message in said if isinstance(message, Cancel)]


def test_the_prefill_side_and_routers_are_told(pair: tuple[FakeEngine, FakeEngine], broker: MemoryBroker) -> None:
    prefill, decode = pair
    p_leg, d_leg = legs()
    assert decode.allocate(d_leg, [20], cached_tokens=64) == 0
    eventually_sync(lambda: cancels(broker))
    [said] = cancels(broker)
    assert (said.release, said.local_tokens) == (True, 32)
    assert said.reason == "only 32 of its tokens are not cached"
    prefill.prefill(p_leg, [1, 2, 3])
    eventually_sync(lambda: prefill.has_released(p_leg.request_id))
    assert decode.scheduler.node.counters["short_tails"] == 1
    assert not decode.received
    assert decode.planes[0].content == {}


@pytest.mark.parametrize("cached_tokens", [0, 63])
def test_a_longer_tail_is_transferred(pair: tuple[FakeEngine, FakeEngine], cached_tokens: int) -> None:
    _, decode = pair
    assert decode.allocate(legs()[1], [20], cached_tokens) == 96 - cached_tokens


def test_one_step_takes_no_more_than_so_many_tokens_of_all_requests(pair: tuple[FakeEngine, FakeEngine]) -> None:
    _, decode = pair

    def allocated(name: str, cached_tokens: int) -> int:
        return decode.allocate(legs(name)[1], [20], cached_tokens)

    assert (allocated("a", 76), allocated("b", 76), allocated("c", 84)) == (0, 20, 0)
    decode.step()
    assert allocated("d", 76) == 0


def test_a_prompt_that_is_cached_is_said_to_be(pair: tuple[FakeEngine, FakeEngine], broker: MemoryBroker) -> None:
    """The decode engine computes its last token: vLLM never takes that from the cache."""
    decode = pair[1]
    request = Request("cmpl-t-0-bbbbbbbb", legs()[1].kv_transfer_params, num_prompt_tokens=96)
    assert decode.allocate(request, [20], cached_tokens=95) == 0
    eventually_sync(lambda: cancels(broker))
    assert cancels(broker)[0].local_tokens == 1


def test_nothing_is_computed_that_is_not_there() -> None:
    tails = ShortTails(8)
    assert [tails.take(tokens) for tokens in (0, -1, 9, 8, 1)] == [False, False, False, True, False]
    assert not ShortTails(0).take(1)
