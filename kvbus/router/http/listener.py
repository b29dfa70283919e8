"""The router's door: takes clients' connections, bounds them, and closes without losing one.

The one rule: a connection that the kernel has made is served. So this accepts by itself: asyncio's servers close with
what still waits to be accepted, which the kernel then resets, and have no bound.

With as many connections as are allowed, or no descriptors left, a few further ones are taken for as long as it takes to
answer a probe, or to say no.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import socket
from collections.abc import Callable

from aiohttp import web

from kvbus.errors import LocalClusterError
from kvbus.metrics import OncePer
from kvbus.router.http.connection import FULL, Connection, raw

logger = logging.getLogger(__name__)

BACKLOG = 1024
AT_ONCE = 64  # accepted in one turn of the loop
MAX_SPARE = 64
AGAIN_S = 0.1
OTHER_DESCRIPTORS = 256  # bus, traces, listening, files
PER_CONNECTION = 3  # a client's, and one to each of two engines
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_NOT_HERE = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})  # of a name with several addresses, such as IPv6's
# A peer that is gone without a word is found out after 30 + 3 * 10 s; likewise one that takes nothing for so long.
SILENT_S, PROBE_S, PROBES = 30, 10, 3
TAKES_NOTHING_S = 60


class Listener:
    """See the module's docstring. Lives in one event loop.

    Args:
        server: what handles requests.
        limit: the most connections.
        count: told why a connection got no answer to what was asked on it: ``limit``, ``descriptors``, ``slow``,
            ``malformed``.

    """

    def __init__(self, server: web.Server, limit: int, count: Callable[[str], object]) -> None:
        self._server, self._limit, self._count = server, limit, count
        self._sockets: list[socket.socket] = []
        self._connecting: set[asyncio.Task[None]] = set()
        self._spares = 0
        self._resting: asyncio.TimerHandle | None = None
        self._kept: int | None = None
        self._once = OncePer()
        self.connections: set[Connection] = set()

    def bind(self, host: str, port: int) -> None:
        """Take the port; connections to it are refused as yet.

        Raises:
            LocalClusterError: it cannot be used.
        """
        try:
            found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for number, (family, *_, address) in enumerate(found):
                try:
                    self._sockets.append(_bound(family, address))
                except OSError as failure:
                    if failure.errno not in _NOT_HERE or not (self._sockets or number + 1 < len(found)):
                        raise
        except OSError as failure:
            self.close()
            raise _unusable(host, port, failure) from None

    def listen(self) -> None:
        """Take connections from now on.

        Raises:
            LocalClusterError: another process was faster.
        """
        self._kept = _a_descriptor()
        for each in self._sockets:
            try:
                each.listen(BACKLOG)
            except OSError as failure:
                host, port = each.getsockname()[:2]
                raise _unusable(host, port, failure) from None
        self._look()

    def close(self) -> None:
        """Take what the kernel has made, and no more. Idempotent."""
        if self._resting is not None:
            self._resting.cancel()
        for each in self._sockets:
            asyncio.get_running_loop().remove_reader(each)
            with contextlib.suppress(OSError):
                while self._accept_one(each):
                    pass
            each.close()
        self._sockets.clear()
        if self._kept is not None:
            os.close(self._kept)
            self._kept = None

    @property
    def is_empty(self) -> bool:
        return not self.connections and not self._connecting

    # What connections tell

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

    def _look(self) -> None:
        self._resting = None
        for each in self._sockets:
            asyncio.get_running_loop().add_reader(each, self._accept, each)

    def _rest(self) -> None:
        """Not to spin on what cannot be accepted."""
        for each in self._sockets:
            asyncio.get_running_loop().remove_reader(each)
        if self._resting is None:
            self._resting = asyncio.get_running_loop().call_later(AGAIN_S, self._look)

    def _accept(self, listening: socket.socket) -> None:
        try:
            for _ in range(AT_ONCE):
                if not self._accept_one(listening):
                    return
        except OSError as failure:
            if failure.errno not in _EXHAUSTED:
                logger.warning("kvbus: a connection could not be accepted: %s", failure)
            self._rest()

    def _accept_one(self, listening: socket.socket) -> bool:
        """Whether there was one.

        Raises:
            OSError: it could not be accepted.
        """
        if self._kept is None:
            with contextlib.suppress(OSError):
                self._kept = _a_descriptor()
        spare = len(self.connections) + len(self._connecting) >= self._limit
        try:
            sock, _ = listening.accept()
        except (BlockingIOError, InterruptedError):
            return False
        except ConnectionError:
            return True  # it is gone already
        except OSError as failure:
            if failure.errno not in _EXHAUSTED or self._kept is None:  # None: the one before is not answered yet
                raise
            os.close(self._kept)
            self._kept, spare = None, True
            try:
                sock, _ = listening.accept()
            except BlockingIOError:
                return False  # the kernel looks for a descriptor first
            self.refused("descriptors")
        if spare and self._spares >= MAX_SPARE:
            self.refused("limit")
            with sock, contextlib.suppress(OSError):
                sock.setblocking(False)
                sock.send(raw(FULL))
            return True
        task = asyncio.get_running_loop().create_task(self._take(sock, spare=spare), name="client-connection")
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return True

    async def _take(self, sock: socket.socket, *, spare: bool) -> None:
        try:
            sock.setblocking(False)
            _watch_peer(sock)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: Connection(self._server, self, spare=spare), sock
            )
        except OSError as failure:
            logger.debug("kvbus: a connection was gone at once: %s", failure)
            sock.close()


def room_for(wanted: int) -> int:
    """How many clients' connections there are descriptors for, ``wanted`` at most; raises the soft limit first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = PER_CONNECTION * wanted + OTHER_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    room = max(1, (soft - OTHER_DESCRIPTORS) // PER_CONNECTION)
    logger.info("kvbus: %d descriptors (ulimit -n) are enough for %d connections, not for %d", soft, room, wanted)
    return room


def _unusable(host: str, port: int, failure: OSError) -> LocalClusterError:
    return LocalClusterError(
        f"kvbus: port {port} on {host} cannot be used ({failure.strerror}); choose another with --port"
    )


def _bound(family: int, address: object) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.setblocking(False)
        sock.bind(address)  # type: ignore[arg-type]
    except BaseException:
        sock.close()
        raise
    return sock


def _watch_peer(sock: socket.socket) -> None:
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, TAKES_NOTHING_S * 1000)


def _a_descriptor() -> int:
    return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
