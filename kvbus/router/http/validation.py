"""Reads a client's request, or says what is wrong with it. What only the model knows is left to the engines."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from kvbus.config import REGISTRATIONS
from kvbus.router.http.answers import INVALID, OVERLOADED, Answer, error
from kvbus.router.http.bodies import SHORT_BYTES, Content, Raw, members


class BadRequestError(Exception):
    """``answer`` names what is wrong and what is allowed."""

    def __init__(self, answer: Answer, *, close: bool = False) -> None:
        self.answer, self.close = answer, close
        super().__init__(f"status {answer.status}")


HELD = web.RequestKey("bytes held", int)


class Reader:
    """Reads bodies, and bounds the memory that they take together: until a request ends its body is kept.

    Args:
        timeout_s: for one body to arrive.
        max_body_mib, max_bodies_mib: of one, and of all that are held.
    """

    def __init__(self, timeout_s: float, max_body_mib: int, max_bodies_mib: int) -> None:
        self._timeout_s, self._max_body_mib, self._max_bodies_mib = timeout_s, max_body_mib, max_bodies_mib
        self.held_bytes = 0

    @web.middleware
    async def release(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """When the request has ended."""
        try:
            return await handler(request)
        finally:
            self.held_bytes -= request.get(HELD, 0)

    async def body(self, request: web.Request) -> dict[str, Any]:
        """The JSON object in a request; raises what the others do."""
        return await parse(await self.content(request))

    async def content(self, request: web.Request) -> Content:
        """A request's body.

        Raises:
            BadRequestError: it does not come, is too large, or there is no room for it; the connection must end, since
                the rest is still to come.
        """
        _check_packing(request)
        declared = request.content_length
        if declared is not None and declared > self._max_body_mib << 20:
            raise BadRequestError(self._too_large(), close=True)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._read(request, declared or 0)
        except TimeoutError:
            message = f"the body did not arrive within {self._timeout_s:g} s"
            raise BadRequestError(error(408, message, INVALID), close=True) from None
        except (aiohttp.ClientPayloadError, web.RequestPayloadError, HttpProcessingError) as failure:
            message = f"the body cannot be read: {' '.join(str(failure).split())[:200]}"
            raise BadRequestError(error(400, message, INVALID), close=True) from None

    async def _read(self, request: web.Request, declared: int) -> Content:
        self._hold(request, declared)
        content = bytearray()
        async for part in request.content.iter_any():
            content += part
            size = len(content)
            if size > self._max_body_mib << 20:
                raise BadRequestError(self._too_large(), close=True)
            self._hold(request, max(0, size - max(declared, request[HELD])))
        return content

    def _hold(self, request: web.Request, more: int) -> None:
        if more and self.held_bytes + more > self._max_bodies_mib << 20:
            message = f"request bodies of {self._max_bodies_mib} MiB are being served, as many as are allowed"
            raise BadRequestError(error(503, message, OVERLOADED, headers={"Retry-After": "1"}), close=True)
        self.held_bytes += more
        request[HELD] = request.get(HELD, 0) + more

    def _too_large(self) -> Answer:
        return error(413, f"the body is larger than the {self._max_body_mib} MiB that are allowed", INVALID)


def _check_packing(request: web.Request) -> None:
    packed = request.headers.get("Content-Encoding", "identity")
    if packed.lower() != "identity":
        message = f"Content-Encoding: {packed!r:.80} is not allowed; allowed: identity, which is a body as it is"
        raise BadRequestError(error(415, message, INVALID), close=True)


async def parse(content: Content) -> dict[str, Any]:
    """The JSON object in a body.

    Raises:
        BadRequestError: there is none, or a field that is the router's business is wrong.
    """
    try:
        body = await members(content)
    except (ValueError, RecursionError) as failure:
        why = failure if isinstance(failure, ValueError) else "it is nested too deeply"
        raise BadRequestError(error(400, f"the body is not JSON: {why}", INVALID)) from None
    except TypeError as failure:
        raise BadRequestError(error(400, f"the body is {failure}", INVALID)) from None
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        message = f"model: {model!r:.80} is not allowed; allowed: the name of a model, as text"
        raise BadRequestError(error(400, message, INVALID, "model"))
    _keep_what_clients_may_say(body)
    return body


def _keep_what_clients_may_say(body: dict[str, Any]) -> None:
    """Of ``kv_transfer_params``: with others, a client could pin an engine's blocks, or name another one's transfer.

    vLLM also takes them from where it keeps what it does not know itself.
    """
    params = body.pop("kv_transfer_params", None)
    for name in ("vllm_xargs", "sampling_params"):
        value = body.get(name)
        if isinstance(value, Raw):
            message = f"{name}: {len(value.raw)} bytes are not allowed; allowed: {SHORT_BYTES}"
            raise BadRequestError(error(400, message, INVALID, name))
        for extra in (value, value.get("extra_args") if isinstance(value, dict) else None):
            if isinstance(extra, dict):
                extra.pop("kv_transfer_params", None)
    when = params.get("registration") if isinstance(params, dict) else None
    if when is None:
        return
    if when not in REGISTRATIONS:
        message = f"kv_transfer_params.registration: {when!r:.80} is not allowed; allowed: {', '.join(REGISTRATIONS)}"
        raise BadRequestError(error(400, message, INVALID, "kv_transfer_params"))
    body["kv_transfer_params"] = {"registration": when}
