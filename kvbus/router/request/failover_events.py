"""The events that :mod:`kvbus.router.request.failover` takes, and the effects that it returns. Pure."""

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
    """The prefill engine says that the request is invalid."""

    attempt: int
    answer: Answer


@dataclass(frozen=True, slots=True)
class SourceLost:
    """The prefill leg failed."""

    attempt: int
    why: str


@dataclass(frozen=True, slots=True)
class SinkAnswered:
    """The decode leg sent under ``attempt`` has its first token, or its whole answer."""

    attempt: int
    status: int


@dataclass(frozen=True, slots=True)
class SinkLost:
    """The decode leg failed without a token. ``answer``: the engine's error, if it sent one."""

    attempt: int
    why: str
    answer: Answer | None = None


@dataclass(frozen=True, slots=True)
class RebindAnswered:
    """The decode engine answered the rebind to ``attempt``. ``refused``: why it stays as it is; empty if it agrees."""

    attempt: int
    refused: str


@dataclass(frozen=True, slots=True)
class EngineLeft:
    """The engine left the bus."""

    engine: str
    incarnation: int
    why: str


@dataclass(frozen=True, slots=True)
class TransferLost:
    """A live prefill engine says on the bus that decode will not get its KV under ``attempt``.

    ``kept``: it has the KV, and keeps it for another attempt.
    """

    engine: str
    attempt: int
    why: str
    kept: bool = False


@dataclass(frozen=True, slots=True)
class SinkComputes:
    """The decode engine says on the bus that it computes the prompt itself, and takes no KV under ``attempt``."""

    engine: str
    attempt: int


@dataclass(frozen=True, slots=True)
class VerdictDue:
    """The decode engine had enough time to refuse in its own words what the prefill engine refused."""


@dataclass(frozen=True, slots=True)
class ClientLeft:
    """Or the answer broke off. Nobody takes the rest."""


Event = (
    SourceAnswered
    | SourceRefused
    | SourceLost
    | SinkAnswered
    | SinkLost
    | RebindAnswered
    | EngineLeft
    | TransferLost
    | SinkComputes
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
    """Replaces an earlier decode leg. Without a source, ``sink`` gets the client's request as it is."""

    sink: Heartbeat
    source: Heartbeat | None
    attempt: int
    takeover_s: float


@dataclass(frozen=True, slots=True)
class AskRebind:
    """Replaces an earlier rebind. Without a source, ``sink`` shall wait no longer."""

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
    """Apply :class:`VerdictDue` after a while."""


@dataclass(frozen=True, slots=True)
class TookOver:
    """To be counted and logged. ``kind``: the role of the lost engine. A decode engine may take over from prefill."""

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
