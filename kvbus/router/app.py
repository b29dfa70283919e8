"""The router's HTTP application.

The one rule: what a client gets is what the decode engine says, byte for byte, unless the prefill engine refuses before
the first byte: then it is what the prefill engine says. A prefill engine that does not answer refuses nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from random import Random

from aiohttp import web

from kvbus.collector import Collector, SpanSink, Trace
from kvbus.membership import Change, PeerJoined, PeerLeft
from kvbus.messages import (
    CancelAck,
    Heartbeat,
    RegistrationAck,
    State,
    TransferDone,
    TransferFailed,
    TransferStarted,
)
from kvbus.metrics import OncePer
from kvbus.node import Node
from kvbus.router import upstream
from kvbus.router.answers import BAD_GATEWAY, NOT_FOUND, UNAVAILABLE, Answer, error
from kvbus.router.choose import Choice, is_usable
from kvbus.router.errors import in_openais_form
from kvbus.router.flight import Flight
from kvbus.router.gate import Gate, TurnedAwayError
from kvbus.router.headers import REQUEST_ID, request_id_of
from kvbus.router.in_flight import InFlight
from kvbus.router.job import Job
from kvbus.router.legs import Body, must_be_alone, new_transfer_id
from kvbus.router.loads import Loads
from kvbus.router.meters import CONTENT_TYPE, Meters
from kvbus.router.models import merge_models
from kvbus.router.readiness import Readiness, readiness_of
from kvbus.router.reading import BadRequestError, read_body
from kvbus.router.serving import Serving
from kvbus.router.session import SESSION_HEADER, affinity_of, payer_of, prompt_tokens
from kvbus.router.settings import Settings
from kvbus.sink import PREFILL, OfPrefill
from kvbus.spans import Value
from kvbus.ttft import MarkName

logger = logging.getLogger(__name__)

RETRY_AFTER_S = "5"
_NAME = web.RequestKey("request id", str)
ASIDE_S = 30.0  # for what needs no forward pass: a frozen engine must not hold a client for ever


class Router:
    """The front door over a node's membership. Lives in one event loop.

    Args:
        span_sinks: where traces go; without any, requests are not traced, and clients' trace contexts pass through.
    """

    def __init__(
        self,
        node: Node,
        settings: Settings | None = None,
        chance: Random | None = None,
        span_sinks: Sequence[SpanSink] = (),
    ) -> None:
        self._node, self._settings, self._chance = node, settings or Settings(), chance or Random()
        self._loads, self._meters, self._once = Loads(), Meters(node.membership), OncePer()
        self._collector = Collector(node, span_sinks, self._meters.path) if span_sinks else None
        self.in_flight = InFlight()
        self._bus_changed_at = time.monotonic()
        node.watch_bus(self._on_bus)
        self._meters.watch_readiness(lambda: self.readiness().ready, lambda: len(self.readiness().lacking))
        self._gates: dict[str, Gate] = {}
        self._servings: dict[str, Serving] = {}
        self._meters.watch(lambda: len(self._servings), lambda: sum(gate.queued for gate in self._gates.values()))
        node.watch_peers(self._on_peer)
        # A decode engine whose receive failed waits for a word of ours, also when the prefill engine lives.
        node.listen(node.subjects.transfers("*"), (TransferStarted, TransferDone, TransferFailed), self._on_transfer)
        node.listen(node.subjects.acks("*"), (RegistrationAck, CancelAck, *PREFILL), self._on_ack)

    def app(self) -> web.Application:
        app = web.Application(
            client_max_size=self._settings.max_body_mib << 20, middlewares=[self.in_flight.watch, in_openais_form]
        )
        app.on_response_prepare.append(self.in_flight.on_prepare)
        app.on_response_prepare.append(_echo_request_id)
        app.router.add_post("/v1/completions", self._serve)
        app.router.add_post("/v1/chat/completions", self._serve)
        app.router.add_post("/tokenize", self._pass_on)
        app.router.add_post("/detokenize", self._pass_on)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/metrics", self._metrics)
        app.cleanup_ctx.append(self._life)
        return app

    @property
    def meters(self) -> Meters:
        return self._meters

    async def _life(self, app: web.Application) -> AsyncIterator[None]:
        async with self._node, upstream.open_session() as self._session:
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

    def _on_peer(self, change: Change) -> None:
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
            self._tell(message, message.reason)

    def _on_ack(self, message: RegistrationAck | CancelAck | OfPrefill) -> None:
        if isinstance(message, RegistrationAck) and message.refused:
            self._tell(message, message.refused)

    def _tell(self, message: TransferFailed | RegistrationAck, why: str) -> None:
        serving = self._servings.get(message.transfer_id.partition("#")[0])
        if serving is not None:
            serving.transfer_lost(message.source_engine, message.attempt, why)

    # Requests that one decode engine answers

    async def _models(self, request: web.Request) -> web.Response:
        answers: dict[str, Answer] = {}
        failed = error(503, "no decode engine is ready", UNAVAILABLE, headers={"Retry-After": RETRY_AFTER_S})
        for engine in self._usable(None):
            if engine.model in answers:
                continue
            try:
                async with (
                    asyncio.timeout(ASIDE_S),
                    self._session.get(upstream.url_of(engine, request.path)) as got,
                ):
                    answer = await upstream.whole(got)
            except upstream.LOST as failure:
                failed = error(502, f"decode engine {engine.engine}: {upstream.why(failure)}", BAD_GATEWAY)
                continue
            if answer.status == 200:
                answers[engine.model] = answer
            else:
                failed = answer
        return _response(merge_models([answers[model] for model in sorted(answers)]) if answers else failed)

    async def _pass_on(self, request: web.Request) -> web.Response:
        body = await self._read(request)
        engines = self._usable(body.get("model"))
        if not engines:
            return _response(self._no_engine(body.get("model")))
        engine = min(engines, key=self._loads.decode)
        headers = upstream.forwarded(request.headers)
        try:
            async with asyncio.timeout(ASIDE_S):
                return _response(await upstream.post(self._session, engine, request.path, body, headers))
        except upstream.LOST as failure:
            return _response(error(502, f"decode engine {engine.engine}: {upstream.why(failure)}", BAD_GATEWAY))

    # Requests that two engines serve

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        arrived_at = time.monotonic()
        try:
            body = await self._read(request)
            model = body.get("model")
            usable = self._usable(model)
            if not usable:
                raise BadRequestError(self._no_engine(model))
            async with self._gate(usable[0].model).enter(payer_of(body, request.headers, request.remote)):
                return await self._fly(request, body, usable[0].model, arrived_at)
        except BadRequestError as refused:
            self._meters.refused(refused.answer.status)
            raise
        except asyncio.CancelledError:
            self._meters.client_left()
            raise
        except TurnedAwayError as away:
            self._meters.refused(away.answer.status)
            return _response(away.answer)

    async def _fly(self, request: web.Request, body: Body, model: str, arrived_at: float) -> web.StreamResponse:
        transfer_id = new_transfer_id()
        tokens, session = prompt_tokens(body), affinity_of(body, request.headers.get(SESSION_HEADER))
        alone, settings = must_be_alone(body), self._settings

        def choice() -> Choice:
            engines = self._node.membership.peers()
            return Choice(
                engines, model, self._loads, self._chance, session, tokens, alone, most=settings.max_in_flight
            )

        now = choice()
        source = now.source(None)
        sink = now.sink(source)
        if sink is None:  # the last one left while this request waited for its turn
            raise BadRequestError(self._no_engine(model))
        if source is None and not alone and self._once.due("alone"):
            logger.warning("kvbus: no prefill engine is ready: decode engines compute prompts themselves")
        traceparent, trace = self._trace(request, body, transfer_id, arrived_at)
        headers = upstream.forwarded(request.headers)
        headers[REQUEST_ID] = request[_NAME] = request_id_of(request.headers) or transfer_id
        if traceparent:
            headers["traceparent"] = traceparent
        begun = Flight(source, sink, settings.max_takeovers, settings.takeover_s)
        job = Job(request.path, body, headers, transfer_id, traceparent, tokens, arrived_at, trace)
        serving = Serving(
            job, begun, choice, self._node, self._session, self._loads, self._meters, settings.first_token_s
        )
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

    async def _read(self, request: web.Request) -> Body:
        return await read_body(request, self._settings.body_timeout_s, self._settings.max_body_mib)

    def _usable(self, model: str | None) -> list[Heartbeat]:
        return [peer for peer in self._node.membership.peers(decode=True) if is_usable(peer, model)]

    def _gate(self, model: str) -> Gate:
        if model not in self._gates:
            limits = self._settings
            self._gates[model] = Gate(
                lambda: limits.max_in_flight * len(self._usable(model)), limits.max_queue, limits.max_wait_s
            )
        return self._gates[model]

    def _no_engine(self, model: str | None) -> Answer:
        served = sorted({peer.model for peer in self._node.membership.peers()})
        if model is not None and served and model not in served:
            message = f"the model {model!r:.200} does not exist; served: {', '.join(served)}"
            return error(404, message, NOT_FOUND, "model")
        missing = "no decode engine is ready"
        if not self._node.bus.connected:
            missing = "the bus is not connected, so no engine is known"
        elif any(peer.state is State.DRAINING for peer in self._node.membership.peers(decode=True)):
            missing = "no decode engine is ready: the last ones are draining"
        return error(503, missing, UNAVAILABLE, headers={"Retry-After": RETRY_AFTER_S})


async def _echo_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """On every answer, so that a client can name a request that went wrong."""
    response.headers[REQUEST_ID] = request.get(_NAME) or request_id_of(request.headers) or new_transfer_id()


def _response(answer: Answer) -> web.Response:
    return web.Response(status=answer.status, body=answer.body, headers=answer.headers)
