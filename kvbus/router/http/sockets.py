"""Listening sockets, what the kernel watches on a client's socket, and how many descriptors there are for sockets."""

from __future__ import annotations

import errno
import logging
import os
import resource
import socket

from kvbus.errors import LocalClusterError

logger = logging.getLogger(__name__)

OTHER_DESCRIPTORS = 256  # bus, traces, listening, files
PER_CONNECTION = 3  # a client's, and one to each of two engines
EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_NOT_HERE = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})  # one of several addresses of a name, such as IPv6's
# A peer that vanished is noticed after 30 + 3 * 10 s; likewise one that takes nothing for so long.
SILENT_S, PROBE_S, PROBES = 30, 10, 3
TAKES_NOTHING_S = 60


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


def spare_descriptor() -> int:
    """A descriptor to give back when there are no others."""
    return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


def bound_sockets(host: str, port: int) -> list[socket.socket]:
    """One socket for each address of ``host``, bound and not listening.

    Raises:
        LocalClusterError: the port cannot be used.
    """
    bound: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for number, (family, *_, address) in enumerate(found):
            try:
                bound.append(_bound(family, address))
            except OSError as failure:
                if failure.errno not in _NOT_HERE or not (bound or number + 1 < len(found)):
                    raise
    except OSError as failure:
        for each in bound:
            each.close()
        raise port_error(host, port, failure) from None
    return bound


def port_error(host: str, port: int, failure: OSError) -> LocalClusterError:
    return LocalClusterError(
        f"kvbus: port {port} on {host} cannot be used ({failure.strerror}); choose another with --port"
    )


def watch_peer(sock: socket.socket) -> None:
    """Let the kernel close it when the client is silent and gone, or takes nothing."""
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, TAKES_NOTHING_S * 1000)


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
