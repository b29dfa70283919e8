"""Subscribes to subjects and keeps their messages, with the time each came, in a bounded queue."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from kvbus.bus import Bus
from kvbus.errors import BusUnavailableError, MessageError
from kvbus.tools.lines import Decoded, Undecodable
from kvbus.wire import Subjects, Who, encode, heard

CONNECT_TIMEOUT_S = 3.0
MAX_HEARD = 1 << 16


@dataclass(frozen=True, slots=True)
class BusMessage:
    """``at``: seconds, monotonic."""

    at: float
    subject: str
    payload: bytes

    def read(self) -> Decoded:
        try:
            return heard(self.subject, self.payload)
        except MessageError as error:
            return Undecodable(error.reason, len(self.payload))


def unreachable(bus: Bus, where: str) -> str:
    """The error text of a tool that has no connection."""
    return (
        f"kvbus: the NATS server at {where}: {bus.trouble}"
        if bus.trouble
        else f"kvbus: no NATS server answers at {where}"
    )


class Listener:
    """Messages that were not taken yet. ``missed`` counts those that came while :data:`MAX_HEARD` were waiting."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._heard: deque[BusMessage] = deque()
        self._news = asyncio.Event()
        self.missed = 0

    @property
    def connected(self) -> bool:
        return self._bus.connected

    async def take(self, timeout_s: float | None) -> list[BusMessage]:
        """The messages since the last call. If there are none, wait for one, at most ``timeout_s``."""
        if not self._heard:
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._news.wait()
        taken = list(self._heard)
        self._heard.clear()
        return taken

    def hear(self, subject: str, payload: bytes) -> None:
        if len(self._heard) >= MAX_HEARD:
            self.missed += 1
            return
        self._heard.append(BusMessage(time.monotonic(), subject, payload))
        self._news.set()


@contextlib.asynccontextmanager
async def listening(
    bus: Bus,
    subjects: Subjects,
    patterns: Sequence[str],
    *,
    where: str,
    asks: str = "",
    timeout_s: float = CONNECT_TIMEOUT_S,
) -> AsyncIterator[Listener]:
    """Listen to ``patterns`` until the context is left; it is entered once the bus is connected.

    Args:
        where: the server, for the error's text.
        asks: ask engines for a heartbeat under this name at each connection; empty: say nothing at all.

    Raises:
        BusUnavailableError: no connection within ``timeout_s``.
    """
    listener, connected_once = Listener(bus), asyncio.Event()

    def on_bus(connected: bool) -> None:
        if connected:
            connected_once.set()
            if asks:
                bus.publish(subjects.who(asks), encode(Who(asks)))

    for pattern in patterns:
        await bus.subscribe(pattern, listener.hear)
    bus.watch(on_bus)
    async with bus:
        try:
            async with asyncio.timeout(timeout_s):
                await connected_once.wait()
        except TimeoutError:
            raise BusUnavailableError(unreachable(bus, where)) from None
        yield listener
