"""Sends one request's prefill and decode legs, and reports how each of them ends.

The one rule: each leg ends in one event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp

from kvbus.router.http import Answer, Failure, Nothing, Token, upstream
from kvbus.router.request import failover_events as events
from kvbus.router.request.apis import Body
from kvbus.router.request.job import Job, Resources
from kvbus.router.request.leg_bodies import decode_leg, prefill_leg
from kvbus.router.request.streaming import Stream
from kvbus.wire import FIRST_ATTEMPT, Heartbeat

# Of a prefill engine: it has no such model (any more), or no such API. It says nothing about the request.
NO_VERDICT = frozenset({404, 405, 501})


class Legs:
    """See the module's docstring. ``stream`` or ``whole`` is the answer of the decode leg that was sent last.

    Args:
        report: takes the events.
    """

    def __init__(self, job: Job, resources: Resources, report: Callable[[events.Event], None]) -> None:
        self._job, self._report = job, report
        self._session, self._settings = resources.session, resources.settings
        self._loads, self._names = resources.fleet.loads, resources.fleet.names
        self.stream: Stream | None = None
        self.whole: Answer | None = None

    async def prefill(self, send: events.SendPrefill) -> None:
        """Send the prefill leg, and wait for its end."""
        job, engine = self._job, send.source
        history_engine = job.history_engine if send.attempt == FIRST_ATTEMPT else ""
        leg = prefill_leg(job.body, job.transfer_id, job.traceparent, job.dialect, history_engine)
        with self._loads.counted(engine, job.tokens):
            try:
                answer = await upstream.post(self._session, engine, job.path, leg, job.headers)
            except upstream.LOST as failure:
                self._loads.suspect(engine)
                self._report(events.SourceLost(send.attempt, upstream.why(failure)))
                return
        self._forget_name(engine, answer)
        if upstream.engine_failed(answer.status):
            self._loads.suspect(engine)
        elif answer.status < 400:
            self._loads.trust(engine)
        self._report(_source_event(answer, send.attempt))

    def decode(self, send: events.SendDecode) -> Coroutine[Any, Any, None]:
        """Send the decode leg, and wait for its first token, or for its whole answer if it is no stream.

        A stream stays open, and is counted at its engine, until this is cancelled.
        """
        self.stream = self.whole = None  # a lost engine may have answered in the very same moment
        return self._decode(send)

    async def _decode(self, send: events.SendDecode) -> None:
        job, engine, attempt = self._job, send.sink, send.attempt
        patience_s = self._settings.first_token_s if job.streams else self._settings.answer_s
        patience = asyncio.timeout(patience_s)
        with self._loads.counted(engine, job.tokens):
            try:
                async with (
                    patience,
                    upstream.post_leg(self._session, engine, job.path, self._decode_body(send), job.headers) as answer,
                ):
                    event = await self._read(answer, send)
                    if isinstance(event, events.SinkLost):
                        self._loads.suspect(engine)
                    else:
                        self._loads.trust(engine)
                    self._report(event)
                    if self.stream is not None:
                        patience.reschedule(None)
                        await asyncio.Event().wait()
            except upstream.LOST as failure:
                self._loads.suspect(engine)
                late = f"no {'token' if job.streams else 'answer'} within {patience_s:g} s"
                self._report(events.SinkLost(attempt, late if patience.expired() else upstream.why(failure)))

    async def _read(
        self, answer: aiohttp.ClientResponse, send: events.SendDecode
    ) -> events.SinkAnswered | events.SinkLost:
        if answer.content_type != "text/event-stream" or answer.status >= 400:
            self.whole = await upstream.whole(answer)
            self._forget_name(send.sink, self.whole)
            return _sink_event(self.whole, send.attempt)
        stream = Stream(answer)
        match await stream.begin():
            case Failure(status, message, body):
                self.whole = Answer(status, body, {"Content-Type": "application/json"})
                return _sink_event(self.whole, send.attempt, message)
            case Nothing():
                return events.SinkLost(send.attempt, "its stream ended without a token")
            case Token():
                self.stream = stream
                return events.SinkAnswered(send.attempt, answer.status)

    def _decode_body(self, send: events.SendDecode) -> Body:
        job = self._job
        if send.source is None:
            return job.body
        source, history = send.source.engine, bool(job.history_engine) and send.attempt == FIRST_ATTEMPT
        return decode_leg(job.body, job.transfer_id, job.traceparent, source, send.attempt, send.takeover_s, history)

    def _forget_name(self, engine: Heartbeat, answer: Answer) -> None:
        """An adapter may have been unloaded since the engine was asked for its names."""
        model = self._job.body.get("model")
        if answer.status == 404 and model is not None:
            self._names.forget_name(engine, model)


def _source_event(answer: Answer, attempt: int) -> events.Event:
    if upstream.engine_failed(answer.status) or answer.status in NO_VERDICT:
        return events.SourceLost(attempt, f"status {answer.status}")
    return events.SourceRefused(attempt, answer) if answer.status >= 400 else events.SourceAnswered(attempt)


def _sink_event(answer: Answer, attempt: int, why: str = "") -> events.SinkAnswered | events.SinkLost:
    if upstream.engine_failed(answer.status):
        return events.SinkLost(attempt, why or f"status {answer.status}", answer)
    return events.SinkAnswered(attempt, answer.status)
