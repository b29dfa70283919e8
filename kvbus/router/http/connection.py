"""A client's connection, as aiohttp's server handles it, with bounds on what it may cost while no request is on it.

The one rule: only this file knows which of aiohttp's private fields tell whether a connection is at rest.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Protocol, cast

from aiohttp import web

from kvbus.metrics import OncePer
from kvbus.router.http.answers import INVALID, OVERLOADED, Answer, error, respond

HEAD_S = 10.0  # from the first byte of a request to the end of its headers
SPARE_HEAD_S = 2.0
SETTLE_S = 0.5  # on a connection that was opened, or answered, less long ago a request may be on its way
MAX_REASON_CHARS = 200
LATE = error(408, f"the headers did not arrive within {HEAD_S:g} s", INVALID)
FULL = error(503, "as many connections are open as are allowed", OVERLOADED, headers={"Retry-After": "1"})

logger = logging.getLogger(__name__)
_once = OncePer()


class ConnectionWatcher(Protocol):
    """Told about connections, in the event loop."""

    def opened(self, connection: Connection) -> None: ...

    def closed(self, connection: Connection) -> None: ...

    def refused(self, why: str) -> None:
        """A connection is closed and its request not answered."""
        ...


class Connection(web.RequestHandler):
    """See the module's docstring.

    Args:
        spare: one beyond the limit: it gets a 503, or an answer to a probe.
    """

    __slots__ = ("_at_rest_since", "_head_due", "_link", "_watcher", "spare")

    def __init__(self, server: web.Server, watcher: ConnectionWatcher, *, spare: bool) -> None:
        options: dict[str, Any] = server._kwargs  # the runner's; aiohttp gives them to the connections that it makes
        # A compressed body is refused, not unpacked: a few bytes may become gigabytes.
        super().__init__(server, loop=asyncio.get_running_loop(), **{**options, "auto_decompress": False})
        self._watcher, self.spare = watcher, spare
        self._head_due: asyncio.TimerHandle | None = None
        self._at_rest_since: float | None = None

    @property
    def carries(self) -> bool:
        """Whether a request is on it: being read or answered, or the client has not taken its whole answer."""
        return self._waiter is None or self._waiter.done() or self._link.get_write_buffer_size() > 0

    @property
    def busy(self) -> bool:
        """Likewise, or the beginning of a request."""
        return self._head_due is not None or self.carries

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._link = cast("asyncio.Transport", transport)  # aiohttp forgets its own when it begins to close
        super().connection_made(transport)
        self._watcher.opened(self)
        if self.spare:
            self._expect_head(SPARE_HEAD_S)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._waiter is None or self._waiter.done():  # it has a whole head, and perhaps more
            self._expect_no_head()
        elif self._head_due is None:
            self._expect_head(HEAD_S)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._expect_no_head()
        super().connection_lost(exc)
        self._watcher.closed(self)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer what is no HTTP, with an error in OpenAI's form. A port scan must not fill the log."""
        self._watcher.refused("malformed")
        if status >= 500 and _once.due(type(exc).__name__):
            logger.error("kvbus: a fault of the router", exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun, so no other one can be sent")
        reason = " ".join((message or type(exc).__name__).split())[:MAX_REASON_CHARS]
        return respond(error(status, f"the request cannot be read: {reason}", INVALID), close=True)

    def close_at_rest(self, now: float) -> None:
        """Close it if no request was on it for :data:`SETTLE_S`; to be called now and then."""
        if self.busy:
            self._at_rest_since = None
        elif self._at_rest_since is None:
            self._at_rest_since = now
        elif now - self._at_rest_since >= SETTLE_S:
            self.force_close()

    def refuse(self) -> None:
        """Count it as refused: it gets :data:`FULL` as its answer."""
        self._watcher.refused("limit")

    def abort(self) -> None:
        """Drop it, with what the client has not taken."""
        self._link.abort()

    def _expect_head(self, within_s: float) -> None:
        self._head_due = self._loop.call_later(within_s, self._head_is_late)

    def _expect_no_head(self) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None

    def _head_is_late(self) -> None:
        self._head_due = None
        self._watcher.refused("limit" if self.spare else "slow")
        if self.transport is not None:
            self.transport.write(raw(FULL if self.spare else LATE))
        self.force_close()


def raw(answer: Answer) -> bytes:
    """An answer as bytes, for a connection without a request. It says that the connection is closed."""
    lines = [f"HTTP/1.1 {answer.status} -", f"Content-Length: {len(answer.body)}", "Connection: close"]
    lines += [f"{key}: {value}" for key, value in answer.headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + answer.body
