"""The decode side of a transfer: the registrar in the engine's scheduler, the arrivals in each of its ranks.

Here is decided what is registered, for how long it waits, and when vLLM may have the blocks back. Pure. Performed by
:class:`kvbus.engine.SinkScheduler` and :class:`kvbus.engine.Rank`; nothing of the prefill side may be imported.
"""

from __future__ import annotations

from kvbus.protocol.decode.arrivals import Arrivals, Arrived, Landed
from kvbus.protocol.decode.events import (
    Abandon,
    Aborted,
    BusBack,
    BusLost,
    Echo,
    Effect,
    Event,
    FirstToken,
    Publish,
    Rebound,
    Received,
    Register,
    Reject,
    SourceLeft,
)
from kvbus.protocol.decode.patience import NEVER_SEEN, UNCLAIMED_S, unknown_at
from kvbus.protocol.decode.registrar import Registrar

__all__ = [
    "NEVER_SEEN",
    "UNCLAIMED_S",
    "Abandon",
    "Aborted",
    "Arrivals",
    "Arrived",
    "BusBack",
    "BusLost",
    "Echo",
    "Effect",
    "Event",
    "FirstToken",
    "Landed",
    "Publish",
    "Rebound",
    "Received",
    "Register",
    "Registrar",
    "Reject",
    "SourceLeft",
    "unknown_at",
]
