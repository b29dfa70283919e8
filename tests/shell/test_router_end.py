"""How a router ends: what it carries, ends (R1); told twice, it ends at once, and says so to whoever waits (R2)."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from support.fronts import END, TOKEN_EVENT, FakeApi
from support.routers import CHAT, Fleet, RouterProcess, ask, fleet, message_of, new_namespace, router_process
from support.waiting import eventually

from kvbus.local import NatsServer

# Seconds of restarts under load.
ROLL_S = float(os.environ.get("KVBUS_ROLL_S", "12"))
STREAM = (TOKEN_EVENT + TOKEN_EVENT + END).decode()
STOPPED = "the router was stopped before this request had ended; send it again"


@pytest.fixture
async def engines(nats_server: NatsServer) -> AsyncIterator[Fleet]:
    async with fleet(nats_server.url, new_namespace(), FakeApi("P"), FakeApi("D")) as made:
        made["D"].stream = [TOKEN_EVENT, TOKEN_EVENT, END]
        yield made


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as made:
        yield made


async def soon(condition: Callable[[], object]) -> None:
    """On a busy machine, too."""
    await eventually(condition, 60)


async def begin_streams(
    engines: Fleet, session: aiohttp.ClientSession, url: str, count: int
) -> list[asyncio.Task[Any]]:
    """So many streams whose first token is out, and which wait for their second."""
    engines["D"].hold_rest.clear()
    began: Counter[int] = Counter()

    async def stream(number: int) -> str:
        async with session.post(f"{url}{CHAT}", json={"model": "m", "messages": [], "stream": True}) as answer:
            assert answer.status == 200
            got = b""
            async for chunk in answer.content.iter_any():
                got += chunk
                began[number] = 1
            return got.decode()

    streams = [asyncio.create_task(stream(number)) for number in range(count)]
    await soon(lambda: len(began) == count)
    return streams


@pytest.mark.slow
async def test_sigterm_under_twenty_requests_loses_none(
    engines: Fleet, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    with router_process(engines, tmp_path, "--max-in-flight", "15", "--notice-s", "3") as router:
        await router.ready()
        at_rest = socket.create_connection(("127.0.0.1", router.port))
        streams = await begin_streams(engines, session, router.url, 10)
        engines["D"].hold.clear()
        wholes = [asyncio.create_task(ask(session, router.url)) for _ in range(10)]
        await soon(lambda: len(engines["D"].requests) == 15)  # the other five wait in the gate
        router.child.ask_to_end()
        await soon(lambda: "told to stop (SIGTERM)" in router.log)
        async with session.get(f"{router.url}/ready") as answer:
            assert (answer.status, answer.headers["Connection"]) == (503, "close")
        async with session.get(f"{router.url}/health") as answer:
            assert answer.status == 200, "it lives"
        late = asyncio.create_task(ask(session, router.url))  # a balancer that has not noticed yet
        await asyncio.sleep(0)
        at_rest.settimeout(30)
        assert await asyncio.to_thread(at_rest.recv, 1) == b"", "what is at rest is closed"
        at_rest.close()
        with pytest.raises(aiohttp.ClientConnectorError):
            await ask(session, router.url)
        assert not any(each.done() for each in (*streams, *wholes, late))
        engines["D"].hold.set()
        engines["D"].hold_rest.set()
        assert [await each for each in streams] == [STREAM] * 10
        answers = [await each for each in (*wholes, late)]
        assert [status for status, _, _ in answers] == [200] * 11
        assert {headers.get("Connection") for _, _, headers in answers} == {"close"}
        assert await router.ended() == 0
        assert "every request has ended" in router.log
        assert "Traceback" not in router.log
        assert router.traces == 21


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "again", "status", "why"),
    [
        (["--notice-s", "30"], signal.SIGTERM, 143, "told twice"),
        (["--notice-s", "30"], signal.SIGINT, 143, "told twice"),
        (["--notice-s", "0", "--grace-s", "1"], None, 143, "not ended within 1 s"),
    ],
)
async def test_what_is_broken_off_is_told_so(
    engines: Fleet,
    session: aiohttp.ClientSession,
    tmp_path: Path,
    options: list[str],
    again: signal.Signals | None,
    status: int,
    why: str,
) -> None:
    with router_process(engines, tmp_path, "--max-in-flight", "5", *options) as router:
        await router.ready()
        streams = await begin_streams(engines, session, router.url, 3)
        engines["D"].hold.clear()
        wholes = [asyncio.create_task(ask(session, router.url)) for _ in range(4)]
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode())
        await soon(lambda: len(engines["D"].requests) == 5)
        router.child.ask_to_end()
        await soon(lambda: "told to stop" in router.log)
        if again is not None:
            os.kill(router.child.pid, again)
        began = time.monotonic()
        for each in streams:
            events = (await each).split("\n\n")
            assert events[0].encode() + b"\n\n" == TOKEN_EVENT
            assert message_of(events[1].strip().removeprefix("data: ")) == STOPPED
        for each in wholes:
            got, text, headers = await each
            assert (got, message_of(text)) == (503, STOPPED)
            assert (headers["Connection"], headers["Retry-After"]) == ("close", "1")
        assert (await reader.readline()).startswith(b"HTTP/1.1 503 "), "its body was still to come"
        writer.close()
        assert await router.ended() == status
        assert time.monotonic() - began < 20
        assert f"8 requests are broken off: {why}" in router.log
        assert "Traceback" not in router.log
        assert router.traces == 5


@pytest.mark.slow
async def test_a_client_that_never_reads_holds_nobody(
    engines: Fleet, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    engines["D"].stream = [TOKEN_EVENT] + [b"data: " + b"x" * (1 << 20) + b"\n\n"] * 16 + [END]
    with router_process(engines, tmp_path, "--notice-s", "0", "--grace-s", "1") as router:
        await router.ready()
        body = b'{"model": "m", "stream": true}'
        with socket.create_connection(("127.0.0.1", router.port)) as deaf:
            deaf.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            await soon(lambda: engines["D"].requests)
            assert (await ask(session, router.url))[0] == 200
            router.child.ask_to_end()
            assert await router.ended() == 143
        assert "1 requests are broken off: not ended within 1 s" in router.log
        assert "Traceback" not in router.log


@pytest.mark.slow
async def test_sigterm_while_nats_is_away(
    own_nats_server: NatsServer, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    async with fleet(own_nats_server.url, new_namespace(), FakeApi("P"), FakeApi("D")) as engines:
        engines["D"].stream = [TOKEN_EVENT, TOKEN_EVENT, END]
        with router_process(engines, tmp_path, "--notice-s", "0.2") as router:
            await router.ready()
            streams = await begin_streams(engines, session, router.url, 3)
            await asyncio.to_thread(own_nats_server.stop)
            await soon(lambda: "lost the NATS server" in router.log)
            router.child.ask_to_end()
            await soon(lambda: "told to stop" in router.log)
            engines["D"].hold_rest.set()
            assert [await each for each in streams] == [STREAM] * 3
            assert await router.ended() == 0
            assert "Traceback" not in router.log
            assert router.traces == 3


async def test_ctrl_c_has_nobody_to_wait_for(engines: Fleet, tmp_path: Path) -> None:
    with router_process(engines, tmp_path, "--notice-s", "30") as router:
        await router.ready()
        began = time.monotonic()
        os.kill(router.child.pid, signal.SIGINT)
        assert await router.ended() == 0
        assert time.monotonic() - began < 20
        assert "Traceback" not in router.log


class PacedApi(FakeApi):
    """Answers take a while, each another while."""

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        chance, streams = random.Random(len(self.requests)), self.requests[-1][1].get("stream")
        await asyncio.sleep(chance.uniform(0.0, 0.3))
        if streams:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
            await response.prepare(request)
            for event in self.stream:
                await response.write(event)
                await asyncio.sleep(chance.uniform(0.0, 0.5))
            return response
        await asyncio.sleep(chance.uniform(0.0, 1.0))
        return web.Response(body=self.body, content_type="application/json")


class Balancer:
    """Sends each request to the next router; round again, while it cannot connect. Counts what became of them."""

    def __init__(self, routers: list[RouterProcess]) -> None:
        self._routers, self._number = routers, 0
        self.ended: Counter[str] = Counter()

    async def ask(self, session: aiohttp.ClientSession, *, stream: bool) -> None:
        self._number += 1
        first = self._number  # others ask meanwhile
        for offset in range(4):
            router = self._routers[(first + offset) % 2]
            try:
                status, text, _ = await ask(session, router.url, stream=stream)
            except aiohttp.ClientConnectorError:
                self.ended["elsewhere"] += 1
                continue
            except (aiohttp.ClientError, OSError) as failure:
                self.ended[f"failed: {failure!r}"] += 1
                return
            whole = text == STREAM if stream else text == '{"ok": true}'
            self.ended["ok" if status == 200 and whole else f"failed: {status} {text[:200]}"] += 1
            return
        self.ended["failed: no router"] += 1


@pytest.mark.slow
@pytest.mark.timeout(ROLL_S + 300)
async def test_two_routers_restarted_in_turn_lose_no_request(nats_server: NatsServer, tmp_path: Path) -> None:
    """A roll-out behind a balancer. ``KVBUS_ROLL_S=300`` restarts one each 20 s for five minutes."""
    every_s, notice_s = (20.0, "5") if ROLL_S >= 60 else (ROLL_S / 4, "1")
    apis = [PacedApi("P"), PacedApi("D"), PacedApi("E")]
    for api in apis:
        api.stream = [TOKEN_EVENT, TOKEN_EVENT, END]
    async with (
        fleet(nats_server.url, new_namespace(), *apis) as engines,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as keeping,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as closing,
    ):
        with (
            router_process(engines, tmp_path, "--notice-s", notice_s, name="one") as one,
            router_process(engines, tmp_path, "--notice-s", notice_s, name="two") as two,
        ):
            balancer = Balancer([one, two])
            await one.ready()
            await two.ready()
            over, asking, restarts = asyncio.Event(), set(), 0

            async def load() -> None:
                number = 0
                while not over.is_set():
                    number += 1
                    session = closing if number % 3 else keeping
                    task = asyncio.create_task(balancer.ask(session, stream=number % 2 == 0))
                    asking.add(task)
                    task.add_done_callback(asking.discard)
                    await asyncio.sleep(0.1)

            loading = asyncio.create_task(load())
            began = time.monotonic()
            while restarts < 2 or time.monotonic() + every_s < began + ROLL_S:
                due = time.monotonic() + every_s
                router = (one, two)[restarts % 2]
                router.child.ask_to_end()
                assert await router.ended() == 0
                router.start()
                await router.ready()
                restarts += 1
                await asyncio.sleep(max(0.0, due - time.monotonic()))
            over.set()
            await loading
            await asyncio.gather(*asking)
            print(f"{restarts} restarts in {time.monotonic() - began:.0f} s: {dict(balancer.ended)}")
            assert set(balancer.ended) <= {"ok", "elsewhere"}
            assert balancer.ended["ok"] > 20
            assert "Traceback" not in one.log + two.log
