"""A decode engine takes no blocks before a prefill is as far as its configuration, or the request, wants it to be."""

from __future__ import annotations

import pytest
from support.fake_engine import Boot, FakeEngine, legs
from support.waiting import eventually_sync


@pytest.fixture
def pair(boot: Boot) -> tuple[FakeEngine, FakeEngine]:
    prefill, decode = boot("P"), boot("D", options={"registration": "jit"})
    eventually_sync(lambda: decode.knows(prefill) and prefill.knows(decode))
    return prefill, decode


def test_just_in_time_is_when_the_last_tokens_are_being_computed(pair: tuple[FakeEngine, FakeEngine]) -> None:
    prefill, decode = pair
    p_leg, d_leg = legs()
    p_leg.num_computed_tokens = 0
    decode.arrive(d_leg)
    prefill.arrive(p_leg)
    assert decode.scheduler.tokens_from_outside(d_leg, 0) is None
    prefill.step({p_leg.request_id: 64})
    p_leg.num_computed_tokens = 64
    assert decode.scheduler.tokens_from_outside(d_leg, 0) is None
    prefill.step({p_leg.request_id: 32})
    eventually_sync(lambda: decode.scheduler.tokens_from_outside(d_leg, 0) == 96)


def test_a_request_may_say_it_too(pair: tuple[FakeEngine, FakeEngine]) -> None:
    prefill, decode = pair
    p_leg, d_leg = legs()
    assert d_leg.kv_transfer_params is not None
    d_leg.kv_transfer_params["registration"] = "after_prefill"
    p_leg.num_computed_tokens = 0
    decode.arrive(d_leg)
    prefill.arrive(p_leg)
    prefill.step({p_leg.request_id: 96})
    other = legs("u")[1]
    assert other.kv_transfer_params is not None
    other.kv_transfer_params["registration"] = "eager"
    decode.arrive(other)
    assert decode.scheduler.tokens_from_outside(other, 0) == 96
    assert decode.scheduler.tokens_from_outside(d_leg, 0) is None
    p_leg.num_computed_tokens = 96
    prefill.scheduler.finished(p_leg, [[1, 2, 3]], prefilled=True)
    eventually_sync(lambda: decode.scheduler.tokens_from_outside(d_leg, 0) == 96)
    decode.scheduler.allocated(d_leg, [[10, 11, 12]], 96)
    eventually_sync(lambda: decode.has_received(d_leg.request_id))
    assert decode.planes[0].content == {10: "P:1", 11: "P:2", 12: "P:3"}


def test_a_prefill_that_failed_or_left_is_not_waited_for(pair: tuple[FakeEngine, FakeEngine]) -> None:
    prefill, decode = pair
    failed, left = legs("f"), legs("l")
    decode.arrive(failed[1])
    decode.arrive(left[1])
    assert decode.scheduler.tokens_from_outside(failed[1], 0) is None
    prefill.prefill(failed[0], [1, 2, 3], well=False)
    eventually_sync(lambda: decode.scheduler.tokens_from_outside(failed[1], 0) == 96)
    decode.scheduler.allocated(failed[1], [[10, 11, 12]], 96)
    eventually_sync(lambda: decode.has_received(failed[1].request_id))
    assert decode.received[failed[1].request_id] is False
    prefill.close()
    eventually_sync(lambda: decode.scheduler.tokens_from_outside(left[1], 0) == 0)


def test_a_deferred_request_that_is_aborted_frees_the_prefill(pair: tuple[FakeEngine, FakeEngine]) -> None:
    """A2."""
    prefill, decode = pair
    p_leg, d_leg = legs()
    decode.arrive(d_leg)
    assert decode.scheduler.tokens_from_outside(d_leg, 0) is None
    prefill.prefill(p_leg, [1, 2, 3])
    decode.scheduler.finished(d_leg, [], prefilled=False)
    eventually_sync(lambda: prefill.has_released(p_leg.request_id))
