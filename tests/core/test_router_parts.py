"""The router's pure parts: the two legs, and the choice of engines."""

from __future__ import annotations

from dataclasses import replace

from kvbus.messages import Heartbeat, Role, State
from kvbus.router.choose import Pair, choose
from kvbus.router.legs import decode_leg, new_transfer_id, prefill_leg, traceparent_for

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
BODY = {
    "prompt": "Hi",
    "max_tokens": 50,
    "min_tokens": 5,
    "stream": True,
    "stream_options": {"include_usage": True},
    "n": 2,
    "unknown": "kept",
}
P = Heartbeat("P", 1, 1, Role.PREFILL, State.READY, 1, "m", "h:1", compat=(("dtype", "a"),))
D = replace(P, engine="D", role=Role.DECODE, address="h:2")


def test_the_prefill_leg_asks_for_one_token_of_the_same_prompt() -> None:
    leg = prefill_leg(BODY, "t", PARENT)
    assert leg == {
        "prompt": "Hi",
        "max_tokens": 1,
        "stream": False,
        "n": 2,
        "unknown": "kept",
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": "t",
            "traceparent": PARENT,
        },
    }
    assert BODY["max_tokens"] == 50, "the client's body is left alone"
    assert prefill_leg({"max_completion_tokens": 9}, "t", PARENT)["max_completion_tokens"] == 1


def test_the_decode_leg_is_the_clients_request_with_a_hint() -> None:
    leg = decode_leg(BODY, "t", PARENT, "P")
    params = leg.pop("kv_transfer_params")
    assert leg == BODY
    assert (params["do_remote_prefill"], params["transfer_id"], params["prefill_engine_id"]) == (True, "t", "P")


def test_the_clients_trace_goes_on_and_junk_does_not() -> None:
    assert traceparent_for(PARENT) == PARENT
    for junk in (None, "", "junk", PARENT.replace("0af7", "zzzz"), PARENT + "\r\nX: y"):
        made = traceparent_for(junk)
        assert made != junk
        assert traceparent_for(made) == made
    assert new_transfer_id() != new_transfer_id()


def test_the_least_loaded_compatible_pair_is_chosen() -> None:
    q, e = replace(P, engine="Q"), replace(D, engine="E")
    assert choose([P, D], None, {}) == Pair(P, D)
    assert choose([P, q, D, e], "m", {"P": 2, "D": 1}) == Pair(q, e)
    assert choose([P, D], "other", {}) is None
    assert choose([P], None, {}) is None
    assert choose([P, replace(D, compat=(("dtype", "b"),))], None, {}) is None
    assert choose([P, replace(D, state=State.DRAINING)], None, {}) is None
    assert choose([P, replace(D, address="")], None, {}) is None


def test_an_engine_is_not_paired_with_itself() -> None:
    both = replace(P, role=Role.BOTH)
    assert choose([both], None, {}) is None
    assert choose([both, D], None, {}) == Pair(both, D)
