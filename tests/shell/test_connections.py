"""Clients' connections, by raw sockets: what is at rest, slow, half-open or too many does not stay (R13)."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from support.fronts import FakeApi
from support.routers import CHAT, fleet, message_of, new_namespace
from support.waiting import eventually

from kvbus.errors import LocalClusterError
from kvbus.local import Child, NatsServer, free_port
from kvbus.router.http import InFlight, Listener, connection, listener, room_for

LIMIT = 4
GET = b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n"


class Door:
    """A listener in front of an application that answers ``/health`` and ``/held``, the latter when it may."""

    keep_alive_s = 75.0

    def __init__(self) -> None:
        self.may = asyncio.Event()
        self.refused: Counter[str] = Counter()
        self.in_flight = InFlight()
        self.port = free_port()
        self._writers: list[asyncio.StreamWriter] = []

    async def health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def held(self, _: web.Request) -> web.Response:
        await self.may.wait()
        return web.json_response({"held": True})

    async def half(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        await response.prepare(request)
        await response.write(b"half")
        await self.may.wait()
        return response

    async def events(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: half\n\n")
        await self.may.wait()
        return response

    async def large(self, _: web.Request) -> web.Response:
        return web.Response(body=b"x" * (32 << 20))

    async def open(self) -> None:
        app = web.Application(middlewares=[self.in_flight.watch])
        app.on_response_prepare.append(self.in_flight.on_prepare)
        app.router.add_get("/health", self.health)
        app.router.add_get("/held", self.held)
        app.router.add_get("/half", self.half)
        app.router.add_get("/large", self.large)
        for path in ("/v1/messages", "/v1/completions"):
            app.router.add_get(path, self.events)
        self.runner = web.AppRunner(app, keepalive_timeout=self.keep_alive_s)
        await self.runner.setup()
        assert self.runner.server is not None
        self.listener = Listener(self.runner.server, LIMIT, lambda why: self.refused.update([why]))
        self.listener.bind("127.0.0.1", self.port)
        self.listener.listen()

    async def close(self) -> None:
        self.may.set()
        for writer in self._writers:
            writer.close()
        self.listener.close()
        await self.runner.cleanup()

    async def client(self, sent: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self._writers.append(writer)
        writer.write(sent)
        return reader, writer

    async def crowd(self) -> list[asyncio.StreamWriter]:
        """As many connections as are allowed."""
        crowd = [(await self.client())[1] for _ in range(LIMIT)]
        await eventually(lambda: len(self.listener.connections) == LIMIT)
        return crowd


@pytest.fixture
async def door(request: pytest.FixtureRequest) -> AsyncIterator[Door]:
    made = getattr(request, "param", Door)()
    await made.open()
    yield made
    await made.close()


async def status_of(reader: asyncio.StreamReader) -> int:
    async with asyncio.timeout(30):
        return int((await reader.readline()).split()[1])


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(30):
        return await reader.read()


class BriefDoor(Door):
    keep_alive_s = 1.0


@pytest.mark.slow
@pytest.mark.parametrize("door", [BriefDoor], indirect=True)
async def test_what_is_at_rest_is_closed(door: Door) -> None:
    silent, _ = await door.client()
    served, _ = await door.client(GET % b"/health")
    assert await rest_of(silent) == b""
    assert (await rest_of(served)).startswith(b"HTTP/1.1 200 OK"), "and then nothing"
    busy, _ = await door.client(GET % b"/held")
    await asyncio.sleep(1.5)
    door.may.set()
    assert await status_of(busy) == 200, "one that waits for its answer is not at rest"
    assert door.refused == {}


@pytest.mark.slow
async def test_headers_that_come_a_byte_a_while_are_late(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 1.0)
    reader, writer = await door.client(b"GET /health HT")
    for byte in b"TP/1.1\r\nHos":
        writer.write(bytes([byte]))
        await asyncio.sleep(0.02)
    answer = await rest_of(reader)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert "headers did not arrive" in message_of(answer.partition(b"\r\n\r\n")[2].decode())
    assert door.refused == {"slow": 1}
    reader, writer = await door.client(b"GET /held HTTP/1.1\r\nHo")
    writer.write(b"st: x\r\n\r\n")
    await asyncio.sleep(1.5)
    door.may.set()
    assert await status_of(reader) == 200, "the headers were in time"


@pytest.mark.slow
async def test_more_connections_than_are_allowed_are_told_so_and_probes_are_answered(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "SPARE_HEAD_S", 1.0)
    monkeypatch.setattr(listener, "MAX_SPARE", 2)
    crowd = await door.crowd()
    reader, _ = await door.client(GET % b"/held")
    answer = await rest_of(reader)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"Connection: close" in answer
    assert message_of(answer.partition(b"\r\n\r\n")[2].decode()) == "as many connections are open as are allowed"
    reader, _ = await door.client(GET % b"/health")
    answer = await rest_of(reader)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"Connection: close" in answer
    silent = [await door.client() for _ in range(4)]
    assert [(await rest_of(reader))[:13] for reader, _ in silent] == [b"HTTP/1.1 503 "] * 4
    assert door.refused == {"limit": 5}
    crowd[0].close()
    await eventually(lambda: len(door.listener.connections) == LIMIT - 1)
    door.may.set()
    reader, _ = await door.client(GET % b"/held")
    assert await status_of(reader) == 200, "there is room again"


async def test_what_the_kernel_has_taken_is_served_when_the_door_closes(door: Door) -> None:
    clients = [socket.create_connection(("127.0.0.1", door.port)) for _ in range(3)]  # this loop has not seen them
    for client in clients:
        client.sendall(GET % b"/health")
    door.listener.close()
    for client in clients:
        client.settimeout(30)
        assert (await asyncio.to_thread(client.recv, 15)) == b"HTTP/1.1 200 OK"
        client.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", door.port))


async def test_an_answer_that_is_broken_off_does_not_pass_for_a_whole_one(door: Door) -> None:
    reader, _ = await door.client(GET % b"/half")
    head = await reader.readuntil(b"half")
    assert b"Transfer-Encoding: chunked" in head
    door.in_flight.break_off()
    with contextlib.suppress(ConnectionError):
        assert b"0\r\n\r\n" not in await rest_of(reader)
    await eventually(lambda: door.listener.is_empty)


@pytest.mark.parametrize(("path", "event"), [(b"/v1/messages", b"event: error\n"), (b"/v1/completions", b"")])
async def test_a_stream_that_is_broken_off_ends_as_its_client_reads_it(door: Door, path: bytes, event: bytes) -> None:
    reader, _ = await door.client(GET % path)
    await reader.readuntil(b"half\n\n")
    door.in_flight.break_off()
    rest = await reader.readuntil(b"0\r\n\r\n")
    assert b"\n" + event + b"data: {" in rest
    assert b"the router was stopped" in rest


async def test_an_answer_that_is_not_taken_is_still_carried(door: Door) -> None:
    deaf = socket.create_connection(("127.0.0.1", door.port))
    deaf.sendall(GET % b"/large")
    await eventually(lambda: door.listener.connections)
    [one] = door.listener.connections
    await eventually(lambda: len(door.in_flight) == 0)
    await asyncio.sleep(0.1)
    assert one.carries
    one.abort()
    await eventually(lambda: door.listener.is_empty)
    deaf.close()


async def test_the_kernel_looks_for_peers_that_are_gone(door: Door) -> None:
    await door.client()
    await eventually(lambda: door.listener.connections)
    [one] = door.listener.connections
    assert one.transport is not None
    sock = one.transport.get_extra_info("socket")
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    tcp = [socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT]
    assert [sock.getsockopt(socket.IPPROTO_TCP, each) for each in tcp] == [30, 10, 3, 60_000]


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]

        async def listen() -> None:
            Listener(None, 1, print).bind("127.0.0.1", port)  # type: ignore[arg-type]

        with pytest.raises(
            LocalClusterError, match=rf"port {port} on 127.0.0.1 cannot be used \(Address already in use"
        ):
            asyncio.run(listen())


def test_a_port_that_another_process_listens_on_first_is_named() -> None:
    async def listen() -> None:
        port, two = free_port(), [Listener(None, 1, print) for _ in range(2)]  # type: ignore[arg-type]
        for each in two:
            each.bind("127.0.0.1", port)
        two[0].listen()
        try:
            with pytest.raises(LocalClusterError, match=rf"port {port} on 127.0.0.1 cannot be used"):
                two[1].listen()
        finally:
            for each in two:
                each.close()

    asyncio.run(listen())


def test_room_is_as_large_as_descriptors_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(1024, 20_000)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: limits.append(both))
    assert room_for(1000) == 1000
    assert limits[-1] == (3256, 20_000), "the soft limit is raised to what is needed"
    assert room_for(10_000) == (20_000 - 256) // 3
    assert limits[-1] == (20_000, 20_000)


@pytest.mark.slow
async def test_a_router_without_descriptors_says_so_and_answers_probes(nats_server: NatsServer, tmp_path: Path) -> None:
    async with fleet(nats_server.url, namespace := new_namespace(), FakeApi("P"), FakeApi("D")):
        port = free_port()
        command = [sys.executable, "-m", "kvbus", "router", "--nats-url", nats_server.url, "--namespace", namespace]
        router = Child("router", [*command, "--port", str(port)], tmp_path)
        try:
            await eventually(lambda: "the router listens" in router.log.read_text(), 60)
            open_now = len(list(Path(f"/proc/{router.pid}/fd").iterdir()))
            before = resource.prlimit(router.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(router.pid, resource.RLIMIT_NOFILE, (open_now, before[1]))

            async def get(path: bytes) -> bytes:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(GET % path)
                try:
                    return await rest_of(reader)
                finally:
                    writer.close()

            for _ in range(5):
                assert (await get(b"/health")).startswith(b"HTTP/1.1 200 ")
            assert (await get(CHAT.encode())).startswith(b"HTTP/1.1 503 ")
            log = router.log.read_text()
            assert log.count("no file descriptors are left (ulimit -n)") == 1
            resource.prlimit(router.pid, resource.RLIMIT_NOFILE, before)
            metrics = await get(b"/metrics HTTP/1.1\r\nConnection: close\r\nX:")
            assert b'kvbus_router_connections_refused_total{why="descriptors"} 6.0' in metrics
            router.ask_to_end()
            await eventually(lambda: not router.alive, 60)
            assert router.status == 0
            assert "Traceback" not in router.log.read_text()
        finally:
            with contextlib.suppress(ProcessLookupError):
                router.kill()
