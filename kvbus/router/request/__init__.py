"""One request's way: its two legs, the answer to its client, and who takes over when an engine is lost.

What to do is decided by a pure machine, :class:`Flight`, and done by :class:`Serving`.
"""

from __future__ import annotations

from kvbus.router.request.apis import CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES, Body, Dialect, must_be_alone
from kvbus.router.request.failover import Flight
from kvbus.router.request.job import Job
from kvbus.router.request.legs import new_transfer_id
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
    "Flight",
    "Job",
    "Serving",
    "must_be_alone",
    "new_transfer_id",
]
