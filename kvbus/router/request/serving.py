"""One request's shell: runs its legs, tells :class:`~kvbus.router.request.failover.Flight` what happens, and does what
that says.

The one rule: each leg and question is one task, which ends in one event; only :meth:`Serving.run` applies events.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp
from aiohttp import web

from kvbus.bus import Node
from kvbus.errors import PayloadTooLargeError
from kvbus.router.fleet import Choice, Loads, Names, key_of
from kvbus.router.http import BAD_GATEWAY, Answer, Failure, Nothing, Token, error, error_body, upstream
from kvbus.router.metrics import Meters
from kvbus.router.request import failover_events as flying
from kvbus.router.request.apis import Body
from kvbus.router.request.failover import Flight
from kvbus.router.request.job import Job
from kvbus.router.request.legs import decode_leg, prefill_leg, transfers_of
from kvbus.router.request.rebinding import ask_rebind
from kvbus.router.request.reply import ATTEMPT_HEADER, DECODE_HEADER, PREFILL_HEADER, TRANSFER_HEADER, Reply
from kvbus.router.request.streaming import Stream, StreamBrokenError
from kvbus.trace import MarkName
from kvbus.wire import Heartbeat, Release

logger = logging.getLogger(__name__)

# Of a prefill engine: it has not got the model (any more), or not this API. No word on the request.
NO_VERDICT = frozenset({404, 405, 501})
VERDICT_S = 1.0  # decode checks what prefill checks, but a busy engine may take its time


class Serving:
    """See the module's docstring.

    Args:
        choice: what can be chosen now.
        first_token_s: how long a decode engine may take for a stream's first token, seconds.
        answer_s: likewise for an answer that is not streamed.
    """

    def __init__(
        self,
        job: Job,
        begun: Flight,
        choice: Callable[[], Choice],
        node: Node,
        session: aiohttp.ClientSession,
        loads: Loads,
        meters: Meters,
        names: Names,
        first_token_s: float,
        answer_s: float,
    ) -> None:
        self._job, self._flight, self._choice = job, begun, choice
        self._node, self._session, self._loads, self._meters, self._names = node, session, loads, meters, names
        self._first_token_s, self._answer_s = first_token_s, answer_s
        self._events: asyncio.Queue[flying.Event | BaseException] = asyncio.Queue()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._old: set[asyncio.Task[None]] = set()
        self._whole: Answer | None = None
        self._stream: Stream | None = None
        self._decode_leg_sent_at = 0.0
        self._ended = "client left"
        self._result: flying.PassOn | flying.Refuse | flying.Fail | None = None

    async def run(self, request: web.Request) -> web.StreamResponse:
        """Serve the client; its going away cancels this, and with it both legs."""
        reply, served = Reply(request, self._job, self._meters), False
        try:
            self._perform(self._flight.begin(self._choice()))
            while self._result is None:
                event = await self._next_event(reply)
                if isinstance(event, BaseException):
                    raise event
                self._perform(self._flight.apply(event, self._choice()))
            response = await self._respond(reply, self._result)
            served = True
            return response
        finally:
            if not served:
                self._perform(self._flight.apply(flying.ClientLeft(), self._choice()))
            tasks = [*self._tasks.values(), *self._old]
            for task in tasks:
                task.cancel()
            self._job.mark(MarkName.ENDED, note=self._ended)
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _next_event(self, reply: Reply) -> flying.Event | BaseException:
        while True:
            try:
                async with asyncio.timeout(reply.patience_s):
                    return await self._events.get()
            except TimeoutError:
                await reply.wait()

    def engine_left(self, engine: str, incarnation: int, why: str) -> None:
        """Called for each engine that leaves the bus."""
        self._events.put_nowait(flying.EngineLeft(engine, incarnation, why))
        if self._stream is not None and (engine, incarnation) == key_of(self._flight.sink):
            self._stream.doubt()

    def engine_is_back(self, engine: str, incarnation: int) -> None:
        """Called for each engine that joins the bus: one that had lost the bus only goes on where it was."""
        if self._stream is not None and (engine, incarnation) == key_of(self._flight.sink):
            self._stream.trust()

    def transfer_lost(self, engine: str, attempt: int, why: str, *, kept: bool) -> None:
        """Called when a prefill engine says so of this request's transfer."""
        self._events.put_nowait(flying.TransferLost(engine, attempt, why, kept))

    def _perform(self, effects: list[flying.Effect]) -> None:
        for effect in effects:
            match effect:
                case flying.SendPrefill():
                    self._start("prefill", self._prefill(effect))
                case flying.SendDecode(sink, source, attempt, _):
                    self._job.mark(MarkName.SENT, attempt, sink.engine, "" if source is not None else "alone")
                    self._decode_leg_sent_at = time.monotonic()
                    self._stream = self._whole = None  # a lost engine may have answered in the very same moment
                    self._stop("rebind")
                    self._start("decode", self._decode(effect))
                case flying.AskRebind():
                    self._stop("prefill")
                    self._start("rebind", self._ask(effect))
                case flying.AwaitVerdict():
                    self._start("verdict", self._await_verdict())
                case flying.Release():
                    self._stop("prefill")  # it would work for nobody
                    self._release(effect)
                case flying.TookOver():
                    self._note(effect)
                case flying.PassOn() | flying.Refuse() | flying.Fail():
                    self._result = effect

    def _start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` in place of what ran under its name."""
        self._stop(name)
        task = self._tasks[name] = asyncio.create_task(work, name=f"{name}-{self._job.transfer_id}")
        task.add_done_callback(self._check)

    def _stop(self, name: str) -> None:
        if (before := self._tasks.pop(name, None)) is not None and not before.done():
            before.cancel()
            self._old.add(before)
            before.add_done_callback(self._old.discard)

    def _check(self, task: asyncio.Task[None]) -> None:
        """A task that fails by a fault of ours must not leave the client waiting."""
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._events.put_nowait(failure)

    # Tasks: each ends in one event

    async def _prefill(self, send: flying.SendPrefill) -> None:
        job, engine = self._job, send.source
        leg = prefill_leg(job.body, job.transfer_id, job.traceparent, job.dialect)
        with self._loads.counted(engine, self._job.tokens):
            try:
                answer = await upstream.post(self._session, engine, job.path, leg, job.headers)
            except upstream.LOST as failure:
                self._loads.suspect(engine)
                self._events.put_nowait(flying.SourceLost(send.attempt, upstream.why(failure)))
                return
        self._look_for_name(engine, answer)
        if upstream.engine_failed(answer.status):
            self._loads.suspect(engine)
            self._events.put_nowait(flying.SourceLost(send.attempt, f"status {answer.status}"))
        elif answer.status in NO_VERDICT:
            self._events.put_nowait(flying.SourceLost(send.attempt, f"status {answer.status}"))
        elif answer.status >= 400:
            self._events.put_nowait(flying.SourceRefused(send.attempt, answer))
        else:
            self._loads.trust(engine)
            self._events.put_nowait(flying.SourceAnswered(send.attempt))

    async def _decode(self, send: flying.SendDecode) -> None:
        engine, attempt, job = send.sink, send.attempt, self._job
        # Whoever streams can be told from whoever is stuck; without a stream the first byte is the last.
        patience_s = self._first_token_s if job.streams else self._answer_s
        patience = asyncio.timeout(patience_s)
        with self._loads.counted(engine, job.tokens):
            try:
                async with (
                    patience,
                    upstream.post_leg(self._session, engine, job.path, self._decode_leg(send), job.headers) as answer,
                ):
                    if answer.content_type == "text/event-stream" and answer.status < 400:
                        event = await self._first_token(answer, attempt)
                    else:
                        self._whole = await upstream.whole(answer)
                        self._look_for_name(engine, self._whole)
                        event = _meaning_of(self._whole, attempt)
                    if isinstance(event, flying.SinkLost):
                        self._loads.suspect(engine)
                    else:
                        self._loads.trust(engine)
                    self._events.put_nowait(event)
                    if self._stream is not None:
                        patience.reschedule(None)
                        await asyncio.Event().wait()  # it stays open, and the engine counted, until the client has it
            except upstream.LOST as failure:
                self._loads.suspect(engine)
                late = f"no {'token' if job.streams else 'answer'} within {patience_s:g} s"
                why = late if patience.expired() else upstream.why(failure)
                self._events.put_nowait(flying.SinkLost(attempt, why))

    async def _first_token(self, answer: aiohttp.ClientResponse, attempt: int) -> flying.SinkAnswered | flying.SinkLost:
        stream = Stream(answer)
        match await stream.begin():
            case Failure(status, message, body):
                self._whole = Answer(status, body, {"Content-Type": "application/json"})
                return _meaning_of(self._whole, attempt, message)
            case Nothing():
                return flying.SinkLost(attempt, "its stream ended without a token")
            case Token():
                self._stream = stream
                return flying.SinkAnswered(attempt, answer.status)

    async def _ask(self, ask: flying.AskRebind) -> None:
        refused = await ask_rebind(self._node, self._job.transfer_id, ask, self._decode_leg_sent_at)
        if refused:
            logger.info("kvbus: request %s stays as it is: %s", self._job.transfer_id, refused)
        self._events.put_nowait(flying.RebindAnswered(ask.attempt, refused))

    async def _await_verdict(self) -> None:
        await asyncio.sleep(VERDICT_S)
        self._events.put_nowait(flying.VerdictDue())

    # What the client gets

    async def _respond(self, reply: Reply, result: flying.PassOn | flying.Refuse | flying.Fail) -> web.StreamResponse:
        match result:
            case flying.Refuse(answer):
                pass
            case flying.Fail(engine, why):
                answer = error(502, f"decode engine {engine}: {why}", BAD_GATEWAY)
            case flying.PassOn() if self._stream is not None:
                return await self._pass_on(reply, self._stream)
            case flying.PassOn():
                assert self._whole is not None
                answer = self._whole
        self._ended = str(answer.status)
        return await reply.whole(answer, self._marks())

    async def _pass_on(self, reply: Reply, stream: Stream) -> web.StreamResponse:
        try:
            response = await reply.pass_on(stream, self._marks())
            self._ended = str(stream.answer.status)
            return response
        except StreamBrokenError as broken:
            self._ended = f"broken: {broken.why}"
            return await reply.fail(self._broken(broken.why))

    def _broken(self, why: str) -> bytes:
        """The engine died in the middle of its answer: what ends the stream."""
        message = f"decode engine {self._flight.sink.engine} was lost in the middle of its answer: {why}"
        logger.warning("kvbus: request %s: %s", self._job.transfer_id, message)
        self._meters.broken()
        self._perform(self._flight.apply(flying.ClientLeft(), self._choice()))
        return error_body(502, message, BAD_GATEWAY)

    # Small matters

    def _look_for_name(self, engine: Heartbeat, answer: Answer) -> None:
        """An adapter may have been unloaded since the engine was asked for its names."""
        model = self._job.body.get("model")
        if answer.status == 404 and model is not None:
            self._names.forget_name(engine, model)

    def _decode_leg(self, send: flying.SendDecode) -> Body:
        job = self._job
        if send.source is None:
            return job.body
        source = send.source.engine
        return decode_leg(job.body, job.transfer_id, job.traceparent, source, send.attempt, send.takeover_s)

    def _marks(self) -> dict[str, str]:
        """Headers that tell a client which way its request took."""
        marks = {DECODE_HEADER: self._flight.sink.engine, TRANSFER_HEADER: self._job.transfer_id}
        if self._flight.source is not None:
            marks[PREFILL_HEADER] = self._flight.source.engine
            marks[ATTEMPT_HEADER] = str(self._flight.attempt)
        return marks

    def _release(self, release: flying.Release) -> None:
        """Tell the prefill engine that nobody takes this KV; a decode engine may have refused, or died, before its
        connector heard of the request. What the decode engine itself says of it is not disturbed."""
        subject, sink = self._node.subjects.releases(release.source.engine, self._node.me), release.sink
        for each in transfers_of(self._job.body, self._job.transfer_id, self._job.dialect):
            reason = "decode did not serve the request"
            word = Release(each, release.attempt, self._node.me, sink.engine, sink.incarnation, reason)
            with contextlib.suppress(PayloadTooLargeError):
                self._node.publish(subject, word)

    def _note(self, took: flying.TookOver) -> None:
        self._meters.took_over(took.kind)
        self._job.mark(MarkName.ENGINE_LOST, took.attempt, took.lost, f"{took.kind} engine {took.lost}: {took.why}")
        logger.warning(
            "kvbus: %s engine %s is lost (%s); %s takes over request %s as attempt %d",
            took.kind,
            took.lost,
            took.why,
            took.instead,
            self._job.transfer_id,
            took.attempt,
        )


def _meaning_of(answer: Answer, attempt: int, why: str = "") -> flying.SinkAnswered | flying.SinkLost:
    if upstream.engine_failed(answer.status):
        return flying.SinkLost(attempt, why or f"status {answer.status}", answer)
    return flying.SinkAnswered(attempt, answer.status)
