"""One request: its two legs, the answer to its client, and which engine takes over when one is lost.

A pure state machine, :class:`Failover`, decides; :class:`Serving` does what it says.
"""

from __future__ import annotations

from kvbus.router.request.apis import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    MESSAGES,
    RESPONSES,
    Body,
    Dialect,
    must_be_alone,
    tokenize_question,
)
from kvbus.router.request.failover import Failover
from kvbus.router.request.job import Job, Resources
from kvbus.router.request.leg_bodies import new_transfer_id
from kvbus.router.request.reply import DECODE_HEADER, PREFILL_HEADER, TRANSFER_HEADER, UNBUFFERED
from kvbus.router.request.serving import Serving

__all__ = [
    "CHAT",
    "COMPLETIONS",
    "DECODE_HEADER",
    "GENERATE",
    "MESSAGES",
    "PREFILL_HEADER",
    "RESPONSES",
    "TRANSFER_HEADER",
    "UNBUFFERED",
    "Body",
    "Dialect",
    "Failover",
    "Job",
    "Resources",
    "Serving",
    "must_be_alone",
    "new_transfer_id",
    "tokenize_question",
]
