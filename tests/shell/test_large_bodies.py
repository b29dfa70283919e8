"""R6, R7: large bodies hold nobody up, and take bounded memory."""

from __future__ import annotations

import asyncio
import io
import json
import sys
import time
from pathlib import Path

import aiohttp
import psutil
import pytest
from aiohttp import web
from support.fronts import FakeApi
from support.routers import fleet, new_namespace, router_process
from support.waiting import eventually

from kvbus.local import NatsServer

MIB = 1 << 20
STREAMS, BODIES = 20, 6
STALL_MS = 250
WATCH = Path(__file__).parents[1] / "support" / "stream_watch.py"


class Ticking(FakeApi):
    """Answers large bodies when they have come, and streams events that say when they were sent until told to end."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.received: list[int] = []
        self.streams = 0
        self.end = asyncio.Event()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        size = len(await request.read())
        if size > MIB:
            self.received.append(size)
        if size > MIB or self.name == "P":
            return web.json_response({"ok": True})
        self.streams += 1
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while not self.end.is_set():
            event = {"sent_at": time.monotonic(), "choices": [{"delta": {"content": "a"}}]}
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
            await asyncio.sleep(0.05)
        await response.write(b"data: [DONE]\n\n")
        return response


def body_of(mib: int) -> bytes:
    ids = ",".join(["12345"] * (mib * MIB // 6))
    return f'{{"model": "m", "prompt": [{ids}], "max_tokens": 1}}'.encode()


async def metrics(url: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as answer:
        return await answer.text()


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_six_large_bodies_beside_twenty_streams(nats_server: NatsServer, tmp_path: Path) -> None:
    body = body_of(30)
    async with fleet(nats_server.url, new_namespace(), Ticking("P"), Ticking("D")) as made:
        with router_process(made, tmp_path) as router:
            await router.ready()
            process = psutil.Process(router.child.pid)
            before = process.memory_info().rss
            watching = await asyncio.create_subprocess_exec(
                sys.executable, str(WATCH), router.url, str(STREAMS), stdout=asyncio.subprocess.PIPE
            )
            await eventually(lambda: made["D"].streams == STREAMS)  # type: ignore[attr-defined]
            peak = before

            async def post(session: aiohttp.ClientSession) -> int:
                async with session.post(f"{router.url}/v1/completions", data=io.BytesIO(body)) as answer:
                    return answer.status

            async with aiohttp.ClientSession() as session:
                posting = asyncio.gather(*(post(session) for _ in range(BODIES)))
                while not posting.done():
                    peak = max(peak, process.memory_info().rss)
                    await asyncio.sleep(0.05)
                assert await posting == [200] * BODIES
            made["D"].end.set()  # type: ignore[attr-defined]
            seen = json.loads((await watching.communicate())[0])
            grown = (peak - before) / len(body) / BODIES
            print(
                f"{BODIES} bodies of 30 MiB beside {STREAMS} streams: {seen}; memory at most {grown:.1f} of their size"
            )
            for name in ("P", "D"):
                assert len(made[name].received) == BODIES  # type: ignore[attr-defined]
            assert seen["latest_ms"] < STALL_MS
            assert grown < 4
            assert "is lost" not in router.log
            assert "NATS" not in router.log.partition("listens on")[2]


@pytest.mark.slow
async def test_the_sum_of_bodies_is_bounded(nats_server: NatsServer, tmp_path: Path) -> None:
    async with fleet(nats_server.url, new_namespace(), Ticking("P"), Ticking("D")) as made:
        with router_process(made, tmp_path, "--max-bodies-mib", "8") as router:
            await router.ready()
            held = await asyncio.open_connection("127.0.0.1", router.port)
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (6 * MIB)
            held[1].write(head)

            async def status() -> int:
                url = f"{router.url}/v1/completions"
                async with aiohttp.ClientSession() as session, session.post(url, data=io.BytesIO(body_of(3))) as answer:
                    text = await answer.text()
                    assert answer.status == 200 or "8 MiB are being served" in text
                    return answer.status

            deadline = time.monotonic() + 20
            while await status() != 503:
                assert time.monotonic() < deadline
            held[1].close()
            while await status() != 200:
                assert time.monotonic() < deadline
