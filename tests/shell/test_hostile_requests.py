"""R14: whatever comes over a socket gets an error in OpenAI's form, or a closed connection; the log stays readable."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from pathlib import Path

import aiohttp
import pytest
from support.fronts import FakeApi
from support.routers import RouterProcess, fleet, new_namespace, router_process

from kvbus.local import NatsServer

COUNT = 300
PATIENCE_S = 0.5
PATH = b"/v1/completions"
GOOD = b'{"model": "m", "prompt": "hello"}'
TLS_HELLO = bytes.fromhex("16030100c8010000c403035f") + bytes(180)


def post(body: bytes, *headers: bytes, path: bytes = PATH, length: int | None = None) -> bytes:
    size = b"Content-Length: %d" % (len(body) if length is None else length)
    return b"\r\n".join([b"POST %s HTTP/1.1" % path, b"Host: x", size, *headers, b"", body])


def chunked(*chunks: bytes) -> bytes:
    head = [b"POST %s HTTP/1.1" % PATH, b"Host: x", b"Transfer-Encoding: chunked", b"", b""]
    return b"\r\n".join(head) + b"".join(chunks)


HOSTILE = [
    b"\r\n\r\n",
    b"\x00\x01\x02\x03\r\n\r\n",
    TLS_HELLO,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"SSH-2.0-OpenSSH_9.2\r\n",
    b"GET /v1/models\r\n",
    b"GET /v1/models HTTP/0.9\r\n\r\n",
    b"GET /v1/models HTTP/9.9\r\nHost: x\r\n\r\n",
    b"G\x7fT / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET http://other/v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
    b"CONNECT other:443 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    b"DELETE /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /metrics HTTP/1.1\nHost: x\n\n",
    b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
    b"GET / HTTP/1.1\r\n folded: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nBad\x00Name: x\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 40_000 + b"\r\n\r\n",
    b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 2_000 + b"\r\n",
    post(GOOD, length=-1),
    post(GOOD, length=10**12),
    post(GOOD, length=10**30),
    post(GOOD, b"Content-Length: 5"),
    post(GOOD, b"Transfer-Encoding: chunked"),
    post(GOOD, b"Transfer-Encoding: nonsense"),
    post(GOOD, b"Expect: nonsense"),
    post(b"not gzip", b"Content-Encoding: gzip"),
    post(GOOD, b"Content-Encoding: br"),
    post(GOOD, b"Upgrade: websocket", b"Connection: Upgrade"),
    chunked(b"zz\r\nhello\r\n0\r\n\r\n"),
    chunked(b"-5\r\nhello\r\n0\r\n\r\n"),
    chunked(b"fffffffffffffffff\r\nhello\r\n0\r\n\r\n"),
    chunked(b"5\r\nhelloXX0\r\n\r\n"),
    chunked(b"5;" + b"x" * 20_000 + b"\r\nhello\r\n0\r\n\r\n"),
    *(post(body) for body in (b"", b"{", b"null", b"[]", b"3", b'"x"', b"\xff\xfe", b"\xef\xbb\xbf{}", b"[" * 100_000)),
    post(b'{"model": 7}'),
    post(b'{"model": "m", "prompt": NaN}'),
    post(b'{"model": "other"}'),
    post(b'{"model": "m", "n": 1e999, "prompt": "x"}'),
    post(b'{"model": "m", "prompt": "x", "kv_transfer_params": 5}'),
    post(b'{"model": "m", "stream": "yes", "prompt": [[]]}'),
    post(GOOD, path=b"/v1/nothing"),
    post(GOOD, path=b"/v1/completions/../../x"),
]


def hostile() -> list[bytes]:
    """The list, and as many with some of their bytes changed as make up the number."""
    chance, made = random.Random(14), list(HOSTILE)
    while len(made) < COUNT:
        changed = bytearray(chance.choice(HOSTILE)[:4_000])
        for _ in range(chance.randint(1, 4)):
            changed[chance.randrange(min(len(changed), 120))] = chance.randrange(256)
        made.append(bytes(changed))
    return made


async def answer_to(port: int, sent: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent)
        with contextlib.suppress(TimeoutError):  # it may wait for the rest of what began as a request
            async with asyncio.timeout(PATIENCE_S):
                first = await reader.read(1 << 20)
                return first if first.endswith(b"}") else first + await reader.read(1 << 20)
        writer.write_eof()
        return await asyncio.wait_for(reader.read(1 << 20), 20)
    except ConnectionError:
        return b""
    finally:
        writer.close()


def outcome(answer: bytes) -> str:
    """What a client made of it; raises unless it is one of three."""
    if not answer:
        return "closed"
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    if status < 400:
        return "answered"
    said = json.loads(body[: int(head.lower().partition(b"content-length: ")[2].split()[0])])
    assert said["error"]["message"]
    assert said["error"]["code"] == status
    assert status < 500, said
    return "refused"


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_hostile_requests_are_refused_in_openais_form(nats_server: NatsServer, tmp_path: Path) -> None:
    async with fleet(nats_server.url, new_namespace(), FakeApi("P"), FakeApi("D")) as made:
        with router_process(made, tmp_path) as router:
            await router.ready()
            await besiege(router)


async def besiege(router: RouterProcess) -> None:
    found: Counter[str] = Counter()
    for sent in hostile():
        try:
            found[outcome(await answer_to(router.port, sent))] += 1
        except Exception as failure:
            raise AssertionError(f"sent {sent[:300]!r}") from failure
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{router.url}/v1/completions", data=GOOD) as answer:
            assert answer.status == 200
        async with session.get(f"{router.url}/metrics") as answer:
            text = await answer.text()
    malformed = next(line for line in text.splitlines() if 'refused_total{why="malformed"}' in line)
    print(f"{COUNT} hostile requests: {dict(found)}; {malformed}")
    assert found["refused"] > COUNT / 2
    assert float(malformed.rpartition(" ")[2]) > COUNT / 4
    assert "Traceback" not in router.log
    assert len(router.log.splitlines()) < 60
