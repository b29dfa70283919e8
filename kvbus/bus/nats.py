"""The bus on a NATS server.

The one rule: this adapter owns connecting. A supervisor makes one :class:`~kvbus.bus.nats_connection.NatsConnection`
after another, for ever; nothing is kept for the next one but the subscriptions.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from typing import Self

from kvbus.bus.nats_connection import FAILURES, NatsConnection
from kvbus.bus.port import DEFAULT_MAX_PAYLOAD_BYTES, Callback, Handler, Watcher
from kvbus.bus.refusals import Denied, explain
from kvbus.bus.subscription import Subscription
from kvbus.errors import BusUnavailableError, PayloadTooLargeError
from kvbus.metrics import Counters

logger = logging.getLogger(__name__)

MIN_BACKOFF_S, MAX_BACKOFF_S = 0.05, 1.0
LAST_WORDS_S = 1.0
CANCEL_INTERVAL_S, MAX_CANCELS = 0.1, 30
MAX_DENIED = 64
MAX_OUTBOX = 1 << 16


def without_credentials(server: str) -> str:
    scheme, _, rest = server.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


class NatsBus:
    """The :class:`~kvbus.bus.port.Bus` over one NATS connection at a time; see the module's docstring.

    Args:
        servers: URLs, tried in turn for ever.
        name: shown in the server's monitoring.
    """

    def __init__(self, servers: list[str], name: str) -> None:
        self._servers, self._name = servers, name
        self._shown = ", ".join(without_credentials(server) for server in servers)
        self._subscriptions: list[Subscription] = []
        self._watchers: list[Watcher] = []
        self._outbox: deque[tuple[str, bytes]] = deque()
        self._denied: set[Denied] = set()
        self._connection: NatsConnection | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.counters = Counters()
        self.connected = False
        self.trouble = self.local_host = ""
        self.max_payload = DEFAULT_MAX_PAYLOAD_BYTES

    def publish(self, subject: str, payload: bytes) -> bool:
        if len(payload) > self.max_payload:
            raise PayloadTooLargeError(subject, len(payload), self.max_payload)
        if not self.connected or self._loop is None or len(self._outbox) >= MAX_OUTBOX:
            self.counters.add("publish_dropped")
            return False
        self._outbox.append((subject, payload))
        with contextlib.suppress(RuntimeError):  # the loop is closing
            self._loop.call_soon_threadsafe(self._wake.set)
        return True

    async def subscribe(self, subject: str, callback: Callback) -> None:
        await self._add(Subscription(subject, callback, answers=False))

    async def serve(self, subject: str, handler: Handler) -> None:
        await self._add(Subscription(subject, handler, answers=True))

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        connection = self._connection
        if connection is None:
            raise BusUnavailableError("the bus is not connected")
        if len(payload) > self.max_payload:
            raise PayloadTooLargeError(subject, len(payload), self.max_payload)
        try:
            return await connection.request(subject, payload, timeout_s)
        except FAILURES as error:
            raise BusUnavailableError(f"no answer on {subject}: {type(error).__name__}") from error

    def watch(self, watcher: Watcher) -> None:
        self._watchers.append(watcher)

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._tasks = [
            self._loop.create_task(self._supervise(), name=f"{self._name}-supervisor"),
            self._loop.create_task(self._pump(), name=f"{self._name}-pump"),
        ]
        return self

    async def __aexit__(self, *_error: object) -> None:
        tasks = list(self._tasks)
        if self._connection is not None and self._outbox:
            tasks.append(asyncio.create_task(self._drain(self._connection), name=f"{self._name}-last-words"))
            await asyncio.wait(tasks[-1:], timeout=LAST_WORDS_S)
        self._outbox.clear()
        # nats-py's publish, while it is blocked, takes a cancel for its end and returns: cancel until all have ended.
        for _ in range(MAX_CANCELS):
            if not (pending := [task for task in tasks if not task.done()]):
                break
            for task in pending:
                task.cancel()
            await asyncio.wait(pending, timeout=CANCEL_INTERVAL_S)
        if left := [task.get_name() for task in tasks if not task.done()]:
            logger.warning("kvbus: these tasks do not end and are left behind: %s", ", ".join(left))
        await asyncio.gather(*(task for task in tasks if task.done()), return_exceptions=True)

    async def _add(self, subscription: Subscription) -> None:
        self._subscriptions.append(subscription)
        if self._connection is not None:
            try:
                await self._connection.subscribe(subscription)
            except FAILURES as error:
                logger.debug("kvbus: subscribing to %s waits for a connection: %s", subscription.subject, error)

    async def _supervise(self) -> None:
        backoff_s, complained = MIN_BACKOFF_S, False
        while True:
            connection = NatsConnection(self.counters, self._on_denied, self.publish)
            try:
                await connection.open(self._servers, self._name, list(self._subscriptions))
            except (*FAILURES, ValueError) as error:
                self.counters.add("connect_failed")
                self._explain(connection.last_error or f"{error}" or type(error).__name__, again=complained)
                complained = True
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
                continue
            backoff_s, complained = MIN_BACKOFF_S, False
            logger.info("kvbus: connected to NATS at %s", self._shown)
            try:
                self._change(connection)
                await connection.wait_until_lost()
            finally:
                self._change(None)
                await connection.discard()
            self.counters.add("disconnects")
            logger.warning("kvbus: lost the NATS server; connecting again")

    def _explain(self, why: str, *, again: bool) -> None:
        """Say why there is no connection: at the first try, and whenever it is something else."""
        before, self.trouble = self.trouble, explain(why, self.trouble)
        if again and self.trouble == before:
            return
        if self.trouble:
            logger.warning("kvbus: NATS at %s: %s; trying again", self._shown, self.trouble)
        else:
            logger.warning("kvbus: no NATS server at %s (%s); trying again until there is one", self._shown, why)

    def _on_denied(self, lacks: Denied) -> None:
        """Log a permission that this user lacks, once."""
        self.counters.add("permissions_denied")
        if lacks in self._denied or len(self._denied) >= MAX_DENIED:
            return
        self._denied.add(lacks)
        if lacks.subject.startswith("$sys."):
            logger.debug("kvbus: this server does not show disconnects: %s", lacks.text)
        else:
            logger.warning("kvbus: %s", lacks.text)

    async def _pump(self) -> None:
        """Send what is in the outbox, for ever."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            connection = self._connection
            if connection is None:
                self.counters.add("publish_dropped", len(self._outbox))
                self._outbox.clear()
                continue
            try:
                await self._drain(connection)
            except FAILURES as error:
                self.counters.add("publish_dropped", len(self._outbox) + 1)
                self._outbox.clear()
                logger.warning("kvbus: a publish failed and what waited is dropped: %s", f"{error}" or type(error))

    async def _drain(self, connection: NatsConnection) -> None:
        while self._outbox:
            await connection.publish(*self._outbox.popleft())
        await asyncio.sleep(0)  # nats-py writes to the socket one loop turn later

    def _change(self, connection: NatsConnection | None) -> None:
        self._connection, self.connected = connection, connection is not None
        if connection is not None:
            self.trouble, self.max_payload, self.local_host = "", connection.max_payload, connection.local_host
        for watcher in self._watchers:
            try:
                watcher(self.connected)
            except Exception:
                self.counters.add("callback_errors")
                logger.exception("kvbus: a watcher of the NATS connection failed")
