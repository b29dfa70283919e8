"""Virtual time, and the bus that loses, doubles, delays and cuts."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from kvbus.messages import Message, decode, encode


@dataclass(frozen=True, slots=True)
class Faults:
    """How often things go wrong: chances for each message, and mean seconds between events; 0 is never."""

    drop: float = 0.0
    double: float = 0.0
    late: float = 0.0
    cut_every_s: float = 0.0
    kill_every_s: float = 0.0
    outage_every_s: float = 0.0
    stall_every_s: float = 0.0
    abort: float = 0.0
    write_failure: float = 0.0
    drift: float = 0.0
    mean_write_s: float = 0.05


CALM = Faults()
ALL_FAULTS = Faults(
    drop=0.02,
    double=0.05,
    late=0.03,
    cut_every_s=20.0,
    kill_every_s=40.0,
    outage_every_s=90.0,
    stall_every_s=30.0,
    abort=0.08,
    write_failure=0.02,
    drift=0.005,
    mean_write_s=0.2,
)


class Violation(AssertionError):  # noqa: N818 - the field's word
    """A law was broken."""


class World:
    """Runs events in the order of their time; the only clock there is.

    Attributes:
        counts: what happened, for the summary.
    """

    def __init__(self, seed: int, faults: Faults) -> None:
        self.seed, self.faults = seed, faults
        self.chance = random.Random(seed)
        self.now = 0.0
        self.counts: Counter[str] = Counter()
        self.bus = SimBus(self)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._tie = itertools.count()

    def at(self, delay_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._tie), do))

    def run(self, until_s: float) -> None:
        while self._events and self._events[0][0] <= until_s:
            self.now, _, do = heapq.heappop(self._events)
            do()
        self.now = max(self.now, until_s)

    def every(self, mean_s: float, do: Callable[[], None]) -> None:
        """Do it again and again, at random intervals, until :attr:`faults` are calm."""
        if mean_s <= 0:
            return

        def again() -> None:
            if self.faults is not CALM:
                do()
                self.at(self.chance.expovariate(1 / mean_s), again)

        self.at(self.chance.expovariate(1 / mean_s), again)


Handler = Callable[[Message], None]


class SimBus:
    """Publish/subscribe between members; at most once, any delay."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._subscribers: dict[str, list[tuple[str, Handler]]] = {}
        self._present: set[str] = set()
        self._cut_until: dict[tuple[str, str], float] = {}
        self._stalled_until: dict[str, float] = {}
        self._watchers: list[tuple[str, Callable[[bool], None]]] = []
        self.up = True

    def subscribe(self, member: str, subject: str, handler: Handler) -> None:
        self._present.add(member)
        self._subscribers.setdefault(subject, []).append((member, handler))

    def watch(self, member: str, watcher: Callable[[bool], None]) -> None:
        self._watchers.append((member, watcher))

    def leave(self, member: str) -> None:
        """Nothing is delivered to this member any more."""
        self._present.discard(member)
        for subject, entries in self._subscribers.items():
            self._subscribers[subject] = [entry for entry in entries if entry[0] != member]
        self._watchers = [entry for entry in self._watchers if entry[0] != member]

    def publish(self, sender: str, subject: str, message: Message) -> None:
        world, faults, chance = self._world, self._world.faults, self._world.chance
        if not self.up:
            return
        message = decode(encode(message))  # as any receiver gets it
        world.counts["messages"] += 1
        for member, handler in self._subscribers.get(subject, ()):
            if self._cut_until.get((_host(sender), _host(member)), 0.0) > world.now:
                continue
            copies = 0 if chance.random() < faults.drop else 2 if chance.random() < faults.double else 1
            for _ in range(copies):
                delay_s = chance.expovariate(2000.0)
                if chance.random() < faults.late:
                    delay_s += chance.expovariate(1.0)
                delay_s += max(0.0, self._stalled_until.get(member, 0.0) - world.now)
                world.at(delay_s, lambda m=member, h=handler: self._deliver(m, h, message))  # type: ignore[misc]

    def cut(self, one: str, other: str, *, both: bool, for_s: float) -> None:
        """Lose what ``one``'s host sends to ``other``'s for a while, and the other way round if ``both``."""
        until = self._world.now + for_s
        for pair in [(one, other), (other, one)] if both else [(one, other)]:
            self._cut_until[pair] = until

    def stall(self, member: str, for_s: float) -> None:
        """Let nothing reach this member for a while; then everything does: a slow consumer."""
        self._stalled_until[member] = self._world.now + for_s

    def restart(self, away_s: float) -> None:
        """The server goes away for a while."""
        if self.up:
            self.up = False
            self._tell()
            self._world.at(away_s, self._come_back)

    def _come_back(self) -> None:
        self.up = True
        self._tell()

    def _tell(self) -> None:
        for _, watcher in list(self._watchers):
            watcher(self.up)

    def _deliver(self, member: str, handler: Handler, message: Message) -> None:
        if member in self._present:
            handler(message)


def _host(member: str) -> str:
    """Members ``P0/rank0`` and ``P0/scheduler`` share the host ``P0``."""
    return member.partition("/")[0]
