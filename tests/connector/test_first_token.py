"""Decode goes on from the token that prefill sampled: from vLLM's request to the place where the sampler looks."""

from __future__ import annotations

from typing import Any

import pytest
from kvbus_connector.first_token import FIRST_TOKENS, FirstTokens, first_token_of, taker_of, told_token
from support.fake_engine import Boot, FakeEngine, legs
from support.waiting import eventually_sync

from kvbus.wire import MAX_TOKEN_ID, NO_TOKEN

PROMPT = list(range(96))


def waiting(name: str, prompt: list[int] = PROMPT) -> int:
    """The token that the sampler finds for a request."""
    return FIRST_TOKENS.get(taker_of({"transfer_id": name, "takes_token": True}, prompt))


def transferred(
    boot: Boot, name: str, token: int, *, gives: bool = True, takes: bool = True, able: bool = True
) -> FakeEngine:
    """A pair of engines after one transfer."""
    options = {"first_token": able}
    source, sink = boot("P", options=options), boot("D", options=options)
    eventually_sync(lambda: sink.knows(source) and source.knows(sink))
    p_leg, d_leg = legs(name)
    for leg, asks in ((p_leg, gives), (d_leg, takes)):
        leg.prompt_token_ids = PROMPT
        leg.kv_transfer_params["takes_token"] = asks
    p_leg.output_token_ids = [token]
    source.scheduler.arrived(p_leg)
    sink.allocate(d_leg, [10, 11, 12])
    source.scheduler.finished(p_leg, [[1, 2, 3]], prefilled=True)
    eventually_sync(lambda: (source.step(), sink.has_received(d_leg.request_id))[1])
    assert sink.received[d_leg.request_id] is True
    return sink


def test_the_token_comes_with_the_kv(boot: Boot) -> None:
    transferred(boot, "comes", 77)
    assert waiting("comes") == 77
    assert waiting("comes", [*PROMPT[:-1], 5]) == NO_TOKEN, "another prompt under the same id"
    assert FIRST_TOKENS.on


@pytest.mark.parametrize("lacks", ["gives", "takes", "able"])
def test_no_token_comes_to_who_does_not_ask_or_cannot(boot: Boot, lacks: str) -> None:
    transferred(boot, f"no-{lacks}", 77, **{lacks: False})
    assert waiting(f"no-{lacks}") == NO_TOKEN
    assert FIRST_TOKENS.on is (lacks != "able")


def test_what_a_client_says_is_checked() -> None:
    asks = {"transfer_id": "t", "takes_token": True}
    assert taker_of(asks, [1, 2]) not in ("", taker_of(asks, [1, 3]), taker_of({**asks, "transfer_id": "u"}, [1, 2]))
    assert taker_of(asks, None) == "", "a prompt of embeddings"
    bad: Any
    for bad in ({"takes_token": True}, {"transfer_id": "t", "takes_token": 1}, {"transfer_id": 5, "takes_token": True}):
        assert taker_of(bad, [1, 2]) == ""
    assert told_token({"first_token": 5}) == 5
    for bad in (-1, True, "5", 5.0, None, [5], MAX_TOKEN_ID + 1):
        assert told_token({"first_token": bad}) == NO_TOKEN


@pytest.mark.parametrize(("tokens", "first"), [([], NO_TOKEN), ([3], 3), ([3, 4], NO_TOKEN), ([-1], NO_TOKEN)])
def test_a_prefill_has_one_token(tokens: list[int], first: int) -> None:
    request = legs()[0]
    request.kv_transfer_params["takes_token"] = True
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
