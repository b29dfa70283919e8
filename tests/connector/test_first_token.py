"""Decode goes on from the token that prefill sampled: from vLLM's request to the place where the sampler looks."""

from __future__ import annotations

from typing import Any

import pytest
from kvbus_connector.first_token import FIRST_TOKENS, FirstTokens, first_token_of, taker_of, told_token
from support.fake_engine import Boot, FakeEngine, legs
from support.waiting import eventually_sync

from kvbus.wire import MAX_TOKEN_ID, NO_TOKEN


def transferred(boot: Boot, name: str, takes: bool, token: int, able: bool = True) -> FakeEngine:
    """A pair of engines after one transfer."""
    options = {"first_token": able}
    source, sink = boot("P", options=options), boot("D", options=options)
    eventually_sync(lambda: sink.knows(source) and source.knows(sink))
    p_leg, d_leg = legs(name)
    if takes:
        d_leg.kv_transfer_params["takes_token"] = True
    p_leg.output_token_ids = [token]
    source.scheduler.arrived(p_leg)
    sink.allocate(d_leg, [10, 11, 12])
    source.scheduler.finished(p_leg, [[1, 2, 3]], prefilled=True)
    eventually_sync(lambda: (source.step(), sink.has_received(d_leg.request_id))[1])
    assert sink.received[d_leg.request_id] is True
    return sink


def test_the_token_comes_with_the_kv(boot: Boot) -> None:
    transferred(boot, "comes", takes=True, token=77)
    assert FIRST_TOKENS.get("comes") == 77


@pytest.mark.parametrize(("takes", "able"), [(False, True), (True, False)])
def test_no_token_comes_to_who_does_not_ask_or_cannot(boot: Boot, takes: bool, able: bool) -> None:
    transferred(boot, f"no-{takes}", takes=takes, token=77, able=able)
    assert FIRST_TOKENS.get(f"no-{takes}") == NO_TOKEN


def test_what_a_client_says_is_checked() -> None:
    assert taker_of({"transfer_id": "t", "takes_token": True}) == "t"
    bad: Any
    for bad in ({"takes_token": True}, {"transfer_id": "t", "takes_token": 1}, {"transfer_id": 5, "takes_token": True}):
        assert taker_of(bad) == ""
    assert told_token({"first_token": 5}) == 5
    for bad in (-1, True, "5", 5.0, None, [5], MAX_TOKEN_ID + 1):
        assert told_token({"first_token": bad}) == NO_TOKEN


@pytest.mark.parametrize(("tokens", "first"), [([], NO_TOKEN), ([3], 3), ([3, 4], NO_TOKEN), ([-1], NO_TOKEN)])
def test_a_prefill_has_one_token(tokens: list[int], first: int) -> None:
    request = legs()[0]
    request.output_token_ids = tokens
    assert first_token_of(request) == first


def test_tokens_that_nobody_takes_make_room() -> None:
    tokens = FirstTokens()
    for number in range(10_000):
        tokens.put(str(number), number)
    assert tokens.get("0") == NO_TOKEN
    assert tokens.get("9999") == 9999
    tokens.drop("9999")
    assert tokens.get("9999") == NO_TOKEN
