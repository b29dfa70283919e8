"""Who says what: seals what goes to an engine, and checks who sealed what came.

A process without keys (a router, a tool) seals nothing and believes everybody. What is dropped is counted, and logged
once a minute for each subject.
"""

from __future__ import annotations

import logging

from kvbus.bus.keys import Keys
from kvbus.errors import MessageError
from kvbus.metrics import Counters, OncePer
from kvbus.protocol import Membership
from kvbus.wire import Message, encode, heard

logger = logging.getLogger(__name__)


class Seals:
    """See the module's docstring. :meth:`seal` from any thread, the rest from the node's."""

    def __init__(self, keys: Keys | None, membership: Membership, counters: Counters) -> None:
        self._keys, self._membership, self._counters = keys, membership, counters
        self._once = OncePer()

    def seal(self, message: Message, to: str) -> list[bytes]:
        """Payloads of ``message`` for the engine ``to``, for everybody if it is empty. Publish all of them: while one
        incarnation follows another there are two, and none before its key is known."""
        if not to or self._keys is None:
            return [encode(message)]
        member = self._membership.get(to)
        keys = self._keys.towards(to, member.incarnation if member is not None else None)
        return [encode(message, key) for key in keys]

    def read(self, subject: str, payload: bytes, *, sealed: bool) -> Message | None:
        """The message that came on ``subject``; None if it cannot be read or, for ``sealed``, is not its speaker's."""
        try:
            message = heard(subject, payload)
        except MessageError as error:
            self.refuse(subject, str(error))
            return None
        if not sealed or not message.SEALED or self._keys is None or self._keys.believes(message, payload):
            return message
        if not self._keys.know(message.speaker):
            self._counters.add("rejected: speaker not known yet")  # its heartbeat is on the way, or a lie
            return None
        self._counters.add("rejected: not sealed by its speaker")
        if self._once.due(f"seal {subject}"):
            logger.warning("kvbus: dropped %s on %s: %s did not seal it", message.KIND, subject, message.speaker[0])
        return None

    def refuse(self, subject: str, reason: str) -> None:
        """Count, and log, that a message is dropped."""
        self._counters.add("rejected_messages")
        if self._once.due(subject):
            logger.warning("kvbus: dropped a message on %s: %.300s (logged once a minute)", subject, reason)
