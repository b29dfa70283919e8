"""The router's own Prometheus metrics. Labels are few and bounded: no request ids, nothing that a client wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
GAUGES = {
    "in_flight": "Requests at the engines.",
    "queue_length": "Requests that wait in the router.",
    "ready": "1 if requests can be answered.",
    "lacking": "How many things are missing of those that /ready names: engines of a model, the bus.",
    "bus_connected": "1 while the NATS server answers.",
    "connections": "Clients' connections.",
    "cache_blocks": "Blocks in engines' prefix caches that the router knows of.",
    "cache_mended": "Times that an engine was asked anew for all that is in its prefix cache.",
}
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Engines(Collector):
    """Engines by role and state, counted at each scrape."""

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
        self._requests = self._counter(
            "requests",
            "Requests to engines by what became of them in the end: ok, client_error, server_error, overloaded (no "
            "room in time), unavailable (no engine), client_left, broken (the engine was lost in mid-stream).",
            "outcome",
            OUTCOMES,
        )
        self._http = Counter(
            "kvbus_router_http_requests",
            "All requests, once each when they have ended, by route, method, status (499: the client left) and model "
            "(the engines' own name of it).",
            ["route", "method", "code", "model"],
            registry=self.registry,
        )
        self._ttft = self._histogram(
            "ttft", "From a streaming request's arrival to the first token that the router passes on.", TTFT_BUCKETS_S
        )
        self._whole = self._histogram(
            "answer", "From the arrival of a request that is not streamed to its answer.", TTFT_BUCKETS_S
        )
        self._between = self._histogram(
            "inter_token",
            "Between pieces of a stream as they are passed on: a token each, unless an engine sent several at once.",
            BETWEEN_BUCKETS_S,
        )
        self._stages = self._histogram(
            "stage", "Stages of traced requests' time to first token.", STAGE_BUCKETS_S, ["stage"]
        )
        self._takeovers = self._counter(
            "takeovers",
            "Engines that were lost in a request before its first token, by their role.",
            "lost",
            ("prefill", "decode"),
        )
        self._alone = self._counter(
            "alone",
            "Requests whose prompt decode computed itself, by why: none_ready (no prefill engine is), name (none "
            "serves the model by that name, a LoRA adapter perhaps), none_fits, decode (the engine chose to: little of "
            "the prompt was missing from its cache, or its KV did not come).",
            "why",
            ("none_ready", "name", "none_fits", "decode"),
        )
        self._chosen = self._counter(
            "choices",
            "Requests by what their engines were chosen by: cache (what engines have of the prompt) or head (its "
            "session, its first words, the load).",
            "by",
            ("cache", "head"),
        )
        self._tokenized = self._counter(
            "tokenize",
            "Prompts that came as text and whose token ids would help, by what became of them: asked (an engine told "
            "them), remembered, busy (too many at once, or after a failure), failed (no answer in time, or no ids).",
            "outcome",
            ("asked", "remembered", "busy", "failed"),
        )
        self._connections_refused = self._counter(
            "connections_refused",
            "Clients' connections that were closed without an answer to what was asked: limit (--max-connections), "
            "descriptors (none were left), slow (headers did not arrive), malformed (what came is no HTTP).",
            "why",
            REFUSALS,
        )
        self._gauges = {
            name: Gauge(f"kvbus_router_{name}", documentation, registry=self.registry)
            for name, documentation in GAUGES.items()
        }
        build = Gauge("kvbus_router_build_info", "Always 1.", ["version"], registry=self.registry)
        build.labels(__version__).set(1)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self.registry.register(_Engines(membership))

    def _counter(self, name: str, documentation: str, label: str, values: Iterable[str]) -> Counter:
        """Each value begins with 0: increase() of a counter that appears with 1 is 0, and an alert would miss it."""
        counter = Counter(f"kvbus_router_{name}", documentation, [label], registry=self.registry)
        for value in values:
            counter.labels(value)
        return counter

    def _histogram(
        self, name: str, documentation: str, buckets: Sequence[float], labels: Sequence[str] = ()
    ) -> Histogram:
        return Histogram(f"kvbus_router_{name}_seconds", documentation, labels, buckets=buckets, registry=self.registry)

    def watch(self, **gauges: Callable[[], float]) -> None:
        """Read these of :data:`GAUGES` from now on by calling the functions."""
        for name, read in gauges.items():
            self._gauges[name].set_function(read)

    def connection_refused(self, why: str) -> None:
        """A client's connection is closed and its request not answered; ``why`` is one of :data:`REFUSALS`."""
        self._connections_refused.labels(why).inc()

    def http(self, route: str, method: str, code: int, model: str) -> None:
        """A request has ended."""
        self._http.labels(route, method if method in METHODS else "other", str(code), model).inc()

    def began(self, after_s: float) -> None:
        """The first token of a stream goes to the client."""
        self._ttft.observe(after_s)

    def went_on(self, after_s: float) -> None:
        """The next piece of a stream goes to the client, so long after the one before."""
        self._between.observe(after_s)

    def answered(self, status: int, after_s: float | None = None) -> None:
        """An answer has gone to the client: a whole one after ``after_s``, or a stream."""
        self._requests.labels(_outcome(status)).inc()
        if status < 400 and after_s is not None:
            self._whole.observe(after_s)

    def refused(self, answer: Answer) -> None:
        """The router refuses the request with an answer of its own."""
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

    def chosen(self, by: str) -> None:
        self._chosen.labels(by).inc()

    def tokenized(self, outcome: str) -> None:
        self._tokenized.labels(outcome).inc()

    def path(self, path: Path) -> None:
        """The critical path of a traced request. Any thread."""
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
