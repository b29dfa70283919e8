"""Collects the marks of traced requests, makes spans of them and passes these on. Lives in a node's event loop.

A router has one, and tells it when its requests begin and end. Where another router sends the requests, one by itself
(``kvbus collect``) takes them from the marks alone, up to decode's first token.

The one rule: spans are made when a request is over, in a thread of their own, from everybody's marks on one clock.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from kvbus.bounded import BoundedDict
from kvbus.bus import Node
from kvbus.errors import BusUnavailableError, MessageError
from kvbus.metrics import OncePer
from kvbus.trace.clocks import Clocks
from kvbus.trace.marks import host_clock
from kvbus.trace.otlp import Sampler, TraceStart, new_span_id, parse_traceparent
from kvbus.trace.path import OF_ENGINES, Mark, MarkName, Path
from kvbus.trace.spans import Ids, SpanData, Value, spans_of
from kvbus.trace.stages import path_of
from kvbus.wire import HISTORY_SUFFIX, ClockReply, ClockRequest, Marks, is_token

logger = logging.getLogger(__name__)

MAX_TRACES = 8192
MAX_MARKS = 2048  # of one trace
MAX_WAITING = 1024  # traces that are to be made
MAX_ADOPTED_S = 600.0
LINGER_S = 0.5  # the last marks come a little after the request's end
CLOCK_TIMEOUT_S = 1.0
_OF_REQUEST = {name.value: name for name in OF_ENGINES}
_OF_HISTORY = {MarkName.POSTED.value: MarkName.HISTORY_POSTED}
"""What counts of the marks of a history's own transfer: the rest is told by the request's."""


class SpanSink(Protocol):
    """Where spans go; used by one thread."""

    def write(self, spans: Sequence[SpanData]) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Trace:
    """One traced request. Marks are taken in the loop's thread."""

    start: TraceStart
    about: Mapping[str, Value]
    own: list[Mark] = field(default_factory=list)
    heard: list[Marks] = field(default_factory=list)
    marks: int = 0
    complete: bool = False

    def mark(self, name: MarkName, attempt: int = 0, engine: str = "", note: str = "", at_s: float = 0.0) -> None:
        """``at_s`` is a time of the monotonic clock; without it, now."""
        at_ns = int(at_s * 1e9) or time.monotonic_ns()
        self.own.append(Mark(name, at_ns, attempt, engine, note=note))


class Collector:
    """See the module's docstring.

    Args:
        on_path: called with each path, in the collecting thread.
        adopts: collect requests that nobody has begun here, too. Not for use beside a router that collects.
    """

    def __init__(
        self, node: Node, sinks: Sequence[SpanSink], on_path: Callable[[Path], None], *, adopts: bool = False
    ) -> None:
        self._node, self._sinks, self._on_path, self._adopts = node, sinks, on_path, adopts
        self._sampler = Sampler()
        self._traces: BoundedDict[str, Trace] = BoundedDict(MAX_TRACES)
        self._clocks = Clocks(host_clock())
        self._over: BoundedDict[str, None] = BoundedDict(MAX_TRACES)
        self._asking: set[str] = set()
        self._room = threading.Semaphore(MAX_WAITING)
        self._once = OncePer()
        self._pool = ThreadPoolExecutor(1, "kvbus-traces")
        node.listen(node.subjects.marks("*"), Marks, self._hear)

    def begin(self, transfer_id: str, given: str | None, about: Mapping[str, Value]) -> tuple[str, Trace | None]:
        """Decide about a request that came with the trace context ``given``; returns the one for its legs."""
        start = self._sampler.begin(given)
        if not start.sampled:
            return start.traceparent, None
        trace = self._traces[transfer_id] = Trace(start, {**about, "kvbus.transfer_id": transfer_id})
        return start.traceparent, trace

    def end(self, transfer_id: str) -> None:
        """The request is over."""
        if transfer_id in self._traces:
            asyncio.get_running_loop().call_later(LINGER_S, self._collect, transfer_id)

    async def settle(self) -> None:
        """Wait for the last marks of requests that have ended, if there are any."""
        if self._traces:
            await asyncio.sleep(LINGER_S)

    def close(self) -> None:
        """Pass on every trace that is left. Blocks until that is done, or until the sinks give up."""
        for transfer_id in list(self._traces):
            self._collect(transfer_id)
        for sink in self._sinks:
            self._pool.submit(sink.close)
        self._pool.shutdown()

    def _hear(self, message: Marks) -> None:
        trace = self._traces.get(_request_of(message)) or self._adopt(message)
        if trace is None or not is_token(message.engine):
            return
        trace.marks += len(message.marks)
        if trace.marks > MAX_MARKS:
            self._node.counters.add("marks_dropped", len(message.marks))
            return
        trace.heard.append(message)
        if self._clocks.is_stale(message.host, time.monotonic_ns()) and message.host not in self._asking:
            self._asking.add(message.host)
            self._node.spawn(self._ask_clock(message.engine, message.host), f"clock-of-{message.engine}")

    def _adopt(self, message: Marks) -> Trace | None:
        context = parse_traceparent(message.traceparent) if self._adopts else None
        transfer_id = _request_of(message)
        if context is None or transfer_id in self._over:
            return None
        ids = Ids(f"{context.trace_id:032x}", new_span_id(), f"{context.span_id:016x}")
        trace = self._traces[transfer_id] = Trace(TraceStart(ids, True), {"kvbus.transfer_id": transfer_id})
        self._check_adopted(transfer_id, time.monotonic() + MAX_ADOPTED_S)
        return trace

    def _check_adopted(self, transfer_id: str, until: float) -> None:
        """Collect an adopted trace a while after decode's first token; without one, in the end."""
        trace = self._traces.get(transfer_id)
        if trace is None:
            return
        answered = any(name == MarkName.TOKEN for message in trace.heard for _, name, _, _ in message.marks)
        if trace.complete or time.monotonic() > until:
            self._over[transfer_id] = None
            self._collect(transfer_id)
            return
        trace.complete = answered  # marks of others may still come until the next look
        asyncio.get_running_loop().call_later(2 * LINGER_S, self._check_adopted, transfer_id, until)

    async def _ask_clock(self, engine: str, host: str) -> None:
        try:
            asked_ns = time.monotonic_ns()
            me = self._node.me
            reply = await self._node.request(self._node.subjects.clock(engine, me), ClockRequest(me), CLOCK_TIMEOUT_S)
            if isinstance(reply, ClockReply):
                self._clocks.hear(reply.host, asked_ns, reply.received_ns, reply.sent_ns, time.monotonic_ns())
        except (BusUnavailableError, MessageError) as error:
            logger.debug("kvbus: the clock of %s: %s", engine, error)
        finally:
            self._asking.discard(host)

    def _collect(self, transfer_id: str) -> None:
        trace = self._traces.pop(transfer_id, None)
        if trace is None:
            return
        if not self._room.acquire(blocking=False):
            self._node.counters.add("traces_dropped")
        else:
            self._pool.submit(self._make, trace)

    def _marks_of(self, message: Marks) -> list[Mark]:
        offset = self._clocks.offset(message.host)
        if offset is None:
            self._node.counters.add("marks_without_clock")
            return []
        about = (message.engine, message.role.value, message.rank)
        names = _OF_HISTORY if message.transfer_id.endswith(HISTORY_SUFFIX) else _OF_REQUEST
        return [
            Mark(names[name], at_ns + offset.ns, attempt, *about, note, offset.ns, offset.error_ns)
            for attempt, name, at_ns, note in message.marks
            if name in names
        ]

    def _make(self, trace: Trace) -> None:
        try:
            path = path_of([*trace.own, *(mark for message in trace.heard for mark in self._marks_of(message))])
            if path is None:
                return
            self._on_path(path)
            anchor_ns = time.time_ns() - time.monotonic_ns()
            spans = spans_of(path, trace.start.ids, anchor_ns, new_span_id, trace.about)
            for sink in self._sinks:
                self._write(sink, spans)
        except Exception:
            self._node.counters.add("trace_errors")
            logger.exception("kvbus: a trace could not be made")
        finally:
            self._room.release()

    def _write(self, sink: SpanSink, spans: Sequence[SpanData]) -> None:
        """A sink that fails, such as a full disk, must not keep spans from the others."""
        try:
            sink.write(spans)
        except Exception as error:
            self._node.counters.add("trace_errors")
            if self._once.due(type(sink)):
                logger.exception("kvbus: traces are lost: %s (logged once a minute)", error)


def _request_of(message: Marks) -> str:
    """The transfer id of the request whose trace it belongs to."""
    return message.transfer_id.removesuffix(HISTORY_SUFFIX)
