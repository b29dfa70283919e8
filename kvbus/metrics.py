"""Counters by name: cheap enough for every thread, read as a plain dict."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Hashable, Iterator, Mapping

from kvbus.bounded import BoundedDict

# Upper bounds of the buckets that durations are counted in; one more takes what is longer.
BUCKETS_US = tuple(
    round(bound_ms * 1000)
    for bound_ms in (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 10e3, 30e3, 60e3, 120e3, 600e3)
)
_COUNT, _TOTAL_US = "#n", "#us"


class Counters:
    """Monotonic counters. Thread-safe; names are few and fixed in the code, so the table is bounded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, int] = {}

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._values[name] = self._values.get(name, 0) + amount

    def observe(self, name: str, seconds: float) -> None:
        """Count a duration: one more in its bucket, and its microseconds in that bucket's total."""
        us = max(round(seconds * 1e6), 0)
        bucket = bisect_left(BUCKETS_US, us)
        with self._lock:  # both at once: a snapshot never has one without the other
            for key, amount in ((f"{name}{_COUNT}{bucket}", 1), (f"{name}{_TOTAL_US}{bucket}", us)):
                self._values[key] = self._values.get(key, 0) + amount

    def __getitem__(self, name: str) -> int:
        return self._values.get(name, 0)

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._values)


def durations(counts: Mapping[str, int]) -> Iterator[tuple[str, int, float]]:
    """Each bucket with something in it: the name that was observed, how many, and their mean in seconds.

    The mean of what lies in a bucket lies in it, too. So a histogram with these bounds that observes the mean so many
    times has the buckets and the sum that it would have if it had seen each duration: also of sums of such counts.
    """
    for key, count in counts.items():
        name, mark, bucket = key.partition(_COUNT)
        if mark and count:
            yield name, count, counts.get(f"{name}{_TOTAL_US}{bucket}", 0) / count / 1e6


def plain(counts: Mapping[str, int]) -> dict[str, int]:
    """The counts that are of no durations."""
    return {key: count for key, count in counts.items() if _COUNT not in key and _TOTAL_US not in key}


class OncePer:
    """Whether a log line for ``key`` is due: at most one in ``interval_s`` for each key, of the last ``cap`` keys."""

    def __init__(self, interval_s: float = 60.0, cap: int = 1024) -> None:
        self._interval_s = interval_s
        self._last: BoundedDict[Hashable, float] = BoundedDict(cap)

    def due(self, key: Hashable) -> bool:
        now = time.monotonic()
        if now - self._last.get(key, float("-inf")) < self._interval_s:
            return False
        self._last[key] = now
        return True
