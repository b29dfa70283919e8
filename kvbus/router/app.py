"""The router's HTTP application: sends each route to what handles it, and answers for the router itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from random import Random

from aiohttp import web

from kvbus.bus import Node
from kvbus.router.error_form import in_openais_form
from kvbus.router.fleet import Fleet, Readiness, readiness_of
from kvbus.router.http import (
    NOT_FOUND,
    REQUEST_ID,
    Access,
    Clients,
    InFlight,
    Reader,
    error,
    request_id_of,
    respond,
    upstream,
)
from kvbus.router.metrics import CONTENT_TYPE, Meters
from kvbus.router.pairs import ASSIGNED_ID, Pairs
from kvbus.router.proxy import Proxy
from kvbus.router.request import CHAT, Resources, new_transfer_id
from kvbus.router.routes import ROUTES, How, Route
from kvbus.router.settings import Settings
from kvbus.router.stored_responses import StoredResponses
from kvbus.trace import Collector, SpanSink


class Router:
    """The front door to the engines that a node knows. Lives in one event loop.

    Args:
        engine_key: the API key of engines with ``--api-key``, with which the router asks them for their models.
        span_sinks: where traces go; without any, requests are not traced, and clients' trace contexts pass through.
    """

    def __init__(
        self,
        node: Node,
        settings: Settings | None = None,
        span_sinks: Sequence[SpanSink] = (),
        engine_key: str = "",
    ) -> None:
        self._node, self._settings = node, settings or Settings()
        self.in_flight, self.meters = InFlight(), Meters(node.membership)
        self._fleet = Fleet(node, engine_key, self.meters.tokenized)
        self._collector = Collector(node, span_sinks, self.meters.path) if span_sinks else None
        limits = self._settings
        self._clients = Clients(limits.trusted_proxies)
        self._access = Access(limits.access_log, self.meters.http, self._clients)
        self._reader = Reader(limits.body_timeout_s, limits.max_body_mib, limits.max_bodies_mib)
        self._bus_changed_at = time.monotonic()
        node.watch_bus(self._on_bus)
        self.meters.watch(
            bus_connected=lambda: self._node.bus.connected,
            ready=lambda: self.readiness().ready,
            lacking=lambda: len(self.readiness().lacking),
            cache_blocks=lambda: sum(self._fleet.caches.index.blocks().values()),
            cache_mended=lambda: self._fleet.caches.index.mended,
        )

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

    async def _life(self, app: web.Application) -> AsyncIterator[None]:
        async with upstream.open_session() as session:
            resources = Resources(self._node, session, self._fleet, self.meters, self._settings)
            stored, chance = StoredResponses(resources), Random()
            self._proxy = Proxy(resources, self._reader, stored, chance)
            self._pairs = Pairs(resources, self._reader, self._clients, stored, chance, self._collector)
            self.meters.watch(in_flight=lambda: self._pairs.in_flight, queue_length=lambda: self._pairs.queued)
            async with self._node, self._fleet.discovery.asking(session):
                yield
                if self._collector is not None:
                    await self._collector.settle()
        if self._collector is not None:
            await asyncio.to_thread(self._collector.close)

    def readiness(self) -> Readiness:
        """Whether requests can be answered now."""
        connected, engines = self._node.bus.connected, self._node.membership.peers()
        if not connected:  # an engine that dies now is not missed, so one that did not answer is not trusted
            engines = [engine for engine in engines if not self._fleet.loads.is_suspect(engine)]
        away_s = None if connected else time.monotonic() - self._bus_changed_at
        return readiness_of(engines, bus_away_s=away_s, draining=self.in_flight.draining)

    def _on_bus(self, connected: bool) -> None:
        self._bus_changed_at = time.monotonic()

    async def _handle(self, route: Route, request: web.Request) -> web.StreamResponse:
        match route.how:
            case How.PAIR:
                return await self._pairs.serve(route.dialect or CHAT, request)
            case How.HOLDER:
                return await self._proxy.to_holder(request)
            case How.EVERY:
                return await self._proxy.to_every(route, request)
            case How.MODELS:
                return await self._proxy.models(request)
            case How.NOT:
                return respond(error(404, f"{request.path:.200} is not routed: {route.why}", NOT_FOUND))
            case _:
                return await self._proxy.to_one(route, request)

    # How.OWN

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response(self.readiness().as_json())

    async def _ready(self, request: web.Request) -> web.Response:
        now = self.readiness()
        wanted = now.ready and (now.has_pair or request.query.get("pairs") != "1")
        return web.json_response(now.as_json(), status=200 if wanted else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self.meters.exposition(), headers={"Content-Type": CONTENT_TYPE})

    async def _load(self, request: web.Request) -> web.Response:
        """The JSON of vLLM's ``/load``, about this router's requests."""
        return web.json_response({"server_load": self._pairs.in_flight})


async def _echo_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Name the request in every answer, so that a client can report the one that went wrong."""
    response.headers[REQUEST_ID] = request.get(ASSIGNED_ID) or request_id_of(request.headers) or new_transfer_id()
