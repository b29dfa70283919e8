"""What one prefill rank tells decode engines about their registrations. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvbus.protocol.prefill.events import Send
from kvbus.protocol.prefill.transfer import Outcome, Transfer
from kvbus.wire import (
    Cancel,
    CancelAck,
    PrefillCompleted,
    PrefillFailed,
    PrefillProgress,
    Registration,
    RegistrationAck,
    TransferDone,
    TransferFailed,
    TransferStarted,
    blocks,
)


@dataclass(frozen=True, slots=True)
class Answers:
    """This rank's identity, which is in every message that it sends."""

    engine: str
    incarnation: int
    rank: int
    ranks: int

    def is_ours(self, message: PrefillProgress | PrefillCompleted | PrefillFailed) -> bool:
        """Whether this engine's own scheduler can have said it."""
        return message.source_engine == self.engine and message.source_incarnation == self.incarnation

    def held(self, registration: Registration, *, claimed: bool) -> Send:
        """The registration is held; ``claimed``: its prefill is here, too."""
        return Send(registration.sink_engine, RegistrationAck(**self._about(registration), claimed=claimed))

    def refused(self, registration: Registration, reason: str) -> Send:
        """The registration will never be served."""
        return Send(registration.sink_engine, RegistrationAck(**self._about(registration), refused=reason))

    def cancelled(self, cancel: Cancel) -> Send:
        """No WRITE of this attempt is posted, and none will be."""
        return Send(cancel.sink_engine, CancelAck(**self._about(cancel)))

    def started(self, registration: Registration) -> Send:
        return Send(registration.sink_engine, TransferStarted(**self._about(registration)))

    def done(self, registration: Registration, transfer: Transfer, nbytes: int, now: float) -> TransferDone:
        """Every WRITE for this registration has ended well."""
        both_known = max(transfer.registered_at, transfer.completed_at)
        return TransferDone(
            **self._about(registration),
            blocks=blocks.count(registration.blocks),
            nbytes=nbytes,
            late_side="decode" if transfer.registered_at >= transfer.completed_at else "prefill",
            match_wait_s=abs(transfer.registered_at - transfer.completed_at),
            queue_s=transfer.writing_since - both_known,
            write_s=now - transfer.writing_since,
        )

    def failed(self, registration: Registration, reason: str, *, kept: bool = False) -> TransferFailed:
        """This rank has not (or not completely) written; none of its WRITEs is outstanding."""
        return TransferFailed(**self._about(registration), reason=reason, kept=kept)

    def prefill_failed(self, transfer_id: str) -> PrefillFailed:
        return PrefillFailed(transfer_id, self.engine, self.incarnation, "", Outcome.NO_PREFILL.value)

    def _about(self, heard: Registration | Cancel) -> dict[str, Any]:
        return {
            "transfer_id": heard.transfer_id,
            "source_engine": self.engine,
            "source_incarnation": self.incarnation,
            "attempt": heard.attempt,
            "rank": self.rank,
            "ranks": self.ranks,
            "request_id": heard.request_id,
        }
