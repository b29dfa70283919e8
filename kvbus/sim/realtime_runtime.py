"""Real time in one event loop. A broken invariant ends the run, wherever it was noticed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Self

from kvbus.sim.faults import Faults, Violation

POLL_S = 0.05


class RealTimeRuntime:
    """A :class:`~kvbus.sim.runtime.Runtime` in the running event loop."""

    def __init__(self, seed: int, faults: Faults) -> None:
        self.faults = faults
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self._started_at = time.monotonic()
        self._stopped_at: float | None = None
        self._loop = asyncio.get_running_loop()
        self._error: BaseException | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def now(self) -> float:
        return self._stopped_at if self._stopped_at is not None else time.monotonic() - self._started_at

    @contextlib.contextmanager
    def stopped_clock(self) -> Iterator[None]:
        """Let no time pass between the fence's check and the posting of a WRITE, not even on a busy machine."""
        self._stopped_at = self.now
        try:
            yield
        finally:
            self._stopped_at = None

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return self._loop.call_later(delay_s, self.guard, callback)

    def guard(self, callback: Callable[[], None]) -> None:
        """Call it, unless the run is over; what it raises ends the run."""
        if not self._closed:
            try:
                callback()
            except Exception as error:  # noqa: BLE001 - raised again by until()
                self.fail(error)

    def fail(self, error: BaseException) -> None:
        self._error = self._error or error

    def spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        """Run it in the background; what it raises ends the run."""
        task = self._loop.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._reap)

    async def until(self, condition: Callable[[], bool], at: float) -> None:
        """Return when ``condition`` is true, or at the time ``at``.

        Raises:
            Violation: an invariant was broken meanwhile.
        """
        while self._error is None and self.now < at and not condition():  # noqa: ASYNC110 - nobody could set an event
            await asyncio.sleep(POLL_S)
        if self._error is not None:
            raise self._error

    async def close(self) -> None:
        """Call nothing more, and wait for the tasks."""
        self._closed = True
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)


class LogWatcher(logging.Handler):
    """Takes kvbus's log while it is entered and shows it to nobody, since a run is full of faults.

    An exception that a shell caught and logged counts as a broken invariant.
    """

    def __init__(self, runtime: RealTimeRuntime) -> None:
        super().__init__(logging.ERROR)
        self._runtime = runtime
        self._log = logging.getLogger("kvbus")
        self._before = (self._log.level, self._log.propagate)

    def __enter__(self) -> Self:
        self._log.addHandler(self)
        self._log.setLevel(logging.ERROR)
        self._log.propagate = False
        return self

    def __exit__(self, *_: object) -> None:
        self._log.removeHandler(self)
        self._log.setLevel(self._before[0])
        self._log.propagate = self._before[1]

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, Violation):
            self._runtime.fail(error)
        elif error is not None:
            violation = Violation(f"{record.getMessage()}: {type(error).__name__}: {error}")
            violation.__cause__ = error
            self._runtime.fail(violation)
