"""Where a request's time to first token goes: marks, the stages cut at them, spans, and the ways out.

Engines append marks and publish them; a router or ``kvbus collect`` makes spans of them. Nothing in the transfer
depends on a trace: what is lost here costs a picture, never a request. The only room that imports OpenTelemetry.
"""

from __future__ import annotations

from kvbus.trace.collect_command import run_collector, span_sinks
from kvbus.trace.collector import Collector, SpanSink, Trace
from kvbus.trace.marks import Marker, Marking, NoMarks, Traced, serve_clock, traced
from kvbus.trace.otlp_json import read_otlp
from kvbus.trace.path import GAP_NS, HISTORY_STAGES, WHOLE, HistoryOutcome, MarkName, Outcome, Path, StageName
from kvbus.trace.spans import ROOT, SpanData, Value

__all__ = [
    "GAP_NS",
    "HISTORY_STAGES",
    "ROOT",
    "WHOLE",
    "Collector",
    "HistoryOutcome",
    "MarkName",
    "Marker",
    "Marking",
    "NoMarks",
    "Outcome",
    "Path",
    "SpanData",
    "SpanSink",
    "StageName",
    "Trace",
    "Traced",
    "Value",
    "read_otlp",
    "run_collector",
    "serve_clock",
    "span_sinks",
    "traced",
]
