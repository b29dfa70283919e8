"""Decides which requests are sampled, and exports spans to an OTLP endpoint. The only OpenTelemetry import.

The standard ``OTEL_*`` variables configure both. A decision that comes with the request is kept.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from kvbus.bounded import BoundedDict
from kvbus.metrics import OncePer
from kvbus.trace.otlp_json import resource_of
from kvbus.trace.spans import INTERNAL, PRODUCER, SERVER, Ids, SpanData

logger = logging.getLogger(__name__)

MAX_RESOURCES = 1024
CLOSE_TIMEOUT_S = 2.0
EXPORT_BATCH = 32  # a larger one stalls other threads: encoding holds the GIL
_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_KINDS = {INTERNAL: SpanKind.INTERNAL, SERVER: SpanKind.SERVER, PRODUCER: SpanKind.PRODUCER}
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


def parse_traceparent(text: str) -> SpanContext | None:
    """The W3C trace context, None if there is none or it is malformed."""
    match = _TRACEPARENT.fullmatch(text)
    if match is None:
        return None
    trace_id, span_id, flags = (int(part, 16) for part in match.groups())
    context = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))
    return context if context.is_valid else None


def new_span_id() -> str:
    return secrets.token_hex(8)


@dataclass(frozen=True, slots=True)
class TraceStart:
    """A request's trace: ``traceparent`` is for its legs."""

    ids: Ids
    sampled: bool

    @property
    def traceparent(self) -> str:
        return f"00-{self.ids.trace_id}-{self.ids.root}-{'01' if self.sampled else '00'}"


class Sampler:
    """``OTEL_TRACES_SAMPLER`` and ``OTEL_TRACES_SAMPLER_ARG``; without them every request that comes without a trace
    context of its own is sampled."""

    def __init__(self) -> None:
        self._sampler = TracerProvider(shutdown_on_exit=False).sampler

    def begin(self, given: str | None) -> TraceStart:
        """Decide about a request that brought the trace context ``given``."""
        parent = parse_traceparent(given) if given else None
        trace_id = parent.trace_id if parent is not None else secrets.randbits(128) or 1
        context = set_span_in_context(NonRecordingSpan(parent)) if parent is not None else None
        sampled = self._sampler.should_sample(context, trace_id, "request").decision is Decision.RECORD_AND_SAMPLE
        parent_id = f"{parent.span_id:016x}" if parent is not None else ""
        return TraceStart(Ids(f"{trace_id:032x}", new_span_id(), parent_id), sampled)


class OtlpExport:
    """Sends spans to an OTLP endpoint, in small batches, from a thread of its own."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._processor = BatchSpanProcessor(exporter, max_export_batch_size=EXPORT_BATCH)
        self._resources: BoundedDict[tuple[str, str], Resource] = BoundedDict(MAX_RESOURCES)

    def write(self, spans: Sequence[SpanData]) -> None:
        for span in spans:
            self._processor.on_end(self._readable(span))

    def close(self) -> None:
        """Send what is left; bounded in time, even if the endpoint takes nothing."""
        closing = threading.Thread(target=self._processor.shutdown, name="kvbus-export", daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)
        if closing.is_alive():
            logger.warning("kvbus: the last spans could not be exported within %g s", CLOSE_TIMEOUT_S)
            self._exporter.shutdown()  # ends its retries

    def _readable(self, span: SpanData) -> ReadableSpan:
        return ReadableSpan(
            span.name,
            context=_context(span.trace_id, span.span_id),
            parent=_context(span.trace_id, span.parent_id) if span.parent_id else None,
            resource=self._resource(span.service, span.engine),
            attributes=dict(span.attributes),
            links=[Link(_context(span.trace_id, each)) for each in span.links],
            kind=_KINDS[span.kind],
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=InstrumentationScope("kvbus"),
        )

    def _resource(self, service: str, engine: str) -> Resource:
        key = (service, engine)
        if key not in self._resources:
            self._resources[key] = Resource.create(resource_of(service, engine))
        return self._resources[key]


def _context(trace_id: str, span_id: str) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=_SAMPLED)


class _Seldom(logging.Filter):
    """Logs an endpoint that is away once a minute, not several times a second."""

    def __init__(self) -> None:
        super().__init__()
        self._once = OncePer()

    def filter(self, record: logging.LogRecord) -> bool:
        return self._once.due(record.msg)


def export_from_environment() -> OtlpExport | None:
    """Where the ``OTEL_*`` variables say, None if they say nothing."""
    endpoint = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if not endpoint or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    for name in ("grpc.exporter", "http.trace_exporter"):
        logging.getLogger(f"opentelemetry.exporter.otlp.proto.{name}").addFilter(_Seldom())
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol in (None, "", "grpc"):
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return OtlpExport(GrpcExporter(insecure=None if endpoint.startswith("https") else True))
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return OtlpExport(HttpExporter())
    logger.warning("kvbus: OTEL_EXPORTER_OTLP_PROTOCOL=%r is not grpc or http/protobuf; no spans", protocol)
    return None
