"""The router over HTTP, with fake engines: what reaches the client, and what reaches the engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from support.waiting import eventually

from kvbus.bus import MemoryBroker, MemoryBus, Node
from kvbus.protocol import Membership
from kvbus.router.app import Router
from kvbus.router.request import DECODE_HEADER, PREFILL_HEADER, TRANSFER_HEADER
from kvbus.wire import Bye, Heartbeat, Message, Release, Role, State, Subjects, decode, encode

SSE = b'data: {"choices": [{"text": "\xc3\xa9"}]}\n\ndata: [DONE]\n\n'


class FakeApi:
    """An engine's HTTP API that answers as it is told."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.status, self.body, self.stream = 200, b'{"ok": true}', b""
        self.hold = asyncio.Event()
        self.hold.set()
        self.cancelled = 0

    async def serve(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((request.path, await request.json(), {k.lower(): v for k, v in request.headers.items()}))
        if self.stream and self.status == 200 and self.requests[-1][1].get("stream"):
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8", "X-Engine": "1"})
            await response.prepare(request)
            await self.wait()
            for start in range(0, len(self.stream), 7):
                await response.write(self.stream[start : start + 7])
            return response
        await self.wait()
        return web.Response(status=self.status, body=self.body, content_type="application/json")

    async def wait(self) -> None:
        try:
            await self.hold.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


class Front:
    """A router between a client and two fake engines."""

    def __init__(
        self, client: TestClient[Any, Any], prefill: FakeApi, decode: FakeApi, broker: MemoryBroker, node: Node
    ) -> None:
        self.client, self.prefill, self.decode, self.broker, self._node = client, prefill, decode, broker, node

    def members(self) -> int:
        return len(self._node.membership.peers())


async def serve(api: FakeApi) -> TestServer:
    app = web.Application()
    app.router.add_post("/v1/completions", api.serve)
    app.router.add_post("/v1/chat/completions", api.serve)

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    app.router.add_get("/v1/models", models)
    server = TestServer(app)
    await server.start_server()
    return server


@pytest.fixture
async def front() -> AsyncIterator[Front]:
    broker, subjects = MemoryBroker(), Subjects("default")
    node = Node(MemoryBus(broker), subjects, name="router", membership=Membership(dead_after_s=60))
    apis = {"P": FakeApi(), "D": FakeApi()}
    servers = {name: await serve(api) for name, api in apis.items()}
    router = TestServer(Router(node).app())
    await router.start_server()
    client = TestClient(router)
    for name, role in (("P", Role.PREFILL), ("D", Role.DECODE)):
        address = f"{servers[name].host}:{servers[name].port}"
        beat = Heartbeat(name, 1, 1, role, State.READY, 1, "m", address)
        broker.route(subjects.heartbeats(role, name), encode(beat))
    await eventually(lambda: len(node.membership.peers()) == 2)
    try:
        yield Front(client, apis["P"], apis["D"], broker, node)
    finally:
        await client.close()
        for server in servers.values():
            await server.close()


async def test_both_legs_go_out_at_once_with_one_transfer_id(front: Front) -> None:
    front.prefill.hold.clear()
    front.decode.hold.clear()
    body = {"model": "m", "prompt": "Hi", "max_tokens": 9, "mystery": [1]}
    asking = asyncio.create_task(front.client.post("/v1/completions", json=body, headers={"Authorization": "Bearer x"}))
    await eventually(lambda: front.prefill.requests and front.decode.requests)
    front.prefill.hold.set()
    front.decode.hold.set()
    answer = await asking
    assert (answer.status, await answer.json()) == (200, {"ok": True})
    [(path, p_body, p_headers)], [(_, d_body, d_headers)] = front.prefill.requests, front.decode.requests
    assert path == "/v1/completions"
    p_params, d_params = p_body.pop("kv_transfer_params"), d_body.pop("kv_transfer_params")
    assert d_body == body
    assert p_body == {**body, "max_tokens": 1, "stream": False}
    assert p_params["transfer_id"] == d_params["transfer_id"] == answer.headers[TRANSFER_HEADER]
    assert d_params["prefill_engine_id"] == answer.headers[PREFILL_HEADER] == "P"
    assert answer.headers[DECODE_HEADER] == "D"
    assert p_headers["x-request-id"] == d_headers["x-request-id"]
    assert "traceparent" not in p_headers  # nobody takes traces, so engines decide for themselves
    assert p_headers["authorization"] == d_headers["authorization"] == "Bearer x"


async def test_a_stream_passes_untouched(front: Front) -> None:
    front.decode.stream = SSE
    answer = await front.client.post("/v1/chat/completions", json={"model": "m", "messages": [], "stream": True})
    assert await answer.read() == SSE
    assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["X-Engine"] == "1"


async def test_the_first_bytes_do_not_wait_for_the_last(front: Front) -> None:
    front.decode.stream = SSE
    front.prefill.hold.clear()
    answer = await front.client.post("/v1/completions", json={"stream": True})
    assert await answer.content.readexactly(len(SSE)) == SSE, "though the prefill leg has not answered"
    front.prefill.hold.set()


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
async def test_a_refusal_by_prefill_reaches_the_client_and_ends_decode(front: Front, stream: bool) -> None:
    """H4."""
    front.decode.stream = SSE
    front.decode.hold.clear()
    front.prefill.status, front.prefill.body = 400, b'{"error": "too long"}'
    answer = await front.client.post("/v1/completions", json={"stream": stream})
    assert (answer.status, await answer.read()) == (400, b'{"error": "too long"}')
    await eventually(lambda: front.decode.cancelled == 1)


async def test_a_refusal_by_decode_reaches_the_client_and_ends_prefill(front: Front) -> None:
    front.prefill.hold.clear()
    front.decode.status, front.decode.body = 422, b'{"error": "no"}'
    answer = await front.client.post("/v1/completions", json={"stream": True})
    assert (answer.status, await answer.read()) == (422, b'{"error": "no"}')
    await eventually(lambda: front.prefill.cancelled == 1)


@pytest.mark.parametrize("how", ["refused", "unreachable", "left"])
async def test_what_decode_does_not_take_is_released_on_prefill(front: Front, how: str) -> None:
    """A2: though the prefill is done, and the decode engine's connector may never have heard of the request."""
    cancels: list[Message] = []
    async with MemoryBus(front.broker) as bus:
        await bus.subscribe(Subjects("default").releases("P"), lambda _, payload: cancels.append(decode(payload)))
        if how == "refused":
            front.decode.status = 422
        elif how == "unreachable":
            beat = Heartbeat("D", 1, 2, Role.DECODE, State.READY, 1, "m", "127.0.0.1:1")
            front.broker.route(Subjects("default").bye("D"), encode(Bye("D", 1)))
            front.broker.route(Subjects("default").heartbeats("decode", "D"), encode(beat))
        else:
            front.decode.hold.clear()
        asking = asyncio.create_task(front.client.post("/v1/completions", json={"prompt": ["a", "b"]}))
        if how == "left":
            await eventually(lambda: front.prefill.requests and front.decode.requests)
            asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await eventually(lambda: len(cancels) == 2)
    named = cancels[0].transfer_id  # type: ignore[attr-defined]
    assert [(each.transfer_id, each.sink_engine, each.sender) for each in cancels if isinstance(each, Release)] == [
        (named, "D", "router"),
        (f"{named}#0.1", "D", "router"),
    ]


async def test_what_decode_takes_is_not_released(front: Front) -> None:
    cancels: list[bytes] = []
    async with MemoryBus(front.broker) as bus:
        await bus.subscribe(Subjects("default").releases("*"), lambda _, payload: cancels.append(payload))
        assert (await front.client.post("/v1/completions", json={})).status == 200
        front.broker.route(Subjects("default").releases("P", "x"), b"the last")
        await eventually(lambda: cancels)
    assert cancels == [b"the last"]


async def test_a_client_that_goes_away_ends_both_legs(front: Front) -> None:
    """A8."""
    front.prefill.hold.clear()
    front.decode.hold.clear()
    asking = asyncio.create_task(front.client.post("/v1/completions", json={}))
    await eventually(lambda: front.prefill.requests and front.decode.requests)
    asking.cancel()
    await eventually(lambda: front.prefill.cancelled == front.decode.cancelled == 1)


async def test_a_prefill_engine_that_does_not_answer_leaves_it_to_decode(front: Front) -> None:
    """C1: killed between its heartbeat and the request, or in the middle of it."""
    beat = Heartbeat("P", 1, 2, Role.PREFILL, State.READY, 1, "m", "127.0.0.1:1")
    front.broker.route(Subjects("default").bye("P"), encode(Bye("P", 1)))
    front.broker.route(Subjects("default").heartbeats("prefill", "P"), encode(beat))
    answer = await front.client.post("/v1/completions", json={})
    assert (answer.status, await answer.json()) == (200, {"ok": True})


async def test_without_a_prefill_engine_decode_gets_the_clients_request_as_it_is(front: Front) -> None:
    front.broker.route(Subjects("default").bye("P"), encode(Bye("P", 1)))
    await eventually(lambda: front.members() == 1)
    body = {"model": "m", "prompt": "Hi"}
    answer = await front.client.post("/v1/completions", json=body)
    assert answer.status == 200
    assert [each[1] for each in front.decode.requests] == [body]
    assert front.prefill.requests == []
    assert DECODE_HEADER in answer.headers
    assert PREFILL_HEADER not in answer.headers


async def test_a_decode_engine_that_does_not_answer_is_a_bad_gateway(front: Front) -> None:
    beat = Heartbeat("D", 1, 2, Role.DECODE, State.READY, 1, "m", "127.0.0.1:1")
    front.broker.route(Subjects("default").bye("D"), encode(Bye("D", 1)))
    front.broker.route(Subjects("default").heartbeats("decode", "D"), encode(beat))
    answer = await front.client.post("/v1/completions", json={})
    assert answer.status == 502
    assert "decode engine D" in (await answer.json())["error"]["message"]


@pytest.mark.parametrize(
    ("content", "status", "text"),
    [
        (b"{", 400, "the body is not JSON"),
        (b"[1]", 400, "not a JSON object but list"),
        (b'{"model": "gpt"}', 404, "the model 'gpt' does not exist; served: m"),
    ],
)
async def test_bad_input_is_named(front: Front, content: bytes, status: int, text: str) -> None:
    answer = await front.client.post("/v1/completions", data=content)
    assert answer.status == status
    assert text in (await answer.json())["error"]["message"]
    assert front.prefill.requests == front.decode.requests == []


async def test_health_and_models(front: Front) -> None:
    answer = await front.client.get("/health")
    assert answer.status == 200
    assert await answer.json() == {
        "status": "ok",
        "lacking": [],
        "pair": True,
        "bus_away_s": None,
        "models": {"m": {"prefill": ["P"], "decode": ["D"]}},
        "bus_connected": True,
        "prefill_engines": ["P"],
        "decode_engines": ["D"],
    }
    models = await front.client.get("/v1/models")
    assert json.loads(await models.read()) == {"data": [{"id": "m"}]}


async def test_without_engines_it_says_so() -> None:
    node = Node(MemoryBus(MemoryBroker()), Subjects("default"), name="router", membership=Membership())
    async with TestClient(TestServer(Router(node).app())) as client:
        assert (await client.get("/health")).status == 200
        assert (await client.get("/ready")).status == 503
        assert (await client.get("/v1/models")).status == 503
        answer = await client.post("/v1/completions", json={"model": "m"})
        assert answer.status == 503
        assert "no decode engine is ready" in (await answer.json())["error"]["message"]
