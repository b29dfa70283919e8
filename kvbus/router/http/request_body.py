"""Reads a client's request, or says what is wrong with it. What only the model can judge is left to the engines."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from kvbus.config import REGISTRATIONS
from kvbus.router.http.answers import INVALID, OVERLOADED, Answer, RefusedError, error
from kvbus.router.http.lazy_json import SHORT_BYTES, Content, Raw, members, pieces

MAX_PARTS = 64
MAX_PART_HEAD_BYTES = 1 << 12
_MODEL_PART = re.compile(rb'content-disposition:[^\r\n]*[; ]name="?model"?\s*(?:;|\r|$)', re.IGNORECASE)
_HELD_BYTES = web.RequestKey("bytes held", int)


class Reader:
    """Reads bodies, and bounds the memory that they take together. A body is kept until its request ends.

    Args:
        timeout_s: how long one body may take to arrive.
        max_body_mib: the largest body.
        max_bodies_mib: all bodies that are held, together.
    """

    def __init__(self, timeout_s: float, max_body_mib: int, max_bodies_mib: int) -> None:
        self._timeout_s, self._max_body_mib, self._max_bodies_mib = timeout_s, max_body_mib, max_bodies_mib
        self._held_bytes = 0

    @web.middleware
    async def release(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Give the memory back when the request has ended."""
        try:
            return await handler(request)
        finally:
            self._held_bytes -= request.get(_HELD_BYTES, 0)

    async def read(self, request: web.Request) -> Content:
        """A request's body.

        Raises:
            RefusedError: it does not arrive, is too large, or there is no memory for it. The connection must end, since
                the rest of the body is still to come.
        """
        packing = request.headers.get("Content-Encoding", "identity")
        if packing.lower() != "identity":
            message = f"Content-Encoding: {packing!r:.80} is not allowed; allowed: identity, which is a body as it is"
            raise RefusedError(error(415, message, INVALID), close=True)
        declared = request.content_length or 0
        if declared > self._max_body_mib << 20:
            raise RefusedError(self._too_large(), close=True)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._read(request, declared)
        except TimeoutError:
            message = f"the body did not arrive within {self._timeout_s:g} s"
            raise RefusedError(error(408, message, INVALID), close=True) from None
        except (aiohttp.ClientPayloadError, web.RequestPayloadError, HttpProcessingError) as failure:
            message = f"the body cannot be read: {' '.join(str(failure).split())[:200]}"
            raise RefusedError(error(400, message, INVALID), close=True) from None

    async def _read(self, request: web.Request, declared: int) -> Content:
        self._hold(request, declared)
        content = bytearray()
        async for part in request.content.iter_any():
            content += part
            size = len(content)
            if size > self._max_body_mib << 20:
                raise RefusedError(self._too_large(), close=True)
            self._hold(request, max(0, size - max(declared, request[_HELD_BYTES])))
        return content

    def _hold(self, request: web.Request, more: int) -> None:
        if more and self._held_bytes + more > self._max_bodies_mib << 20:
            message = f"request bodies of {self._max_bodies_mib} MiB are being served, as many as are allowed"
            raise RefusedError(error(503, message, OVERLOADED, headers={"Retry-After": "1"}), close=True)
        self._held_bytes += more
        request[_HELD_BYTES] = request.get(_HELD_BYTES, 0) + more

    def _too_large(self) -> Answer:
        return error(413, f"the body is larger than the {self._max_body_mib} MiB that are allowed", INVALID)


async def parse(content: Content) -> dict[str, Any]:
    """The JSON object in a body.

    Raises:
        RefusedError: there is none, or a field that the router itself needs is wrong.
    """
    try:
        body = await members(content)
    except (ValueError, RecursionError) as failure:
        why = failure if isinstance(failure, ValueError) else "it is nested too deeply"
        raise RefusedError(error(400, f"the body is not JSON: {why}", INVALID)) from None
    except TypeError as failure:
        raise RefusedError(error(400, f"the body is {failure}", INVALID)) from None
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise _not_allowed("model", f"{model!r:.80} is", "the name of a model, as text")
    _strip_transfer_params(body)
    return body


async def model_and_pieces(content: Content, content_type: str) -> tuple[str | None, list[Content | memoryview]]:
    """The model that a JSON body or a form names, None if it names none; and the pieces of the body to send on.

    Raises:
        RefusedError: it should be JSON and is not, or the model's name is no text.
    """
    kind, _, parameters = content_type.partition(";")
    if kind.strip().lower() == "multipart/form-data":
        boundary = re.search(r'boundary="?([^";]{1,70})', parameters, re.IGNORECASE)
        model = _model_in_form(content, b"--" + boundary[1].encode()) if boundary else None
        return model, [content]
    if not content:
        return None, []
    body = await parse(content)
    return body.get("model"), pieces(body)


def _model_in_form(content: Content, delimiter: bytes) -> str | None:
    at = content.find(delimiter)
    for _ in range(MAX_PARTS):
        head_end = content.find(b"\r\n\r\n", at, at + MAX_PART_HEAD_BYTES)
        after = content.find(b"\r\n" + delimiter, head_end)
        if at < 0 or head_end < 0 or after < 0:
            return None
        if _MODEL_PART.search(content, at, head_end + 2):
            return content[head_end + 4 : after][:256].decode(errors="replace") or None
        at = after + 2
    return None


def _strip_transfer_params(body: dict[str, Any]) -> None:
    """Leave a client only ``registration`` of its ``kv_transfer_params``. With the others it could pin an engine's
    blocks, or name somebody else's transfer.

    vLLM also takes them from ``vllm_xargs`` and ``sampling_params.extra_args``.
    """
    params = body.pop("kv_transfer_params", None)
    for name in ("vllm_xargs", "sampling_params"):
        value = body.get(name)
        if isinstance(value, Raw):
            raise _not_allowed(name, f"{len(value.raw)} bytes are", str(SHORT_BYTES))
        for extra in (value, value.get("extra_args") if isinstance(value, dict) else None):
            if isinstance(extra, dict):
                extra.pop("kv_transfer_params", None)
    when = params.get("registration") if isinstance(params, dict) else None
    if when is None:
        return
    if when not in REGISTRATIONS:
        raise _not_allowed("kv_transfer_params.registration", f"{when!r:.80} is", ", ".join(REGISTRATIONS))
    body["kv_transfer_params"] = {"registration": when}


def _not_allowed(field: str, found: str, allowed: str) -> RefusedError:
    message = f"{field}: {found} not allowed; allowed: {allowed}"
    return RefusedError(error(400, message, INVALID, field.partition(".")[0]))
