"""What one prefill rank knows of the decode engines: whose memory it can write, in which epoch, and until when.

Pure; times are seconds on a monotonic clock. Part of the state of :class:`kvbus.protocol.prefill.matcher.Matcher`,
which alone calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from kvbus.bounded import BoundedDict
from kvbus.protocol import WRITE_LEASE_S, SourceLease
from kvbus.protocol.prefill.events import SinkJoined, SinkLeft, SinkRefused
from kvbus.wire import LeaseEcho, Registration

MAX_SINKS = 1 << 12


class Epoch(Enum):
    """How a message's epoch stands to the newest one heard of its sender."""

    OLDER = "older"
    SAME = "same"
    NEWER = "newer"


class Sinks:
    """See the module's docstring.

    Args:
        engine, incarnation, rank: this rank's identity.
        number: of pulses; see :class:`kvbus.protocol.lease.SourceLease`.
    """

    def __init__(
        self,
        engine: str,
        incarnation: int,
        rank: int,
        write_lease_s: float = WRITE_LEASE_S,
        number: Callable[[], int] | None = None,
    ) -> None:
        self._me = (engine, incarnation, rank)
        self._lease = SourceLease(write_lease_s, number)
        self._joined: BoundedDict[str, SinkJoined] = BoundedDict(MAX_SINKS)
        self._refused: BoundedDict[str, SinkRefused] = BoundedDict(MAX_SINKS)
        self._epochs: BoundedDict[tuple[str, int], int] = BoundedDict(MAX_SINKS)

    def pulse(self, now: float) -> int:
        """The number of the pulse that is sent now."""
        return self._lease.pulse(now)

    def join(self, sink: SinkJoined) -> bool:
        """This incarnation's memory can be written; False if a newer one's can."""
        known = self._joined.get(sink.engine)
        if known is not None and known.incarnation > sink.incarnation:
            return False
        self._joined[sink.engine] = sink
        self._refused.pop(sink.engine, None)
        return True

    def leave(self, left: SinkLeft) -> None:
        known = self._joined.get(left.engine)
        if known is not None and known.incarnation <= left.incarnation:
            del self._joined[left.engine]

    def refuse(self, refused: SinkRefused) -> None:
        self._refused[refused.engine] = refused

    def refusal(self, engine: str, incarnation: int) -> str:
        """Why this incarnation will never be written; empty if it may be."""
        refused = self._refused.get(engine)
        return refused.reason if refused is not None and refused.incarnation == incarnation else ""

    def get(self, engine: str, incarnation: int) -> SinkJoined | None:
        """This very incarnation, if its memory can be written."""
        known = self._joined.get(engine)
        return known if known is not None and known.incarnation == incarnation else None

    def is_stale(self, engine: str, incarnation: int) -> bool:
        """Whether a newer incarnation has taken its place."""
        known = self._joined.get(engine)
        return known is not None and incarnation < known.incarnation

    def hear(self, heard: Registration | LeaseEcho) -> Epoch:
        """Take the echoes in ``heard``, unless it is of an older epoch.

        After a newer one, what the sender registered before must be forgotten before anything is written to it.
        """
        key = (heard.sink_engine, heard.sink_incarnation)
        known = self._epochs.get(key, 0)
        if heard.epoch < known:
            return Epoch.OLDER
        if heard.epoch > known:
            self._epochs[key] = heard.epoch
        for engine, born, rank, number in heard.echoes:
            if (engine, born, rank) == self._me:
                self._lease.echoed(heard.sink_engine, heard.sink_incarnation, number)
        return Epoch.NEWER if heard.epoch > known else Epoch.SAME

    def may_write(self, sink: SinkJoined, now: float) -> bool:
        """Rule F3: whether a WRITE into this incarnation may be posted now."""
        return now <= self._lease.until(sink.engine, sink.incarnation)
