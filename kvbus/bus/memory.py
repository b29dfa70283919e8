"""An in-memory :class:`~kvbus.bus.port.Bus`: for tests, and for the simulator. It passes the same contract tests.

Faults are context managers of the broker: ``with broker.dropping("reg.*"):``, ``with broker.down():``.
"""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Self

from kvbus.bus.port import DEFAULT_MAX_PAYLOAD_BYTES, Callback, Handler, Watcher
from kvbus.bus.subscription import Subscription
from kvbus.errors import BusUnavailableError, PayloadTooLargeError
from kvbus.metrics import Counters

MAX_LOG = 1 << 14


def subject_matches(pattern: str, subject: str) -> bool:
    """NATS's rule: ``*`` stands for one token, a final ``>`` for one or more."""
    wanted, got = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        return len(got) >= len(wanted) and all(w in ("*", g) for w, g in zip(wanted[:-1], got, strict=False))
    return len(wanted) == len(got) and all(w in ("*", g) for w, g in zip(wanted, got, strict=True))


class MemoryBroker:
    """What stands for the NATS server. Clients may live in different threads' event loops."""

    def __init__(self) -> None:
        self.max_payload = DEFAULT_MAX_PAYLOAD_BYTES
        self.up = True
        self._clients: list[MemoryBus] = []
        self._dropped: list[str] = []
        self.log: deque[tuple[str, bytes]] = deque(maxlen=MAX_LOG)

    @contextlib.contextmanager
    def dropping(self, pattern: str) -> Iterator[None]:
        """Lose every message whose subject matches the shell-style ``pattern``."""
        self._dropped.append(pattern)
        try:
            yield
        finally:
            self._dropped.remove(pattern)

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        """Disconnect everybody for the while."""
        self.up = False
        self._tell()
        try:
            yield
        finally:
            self.up = True
            self._tell()

    def route(self, subject: str, payload: bytes, reply: str = "") -> int:
        """Deliver to every subscription; returns how many there were."""
        if any(fnmatch.fnmatchcase(subject, pattern) for pattern in self._dropped):
            return 1
        self.log.append((subject, payload))
        return sum(client.deliver(subject, payload, reply) for client in list(self._clients))

    def attach(self, client: MemoryBus) -> None:
        self._clients.append(client)

    def detach(self, client: MemoryBus) -> None:
        self._clients.remove(client)

    def _tell(self) -> None:
        for client in list(self._clients):
            client.notice()


class MemoryBus:
    """One client of a :class:`MemoryBroker`."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker
        self._subscriptions: list[Subscription] = []
        self._watchers: list[Watcher] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inboxes = itertools.count()
        self._replies: dict[str, asyncio.Future[bytes]] = {}
        self.counters = Counters()
        self.trouble, self.local_host = "", "127.0.0.1"

    @property
    def connected(self) -> bool:
        return self._loop is not None and self._broker.up

    @property
    def max_payload(self) -> int:
        return self._broker.max_payload

    def publish(self, subject: str, payload: bytes) -> bool:
        self._check_size(subject, payload)
        if not self.connected:
            self.counters.add("publish_dropped")
            return False
        self._broker.route(subject, payload)
        return True

    async def subscribe(self, subject: str, callback: Callback) -> None:
        self._subscriptions.append(Subscription(subject, callback, answers=False))

    async def serve(self, subject: str, handler: Handler) -> None:
        self._subscriptions.append(Subscription(subject, handler, answers=True))

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        if not self.connected:
            raise BusUnavailableError("the bus is not connected")
        self._check_size(subject, payload)
        inbox = f"_INBOX.{id(self)}.{next(self._inboxes)}"
        future = self._replies[inbox] = asyncio.get_running_loop().create_future()
        try:
            if not self._broker.route(subject, payload, inbox):
                raise BusUnavailableError(f"no answer on {subject}: nobody serves it")
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise BusUnavailableError(f"no answer on {subject}: TimeoutError") from None
        finally:
            del self._replies[inbox]

    def watch(self, watcher: Watcher) -> None:
        self._watchers.append(watcher)

    def cut_off(self) -> None:
        """Lose everything from and to this client from now on, without telling it: as if its process were killed."""
        self._broker.detach(self)
        self._broker = MemoryBroker()
        self._broker.attach(self)

    def deliver(self, subject: str, payload: bytes, reply: str) -> int:
        """Called by the broker, from any thread; returns how many subscriptions match."""
        if subject in self._replies:
            self._call_soon(self._answer, subject, payload)
            return 1
        matching = [each for each in self._subscriptions if subject_matches(each.subject, subject)]
        for each in matching:
            self._call_soon(each.deliver, subject, payload, reply, self._respond, self.counters)
        return len(matching)

    def notice(self) -> None:
        """Called by the broker when it went up or down."""
        for watcher in self._watchers:
            self._call_soon(watcher, self._broker.up)

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._broker.attach(self)
        self.notice()
        return self

    async def __aexit__(self, *_error: object) -> None:
        self._broker.detach(self)
        self._loop = None

    def _check_size(self, subject: str, payload: bytes) -> None:
        if len(payload) > self.max_payload:
            raise PayloadTooLargeError(subject, len(payload), self.max_payload)

    def _call_soon(self, call: Callable[..., object], *args: object) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the receiver's loop is closing
            self._loop.call_soon_threadsafe(call, *args)

    def _respond(self, inbox: str, payload: bytes) -> None:
        self._broker.route(inbox, payload)

    def _answer(self, inbox: str, payload: bytes) -> None:
        future = self._replies.get(inbox)
        if future is not None and not future.done():
            future.set_result(payload)
