"""One request's shell: runs its legs, tells its :class:`~kvbus.router.flight.Flight` what happens, does what that says.

The one rule: each leg and question is one task, which ends in one event; only :meth:`Serving.run` applies events.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from kvbus.errors import BusUnavailableError, MessageError, PayloadTooLargeError
from kvbus.messages import Cancel, Rebind, RebindReply
from kvbus.node import Node
from kvbus.router import flight, upstream
from kvbus.router.answers import BAD_GATEWAY, Answer, error, error_body
from kvbus.router.choose import Choice, key_of
from kvbus.router.events import Failure, Nothing, Token, error_event, look, whole_lines
from kvbus.router.legs import Body, decode_leg, prefill_leg, transfers_of
from kvbus.router.loads import Loads
from kvbus.router.meters import Meters

logger = logging.getLogger(__name__)

TRANSFER_HEADER = "X-KVBus-Transfer-Id"
PREFILL_HEADER = "X-KVBus-Prefill"
DECODE_HEADER = "X-KVBus-Decode"
ATTEMPT_HEADER = "X-KVBus-Attempt"
VERDICT_S = 0.25
SILENCE_S = 5.0  # of an engine that has left the bus in the middle of its answer: it may have lost the bus only
REBIND_TIMEOUT_S = 1.0
REBIND_PATIENCE_S = 5.0  # the decode leg may still be on its way into the engine's scheduler
NOBODY = "nobody"  # an engine's id that is on no bus: decode looks for it, and then computes the prompt itself
_PAUSES_S = (0.02, 0.04, 0.08, 0.16, 0.25)


@dataclass(frozen=True, slots=True)
class Job:
    """A client's request, read and found good."""

    path: str
    body: Body
    headers: Mapping[str, str]
    transfer_id: str
    traceparent: str
    tokens: int
    arrived_at: float


class Serving:
    """See the module's docstring.

    Args:
        choice: what can be chosen now.
    """

    def __init__(
        self,
        job: Job,
        begun: flight.Flight,
        choice: Callable[[], Choice],
        node: Node,
        session: aiohttp.ClientSession,
        loads: Loads,
        meters: Meters,
    ) -> None:
        self._job, self._flight, self._choice = job, begun, choice
        self._node, self._session, self._loads, self._meters = node, session, loads, meters
        self._events: asyncio.Queue[flight.Event | BaseException] = asyncio.Queue()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._old: set[asyncio.Task[None]] = set()
        self._whole: Answer | None = None
        self._stream: tuple[aiohttp.ClientResponse, bytes] | None = None
        self._sink_left = False
        self._patience: asyncio.Timeout | None = None
        self._result: flight.PassOn | flight.Refuse | flight.Fail | None = None

    async def run(self, request: web.Request) -> web.StreamResponse:
        """Serve the client; its going away cancels this, and with it both legs."""
        served = False
        try:
            self._perform(self._flight.begin(self._choice()))
            while self._result is None:
                event = await self._events.get()
                if isinstance(event, BaseException):
                    raise event
                self._perform(self._flight.apply(event, self._choice()))
            response = await self._respond(request, self._result)
            served = True
            return response
        finally:
            if not served:
                self._perform(self._flight.apply(flight.ClientLeft(), self._choice()))
            tasks = [*self._tasks.values(), *self._old]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def engine_left(self, engine: str, incarnation: int, why: str) -> None:
        """Called for each engine that leaves the bus."""
        self._events.put_nowait(flight.EngineLeft(engine, incarnation, why))
        if (engine, incarnation) == key_of(self._flight.sink):
            self._sink_left = True
            if self._patience is not None:
                self._patience.reschedule(asyncio.get_running_loop().time() + SILENCE_S)

    def transfer_lost(self, engine: str, attempt: int, why: str) -> None:
        """Called when a prefill engine says so of this request's transfer."""
        self._events.put_nowait(flight.TransferLost(engine, attempt, why))

    def _perform(self, effects: list[flight.Effect]) -> None:
        for effect in effects:
            match effect:
                case flight.SendPrefill():
                    self._start("prefill", self._prefill(effect))
                case flight.SendDecode():
                    self._sink_left = False
                    self._start("decode", self._decode(effect))
                case flight.AskRebind():
                    self._start("rebind", self._ask(effect))
                case flight.AwaitVerdict():
                    self._start("verdict", self._await_verdict())
                case flight.Release():
                    self._release(effect)
                case flight.TookOver():
                    self._note(effect)
                case flight.PassOn() | flight.Refuse() | flight.Fail():
                    self._result = effect

    def _start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` in place of what ran under its name."""
        if (before := self._tasks.pop(name, None)) is not None and not before.done():
            before.cancel()
            self._old.add(before)
            before.add_done_callback(self._old.discard)
        task = self._tasks[name] = asyncio.create_task(work, name=f"{name}-{self._job.transfer_id}")
        task.add_done_callback(self._check)

    def _check(self, task: asyncio.Task[None]) -> None:
        """A task that fails by a fault of ours must not leave the client waiting."""
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._events.put_nowait(failure)

    # Tasks: each ends in one event

    async def _prefill(self, send: flight.SendPrefill) -> None:
        job, engine = self._job, send.source
        leg = prefill_leg(job.body, job.transfer_id, job.traceparent)
        with self._loads.counted(engine, self._job.tokens):
            try:
                answer = await upstream.post(self._session, engine, job.path, leg, job.headers)
            except upstream.LOST as failure:
                self._loads.suspect(engine)
                self._events.put_nowait(flight.SourceLost(send.attempt, upstream.why(failure)))
                return
        if upstream.engine_failed(answer.status):
            self._loads.suspect(engine)
            self._events.put_nowait(flight.SourceLost(send.attempt, f"status {answer.status}"))
        elif answer.status >= 400:
            self._events.put_nowait(flight.SourceRefused(send.attempt, answer))
        else:
            self._events.put_nowait(flight.SourceAnswered(send.attempt))

    async def _decode(self, send: flight.SendDecode) -> None:
        engine, attempt = send.sink, send.attempt
        with self._loads.counted(engine, self._job.tokens):
            try:
                async with upstream.post_leg(
                    self._session, engine, self._job.path, self._decode_leg(send), self._job.headers
                ) as answer:
                    if answer.content_type == "text/event-stream" and answer.status < 400:
                        event = await self._first_token(answer, attempt)
                    else:
                        self._whole = await upstream.whole(answer)
                        event = _meaning_of(self._whole, attempt)
                    if isinstance(event, flight.SinkLost):
                        self._loads.suspect(engine)
                    self._events.put_nowait(event)
                    if self._stream is not None:
                        await asyncio.Event().wait()  # it stays open, and the engine counted, until the client has it
            except upstream.LOST as failure:
                self._loads.suspect(engine)
                self._events.put_nowait(flight.SinkLost(attempt, upstream.why(failure)))

    async def _first_token(self, answer: aiohttp.ClientResponse, attempt: int) -> flight.SinkAnswered | flight.SinkLost:
        head = b""
        while True:
            chunk = await answer.content.readany()
            head += chunk
            match look(head):
                case Nothing() if chunk:
                    continue
                case Nothing():
                    return flight.SinkLost(attempt, "its stream ended without a token")
                case Failure(status, message, body):
                    self._whole = Answer(status, body, {"Content-Type": "application/json"})
                    return _meaning_of(self._whole, attempt, message)
                case Token():
                    self._stream = (answer, head)
                    return flight.SinkAnswered(attempt, answer.status)

    async def _ask(self, ask: flight.AskRebind) -> None:
        subject = self._node.subjects.rebind(ask.sink.engine)
        rebind = Rebind(self._job.transfer_id, ask.attempt, ask.source.engine if ask.source else NOBODY)
        deadline, pauses = time.monotonic() + REBIND_PATIENCE_S, iter(_PAUSES_S)
        while True:
            try:
                reply = await self._node.request(subject, rebind, REBIND_TIMEOUT_S)
                refused = reply.refused if isinstance(reply, RebindReply) else f"answered with {reply.KIND}"
                again = refused == "unknown transfer"
            except (BusUnavailableError, MessageError) as failure:
                refused, again = str(failure), True
            if not again or time.monotonic() > deadline:
                break
            await asyncio.sleep(next(pauses, _PAUSES_S[-1]))
        if refused:
            logger.info("kvbus: request %s stays as it is: %s", self._job.transfer_id, refused)
        self._events.put_nowait(flight.RebindAnswered(ask.attempt, refused))

    async def _await_verdict(self) -> None:
        await asyncio.sleep(VERDICT_S)
        self._events.put_nowait(flight.VerdictDue())

    # What the client gets

    async def _respond(
        self, request: web.Request, result: flight.PassOn | flight.Refuse | flight.Fail
    ) -> web.StreamResponse:
        match result:
            case flight.Refuse(answer):
                return self._respond_whole(answer)
            case flight.Fail(engine, why):
                return self._respond_whole(error(502, f"decode engine {engine}: {why}", BAD_GATEWAY))
            case flight.PassOn() if self._stream is not None:
                return await self._pass_on(request, *self._stream)
            case flight.PassOn():
                assert self._whole is not None
                return self._respond_whole(self._whole)

    def _respond_whole(self, answer: Answer) -> web.Response:
        self._meters.answered(answer.status, time.monotonic() - self._job.arrived_at, stream=False)
        return web.Response(status=answer.status, body=answer.body, headers={**answer.headers, **self._marks()})

    async def _pass_on(self, request: web.Request, answer: aiohttp.ClientResponse, head: bytes) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status, headers={**upstream.returned(answer), **self._marks()})
        self._meters.answered(answer.status, time.monotonic() - self._job.arrived_at, stream=True)
        await response.prepare(request)
        held = head
        while True:
            ready, held = whole_lines(held)
            if ready:
                await response.write(ready)
            try:
                chunk = await self._read(answer)
            except upstream.LOST as failure:
                held = self._broken(upstream.why(failure))
                break
            if not chunk:
                break
            held += chunk
        await response.write(held)
        await response.write_eof()
        return response

    async def _read(self, answer: aiohttp.ClientResponse) -> bytes:
        """What comes next, however late; from an engine that has left the bus only if it comes soon."""
        try:
            async with asyncio.timeout(SILENCE_S if self._sink_left else None) as self._patience:
                return await answer.content.readany()
        finally:
            self._patience = None

    def _broken(self, why: str) -> bytes:
        """The engine died in the middle of its answer: what ends the stream."""
        message = f"decode engine {self._flight.sink.engine} was lost in the middle of its answer: {why}"
        logger.warning("kvbus: request %s: %s", self._job.transfer_id, message)
        self._meters.broken()
        self._perform(self._flight.apply(flight.ClientLeft(), self._choice()))
        return error_event(error_body(502, message, BAD_GATEWAY))

    # Small matters

    def _decode_leg(self, send: flight.SendDecode) -> Body:
        job = self._job
        if send.source is None:
            return job.body
        source = send.source.engine
        return decode_leg(job.body, job.transfer_id, job.traceparent, source, send.attempt, send.takeover_s)

    def _marks(self) -> dict[str, str]:
        """Headers that tell a client which way its request took."""
        marks = {DECODE_HEADER: self._flight.sink.engine}
        if self._flight.source is not None:
            marks |= {TRANSFER_HEADER: self._job.transfer_id, PREFILL_HEADER: self._flight.source.engine}
            marks[ATTEMPT_HEADER] = str(self._flight.attempt)
        return marks

    def _release(self, release: flight.Release) -> None:
        """Tell the prefill engine that nobody takes this KV; a decode engine may have refused, or died, before its
        connector heard of the request. What the decode engine itself says of it is not disturbed."""
        subject, sink = self._node.subjects.cancels(release.source.engine), release.sink
        for each in transfers_of(self._job.body, self._job.transfer_id):
            reason = "decode did not serve the request"
            cancel = Cancel(each, release.attempt, sink.engine, sink.incarnation, each, reason)
            with contextlib.suppress(PayloadTooLargeError):
                self._node.publish(subject, cancel)

    def _note(self, took: flight.TookOver) -> None:
        self._meters.took_over(took.kind)
        logger.warning(
            "kvbus: %s engine %s is lost (%s); %s takes over request %s as attempt %d",
            took.kind,
            took.lost,
            took.why,
            took.instead,
            self._job.transfer_id,
            took.attempt,
        )


def _meaning_of(answer: Answer, attempt: int, why: str = "") -> flight.SinkAnswered | flight.SinkLost:
    if upstream.engine_failed(answer.status):
        return flight.SinkLost(attempt, why or f"status {answer.status}", answer)
    return flight.SinkAnswered(attempt, answer.status)
