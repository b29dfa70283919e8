"""The engines' HTTP: what a leg's answer means. One adapter for aiohttp's client; lives in one event loop."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import aiohttp

from kvbus.messages import Heartbeat
from kvbus.router.answers import Answer

CONNECT_TIMEOUT_S = 5.0
# vLLM closes an idle connection after 5 s; a request on one that is just being closed would look like a dead engine.
KEEP_ALIVE_S = 3.0
# Of the engine, not of the request: another engine may do better.
_ENGINE_FAILED = frozenset({500, 502, 503, 504})
_HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "content-length"})
RANK_HEADER = "X-data-parallel-rank"
# Ours to say.
_OWN = {RANK_HEADER.lower()}
_NOT_FORWARDED = _HOP_BY_HOP | {"host", "accept-encoding", "content-encoding", "content-type", "expect"} | _OWN
_NOT_RETURNED = _HOP_BY_HOP | {"date", "server"}


@asynccontextmanager
async def open_session() -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        yield session


def forwarded(headers: Mapping[str, str]) -> dict[str, str]:
    """What of a client's headers goes to the engines."""
    return {key: value for key, value in headers.items() if key.lower() not in _NOT_FORWARDED}


def returned(answer: aiohttp.ClientResponse) -> dict[str, str]:
    """What of an engine's headers goes to the client."""
    return {key: value for key, value in answer.headers.items() if key.lower() not in _NOT_RETURNED}


def engine_failed(status: int) -> bool:
    """Whether a status is the engine's own trouble."""
    return status in _ENGINE_FAILED


async def whole(answer: aiohttp.ClientResponse) -> Answer:
    """Read an answer to its end.

    Raises:
        aiohttp.ClientError: it broke off.
    """
    return Answer(answer.status, await answer.read(), returned(answer))


def why(failure: BaseException) -> str:
    if isinstance(failure, TimeoutError) and not str(failure):
        return "it did not answer in time"
    return str(failure) or type(failure).__name__


def url_of(engine: Heartbeat, path: str) -> str:
    return f"http://{engine.address}{path}"


def rank_of(engine: Heartbeat) -> dict[str, str]:
    """The header by which a request reaches this very engine, where several share a port."""
    return {RANK_HEADER: str(engine.data_parallel_rank)} if engine.data_parallel else {}


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
    """Post, and leave the reading to the caller. A large body goes out piece by piece, not in one go on the loop."""
    content = io.BytesIO(json.dumps(leg).encode())
    headers = {**headers, **rank_of(engine), "Content-Type": "application/json"}
    return session.post(url_of(engine, path), data=content, headers=headers)


LOST = (aiohttp.ClientError, asyncio.TimeoutError, OSError)
"""What a leg raises whose engine is lost."""
