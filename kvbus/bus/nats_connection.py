"""One connection to a NATS server, from connecting to its loss: what :class:`~kvbus.bus.nats.NatsBus` asks of nats-py.

nats-py's own reconnect is off: what it buffers meanwhile reaches nobody, and a client whose read loop has died still
says that it is connected. So a connection sends itself a message through the server every :data:`PING_INTERVAL_S`, and
is lost when one does not come back. A user who may not do that is told so by the server, and gets PING and PONG
instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from kvbus.bus.refusals import Denied, denied
from kvbus.bus.subscription import Subscription
from kvbus.metrics import Counters

logger = logging.getLogger(__name__)

PING_INTERVAL_S = 1.0
PING_TIMEOUT_S = 2.0
CONNECT_TIMEOUT_S = 2.0
DISCARD_TIMEOUT_S = 1.0
FAILURES = (nats.errors.Error, OSError)
"""What nats-py raises if the server, or the way to it, fails."""


class NatsConnection:
    """See the module's docstring.

    Args:
        on_denied: called with each permission that this user turns out to lack, as often as the server says so.
        respond: sends the answer to a request.

    Attributes:
        last_error: what nats-py said last, for people; empty if nothing.
        local_host: the address of this host that the server sees, once connected.
    """

    def __init__(
        self, counters: Counters, on_denied: Callable[[Denied], None], respond: Callable[[str, bytes], object]
    ) -> None:
        self._counters, self._on_denied, self._respond = counters, on_denied, respond
        self._client = Client()
        self._inbox = ""
        self._connected = False
        self._lost, self._echoed = asyncio.Event(), asyncio.Event()
        self._may_echo = True
        self.last_error = self.local_host = ""

    @property
    def max_payload(self) -> int:
        return self._client.max_payload

    async def open(self, servers: list[str], name: str, subscriptions: Sequence[Subscription]) -> None:
        """Connect to the first of ``servers`` that lets us, and subscribe. What :data:`FAILURES` says, or ValueError,
        is raised if there is none; then the connection is closed."""
        try:
            # nats-py's own timeout does not cover a server that accepts and then stays silent.
            async with asyncio.timeout(2 * CONNECT_TIMEOUT_S):
                await self._client.connect(
                    servers=servers,
                    name=name,
                    allow_reconnect=False,
                    connect_timeout=int(CONNECT_TIMEOUT_S),
                    max_reconnect_attempts=1,  # even so it means tries of each server within connect()
                    reconnect_time_wait=0,
                    ping_interval=3600,
                    disconnected_cb=self._on_loss,
                    closed_cb=self._on_loss,
                    error_cb=self._on_error,
                )
                self._tune_socket()
                self._inbox = self._client.new_inbox()
                await self._client.subscribe(self._inbox, cb=self._on_echo)
                for subscription in subscriptions:
                    await self._subscribe(subscription)
                await self._client.flush(timeout=int(CONNECT_TIMEOUT_S))
        except BaseException:
            await self.discard()
            raise
        self._connected = True

    async def subscribe(self, subscription: Subscription) -> None:
        """When this returns the server knows of it."""
        await self._subscribe(subscription)
        await self._client.flush(timeout=int(PING_TIMEOUT_S))

    async def publish(self, subject: str, payload: bytes) -> None:
        await self._client.publish(subject, payload)

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        return (await self._client.request(subject, payload, timeout=timeout_s)).data

    async def wait_until_lost(self) -> None:
        while not self._lost.is_set():
            self._echoed.clear()
            try:
                if self._may_echo:
                    await self._client.publish(self._inbox, b"")
                    async with asyncio.timeout(PING_TIMEOUT_S):
                        await self._echoed.wait()
                else:
                    await self._client.flush(timeout=int(PING_TIMEOUT_S))
                    self._echoed.set()
                async with asyncio.timeout(PING_INTERVAL_S):
                    await self._lost.wait()
            except TimeoutError:
                if not self._echoed.is_set():
                    logger.warning("kvbus: the NATS connection is deaf: no echo within %s s", PING_TIMEOUT_S)
                    return
            except FAILURES:
                return

    async def discard(self) -> None:
        """Close without waiting for a server that may not answer."""
        self._connected = False
        if (writer := self._stream_writer()) is not None:
            writer.transport.abort()
        with contextlib.suppress(*FAILURES, AttributeError):
            await asyncio.wait_for(self._client.close(), DISCARD_TIMEOUT_S)

    async def _subscribe(self, subscription: Subscription) -> None:
        async def on_message(message: Msg) -> None:
            subscription.deliver(message.subject, message.data, message.reply, self._respond, self._counters)

        await self._client.subscribe(subscription.subject, cb=on_message)

    async def _on_echo(self, _: Msg) -> None:
        self._echoed.set()

    async def _on_loss(self) -> None:
        self._lost.set()

    async def _on_error(self, error: Exception) -> None:
        said = f"{error}" or type(error).__name__
        if (lacks := denied(said)) is not None:
            if self._inbox and self._inbox.lower() in said:  # our echo: PING and PONG have to do
                self._may_echo = False
                self._echoed.set()  # only a server that hears us refuses
            else:
                self._on_denied(lacks)
            return
        self.last_error = said
        if self._connected:
            self._counters.add("nats_errors")
            logger.warning("kvbus: NATS says: %s", said)

    def _tune_socket(self) -> None:
        """Let the kernel give up on a silent peer."""
        writer = self._stream_writer()
        sock = writer.get_extra_info("socket") if writer is not None else None
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(PING_TIMEOUT_S * 1000))
            self.local_host = str(sock.getsockname()[0])

    def _stream_writer(self) -> Any:
        """nats-py offers no way to its socket but its private transport; None before there is one."""
        return getattr(getattr(self._client, "_transport", None), "_io_writer", None)
