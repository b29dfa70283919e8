"""``kvbus drain ENGINE``: an engine takes nothing new, and one waits until it has nothing left."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from kvbus.bus import Bus
from kvbus.errors import BusUnavailableError, KVBusError
from kvbus.membership import Membership
from kvbus.messages import DrainReply, DrainRequest, Heartbeat, State
from kvbus.node import Node
from kvbus.subjects import Subjects

FIND_TIMEOUT_S = 5.0
ASK_TIMEOUT_S = 2.0
SAY_INTERVAL_S = 2.0


class DrainError(KVBusError):
    """The engine could not be drained; the message says why."""


async def drain(bus: Bus, subjects: Subjects, engine: str, timeout_s: float, say: Callable[[str], None]) -> None:
    """Ask ``engine`` to drain and return when it has no requests, and nobody needs its KV any more.

    Raises:
        DrainError: no such engine, no answer, or not empty in time.
    """
    node = Node(bus, subjects, name="kvbus-drain", membership=Membership())
    async with node:
        first = await _find(node, engine)
        try:
            reply = await node.request(subjects.drain(engine), DrainRequest("kvbus-drain"), ASK_TIMEOUT_S)
        except BusUnavailableError as error:
            raise DrainError(f"kvbus: engine {engine} does not answer: {error}") from error
        if not isinstance(reply, DrainReply) or reply.incarnation != first.incarnation:
            raise DrainError(f"kvbus: engine {engine} is not the one that was heard; try again")
        deadline, said_at = time.monotonic() + timeout_s, 0.0
        while (now := time.monotonic()) < deadline:
            beat = node.membership.get(engine)
            if beat is None or beat.incarnation != first.incarnation:
                say(f"{engine} has left")
                return
            if beat.state is State.DRAINING and not beat.requests:
                say(f"{engine} is drained: it has no requests, and nobody needs its KV; it can be stopped")
                return
            if now - said_at > SAY_INTERVAL_S:
                said_at = now
                say(f"{engine} is draining: {beat.requests} requests left")
            await asyncio.sleep(0.1)
    raise DrainError(f"kvbus: engine {engine} is not empty after {timeout_s:.0f} s; it goes on draining")


async def _find(node: Node, engine: str) -> Heartbeat:
    deadline = time.monotonic() + FIND_TIMEOUT_S
    while (beat := node.membership.get(engine)) is None:
        if time.monotonic() > deadline:
            if not node.bus.connected:
                raise DrainError("kvbus: no NATS server answers; is --nats-url right?")
            known = ", ".join(peer.engine for peer in node.membership.peers()) or "none"
            raise DrainError(f"kvbus: no engine {engine!r} is on the bus; engines: {known}")
        await asyncio.sleep(0.05)
    return beat
