"""Which of vLLM's steps have certainly ended. EngineCore's thread calls it."""

from __future__ import annotations

# With asynchronous scheduling vLLM plans a step while the one before runs, and never more.
STEPS_IN_FLIGHT = 2


class Steps:
    """Counts the steps that vLLM's scheduler has planned."""

    def __init__(self) -> None:
        self._planned, self._last_busy = 0, -STEPS_IN_FLIGHT

    @property
    def next(self) -> int:
        """The number of the step that is being planned."""
        return self._planned + 1

    def plan(self, busy: bool) -> None:
        """vLLM has planned a step; ``busy``: it computes something."""
        self._planned += 1
        if busy:
            self._last_busy = self._planned

    def have_ended(self, number: int) -> bool:
        """Whether no step up to ``number`` computes any more."""
        return min(number, self._last_busy) <= self._planned - STEPS_IN_FLIGHT
