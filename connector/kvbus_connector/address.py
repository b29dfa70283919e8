"""Where this engine's HTTP server is, which vLLM does not tell its scheduler. Blocking: for a thread of its own."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import logging
import ssl
import threading
from collections.abc import Callable, Iterator

import psutil

logger = logging.getLogger(__name__)

RETRY_S = 0.25
WARN_AFTER_TRIES = 240
ANSWER_S = 2.0
ANSWERS = (200, 401, 403)


def wait_for_address(pid: int, local_host: Callable[[], str], closed: threading.Event) -> str:
    """:func:`serving_address`, as soon as there is one; empty if ``closed`` is set before."""
    for tries in itertools.count(1):
        if closed.wait(RETRY_S):
            break
        if address := serving_address(pid, local_host()):
            logger.info("kvbus: this engine serves HTTP at %s", address)
            return address
        if tries == WARN_AFTER_TRIES:
            logger.warning("kvbus: no HTTP server of this engine answers GET /health yet; http_address names one")
    return ""


def serving_address(pid: int, local_host: str) -> str:
    """``host:port`` of the HTTP server that started the process ``pid``; empty while none is ready.

    That server is the scheduler's parent. It has other sockets that listen, and earlier (data parallel ranks meet
    there), so the one is taken that answers ``GET /health`` with 200, as vLLM's does when it takes requests, or asks
    who we are, as a middleware of the user's may. Older ancestors are asked while they are vLLM's: any other one that
    listens is some supervisor.

    Args:
        local_host: stands for a wildcard address.
    """
    for host, port in _listening(pid):
        wildcard = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host)
        if _is_healthy(wildcard or host, port):
            shown = local_host if wildcard else host
            return f"[{shown}]:{port}" if ":" in shown else f"{shown}:{port}"
    return ""


def _listening(pid: int) -> Iterator[tuple[str, int]]:
    with contextlib.suppress(psutil.Error):
        for number, process in enumerate(psutil.Process(pid).parents()):
            if number and not any("vllm" in word.lower() for word in process.cmdline()):
                return
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr:
                    yield str(connection.laddr.ip), int(connection.laddr.port)


def _is_healthy(host: str, port: int) -> bool:
    """Whether it says so, in plain HTTP or else over TLS. Its certificate is not checked here: routers do that."""
    return _answers(http.client.HTTPConnection(host, port, timeout=ANSWER_S)) or _answers(
        http.client.HTTPSConnection(host, port, timeout=ANSWER_S, context=ssl._create_unverified_context())
    )


def _answers(connection: http.client.HTTPConnection) -> bool:
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/health")
        return connection.getresponse().status in ANSWERS
    return False
