"""Which headers pass the router, as RFC 9110 (7.6) asks of whoever stands between two others. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from multidict import CIMultiDict

REQUEST_ID = "X-Request-Id"
RANK = "X-data-parallel-rank"
_REQUEST_ID = re.compile(r"[!-~]{1,256}")
# Of one connection. ``Proxy-Authorization`` is a password for us, if for anybody.
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
# Ours to say. An engine's stream is looked into, so it must not be compressed.
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
    """What of a client's headers goes to the engines, repeated ones as often as they came."""
    return _without(headers, _NOT_FORWARDED)


def returned(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """What of an engine's headers goes to the client; ``Content-Encoding`` too, since bodies are not unpacked."""
    return _without(headers, _NOT_RETURNED)


def request_id_of(headers: Mapping[str, str]) -> str:
    """The client's name for its request; empty if it has none that can stand in headers and logs."""
    given = headers.get(REQUEST_ID, "")
    return given if _REQUEST_ID.fullmatch(given) else ""


def _without(headers: Mapping[str, str], names: frozenset[str]) -> CIMultiDict[str]:
    """Also without what the connection's own headers name as theirs."""
    named = {
        name.strip().lower()
        for key, value in headers.items()
        if key.lower() == "connection"
        for name in value.split(",")
    }
    left = names | named
    return CIMultiDict((key, value) for key, value in headers.items() if key.lower() not in left)
