"""How far the clocks of other hosts are from ours. Pure.

One exchange as in NTP (RFC 5905, section 8): asked at t1 and answered at t4 on our clock, received at t2 and sent at t3
on theirs. Their clock then is ``((t2 + t3) - (t1 + t4)) / 2`` ahead, wrong by ``((t4 - t1) - (t3 - t2)) / 2`` at most.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbus.bounded import BoundedDict

MAX_HOSTS = 1024
FRESH_NS = 10_000_000_000
"""Quartz drifts by some 10 us a second: after this long a wider measurement is better than a stale one."""


@dataclass(frozen=True, slots=True)
class Offset:
    """Add ``ns`` to that host's times; the sum is wrong by ``error_ns`` at most. Measured ``at_ns``."""

    ns: int
    error_ns: int
    at_ns: int


class Clocks:
    """The table of offsets.

    Args:
        own: the name of our own clock.
    """

    def __init__(self, own: str) -> None:
        self._own = own
        self._offsets: BoundedDict[str, Offset] = BoundedDict(MAX_HOSTS)

    def offset(self, host: str) -> Offset | None:
        """None while it is unknown."""
        return Offset(0, 0, 0) if host == self._own else self._offsets.get(host)

    def is_stale(self, host: str, now_ns: int) -> bool:
        """Whether to measure."""
        known = self._offsets.get(host)
        return host != self._own and (known is None or now_ns - known.at_ns > FRESH_NS)

    def hear(self, host: str, asked_ns: int, received_ns: int, sent_ns: int, answered_ns: int) -> None:
        """One exchange; the sharpest one of a while counts."""
        error_ns = max(0, ((answered_ns - asked_ns) - (sent_ns - received_ns)) // 2)
        known = self._offsets.get(host)
        if known is None or answered_ns - known.at_ns > FRESH_NS or error_ns <= known.error_ns:
            offset_ns = ((asked_ns + answered_ns) - (received_ns + sent_ns)) // 2
            self._offsets[host] = Offset(offset_ns, error_ns, answered_ns)
