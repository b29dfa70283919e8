"""Accepts clients' connections, bounds their number, and stops without losing one.

The one rule: a connection that the kernel has made is served. So this accepts by itself: asyncio's servers have no
bound, and close together with connections that still wait to be accepted, which the kernel then resets.

Beyond the limit, or with no descriptors left, a few *spare* connections are taken. Each gets an answer to a probe, or
a 503, and is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable

from aiohttp import web

from kvbus.metrics import OncePer
from kvbus.router.http.connection import FULL, Connection, raw
from kvbus.router.http.sockets import EXHAUSTED, bound_sockets, port_error, spare_descriptor, watch_peer

logger = logging.getLogger(__name__)

BACKLOG = 1024
AT_ONCE = 64  # accepted in one turn of the loop
MAX_SPARE = 64
AGAIN_S = 0.1


class Listener:
    """See the module's docstring. Lives in one event loop.

    Args:
        server: what handles requests.
        limit: the most connections.
        count: called with the reason for which a connection was closed and its request not answered: ``limit``,
            ``descriptors``, ``slow``, ``malformed``.
    """

    def __init__(self, server: web.Server, limit: int, count: Callable[[str], object]) -> None:
        self._server, self._limit, self._count = server, limit, count
        self._sockets: list[socket.socket] = []
        self._connecting: set[asyncio.Task[None]] = set()
        self._spares = 0
        self._pause: asyncio.TimerHandle | None = None
        self._spare_descriptor: int | None = None
        self._once = OncePer()
        self.connections: set[Connection] = set()

    def bind(self, host: str, port: int) -> None:
        """Take the port; connections to it are still refused.

        Raises:
            LocalClusterError: it cannot be used.
        """
        self._sockets = bound_sockets(host, port)

    def listen(self) -> None:
        """Take connections from now on.

        Raises:
            LocalClusterError: another process was faster.
        """
        self._spare_descriptor = spare_descriptor()
        for each in self._sockets:
            try:
                each.listen(BACKLOG)
            except OSError as failure:
                host, port = each.getsockname()[:2]
                raise port_error(host, port, failure) from None
        self._resume()

    def close(self) -> None:
        """Accept what the kernel has made, and no more. Idempotent."""
        if self._pause is not None:
            self._pause.cancel()
        for each in self._sockets:
            asyncio.get_running_loop().remove_reader(each)
            with contextlib.suppress(OSError):
                while self._accept_one(each):
                    pass
            each.close()
        self._sockets.clear()
        if self._spare_descriptor is not None:
            os.close(self._spare_descriptor)
            self._spare_descriptor = None

    @property
    def is_empty(self) -> bool:
        return not self.connections and not self._connecting

    # As the watcher of its connections

    def opened(self, connection: Connection) -> None:
        self.connections.add(connection)
        self._spares += connection.spare

    def closed(self, connection: Connection) -> None:
        self.connections.discard(connection)
        self._spares -= connection.spare

    def refused(self, why: str) -> None:
        self._count(why)
        if self._once.due(why):
            what = {
                "limit": f"{self._limit} connections are open, as many as are allowed (--max-connections)",
                "descriptors": "no file descriptors are left (ulimit -n)",
                "slow": "a client sends a request's headers too slowly",
                "malformed": "what came is no HTTP",
            }[why]
            logger.warning("kvbus: connections are refused: %s (logged once a minute)", what)

    # Accepting

    def _resume(self) -> None:
        self._pause = None
        for each in self._sockets:
            asyncio.get_running_loop().add_reader(each, self._accept, each)

    def _pause_accepting(self) -> None:
        """Else the loop would spin on a connection that cannot be accepted."""
        for each in self._sockets:
            asyncio.get_running_loop().remove_reader(each)
        if self._pause is None:
            self._pause = asyncio.get_running_loop().call_later(AGAIN_S, self._resume)

    def _accept(self, listening: socket.socket) -> None:
        try:
            for _ in range(AT_ONCE):
                if not self._accept_one(listening):
                    return
        except OSError as failure:
            if failure.errno not in EXHAUSTED:
                logger.warning("kvbus: a connection could not be accepted: %s", failure)
            self._pause_accepting()

    def _accept_one(self, listening: socket.socket) -> bool:
        """Whether there was one.

        Raises:
            OSError: it could not be accepted.
        """
        if self._spare_descriptor is None:
            with contextlib.suppress(OSError):
                self._spare_descriptor = spare_descriptor()
        spare = len(self.connections) + len(self._connecting) >= self._limit
        try:
            sock, _ = listening.accept()
        except (BlockingIOError, InterruptedError):
            return False
        except ConnectionError:
            return True  # it is gone already
        except OSError as failure:
            if failure.errno not in EXHAUSTED or self._spare_descriptor is None:  # None: its connection is still open
                raise
            os.close(self._spare_descriptor)
            self._spare_descriptor, spare = None, True
            try:
                sock, _ = listening.accept()
            except BlockingIOError:
                return False  # there was none: the kernel looks for a descriptor first
            self.refused("descriptors")
        if spare and self._spares >= MAX_SPARE:
            self._turn_away(sock)
        else:
            task = asyncio.get_running_loop().create_task(self._take(sock, spare=spare), name="client-connection")
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)
        return True

    def _turn_away(self, sock: socket.socket) -> None:
        self.refused("limit")
        with sock, contextlib.suppress(OSError):
            sock.setblocking(False)
            sock.send(raw(FULL))

    async def _take(self, sock: socket.socket, *, spare: bool) -> None:
        try:
            sock.setblocking(False)
            watch_peer(sock)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: Connection(self._server, self, spare=spare), sock
            )
        except OSError as failure:
            logger.debug("kvbus: a client's connection was gone at once: %s", failure)
            sock.close()
