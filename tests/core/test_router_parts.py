"""The router's pure parts: the two legs, and the choice of engines."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest
from multidict import CIMultiDict

from kvbus.errors import ConfigError
from kvbus.router.admission import FairQueue
from kvbus.router.fleet import Choice, affinity_of, prompt_tokens
from kvbus.router.fleet.circuit_breaker import FAILURES, FIRST_S, Breaker
from kvbus.router.fleet.loads import Loads
from kvbus.router.fleet.models import MAX_NAMES, ModelNames, read_list
from kvbus.router.http import Clients, Failure, Nothing, Token, error_event, look, whole_events
from kvbus.router.request import CHAT, GENERATE, MESSAGES, RESPONSES, Body, Dialect, must_be_alone
from kvbus.router.request.leg_bodies import decode_leg, prefill_leg, transfers_of
from kvbus.wire import Heartbeat, Role, State

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
TURNS = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
P = Heartbeat("P", 1, 1, Role.PREFILL, State.READY, 1, "m", "h:1", compat=(("dtype", "a"),))
D = replace(P, engine="D", role=Role.DECODE, address="h:2")


def test_the_prefill_leg_asks_for_one_token_of_the_same_prompt() -> None:
    leg = prefill_leg(BODY, "t", PARENT, CHAT)
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
    assert prefill_leg({"max_completion_tokens": 9}, "t", PARENT, CHAT)["max_completion_tokens"] == 1


def test_the_decode_leg_is_the_clients_request_with_a_hint() -> None:
    leg = decode_leg(BODY, "t", PARENT, "P", 1, 0.0)
    params = leg.pop("kv_transfer_params")
    assert leg == BODY
    assert (params["do_remote_prefill"], params["transfer_id"], params["prefill_engine_id"]) == (True, "t", "P")


@pytest.mark.parametrize(
    ("dialect", "body", "changed"),
    [
        (CHAT, {"max_completion_tokens": 9, "stop": "x"}, {"max_tokens": 1, "max_completion_tokens": 1}),
        (
            RESPONSES,
            {"input": "Hi", "max_output_tokens": 9, "store": True, "include": ["x"], "tools": []},
            {"input": "Hi", "max_output_tokens": 1, "store": False, "background": False, "tools": []},
        ),
        (
            MESSAGES,
            {"messages": [], "system": "s", "max_tokens": 9, "stop_sequences": ["x"]},
            {"messages": [], "system": "s", "max_tokens": 1},
        ),
        (
            GENERATE,
            {"token_ids": [1], "sampling_params": {"n": 2, "max_tokens": 9, "min_tokens": 2, "stop": ["x"]}},
            {"token_ids": [1], "sampling_params": {"n": 2, "max_tokens": 1}},
        ),
        (GENERATE, {"token_ids": [1], "sampling_params": 7}, {"token_ids": [1], "sampling_params": 7, "max_tokens": 1}),
    ],
)
def test_each_api_is_asked_for_one_token_in_its_own_words(dialect: Dialect, body: Body, changed: Body) -> None:
    """R16."""
    leg = prefill_leg({**body, "stream": True}, "t", "", dialect)
    assert leg.pop("kv_transfer_params")["transfer_id"] == "t"
    assert leg == {**changed, "stream": False}


def test_what_vllm_keeps_in_one_engine_is_served_by_one() -> None:
    """R16: a response in the background, one that goes on from another, and tools that vLLM runs itself."""
    function = {"type": "function", "name": "f"}
    for more in ({"background": True}, {"previous_response_id": "r"}, {"tools": [function, {"type": "mcp"}]}):
        assert must_be_alone({"input": "Hi", **more}, RESPONSES)
        assert not must_be_alone({"messages": [], **more}, CHAT)
    for more in ({"tools": [function]}, {"tools": 7}, {"background": False}, {"store": True}):
        assert not must_be_alone({"input": "Hi", **more}, RESPONSES)
    assert must_be_alone({"sampling_params": {"prompt_logprobs": 0}}, GENERATE)
    assert not must_be_alone({"sampling_params": None, "prompt_logprobs": 0}, GENERATE)


def test_transfers_of_samples_in_the_generate_api() -> None:
    assert transfers_of({"n": 3, "sampling_params": {"n": 2}}, "t", GENERATE) == ["t", "t#1.0"]
    assert transfers_of({"token_ids": [1]}, "t", GENERATE) == ["t"]


def test_prompts_of_every_api_have_a_size_and_a_session() -> None:
    turns = [{"role": "user", "content": "x" * 400}]
    for dialect, body in (
        (RESPONSES, {"input": "x" * 400}),
        (RESPONSES, {"input": turns}),
        (MESSAGES, {"messages": turns}),
    ):
        assert prompt_tokens(dialect.as_prompt(body)) > 99
        assert affinity_of(dialect.as_prompt(body), None)
    assert prompt_tokens(GENERATE.as_prompt({"token_ids": [5] * 70})) == 70
    assert affinity_of(RESPONSES.as_prompt({"input": turns}), None) == affinity_of({"messages": turns}, None)


def choice(*engines: Heartbeat, loads: Loads | None = None, seed: int = 0, **more: Any) -> Choice:
    return Choice(engines, loads or Loads(lambda: 0.0), Random(seed), **more)


def test_only_what_is_ready_and_fits_is_chosen() -> None:
    assert (choice(P, D).source(None), choice(P, D).sink(P)) == (P, D)
    for engines in (
        [P],
        [P, replace(D, compat=(("dtype", "b"),))],
        [P, replace(D, state=State.DRAINING)],
        [P, replace(D, address="")],
    ):
        assert choice(*engines).source(None) is None


def test_ranks_are_no_party_to_a_transfer_where_they_cannot_be_named() -> None:
    """R17: /v1/responses does not read the header, so both hints would name the wrong ranks."""
    ranked_p, ranked_d = replace(P, engine="P_dp0", data_parallel=True), replace(D, engine="D_dp0", data_parallel=True)
    assert choice(ranked_p, D).source(None) == ranked_p
    assert choice(ranked_p, D, ranked=False).source(None) is None
    assert choice(P, ranked_d, ranked=False).source(None) is None
    assert choice(P, ranked_d, ranked=False).sink(None) == ranked_d, "it computes the prompt itself"
    for seed in range(8):
        assert choice(ranked_p, P, ranked_d, D, ranked=False, seed=seed).sink(P) == D


def test_a_name_is_good_for_the_engine_that_says_so() -> None:
    """R4."""
    names, again = ModelNames(), replace(D, incarnation=2)
    names.learn(D, ["m", "alias", "lora"])
    names.learn(P, ["m"])
    assert names.serving([P, D], "lora") == [D]
    assert names.serving([P, D], "m") == names.serving([P, D], None) == [P, D]
    assert names.serving([again], "lora") == [], "another one of that name has to say it itself"
    names.forget_name(D, "lora")
    names.forget_name(again, "m")
    assert names.of(D) == {"m", "alias"}
    names.learn(D, [f"lora-{number}" for number in range(5000)])
    assert len(names.of(D)) == MAX_NAMES + 1
    names.forget("D", 1)
    assert names.of(D) == {"m"}, "what its heartbeat says"


@pytest.mark.parametrize(
    ("body", "ids"),
    [
        (b'{"data":[{"id":"a"},{"id":"b"}]}', ["a", "b"]),
        (b'{"data":[{"id":7},{"id":""},{"id":"%s"},7,{}]}' % (b"x" * 300), []),
        (b'{"data":{}}', None),
        (b"[]", None),
        (b"[" * 100_000, None),
        (b"\xff", None),
    ],
)
def test_a_list_of_models_is_read_with_care(body: bytes, ids: list[str] | None) -> None:
    cards = read_list(body)
    assert (None if cards is None else [card["id"] for card in cards]) == ids


def test_an_engine_is_not_paired_with_itself() -> None:
    both = replace(P, role=Role.BOTH)
    assert choice(both).source(None) is None
    assert choice(both, D).source(None) == both
    assert choice(both, D).sink(both) == D


def test_the_less_loaded_of_two_is_chosen_whatever_chance_says() -> None:
    q, e = replace(P, engine="Q"), replace(D, engine="E")
    busy_p, busy_d = replace(P, queued_tokens=10), replace(D, requests=3)
    full = replace(D, free_blocks=1, total_blocks=100)
    for seed in range(20):
        assert choice(busy_p, q, D, seed=seed).source(None) == q
        assert choice(P, busy_d, e, seed=seed).sink(P) == e
        assert choice(P, full, replace(e, requests=8), seed=seed).sink(P).engine == "E"  # type: ignore[union-attr]


def test_chance_spreads_over_equals_and_the_most_loaded_of_many_gets_nothing() -> None:
    sources = [replace(P, engine=f"P{number}", queued_tokens=number) for number in range(4)]
    chosen = {choice(*sources, D, seed=seed).source(None) for seed in range(50)}
    assert chosen == set(sources[:3])


def test_what_was_sent_since_the_last_heartbeat_is_added_to_what_it_says() -> None:
    loads = Loads(lambda: 0.0)
    beat = replace(P, queued_tokens=100, requests=1)
    with loads.counted(beat, 50):
        assert (loads.prefill(beat), loads.requests(beat)) == (150, 2)
        later = replace(beat, number=2, queued_tokens=120, requests=2)
        assert (loads.prefill(later), loads.requests(later)) == (120, 2), "the engine counts it itself now"
        assert loads.prefill(replace(later, queued_tokens=0, requests=0)) == 50, "or does not count at all"
        assert loads.prefill(replace(P, incarnation=2)) == 0, "another one of that name has not got it"
    assert loads.prefill(beat) == 100


def test_an_engine_that_did_not_answer_is_chosen_last_until_it_is_heard() -> None:
    q, loads = replace(P, engine="Q", queued_tokens=1000), Loads(lambda: 0.0)
    loads.suspect(P)
    assert choice(P, q, D, loads=loads).source(None) == q
    assert choice(P, D, loads=loads).source(None) == P, "better than none"
    assert choice(replace(P, number=2), q, D, loads=loads).source(None) == replace(P, number=2)


def test_a_session_goes_where_it_was_unless_that_is_much_busier() -> None:
    sources = [replace(P, engine=f"P{number}") for number in range(5)]
    homes = {name: choice(*sources, D, session=name).source(None) for name in map(str, range(50))}
    assert set(homes.values()) == set(sources), "sessions are spread"
    for name, home in homes.items():
        assert home is not None
        left = [each for each in sources if each.engine != "P3"]
        again = choice(*left, D, session=name, seed=1).source(None)
        assert again == home or home.engine == "P3", "who was not on the lost engine stays where it was"
        busy = [replace(each, queued_tokens=500 if each == home else 0) for each in sources]
        stays, goes = (choice(*busy, D, session=name, tokens=tokens).source(None) for tokens in (500, 499))
        assert stays is not None
        assert goes is not None
        assert (stays.engine == home.engine, goes.engine == home.engine) == (True, False)


def test_a_decode_engine_with_its_fill_gets_more_only_if_there_is_no_other() -> None:
    loads, e = Loads(lambda: 0.0), replace(D, engine="E", requests=9)
    with loads.counted(D, 1):
        assert choice(P, D, e, loads=loads, most=1).sink(P) == e
        assert choice(P, D, loads=loads, most=1).sink(P) == D


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"messages": TURNS[:2]}, {"messages": TURNS}, True),
        ({"messages": TURNS}, {"messages": [TURNS[0], {"role": "user", "content": "else"}]}, False),
        ({"prompt": "x" * 600}, {"prompt": "x" * 900}, True),
        ({"prompt": [1] * 200}, {"prompt": [1] * 300}, True),
        ({"prompt": ["a", "b"]}, {"prompt": ["a"]}, True),
        ({"prompt": "a", "user": "u"}, {"prompt": "b", "user": "u"}, True),
        ({"prompt": "a", "prompt_cache_key": "k"}, {"prompt": "a"}, False),
    ],
)
def test_what_belongs_together(one: Body, other: Body, same: bool) -> None:
    assert (affinity_of(one, None) == affinity_of(other, None)) is same
    assert affinity_of(one, "s") == affinity_of(other, "s") == "s"


@pytest.mark.parametrize(
    "body", [{}, {"prompt": None}, {"prompt": []}, {"prompt": [None]}, {"messages": [3]}, {"prompt": 7}]
)
def test_junk_has_a_size_and_perhaps_a_session(body: Body) -> None:
    assert prompt_tokens(body) >= 0
    assert isinstance(affinity_of(body, None), str)


def headers_of(*headers: tuple[str, str]) -> CIMultiDict[str]:
    return CIMultiDict(headers)


class TestClients:
    """R12: who a request is from, and whose turn it takes."""

    ONE, OTHER = headers_of(("Authorization", "Bearer a")), headers_of(("Authorization", "Bearer b"))

    def test_a_key_that_engines_check_is_whose_turn_it_is(self) -> None:
        payer = partial(Clients().payer, keys_checked=True)
        assert payer(self.ONE, "1.2.3.4") == payer(headers_of(*self.ONE.items(), ("X-Session-Id", "fresh")), "5.6.7.8")
        assert payer(self.ONE, "1.2.3.4") != payer(self.OTHER, "1.2.3.4")
        assert payer(headers_of(("x-api-key", "k")), None) != payer(headers_of(), None) == ""
        assert payer(headers_of(("X-Session-Id", "fresh")), "1.2.3.4") == "1.2.3.4"
        assert "a" * 40 not in payer(headers_of(("Authorization", "a" * 40)), None), "no key is kept"

    def test_one_that_nobody_checks_buys_nothing(self) -> None:
        payer = partial(Clients(["10.0.0.0/8"]).payer, keys_checked=False)
        assert payer(self.ONE, "1.2.3.4") == payer(self.OTHER, "1.2.3.4") == "1.2.3.4"
        assert payer(self.ONE, "10.0.0.1") != payer(self.OTHER, "10.0.0.1"), "our own proxy has checked it"

    @pytest.mark.parametrize(
        ("remote", "told", "address"),
        [
            ("1.2.3.4", (), "1.2.3.4"),
            ("1.2.3.4", ("5.6.7.8",), "1.2.3.4"),
            ("10.0.0.1", ("5.6.7.8",), "5.6.7.8"),
            ("::ffff:10.0.0.1", ("5.6.7.8",), "5.6.7.8"),
            ("10.0.0.1", ("6.6.6.6, 5.6.7.8, 10.0.0.2",), "5.6.7.8"),
            ("10.0.0.1", ("6.6.6.6", "5.6.7.8,10.0.0.2"), "5.6.7.8"),
            ("10.0.0.1", ("10.0.0.3",), "10.0.0.3"),
            ("10.0.0.1", ("5.6.7.8, junk",), "10.0.0.1"),
            ("10.0.0.1", ("",), "10.0.0.1"),
            ("10.0.0.1", (), "10.0.0.1"),
            ("fd00::1", ("2001:db8::1",), "2001:db8::1"),
            (None, ("5.6.7.8",), ""),
        ],
    )
    def test_only_our_own_proxies_are_believed(self, remote: str | None, told: tuple[str, ...], address: str) -> None:
        clients = Clients(["10.0.0.0/8", "fd00::1"])
        headers = headers_of(*(("X-Forwarded-For", line) for line in told))
        assert clients.address(headers, remote) == address

    def test_what_is_no_network_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"--trusted-proxy='10.0.0.1/8'; allowed: an address, or a network such"):
            Clients(["10.0.0.1/8"])


class TestBreaker:
    """R20: an engine that lives and answers only errors."""

    def test_heartbeats_alone_do_not_bring_it_back(self) -> None:
        breaker = Breaker()
        for number in range(FAILURES):
            assert not breaker.is_open(replace(P, number=number + 2), 0.0)
            breaker.fail(replace(P, number=number + 2), 0.0)
        later = replace(P, number=99)
        assert breaker.is_open(later, FIRST_S - 0.1)
        assert not breaker.is_open(later, FIRST_S), "it is tried again"

    def test_each_further_failure_doubles_the_time_and_an_answer_ends_it(self) -> None:
        breaker, paused = Breaker(), []
        for _ in range(FAILURES + 9):
            breaker.fail(P, 100.0)
            paused.append(
                next(at for at in range(100, 200) if not breaker.is_open(replace(P, number=9), float(at))) - 100
            )
        assert paused == [0, 0, 1, 2, 4, 8, 16, 30, 30, 30, 30, 30]
        breaker.succeed(P)
        assert not breaker.is_open(P, 100.0)

    def test_a_new_incarnation_begins_anew(self) -> None:
        breaker = Breaker()
        for _ in range(FAILURES):
            breaker.fail(P, 0.0)
        assert not breaker.is_open(replace(P, incarnation=P.incarnation + 1), 0.0)

    def test_with_nobody_else_it_is_tried(self) -> None:
        loads = Loads(lambda: 0.0)
        for _ in range(FAILURES):
            loads.suspect(P)
        assert choice(P, D, loads=loads).source(None) == P


def test_the_size_of_prompts() -> None:
    assert prompt_tokens({"prompt": [5] * 70}) == 70
    assert prompt_tokens({"prompt": [[5] * 70, [6] * 30]}) == 100
    assert prompt_tokens({"prompt": "x" * 400}) == 101
    assert prompt_tokens({"prompt": ["x" * 40, "y" * 40]}) == 22


def test_who_asks_for_the_prompts_own_logprobs_is_served_by_one_engine() -> None:
    for body in ({"prompt_logprobs": 0}, {"echo": True, "logprobs": 0}, {"use_beam_search": True}):
        assert must_be_alone(body, CHAT)
        assert choice(P, D, alone=True).source(None) is None
    for body in ({"logprobs": 3}, {"echo": True}, {"echo": True, "logprobs": None}, {"prompt_logprobs": None}):
        assert not must_be_alone(body, CHAT)


def test_turns_go_round() -> None:
    turns: FairQueue[int] = FairQueue(6)
    for payer, item in (("a", 1), ("a", 2), ("a", 3), ("b", 4), ("c", 5)):
        assert turns.push(payer, item)
    turns.remove("c", 5)
    turns.remove("c", 5)
    assert turns.push("c", 6)
    assert turns.push("c", 7)
    assert not turns.push("d", 8), "six are enough"
    assert [turns.pop() for _ in range(7)] == [1, 4, 6, 2, 7, 3, None]
    assert len(turns) == 0


ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
TEXT = b'data: {"choices":[{"text":" a"}]}\n\n'


@pytest.mark.parametrize(
    ("head", "found"),
    [
        (b"", Nothing()),
        (b": ping\n\n", Nothing()),
        (ROLE, Nothing()),
        (TEXT[:-3], Nothing()),
        (ROLE + TEXT, Token()),
        (b'data: {"choices":[{"text":"","finish_reason":"stop"}]}\n', Token()),
        (b'data: {"choices":[{"delta":{"tool_calls":[{}]}}]}\n', Token()),
        (b'data: {"choices":[{"delta":{"reasoning_content":"x"}}]}\n', Token()),
        (b"data: [DONE]\n\n", Token()),
        (b"data: 7\n", Token()),
        (b'event: x\ndata: {"choices":[],"usage":{}}\n', Token()),
        (b"x" * ((1 << 20) + 1), Token()),
        (b'event: response.created\ndata: {"type":"response.created","response":{}}\n\n', Nothing()),
        (b'event: response.in_progress\ndata: {"type":"response.in_progress"}\n\n', Nothing()),
        (b'event: response.output_item.added\ndata: {"type":"response.output_item.added"}\n\n', Token()),
        (b'event: message_start\ndata: {"type":"message_start","message":{"content":[]}}\n\n', Nothing()),
        (b'event: ping\ndata: {"type":"ping"}\n\n', Nothing()),
        (b'event: content_block_start\ndata: {"type":"content_block_start","index":0}\n\n', Token()),
        (b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn"}}\n\n', Token()),
    ],
)
def test_where_the_first_token_is(head: bytes, found: object) -> None:
    assert look(head) == found


def test_a_failure_in_a_stream_has_its_status() -> None:
    failed = look(ROLE + b'data: {"error": {"message": "no", "code": 503}}\n\n')
    assert isinstance(failed, Failure)
    assert (failed.status, failed.message, json.loads(failed.body)["error"]["code"]) == (503, "no", 503)
    assert isinstance(odd := look(b'data: {"error": {"code": "x"}}\n'), Failure)
    assert odd.status == 500


def test_a_failure_in_the_streams_of_other_apis() -> None:
    for event in (
        b'{"type":"error","error":{"type":"internal_error","message":"no"}}',
        b'{"type":"error","message":"no"}',
    ):
        failed = look(b"event: error\ndata: " + event + b"\n\n")
        assert isinstance(failed, Failure)
        assert (failed.status, failed.message, failed.body) == (500, "no", json.dumps(json.loads(event)).encode())
    assert error_event(b"{}", named=True) == b"\nevent: error\ndata: {}\n\n"
    assert error_event(b"{}") == b"\ndata: {}\n\n"


def test_half_an_event_is_held_back() -> None:
    for event in (TEXT, TEXT.replace(b"\n", b"\r\n"), b"event: x\n" + TEXT):
        assert whole_events(event + b"data: {") == (event, b"data: {")
        assert whole_events(event + event[:-2]) == (event, event[:-2])
    for half in (b"", b"data", b"event: x\n"):
        assert whole_events(half) == (b"", half)
