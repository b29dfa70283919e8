"""The state machines of the protocol: events and the time go in, effects come out.

``protocol.prefill`` joins registrations and completions, ``protocol.decode`` registers blocks and gives them back;
write leases, membership and what is in whose prefix cache are here. All of it is pure: no I/O, no clock, no thread, no
chance.
"""

from __future__ import annotations

from kvbus.protocol.cache_index import AskCache, CacheIndex, EngineLeft
from kvbus.protocol.cache_keys import Prompt
from kvbus.protocol.cache_log import BlocksRemoved, BlocksStored, CacheEvent, CacheLog, Cleared
from kvbus.protocol.lease import MAX_WRITE_S, WRITE_LEASE_S, SinkLease, SourceLease, term_s
from kvbus.protocol.membership import (
    MAX_PEERS,
    Change,
    Membership,
    PeerChanged,
    PeerJoined,
    PeerLeft,
    differences,
    to_all_interval_s,
)

__all__ = [
    "MAX_PEERS",
    "MAX_WRITE_S",
    "WRITE_LEASE_S",
    "AskCache",
    "BlocksRemoved",
    "BlocksStored",
    "CacheEvent",
    "CacheIndex",
    "CacheLog",
    "Change",
    "Cleared",
    "EngineLeft",
    "Membership",
    "PeerChanged",
    "PeerJoined",
    "PeerLeft",
    "Prompt",
    "SinkLease",
    "SourceLease",
    "differences",
    "term_s",
    "to_all_interval_s",
]
