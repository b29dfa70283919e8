"""Which engines get no requests for a while, because they failed. Pure; time is an argument.

One failure may be the request's fault, so it counts only until the engine's next heartbeat. An engine that fails again
and again still sends heartbeats: after :data:`FAILURES` in a row the breaker is open for a time that doubles with each
further one, or until an answer comes. An open breaker is a preference only: with no other engine, this one is tried.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbus.bounded import BoundedDict
from kvbus.wire import Heartbeat

FAILURES = 3
FIRST_S, LONGEST_S = 1.0, 30.0
MAX_ENGINES = 1 << 12


@dataclass(frozen=True, slots=True)
class _Failures:
    incarnation: int
    heartbeat: int
    in_a_row: int
    open_until: float


class Breaker:
    """The table of engines that failed."""

    def __init__(self) -> None:
        self._failing: BoundedDict[str, _Failures] = BoundedDict(MAX_ENGINES)

    def fail(self, engine: Heartbeat, now: float) -> None:
        """It did not answer, or with an error of its own."""
        before = self._failing.get(engine.engine)
        in_a_row = 1
        if before is not None and before.incarnation == engine.incarnation:
            in_a_row += before.in_a_row
        open_s = min(FIRST_S * 2 ** min(in_a_row - FAILURES, 10), LONGEST_S) if in_a_row >= FAILURES else 0.0
        self._failing[engine.engine] = _Failures(engine.incarnation, engine.number, in_a_row, now + open_s)

    def succeed(self, engine: Heartbeat) -> None:
        """It has answered."""
        self._failing.pop(engine.engine, None)

    def forget(self, engine: str) -> None:
        """It is gone."""
        self._failing.pop(engine, None)

    def is_open(self, engine: Heartbeat, now: float) -> bool:
        """Whether others are preferred."""
        failures = self._failing.get(engine.engine)
        if failures is None or engine.incarnation > failures.incarnation:
            return False
        if failures.in_a_row < FAILURES:
            return engine.number <= failures.heartbeat
        return now < failures.open_until
