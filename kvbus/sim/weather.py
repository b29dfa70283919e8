"""What becomes of a message between two engines: lost, doubled, late, or held up; for the played bus and real ones."""

from __future__ import annotations

from kvbus.sim.stage import Pace, Stage

EVERYBODY = "*"


class Weather:
    """Partitions and stalls between hosts; an engine's scheduler and ranks share the host, which has its name."""

    def __init__(self, stage: Stage, pace: Pace) -> None:
        self._stage, self._pace = stage, pace
        self._cut_until: dict[tuple[str, str], float] = {}
        self._stalled_until: dict[str, float] = {}

    def copies(self, sender: str, receiver: str) -> list[float]:
        """After how many seconds each copy of a message arrives; empty if it is lost."""
        stage, faults, chance = self._stage, self._stage.faults, self._stage.chance
        if self._cut_until.get((sender, receiver), 0.0) > stage.now:
            stage.counts["messages lost in partitions"] += 1
            return []
        if chance.random() < faults.drop:
            stage.counts["messages dropped"] += 1
            return []
        doubled = chance.random() < faults.double
        stage.counts["messages doubled"] += doubled
        held_s = max(0.0, *(self._stalled_until.get(host, 0.0) - stage.now for host in (receiver, EVERYBODY)))
        stage.counts["messages held up"] += held_s > 0
        found = []
        for _ in range(1 + doubled):
            late = chance.random() < faults.late
            stage.counts["messages late"] += late
            found.append(held_s + (chance.expovariate(1.0) * self._pace.wait if late else 0.0))
        return found

    def cut(self, one: str, other: str, *, both: bool, for_s: float) -> None:
        """Lose what ``one`` sends to ``other`` for a while, and the other way round if ``both``."""
        for pair in [(one, other), (other, one)] if both else [(one, other)]:
            self._cut_until[pair] = self._stage.now + for_s

    def stall(self, host: str, for_s: float) -> None:
        """Let nothing reach this host for a while; then everything does: a slow consumer."""
        self._stalled_until[host] = self._stage.now + for_s
