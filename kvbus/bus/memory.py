"""An in-memory :class:`~kvbus.bus.port.Bus`: for tests, and for the chaos harness. It passes the same contract tests.

Faults are context managers of the broker: ``with broker.dropping("reg.*"):``, ``with broker.down():``.
"""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import itertools
import logging
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from kvbus.bus.port import DEFAULT_MAX_PAYLOAD_BYTES, Callback, Handler, Watcher
from kvbus.errors import BusUnavailableError, PayloadTooLargeError
from kvbus.metrics import Counters

logger = logging.getLogger(__name__)

MAX_LOG = 1 << 14


def subject_matches(pattern: str, subject: str) -> bool:
    """NATS's rule: ``*`` stands for one token, a final ``>`` for one or more."""
    wanted, got = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        return len(got) >= len(wanted) and all(w in ("*", g) for w, g in zip(wanted[:-1], got, strict=False))
    return len(wanted) == len(got) and all(w in ("*", g) for w, g in zip(wanted, got, strict=True))


class MemoryBroker:
    """What stands for the NATS server. Clients may live in different threads' event loops."""

    def __init__(self, max_payload: int = DEFAULT_MAX_PAYLOAD_BYTES) -> None:
        self.max_payload = max_payload
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

    def __init__(self, broker: MemoryBroker, local_host: str = "127.0.0.1") -> None:
        self._broker, self._local_host = broker, local_host
        self._counters = Counters()
        self._subscriptions: list[tuple[str, Callback | None, Handler | None]] = []
        self._watchers: list[Watcher] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inboxes = itertools.count()
        self._replies: dict[str, asyncio.Future[bytes]] = {}

    @property
    def connected(self) -> bool:
        return self._loop is not None and self._broker.up

    @property
    def trouble(self) -> str:
        return ""

    @property
    def max_payload(self) -> int:
        return self._broker.max_payload

    @property
    def counters(self) -> Counters:
        return self._counters

    @property
    def local_host(self) -> str:
        return self._local_host

    def publish(self, subject: str, payload: bytes) -> bool:
        if len(payload) > self._broker.max_payload:
            raise PayloadTooLargeError(subject, len(payload), self._broker.max_payload)
        if not self.connected:
            self._counters.add("publish_dropped")
            return False
        self._broker.route(subject, payload)
        return True

    async def subscribe(self, subject: str, callback: Callback) -> None:
        self._subscriptions.append((subject, callback, None))

    async def serve(self, subject: str, handler: Handler) -> None:
        self._subscriptions.append((subject, None, handler))

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        if not self.connected:
            raise BusUnavailableError("the bus is not connected")
        if len(payload) > self._broker.max_payload:
            raise PayloadTooLargeError(subject, len(payload), self._broker.max_payload)
        inbox = f"_INBOX.{id(self)}.{next(self._inboxes)}"
        future = self._replies[inbox] = asyncio.get_running_loop().create_future()
        try:
            if not self._broker.route(subject, payload, inbox):
                raise BusUnavailableError(f"no answer on {subject}: nobody serves it")
            async with asyncio.timeout(timeout_s):
                answer: bytes = await future
                return answer
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
        """Called by the broker, from any thread."""
        assert self._loop is not None
        if subject in self._replies:
            self._later(self._answer, subject, payload)
            return 1
        matching = [entry for entry in self._subscriptions if subject_matches(entry[0], subject)]
        for _, callback, handler in matching:
            self._later(self._call, callback, handler, subject, payload, reply)
        return len(matching)

    def notice(self) -> None:
        """Called by the broker when it went up or down."""
        for watcher in self._watchers:
            self._later(watcher, self._broker.up)

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._broker.attach(self)
        self.notice()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._broker.detach(self)
        self._loop = None

    def _later(self, call: object, *args: object) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the receiver's loop is closing
            self._loop.call_soon_threadsafe(call, *args)  # type: ignore[arg-type]

    def _answer(self, inbox: str, payload: bytes) -> None:
        future = self._replies.get(inbox)
        if future is not None and not future.done():
            future.set_result(payload)

    def _call(
        self, callback: Callback | None, handler: Handler | None, subject: str, payload: bytes, reply: str
    ) -> None:
        try:
            if callback is not None:
                callback(subject, payload)
            elif handler is not None and reply and (answer := handler(subject, payload)) is not None:
                self._broker.route(reply, answer)
        except Exception:
            self._counters.add("callback_errors")
            logger.exception("kvbus: a callback on %s failed", subject)
