"""What is said on the bus, and where: messages, their fields and codec, block runs, subjects.

Here live frozen data and its checks; whatever arrives is decoded here, or refused with a ``MessageError``. Nothing here
knows of connections, time or what a message leads to: that is ``kvbus.protocol``.
"""

from __future__ import annotations

from kvbus.wire import blocks
from kvbus.wire.blocks import BlockRuns
from kvbus.wire.cache_messages import CachePage, CacheRequest, CacheUpdate
from kvbus.wire.codec import KINDS, SEAL_BYTES, decode, encode, farewell_of, heard, seal_of
from kvbus.wire.engine_messages import (
    Bye,
    ClockReply,
    ClockRequest,
    DrainReply,
    DrainRequest,
    Heartbeat,
    LeaseEcho,
    Marks,
    MetadataReply,
    MetadataRequest,
    Pulse,
    Who,
)
from kvbus.wire.fields import (
    CACHE_KEY_BYTES,
    MAX_CACHE_KEYS,
    MAX_TEXT_CHARS,
    MAX_TOKEN_ID,
    NO_TOKEN,
    Echoes,
    Pairs,
    Role,
    State,
    is_address,
)
from kvbus.wire.message import FIRST_ATTEMPT, HISTORY_SUFFIX, Message
from kvbus.wire.subjects import Subjects, check_token, is_token
from kvbus.wire.transfer_messages import (
    Cancel,
    CancelAck,
    Delivered,
    PrefillCompleted,
    PrefillFailed,
    PrefillProgress,
    Rebind,
    RebindReply,
    Registration,
    RegistrationAck,
    Release,
    TransferDone,
    TransferFailed,
    TransferStarted,
    Wanted,
)

__all__ = [
    "CACHE_KEY_BYTES",
    "FIRST_ATTEMPT",
    "HISTORY_SUFFIX",
    "KINDS",
    "MAX_CACHE_KEYS",
    "MAX_TEXT_CHARS",
    "MAX_TOKEN_ID",
    "NO_TOKEN",
    "SEAL_BYTES",
    "BlockRuns",
    "Bye",
    "CachePage",
    "CacheRequest",
    "CacheUpdate",
    "Cancel",
    "CancelAck",
    "ClockReply",
    "ClockRequest",
    "Delivered",
    "DrainReply",
    "DrainRequest",
    "Echoes",
    "Heartbeat",
    "LeaseEcho",
    "Marks",
    "Message",
    "MetadataReply",
    "MetadataRequest",
    "Pairs",
    "PrefillCompleted",
    "PrefillFailed",
    "PrefillProgress",
    "Pulse",
    "Rebind",
    "RebindReply",
    "Registration",
    "RegistrationAck",
    "Release",
    "Role",
    "State",
    "Subjects",
    "TransferDone",
    "TransferFailed",
    "TransferStarted",
    "Wanted",
    "Who",
    "blocks",
    "check_token",
    "decode",
    "encode",
    "farewell_of",
    "heard",
    "is_address",
    "is_token",
    "seal_of",
]
