"""Marks of a WRITE in the trace of its request, and of how late its two halves were taken up."""

from __future__ import annotations

from kvbus.bounded import BoundedDict
from kvbus.engine.items import Item, Overheard
from kvbus.protocol.prefill import WriteJob
from kvbus.trace import Marking, MarkName, traced
from kvbus.wire import PrefillCompleted, Registration

# What was taken up so much later than it came is worth a word in a trace.
LAG_S = 0.01
MAX_LAGS = 1 << 10
WRITER_BUSY = "the rank's writer thread"


class WriteMarks:
    """See the module's docstring."""

    def __init__(self, marking: Marking) -> None:
        self._marking = marking
        self._came_at: BoundedDict[tuple[MarkName, str, float], float] = BoundedDict(MAX_LAGS)

    def taken_up(self, item: Item, came_at: float, now: float) -> None:
        """An item came to this process at ``came_at``; the matcher hears of it only ``now``."""
        if now - came_at <= LAG_S:
            return
        match item.word if isinstance(item, Overheard) else item:
            case Registration(transfer_id):
                self._came_at[MarkName.REGISTERED, transfer_id, now] = came_at
            case PrefillCompleted(transfer_id):
                self._came_at[MarkName.COMPLETED, transfer_id, now] = came_at
            case _:
                pass

    def posted(self, job: WriteJob, started_at: float, now: float) -> None:
        if (what := traced(job.transfer_id, job.traceparent)) is None:
            return
        known = [(MarkName.REGISTERED, job.registered_at), (MarkName.COMPLETED, job.completed_at)]
        came = [self._came_at.pop((name, job.transfer_id, at), at) for name, at in known]
        for (name, _), at in zip(known, came, strict=True):
            self._marking.mark(what, name, job.attempt, at_s=at)
        note = job.held_up or (WRITER_BUSY if max(came) + LAG_S < max(at for _, at in known) else "")
        self._marking.mark(what, MarkName.POSTING, job.attempt, note, started_at)
        self._marking.mark(what, MarkName.POSTED, job.attempt, at_s=now)

    def written(self, job: WriteJob, nbytes: int, now: float) -> None:
        self._marking.mark(traced(job.transfer_id, job.traceparent), MarkName.WRITTEN, job.attempt, str(nbytes), now)
