"""Both cores back to back, a wire between them: messages dropped, doubled, delayed, reordered, cut off one way or both,
the prefill engine killed and restarted, WRITEs slow.

The laws: no WRITE lands in blocks that vLLM has taken back, every completion's blocks are released once, every receive
ends.
"""

from __future__ import annotations

import heapq
import itertools
import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from kvbus.protocol import SinkLease, term_s
from kvbus.protocol.decode import Abandon, Aborted, BusBack, Echo, Publish, Received, Register, Registrar, SourceLeft
from kvbus.protocol.prefill import (
    Matcher,
    PooledCancel,
    PooledRegistration,
    PostWrite,
    ReleaseBlocks,
    Send,
    SinkJoined,
    WriteEnded,
)
from kvbus.wire import Cancel, LeaseEcho, Message, PrefillCompleted, PrefillFailed, PrefillProgress, Registration

LIVES = int(os.environ.get("KVBUS_LIVES", "300"))
LEASE_S, MAX_WRITE_S, PULSE_S, DEAD_AFTER_S = 1.5, 2.0, 0.5, 3.0


@dataclass
class Faults:
    """How often, how long."""

    loss: float = 0.0
    cuts: float = 0.0
    kills: float = 0.0
    slow_write_s: float = 0.3


@dataclass
class World:
    """One prefill rank and one decode scheduler; time is virtual, and everything happens in order of its time."""

    seed: int
    faults: Faults
    now: float = 0.0
    taken_back: set[str] = field(default_factory=set)
    released: Counter[str] = field(default_factory=Counter)
    completed: set[str] = field(default_factory=set)
    posted: int = 0
    heard_at: float = 0.0

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._tie = itertools.count()
        self._cut: dict[str, float] = {"P": 0.0, "D": 0.0}
        self.incarnation = 0
        self.registrar = Registrar(
            lease=SinkLease(LEASE_S, MAX_WRITE_S), patience_s=5, transfer_timeout_s=60, cancel_timeout_s=1
        )
        self.boot_prefill()
        self.at(PULSE_S, self.beat)

    def boot_prefill(self) -> None:
        self.incarnation += 1
        self.first_pulse_at = self.now + term_s() if self.incarnation > 1 else 0.0
        self.matcher = Matcher(
            engine="P",
            incarnation=self.incarnation,
            rank=0,
            ranks=1,
            block_lease_s=30,
            registration_hold_s=60,
            write_lease_s=LEASE_S,
        )
        self.matcher.apply(SinkJoined("D", 1, 1000), self.now)
        self.completed.clear()
        self.released.clear()

    def at(self, delay: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._tie), do))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, do = heapq.heappop(self._events)
            do()
            self.perform_source(self.matcher.tick(self.now))
            self.perform_sink(self.registrar.tick(self.now))
        self.now = until

    def beat(self) -> None:
        if self.now >= self.first_pulse_at:
            self.send("D", self.matcher.pulse(self.now))
        if self.now - self.heard_at > DEAD_AFTER_S:
            self.at_sink(SourceLeft("P", self.incarnation))
        self.at(PULSE_S, self.beat)

    def send(self, to: str, message: Message | PooledRegistration | PooledCancel, *, surely: bool = False) -> None:
        if not surely and (self.now < self._cut[to] or self.chance.random() < self.faults.loss):
            return
        for _ in range(1 if surely or self.chance.random() < 0.8 else 2):
            delay = self.chance.expovariate(200.0) if self.chance.random() < 0.9 else self.chance.random() * 2
            target, incarnation = (self.at_source if to == "P" else self.at_sink), self.incarnation

            def arrive(target: Any = target, incarnation: int = incarnation) -> None:
                if not surely or incarnation == self.incarnation:
                    target(message)

            self.at(0.0 if surely else delay, arrive)

    def cut(self) -> None:
        """A partition, one way or both."""
        until = self.now + self.chance.random() * 10
        for side in self.chance.choice((["P"], ["D"], ["P", "D"])):
            self._cut[side] = until

    def at_source(self, event: Any) -> None:
        self.perform_source(self.matcher.apply(event, self.now))

    def perform_source(self, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case Send(_, message):
                    self.send("D", message)
                case PostWrite(job):
                    self.post(job.transfer_id, job.attempt, job.sink_request)
                case ReleaseBlocks(request_id):
                    self.released[request_id] += 1
                    assert self.released[request_id] == 1, "blocks released twice"

    def post(self, transfer_id: str, attempt: int, sink: str) -> None:
        """It lands at some time before it is overdue, also if the engine that posted it dies."""
        self.posted += 1
        takes = min(self.chance.expovariate(1 / self.faults.slow_write_s), MAX_WRITE_S * 0.999)
        failure = "told to" if self.chance.random() < 0.1 else ""
        incarnation = self.incarnation

        def land() -> None:
            assert sink not in self.taken_back, "a WRITE into blocks that changed owner"
            if not failure:
                self.taken_back.add(sink)  # vLLM takes the receive as finished
                self.at_sink(Received(sink))
            if incarnation == self.incarnation:
                self.at_source(WriteEnded(transfer_id, attempt, 1, failure))

        self.at(takes, land)

    def at_sink(self, event: Any) -> None:
        if getattr(event, "source_engine", "") == "P":
            self.heard_at = self.now
        self.perform_sink(self.registrar.apply(event, self.now))

    def perform_sink(self, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case Publish("", Registration() as message):
                    self.send("P", PooledRegistration(message))
                case Publish("", Cancel() as message):
                    self.send("P", PooledCancel(message))
                case Publish(_, message):
                    self.send("P", message)
                case Echo(engine, echoes, epoch):
                    self.send(engine, LeaseEcho("D", 1, echoes, epoch))
                case Abandon(request_id, _):
                    assert request_id not in self.taken_back, "taken back twice"
                    self.taken_back.add(request_id)

    def kill(self) -> None:
        self.boot_prefill()
        if self.chance.random() < 0.5:  # the heartbeat of the new incarnation is heard at some time
            self.at(self.chance.random() * 2, lambda: self.at_sink(SourceLeft("P", self.incarnation - 1)))


def script(world: World, name: str) -> None:
    """What the engines do for one transfer."""
    chance = world.chance
    registration = Registration(name, 1, "D", 1, f"d-{name}", (((chance.randrange(900), 3),),), 96)

    def about() -> dict[str, Any]:
        return {
            "transfer_id": name,
            "source_engine": "P",
            "source_incarnation": world.incarnation,
            "request_id": f"p-{name}",
        }

    def register() -> None:
        world.at_sink(Register(registration, "P" if chance.random() < 0.7 else ""))

    def arrive() -> None:
        progress = PrefillProgress(**about(), computed=0, total=96)
        world.send("P", progress)

    def finish() -> None:
        completed = PrefillCompleted(**about(), blocks=(((0, 3),),), tokens=96)
        world.completed.add(f"p-{name}")
        world.send("P", completed)
        world.send("P", completed, surely=True)

    def fail() -> None:
        failed = PrefillFailed(**about(), reason="aborted")
        world.send("P", failed, surely=True)

    start = chance.random() * 20
    world.at(start + chance.random(), register)
    world.at(start, arrive)
    world.at(start + chance.random() * 3, finish if chance.random() < 0.85 else fail)
    if chance.random() < 0.3:
        world.at(start + 1 + chance.random() * 3, lambda: world.at_sink(Aborted(f"d-{name}")))
    if chance.random() < 0.1:
        world.at(start + chance.random() * 3, lambda: world.at_sink(BusBack()))
    if chance.random() < world.faults.cuts:
        world.at(start + chance.random() * 3, world.cut)
    if chance.random() < world.faults.kills:
        world.at(start + chance.random() * 3, world.kill)


def live(seed: int, faults: Faults, transfers: int = 8) -> World:
    world = World(seed, faults)
    for number in range(transfers):
        script(world, f"t{number}")
    world.run(40.0)
    world.faults = replace(faults, loss=0.0)
    world.run(200.0)
    return world


@pytest.mark.slow
@pytest.mark.parametrize(
    "faults",
    [
        Faults(),
        Faults(loss=0.3),
        Faults(cuts=0.3, slow_write_s=1.0),
        Faults(kills=0.3, slow_write_s=1.0),
        Faults(loss=0.2, cuts=0.3, kills=0.2, slow_write_s=1.0),
    ],
    ids=["calm", "loss", "cuts", "kills", "all"],
)
def test_the_laws_hold_in_random_lives(faults: Faults) -> None:
    posted = 0
    for seed in range(LIVES):
        world = live(seed, faults)
        posted += world.posted
        assert len(world.registrar) == 0, f"seed {seed}: a receive never ended"
        assert set(world.released) == world.completed, f"seed {seed}: blocks leaked"
        assert world.matcher.counts["transfers"] == 0, f"seed {seed}: the matcher remembers too much"
    assert posted > 300, "the faults left something to check"


def test_without_faults_every_prefill_that_ends_well_is_pushed() -> None:
    world = World(1, Faults())
    registration = Registration("t", 1, "D", 1, "d", (((5, 3),),), 96)
    about = {"transfer_id": "t", "source_engine": "P", "source_incarnation": 1, "request_id": "p"}
    world.at(1.0, lambda: world.at_sink(Register(registration, "P")))
    world.at(2.0, lambda: world.at_source(PrefillCompleted(**about, blocks=(((0, 3),),), tokens=96)))
    world.run(3.0)
    assert world.posted == 1
