"""What the scheduler half tells the worker half in one step, and the bookkeeping it rests on. Plain data, pickled."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvbus.trace import Traced
from kvbus.wire import PrefillCompleted, PrefillFailed, PrefillProgress, Release


@dataclass(slots=True)
class StepPlan:
    """One step's news from the scheduler half. The prefill messages also went over the bus; here they cannot be lost.

    Attributes:
        expect: receives registered since the last step, with their attempt.
        traced: those of them that are.
        takers: those of them that go on from prefill's first token, with what :mod:`.first_token` calls them.
        abandon: receives given up since the last step.
        withdraw: histories that nobody waits for any more.
        prefills: what was said of prefills since the last step, in order.
        told: the number of the last word of prefills that was ever said.
        public_key: of this engine; a rank with another one was started with another secret.
    """

    expect: dict[str, int] = field(default_factory=dict)
    traced: dict[str, Traced] = field(default_factory=dict)
    takers: dict[str, str] = field(default_factory=dict)
    abandon: list[str] = field(default_factory=list)
    withdraw: list[Release] = field(default_factory=list)
    prefills: list[PrefillProgress | PrefillCompleted | PrefillFailed] = field(default_factory=list)
    told: int = 0
    public_key: bytes = b""

    @property
    def completions(self) -> list[PrefillCompleted]:
        """Those whose blocks the ranks will say that they no longer need."""
        return [word for word in self.prefills if isinstance(word, PrefillCompleted)]

    def __bool__(self) -> bool:
        return bool(self.expect or self.abandon or self.withdraw or self.prefills)
