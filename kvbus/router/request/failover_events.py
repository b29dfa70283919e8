"""What :mod:`kvbus.router.request.failover` speaks: events in, effects out. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvbus.router.http import Answer
from kvbus.wire import Heartbeat

# Events


@dataclass(frozen=True, slots=True)
class SourceAnswered:
    """The prefill leg sent under ``attempt`` is done."""

    attempt: int


@dataclass(frozen=True, slots=True)
class SourceRefused:
    """The prefill engine says that the request is wrong."""

    attempt: int
    answer: Answer


@dataclass(frozen=True, slots=True)
class SourceLost:
    """The prefill leg will not be done."""

    attempt: int
    why: str


@dataclass(frozen=True, slots=True)
class SinkAnswered:
    """The decode leg sent under ``attempt`` has its first token, or its whole answer."""

    attempt: int
    status: int


@dataclass(frozen=True, slots=True)
class SinkLost:
    """The decode leg ended without a token; ``answer`` if the engine still said something."""

    attempt: int
    why: str
    answer: Answer | None = None


@dataclass(frozen=True, slots=True)
class RebindAnswered:
    """The decode engine's word on ``attempt``; ``refused`` is why not."""

    attempt: int
    refused: str


@dataclass(frozen=True, slots=True)
class EngineLeft:
    engine: str
    incarnation: int
    why: str


@dataclass(frozen=True, slots=True)
class TransferLost:
    """A prefill engine that lives says on the bus that decode will not get its KV under ``attempt``.

    ``kept``: it has the KV, and keeps it for another attempt.
    """

    engine: str
    attempt: int
    why: str
    kept: bool = False


@dataclass(frozen=True, slots=True)
class VerdictDue:
    """The decode engine had its time to refuse in its own words what the prefill engine refused."""


@dataclass(frozen=True, slots=True)
class ClientLeft:
    """Or the answer broke off: nobody takes what is still to come."""


Event = (
    SourceAnswered
    | SourceRefused
    | SourceLost
    | SinkAnswered
    | SinkLost
    | RebindAnswered
    | EngineLeft
    | TransferLost
    | VerdictDue
    | ClientLeft
)


# Effects


@dataclass(frozen=True, slots=True)
class SendPrefill:
    source: Heartbeat
    attempt: int


@dataclass(frozen=True, slots=True)
class SendDecode:
    """In place of any decode leg before. Without a source, ``sink`` gets the client's request as it is."""

    sink: Heartbeat
    source: Heartbeat | None
    attempt: int
    takeover_s: float


@dataclass(frozen=True, slots=True)
class AskRebind:
    """In place of any question before. Without a source, ``sink`` shall wait no longer."""

    sink: Heartbeat
    source: Heartbeat | None
    attempt: int


@dataclass(frozen=True, slots=True)
class Release:
    """Nobody takes what ``source`` has under ``attempt``."""

    source: Heartbeat
    sink: Heartbeat
    attempt: int


@dataclass(frozen=True, slots=True)
class AwaitVerdict:
    """Apply :class:`VerdictDue` in a moment."""


@dataclass(frozen=True, slots=True)
class TookOver:
    """To count and to log. ``kind`` is the role of the engine that was lost; decode may take over from prefill."""

    kind: str
    lost: str
    instead: str
    attempt: int
    why: str


@dataclass(frozen=True, slots=True)
class PassOn:
    """The client gets the decode leg's answer."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """The client gets this answer of an engine."""

    answer: Answer


@dataclass(frozen=True, slots=True)
class Fail:
    """No engine is left to ask."""

    engine: str
    why: str


Effect = SendPrefill | SendDecode | AskRebind | Release | AwaitVerdict | TookOver | PassOn | Refuse | Fail
