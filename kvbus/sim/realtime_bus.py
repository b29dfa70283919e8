"""Real buses over a faulty network, and their servers, which are killed and frozen."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from kvbus.bus import Bus, Callback, Handler, MemoryBroker, MemoryBus, NatsBus, Watcher
from kvbus.errors import BusUnavailableError
from kvbus.local import NatsServer
from kvbus.metrics import Counters
from kvbus.sim.nemesis import Server
from kvbus.sim.network import EVERYBODY, Network
from kvbus.sim.realtime_runtime import RealTimeRuntime

CHECK_SERVER_S = 1.0
_ENVELOPE_BYTES = 64


class FaultyBus:
    """A :class:`~kvbus.bus.port.Bus` around another. Each payload carries its sender's host, so that receivers know it.

    Args:
        host: the engine that this connection belongs to.
    """

    def __init__(self, inner: Bus, host: str, network: Network, runtime: RealTimeRuntime) -> None:
        self._inner, self._host, self._network, self._runtime = inner, host, network, runtime
        self._cut_off = False

    @property
    def connected(self) -> bool:
        return self._inner.connected

    @property
    def trouble(self) -> str:
        return self._inner.trouble

    @property
    def max_payload(self) -> int:
        return self._inner.max_payload - _ENVELOPE_BYTES

    @property
    def counters(self) -> Counters:
        return self._inner.counters

    @property
    def local_host(self) -> str:
        return self._inner.local_host

    def cut_off(self) -> None:
        """Silently lose everything from and to this client from now on: as if its process were killed."""
        self._cut_off = True

    def publish(self, subject: str, payload: bytes) -> bool:
        if self._cut_off:
            return False
        self._runtime.counts["messages"] += 1
        return self._inner.publish(subject, wrap(self._host, payload))

    async def subscribe(self, subject: str, callback: Callback) -> None:
        def on_payload(actual_subject: str, wrapped: bytes) -> None:
            sender, payload = unwrap(wrapped)
            for delay_s in self._network.delays(sender, self._host):
                self._deliver(delay_s, lambda: callback(actual_subject, payload))

        await self._inner.subscribe(subject, on_payload)

    async def serve(self, subject: str, handler: Handler) -> None:
        def on_request(actual_subject: str, wrapped: bytes) -> bytes | None:
            sender, payload = unwrap(wrapped)
            if self._cut_off or not self._network.delays(sender, self._host):
                return None
            answer = handler(actual_subject, payload)
            return wrap(self._host, answer) if answer is not None else None

        await self._inner.serve(subject, on_request)

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        sender, answer = unwrap(await self._inner.request(subject, wrap(self._host, payload), timeout_s))
        delays_s = self._network.delays(sender, self._host)
        if not delays_s or delays_s[0] > timeout_s:
            raise BusUnavailableError(f"no answer on {subject}: lost")
        await asyncio.sleep(delays_s[0])
        return answer

    def watch(self, watcher: Watcher) -> None:
        self._inner.watch(watcher)

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._inner.__aexit__(kind, error, tb)

    def _deliver(self, delay_s: float, call: Callable[[], None]) -> None:
        def unless_cut_off() -> None:
            if not self._cut_off:
                call()

        if delay_s > 0:
            self._runtime.call_later(delay_s, unless_cut_off)
        else:
            self._runtime.guard(unless_cut_off)


def wrap(host: str, payload: bytes) -> bytes:
    """What a :class:`FaultyBus` of this host sends."""
    return host.encode() + b"\0" + payload


def unwrap(wrapped: bytes) -> tuple[str, bytes]:
    """The host that sent it, and its payload."""
    sender, _, payload = wrapped.partition(b"\0")
    return sender.decode(), payload


class BusServer(Server, Protocol):
    """What the buses of one run connect to."""

    def make_bus(self, name: str) -> Bus: ...

    def close(self) -> None: ...


class MemoryServer:
    """A broker in memory."""

    def __init__(self, runtime: RealTimeRuntime, network: Network) -> None:
        self._runtime, self._network = runtime, network
        self._broker = MemoryBroker()

    def make_bus(self, name: str) -> Bus:
        return MemoryBus(self._broker)

    def outage(self, away_s: float) -> None:
        if self._broker.up:
            away = contextlib.ExitStack()
            away.enter_context(self._broker.down())
            self._runtime.call_later(away_s, away.close)

    def freeze(self, for_s: float) -> None:
        self._network.stall(EVERYBODY, for_s)

    def close(self) -> None:
        """Nothing is held."""


class RestartableNats:
    """A nats-server of our own, always at the same port.

    The thread that starts it must outlive it: see :mod:`kvbus.child`.
    """

    def __init__(self, runtime: RealTimeRuntime, logs: Path) -> None:
        self._runtime, self._logs = runtime, logs
        self._server = NatsServer(logs)
        self._restarts = 0
        self._away = False

    def make_bus(self, name: str) -> Bus:
        return NatsBus([self._server.url], name)

    def outage(self, away_s: float) -> None:
        if not self._away:
            self._away = True
            self.close()
            self._runtime.call_later(away_s, self._come_back)

    def freeze(self, for_s: float) -> None:
        child = self._server.child
        child.signal(signal.SIGSTOP)
        self._runtime.call_later(for_s, lambda: child.signal(signal.SIGCONT) if child.alive else None)

    def close(self) -> None:
        self._server.child.signal(signal.SIGKILL)  # a frozen one takes no other signal
        self._server.stop()

    def _come_back(self) -> None:
        self._away = False
        self._restarts += 1
        self._server = NatsServer(self._logs, port=self._server.port, name=f"nats-server-{self._restarts}")
        self._runtime.call_later(CHECK_SERVER_S, self._check)

    def _check(self) -> None:
        """Start it again if it ended at once: something else may have had the port for a moment."""
        if not self._away and not self._server.child.alive:
            self._come_back()
