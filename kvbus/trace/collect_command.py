"""Chooses where traces go, from the command line and the environment; and ``kvbus collect``, for other routers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from kvbus.bus import QUIET_S, NatsBus, Node, nobody_in
from kvbus.config import Config
from kvbus.errors import TraceError
from kvbus.protocol import Membership
from kvbus.trace.collector import Collector, SpanSink
from kvbus.trace.file import TraceFile
from kvbus.trace.otlp import export_from_environment
from kvbus.trace.path import Path as Way
from kvbus.wire import Subjects

SAY_INTERVAL_S = 10.0


def span_sinks(trace_file: Path | None) -> list[SpanSink]:
    """The file, and where the ``OTEL_*`` variables say.

    Raises:
        TraceError: the file cannot be used.
    """
    sinks: list[SpanSink] = []
    if trace_file is not None:
        try:
            sinks.append(TraceFile(trace_file))
        except OSError as failure:
            raise TraceError(f"--trace-file {trace_file}", failure.strerror or type(failure).__name__) from None
    if (export := export_from_environment()) is not None:
        sinks.append(export)
    return sinks


async def run_collector(config: Config, trace_file: Path | None, say: Callable[[str], None]) -> None:
    """Collect until cancelled, saying now and then how many traces there were.

    Raises:
        TraceError: there is nowhere to send traces, or the file cannot be used.
    """
    sinks = span_sinks(trace_file)
    if not sinks:
        raise TraceError("collect", "nowhere to send traces: set OTEL_EXPORTER_OTLP_ENDPOINT, or --trace-file FILE")
    made: list[Way] = []
    node = Node(
        NatsBus(config.servers, "kvbus-collect"),
        Subjects(config.namespace),
        name="kvbus-collect",
        membership=Membership(dead_after_s=config.dead_after_s),
        hears=(),
    )
    collector = Collector(node, sinks, made.append, adopts=True)
    traces = 0
    try:
        async with node:
            say(f"collecting from namespace {config.namespace} at {config.nats_url}; Ctrl-C ends it")
            await asyncio.sleep(QUIET_S)
            if node.bus.connected and not node.membership.peers():
                say(await nobody_in(node.bus, config.namespace, "this NATS server"))
            while True:
                await asyncio.sleep(SAY_INTERVAL_S)
                if made:
                    traces += len(made)
                    made.clear()
                    say(f"{traces} traces")
    finally:
        await asyncio.to_thread(collector.close)
