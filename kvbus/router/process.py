"""The router as a process: from its start to its orderly end.

After a signal to stop it goes through three phases. A second signal skips to the third:

1. *notice*: it is not ready, but takes requests as before, each answered with ``Connection: close``, so that balancers
   have time to notice. Ctrl-C skips this.
2. *grace*: it accepts no new connection, closes those at rest, and lets running requests end.
3. It breaks off what is left; the clients get an error.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from pathlib import Path

from aiohttp import web

from kvbus.bus import ANSWER_EVERY_S, NatsBus, Node
from kvbus.config import Config
from kvbus.protocol import Membership
from kvbus.router.app import Router
from kvbus.router.http import Listener, room_for
from kvbus.router.settings import Settings
from kvbus.signals import SIGNALS
from kvbus.trace import span_sinks
from kvbus.wire import Subjects

logger = logging.getLogger(__name__)

POLL_S = 0.05
DISCOVERY_S = 5.0
BREAK_OFF_S = 2.0  # to write the last errors
EXIT_OK = 0


class StopSignals:
    """The signals, as events of the loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.first: signal.Signals | None = None
        self.once, self.twice = asyncio.Event(), asyncio.Event()

    def hear(self, number: signal.Signals) -> None:
        """Called by the signal handler, between any two instructions of the main thread."""
        self._loop.call_soon_threadsafe(self._hear, number)

    def _hear(self, number: signal.Signals) -> None:
        if self.first is None:
            self.first = number
            self.once.set()
        else:
            self.twice.set()

    async def pause(self, for_s: float) -> None:
        """Sleep, until the second signal at most."""
        try:
            async with asyncio.timeout(for_s):
                await self.twice.wait()
        except TimeoutError:
            pass


async def run_router(
    config: Config,
    host: str,
    port: int,
    settings: Settings,
    trace_file: Path | None = None,
    engine_key: str = "",
) -> int:
    """Serve until told to stop; returns the exit status: 0, or 130 or 143 if requests were broken off.

    Args:
        trace_file: keeps the last traces; they also go where the ``OTEL_*`` variables say.
        engine_key: see :class:`Router`.

    Raises:
        LocalClusterError: the port cannot be used.
        TraceError: the file cannot be used.
    """
    told = StopSignals()
    with SIGNALS.told_to(told.hear):
        sinks = span_sinks(trace_file)
        node = Node(
            NatsBus(config.servers, "kvbus-router"),
            Subjects(config.namespace),
            name="kvbus-router",
            membership=Membership(dead_after_s=config.dead_after_s),
        )
        router = Router(node, settings, span_sinks=sinks, engine_key=engine_key)
        runner = web.AppRunner(
            router.app(), handler_cancellation=True, access_log=None, keepalive_timeout=settings.keep_alive_s
        )
        await runner.setup()
        assert runner.server is not None
        listener = Listener(runner.server, room_for(settings.max_connections), router.meters.connection_refused)
        router.meters.watch(connections=lambda: len(listener.connections))
        try:
            listener.bind(host, port)
            await _await_engines(router, told)
            if told.once.is_set():
                return EXIT_OK
            listener.listen()
            logger.info("kvbus: the router listens on http://%s:%d", host, port)
            await told.once.wait()
            broken_off = await _end(router, listener, settings, told)
        finally:
            listener.close()
            await runner.cleanup()
        return SIGNALS.status if broken_off else EXIT_OK


async def _await_engines(router: Router, told: StopSignals) -> None:
    """Wait for the heartbeats of the engines that there are: else a balancer's first requests would get 503."""
    until = time.monotonic() + DISCOVERY_S
    while not router.readiness().ready and time.monotonic() < until and not told.once.is_set():
        await told.pause(POLL_S)
    await told.pause(ANSWER_EVERY_S)  # for other engines that answer the same question


async def _end(router: Router, listener: Listener, settings: Settings, told: StopSignals) -> int:
    """Stop serving; returns how many requests were broken off."""
    assert told.first is not None
    began, running = time.monotonic(), router.in_flight
    notice_s = min(settings.notice_s, settings.grace_s) if told.first is signal.SIGTERM else 0.0
    running.draining = True
    logger.info(
        "kvbus: told to stop (%s): not ready; no new connections in %g s; %d requests have %g s to end",
        told.first.name,
        notice_s,
        len(running),
        settings.grace_s,
    )
    await told.pause(notice_s)
    listener.close()
    while not listener.is_empty and not told.twice.is_set() and time.monotonic() < began + settings.grace_s:
        for connection in list(listener.connections):
            connection.close_at_rest(time.monotonic())
        await told.pause(POLL_S)
    if listener.is_empty:
        logger.info("kvbus: every request has ended; stopping")
        return 0
    why = "told twice" if told.twice.is_set() else f"not ended within {settings.grace_s:g} s"
    return await _break_off(router, listener, why)


async def _break_off(router: Router, listener: Listener, why: str) -> int:
    router.in_flight.break_off()
    broken_off = sum(connection.carries for connection in listener.connections)
    logger.log(
        logging.WARNING if broken_off else logging.INFO, "kvbus: %d requests are broken off: %s", broken_off, why
    )
    until = time.monotonic() + BREAK_OFF_S
    while not listener.is_empty and time.monotonic() < until:
        for connection in list(listener.connections):
            if not connection.busy:
                connection.force_close()  # after what is still to be sent
        await asyncio.sleep(POLL_S)
    for connection in list(listener.connections):
        connection.abort()
    return broken_off
