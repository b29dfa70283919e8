"""Waiting for something to become true, never for a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

TIMEOUT_S = 30.0  # only what never comes true takes it; a busy machine takes its time


async def eventually(condition: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
    """Return when ``condition()`` is true; fail if it does not become so."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        await asyncio.sleep(0.005)


def eventually_sync(condition: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.005)
