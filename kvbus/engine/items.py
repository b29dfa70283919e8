"""What a rank is told, beside the matcher's events: by the bus, and by its engine's scheduler half."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvbus.protocol.prefill import Event
from kvbus.trace import Traced
from kvbus.wire import PrefillCompleted, PrefillFailed, PrefillProgress, TransferDone, TransferFailed, TransferStarted


@dataclass(frozen=True, slots=True)
class AddPeer:
    """A decode engine's metadata has come: make its memory writable."""

    engine: str
    incarnation: int
    tp_size: int
    metadata: Mapping[int, bytes]


@dataclass(frozen=True, slots=True)
class Expect:
    """The scheduler half has registered a receive."""

    request_id: str
    attempt: int
    traced: Traced | None = None


@dataclass(frozen=True, slots=True)
class Abandon:
    """The scheduler half has given a receive up, after the fence."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Greet:
    """A prefill engine has asked for this rank's metadata and is about to make contact."""


@dataclass(frozen=True, slots=True)
class Overheard:
    """What the scheduler half has said, as the bus says it; the step plan says it surely, and in order."""

    word: PrefillProgress | PrefillCompleted | PrefillFailed


@dataclass(frozen=True, slots=True)
class Told:
    """The step plan has said all that the scheduler half numbered up to here."""

    number: int


WriteNews = TransferStarted | TransferDone | TransferFailed
"""What the bus says of a WRITE into this rank's engine."""
Item = Event | Overheard | Told | AddPeer | Expect | Abandon | Greet | WriteNews
