"""A listener that keeps every message of a namespace, and can speak: the bus as a test sees it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from kvbus.bus import NatsBus
from kvbus.errors import MessageError
from kvbus.wire import Message, Subjects, decode

from .waiting import eventually

M = TypeVar("M", bound=Message)


class Ears:
    """``heard`` are (wall-clock seconds, subject, message)."""

    def __init__(self, bus: NatsBus) -> None:
        self._bus = bus
        self.heard: list[tuple[float, str, Message]] = []
        self.react: Callable[[str, Message], None] | None = None

    def hear(self, subject: str, payload: bytes) -> None:
        with contextlib.suppress(MessageError):
            message = decode(payload)
            self.heard.append((time.time(), subject, message))
            if self.react is not None:
                self.react(subject, message)

    def say(self, subject: str, payload: bytes) -> None:
        assert self._bus.publish(subject, payload)

    def all(self, kind: type[M], **fields: Any) -> list[M]:
        """Messages of a kind with these values in their fields, in the order in which they came."""
        return [
            message
            for _, _, message in self.heard
            if isinstance(message, kind) and all(getattr(message, name) == value for name, value in fields.items())
        ]

    async def first(self, kind: type[M], timeout_s: float = 10.0, **fields: Any) -> M:
        """The first such message, also if it is still to come."""
        await eventually(lambda: self.all(kind, **fields), timeout_s)
        return self.all(kind, **fields)[0]


@contextlib.asynccontextmanager
async def listening(nats_url: str, namespace: str = "default") -> AsyncIterator[Ears]:
    """Ears that are open when this is entered."""
    bus = NatsBus([nats_url], "ears")
    ears = Ears(bus)
    await bus.subscribe(Subjects(namespace).everything, ears.hear)
    async with bus:
        await eventually(lambda: bus.connected)
        yield ears
