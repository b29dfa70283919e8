"""A subscription to a subject, as both adapters of the bus keep it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from kvbus.bus.port import Handler
from kvbus.metrics import Counters

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Subscription:
    """What to call with each message on ``subject``.

    Attributes:
        answers: it serves requests; a message without a reply subject is none, and is dropped.
    """

    subject: str
    handler: Handler
    answers: bool

    def deliver(
        self, subject: str, payload: bytes, reply: str, respond: Callable[[str, bytes], object], counters: Counters
    ) -> None:
        """Hand a message to the handler, and its answer to ``respond``. What the handler raises is logged and counted.

        Args:
            subject: of the message.
            reply: the subject to which an answer goes; empty if none is expected.
        """
        if self.answers and not reply:
            return
        try:
            answer = self.handler(subject, payload)
            if self.answers and answer is not None:
                respond(reply, answer)
        except Exception:
            counters.add("callback_errors")
            logger.exception("kvbus: the callback of subject %s failed; the message is dropped", self.subject)
