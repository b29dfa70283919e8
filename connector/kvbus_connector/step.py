"""What the scheduler half tells the worker half in one step, and the bookkeeping it rests on. Plain data, pickled."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvbus.marks import Traced
from kvbus.messages import PrefillCompleted, PrefillFailed


@dataclass(slots=True)
class StepPlan:
    """One step's news from the scheduler half. The prefill messages also went over the bus; here they cannot be lost.

    Attributes:
        expect: receives registered since the last step, with their attempt.
        traced: those of them that are.
        abandon: receives given up since the last step.
        prefills: prefills that ended since the last step.
    """

    expect: dict[str, int] = field(default_factory=dict)
    traced: dict[str, Traced] = field(default_factory=dict)
    abandon: list[str] = field(default_factory=list)
    prefills: list[PrefillCompleted | PrefillFailed] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.expect or self.abandon or self.prefills)
