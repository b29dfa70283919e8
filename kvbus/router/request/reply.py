"""What the client of one request gets: a whole answer, or a stream, which may be opened before its first token.

The one rule: a status goes out once. What goes wrong afterwards is an event in the stream.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from aiohttp import web
from multidict import CIMultiDict

from kvbus.router.http import Answer, error_event, returned
from kvbus.router.metrics import Meters
from kvbus.router.request.job import Job
from kvbus.router.request.streaming import Stream
from kvbus.trace import WHOLE, MarkName

TRANSFER_HEADER = "X-KVBus-Transfer-Id"
PREFILL_HEADER = "X-KVBus-Prefill"
DECODE_HEADER = "X-KVBus-Decode"
ATTEMPT_HEADER = "X-KVBus-Attempt"
UNBUFFERED = {"X-Accel-Buffering": "no", "Cache-Control": "no-cache"}
"""Asks proxies between the router and the client to pass a stream on as it comes."""
WAITING, WAITING_S = b": waiting\n\n", 15.0


class Reply:
    """See the module's docstring. Used by one task.

    Args:
        request: the client's; if the client leaves, methods raise what aiohttp raises.
    """

    def __init__(self, request: web.Request, job: Job, meters: Meters) -> None:
        self._request, self._job, self._meters = request, job, meters
        self._opened: web.StreamResponse | None = None

    @property
    def patience_s(self) -> float | None:
        """After so long without an event call :meth:`keep_alive`."""
        return WAITING_S if self._job.streams else None

    async def keep_alive(self) -> None:
        """Send a comment, so that no proxy takes the stream for dead. The headers do not name the engines, which may
        still change."""
        response = await self._open(200, {"Content-Type": "text/event-stream"})
        await response.write(WAITING)

    async def whole(self, answer: Answer, route: Mapping[str, str]) -> web.StreamResponse:
        """Send an answer as it is; in a stream that is open already, as an event."""
        if answer.status < 400:
            self._job.mark(MarkName.FIRST_TOKEN, note=WHOLE)
        if self._opened is not None:
            response = await self.fail(b" ".join(answer.body.splitlines()))
        else:
            headers = CIMultiDict(answer.headers)
            headers.update(route)
            response = web.Response(status=answer.status, body=answer.body, headers=headers)
        self._meters.answered(answer.status, time.monotonic() - self._job.arrived_at)
        return response

    async def pass_on(self, stream: Stream, route: Mapping[str, str]) -> web.StreamResponse:
        """Send a stream as it comes.

        Raises:
            StreamBrokenError: the engine was lost; :meth:`fail` must end the stream.
        """
        headers = returned(stream.answer.headers)
        headers.update(route)
        self._meters.began(time.monotonic() - self._job.arrived_at)
        response, before = await self._open(stream.answer.status, headers), 0.0
        async for chunk in stream:
            await response.write(chunk)
            now = time.monotonic()
            if before:
                self._meters.went_on(now - before)
            else:
                self._job.mark(MarkName.FIRST_TOKEN)
            before = now
        await response.write_eof()
        self._meters.answered(stream.answer.status)  # not earlier: the client may leave until here
        return response

    async def fail(self, body: bytes) -> web.StreamResponse:
        """End an open stream with an error."""
        assert self._opened is not None
        await self._opened.write(error_event(body, named=self._job.dialect.named_events))
        await self._opened.write_eof()
        return self._opened

    async def _open(self, status: int, headers: Mapping[str, str]) -> web.StreamResponse:
        if self._opened is None:
            self._opened = web.StreamResponse(status=status, headers=headers)
            for name, value in (*UNBUFFERED.items(), (TRANSFER_HEADER, self._job.transfer_id)):
                self._opened.headers.setdefault(name, value)
            await self._opened.prepare(self._request)
        return self._opened
