"""HTTP to the engines: sends requests, and tells what answers mean. The adapter of aiohttp's client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import hdrs
from aiohttp.abc import AbstractStreamWriter
from multidict import CIMultiDict

from kvbus.router.http.answers import Answer
from kvbus.router.http.headers import RANK, returned
from kvbus.router.http.lazy_json import Content, pieces
from kvbus.wire import Heartbeat

CONNECT_TIMEOUT_S = 5.0
SEND_BYTES = 1 << 16
# vLLM closes an idle connection after 5 s. A request on one that is just being closed would look like a dead engine.
KEEP_ALIVE_S = 3.0
_ENGINE_FAILED = frozenset({500, 502, 503, 504})
LOST = (aiohttp.ClientError, asyncio.TimeoutError, OSError)
"""What a leg raises when its engine is lost."""


@asynccontextmanager
async def open_session() -> AsyncIterator[aiohttp.ClientSession]:
    """A session that stores no cookies and unpacks nothing: an engine's answer is passed on as it is."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
    async with aiohttp.ClientSession(
        timeout=timeout,
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers={"User-Agent"},
        middlewares=(_refuse_redirects,),
    ) as session:
        yield session


async def _refuse_redirects(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    """A prompt and its key go only to the engine that was chosen."""
    request.headers[hdrs.ACCEPT_ENCODING] = "identity"
    answer = await handler(request)
    if 300 <= answer.status < 400 and answer.status != 304:
        answer.close()
        raise RedirectedError(answer.status)
    return answer


class RedirectedError(aiohttp.ClientError):
    """The engine answered with a redirect."""

    def __init__(self, status: int) -> None:
        super().__init__(f"it answered with a redirect ({status}), which is not followed")


def engine_failed(status: int) -> bool:
    """Whether a status tells of the engine, not of the request: another engine may do better."""
    return status in _ENGINE_FAILED


async def whole(answer: aiohttp.ClientResponse) -> Answer:
    """Read an answer to its end.

    Raises:
        aiohttp.ClientError: it broke off.
    """
    return Answer(answer.status, await answer.read(), returned(answer.headers))


def why(failure: BaseException) -> str:
    if isinstance(failure, TimeoutError) and not str(failure):
        return "it did not answer in time"
    return str(failure) or type(failure).__name__


def url_of(engine: Heartbeat, path: str) -> str:
    return f"http://{engine.address}{path}"


def rank_of(engine: Heartbeat) -> dict[str, str]:
    """The header that names this engine's rank, where several share a port."""
    return {RANK: str(engine.data_parallel_rank)} if engine.data_parallel else {}


async def post(
    session: aiohttp.ClientSession, engine: Heartbeat, path: str, leg: Any, headers: Mapping[str, str]
) -> Answer:
    """Post and read the whole answer.

    Raises:
        aiohttp.ClientError: no answer, or half of one.
    """
    async with post_leg(session, engine, path, leg, headers) as answer:
        return await whole(answer)


def post_leg(
    session: aiohttp.ClientSession, engine: Heartbeat, path: str, leg: Any, headers: Mapping[str, str]
) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
    """Post, and leave the reading to the caller."""
    content = Pieces(pieces(leg))
    sent = CIMultiDict(headers)
    sent.update(rank_of(engine))
    sent["Content-Type"] = "application/json"
    return session.post(url_of(engine, path), data=content, headers=sent)


class Pieces(aiohttp.Payload):
    """A body in pieces. It is sent a little at a time: a large one is not copied, and does not hold the loop."""

    def __init__(self, parts: Sequence[Content | memoryview]) -> None:
        super().__init__(parts, content_type="application/json")
        self._parts, self._size = parts, sum(len(part) for part in parts)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return b"".join(self._parts).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        small = [part for part in self._parts if len(part) <= SEND_BYTES]
        if len(small) == len(self._parts) and self._size is not None and self._size <= SEND_BYTES:
            await writer.write(b"".join(small))
            return
        for part in self._parts:
            for at in range(0, len(part), SEND_BYTES):
                await writer.write(part[at : at + SEND_BYTES])
