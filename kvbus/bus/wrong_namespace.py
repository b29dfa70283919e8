"""Is a namespace the wrong one? Where nobody speaks, say so, and where engines are instead."""

from __future__ import annotations

import asyncio

from kvbus.bus.port import Bus
from kvbus.errors import KVBusError
from kvbus.wire import Subjects, is_token

QUIET_S = 3.0  # six heartbeats
LISTEN_S = 1.5
MAX_NAMED = 8
MAX_SEEN = 1 << 10


class NobodyError(KVBusError):
    """No engine speaks in the namespace."""


async def nobody_in(bus: Bus, namespace: str, where: str) -> str:
    """Listen to all namespaces for a while; what to say if no engine is in ``namespace``, empty if one is."""
    seen: set[str] = set()

    def hear(subject: str, _: bytes) -> None:
        name = subject.split(".")[2]
        if is_token(name) and len(seen) < MAX_SEEN:
            seen.add(name)

    await bus.subscribe(Subjects.heartbeats_anywhere(), hear)
    await asyncio.sleep(LISTEN_S)
    if namespace in seen or not bus.connected:
        return ""
    others = sorted(seen)
    more = f" and {len(others) - MAX_NAMED} more" if len(others) > MAX_NAMED else ""
    elsewhere = f"engines are in: {', '.join(others[:MAX_NAMED])}{more}" if others else "nor in any other"
    return f"kvbus: no engine is heard in namespace {namespace} at {where}; {elsewhere}"
