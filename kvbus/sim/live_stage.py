"""Real time in one event loop, where a broken law ends the life wherever it was noticed."""

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


class LiveStage:
    """A :class:`~kvbus.sim.stage.Stage` in the running event loop."""

    def __init__(self, seed: int, faults: Faults) -> None:
        self.faults = faults
        self.chance = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self._began = time.monotonic()
        self._instant: float | None = None
        self._loop = asyncio.get_running_loop()
        self._broken: BaseException | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def now(self) -> float:
        return self._instant if self._instant is not None else time.monotonic() - self._began

    @contextlib.contextmanager
    def instant(self) -> Iterator[None]:
        """Let no time pass: nothing parts the fence's check and the posting of a WRITE, not even a busy machine."""
        self._instant = self.now
        try:
            yield
        finally:
            self._instant = None

    def at(self, delay_s: float, do: Callable[[], None]) -> None:
        self.timer(delay_s, do)

    def timer(self, delay_s: float, do: Callable[[], None]) -> asyncio.TimerHandle:
        """As :meth:`at`, but it can be cancelled."""
        return self._loop.call_later(delay_s, self.guard, do)

    def guard(self, do: Callable[[], None]) -> None:
        """Do it, unless the life is over; what it raises ends the life."""
        if not self._closed:
            try:
                do()
            except Exception as error:  # noqa: BLE001 - raised again by until()
                self.fail(error)

    def fail(self, error: BaseException) -> None:
        self._broken = self._broken or error

    def spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        """Run it in the background; what it raises ends the life."""
        task = self._loop.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._reap)

    async def until(self, true: Callable[[], bool], at: float) -> None:
        """Return when it is true, or at the time ``at``.

        Raises:
            Violation: a law was broken meanwhile.
        """
        while self._broken is None and self.now < at and not true():  # noqa: ASYNC110 - nobody could set an event
            await asyncio.sleep(POLL_S)
        if self._broken is not None:
            raise self._broken

    async def close(self) -> None:
        """Do nothing more, and wait for what was begun."""
        self._closed = True
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)


class LogEar(logging.Handler):
    """Hears kvbus's log, and keeps it from everybody else: faults are what a life is about.

    An exception that a shell caught and logged is a broken law, too.
    """

    def __init__(self, stage: LiveStage) -> None:
        super().__init__(logging.ERROR)
        self._stage = stage
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
            self._stage.fail(error)
        elif error is not None:
            violation = Violation(f"{record.getMessage()}: {type(error).__name__}: {error}")
            violation.__cause__ = error
            self._stage.fail(violation)
