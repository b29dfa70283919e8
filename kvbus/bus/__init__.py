"""Being on a bus: the port ``Bus``, its adapter for NATS and the one in memory, and the node that every process runs.

Here are connections, the node's event loop, keys and presence. What a message means is decided elsewhere: a node
decodes, believes or refuses, and hands on. The only room that imports nats and cryptography.
"""

from __future__ import annotations

from kvbus.bus.announcer import ANSWER_EVERY_S
from kvbus.bus.caches import Caches
from kvbus.bus.keys import Keys
from kvbus.bus.memory import MemoryBroker, MemoryBus
from kvbus.bus.nats import NatsBus, without_credentials
from kvbus.bus.node import Node
from kvbus.bus.port import Bus, Callback, Handler, Watcher
from kvbus.bus.presence import connection_name
from kvbus.bus.wrong_namespace import QUIET_S, NobodyError, nobody_in

__all__ = [
    "ANSWER_EVERY_S",
    "QUIET_S",
    "Bus",
    "Caches",
    "Callback",
    "Handler",
    "Keys",
    "MemoryBroker",
    "MemoryBus",
    "NatsBus",
    "NobodyError",
    "Node",
    "Watcher",
    "connection_name",
    "nobody_in",
    "without_credentials",
]
