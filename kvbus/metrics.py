"""Counters by name: cheap enough for every thread, read as a plain dict."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable

from kvbus.bounded import BoundedDict


class Counters:
    """Monotonic counters. Thread-safe; names are few and fixed in the code, so the table is bounded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, int] = {}

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._values[name] = self._values.get(name, 0) + amount

    def __getitem__(self, name: str) -> int:
        return self._values.get(name, 0)

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._values)


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
