"""The receives of one rank: looks for the notifications of WRITEs into it, and for as long as any can come.

Polling costs the engine's thread the GIL. So it is rare while nothing is known to be written, and its interval grows
with the age of what is waited for. Called by :class:`kvbus.engine.rank.Rank` only.
"""

from __future__ import annotations

import logging
from collections import deque

from kvbus.engine.items import WriteNews
from kvbus.engine.transport import Transport
from kvbus.metrics import Counters
from kvbus.protocol.decode import Arrivals, Arrived, Landed
from kvbus.trace import Marking, MarkName, Traced
from kvbus.wire import TransferFailed

logger = logging.getLogger(__name__)

MIN_POLL_S, MAX_POLL_S = 0.0002, 0.005
# Without word of a posted WRITE a notification is not expected; this finds it all the same if the word was lost.
QUIET_POLL_S = 0.05
# The first contact of two needs both of them to progress; so both poll for a while.
GREETING_S = 2.0
MIN_LANDING = 64


def poll_interval_s(age_s: float) -> float:
    """How soon to look again for the end of a WRITE that was posted ``age_s`` ago: after a tenth of that."""
    return min(max(age_s / 10, MIN_POLL_S), MAX_POLL_S)


class Receives:
    """See the module's docstring.

    Args:
        max_write_s: no WRITE runs longer; see :mod:`kvbus.protocol.lease`.
    """

    def __init__(self, transport: Transport, counters: Counters, marking: Marking, max_write_s: float) -> None:
        self._transport, self._counters, self._marking = transport, counters, marking
        self._max_write_s = max_write_s
        self._arrivals = Arrivals()
        self._landing: dict[str, float] = {}  # requests that are being written, and since when
        self._traced: dict[str, tuple[Traced, int]] = {}
        self._greeting_until = 0.0
        self._arrived: deque[Arrived] = deque()

    def __len__(self) -> int:
        """How many receives are expected and not reported."""
        return len(self._arrivals)

    def expect(self, request_id: str, attempt: int, traced: Traced | None, now: float) -> None:
        if traced is not None:
            self._traced[request_id] = (traced, attempt)
        self._report(self._arrivals.expect(request_id, attempt), now)

    def abandon(self, request_id: str, now: float) -> None:
        self._landing.pop(request_id, None)
        self._report(self._arrivals.abandon(request_id), now)

    def hear(self, news: WriteNews, now: float) -> None:
        """The bus says that a WRITE was posted, or has ended. It may be a lie: it only says when to look."""
        if isinstance(news, TransferFailed):
            self._landing.pop(news.request_id, None)
            return
        self._landing.setdefault(news.request_id, now)
        if len(self._landing) > 2 * len(self._arrivals) + MIN_LANDING:
            del self._landing[next(iter(self._landing))]

    def greet(self, now: float) -> None:
        """Another engine is about to make contact, or this one with it."""
        self._greeting_until = now + GREETING_S

    def poll(self, now: float) -> None:
        self._forget_landing(now)
        if self._arrivals or self._landing or now < self._greeting_until:
            for text in self._transport.notifications():
                self._land(text, now)

    def next_poll_s(self, now: float) -> float | None:
        """In how many seconds to call :meth:`poll` again; None: only after something else was called."""
        if self._landing:
            return poll_interval_s(now - max(self._landing.values()))
        if now < self._greeting_until:
            return MAX_POLL_S
        return QUIET_POLL_S if self._arrivals else None

    def take_arrived(self) -> tuple[Arrived, ...]:
        """Receives that are over since the last call. Thread-safe."""
        return tuple(self._arrived.popleft() for _ in range(len(self._arrived)))

    def _forget_landing(self, now: float) -> None:
        """Word of a WRITE can come after the WRITE itself, or be a lie: it counts for as long as a WRITE can run."""
        while self._landing:
            oldest = next(iter(self._landing))
            if now - self._landing[oldest] <= self._max_write_s:
                return
            del self._landing[oldest]

    def _land(self, text: str, now: float) -> None:
        landed = Landed.decode(text)
        if landed is None:
            self._counters.add("rejected_notification")
            logger.warning("kvbus: dropped a notification that is not ours: %.200r", text)
            return
        arrived = self._arrivals.land(landed)
        self._report(arrived, now)
        if arrived:
            self._landing.pop(landed.request_id, None)

    def _report(self, arrived: list[Arrived], now: float) -> None:
        self._arrived.extend(arrived)
        for each in arrived:
            traced, attempt = self._traced.pop(each.request_id, (None, 0))
            if each.ok:
                self._marking.mark(traced, MarkName.LANDED, attempt, at_s=now)
