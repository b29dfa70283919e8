"""How an engine's connection is named on the NATS server, and what the server's word of a lost one means.

A server that lets the account see its own disconnect events (``$SYS.ACCOUNT.*.DISCONNECT``, see ``docker/nats.conf``)
says within milliseconds that an engine's connection is gone. Where it does not, silence tells the same later.

Pure.
"""

from __future__ import annotations

import json

DISCONNECTS = "$SYS.ACCOUNT.*.DISCONNECT"
_PREFIX = "kvbus-engine"
MAX_EVENT_BYTES = 1 << 14


def connection_name(engine: str, incarnation: int) -> str:
    """The name of the connection whose end means that the engine is (perhaps) gone."""
    return f"{_PREFIX}/{engine}/{incarnation}"


def lost_engine(payload: bytes) -> tuple[str, int] | None:
    """The engine and its incarnation whose connection a disconnect event is about; None if it is of no engine."""
    if len(payload) > MAX_EVENT_BYTES:
        return None
    try:
        event = json.loads(payload)
    except (ValueError, RecursionError):
        return None
    client = event.get("client") if isinstance(event, dict) else None
    name = client.get("name") if isinstance(client, dict) else None
    prefix, _, rest = name.partition("/") if isinstance(name, str) else ("", "", "")
    engine, _, incarnation = rest.partition("/")
    if prefix != _PREFIX or not (incarnation.isascii() and incarnation.isdigit()) or len(incarnation) > 20:
        return None
    return engine, int(incarnation)
