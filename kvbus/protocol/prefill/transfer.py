"""One transfer in a prefill rank: its two halves, how far it is, and how it ended.

Pure data of :mod:`kvbus.protocol.prefill.matcher`, which alone changes it, and what the halves have to agree on.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvbus.protocol.prefill.events import SinkJoined, WriteJob
from kvbus.wire import (
    NO_TOKEN,
    Cancel,
    PrefillCompleted,
    PrefillProgress,
    Registration,
    TransferDone,
    TransferFailed,
    blocks,
)


class Outcome(Enum):
    """How a transfer ended; the value is the reason given to a registration that comes too late."""

    DONE = "already transferred"
    FAILED = "transfer failed"
    EXPIRED = "block lease expired"
    CANCELLED = "cancelled"
    NO_PREFILL = "prefill failed"
    DRAINED = "draining"
    FULL = "full"
    SUPERSEDED = "superseded by another attempt"


class Stage(Enum):
    """Of the registration that a transfer holds."""

    WAITING = "waiting"  # for its other half, for the decode engine's memory, for the lease
    WRITING = "writing"
    WRITTEN = "written"  # the KV stays until the first token is out: another decode engine may have to take over


class Step(Enum):
    """What moves a transfer from one stage to another."""

    POST = "its WRITE is posted"
    FINISH = "its WRITE has ended well"
    FORGET = "its registration is forgotten"


NEXT = {
    (Stage.WAITING, Step.POST): Stage.WRITING,
    (Stage.WAITING, Step.FORGET): Stage.WAITING,
    (Stage.WRITING, Step.FINISH): Stage.WRITTEN,
    (Stage.WRITING, Step.FORGET): Stage.WAITING,  # only once the WRITE has ended
    (Stage.WRITTEN, Step.FORGET): Stage.WAITING,
}
"""Every step that there is. Which event leads to which one in which stage: ``docs/protocol.md``."""


@dataclass(slots=True)
class Transfer:
    """What is known of one transfer: its prefill, and the registration that it is for."""

    announced: bool = False
    completion: PrefillCompleted | None = None
    completed_at: float = 0.0
    registration: Registration | None = None
    registered_at: float = 0.0
    held_up: str = ""  # what was waited for when both halves were known; for traces only
    acknowledged: bool = False
    bound: bool = False  # the registration was sent to this very incarnation: only then may it be written to
    stage: Stage = Stage.WAITING
    writing_since: float = 0.0
    cancel: Cancel | None = None
    delivered: bool = False
    done: TransferDone | None = None
    watching: str = ""  # the decode engine that wants to know how far the prefill is, before it registers
    progress: PrefillProgress | None = None
    lowest_attempt: int = 0  # what was answered for earlier ones holds for ever: they are never written (F2, F4)
    highest_attempt: int = 0  # heard of; a running WRITE of an earlier one is not the transfer's end

    @property
    def is_here(self) -> bool:
        """Whether this engine has heard of the prefill from its own scheduler."""
        return self.announced or self.completion is not None

    def take(self, step: Step) -> None:
        """Go to the stage that follows: the only way that it changes."""
        self.stage = NEXT[self.stage, step]

    def forget(self) -> None:
        """Forget the registration; the decode engine may send it again."""
        self.take(Step.FORGET)
        self.registration, self.acknowledged, self.bound, self.held_up = None, False, False, ""
        self.cancel, self.done, self.delivered = None, None, False

    def close_attempt(self) -> None:
        """Forget the registration, and refuse its attempt from now on."""
        if self.registration is not None:
            self.close_before(self.registration.attempt + 1)
        self.forget()

    def close_before(self, attempt: int) -> None:
        """Refuse all earlier attempts from now on."""
        self.lowest_attempt = max(self.lowest_attempt, attempt)


@dataclass(frozen=True, slots=True)
class Ending:
    """What is remembered of a transfer that has ended: ``reply`` goes to a decode engine that asks again."""

    outcome: Outcome
    attempt: int
    reply: TransferDone | TransferFailed | None = None

    def answers(self, registration: Registration) -> bool:
        """Whether the reply is to this very registration, whose sender has missed it."""
        reply, asked = self.reply, (registration.attempt, registration.request_id)
        return reply is not None and (reply.attempt, reply.request_id) == asked


def mismatch(registration: Registration, completion: PrefillCompleted, sink: SinkJoined) -> str:
    """Why the two cannot be joined, empty if they can. Rule F6: ids are checked before a WRITE is built."""
    if registration.prompt_tokens != completion.tokens:
        return f"prompt has {registration.prompt_tokens} tokens on decode, {completion.tokens} on prefill"
    if registration.digest and completion.digest and registration.digest != completion.digest:
        return "decode and prefill were given different prompts under one transfer id"
    if len(registration.blocks) != len(completion.blocks):
        return f"{len(registration.blocks)} KV groups on decode, {len(completion.blocks)} on prefill"
    if blocks.highest(registration.blocks) >= sink.num_blocks:
        return f"block {blocks.highest(registration.blocks)} is out of the decode engine's {sink.num_blocks} blocks"
    return ""


def write_job(
    registration: Registration,
    completion: PrefillCompleted,
    registered_at: float,
    completed_at: float,
    held_up: str = "",
) -> WriteJob:
    """What the two halves come to."""
    return WriteJob(
        transfer_id=registration.transfer_id,
        attempt=registration.attempt,
        source_request=completion.request_id,
        source_blocks=completion.blocks,
        sink_engine=registration.sink_engine,
        sink_incarnation=registration.sink_incarnation,
        sink_request=registration.request_id,
        sink_blocks=registration.blocks,
        traceparent=registration.traceparent or completion.traceparent,
        first_token=completion.first_token if registration.takes_token else NO_TOKEN,
        registered_at=registered_at,
        completed_at=completed_at,
        held_up=held_up,
    )
