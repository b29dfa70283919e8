"""The requests that the router is answering: how many there are, and how they end when it is told to stop.

The one rule: only :meth:`InFlight.break_off` breaks a request off, and then its client is told.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import cast

from aiohttp import web
from aiohttp.typedefs import Handler

from kvbus.router.http.answers import UNAVAILABLE, error, error_body, respond
from kvbus.router.http.connection import FULL, Connection
from kvbus.router.http.sse import error_event

PROBES = frozenset({"/health", "/ready", "/metrics"})
LAST_WORD_S = 1.0  # for writing to a client that may not read
STOPPED = "the router was stopped before this request had ended; send it again"
_RESPONSE = web.RequestKey("kvbus.response", web.StreamResponse)


class InFlight:
    """See the module's docstring. Lives in one event loop.

    ``draining``: answers close their connections, so that clients send their next request to another router.
    """

    def __init__(self) -> None:
        self._scopes: set[asyncio.Timeout] = set()
        self.draining = False

    def __len__(self) -> int:
        return len(self._scopes)

    @web.middleware
    async def watch(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        connection = request.protocol
        if request.path in PROBES:
            return await handler(request)
        if isinstance(connection, Connection) and connection.spare:
            connection.refuse()
            return respond(FULL)
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._scopes.add(scope)
                return await handler(request)
        except TimeoutError:
            if not scope.expired():
                raise
            return await self._last_word(request)
        finally:
            self._scopes.discard(scope)

    async def on_prepare(self, request: web.Request, response: web.StreamResponse) -> None:
        """Before an answer's headers go out."""
        request[_RESPONSE] = response
        connection = request.protocol
        if self.draining or (isinstance(connection, Connection) and connection.spare):
            response.force_close()
            response.headers["Connection"] = "close"

    def break_off(self) -> None:
        """End all of them now."""
        now = asyncio.get_running_loop().time()
        for scope in self._scopes:
            scope.reschedule(now)

    async def _last_word(self, request: web.Request) -> web.StreamResponse:
        begun = cast("web.StreamResponse | None", request.get(_RESPONSE))
        if begun is None or not begun.prepared:
            return respond(error(503, STOPPED, UNAVAILABLE, headers={"Retry-After": "1"}))
        if begun.content_type != "text/event-stream":
            if request.transport is not None:
                request.transport.abort()  # with an orderly end the client would take it for the whole answer
            return begun
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(LAST_WORD_S):
                named = not request.path.endswith("/completions")  # events of those two APIs have no names
                await begun.write(error_event(error_body(503, STOPPED, UNAVAILABLE), named=named))
                await begun.write_eof()
        return begun
