"""Which headers pass the router, as RFC 9110 (7.6) asks of an intermediary. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from multidict import CIMultiDict

REQUEST_ID = "X-Request-Id"
RANK = "X-data-parallel-rank"
_REQUEST_ID = re.compile(r"[!-~]{1,256}")
# Of one connection. ``Proxy-Authorization`` is a password for the router, not for the engines.
_HOP_BY_HOP = frozenset(
    {
        "connection",
        "content-length",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
# The router sets these itself. It reads an engine's stream, so that must not be compressed.
_NOT_FORWARDED = _HOP_BY_HOP | {
    "accept-encoding",
    "content-encoding",
    "content-type",
    "expect",
    "host",
    RANK.lower(),
    REQUEST_ID.lower(),
}
_NOT_RETURNED = _HOP_BY_HOP | {"date", "server", REQUEST_ID.lower()}


def forwarded(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """A client's headers that go to the engines, repeated ones as often as they came."""
    return _without(headers, _NOT_FORWARDED)


def returned(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """An engine's headers that go to the client; ``Content-Encoding`` too, since bodies are not unpacked."""
    return _without(headers, _NOT_RETURNED)


def request_id_of(headers: Mapping[str, str]) -> str:
    """The client's id of its request; empty if it sent none that is fit for headers and logs."""
    given = headers.get(REQUEST_ID, "")
    return given if _REQUEST_ID.fullmatch(given) else ""


def _without(headers: Mapping[str, str], names: frozenset[str]) -> CIMultiDict[str]:
    """Also without those that the ``Connection`` header names."""
    named = {
        name.strip().lower()
        for key, value in headers.items()
        if key.lower() == "connection"
        for name in value.split(",")
    }
    left = names | named
    return CIMultiDict((key, value) for key, value in headers.items() if key.lower() not in left)
