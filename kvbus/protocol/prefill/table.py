"""The table of one prefill rank's transfers: which there are, until when they wait, and how others ended. Pure.

The one rule: a transfer leaves the table through :meth:`Transfers.end` only, which gives back its prefill's blocks,
once, and remembers how it ended, so that what comes late is answered. All of it is bounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvbus.bounded import BoundedDict, Deadlines
from kvbus.protocol.prefill.events import Effect, ReleaseBlocks, Send
from kvbus.protocol.prefill.transfer import Ending, Outcome, Stage, Transfer
from kvbus.wire import PrefillCompleted, Registration, TransferDone, TransferFailed

MAX_TRANSFERS = 1 << 16
MAX_ENDINGS = 1 << 13


@dataclass(frozen=True, slots=True)
class Holds:
    """How long what is in the table waits, seconds.

    Attributes:
        block_lease_s: the blocks of a completed prefill, for a registration.
        pool_hold_s: an unclaimed registration from the pool, for its prefill. The decode engine re-sends it.
        registration_hold_s: an acknowledged registration, for its prefill.
    """

    block_lease_s: float = 30.0
    pool_hold_s: float = 10.0
    registration_hold_s: float = 600.0


class Transfers:
    """See the module's docstring. ``draining``: nothing new is taken on."""

    def __init__(self, cap: int = MAX_TRANSFERS) -> None:
        self._cap = cap
        self._transfers: dict[str, Transfer] = {}
        self._deadlines: Deadlines[str] = Deadlines()
        self._endings: BoundedDict[str, Ending] = BoundedDict(MAX_ENDINGS)
        self._released: BoundedDict[str, None] = BoundedDict(MAX_ENDINGS)
        self.draining = False

    def __len__(self) -> int:
        return len(self._transfers)

    def counts(self) -> dict[str, int]:
        """Transfers by what they wait for."""
        held = self._transfers.values()
        return {
            "writing": sum(t.stage is Stage.WRITING for t in held),
            "written": sum(t.stage is Stage.WRITTEN for t in held),
            "awaiting_prefill": sum(t.completion is None for t in held),
            "awaiting_registration": sum(t.completion is not None and t.registration is None for t in held),
            "transfers": len(self._transfers),
        }

    def __iter__(self) -> Iterator[tuple[str, Transfer]]:
        return iter(list(self._transfers.items()))

    def get(self, transfer_id: str) -> Transfer | None:
        return self._transfers.get(transfer_id)

    def open(self, transfer_id: str) -> Transfer | None:
        """The one that is there, or a new one; None if there are too many."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None and len(self._transfers) < self._cap:
            transfer = self._transfers[transfer_id] = Transfer()
        return transfer

    def waiting_for(self, sink: str) -> list[tuple[str, Transfer, Registration]]:
        """Transfers with a registration of this decode engine for which no WRITE was posted yet."""
        return [
            (key, transfer, transfer.registration)
            for key, transfer in self._transfers.items()
            if transfer.registration is not None
            and transfer.registration.sink_engine == sink
            and transfer.stage is Stage.WAITING
        ]

    def wait(self, transfer_id: str, until: float) -> None:
        """Bring it up again then, in :meth:`due`."""
        self._deadlines.set(transfer_id, until)

    def wait_no_more(self, transfer_id: str) -> None:
        self._deadlines.drop(transfer_id)

    def next_deadline(self) -> float | None:
        return self._deadlines.next()

    def due(self, now: float) -> list[tuple[str, Transfer]]:
        """What has waited long enough."""
        due = ((key, self._transfers.get(key)) for key in self._deadlines.pop_due(now))
        return [(key, transfer) for key, transfer in due if transfer is not None]

    def drop(self, transfer_id: str) -> None:
        """Forget it as if it had never been."""
        del self._transfers[transfer_id]

    def ending(self, transfer_id: str) -> Ending | None:
        """How it ended, if it did and that is not forgotten."""
        return self._endings.get(transfer_id)

    def remember(self, transfer_id: str, ending: Ending) -> None:
        """As if a transfer that never was here had ended so."""
        self._endings[transfer_id] = ending

    def end(
        self,
        transfer_id: str,
        transfer: Transfer,
        outcome: Outcome,
        reply: TransferDone | TransferFailed | None = None,
        *,
        told: bool = False,
    ) -> list[Effect]:
        """End it, and give its prefill's blocks back. Its decode engine gets the reply, unless it was told before."""
        held = transfer.registration
        self._transfers.pop(transfer_id, None)
        self._deadlines.drop(transfer_id)
        self._endings[transfer_id] = Ending(outcome, held.attempt if held is not None else 0, reply)
        effects: list[Effect] = []
        if held is not None and reply is not None and not told:
            effects.append(Send(held.sink_engine, reply))
        return effects + (self.release(transfer.completion) if transfer.completion is not None else [])

    def release(self, completion: PrefillCompleted) -> list[Effect]:
        """Give back the blocks of this prefill."""
        self._released[completion.request_id] = None
        return [ReleaseBlocks(completion.request_id)]

    def has_released(self, request_id: str) -> bool:
        return request_id in self._released
