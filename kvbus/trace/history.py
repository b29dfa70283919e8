"""The part of a path in which prefill asked a decode engine for the prompt's beginning: marks in, stages out. Pure.

The one rule: a prefill that asked nobody has no stage of history, and its path is as if there were none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvbus.trace.path import History, HistoryOutcome, Mark, MarkName, StageName


class Cut(NamedTuple):
    """A stage and the marks that may end it; ``needed`` if something is lost where none of them is there."""

    stage: StageName
    marks: list[Mark]
    needed: bool


def history_cuts(marks: Sequence[Mark]) -> list[Cut]:
    """Where history cuts the wait in prefill's queue; empty if prefill asked nobody.

    Args:
        marks: of the prefill engine and the attempt that count, in the order of their times.
    """
    asked, offered = _one(marks, MarkName.HISTORY_ASKED), _one(marks, MarkName.HISTORY_OFFERED)
    declined, failed = _one(marks, MarkName.HISTORY_DECLINED), _one(marks, MarkName.HISTORY_FAILED)
    received = _one(marks, MarkName.HISTORY_RECEIVED)
    posted = [mark for mark in marks if mark.name == MarkName.HISTORY_POSTED]
    came = bool(received or posted or (offered and not declined and not failed))
    if not (asked or declined or failed or came):
        return []
    return [
        Cut(StageName.PREFILL_QUEUE, asked, needed=False),
        Cut(StageName.HISTORY_ASK, offered or declined, needed=True),
        Cut(StageName.PREFILL_QUEUE, _one(marks, MarkName.HISTORY_REGISTERING), needed=False),
        Cut(StageName.HISTORY_MATCH, posted or failed, needed=came),
        Cut(StageName.HISTORY_WRITE, received or (failed if posted else []), needed=came),
    ]


def history_of(marks: Sequence[Mark], prompt_tokens: int, sink: Mark | None) -> History | None:
    """What is to be said of history.

    Args:
        marks: as for :func:`history_cuts`.
        prompt_tokens: of the prompt, 0 if that is not known.
        sink: decode's REGISTERING, which says what its cache had.
    """
    known = {mark.name: mark for mark in marks}
    begun = known.get(MarkName.PREFILL_SCHEDULED)
    had = number_in(begun.note) if begun is not None else 0
    computed = max(0, prompt_tokens - had) if begun is not None else 0
    missed = min(computed, max(0, number_in(sink.note) - had)) if sink is not None else 0
    outcome, last = _outcome(known)
    if last is None and not missed:
        return None
    asked, posted = known.get(MarkName.HISTORY_ASKED), known.get(MarkName.HISTORY_POSTED)
    engine = posted.engine if posted is not None else asked.note if asked is not None else ""
    came = outcome is HistoryOutcome.RECEIVED
    note = last.note if last is not None and outcome is not HistoryOutcome.UNKNOWN else ""
    return History(
        engine or (sink.engine if sink is not None else ""),
        outcome,
        number_in(note) if came else 0,
        missed,
        computed,
        "" if came else note,
    )


def number_in(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() else 0


_ENDS = (
    (MarkName.HISTORY_RECEIVED, HistoryOutcome.RECEIVED),
    (MarkName.HISTORY_FAILED, HistoryOutcome.FAILED),
    (MarkName.HISTORY_DECLINED, HistoryOutcome.DECLINED),
    (MarkName.HISTORY_NOT_ASKED, HistoryOutcome.NOT_ASKED),
    (MarkName.HISTORY_POSTED, HistoryOutcome.UNKNOWN),
    (MarkName.HISTORY_OFFERED, HistoryOutcome.UNKNOWN),
    (MarkName.HISTORY_ASKED, HistoryOutcome.UNKNOWN),
)


def _outcome(known: Mapping[str, Mark]) -> tuple[HistoryOutcome, Mark | None]:
    """The outcome, and the mark that tells it; None if there is no mark of history at all."""
    for name, outcome in _ENDS:
        if name in known:
            return outcome, known[name]
    return HistoryOutcome.NOT_ASKED, None


def _one(marks: Sequence[Mark], name: MarkName) -> list[Mark]:
    return [mark for mark in marks if mark.name == name][:1]
