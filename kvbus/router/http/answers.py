"""What the router itself answers: errors in OpenAI's form, which is Anthropic's as well. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

INVALID = "invalid_request_error"
NOT_FOUND = "NotFoundError"
OVERLOADED = "overloaded_error"
UNAVAILABLE = "service_unavailable"
BAD_GATEWAY = "bad_gateway"


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole HTTP answer, an engine's or the router's own, which has a ``kind``."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    kind: str = ""


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
