"""The prefill side of a transfer, in each rank of a prefill engine: the matcher, its events and its effects.

Here is decided when a WRITE may be posted and when a prefill's blocks are free. Pure. Performed by
:class:`kvbus.engine.Rank`; nothing of the decode side may be imported.
"""

from __future__ import annotations

from kvbus.protocol.prefill.events import (
    Drain,
    Effect,
    Event,
    Introduce,
    PooledCancel,
    PooledRegistration,
    PostWrite,
    Reject,
    ReleaseBlocks,
    Released,
    Send,
    SinkJoined,
    SinkLeft,
    SinkRefused,
    WriteEnded,
    WriteJob,
)
from kvbus.protocol.prefill.matcher import Matcher

__all__ = [
    "Drain",
    "Effect",
    "Event",
    "Introduce",
    "Matcher",
    "PooledCancel",
    "PooledRegistration",
    "PostWrite",
    "Reject",
    "ReleaseBlocks",
    "Released",
    "Send",
    "SinkJoined",
    "SinkLeft",
    "SinkRefused",
    "WriteEnded",
    "WriteJob",
]
