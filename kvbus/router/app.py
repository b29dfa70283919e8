"""The router's HTTP application.

The one rule: what a client gets is what the decode engine says, byte for byte, unless the prefill engine refuses before
the first byte: then it is what the prefill engine says. A prefill engine that does not answer refuses nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from random import Random

from aiohttp import web

from kvbus.bus import Node
from kvbus.engine import PREFILL, OfPrefill
from kvbus.metrics import OncePer
from kvbus.protocol import Change, PeerJoined, PeerLeft
from kvbus.router.admission import Gate, TurnedAwayError
from kvbus.router.error_form import in_openais_form
from kvbus.router.fleet import (
    SESSION_HEADER,
    Asker,
    Choice,
    Fleet,
    Loads,
    Names,
    Readiness,
    affinity_of,
    key_of,
    prompt_tokens,
    readiness_of,
)
from kvbus.router.http import (
    MODEL,
    NOT_FOUND,
    REQUEST_ID,
    Access,
    BadRequestError,
    Clients,
    InFlight,
    Reader,
    error,
    request_id_of,
    upstream,
)
from kvbus.router.metrics import CONTENT_TYPE, Meters
from kvbus.router.proxy import Passing, respond
from kvbus.router.request import (
    CHAT,
    RESPONSES,
    Body,
    Dialect,
    Flight,
    Job,
    Serving,
    must_be_alone,
    new_transfer_id,
)
from kvbus.router.routes import ROUTES, How, Route
from kvbus.router.settings import Settings
from kvbus.trace import Collector, MarkName, SpanSink, Trace, Value
from kvbus.wire import CancelAck, Heartbeat, RegistrationAck, TransferDone, TransferFailed, TransferStarted

logger = logging.getLogger(__name__)

_NAME = web.RequestKey("request id", str)


class Router:
    """The front door over a node's membership. Lives in one event loop.

    Args:
        engine_key: the key that engines with ``--api-key`` want to hear when the router asks them for their names.
        span_sinks: where traces go; without any, requests are not traced, and clients' trace contexts pass through.
    """

    def __init__(
        self,
        node: Node,
        settings: Settings | None = None,
        chance: Random | None = None,
        span_sinks: Sequence[SpanSink] = (),
        engine_key: str = "",
    ) -> None:
        self._node, self._settings, self._chance = node, settings or Settings(), chance or Random()
        self._loads, self._meters, self._once = Loads(time.monotonic), Meters(node.membership), OncePer()
        self._collector = Collector(node, span_sinks, self._meters.path) if span_sinks else None
        self.in_flight = InFlight()
        limits = self._settings
        self._clients = Clients(limits.trusted_proxies)
        self._access = Access(limits.access_log, self._meters.http, self._clients)
        self._meters.watch_bus(lambda: self._node.bus.connected)
        self._reader = Reader(limits.body_timeout_s, limits.max_body_mib, limits.max_bodies_mib)
        self._bus_changed_at = time.monotonic()
        node.watch_bus(self._on_bus)
        self._meters.watch_readiness(lambda: self.readiness().ready, lambda: len(self.readiness().lacking))
        self._names = Names()
        self._asker = Asker(node.membership, self._names, engine_key)
        self._fleet = Fleet(node, self._names, self._asker)
        self._gates: dict[str, Gate] = {}
        self._servings: dict[str, Serving] = {}
        self._meters.watch(lambda: len(self._servings), lambda: sum(gate.queued for gate in self._gates.values()))
        node.watch_peers(self._on_peer)
        # A decode engine whose receive failed waits for a word of ours, also when the prefill engine lives.
        node.listen(node.subjects.transfers("*"), (TransferStarted, TransferDone, TransferFailed), self._on_transfer)
        node.listen(node.subjects.acks("*"), (RegistrationAck, CancelAck, *PREFILL), self._on_ack)

    def app(self) -> web.Application:
        app = web.Application(
            middlewares=[self._access.watch, self.in_flight.watch, self._reader.release, in_openais_form]
        )
        app.on_response_prepare.append(self.in_flight.on_prepare)
        app.on_response_prepare.append(_echo_request_id)
        own = {"/ready": self._ready, "/metrics": self._metrics, "/load": self._load}
        for route in ROUTES:
            handler = own.get(route.path, self._health) if route.how is How.OWN else partial(self._handle, route)
            for method in route.methods:
                if method == "GET":
                    app.router.add_get(route.path, handler)  # and HEAD
                else:
                    app.router.add_route(method, route.path, handler)
        app.cleanup_ctx.append(self._life)
        return app

    @property
    def meters(self) -> Meters:
        return self._meters

    async def _life(self, app: web.Application) -> AsyncIterator[None]:
        async with self._node, upstream.open_session() as self._session, self._asker.asking(self._session):
            self._passing = Passing(
                self._session, self._fleet, self._asker, self._reader, self._loads, self._settings, self._chance
            )
            yield
            if self._collector is not None:
                await self._collector.settle()
        if self._collector is not None:
            await asyncio.to_thread(self._collector.close)

    # About the router

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response(self.readiness().as_json())

    async def _ready(self, request: web.Request) -> web.Response:
        now = self.readiness()
        wanted = now.ready and (now.has_pair or request.query.get("pairs") != "1")
        return web.json_response(now.as_json(), status=200 if wanted else 503)

    def readiness(self) -> Readiness:
        """Whether requests can be answered, now."""
        connected, engines = self._node.bus.connected, self._node.membership.peers()
        if not connected:  # who dies now is not missed: one that did not answer is not trusted
            engines = [engine for engine in engines if not self._loads.is_suspect(engine)]
        away_s = None if connected else time.monotonic() - self._bus_changed_at
        return readiness_of(engines, bus_away_s=away_s, draining=self.in_flight.draining)

    def _on_bus(self, connected: bool) -> None:
        self._bus_changed_at = time.monotonic()

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._meters.exposition(), headers={"Content-Type": CONTENT_TYPE})

    async def _load(self, request: web.Request) -> web.Response:
        """In vLLM's words; of this router's requests."""
        return web.json_response({"server_load": len(self._servings)})

    def _on_peer(self, change: Change) -> None:
        self._asker.on_peer(change)
        if isinstance(change, PeerLeft):
            self._loads.forget(change.engine)
            for serving in list(self._servings.values()):
                serving.engine_left(change.engine, change.incarnation, change.reason)
        if isinstance(change, PeerJoined):
            for serving in list(self._servings.values()):
                serving.engine_is_back(change.heartbeat.engine, change.heartbeat.incarnation)
        for gate in self._gates.values():
            gate.admit()

    def _on_transfer(self, message: TransferStarted | TransferDone | TransferFailed) -> None:
        if isinstance(message, TransferFailed):
            self._tell(message, message.reason, kept=message.kept)

    def _on_ack(self, message: RegistrationAck | CancelAck | OfPrefill) -> None:
        if isinstance(message, RegistrationAck) and message.refused:
            self._tell(message, message.refused)

    def _tell(self, message: TransferFailed | RegistrationAck, why: str, *, kept: bool = False) -> None:
        serving = self._servings.get(message.transfer_id.partition("#")[0])
        if serving is not None:
            serving.transfer_lost(message.source_engine, message.attempt, why, kept=kept)

    async def _handle(self, route: Route, request: web.Request) -> web.StreamResponse:
        match route.how:
            case How.PAIR:
                return await self._serve(route, request)
            case How.HOLDER:
                return await self._passing.to_holder(request)
            case How.EVERY:
                return await self._passing.to_every(route, request)
            case How.MODELS:
                return await self._passing.models(request)
            case How.NOT:
                return respond(error(404, f"{request.path:.200} is not routed: {route.why}", NOT_FOUND))
            case _:
                return await self._passing.to_one(route, request)

    # Requests that two engines serve

    async def _serve(self, route: Route, request: web.Request) -> web.StreamResponse:
        arrived_at = time.monotonic()
        try:
            body = await self._reader.body(request)
            engines = await self._fleet.find(body.get("model"), request.headers)
            only = None
            if route.dialect is RESPONSES and isinstance(earlier := body.get("previous_response_id"), str):
                only = await self._passing.pinned(earlier, body.get("model"), request.headers)
            request[MODEL] = engines[0].model
            checked = self._asker.keys_checked(engines)
            payer = self._clients.payer(request.headers, request.remote, keys_checked=checked)
            async with self._gate(engines[0].model).enter(payer):
                return await self._fly(request, route.dialect or CHAT, body, only, arrived_at)
        except BadRequestError as refused:
            self._meters.refused(refused.answer)
            raise
        except asyncio.CancelledError:
            self._meters.client_left()
            raise
        except TurnedAwayError as away:
            self._meters.refused(away.answer)
            return respond(away.answer)

    async def _fly(
        self, request: web.Request, dialect: Dialect, body: Body, only: Heartbeat | None, arrived_at: float
    ) -> web.StreamResponse:
        transfer_id, model = new_transfer_id(), body.get("model")
        prompt = dialect.as_prompt(body)
        tokens, session = prompt_tokens(prompt), affinity_of(prompt, request.headers.get(SESSION_HEADER))
        alone, settings = must_be_alone(body, dialect), self._settings

        def choice() -> Choice:
            engines = self._fleet.serving(model)
            if only is not None:
                engines = [engine for engine in engines if key_of(engine) == key_of(only)]
            most = settings.max_in_flight
            return Choice(engines, self._loads, self._chance, session, tokens, alone, dialect.ranked, most)

        now = choice()
        source = now.source(None)
        sink = now.sink(source)
        if sink is None:  # the last one left while this request waited for its turn
            raise BadRequestError(self._fleet.nobody(model))
        if source is None and not alone:
            self._note_alone(model)
        traceparent, trace = self._trace(request, body, transfer_id, arrived_at)
        headers = upstream.forwarded(request.headers)
        headers[REQUEST_ID] = request[_NAME] = request_id_of(request.headers) or transfer_id
        if traceparent:
            headers["traceparent"] = traceparent
        begun = Flight(source, sink, settings.max_takeovers, settings.takeover_s)
        job = Job(request.path, dialect, body, headers, transfer_id, traceparent, tokens, arrived_at, trace)
        outside = (self._node, self._session, self._loads, self._meters, self._names)
        serving = Serving(job, begun, choice, *outside, settings.first_token_s, settings.answer_s)
        self._servings[transfer_id] = serving
        try:
            return await serving.run(request)
        finally:
            del self._servings[transfer_id]
            if self._collector is not None and trace is not None:
                self._collector.end(transfer_id)

    def _trace(self, request: web.Request, body: Body, transfer_id: str, arrived_at: float) -> tuple[str, Trace | None]:
        given = request.headers.get("traceparent")
        if self._collector is None:
            return "", None  # the client's own goes on as a header
        about: dict[str, Value] = {"http.route": request.path, "kvbus.stream": body.get("stream") is True}
        if request_id := request_id_of(request.headers):
            about["kvbus.request_id"] = request_id
        traceparent, trace = self._collector.begin(transfer_id, given, about)
        if trace is not None:
            trace.mark(MarkName.ARRIVED, at_s=arrived_at)
        return traceparent, trace

    def _note_alone(self, model: str | None) -> None:
        """Decode computes a prompt itself though nothing in the request asks for it."""
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


async def _echo_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """On every answer, so that a client can name a request that went wrong."""
    response.headers[REQUEST_ID] = request.get(_NAME) or request_id_of(request.headers) or new_transfer_id()
