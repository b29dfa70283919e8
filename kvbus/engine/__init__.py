"""What runs in an engine: its ranks, their writer threads, the scheduler's end of the bus, the port ``Transport``.

Here the protocol's effects are performed. Nothing here knows vLLM or NIXL: ``kvbus_connector`` brings those, the
simulator brings others.
"""

from __future__ import annotations

from kvbus.engine.decode_scheduler import PREFILL, OfPrefill, SinkScheduler, serve_metadata, sources_of
from kvbus.engine.items import Abandon, AddPeer, Expect, Greet, Item, Overheard, Told
from kvbus.engine.rank import Rank, RankReport
from kvbus.engine.rank_listener import RankNode, sinks_of
from kvbus.engine.transport import Transport
from kvbus.engine.writer import Writer

__all__ = [
    "PREFILL",
    "Abandon",
    "AddPeer",
    "Expect",
    "Greet",
    "Item",
    "OfPrefill",
    "Overheard",
    "Rank",
    "RankNode",
    "RankReport",
    "SinkScheduler",
    "Told",
    "Transport",
    "Writer",
    "serve_metadata",
    "sinks_of",
    "sources_of",
]
