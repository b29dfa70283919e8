"""The port ``Bus``: what everything in kvbus knows of the message bus.

:class:`~kvbus.bus.nats.NatsBus` is the real one, :class:`~kvbus.bus.memory.MemoryBus` the one for tests and the
simulator; both pass the same contract tests.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from kvbus.metrics import Counters

DEFAULT_MAX_PAYLOAD_BYTES = 1 << 20
"""What a nats-server accepts unless it is told otherwise."""

Callback = Callable[[str, bytes], None]
Handler = Callable[[str, bytes], bytes | None]
Watcher = Callable[[bool], None]


class Bus(Protocol):
    """Publish/subscribe with request/reply, at most once, no buffering while disconnected.

    Threading: ``publish``, ``connected`` and ``counters`` from any thread; everything else from the event loop that
    entered the context. Callbacks run in that loop, one at a time for each subscription, in the order of publication
    for each publisher. What a callback raises is logged and counted, never passed on.
    """

    @property
    def connected(self) -> bool:
        """Whether a publish has a chance to arrive."""
        ...

    @property
    def trouble(self) -> str:
        """Why a server that is there could not be used at the last try, for people; empty if none was there."""
        ...

    @property
    def max_payload(self) -> int:
        """The largest payload that the server accepts, bytes."""
        ...

    @property
    def counters(self) -> Counters: ...

    @property
    def local_host(self) -> str:
        """The address of this host that the server sees, empty while unknown."""
        ...

    def publish(self, subject: str, payload: bytes) -> bool:
        """Queue a message; False, and counted, if it is dropped because the bus is away.

        Raises:
            PayloadTooLargeError: nothing was queued.
        """
        ...

    async def subscribe(self, subject: str, callback: Callback) -> None:
        """Call ``callback(subject, payload)`` for each message; survives reconnects. When this returns and the bus is
        connected, the server knows of it."""
        ...

    async def serve(self, subject: str, handler: Handler) -> None:
        """Answer requests on ``subject``; a handler that returns None does not answer."""
        ...

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        """Ask, and return the first answer.

        Raises:
            BusUnavailableError: disconnected, nobody serves the subject, or no answer in time.
        """
        ...

    def watch(self, watcher: Watcher) -> None:
        """Call ``watcher(connected)`` at each change, after the subscriptions are in place."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None: ...
