"""The one timer of a node, armed for the earliest deadline of all that take part. Called in the node's loop only."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

from kvbus.metrics import Counters

logger = logging.getLogger(__name__)


class Participant(Protocol):
    """A state machine's shell that lives in the node's loop."""

    def next_deadline(self) -> float | None: ...

    def tick(self, now: float) -> None: ...


class Timer:
    """See the module's docstring."""

    def __init__(self, name: str, counters: Counters) -> None:
        self._name, self._counters = name, counters
        self._handle: asyncio.TimerHandle | None = None
        self._at = 0.0
        self.participants: list[Participant] = []

    def arm(self) -> None:
        """(Re-)arm it after anything that may have moved a deadline.

        A deadline that has moved away leaves it as it is, since that is what nearly every message does: it comes too
        early, once, and is armed anew.
        """
        deadlines = [participant.next_deadline() for participant in self.participants]
        earliest = min((at for at in deadlines if at is not None), default=None)
        if earliest is None or (self._handle is not None and self._at <= earliest):
            return
        self.cancel()
        self._at = earliest
        self._handle = asyncio.get_running_loop().call_later(max(0.0, earliest - time.monotonic()), self._fire)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()

    def _fire(self) -> None:
        now = time.monotonic()
        self._handle = None
        try:
            for participant in self.participants:
                participant.tick(now)
        except Exception:
            self._counters.add("callback_errors")
            logger.exception("kvbus: a timer of %s failed; it is armed again", self._name)
        self.arm()
