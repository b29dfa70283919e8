"""Requests that a prefill and a decode engine serve together.

The one rule: the client gets what the decode engine says, byte for byte, unless the prefill engine refuses before the
first byte: then it gets the prefill engine's answer. A prefill engine that does not answer refuses nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from random import Random

from aiohttp import web

from kvbus.bounded import BoundedDict
from kvbus.engine import PREFILL, OfPrefill
from kvbus.metrics import OncePer
from kvbus.protocol import Change, PeerJoined, PeerLeft
from kvbus.router.admission import Gate
from kvbus.router.fleet import SESSION_HEADER, Choice, Key, affinity_of, is_usable, key_of, prompt_tokens
from kvbus.router.http import MODEL, REQUEST_ID, Clients, Reader, RefusedError, forwarded, parse, request_id_of
from kvbus.router.request import (
    RESPONSES,
    Body,
    Dialect,
    Failover,
    Job,
    Resources,
    Serving,
    must_be_alone,
    new_transfer_id,
    tokenize_question,
)
from kvbus.router.stored_responses import StoredResponses
from kvbus.trace import Collector, MarkName, Trace, Value
from kvbus.wire import Cancel, CancelAck, Heartbeat, RegistrationAck, TransferDone, TransferFailed, TransferStarted

logger = logging.getLogger(__name__)

MAX_SESSIONS = 1 << 16
ASSIGNED_ID = web.RequestKey("request id", str)
"""The id of a request, the client's or the router's."""


class Pairs:
    """See the module's docstring. Lives in one event loop; to be made before ``resources.node`` is entered.

    Args:
        collector: traces requests; None if they are not traced. Then clients' trace contexts pass through.
    """

    def __init__(
        self,
        resources: Resources,
        reader: Reader,
        clients: Clients,
        stored: StoredResponses,
        chance: Random,
        collector: Collector | None,
    ) -> None:
        self._resources, self._node, self._fleet = resources, resources.node, resources.fleet
        self._meters, self._settings = resources.meters, resources.settings
        self._reader, self._clients, self._stored = reader, clients, stored
        self._chance, self._collector, self._once = chance, collector, OncePer()
        self._gates: dict[str, Gate] = {}
        self._servings: dict[str, Serving] = {}
        self._last_sinks: BoundedDict[str, Key] = BoundedDict(MAX_SESSIONS)
        node = self._node
        node.watch_peers(self._on_peer)
        # A decode engine whose receive failed waits for a rebind, also when the prefill engine lives.
        node.listen(node.subjects.transfers("*"), (TransferStarted, TransferDone, TransferFailed), self._on_transfer)
        node.listen(node.subjects.acks("*"), (RegistrationAck, CancelAck, *PREFILL), self._on_ack)
        for subject in (node.subjects.cancels("*"), node.subjects.cancels_pool()):
            node.listen(subject, Cancel, self._on_cancel)

    @property
    def in_flight(self) -> int:
        """How many requests are at the engines."""
        return len(self._servings)

    @property
    def queued(self) -> int:
        return sum(gate.queued for gate in self._gates.values())

    async def serve(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        """Serve one request, after its turn has come."""
        arrived_at = time.monotonic()
        try:
            body = await parse(await self._reader.read(request))
            engines = await self._fleet.find(body.get("model"), request.headers)
            pinned = None
            if dialect is RESPONSES and isinstance(earlier := body.get("previous_response_id"), str):
                pinned = await self._stored.pinned(earlier, body.get("model"), request.headers)
            request[MODEL] = engines[0].model
            checked = self._fleet.discovery.keys_checked(engines)
            payer = self._clients.payer(request.headers, request.remote, keys_checked=checked)
            async with self._gate(engines[0].model).enter(payer):
                return await self._serve_admitted(request, dialect, body, pinned, arrived_at)
        except RefusedError as refused:
            self._meters.refused(refused.answer)
            raise
        except asyncio.CancelledError:
            self._meters.client_left()
            raise

    async def _serve_admitted(
        self, request: web.Request, dialect: Dialect, body: Body, pinned: Heartbeat | None, arrived_at: float
    ) -> web.StreamResponse:
        model, prompt = body.get("model"), dialect.as_prompt(body)
        tokens, session = prompt_tokens(prompt), affinity_of(prompt, request.headers.get(SESSION_HEADER))
        alone, settings = must_be_alone(body, dialect), self._settings
        held = await self._held(request, dialect, body, session, tokens)
        self._meters.chosen("cache" if held else "head")

        def choice() -> Choice:
            engines = self._fleet.serving(model)
            if pinned is not None:
                engines = [engine for engine in engines if key_of(engine) == key_of(pinned)]
            most, loads = settings.max_in_flight, self._fleet.loads
            return Choice(engines, loads, self._chance, session, tokens, alone, dialect.ranked, most, held)

        now = choice()
        source = now.source(None)
        sink = now.sink(source)
        if sink is None:  # the last one left while this request waited for its turn
            raise RefusedError(self._fleet.no_decode_engine(model))
        if source is None and not alone:
            self._note_alone(model)
        history_engine = self._history_engine(session, source, sink, held)
        job = self._job(request, dialect, body, tokens, arrived_at, history_engine)
        failover = Failover(source, sink, settings.max_takeovers, settings.takeover_s)
        serving = self._servings[job.transfer_id] = Serving(job, failover, choice, self._resources)
        try:
            return await serving.run(request)
        finally:
            del self._servings[job.transfer_id]
            if self._collector is not None and job.trace is not None:
                self._collector.end(job.transfer_id)

    async def _held(
        self, request: web.Request, dialect: Dialect, body: Body, session: str, tokens: int
    ) -> dict[str, int]:
        """What engines have of the prompt in their prefix caches, by their names."""
        engines = [engine for engine in self._fleet.serving(body.get("model")) if is_usable(engine)]

        async def tokenize() -> Sequence[int] | None:
            question, sinks = tokenize_question(body, dialect), self._fleet.decoding(body.get("model"))
            if question is None or not sinks:
                return None
            engine, resources = self._chance.choice(sinks), self._resources
            return await self._fleet.tokenizing.ids(resources.session, engine, question, forwarded(request.headers))

        return await self._fleet.cached.held(dialect.as_prompt(body), engines, session, tokens, tokenize)

    def _history_engine(self, session: str, source: Heartbeat | None, sink: Heartbeat, held: Mapping[str, int]) -> str:
        """The decode engine if it can write into the prefill engine what that lacks of the prompt: by what they have
        told of their caches, else if it had this session's last turn."""
        if source is None or not sink.may_write_into(source):
            return ""
        last, self._last_sinks[session] = self._last_sinks.get(session), key_of(sink)
        if held:
            has_more = held.get(sink.engine, 0) > held.get(source.engine, 0)
        else:
            has_more = bool(session) and last == key_of(sink)
        return sink.engine if has_more else ""

    def _job(
        self,
        request: web.Request,
        dialect: Dialect,
        body: Body,
        tokens: int,
        arrived_at: float,
        history_engine: str,
    ) -> Job:
        transfer_id = new_transfer_id()
        traceparent, trace = self._trace(request, body, transfer_id, arrived_at)
        headers = forwarded(request.headers)
        headers[REQUEST_ID] = request[ASSIGNED_ID] = request_id_of(request.headers) or transfer_id
        if traceparent:
            headers["traceparent"] = traceparent
        return Job(
            request.path, dialect, body, headers, transfer_id, traceparent, tokens, arrived_at, trace, history_engine
        )

    def _trace(self, request: web.Request, body: Body, transfer_id: str, arrived_at: float) -> tuple[str, Trace | None]:
        if self._collector is None:
            return "", None  # the client's own traceparent is passed on as a header
        about: dict[str, Value] = {"http.route": request.path, "kvbus.stream": body.get("stream") is True}
        if request_id := request_id_of(request.headers):
            about["kvbus.request_id"] = request_id
        traceparent, trace = self._collector.begin(transfer_id, request.headers.get("traceparent"), about)
        if trace is not None:
            trace.mark(MarkName.ARRIVED, at_s=arrived_at)
        return traceparent, trace

    def _note_alone(self, model: str | None) -> None:
        """A decode engine computes a prompt itself, though nothing in the request asks for it."""
        ready = self._node.membership.peers(prefill=True, ready=True)
        named = (
            model is not None and bool(ready) and not any(engine.role.prefills for engine in self._fleet.serving(model))
        )
        self._meters.alone("name" if named else "none_fits" if ready else "none_ready")
        if self._once.due(("alone", model if named else bool(ready))):
            why = f"no prefill engine serves {model!r:.200}" if named else "no prefill engine that fits is ready"
            logger.warning("kvbus: %s: decode engines compute prompts themselves", why)

    def _gate(self, model: str) -> Gate:
        if model not in self._gates:
            limits = self._settings
            self._gates[model] = Gate(
                lambda: limits.max_in_flight * len(self._fleet.decoding(model)), limits.max_queue, limits.max_wait_s
            )
        return self._gates[model]

    def _on_peer(self, change: Change) -> None:
        self._fleet.on_peer(change)
        if isinstance(change, PeerLeft):
            for serving in list(self._servings.values()):
                serving.engine_left(change.engine, change.incarnation, change.reason)
        if isinstance(change, PeerJoined):
            for serving in list(self._servings.values()):
                serving.engine_is_back(change.heartbeat.engine, change.heartbeat.incarnation)
        for gate in self._gates.values():
            gate.admit()

    def _on_transfer(self, message: TransferStarted | TransferDone | TransferFailed) -> None:
        if isinstance(message, TransferFailed):
            self._lose_transfer(message, message.reason, kept=message.kept)

    def _on_ack(self, message: RegistrationAck | CancelAck | OfPrefill) -> None:
        if isinstance(message, RegistrationAck) and message.refused:
            self._lose_transfer(message, message.refused)

    def _on_cancel(self, cancel: Cancel) -> None:
        """A decode engine that computes the prompt itself needs no prefill."""
        serving = self._servings.get(cancel.transfer_id.partition("#")[0]) if cancel.local_tokens else None
        if serving is not None:
            serving.decode_computes(cancel.transfer_id, cancel.sink_engine, cancel.attempt)

    def _lose_transfer(self, message: TransferFailed | RegistrationAck, why: str, *, kept: bool = False) -> None:
        serving = self._servings.get(message.transfer_id.partition("#")[0])
        if serving is not None:
            serving.transfer_lost(message.source_engine, message.attempt, why, kept=kept)
