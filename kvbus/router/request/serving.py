"""The shell of one request: runs its legs, applies what happens to its :class:`Failover`, and performs the effects.

The one rule: each leg and each question is one task, which ends in one event. Only :meth:`Serving.run` applies events.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from aiohttp import web

from kvbus.router.fleet import Choice, key_of
from kvbus.router.http import BAD_GATEWAY, error, error_body
from kvbus.router.request import failover_events as events
from kvbus.router.request.failover import Failover
from kvbus.router.request.job import Job, Resources
from kvbus.router.request.legs import Legs
from kvbus.router.request.reply import ATTEMPT_HEADER, DECODE_HEADER, PREFILL_HEADER, TRANSFER_HEADER, Reply
from kvbus.router.request.streaming import Stream, StreamBrokenError
from kvbus.router.request.transfer_messages import ask_rebind, publish_release
from kvbus.trace import MarkName

logger = logging.getLogger(__name__)

VERDICT_S = 1.0  # decode checks what prefill checks, but a busy engine may need so long


class Serving:
    """See the module's docstring.

    Args:
        choice: which engines can be chosen now.
    """

    def __init__(self, job: Job, failover: Failover, choice: Callable[[], Choice], resources: Resources) -> None:
        self._job, self._failover, self._choice = job, failover, choice
        self._node, self._meters = resources.node, resources.meters
        self._inbox: asyncio.Queue[events.Event | BaseException] = asyncio.Queue()
        self._legs = Legs(job, resources, self._inbox.put_nowait)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._cancelled: set[asyncio.Task[None]] = set()
        self._decode_leg_sent_at = 0.0
        self._computed_on_decode: set[tuple[int, str]] = set()
        self._result: events.PassOn | events.Refuse | events.Fail | None = None
        self._ended = "client left"

    async def run(self, request: web.Request) -> web.StreamResponse:
        """Serve the client. If it leaves, this is cancelled, and with it both legs."""
        reply, served = Reply(request, self._job, self._meters), False
        try:
            self._perform(self._failover.begin(self._choice()))
            while self._result is None:
                event = await self._next_event(reply)
                if isinstance(event, BaseException):
                    raise event
                self._apply(event)
            response = await self._respond(reply, self._result)
            served = True
            return response
        finally:
            if not served:
                self._apply(events.ClientLeft())
            tasks = [*self._tasks.values(), *self._cancelled]
            for task in tasks:
                task.cancel()
            self._job.mark(MarkName.ENDED, note=self._ended)
            await asyncio.gather(*tasks, return_exceptions=True)

    def engine_left(self, engine: str, incarnation: int, why: str) -> None:
        """Called for each engine that leaves the bus."""
        self._inbox.put_nowait(events.EngineLeft(engine, incarnation, why))
        if stream := self._stream_of(engine, incarnation):
            stream.doubt()

    def engine_is_back(self, engine: str, incarnation: int) -> None:
        """Called for each engine that joins the bus. One that had lost only the bus goes on with its stream."""
        if stream := self._stream_of(engine, incarnation):
            stream.trust()

    def transfer_lost(self, engine: str, attempt: int, why: str, *, kept: bool) -> None:
        """Called when a prefill engine says that this request's transfer failed."""
        self._inbox.put_nowait(events.TransferLost(engine, attempt, why, kept))

    def decode_computes(self, transfer_id: str, engine: str, attempt: int) -> None:
        """Called when a decode engine says that it computes this transfer's prompt itself.

        A request of several prompts or samples still needs its prefill, until this is said of all of them.
        """
        missing = {(attempt, each) for each in self._job.transfers} - self._computed_on_decode
        said = {(attempt, transfer_id)}
        if (engine, attempt) != (self._failover.sink.engine, self._failover.attempt) or missing.isdisjoint(said):
            return
        self._computed_on_decode |= said
        if missing == said:
            self._meters.alone("decode")
            self._inbox.put_nowait(events.SinkComputes(engine, attempt))

    def _stream_of(self, engine: str, incarnation: int) -> Stream | None:
        return self._legs.stream if (engine, incarnation) == key_of(self._failover.sink) else None

    async def _next_event(self, reply: Reply) -> events.Event | BaseException:
        while True:
            try:
                async with asyncio.timeout(reply.patience_s):
                    return await self._inbox.get()
            except TimeoutError:
                await reply.keep_alive()

    def _apply(self, event: events.Event) -> None:
        self._perform(self._failover.apply(event, self._choice()))

    def _perform(self, effects: list[events.Effect]) -> None:
        for effect in effects:
            match effect:
                case events.SendPrefill():
                    self._start("prefill", self._legs.prefill(effect))
                case events.SendDecode(sink, source, attempt, _):
                    self._job.mark(MarkName.SENT, attempt, sink.engine, "" if source is not None else "alone")
                    self._decode_leg_sent_at = time.monotonic()
                    self._stop("rebind")
                    self._start("decode", self._legs.decode(effect))
                case events.AskRebind():
                    self._stop("prefill")
                    self._start("rebind", self._ask_rebind(effect))
                case events.AwaitVerdict():
                    self._start("verdict", self._await_verdict())
                case events.Release():
                    self._stop("prefill")  # nobody would take its KV
                    publish_release(self._node, self._job, effect)
                case events.TookOver():
                    self._note(effect)
                case events.PassOn() | events.Refuse() | events.Fail():
                    self._result = effect

    # Tasks

    def _start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` in place of what ran under its name."""
        self._stop(name)
        task = self._tasks[name] = asyncio.create_task(work, name=f"{name}-{self._job.transfer_id}")
        task.add_done_callback(self._check)

    def _stop(self, name: str) -> None:
        if (before := self._tasks.pop(name, None)) is not None and not before.done():
            before.cancel()
            self._cancelled.add(before)
            before.add_done_callback(self._cancelled.discard)

    def _check(self, task: asyncio.Task[None]) -> None:
        """A task that fails by a bug of ours must not leave the client waiting."""
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._inbox.put_nowait(failure)

    async def _ask_rebind(self, ask: events.AskRebind) -> None:
        refused = await ask_rebind(self._node, self._job, ask, self._decode_leg_sent_at)
        if refused:
            logger.info(
                "kvbus: request %s: decode engine %s does not change its prefill engine (%s); it goes on as it is",
                self._job.transfer_id,
                ask.sink.engine,
                refused,
            )
        self._inbox.put_nowait(events.RebindAnswered(ask.attempt, refused))

    async def _await_verdict(self) -> None:
        await asyncio.sleep(VERDICT_S)
        self._inbox.put_nowait(events.VerdictDue())

    # What the client gets

    async def _respond(self, reply: Reply, result: events.PassOn | events.Refuse | events.Fail) -> web.StreamResponse:
        match result:
            case events.Refuse(answer):
                pass
            case events.Fail(engine, why):
                answer = error(502, f"decode engine {engine}: {why}", BAD_GATEWAY)
            case events.PassOn() if self._legs.stream is not None:
                return await self._pass_on(reply, self._legs.stream)
            case events.PassOn():
                assert self._legs.whole is not None
                answer = self._legs.whole
        self._ended = str(answer.status)
        return await reply.whole(answer, self._route_headers())

    async def _pass_on(self, reply: Reply, stream: Stream) -> web.StreamResponse:
        try:
            response = await reply.pass_on(stream, self._route_headers())
            self._ended = str(stream.answer.status)
            return response
        except StreamBrokenError as broken:
            self._ended = f"broken: {broken.why}"
            message = f"decode engine {self._failover.sink.engine} was lost in the middle of its answer: {broken.why}"
            logger.warning("kvbus: request %s: %s", self._job.transfer_id, message)
            self._meters.broken()
            self._apply(events.ClientLeft())
            return await reply.fail(error_body(502, message, BAD_GATEWAY))

    def _route_headers(self) -> dict[str, str]:
        """Tell the client which engines served its request."""
        headers = {DECODE_HEADER: self._failover.sink.engine, TRANSFER_HEADER: self._job.transfer_id}
        if self._failover.source is not None:
            headers[PREFILL_HEADER] = self._failover.source.engine
            headers[ATTEMPT_HEADER] = str(self._failover.attempt)
        return headers

    def _note(self, took: events.TookOver) -> None:
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
