"""The bus on a NATS server: the one adapter of nats-py.

The one rule: the adapter owns connecting. nats-py's own reconnect is off, since what it buffers meanwhile reaches
nobody, and since a client whose read loop has died still says that it is connected. A supervisor connects and
subscribes, then sends itself a message through the server every :data:`PING_INTERVAL_S` and starts over when one does
not come back; a user who may not do that is told so by the server, and gets PING and PONG instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import deque
from types import TracebackType
from typing import Any, Self

import nats
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from kvbus.bus.port import DEFAULT_MAX_PAYLOAD_BYTES, Callback, Handler, Watcher
from kvbus.bus.refusals import Denied, denied, explain
from kvbus.errors import BusUnavailableError, PayloadTooLargeError
from kvbus.metrics import Counters

logger = logging.getLogger(__name__)

PING_INTERVAL_S = 1.0
PING_TIMEOUT_S = 2.0
CONNECT_TIMEOUT_S = 2.0
MAX_BACKOFF_S = 1.0
LAST_WORDS_S = 1.0
MAX_DENIED = 64
LAST_CANCELS = 30  # at 0.1 s each
MAX_OUTBOX = 1 << 16


def without_credentials(server: str) -> str:
    scheme, _, rest = server.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


class NatsBus:
    """The :class:`Bus` over one NATS connection; see the module's docstring.

    Args:
        servers: URLs, tried in turn for ever.
        name: shown in the server's monitoring.
    """

    def __init__(self, servers: list[str], name: str) -> None:
        self._servers, self._name = servers, name
        self._shown = ", ".join(without_credentials(server) for server in servers)
        self._counters = Counters()
        self._subscriptions: list[tuple[str, Callback | None, Handler | None]] = []
        self._watchers: list[Watcher] = []
        self._outbox: deque[tuple[str, bytes]] = deque()
        self._connected = False
        self._max_payload = DEFAULT_MAX_PAYLOAD_BYTES
        self._local_host = ""
        self._client: Client | None = None
        self._why, self._trouble = "", ""
        self._inbox = ""
        self._denied: set[Denied] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def connected(self) -> bool:
        return self._connected

    @property
    def trouble(self) -> str:
        return self._trouble

    @property
    def max_payload(self) -> int:
        return self._max_payload

    @property
    def counters(self) -> Counters:
        return self._counters

    @property
    def local_host(self) -> str:
        return self._local_host

    def publish(self, subject: str, payload: bytes) -> bool:
        if len(payload) > self._max_payload:
            raise PayloadTooLargeError(subject, len(payload), self._max_payload)
        if not self._connected or self._loop is None or len(self._outbox) >= MAX_OUTBOX:
            self._counters.add("publish_dropped")
            return False
        self._outbox.append((subject, payload))
        with contextlib.suppress(RuntimeError):  # the loop is closing
            self._loop.call_soon_threadsafe(self._wake.set)
        return True

    async def subscribe(self, subject: str, callback: Callback) -> None:
        await self._add(subject, callback, None)

    async def serve(self, subject: str, handler: Handler) -> None:
        await self._add(subject, None, handler)

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        client = self._client
        if client is None or not self._connected:
            raise BusUnavailableError("the bus is not connected")
        if len(payload) > self._max_payload:
            raise PayloadTooLargeError(subject, len(payload), self._max_payload)
        try:
            return (await client.request(subject, payload, timeout=timeout_s)).data
        except (nats.errors.Error, OSError) as error:
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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        tasks = list(self._tasks)
        if self._client is not None and self._outbox:
            tasks.append(asyncio.create_task(self._drain(self._client), name=f"{self._name}-last-words"))
            await asyncio.wait(tasks[-1:], timeout=LAST_WORDS_S)
        self._outbox.clear()
        # nats-py's publish, while it is blocked, takes a cancel for its end and returns: cancel until all have ended.
        for _ in range(LAST_CANCELS):
            if not (pending := [task for task in tasks if not task.done()]):
                break
            for task in pending:
                task.cancel()
            await asyncio.wait(pending, timeout=0.1)
        if left := [task.get_name() for task in tasks if not task.done()]:
            logger.warning("kvbus: left behind: %s", ", ".join(left))
        await asyncio.gather(*(task for task in tasks if task.done()), return_exceptions=True)

    async def _add(self, subject: str, callback: Callback | None, handler: Handler | None) -> None:
        self._subscriptions.append((subject, callback, handler))
        if self._client is not None:
            try:
                await self._subscribe(self._client, subject, callback, handler)
                await self._client.flush(timeout=int(PING_TIMEOUT_S))
            except (TimeoutError, nats.errors.Error, OSError) as error:
                logger.debug("kvbus: subscribing to %s waits for the next connection: %s", subject, error)

    async def _supervise(self) -> None:
        backoff_s, complained = 0.05, False
        while True:
            lost = asyncio.Event()
            try:
                client = await self._connect(lost)
            except (TimeoutError, nats.errors.Error, OSError, ValueError) as error:
                self._counters.add("connect_failed")
                why = self._why or f"{error}" or type(error).__name__
                trouble, self._trouble = self._trouble, explain(why, self._trouble)
                if not complained or self._trouble != trouble:
                    complained = True
                    if self._trouble:
                        logger.warning("kvbus: NATS at %s: %s; trying again", self._shown, self._trouble)
                    else:
                        logger.warning(
                            "kvbus: no NATS server at %s (%s); trying again until there is one", self._shown, why
                        )
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
                continue
            backoff_s, complained = 0.05, False
            logger.info("kvbus: connected to NATS at %s", self._shown)
            try:
                await self._keep(client, lost)
            finally:
                self._client = None
                self._change(connected=False)
                await self._discard(client)
            self._counters.add("disconnects")
            logger.warning("kvbus: lost the NATS server; connecting again")

    async def _connect(self, lost: asyncio.Event) -> Client:
        async def on_loss() -> None:
            lost.set()

        async def on_error(error: Exception) -> None:
            said = f"{error}" or type(error).__name__
            if (lacks := denied(said)) is not None:
                self._lack(lacks, ours=bool(self._inbox) and self._inbox.lower() in said)
                return
            self._why = said
            if self._client is client:
                self._counters.add("nats_errors")
                logger.warning("kvbus: NATS says: %s", self._why)

        client = Client()
        self._why = ""
        try:
            # nats-py's own timeout does not cover a server that accepts and then stays silent.
            async with asyncio.timeout(2 * CONNECT_TIMEOUT_S):
                await client.connect(
                    servers=self._servers,
                    name=self._name,
                    allow_reconnect=False,
                    connect_timeout=int(CONNECT_TIMEOUT_S),
                    max_reconnect_attempts=1,  # even so it means tries of each server within connect()
                    reconnect_time_wait=0,
                    ping_interval=3600,
                    disconnected_cb=on_loss,
                    closed_cb=on_loss,
                    error_cb=on_error,
                )
                self._tune(client)
                self._ponged = asyncio.Event()
                self._echoes = True
                self._inbox = client.new_inbox()
                await client.subscribe(self._inbox, cb=self._on_ping)
                for subject, callback, handler in list(self._subscriptions):
                    await self._subscribe(client, subject, callback, handler)
                await client.flush(timeout=int(CONNECT_TIMEOUT_S))
        except BaseException:
            await self._discard(client)
            raise
        self._max_payload = client.max_payload
        self._trouble = ""
        self._client = client
        self._change(connected=True)
        return client

    async def _keep(self, client: Client, lost: asyncio.Event) -> None:
        """Return when the connection is lost, or when a message to ourselves does not come back."""
        while not lost.is_set():
            self._ponged.clear()
            try:
                if self._echoes:
                    await client.publish(self._inbox, b"")
                    async with asyncio.timeout(PING_TIMEOUT_S):
                        await self._ponged.wait()
                else:
                    await client.flush(timeout=int(PING_TIMEOUT_S))
                    self._ponged.set()
                async with asyncio.timeout(PING_INTERVAL_S):
                    await lost.wait()
            except TimeoutError:
                if not self._ponged.is_set():
                    logger.warning("kvbus: the NATS connection is deaf: no echo within %s s", PING_TIMEOUT_S)
                    return
            except (nats.errors.Error, OSError):
                return

    def _lack(self, lacks: Denied, *, ours: bool) -> None:
        """Name a permission that is not there, once; without the one for our echo, PING and PONG have to do."""
        if ours:
            self._echoes = False
            self._ponged.set()  # only a server that hears us refuses
            return
        self._counters.add("permissions_denied")
        if lacks in self._denied or len(self._denied) >= MAX_DENIED:
            return
        self._denied.add(lacks)
        if lacks.subject.startswith("$sys."):
            logger.debug("kvbus: this server does not show disconnects: %s", lacks.text)
        else:
            logger.warning("kvbus: %s", lacks.text)

    async def _on_ping(self, message: Msg) -> None:
        self._ponged.set()

    async def _pump(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            client = self._client
            if client is None:
                self._counters.add("publish_dropped", len(self._outbox))
                self._outbox.clear()
                continue
            try:
                await self._drain(client)
            except (nats.errors.Error, OSError) as error:
                self._counters.add("publish_dropped", len(self._outbox) + 1)
                self._outbox.clear()
                logger.warning("kvbus: publish failed: %s", error or type(error).__name__)

    async def _drain(self, client: Client) -> None:
        while self._outbox:
            subject, payload = self._outbox.popleft()
            await client.publish(subject, payload)
        await asyncio.sleep(0)  # nats-py writes to the socket one loop turn later

    async def _subscribe(
        self, client: Client, subject: str, callback: Callback | None, handler: Handler | None
    ) -> None:
        async def on_message(message: Msg) -> None:
            try:
                if callback is not None:
                    callback(message.subject, message.data)
                elif handler is not None and message.reply:
                    answer = handler(message.subject, message.data)
                    if answer is not None:
                        self.publish(message.reply, answer)
            except Exception:
                self._counters.add("callback_errors")
                logger.exception("kvbus: a callback on %s failed", subject)

        await client.subscribe(subject, cb=on_message)

    def _change(self, *, connected: bool) -> None:
        if self._connected == connected:
            return
        self._connected = connected
        for watcher in self._watchers:
            try:
                watcher(connected)
            except Exception:
                self._counters.add("callback_errors")
                logger.exception("kvbus: a watcher of the connection failed")

    def _tune(self, client: Client) -> None:
        """Let the kernel give up on a silent peer; nats-py offers no way to the socket but its private transport."""
        writer: Any = getattr(getattr(client, "_transport", None), "_io_writer", None)
        sock = writer.get_extra_info("socket") if writer is not None else None
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(PING_TIMEOUT_S * 1000))
            self._local_host = str(sock.getsockname()[0])

    @staticmethod
    async def _discard(client: Client) -> None:
        """Close without waiting for a server that may not answer."""
        writer: Any = getattr(getattr(client, "_transport", None), "_io_writer", None)
        if writer is not None:
            writer.transport.abort()
        with contextlib.suppress(nats.errors.Error, OSError, asyncio.TimeoutError, AttributeError):
            await asyncio.wait_for(client.close(), 1.0)
