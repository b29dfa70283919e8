"""A real OTLP endpoint, gRPC, that keeps what it is sent."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from kvbus.trace import SpanData
from kvbus.trace.spans import INTERNAL


class Endpoint(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
    """``spans`` are those that came, of everybody."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[SpanData] = []
        self.url = ""

    @property
    def spans(self) -> list[SpanData]:
        with self._lock:
            return list(self._spans)

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        spans = [
            _span(span, _plain(resource.resource.attributes))
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        with self._lock:
            self._spans += spans
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def otlp_endpoint(host: str = "127.0.0.1") -> Iterator[Endpoint]:
    endpoint = Endpoint()
    server = grpc.server(ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(endpoint, server)
    port = server.add_insecure_port(f"{host}:0")
    endpoint.url = f"http://127.0.0.1:{port}"
    server.start()
    try:
        yield endpoint
    finally:
        server.stop(1).wait()


def _span(span: Any, resource: dict[str, Any]) -> SpanData:
    return SpanData(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.kind or INTERNAL,
        str(resource.get("service.name", "")),
        str(resource.get("kvbus.engine", "")),
        _plain(span.attributes),
        tuple(link.span_id.hex() for link in span.links),
        span.status.message if span.status.code == 2 else "",
    )


def _plain(attributes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for attribute in attributes:
        for kind, value in MessageToDict(attribute.value).items():
            found[attribute.key] = int(value) if kind == "intValue" else value
    return found
