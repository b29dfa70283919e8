"""The state machines of the protocol: events and the time go in, effects come out.

``protocol.prefill`` joins registrations and completions, ``protocol.decode`` registers blocks and gives them back;
write leases and membership, which both sides use, are here. All of it is pure: no I/O, no clock, no thread, no chance.
"""

from __future__ import annotations

from kvbus.protocol.lease import MAX_WRITE_S, WRITE_LEASE_S, SinkLease, SourceLease, term_s
from kvbus.protocol.membership import MAX_PEERS, Change, Membership, PeerChanged, PeerJoined, PeerLeft, differences

__all__ = [
    "MAX_PEERS",
    "MAX_WRITE_S",
    "WRITE_LEASE_S",
    "Change",
    "Membership",
    "PeerChanged",
    "PeerJoined",
    "PeerLeft",
    "SinkLease",
    "SourceLease",
    "differences",
    "term_s",
]
