"""SIGINT and SIGTERM of this process: who hears of them.

The one rule: in an event loop a signal is an event, told to whoever runs it; nothing is raised there. Elsewhere the
first one raises KeyboardInterrupt: what cleans up after it is not interrupted, and may look at :attr:`Signals.hurry`.

There is one for the process, :data:`SIGNALS`. Until it is installed nobody hears anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """See the module's docstring. Used by the main thread."""

    def __init__(self) -> None:
        self.heard: list[signal.Signals] = []
        self._listener: Callable[[signal.Signals], object] | None = None

    @property
    def hurry(self) -> bool:
        """Told more than once: whoever waits for something to end in good order waits no longer."""
        return len(self.heard) > 1

    @property
    def status(self) -> int:
        """The exit status of what a signal broke off: 130 after Ctrl-C, 143 after SIGTERM."""
        return 128 + (self.heard[0] if self.heard else signal.SIGINT)

    def install(self) -> None:
        """Hear them from now on, also where the shell that started us ignores SIGINT."""
        for number in NUMBERS:
            signal.signal(number, lambda heard, _: self.hear(signal.Signals(heard)))

    def hear(self, number: signal.Signals) -> None:
        self.heard.append(number)
        if self._listener is not None:
            self._listener(number)
        elif not self.hurry:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def told_to(self, listener: Callable[[signal.Signals], object]) -> Iterator[None]:
        """Tell ``listener`` instead of raising; it runs between any two instructions of the main thread, so it only
        passes the word on (``loop.call_soon_threadsafe``). Told at once of what was heard before."""
        before, self._listener = self._listener, listener
        for number in list(self.heard):
            listener(number)
        try:
            yield
        finally:
            self._listener = before


SIGNALS = Signals()


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run it to its end; Ctrl-C and SIGTERM cancel it.

    Raises:
        KeyboardInterrupt: it was cancelled so.
    """

    async def main() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        with SIGNALS.told_to(lambda _: loop.call_soon_threadsafe(task.cancel)):
            return await coroutine

    try:
        return asyncio.run(main())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
