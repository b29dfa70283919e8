"""A bus in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvbus.sim.network import EVERYBODY, Network
from kvbus.sim.runtime import Runtime
from kvbus.wire import Message, decode, encode

Handler = Callable[[Any], None]  # a message of the subject's kinds


class VirtualBus:
    """Publish/subscribe between members; at most once, with any delay. A member is ``host/incarnation``."""

    def __init__(self, runtime: Runtime, network: Network) -> None:
        self._runtime, self._network = runtime, network
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
        """Deliver nothing to this member any more."""
        self._present.discard(member)
        for subject, entries in self._subscribers.items():
            self._subscribers[subject] = [entry for entry in entries if entry[0] != member]
        self._watchers = [entry for entry in self._watchers if entry[0] != member]

    def publish(self, sender: str, subject: str, message: Message) -> None:
        runtime = self._runtime
        if not self.up:
            return
        message = decode(encode(message))  # as a receiver on a real bus gets it
        runtime.counts["messages"] += 1
        for member, handler in self._subscribers.get(subject, ()):
            for delay_s in self._network.delays(_host(sender), _host(member)):
                delay_s += runtime.rng.expovariate(2000.0)
                runtime.call_later(delay_s, lambda m=member, h=handler: self._deliver(m, h, message))  # type: ignore[misc]

    def outage(self, away_s: float) -> None:
        if self.up:
            self._set_up(False)
            self._runtime.call_later(away_s, lambda: self._set_up(True))

    def freeze(self, for_s: float) -> None:
        self._network.stall(EVERYBODY, for_s)

    def _set_up(self, up: bool) -> None:
        self.up = up
        for _, watcher in list(self._watchers):
            watcher(up)

    def _deliver(self, member: str, handler: Handler, message: Message) -> None:
        if member in self._present:
            handler(message)


def _host(member: str) -> str:
    return member.partition("/")[0]
