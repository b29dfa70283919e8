"""The front door: what the router answers itself, what it refuses, and who waits."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from support.fronts import END, TOKEN_EVENT, FakeApi, Front, fronted
from support.waiting import eventually

from kvbus.errors import ConfigError
from kvbus.router.request import DECODE_HEADER
from kvbus.router.settings import Settings
from kvbus.wire import State

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
DEEP = b"[" * 100_000


def named(text: str) -> str:
    return str(json.loads(text)["error"]["message"])


# What is wrong with a request: method, path, body; status and what the message names.
BAD: list[tuple[str, str, bytes, int, str]] = [
    ("POST", COMPLETIONS, b"", 400, "the body is not JSON"),
    ("POST", COMPLETIONS, b"{", 400, "the body is not JSON"),
    ("POST", COMPLETIONS, b"\xff\xfe", 400, "the body is not JSON"),
    ("POST", COMPLETIONS, DEEP, 400, "the body is not JSON: it does not begin with {"),
    ("POST", COMPLETIONS, b"[1]", 400, "the body is not a JSON object but list"),
    ("POST", COMPLETIONS, b'{"model": 7}', 400, "model: 7 is not allowed; allowed: the name of a model"),
    ("POST", CHAT, b'{"model": "gpt"}', 404, "the model 'gpt' does not exist; served: m"),
    ("POST", "/tokenize", b"{", 400, "the body is not JSON"),
    ("POST", "/detokenize", b'{"model": "gpt"}', 404, "the model 'gpt' does not exist; served: m"),
    ("GET", COMPLETIONS, b"", 405, "GET /v1/completions is not allowed; allowed: POST"),
    ("DELETE", "/v1/models", b"", 405, "DELETE /v1/models is not allowed; allowed: GET, HEAD"),
    ("POST", "/v1/embedding", b"{}", 404, "there is no /v1/embedding; did you mean /v1/embeddings"),
    ("POST", "/wp-login.php", b"", 404, "there is no /wp-login.php"),
    ("POST", COMPLETIONS, b'{"prompt": "' + b"x" * (2 << 20) + b'"}', 413, "larger than the 1 MiB that are allowed"),
]


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "text"), BAD, ids=[f"{row[0]} {row[1]} {row[2][:12]!r}" for row in BAD]
)
async def test_what_is_wrong_is_named_in_openais_form(
    method: str, path: str, content: bytes, status: int, text: str
) -> None:
    async with fronted("P", "D", settings=Settings(max_body_mib=1)) as front:
        answer = await front.client.request(method, path, data=io.BytesIO(content))
        assert answer.status == status
        assert answer.content_type == "application/json"
        body = (await answer.json())["error"]
        assert text in body["message"]
        assert (body["code"], set(body)) == (status, {"message", "type", "param", "code"})
        assert front["P"].requests == front["D"].requests == []


async def test_a_client_that_sends_a_byte_a_while_is_sent_away() -> None:
    async with fronted("P", "D", settings=Settings(body_timeout_s=0.3)) as front:
        server = front.client.server
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")

        async def drip() -> None:
            while True:
                writer.write(b"x")
                await asyncio.sleep(0.05)

        dripping = asyncio.create_task(drip())
        async with asyncio.timeout(5):
            head, body = await reader.readuntil(b"\r\n\r\n"), await reader.readuntil(b"}}")
        dripping.cancel()
        writer.close()
        assert head.startswith(b"HTTP/1.1 408 ")
        assert b"Connection: close" in head
        assert named(body.decode()) == "the body did not arrive within 0.3 s"


async def test_a_body_of_ten_megabytes_is_passed_on() -> None:
    async with fronted("P", "D") as front:
        content = json.dumps({"messages": "x" * (10 << 20)}).encode()
        assert (await front.client.post(CHAT, data=io.BytesIO(content))).status == 200
        assert len(front["D"].requests[0][1]["messages"]) == 10 << 20


@pytest.mark.parametrize(
    ("key", "value"),
    [("max_in_flight", 0), ("max_queue", -1), ("max_wait_s", 0), ("max_wait_s", float("nan")), ("max_body_mib", 0)],
)
def test_a_bad_limit_stops_the_router(key: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{key}={value}; allowed: "):
        Settings(**{key: value})


async def probe(front: Front, path: str) -> tuple[int, str, list[str]]:
    answer = await front.client.get(path)
    body = await answer.json()
    return answer.status, body["status"], body["lacking"]


async def test_without_prefill_it_is_ready_and_says_what_it_lacks() -> None:
    """R3: the loss of prefill is no outage, so a readiness probe must not make it one."""
    async with fronted("P", "D") as front:
        assert await probe(front, "/ready") == (200, "ok", [])
        front.beat("P", 2, compat=(("dtype", "other"),))
        await eventually(lambda: front.node.membership["P"].compat)
        lacking = ["m: no prefill engine fits a decode engine: decode engines compute prompts themselves"]
        assert await probe(front, "/ready") == (200, "degraded", lacking)
        assert await probe(front, "/ready?pairs=1") == (503, "degraded", lacking)
        await front.leave("P")
        lacking = ["m: no prefill engine is ready: decode engines compute prompts themselves"]
        assert await probe(front, "/ready") == (200, "degraded", lacking)
        assert (await front.ask()).status == 200
        assert (await front.metric("kvbus_router_ready"), await front.metric("kvbus_router_lacking")) == (1, 1)
        await front.leave("D")
        assert await probe(front, "/ready") == (503, "not ready", ["no engine is known"])
        assert (await probe(front, "/health"))[0] == 200, "it lives"
        assert await front.metric("kvbus_router_ready") == 0


async def test_with_the_bus_away_those_who_answer_are_trusted() -> None:
    async with fronted("D") as front:
        with front.broker.down():
            status, said, lacking = await probe(front, "/ready")
            assert (status, said) == (200, "degraded")
            assert lacking[1] == "the bus is away for 0 s: engines are those that were there"
            front["D"].die()
            assert (await front.ask()).status == 502
            assert (await probe(front, "/ready"))[:2] == (503, "not ready")


async def test_models_are_those_of_all_engines_once_each() -> None:
    async with fronted("P", "D", "E", "F") as front:
        front.beat("E", 2, model="n")
        front["E"].names = ["n"]
        await front.knows("E")
        models = await (await front.client.get("/v1/models")).json()
        assert [each["id"] for each in models["data"]] == ["m", "n"]
        assert (await front.ask(model="n")).headers[DECODE_HEADER] == "E"
        assert front["P"].requests == [], "which serves another model"


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_tokens_are_a_decode_engines_matter(path: str) -> None:
    async with fronted("P", "D") as front:
        front["D"].status, front["D"].body = 418, b'{"tokens": []}'
        answer = await front.client.post(path, json={"model": "m", "prompt": "x"})
        assert (answer.status, await answer.read()) == (418, b'{"tokens": []}')
        assert [each[:2] for each in front["D"].requests] == [(path, {"model": "m", "prompt": "x"})]
        front["D"].dead = True
        assert (await front.client.post(path, json={})).status == 502


async def test_a_draining_engine_gets_nothing_new() -> None:
    async with fronted("P", "D", "E") as front:
        front["D"].stream = [TOKEN_EVENT, END]
        front["D"].hold_rest.clear()
        front.beat("E", 2, state=State.DRAINING)
        await eventually(lambda: front.node.membership["E"].state is State.DRAINING)
        asking = front.ask(stream=True)
        await eventually(lambda: front["D"].requests)
        front.beat("D", 2, state=State.DRAINING)
        await eventually(lambda: front.node.membership["D"].state is State.DRAINING)
        refused = await front.ask()
        assert (refused.status, named(refused.text)) == (503, "no decode engine is ready: the last ones are draining")
        assert int(refused.headers["Retry-After"]) > 0
        front["D"].hold_rest.set()
        assert (await asking).text.encode() == TOKEN_EVENT + END, "what it has, it finishes"
        assert front["E"].requests == []


async def crowd(front: Front, count: int, **body: Any) -> list[asyncio.Task[Any]]:
    """So many requests that wait, in this order."""
    asking = []
    for _ in range(count):
        before = await front.metric("kvbus_router_queue_length")
        asking.append(front.ask(**body))
        await until_metric(front, "kvbus_router_queue_length", lambda value, before=before: value > before)
    return asking


async def until_metric(front: Front, name: str, wanted: Callable[[float], bool]) -> None:
    async with asyncio.timeout(5):
        while not wanted(await front.metric(name)):
            await asyncio.sleep(0.005)


async def test_more_than_may_wait_are_turned_away_and_who_waits_too_long() -> None:
    async with fronted("P", "D", settings=Settings(max_in_flight=1, max_queue=2, max_wait_s=0.5)) as front:
        front["D"].hold.clear()
        first = front.ask()
        await eventually(lambda: front["D"].requests)
        waiting = await crowd(front, 2)
        full = await front.ask()
        assert (full.status, named(full.text)) == (429, "2 requests are waiting already, as many as are allowed")
        assert int(full.headers["Retry-After"]) >= 1
        for each in waiting:
            late = await each
            assert (late.status, named(late.text)) == (503, "no engine had room within 0.5 s")
            assert "Retry-After" in late.headers
        front["D"].hold.set()
        assert (await first).status == 200
        assert (await front.ask()).status == 200, "there is room again"
        assert len(front["D"].requests) == 2
        assert await front.metric('kvbus_router_requests_total{outcome="overloaded"}') == 3


@pytest.mark.parametrize("checked_by", ["a proxy", "engines", "engines that the router has a key for"])
async def test_who_sends_much_does_not_hold_up_who_sends_little(checked_by: str) -> None:
    settings = Settings(max_in_flight=1, trusted_proxies=("127.0.0.1",) if checked_by == "a proxy" else ())
    locked, engine_key = FakeApi("D"), "ours" if "router" in checked_by else ""
    locked.key = "" if checked_by == "a proxy" else "ours"
    async with fronted("P", "D", settings=settings, engine_key=engine_key, apis={"D": locked}) as front:
        await eventually(lambda: front["D"].listed)
        front["D"].hold.clear()
        a, b = {"Authorization": "a"}, {"Authorization": "b"}
        first = front.ask(headers=a)
        await eventually(lambda: front["D"].requests)
        many, one = await crowd(front, 3, headers=a, user="fresh"), await crowd(front, 1, headers=b)
        front["D"].hold.set()
        await asyncio.gather(first, *many, *one)
        assert [headers["authorization"] for _, _, headers in front["D"].requests] == ["a", "a", "b", "a", "a"]


async def test_a_key_that_nobody_checks_buys_no_turn() -> None:
    """R12: four keys of one address take one turn, in the order of their coming."""
    async with fronted("P", "D", settings=Settings(max_in_flight=1)) as front:
        front["D"].hold.clear()
        first = front.ask(headers={"Authorization": "0"})
        await eventually(lambda: front["D"].requests)
        later: list[asyncio.Task[Any]] = []
        for key in ("1", "1", "2", "3"):
            later += await crowd(front, 1, headers={"Authorization": key})
        front["D"].hold.set()
        await asyncio.gather(first, *later)
        assert [headers["authorization"] for _, _, headers in front["D"].requests] == ["0", "1", "1", "2", "3"]


async def test_a_client_that_leaves_the_queue_leaves_its_place() -> None:
    async with fronted("P", "D", settings=Settings(max_in_flight=1, max_queue=1)) as front:
        front["D"].hold.clear()
        first = front.ask()
        await eventually(lambda: front["D"].requests)
        [waiting] = await crowd(front, 1)
        waiting.cancel()
        await until_metric(front, "kvbus_router_queue_length", lambda value: value == 0)
        await crowd(front, 1)
        front["D"].hold.set()
        assert (await first).status == 200
        assert await front.metric('kvbus_router_requests_total{outcome="client_left"}') == 1


async def test_a_new_engine_makes_room_at_once() -> None:
    async with fronted("P", "D", "E", settings=Settings(max_in_flight=1)) as front:
        await front.leave("E")
        front["D"].hold.clear()
        first = front.ask()
        await eventually(lambda: front["D"].requests)
        [waiting] = await crowd(front, 1)
        front.beat("E", 2)
        assert (await waiting).headers[DECODE_HEADER] == "E"
        front["D"].hold.set()
        await first


async def test_metrics() -> None:
    async with fronted("P", "D", "E") as front:
        front["D"].stream = front["E"].stream = [TOKEN_EVENT, END]
        await front.ask(stream=True)
        await front.ask(stream=False)
        front["D"].status = front["E"].status = 400
        await front.ask()
        for line, value in {
            'kvbus_router_requests_total{outcome="ok"}': 2,
            'kvbus_router_requests_total{outcome="client_error"}': 1,
            "kvbus_router_ttft_seconds_count": 1,
            "kvbus_router_answer_seconds_count": 1,
            "kvbus_router_in_flight": 0,
            'kvbus_router_engines{role="decode",state="ready"}': 2,
            'kvbus_router_engines{role="prefill",state="ready"}': 1,
        }.items():
            assert await front.metric(line) == value, line
        answer = await front.client.get("/metrics")
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert front["D"].params[0]["transfer_id"] if front["D"].requests else True
        text = await answer.text()
        transfers = [params["transfer_id"] for name in "DE" for params in front[name].params]
        assert transfers
        assert not any(transfer in text for transfer in transfers)
