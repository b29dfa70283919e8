"""The writer thread: the only one that touches the transport (NIXL), and so the one where the fence is checked.

It polls while something is outstanding and sleeps on an event otherwise. ``submit`` never blocks the engine.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from kvbus.engine.items import Item
from kvbus.engine.rank import Rank
from kvbus.metrics import Counters

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_QUEUE = 1 << 16
AFTER_ERROR_S = 0.01
_NOTHING = object()


class _Call(Generic[T]):
    """A function to run on the writer thread, and where its result goes."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self.future: Future[T] = Future()

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self._function())
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits for the result
            self.future.set_exception(error)


class Writer:
    """Drives a :class:`~kvbus.engine.rank.Rank` in a thread of its own.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str, counters: Counters) -> None:
        self._counters = counters
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._rank: Rank | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], T], timeout_s: float = 600.0) -> T:
        """Run ``function`` on the writer thread and return its result, or raise what it raised."""
        call = _Call(function)
        self._queue.put(call)
        return call.future.result(timeout_s)

    def drive(self, rank: Rank) -> None:
        """Begin to drive ``rank``; items submitted before wait until then."""

        def begin() -> None:
            self._rank = rank

        self.call(begin)

    def submit(self, item: Item, *, droppable: bool = False) -> None:
        """Queue an item. ``droppable``: it came from a peer, who repeats itself; dropped and counted when flooded."""
        if droppable and self._queue.qsize() > MAX_QUEUE:
            self._counters.add("writer_queue_full")
            return
        self._queue.put((item, time.monotonic()))

    def close(self, timeout_s: float = 2.0) -> None:
        """End the thread; idempotent. Says so if the transport does not let go of it."""
        if not self._thread.is_alive():
            return
        self._queue.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("kvbus: the writer thread did not end within %s s; left behind", timeout_s)

    def _run(self) -> None:
        early: list[tuple[Item, float]] = []
        wait_s: float | None = None
        while (item := self._next(wait_s)) is not None:
            try:
                if isinstance(item, _Call):
                    item.run()
                elif item is not _NOTHING:
                    early.append(item)
                if (rank := self._rank) is None:
                    continue
                while early:
                    rank.handle(*early.pop(0))
                if self._queue.empty():
                    wait_s = rank.poll()
            except Exception:
                self._counters.add("writer_errors")
                logger.exception("kvbus: the writer thread failed on an item and drops it")
                wait_s = AFTER_ERROR_S
        if self._rank is not None:
            self._rank.close()

    def _next(self, wait_s: float | None) -> Any:
        try:
            return self._queue.get(timeout=wait_s)
        except queue.Empty:
            return _NOTHING
