"""A whole HTTP answer, and the router's own errors, whose form is OpenAI's and Anthropic's at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from aiohttp import web

INVALID = "invalid_request_error"
NOT_FOUND = "NotFoundError"
OVERLOADED = "overloaded_error"
UNAVAILABLE = "service_unavailable"
BAD_GATEWAY = "bad_gateway"


@dataclass(frozen=True, slots=True)
class Answer:
    """An engine's answer, or the router's own. Only the router's own errors have a ``kind``."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    kind: str = ""


class RefusedError(Exception):
    """The router does not serve this request; ``answer`` tells the client why. ``close``: the connection ends, too."""

    def __init__(self, answer: Answer, *, close: bool = False) -> None:
        self.answer, self.close = answer, close
        super().__init__(f"status {answer.status}")


def error_body(status: int, message: str, kind: str, param: str | None = None) -> bytes:
    error = {"message": message, "type": kind, "param": param, "code": status}
    return json.dumps({"type": "error", "error": error}).encode()


def error(
    status: int, message: str, kind: str, param: str | None = None, headers: Mapping[str, str] | None = None
) -> Answer:
    """``param`` names the field of the request that is wrong."""
    return Answer(
        status, error_body(status, message, kind, param), {"Content-Type": "application/json", **(headers or {})}, kind
    )


def respond(answer: Answer, *, close: bool = False) -> web.Response:
    response = web.Response(status=answer.status, body=answer.body, headers=answer.headers)
    if close:
        response.force_close()
    return response
