"""The events that the matcher is told, and the effects that it answers with.

See :mod:`kvbus.protocol.prefill.matcher`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvbus.wire import (
    NO_TOKEN,
    BlockRuns,
    Cancel,
    Delivered,
    LeaseEcho,
    Message,
    PrefillCompleted,
    PrefillFailed,
    PrefillProgress,
    Registration,
    Release,
    Wanted,
)


@dataclass(frozen=True, slots=True)
class SinkJoined:
    """The decode engine's memory of this incarnation can be written; it has ``num_blocks`` blocks."""

    engine: str
    incarnation: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class SinkLeft:
    """This incarnation of the decode engine is gone."""

    engine: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class SinkRefused:
    """This incarnation of the decode engine cannot be written, for good."""

    engine: str
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class WriteEnded:
    """Every WRITE posted for this job has ended; ``failure`` is empty if all of them went well."""

    transfer_id: str
    attempt: int
    nbytes: int = 0
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Drain:
    """This engine is about to end: nothing new is taken on, and whoever waits is told."""


@dataclass(frozen=True, slots=True)
class PooledRegistration:
    """A registration that came over the pool's subject: only the engine that has the transfer answers it."""

    registration: Registration


@dataclass(frozen=True, slots=True)
class PooledCancel:
    """A cancel that came over the pool's subject: only an engine that has heard of the transfer answers it."""

    cancel: Cancel


@dataclass(frozen=True, slots=True)
class Released:
    """A router says that nobody takes this transfer."""

    word: Release


Event = (
    Registration
    | PooledRegistration
    | Cancel
    | PooledCancel
    | Released
    | PrefillProgress
    | PrefillCompleted
    | PrefillFailed
    | SinkJoined
    | SinkLeft
    | SinkRefused
    | WriteEnded
    | LeaseEcho
    | Wanted
    | Delivered
    | Drain
)


@dataclass(frozen=True, slots=True)
class WriteJob:
    """One transfer of one rank. Source blocks may outnumber sink blocks: the last ones of each group line up.

    ``registered_at`` and ``completed_at`` say when its halves were known, seconds; ``held_up`` what else had to be
    waited for then, empty if nothing. ``first_token`` goes with the KV, if it is no ``NO_TOKEN``.
    """

    transfer_id: str
    attempt: int
    source_request: str
    source_blocks: BlockRuns
    sink_engine: str
    sink_incarnation: int
    sink_request: str
    sink_blocks: BlockRuns
    traceparent: str = ""
    first_token: int = NO_TOKEN
    registered_at: float = field(default=0.0, compare=False)
    completed_at: float = field(default=0.0, compare=False)
    held_up: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class PostWrite:
    job: WriteJob


@dataclass(frozen=True, slots=True)
class Send:
    """Publish ``message`` to the decode engine ``engine``."""

    engine: str
    message: Message


@dataclass(frozen=True, slots=True)
class ReleaseBlocks:
    """The prefill engine's request ``request_id`` is over for this rank; given exactly once for each completion."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Introduce:
    """A decode engine registered before it was known: fetch its metadata."""

    engine: str


@dataclass(frozen=True, slots=True)
class Reject:
    """The event changed nothing; ``reason`` is one of few, fit for a metric's label."""

    reason: str


Effect = PostWrite | Send | ReleaseBlocks | Introduce | Reject
