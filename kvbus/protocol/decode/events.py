"""The events that the registrar is told, and the effects that it answers with.

See :mod:`kvbus.protocol.decode.registrar`.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbus.wire import (
    Cancel,
    CancelAck,
    Delivered,
    Echoes,
    Heartbeat,
    Pulse,
    Registration,
    RegistrationAck,
    TransferDone,
    TransferFailed,
    TransferStarted,
)


@dataclass(frozen=True, slots=True)
class Register:
    """Blocks are allocated; ``hint`` is the prefill engine's id if it is known, else empty."""

    registration: Registration
    hint: str


@dataclass(frozen=True, slots=True)
class Received:
    """vLLM has taken the receive as finished: nothing is left to do."""

    request_id: str


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first token of a received request is out, or the request is over: its KV will not be asked for again."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Rebound:
    """The router has given this request to the prefill engine ``engine``, or to none: the present attempt is to end."""

    request_id: str
    attempt: int
    engine: str


@dataclass(frozen=True, slots=True)
class Aborted:
    """vLLM has dropped the request; its blocks stay until :class:`Abandon`."""

    request_id: str


@dataclass(frozen=True, slots=True)
class SourceLeft:
    """This incarnation of a prefill engine is gone: it will answer nothing any more."""

    engine: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class BusLost:
    """The bus is away: nobody can be asked, and no lease is renewed."""


@dataclass(frozen=True, slots=True)
class BusBack:
    """The bus is connected again: whatever was published meanwhile is lost."""


FromSource = RegistrationAck | CancelAck | TransferStarted | TransferDone | TransferFailed
Event = (
    Register
    | Received
    | FirstToken
    | Rebound
    | Aborted
    | SourceLeft
    | BusLost
    | BusBack
    | Heartbeat
    | Pulse
    | FromSource
)


@dataclass(frozen=True, slots=True)
class Publish:
    """Publish to the prefill engine ``engine``, or to the pool if it is empty."""

    engine: str
    message: Registration | Cancel | Delivered


@dataclass(frozen=True, slots=True)
class Echo:
    """Publish these echoes to the ranks of the prefill engine ``engine``."""

    engine: str
    echoes: Echoes
    epoch: int


@dataclass(frozen=True, slots=True)
class Abandon:
    """Nothing is written into this request's blocks any more, and its KV is not (all) here."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Reject:
    """The event changed nothing."""

    reason: str


Effect = Publish | Echo | Abandon | Reject
