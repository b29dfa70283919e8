"""What a process says of itself: heartbeats at an interval and when somebody asks, and goodbye at the end.

Engines hear a heartbeat when it says something lasting that is new, or that its sender is in a long step, and otherwise
after a longer interval: in a large pool each has many listeners. Routers and tools, which choose and show by load, hear
each.

Called in the node's loop only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter

from kvbus.bus.keys import Keys
from kvbus.bus.port import Bus
from kvbus.errors import PayloadTooLargeError
from kvbus.metrics import OncePer
from kvbus.wire import Bye, Heartbeat, Subjects, encode

logger = logging.getLogger(__name__)

_LASTING = attrgetter(
    *(
        each.name
        for each in fields(Heartbeat)
        if each.name
        not in (
            "number",
            "free_blocks",
            "requests",
            "queued_tokens",
            "step_s",
            "cache_number",
            "prompt_tokens",
            "cached_tokens",
        )
    )
)
# After a server's restart every node asks who is there: one answer in so long is for all who asked meanwhile.
ANSWER_EVERY_S = 0.1


class Announcer:
    """See the module's docstring.

    Attributes:
        heartbeat: builds the heartbeat of a number, None while there is nothing to say. None for who is no engine.
    """

    def __init__(self, bus: Bus, subjects: Subjects, keys: Keys | None) -> None:
        self._bus, self._subjects, self._keys = bus, subjects, keys
        self.heartbeat: Callable[[int], Heartbeat | None] | None = None
        self._number = 0
        self._announced_at = float("-inf")
        self._lasting: tuple[object, ...] = ()
        self._answer: asyncio.TimerHandle | None = None
        self._once = OncePer()

    async def run(self, interval_s: float, to_all_interval_s: float) -> None:
        """Send heartbeats, for ever: every ``interval_s`` to routers and tools, to engines every other interval."""
        while True:
            self._say(to_all=time.monotonic() - self._announced_at > to_all_interval_s - interval_s / 2)
            await asyncio.sleep(interval_s)

    def announce(self) -> None:
        """Send a heartbeat to everybody now."""
        self._cancel_answer()
        self._say(to_all=True)

    def _say(self, *, to_all: bool) -> None:
        if not self._bus.connected or (heartbeat := self._next()) is None:
            return
        lasting = (heartbeat.is_in_long_step, *_LASTING(heartbeat))
        if to_all or heartbeat.is_in_long_step or lasting != self._lasting:
            self._announced_at, self._lasting = time.monotonic(), lasting
            subject = self._subjects.heartbeats(heartbeat.role, heartbeat.engine)
        else:
            subject = self._subjects.loads(heartbeat.role, heartbeat.engine)
        try:
            self._bus.publish(subject, encode(heartbeat))
        except PayloadTooLargeError as error:
            if self._once.due(subject):
                logger.error("%s: this engine cannot be seen", error)

    def answer_who(self) -> None:
        """Announce now or, if that was done a moment ago, soon."""
        wait_s = self._announced_at + ANSWER_EVERY_S - time.monotonic()
        if wait_s <= 0:
            self.announce()
        elif self._answer is None:
            self._answer = asyncio.get_running_loop().call_later(wait_s, self.announce)

    def close(self) -> None:
        """Say goodbye."""
        self._cancel_answer()
        if (heartbeat := self._next()) is not None:
            bye = self._keys.bye() if self._keys is not None else Bye(heartbeat.engine, heartbeat.incarnation)
            self._bus.publish(self._subjects.bye(heartbeat.engine), encode(bye))

    def _next(self) -> Heartbeat | None:
        if self.heartbeat is None:
            return None
        self._number += 1
        return self.heartbeat(self._number)

    def _cancel_answer(self) -> None:
        if self._answer is not None:
            self._answer.cancel()
            self._answer = None
