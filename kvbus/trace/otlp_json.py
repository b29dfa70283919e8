"""Spans in files: OTLP's JSON form (opentelemetry-proto, "JSON Protobuf Encoding"); Jaeger's UI loads it, too. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvbus.errors import TraceError
from kvbus.trace.spans import INTERNAL, PRODUCER, SERVER, SpanData, Value

SCOPE = "kvbus"
ERROR = 2
_KINDS = {"SPAN_KIND_INTERNAL": INTERNAL, "SPAN_KIND_SERVER": SERVER, "SPAN_KIND_PRODUCER": PRODUCER}


def to_otlp(spans: Sequence[SpanData]) -> dict[str, Any]:
    """Spans as an OTLP ``TracesData``."""
    groups: dict[tuple[str, str], list[SpanData]] = {}
    for span in spans:
        groups.setdefault((span.service, span.engine), []).append(span)
    return {
        "resourceSpans": [
            {
                "resource": {"attributes": _attributes(resource_of(service, engine))},
                "scopeSpans": [{"scope": {"name": SCOPE}, "spans": [_to_json(span) for span in group]}],
            }
            for (service, engine), group in groups.items()
        ]
    }


def resource_of(service: str, engine: str) -> dict[str, Value]:
    return {"service.name": service, **({"kvbus.engine": engine} if engine else {})}


def _to_json(span: SpanData) -> dict[str, Any]:
    found: dict[str, Any] = {
        "traceId": span.trace_id,
        "spanId": span.span_id,
        "name": span.name,
        "kind": span.kind,
        "startTimeUnixNano": str(span.start_ns),
        "endTimeUnixNano": str(span.end_ns),
        "attributes": _attributes(span.attributes),
    }
    if span.parent_id:
        found["parentSpanId"] = span.parent_id
    if span.links:
        found["links"] = [{"traceId": span.trace_id, "spanId": each} for each in span.links]
    if span.error:
        found["status"] = {"code": ERROR, "message": span.error}
    return found


def _attributes(values: Mapping[str, Value]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: Value) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case str():
            return {"stringValue": value}


def read_otlp(text: str, where: str) -> list[SpanData]:
    """Spans of OTLP JSON: one document, or one a line, or Jaeger's ``/api/v3`` answer.

    Among lines that can be read, one that is cut off is left out: a router that was killed leaves such.

    Raises:
        TraceError: it is something else; ``where`` and the line are named.
    """
    try:
        return list(_spans_in(json.loads(text), where))
    except json.JSONDecodeError:
        pass
    spans: list[SpanData] = []
    torn: TraceError | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                spans += _spans_in(json.loads(line), f"{where}, line {number}")
            except json.JSONDecodeError as error:
                reason = f"not JSON: {error.msg}, column {error.colno}"
                torn = torn or TraceError(f"{where}, line {number}", reason)
    if torn is not None and not spans:
        raise torn
    return spans


def _spans_in(document: Any, where: str) -> Iterable[SpanData]:
    try:
        data = document.get("result", document)
        for resource_spans in data["resourceSpans"]:
            resource = _plain(resource_spans.get("resource", {}).get("attributes", ()))
            for scope_spans in resource_spans["scopeSpans"]:
                for span in scope_spans["spans"]:
                    yield _from_json(span, resource)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {error}"
        raise TraceError(where, f'not OTLP JSON {{"resourceSpans": [...]}} ({what:.120})') from None


def _from_json(span: Mapping[str, Any], resource: Mapping[str, Value]) -> SpanData:
    kind, status = span.get("kind", INTERNAL), span.get("status") or {}
    failed = status.get("code") in (ERROR, "STATUS_CODE_ERROR")
    return SpanData(
        str(span["name"]),
        str(span["traceId"]).lower(),
        str(span["spanId"]).lower(),
        str(span.get("parentSpanId", "")).lower(),
        int(span["startTimeUnixNano"]),
        int(span["endTimeUnixNano"]),
        _KINDS.get(kind, INTERNAL) if isinstance(kind, str) else int(kind),
        str(resource.get("service.name", "")),
        str(resource.get("kvbus.engine", "")),
        _plain(span.get("attributes", ())),
        tuple(str(link["spanId"]).lower() for link in span.get("links", ())),
        (str(status.get("message") or "error")) if failed else "",
    )


def _plain(attributes: Iterable[Mapping[str, Any]]) -> dict[str, Value]:
    plain: dict[str, Value] = {}
    for attribute in attributes:
        for kind, value in attribute.get("value", {}).items():
            plain[str(attribute["key"])] = int(value) if kind == "intValue" else value
    return plain
