"""Marks of what an engine's process does for traced requests: tuples on hot threads, messages from the node's.

The one rule: a request that is not sampled costs a look at one character. No span is made here: whoever collects marks
(:mod:`kvbus.trace.collector`) makes them, with its own one clock.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple, Protocol

from kvbus.bus import Node
from kvbus.errors import PayloadTooLargeError
from kvbus.trace.path import MarkName
from kvbus.wire import MAX_TEXT_CHARS, ClockReply, ClockRequest, Marks, Role

MAX_PENDING = 8192
MAX_TOGETHER = 256
FLUSH_S = 0.05
RETRY_S = 0.5
_SAMPLED = frozenset("13579bdf")


class Traced(NamedTuple):
    """A transfer whose request is sampled."""

    transfer_id: str
    traceparent: str


def traced(transfer_id: str, traceparent: str) -> Traced | None:
    """None if the W3C trace context says that the request is not sampled, or if there is none."""
    return Traced(transfer_id, traceparent) if traceparent[-1:] in _SAMPLED else None


class Marking(Protocol):
    """Takes marks. Any thread."""

    def mark(self, what: Traced | None, name: MarkName, attempt: int = 0, note: str = "", at_s: float = 0.0) -> None:
        """``at_s`` is a time of the monotonic clock; without it, now. Costs nothing if ``what`` is None."""
        ...


class NoMarks:
    """Drops every mark: virtual time cannot be traced."""

    def mark(self, what: Traced | None, name: MarkName, attempt: int = 0, note: str = "", at_s: float = 0.0) -> None:
        pass


class Marker:
    """Takes marks and publishes them soon; see the module's docstring. Bounded: the oldest are dropped, and counted."""

    def __init__(self, node: Node, engine: str, role: Role, rank: int = 0) -> None:
        self._node, self._engine, self._role, self._rank = node, engine, role, rank
        self._host = host_clock()
        self._pending: deque[tuple[Traced, tuple[int, str, int, str]]] = deque(maxlen=MAX_PENDING)
        self._scheduled = False

    def mark(self, what: Traced | None, name: MarkName, attempt: int = 0, note: str = "", at_s: float = 0.0) -> None:
        if what is None:
            return
        at_ns = int(at_s * 1e9) or time.monotonic_ns()
        if len(self._pending) == MAX_PENDING:
            self._node.counters.add("marks_dropped")
        self._pending.append((what, (attempt, name, at_ns, note[:MAX_TEXT_CHARS])))
        if not self._scheduled:
            self._scheduled = True
            self._node.call(self._later, FLUSH_S)

    def _later(self, delay_s: float) -> None:
        asyncio.get_running_loop().call_later(delay_s, self._flush)

    def _flush(self) -> None:
        if not self._node.bus.connected:
            self._later(RETRY_S)
            return
        self._scheduled = False  # first, so that what is marked from now on is not forgotten
        found: dict[Traced, list[tuple[int, str, int, str]]] = {}
        for _ in range(len(self._pending)):
            what, mark = self._pending.popleft()
            found.setdefault(what, []).append(mark)
        for what, marks in found.items():
            for first in range(0, len(marks), MAX_TOGETHER):
                self._publish(what, marks[first : first + MAX_TOGETHER])

    def _publish(self, what: Traced, marks: list[tuple[int, str, int, str]]) -> None:
        about = (what.transfer_id, self._engine, self._role, self._rank, self._host)
        message = Marks(*about, tuple(marks), what.traceparent)
        try:
            self._node.publish(self._node.subjects.marks(self._engine), message)
        except PayloadTooLargeError:
            self._node.counters.add("marks_dropped", len(marks))


def host_clock() -> str:
    """A name for this process's monotonic clock: two processes with the same one read the same clock."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
    try:
        return f"{boot}:{os.stat('/proc/self/ns/time').st_ino}"  # noqa: PTH116 - not a file's status, a namespace's
    except OSError:
        return boot  # a kernel without namespaces of time


def serve_clock(node: Node, engine: str) -> None:
    """Answer :class:`ClockRequest`. Before the node is started."""
    host = host_clock()

    def answer(_: str, request: ClockRequest) -> ClockReply:
        now = time.monotonic_ns()
        return ClockReply(engine, host, now, time.monotonic_ns())

    node.serve(node.subjects.clock(engine), ClockRequest, answer)
