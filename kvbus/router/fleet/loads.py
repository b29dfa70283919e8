"""How loaded each engine is, and which ones failed. Pure: the clock is an argument.

An engine's heartbeat tells its load by the requests of all routers, but is up to half a second old. What this router
has sent since is added to it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from kvbus.router.fleet.circuit_breaker import Breaker
from kvbus.wire import Heartbeat

NO_BLOCKS_LEFT = 0.02


@dataclass(frozen=True, slots=True)
class _Sent:
    heartbeat: int
    tokens: int


class Loads:
    """The table of this router's requests at each engine, and the circuit breaker.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._breaker = clock, Breaker()
        self._numbers = itertools.count()
        self._sent: dict[tuple[str, int], dict[int, _Sent]] = {}

    @contextlib.contextmanager
    def counted(self, engine: Heartbeat, tokens: int) -> Iterator[None]:
        """While this is entered, a request with a prompt of about ``tokens`` is at the engine."""
        key, number = (engine.engine, engine.incarnation), next(self._numbers)
        self._sent.setdefault(key, {})[number] = _Sent(engine.number, tokens)
        try:
            yield
        finally:
            del self._sent[key][number]
            if not self._sent[key]:
                del self._sent[key]

    def suspect(self, engine: Heartbeat) -> None:
        """It did not answer, or with an error of its own; see :mod:`kvbus.router.fleet.circuit_breaker`."""
        self._breaker.fail(engine, self._clock())

    def trust(self, engine: Heartbeat) -> None:
        """It has answered."""
        self._breaker.succeed(engine)

    def forget(self, engine: str) -> None:
        """It is gone."""
        self._breaker.forget(engine)

    def is_suspect(self, engine: Heartbeat) -> bool:
        return self._breaker.is_open(engine, self._clock())

    def preferred(self, engines: Sequence[Heartbeat]) -> Sequence[Heartbeat]:
        """Those that are not suspect; all if all are."""
        return [engine for engine in engines if not self.is_suspect(engine)] or engines

    def own(self, engine: Heartbeat) -> int:
        """Requests that this router has at the engine."""
        return len(self._of(engine))

    def requests(self, engine: Heartbeat) -> int:
        """About how many requests the engine has."""
        own = self._of(engine)
        return max(len(own), engine.requests + sum(sent.heartbeat >= engine.number for sent in own))

    def prefill(self, engine: Heartbeat) -> float:
        """About how many prompt tokens the engine has still to compute."""
        own = self._of(engine)
        since = sum(sent.tokens for sent in own if sent.heartbeat >= engine.number)
        return float(max(sum(sent.tokens for sent in own), engine.queued_tokens + since))

    def decode(self, engine: Heartbeat) -> float:
        """Requests in the engine, weighted up if few of its KV blocks are free."""
        free = engine.free_blocks / engine.total_blocks if engine.total_blocks else 1.0
        return (self.requests(engine) + 1) / max(free, NO_BLOCKS_LEFT) - 1

    def _of(self, engine: Heartbeat) -> Collection[_Sent]:
        return self._sent.get((engine.engine, engine.incarnation), {}).values()
