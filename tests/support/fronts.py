"""A router between a client and fake engines, which are HTTP servers, heartbeats, and answers to rebinds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from multidict import CIMultiDict

from kvbus.bus import Bus, MemoryBroker, MemoryBus, Node
from kvbus.protocol import Membership
from kvbus.router.app import Router
from kvbus.router.settings import Settings
from kvbus.trace import SpanSink
from kvbus.wire import Bye, Heartbeat, Rebind, RebindReply, Release, Role, State, Subjects, decode, encode
from support.waiting import eventually

SUBJECTS = Subjects("default")
ROLE_EVENT = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
TOKEN_EVENT = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
END = b"data: [DONE]\n\n"


class FakeApi:
    """An engine's HTTP API that answers as it is told.

    ``names`` are what it lists, ``listed`` times so far, to those who have its ``key``; ``kept`` the responses it has.
    ``hold`` is waited for before the answer, ``hold_rest`` after the first event of a stream, ``hold_list`` before what
    it only looks up. ``die`` breaks off whatever is being answered, as a killed process does, and whatever comes later.
    """

    def __init__(self, name: str = "?") -> None:
        self.name = name
        self.requests: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.status, self.body = 200, b'{"ok": true}'
        self.headers: list[tuple[str, str]] = []
        self.stream: list[bytes] = []
        self.hold, self.hold_rest, self.hold_list = asyncio.Event(), asyncio.Event(), asyncio.Event()
        for held in (self.hold, self.hold_rest, self.hold_list):
            held.set()
        self.cancelled = 0
        self.dead = False
        self.names, self.key, self.listed = ["m"], "", 0
        self.kept: set[str] = set()
        self._transports: set[Any] = set()
        self.server = TestServer(self._app())

    @property
    def address(self) -> str:
        return f"{self.server.host}:{self.server.port}"

    @property
    def params(self) -> list[dict[str, Any]]:
        return [body.get("kv_transfer_params", {}) for _, body, _ in self.requests]

    def die(self) -> None:
        self.dead = True
        for transport in list(self._transports):
            transport.abort()

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/responses/{response_id}", self._kept)
        app.router.add_route("*", "/{path:.*}", self._serve)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        self.listed += 1
        await self.hold_list.wait()
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return web.json_response({"object": "list", "data": [{"id": name, "root": self.name} for name in self.names]})

    async def _kept(self, request: web.Request) -> web.Response:
        await self.hold_list.wait()
        response_id = request.match_info["response_id"]
        status = 200 if response_id in self.kept else 404
        return web.json_response({"id": response_id, "of": self.name}, status=status)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        headers = {key.lower(): value for key, value in request.headers.items()}
        content = await request.read()
        body = json.loads(content) if content and request.content_type == "application/json" else {"raw": content}
        self.requests.append((request.path, body, headers))
        self._transports.add(request.transport)
        try:
            if self.dead:
                self.die()
            return await self._answer(request)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self._transports.discard(request.transport)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if not self.stream or self.status != 200 or not self.requests[-1][1].get("stream"):
            await self.hold.wait()
            headers = CIMultiDict([("Content-Type", "application/json"), *self.headers])
            return web.Response(status=self.status, body=self.body, headers=headers)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        await self.hold.wait()
        for number, event in enumerate(self.stream):
            await response.write(event)
            if number == 0:
                await self.hold_rest.wait()
        return response


def _fixed(heartbeat: Heartbeat) -> object:
    about = heartbeat.compat, heartbeat.address, heartbeat.data_parallel, heartbeat.data_parallel_rank
    return about, heartbeat.cache_block_size, heartbeat.first_token


class Front:
    """The client's side, and everybody's."""

    def __init__(self, broker: MemoryBroker, node: Node, client: TestClient[Any, Any]) -> None:
        self.broker, self.node, self.client = broker, node, client
        self.apis: dict[str, FakeApi] = {}
        self.cancels: list[Release] = []
        self.rebinds: list[Rebind] = []
        self.refuse: dict[str, list[str]] = {}
        self._beats: dict[str, Heartbeat] = {}

    def __getitem__(self, name: str) -> FakeApi:
        return self.apis[name]

    def beat(self, name: str, number: int = 1, like: str = "", **changes: Any) -> None:
        """``like``: an engine whose port it shares."""
        role = Role.PREFILL if name[0] in "PQR" else Role.DECODE
        about = {"model": "m", "address": self.apis[like or name].address, "state": State.READY, **changes}
        heartbeat = Heartbeat(name, 1, number, role, tp_size=1, **about)
        if name in self._beats and _fixed(self._beats[name]) != _fixed(heartbeat):
            self.broker.route(SUBJECTS.bye(name), encode(Bye(name, 1)))  # what an engine is does not change
        self.broker.route(SUBJECTS.heartbeats(role, name), encode(heartbeat))
        self._beats[name] = heartbeat

    async def knows(self, *names: str) -> None:
        """Wait until the router has heard the last heartbeats of these."""
        await eventually(lambda: all(self.node.membership.get(name) == self._beats[name] for name in names))

    async def leave(self, name: str) -> None:
        self.broker.route(SUBJECTS.bye(name), encode(Bye(name, 1)))
        await eventually(lambda: self.node.membership.get(name) is None)

    def ask(
        self, path: str = "/v1/chat/completions", headers: dict[str, str] | None = None, **body: Any
    ) -> asyncio.Task[Any]:
        """Post a request; await the task for the answer, with its body read."""

        async def post() -> Any:
            answer = await self.client.post(path, json={"model": "m", **body}, headers=headers)
            answer.text = await answer.text()
            return answer

        return asyncio.create_task(post())

    async def metric(self, name: str) -> float:
        """The value of one line of ``/metrics``."""
        text = await (await self.client.get("/metrics")).text()
        return next((float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name)), 0.0)

    async def listen(self, bus: Bus) -> None:
        """Hear cancels, and answer rebinds with what ``refuse`` says."""

        def on_rebind(_: str, payload: bytes) -> bytes:
            asked = decode(payload)
            assert isinstance(asked, Rebind)
            self.rebinds.append(asked)
            refusals = self.refuse.get(asked.transfer_id, []) or self.refuse.get("", [])
            return encode(RebindReply(asked.transfer_id, asked.attempt, refusals.pop(0) if refusals else ""))

        def on_cancel(_: str, payload: bytes) -> None:
            heard = decode(payload)
            assert isinstance(heard, Release)
            self.cancels.append(heard)

        await bus.subscribe(SUBJECTS.releases("*"), on_cancel)
        for name in self.apis:
            await bus.serve(SUBJECTS.rebind(name), on_rebind)


@asynccontextmanager
async def fronted(
    *names: str,
    settings: Settings | None = None,
    dead_after_s: float = 60,
    span_sinks: Sequence[SpanSink] = (),
    engine_key: str = "",
    apis: Mapping[str, FakeApi] | None = None,
) -> AsyncIterator[Front]:
    """A router and the engines ``names``: prefill engines begin with P, Q or R, the others decode.

    Args:
        apis: those that are not the usual ones.
    """
    broker = MemoryBroker()
    node = Node(MemoryBus(broker), SUBJECTS, name="router", membership=Membership(dead_after_s=dead_after_s))
    async with AsyncExitStack() as stack:
        router = Router(node, settings, span_sinks=span_sinks, engine_key=engine_key)
        front = Front(broker, node, TestClient(TestServer(router.app())))
        for name in names:
            api = front.apis[name] = (apis or {}).get(name) or FakeApi(name)
            await api.server.start_server()
            stack.push_async_callback(api.server.close)
        await front.listen(bus := MemoryBus(broker))
        await stack.enter_async_context(bus)
        await stack.enter_async_context(front.client)
        for name in names:
            front.beat(name)
        await eventually(lambda: len(node.membership.peers()) == len(names))
        yield front
