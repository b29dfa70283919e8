"""Virtual time, and the played bus."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable

from kvbus.sim.faults import Faults
from kvbus.sim.weather import Weather
from kvbus.wire import Message, decode, encode


class World:
    """A :class:`~kvbus.sim.stage.Stage` that runs events in the order of their time; the only clock there is."""

    def __init__(self, seed: int, faults: Faults) -> None:
        self.faults = faults
        self.chance = random.Random(seed)
        self.now = 0.0
        self.counts: Counter[str] = Counter()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._tie = itertools.count()

    def at(self, delay_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._tie), do))

    def run(self, until_s: float) -> None:
        while self._events and self._events[0][0] <= until_s:
            self.now, _, do = heapq.heappop(self._events)
            do()
        self.now = max(self.now, until_s)


Handler = Callable[[Message], None]


class SimBus:
    """Publish/subscribe between members; at most once, any delay. A member is ``host/incarnation``."""

    def __init__(self, world: World, weather: Weather) -> None:
        self._world, self._weather = world, weather
        self._subscribers: dict[str, list[tuple[str, Handler]]] = {}
        self._present: set[str] = set()
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
        world = self._world
        if not self.up:
            return
        message = decode(encode(message))  # as any receiver gets it
        world.counts["messages"] += 1
        for member, handler in self._subscribers.get(subject, ()):
            for delay_s in self._weather.copies(_host(sender), _host(member)):
                delay_s += world.chance.expovariate(2000.0)
                world.at(delay_s, lambda m=member, h=handler: self._deliver(m, h, message))  # type: ignore[misc]

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
    return member.partition("/")[0]
