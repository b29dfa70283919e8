"""Reads a client's request, or says what is wrong with it. What only the model knows is left to the engines."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from kvbus.router.answers import INVALID, Answer, error


class BadRequestError(Exception):
    """``answer`` names what is wrong and what is allowed."""

    def __init__(self, answer: Answer, *, close: bool = False) -> None:
        self.answer, self.close = answer, close
        super().__init__(f"status {answer.status}")


async def read_body(request: web.Request, timeout_s: float, max_body_mib: int) -> dict[str, Any]:
    """The JSON object in a request; raises what the others do."""
    return parse(await read_content(request, timeout_s, max_body_mib))


async def read_content(request: web.Request, timeout_s: float, max_body_mib: int) -> bytes:
    """A request's body.

    Raises:
        BadRequestError: it does not come, or is too large; the connection must end, since the rest is still to come.
    """
    packed = request.headers.get("Content-Encoding", "identity")
    if packed.lower() != "identity":
        message = f"Content-Encoding: {packed!r:.80} is not allowed; allowed: identity, which is a body as it is"
        raise BadRequestError(error(415, message, INVALID), close=True)
    if request.content_length is not None and request.content_length > max_body_mib << 20:
        raise BadRequestError(_too_large(max_body_mib), close=True)
    try:
        async with asyncio.timeout(timeout_s):
            return await request.read()
    except TimeoutError:
        message = f"the body did not arrive within {timeout_s:g} s"
        raise BadRequestError(error(408, message, INVALID), close=True) from None
    except web.HTTPRequestEntityTooLarge:
        raise BadRequestError(_too_large(max_body_mib), close=True) from None
    except (aiohttp.ClientPayloadError, web.RequestPayloadError, HttpProcessingError) as failure:
        message = f"the body cannot be read: {' '.join(str(failure).split())[:200]}"
        raise BadRequestError(error(400, message, INVALID), close=True) from None


def _too_large(max_body_mib: int) -> Answer:
    return error(413, f"the body is larger than the {max_body_mib} MiB that are allowed", INVALID)


def parse(content: bytes) -> dict[str, Any]:
    """The JSON object in a body.

    Raises:
        BadRequestError: there is none, or its model is no name.
    """
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as failure:
        why = failure if isinstance(failure, ValueError) else "it is nested too deeply"
        raise BadRequestError(error(400, f"the body is not JSON: {why}", INVALID)) from None
    if not isinstance(body, dict):
        message = f"the body is not a JSON object but {type(body).__name__}"
        raise BadRequestError(error(400, message, INVALID))
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        message = f"model: {model!r:.80} is not allowed; allowed: the name of a model, as text"
        raise BadRequestError(error(400, message, INVALID, "model"))
    return body
