"""The router's own Prometheus metrics. Labels are few and bounded: no request ids, no client's words."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kvbus import __version__
from kvbus.protocol import Membership
from kvbus.router.http import OVERLOADED, UNAVAILABLE, Answer
from kvbus.trace import Outcome, Path

TTFT_BUCKETS_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)
STAGE_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
BETWEEN_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5)
OUTCOMES = ("ok", "client_error", "server_error", "overloaded", "unavailable", "client_left", "broken")
REFUSALS = ("limit", "descriptors", "slow", "malformed")
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Engines(Collector):
    """Engines by role and state, read when asked for."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    def collect(self) -> Iterable[Any]:
        family = GaugeMetricFamily("kvbus_router_engines", "Engines on the bus.", labels=["role", "state"])
        counts: dict[tuple[str, str], int] = {}
        for peer in self._membership.peers():
            key = (peer.role.value, peer.state.value)
            counts[key] = counts.get(key, 0) + 1
        for labels, count in sorted(counts.items()):
            family.add_metric(list(labels), count)
        yield family


class Meters:
    """One registry of its own. Lives in one event loop."""

    def __init__(self, membership: Membership) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "kvbus_router_requests",
            "Requests to engines by what became of them in the end: ok, client_error, server_error, overloaded (no "
            "room in time), unavailable (no engine), client_left, broken (the engine was lost in mid-stream).",
            ["outcome"],
            registry=self.registry,
        )
        self._http = Counter(
            "kvbus_router_http_requests",
            "All requests, once each when they have ended, by route, method, status (499: the client left) and model "
            "(the engines' own name of it).",
            ["route", "method", "code", "model"],
            registry=self.registry,
        )
        self._ttft = Histogram(
            "kvbus_router_ttft_seconds",
            "From a streaming request's arrival to the first token that the router passes on.",
            buckets=TTFT_BUCKETS_S,
            registry=self.registry,
        )
        self._whole = Histogram(
            "kvbus_router_answer_seconds",
            "From the arrival of a request that is not streamed to its answer.",
            buckets=TTFT_BUCKETS_S,
            registry=self.registry,
        )
        self._between = Histogram(
            "kvbus_router_inter_token_seconds",
            "Between pieces of a stream as they are passed on: a token each, unless an engine sent several at once.",
            buckets=BETWEEN_BUCKETS_S,
            registry=self.registry,
        )
        self._takeovers = Counter(
            "kvbus_router_takeovers",
            "Engines that were lost in a request before its first token, by their role.",
            ["lost"],
            registry=self.registry,
        )
        self._alone = Counter(
            "kvbus_router_alone",
            "Requests whose prompt decode had to compute itself, by why: none_ready (no prefill engine is), name (none "
            "serves the model by that name, a LoRA adapter perhaps), none_fits.",
            ["why"],
            registry=self.registry,
        )
        self._stages = Histogram(
            "kvbus_router_stage_seconds",
            "Stages of traced requests' time to first token.",
            ["stage"],
            buckets=STAGE_BUCKETS_S,
            registry=self.registry,
        )
        self._connections_refused = Counter(
            "kvbus_router_connections_refused",
            "Clients' connections that were closed without an answer to what was asked: limit (--max-connections), "
            "descriptors (none were left), slow (headers did not arrive), malformed (what came is no HTTP).",
            ["why"],
            registry=self.registry,
        )
        for why in REFUSALS:
            self._connections_refused.labels(why)
        # With 0 from the start: increase() of a counter that appears with 1 is 0, and an alert would miss the first.
        for outcome in OUTCOMES:
            self._requests.labels(outcome)
        for lost in ("prefill", "decode"):
            self._takeovers.labels(lost)
        for why in ("none_ready", "name", "none_fits"):
            self._alone.labels(why)
        self._in_flight = Gauge("kvbus_router_in_flight", "Requests at the engines.", registry=self.registry)
        self._queued = Gauge("kvbus_router_queue_length", "Requests that wait in the router.", registry=self.registry)
        self._ready = Gauge("kvbus_router_ready", "1 if requests can be answered.", registry=self.registry)
        self._lacking = Gauge(
            "kvbus_router_lacking",
            "How many things are missing of those that /ready names: engines of a model, the bus.",
            registry=self.registry,
        )
        self._bus = Gauge("kvbus_router_bus_connected", "1 while the NATS server answers.", registry=self.registry)
        build = Gauge("kvbus_router_build_info", "Always 1.", ["version"], registry=self.registry)
        build.labels(__version__).set(1)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self._connections = Gauge("kvbus_router_connections", "Clients' connections.", registry=self.registry)
        self.registry.register(_Engines(membership))

    def watch(self, in_flight: Callable[[], float], queued: Callable[[], float]) -> None:
        """Read these two whenever asked."""
        self._in_flight.set_function(in_flight)
        self._queued.set_function(queued)

    def watch_readiness(self, ready: Callable[[], float], lacking: Callable[[], float]) -> None:
        """Likewise."""
        self._ready.set_function(ready)
        self._lacking.set_function(lacking)

    def watch_bus(self, connected: Callable[[], float]) -> None:
        """Likewise."""
        self._bus.set_function(connected)

    def watch_connections(self, connections: Callable[[], float]) -> None:
        """Likewise."""
        self._connections.set_function(connections)

    def connection_refused(self, why: str) -> None:
        """A client's connection is closed without an answer to what it asked; ``why`` is one of few words."""
        self._connections_refused.labels(why).inc()

    def http(self, route: str, method: str, code: int, model: str) -> None:
        """A request has ended."""
        self._http.labels(route, method if method in METHODS else "other", str(code), model).inc()

    def began(self, after_s: float) -> None:
        """The first token of a stream goes to the client."""
        self._ttft.observe(after_s)

    def went_on(self, after_s: float) -> None:
        """The next piece of a stream, so long after the one before."""
        self._between.observe(after_s)

    def answered(self, status: int, after_s: float | None = None) -> None:
        """An answer has gone to the client, whole after so long, or as a stream."""
        self._requests.labels(_outcome(status)).inc()
        if status < 400 and after_s is not None:
            self._whole.observe(after_s)

    def refused(self, answer: Answer) -> None:
        """The router answers itself."""
        ours = {OVERLOADED: "overloaded", UNAVAILABLE: "unavailable"}
        self._requests.labels(ours.get(answer.kind) or _outcome(answer.status)).inc()

    def broken(self) -> None:
        self._requests.labels("broken").inc()

    def client_left(self) -> None:
        self._requests.labels("client_left").inc()

    def took_over(self, kind: str) -> None:
        self._takeovers.labels(kind).inc()

    def alone(self, why: str) -> None:
        self._alone.labels(why).inc()

    def path(self, path: Path) -> None:
        """The way of a traced request. Any thread."""
        for stage in path.stages if path.outcome is not Outcome.FAILED else ():
            self._stages.labels(stage.name.value).observe(stage.duration_ns / 1e9)

    def exposition(self) -> bytes:
        return generate_latest(self.registry)


def _outcome(status: int) -> str:
    if status == 429:
        return "overloaded"
    if status >= 500:
        return "server_error"
    return "client_error" if status >= 400 else "ok"
