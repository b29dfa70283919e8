"""Which engines are left alone for a while, because they failed. Pure; time is an argument.

One failure may be the request's: the engine is preferred again when its next heartbeat comes. An engine that fails
again and again lives and is of no use, which its heartbeats do not say: after :data:`FAILURES` in a row it is left
alone for a time that doubles with each further one, and only an answer ends that. Whoever asks gets an order of
preference, never an empty choice: with nobody else, the engine is tried.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbus.bounded import BoundedDict
from kvbus.wire import Heartbeat

FAILURES = 3
FIRST_S, LONGEST_S = 1.0, 30.0
MAX_ENGINES = 1 << 12


@dataclass(frozen=True, slots=True)
class _Trouble:
    incarnation: int
    heard: int
    failures: int
    until: float


class Breaker:
    """The table of engines in trouble."""

    def __init__(self) -> None:
        self._troubles: BoundedDict[str, _Trouble] = BoundedDict(MAX_ENGINES)

    def fail(self, engine: Heartbeat, now: float) -> None:
        """It did not answer, or with an error of its own."""
        before = self._troubles.get(engine.engine)
        again = before.failures if before is not None and before.incarnation == engine.incarnation else 0
        failures = again + 1
        pause_s = min(FIRST_S * 2 ** min(failures - FAILURES, 10), LONGEST_S) if failures >= FAILURES else 0.0
        self._troubles[engine.engine] = _Trouble(engine.incarnation, engine.number, failures, now + pause_s)

    def succeed(self, engine: Heartbeat) -> None:
        """It has answered."""
        self._troubles.pop(engine.engine, None)

    def forget(self, engine: str) -> None:
        """It is gone, and what it suffered from with it."""
        self._troubles.pop(engine, None)

    def is_open(self, engine: Heartbeat, now: float) -> bool:
        """Whether others are preferred."""
        trouble = self._troubles.get(engine.engine)
        if trouble is None or engine.incarnation > trouble.incarnation:
            return False
        return engine.number <= trouble.heard if trouble.failures < FAILURES else now < trouble.until
