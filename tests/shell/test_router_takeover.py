"""Taking over, over HTTP: engines die before, in and after the first token, and what the client sees of it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from support.fronts import END, ROLE_EVENT, SUBJECTS, TOKEN_EVENT, FakeApi, Front, fronted
from support.waiting import eventually

from kvbus.router import proxy
from kvbus.router.request import DECODE_HEADER, PREFILL_HEADER, reply, streaming
from kvbus.router.request.reply import ATTEMPT_HEADER
from kvbus.router.settings import Settings
from kvbus.wire import Cancel, RegistrationAck, TransferFailed, encode


def first_asked(front: Front, *names: str) -> FakeApi | None:
    return next((front[name] for name in names if front[name].requests), None)


async def asked(front: Front, *names: str) -> tuple[FakeApi, FakeApi]:
    """The one of two engines that got the request, and the other one."""
    await eventually(lambda: first_asked(front, *names))
    one = first_asked(front, *names)
    assert one is not None
    return one, next(front[name] for name in names if name != one.name)


def hold(front: Front, names: str) -> None:
    for name in names:
        front[name].hold.clear()


def hold_no_more(front: Front, names: str) -> None:
    for name in names:
        front[name].hold.set()


@pytest.mark.parametrize("how", ["killed", "status 503", "left", "failed WRITE", "refused"])
async def test_another_prefill_engine_takes_over(how: str) -> None:
    async with fronted("P", "Q", "D") as front:
        hold(front, "PQD")
        asking = front.ask()
        lost, other = await asked(front, "P", "Q")
        await eventually(lambda: front["D"].requests)
        if how == "killed":
            lost.die()
        elif how == "left":
            await front.leave(lost.name)
        elif how in ("failed WRITE", "refused"):
            transfer = lost.params[0]["transfer_id"]
            about = (f"{transfer}#0.1", lost.name, 1, 1, 0, 1, "r")
            failed = TransferFailed(*about, "x") if how == "failed WRITE" else RegistrationAck(*about, "full")
            subject = SUBJECTS.transfers("D", lost.name) if how == "failed WRITE" else SUBJECTS.acks("D", lost.name)
            front.broker.route(subject, encode(failed))
        else:
            lost.status = 503
            lost.hold.set()
        await eventually(lambda: other.requests)
        other.hold.set()
        front["D"].hold.set()
        answer = await asking
        assert (answer.status, answer.text) == (200, '{"ok": true}')
        assert (answer.headers[PREFILL_HEADER], answer.headers[ATTEMPT_HEADER]) == (other.name, "2")
        [decode], [first], [second] = front["D"].params, lost.params, other.params
        assert first["transfer_id"] == second["transfer_id"] == decode["transfer_id"]
        assert (decode["attempt"], decode["takeover_s"], decode["prefill_engine_id"]) == (1, 5.0, lost.name)
        assert [(each.transfer_id, each.attempt, each.source_engine) for each in front.rebinds] == [
            (decode["transfer_id"], 2, other.name)
        ]
        assert {(each.attempt, each.sink_engine) for each in front.cancels} == {(1, "D")}, "what the lost one may have"
        assert await front.metric('kvbus_router_takeovers_total{lost="prefill"}') == 1


def computes_itself(front: Front, transfer_id: str, attempt: int = 1) -> None:
    """The decode engine D says so on the bus, of one transfer."""
    cancel = Cancel(transfer_id, attempt, "D", 1, "r", "only 3 of its tokens are not cached", local_tokens=3)
    front.broker.route(SUBJECTS.cancels("P", "D"), encode(cancel))


async def test_a_prefill_that_decode_does_not_need_is_ended() -> None:
    async with fronted("P", "D") as front:
        hold(front, "PD")
        asking = front.ask()
        await eventually(lambda: front["P"].requests and front["D"].requests)
        computes_itself(front, front["D"].params[0]["transfer_id"], attempt=2)  # of no attempt that there is
        computes_itself(front, front["D"].params[0]["transfer_id"])
        await eventually(lambda: front["P"].cancelled == 1)
        front["D"].hold.set()
        answer = await asking
        assert (answer.status, answer.text) == (200, '{"ok": true}')
        assert await front.metric('kvbus_router_alone_total{why="decode"}') == 1
        assert await front.metric("kvbus_router_takeovers_total") == 0


async def test_of_two_samples_both_must_not_need_it() -> None:
    async with fronted("P", "D") as front:
        hold(front, "PD")
        asking = front.ask(n=2)
        await eventually(lambda: front["P"].requests and front["D"].requests)
        transfer_id = front["D"].params[0]["transfer_id"]
        computes_itself(front, transfer_id)
        computes_itself(front, f"{transfer_id}#7.0")  # of no sample that there is
        await front.metric("kvbus_router_alone_total")  # both are heard by now
        assert front["P"].cancelled == 0
        computes_itself(front, f"{transfer_id}#1.0")
        await eventually(lambda: front["P"].cancelled == 1)
        front["D"].hold.set()
        assert (await asking).status == 200


async def test_a_frozen_engines_leg_is_dropped() -> None:
    async with fronted("P", "Q", "D") as front:
        hold(front, "PQD")
        asking = front.ask()
        lost, other = await asked(front, "P", "Q")
        await front.leave(lost.name)
        await eventually(lambda: other.requests)
        assert lost.cancelled == 1, "should it thaw, it has nothing to do"
        front["D"].hold.set()
        assert (await asking).status == 200


async def test_the_question_is_asked_again_while_the_decode_leg_is_on_its_way() -> None:
    async with fronted("P", "Q", "D") as front:
        front.refuse[""] = ["unknown transfer"] * 3
        hold(front, "PQD")
        asking = front.ask()
        lost, other = await asked(front, "P", "Q")
        lost.die()
        await eventually(lambda: other.requests)
        assert len(front.rebinds) == 4
        front["D"].hold.set()
        assert (await asking).status == 200


async def test_where_decode_has_the_kv_no_second_prefill_is_sent() -> None:
    async with fronted("P", "Q", "D") as front:
        front.refuse[""] = ["its KV is here"]
        hold(front, "PQD")
        asking = front.ask()
        lost, other = await asked(front, "P", "Q")
        lost.die()
        await eventually(lambda: front.rebinds)
        front["D"].hold.set()
        assert (await asking).status == 200
        assert other.requests == []


async def test_of_an_old_request_that_decode_does_not_know_any_more_it_is_asked_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is not streamed, and has its first token long since."""
    monkeypatch.setattr("kvbus.router.request.transfer_messages.PATIENCE_S", 0.0)
    async with fronted("P", "Q", "D") as front:
        front.refuse[""] = ["unknown transfer"] * 9
        hold(front, "D")
        asking = front.ask()
        lost, other = await asked(front, "P", "Q")
        await front.leave(lost.name)
        await eventually(lambda: front.rebinds)
        front["D"].hold.set()
        assert (await asking).status == 200
        assert (len(front.rebinds), other.requests) == (1, [])
        assert await front.metric("kvbus_router_takeovers_total") == 0


async def test_a_client_that_leaves_in_the_stream_ends_the_decode_leg() -> None:
    async with fronted("P", "D") as front:
        front["D"].stream = [TOKEN_EVENT, END]
        front["D"].hold_rest.clear()
        answer = await front.client.post("/v1/chat/completions", json={"stream": True})
        await answer.content.readuntil(b"\n\n")
        answer.close()
        await eventually(lambda: front["D"].cancelled == 1)


async def test_decode_is_told_when_there_is_nobody_to_wait_for() -> None:
    async with fronted("P", "Q", "D") as front:
        hold(front, "PQD")
        asking = front.ask()
        lost, other = await asked(front, "P", "Q")
        await front.leave(other.name)
        lost.die()
        await eventually(lambda: front.rebinds)
        assert [(each.attempt, each.source_engine) for each in front.rebinds] == [(2, "")]
        front["D"].hold.set()
        answer = await asking
        assert answer.status == 200
        assert PREFILL_HEADER not in answer.headers


async def test_a_single_prefill_engine_is_not_waited_for() -> None:
    async with fronted("P", "D") as front:
        assert (await front.ask()).status == 200
        assert front["D"].params[0]["takeover_s"] == 0


@pytest.mark.parametrize("how", ["killed", "status 500", "left", "killed in the stream", "error in the stream"])
async def test_another_decode_engine_takes_over_without_a_second_prefill(how: str) -> None:
    async with fronted("P", "D", "E") as front:
        hold(front, "DE")
        stream = "stream" in how
        for api in (front["D"], front["E"]):
            api.stream = [ROLE_EVENT, TOKEN_EVENT, END]
        asking = front.ask(stream=stream)
        lost, other = await asked(front, "D", "E")
        await eventually(lambda: front["P"].requests)
        if how == "killed":
            lost.die()
        elif how == "left":
            await front.leave(lost.name)
        elif how == "killed in the stream":
            lost.hold_rest.clear()
            lost.hold.set()
            await asyncio.sleep(0.05)  # who speaks has been said
            lost.die()
        elif how == "error in the stream":
            lost.stream = [ROLE_EVENT, b'data: {"error": {"message": "EngineCore died", "code": 500}}\n\n', END]
            lost.hold.set()
        else:
            lost.status = 500
            lost.hold.set()
        await eventually(lambda: other.requests)
        other.hold.set()
        answer = await asking
        assert answer.status == 200
        assert answer.text == ((ROLE_EVENT + TOKEN_EVENT + END).decode() if stream else '{"ok": true}')
        assert (answer.headers[DECODE_HEADER], answer.headers[ATTEMPT_HEADER]) == (other.name, "2")
        assert len(front["P"].requests) == 1
        [first], [second] = lost.params, other.params
        assert first["transfer_id"] == second["transfer_id"]
        assert (first["attempt"], second["attempt"], second["prefill_engine_id"]) == (1, 2, "P")
        assert front.cancels == [], "the KV is needed"
        assert await front.metric('kvbus_router_takeovers_total{lost="decode"}') == 1


async def test_what_took_over_and_is_not_taken_is_released_under_its_attempt() -> None:
    async with fronted("P", "D", "E") as front:
        hold(front, "DE")
        asking = front.ask()
        lost, other = await asked(front, "D", "E")
        lost.die()
        await eventually(lambda: other.requests)
        asking.cancel()
        await eventually(lambda: front.cancels)
        assert [(each.attempt, each.sink_engine) for each in front.cancels] == [(2, other.name)]
        await eventually(lambda: other.cancelled == 1)


async def test_both_engines_are_lost() -> None:
    async with fronted("P", "Q", "D", "E") as front:
        hold(front, "PQDE")
        asking = front.ask()
        source, other_source = await asked(front, "P", "Q")
        sink, other_sink = await asked(front, "D", "E")
        source.die()
        sink.die()
        await eventually(lambda: other_source.requests and other_sink.requests)
        other_source.hold.set()
        other_sink.hold.set()
        answer = await asking
        assert answer.status == 200
        assert other_sink.params[0]["prefill_engine_id"] == other_source.name
        assert int(answer.headers[ATTEMPT_HEADER]) == other_sink.params[0]["attempt"] in (2, 3)


async def test_a_stream_that_has_begun_ends_with_an_error_and_is_not_sent_again() -> None:
    async with fronted("P", "D", "E") as front:
        for api in (front["D"], front["E"]):
            api.stream = [TOKEN_EVENT, TOKEN_EVENT, END]
            api.hold_rest.clear()
        answer = await front.client.post("/v1/chat/completions", json={"stream": True})
        assert await answer.content.readuntil(b"\n\n") == TOKEN_EVENT
        lost, other = await asked(front, "D", "E")
        lost.die()
        rest = await answer.content.read()
        event = json.loads(rest.strip().removeprefix(b"data: "))
        assert event["error"]["code"] == 502
        assert f"decode engine {lost.name} was lost in the middle of its answer" in event["error"]["message"]
        assert b"[DONE]" not in rest
        assert other.requests == []
        await eventually(lambda: front.cancels)
        assert await front.metric('kvbus_router_requests_total{outcome="broken"}') == 1


@pytest.mark.parametrize("speaks", [True, False])
async def test_an_engine_that_leaves_the_bus_in_its_answer_may_go_on_speaking(
    speaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbus.router.request.streaming.SILENCE_S", 5.0 if speaks else 0.1)
    async with fronted("P", "D") as front:
        front["D"].stream = [TOKEN_EVENT, TOKEN_EVENT, END]
        front["D"].hold_rest.clear()
        answer = await front.client.post("/v1/chat/completions", json={"stream": True})
        await answer.content.readuntil(b"\n\n")
        await front.leave("D")
        if speaks:
            front["D"].hold_rest.set()
        rest = await answer.content.read()
        assert rest == TOKEN_EVENT + END if speaks else b"error" in rest
        front["D"].hold_rest.set()


@pytest.mark.parametrize("stream", [True, False])
async def test_an_engine_that_is_stuck_is_not_waited_for_for_ever(stream: bool) -> None:
    """Its heartbeats go on, and its HTTP server is stuck."""
    settings = Settings(first_token_s=0.3) if stream else Settings(answer_s=0.3)
    async with fronted("P", "D", "E", settings=settings) as front:
        for api in (front["D"], front["E"]):
            api.stream = [TOKEN_EVENT, END]
            api.hold.clear()
        asking = front.ask(stream=stream)
        stuck, other = await asked(front, "D", "E")
        other.hold.set()
        answer = await asking
        assert (answer.status, answer.headers[DECODE_HEADER]) == (200, other.name)
        await eventually(lambda: stuck.cancelled == 1)


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply, "WAITING_S", 0.05)


@pytest.mark.usefixtures("short_waits")
class TestWhoWaitsForAStream:
    """R15: proxies give a connection up on which nothing comes."""

    async def test_hears_that_somebody_is_there(self) -> None:
        async with fronted("P", "D") as front:
            hold(front, "PD")
            front["D"].stream = [TOKEN_EVENT, END]
            answer = await front.client.post("/v1/chat/completions", json={"model": "m", "stream": True})
            assert (answer.status, answer.content_type) == (200, "text/event-stream")
            for _ in range(3):
                assert await answer.content.readuntil(b"\n\n") == reply.WAITING
            hold_no_more(front, "PD")
            assert (await answer.content.read()).replace(reply.WAITING, b"") == TOKEN_EVENT + END
            assert await front.metric('kvbus_router_requests_total{outcome="ok"}') == 1

    async def test_is_told_in_the_stream_what_went_wrong(self) -> None:
        async with fronted("P", "D") as front:
            hold(front, "PD")
            answer = await front.client.post("/v1/chat/completions", json={"model": "m", "stream": True})
            front["D"].status, front["D"].body = 400, b'{"error": {"message": "too\\nlong",\n"code": 400}}'
            hold_no_more(front, "PD")
            rest = (await answer.content.read()).replace(reply.WAITING, b"")
            assert json.loads(rest.strip().removeprefix(b"data: "))["error"] == {"message": "too\nlong", "code": 400}
            assert await front.metric('kvbus_router_requests_total{outcome="client_error"}') == 1

    async def test_may_go(self) -> None:
        async with fronted("P", "D") as front:
            hold(front, "PD")
            answer = await front.client.post("/v1/chat/completions", json={"model": "m", "stream": True})
            await answer.content.readuntil(b"\n\n")
            answer.close()
            await eventually(lambda: front["D"].cancelled == 1)
            assert await front.metric('kvbus_router_requests_total{outcome="client_left"}') == 1

    async def test_gets_a_status_if_it_is_known_in_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reply, "WAITING_S", 30.0)
        async with fronted("P", "D") as front:
            front["D"].status = 400
            answer = await front.ask(stream=True)
            assert answer.status == 400

    async def test_without_a_stream_hears_nothing(self) -> None:
        async with fronted("P", "D") as front:
            hold(front, "PD")
            asking = front.ask()
            await eventually(lambda: front["D"].requests)
            await asyncio.sleep(4 * reply.WAITING_S)
            hold_no_more(front, "PD")
            assert (await asking).text == '{"ok": true}'


async def test_the_bound_on_takeovers() -> None:
    async with fronted("P", "D", "E", "F", settings=Settings(max_takeovers=1)) as front:
        for name in "DEF":
            front[name].dead = True
        answer = await front.ask()
        assert answer.status == 502
        assert "decode engine" in json.loads(answer.text)["error"]["message"]
        assert sum(len(front[name].requests) for name in "DEF") == 2


async def test_the_last_engines_own_error_reaches_the_client() -> None:
    """C7."""
    async with fronted("P", "D") as front:
        front["D"].stream = [ROLE_EVENT, b'data: {"error": {"message": "KV load failed", "code": 500}}\n\n', END]
        answer = await front.ask(stream=True)
        assert (answer.status, json.loads(answer.text)["error"]["message"]) == (500, "KV load failed")


async def test_who_asks_for_the_prompts_logprobs_is_served_by_decode_alone() -> None:
    async with fronted("P", "D") as front:
        assert (await front.ask(prompt_logprobs=1)).status == 200
        assert front["P"].requests == []
        assert front["D"].requests[0][1] == {"model": "m", "prompt_logprobs": 1}


async def test_a_dead_engine_is_asked_once_until_it_is_heard_again() -> None:
    async with fronted("P", "D", "E") as front:
        front["D"].dead = True
        answers: list[Any] = [await front.ask(user=str(number)) for number in range(12)]
        assert {answer.status for answer in answers} == {200}
        assert len(front["D"].requests) == 1
        front["D"].dead = False
        front.beat("D", 2)
        await eventually(lambda: front.node.membership["D"].number == 2)
        for number in range(12):
            await front.ask(user=str(number))
        assert len(front["D"].requests) > 1


@pytest.mark.parametrize("returns", [True, False])
async def test_an_engine_that_lost_the_bus_only_may_take_its_time_again(
    returns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "SILENCE_S", 0.3)
    async with fronted("P", "D") as front:
        front["D"].stream = [TOKEN_EVENT, END]
        front["D"].hold_rest.clear()
        async with front.client.post("/v1/chat/completions", json={"model": "m", "stream": True}) as answer:
            assert await answer.content.readany() == TOKEN_EVENT
            await front.leave("D")
            if returns:
                front.beat("D", number=2)
                await eventually(lambda: front.node.membership.get("D") is not None)
                ended = asyncio.create_task(answer.content.read())
                done, _ = await asyncio.wait([ended], timeout=0.6)
                assert not done, "three times its silence"
                front["D"].hold_rest.set()
                assert await ended == END
            else:
                assert b"silent for 0.3 s" in await answer.content.read()
                front["D"].hold_rest.set()


async def test_a_frozen_engine_holds_no_client_that_asks_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "LOOKUP_S", 0.2)
    async with fronted("P", "D") as front:
        front["D"].hold.clear()
        answer = await front.client.post("/tokenize", json={"model": "m", "prompt": "x"})
        assert (answer.status, (await answer.json())["error"]["message"]) == (
            502,
            "decode engine D: it did not answer in time",
        )
        front["D"].hold.set()
