"""The other engines as this process hears them: feeds the membership, and tells whoever watches of its changes.

Called in the node's loop only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from kvbus.bus.keys import Keys
from kvbus.bus.port import Bus
from kvbus.bus.presence import lost_engine
from kvbus.bus.seals import Seals
from kvbus.protocol import Change, Membership, PeerJoined, PeerLeft
from kvbus.wire import Bye, Heartbeat, Subjects

logger = logging.getLogger(__name__)


class Peers:
    """See the module's docstring.

    Attributes:
        watchers: called with every change of the membership.
        heartbeat_watchers: called with every heartbeat that the membership has accepted.
    """

    def __init__(self, membership: Membership, keys: Keys | None, seals: Seals, subjects: Subjects, bus: Bus) -> None:
        self._membership, self._keys, self._seals = membership, keys, seals
        self._subjects, self._bus = subjects, bus
        self.watchers: list[Callable[[Change], None]] = []
        self.heartbeat_watchers: list[Callable[[Heartbeat], None]] = []

    def hear(self, message: Heartbeat | Bye) -> None:
        now = time.monotonic()
        if isinstance(message, Bye):
            self._tell(self._membership.hear(message, now))
            return
        if self._keys is not None and not self._keys.may_be(message, now):
            subject = self._subjects.heartbeats(message.role, message.engine)
            self._seals.refuse(subject, "another public key than before")
            return
        changes = self._membership.hear(message, now)
        if self._membership.get(message.engine) is not message:
            self._bus.counters.add("rejected: heartbeat of another")
            return
        if self._keys is not None:
            self._keys.learn(message, now)
        self._tell(changes)
        for watcher in self.heartbeat_watchers:
            watcher(message)

    def hear_disconnect(self, payload: bytes) -> None:
        """The server says that a connection is gone."""
        if (lost := lost_engine(payload)) is not None:
            self._membership.suspect(*lost, time.monotonic())

    def next_deadline(self) -> float | None:
        """None while the bus is away: then silence proves nothing."""
        return self._membership.next_deadline() if self._bus.connected else None

    def tick(self, now: float) -> None:
        if self._bus.connected:
            self._tell(self._membership.tick(now))

    def _tell(self, changes: list[Change]) -> None:
        for change in changes:
            match change:
                case PeerJoined(heartbeat):
                    logger.info("kvbus: engine %s (%s) is there", heartbeat.engine, heartbeat.role)
                case PeerLeft(engine, _, role, reason):
                    logger.info("kvbus: engine %s (%s) is gone: %s", engine, role, reason)
            for watcher in self.watchers:
                watcher(change)
