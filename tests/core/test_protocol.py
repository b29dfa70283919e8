"""Two cores back to back, a list of messages between them: delivered in any order, dropped, doubled.

The laws: no WRITE into blocks that vLLM has taken back, every completion's blocks released once, every receive ends.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from kvbus.matcher import Matcher
from kvbus.matching import PostWrite, ReleaseBlocks, Send, SinkJoined, WriteEnded
from kvbus.messages import Message, PrefillCompleted, PrefillFailed, PrefillProgress, Registration
from kvbus.registrar import Abandon, Aborted, BusBack, Publish, Received, Register, Registrar

Delivery = tuple[str, object]


@dataclass
class World:
    """One prefill rank and one decode scheduler, and what is under way between them."""

    chance: random.Random
    now: float = 0.0
    wire: list[Delivery] = field(default_factory=list)
    writing: list[tuple[str, int, str]] = field(default_factory=list)
    taken_back: set[str] = field(default_factory=set)
    released: Counter[str] = field(default_factory=Counter)
    completed: set[str] = field(default_factory=set)
    loss: float = 0.0

    def __post_init__(self) -> None:
        self.matcher = Matcher(engine="P", incarnation=1, rank=0, ranks=1, block_lease_s=30)
        self.registrar = Registrar(patience_s=5, transfer_timeout_s=60, cancel_timeout_s=1e6)
        self.matcher.apply(SinkJoined("D", 1, 1000), 0.0)

    def send(self, to: str, message: object, reliable: bool = False) -> None:
        if reliable or self.chance.random() >= self.loss:
            self.wire.append((to, message))
            if self.chance.random() < 0.2:
                self.wire.append((to, message))

    def at_source(self, event: object) -> None:
        self.perform_source(self.matcher.apply(event, self.now))  # type: ignore[arg-type]

    def perform_source(self, effects: list[object]) -> None:  # type: ignore[override]
        for effect in effects:
            match effect:
                case Send(_, message):
                    self.send("D", message)
                case PostWrite(job):
                    assert job.sink_request not in self.taken_back, "a WRITE into blocks that changed owner"
                    self.writing.append((job.transfer_id, job.attempt, job.sink_request))
                case ReleaseBlocks(request_id):
                    self.released[request_id] += 1
                    assert self.released[request_id] == 1, "blocks released twice"

    def at_sink(self, event: object) -> None:
        self.perform_sink(self.registrar.apply(event, self.now))  # type: ignore[arg-type]

    def perform_sink(self, effects: list[object]) -> None:  # type: ignore[override]
        for effect in effects:
            match effect:
                case Publish(_, message):
                    self.send("P", message)
                case Abandon(request_id, _):
                    assert all(request_id != sink for _, _, sink in self.writing), "given back under a WRITE"
                    self.taken_back.add(request_id)

    def deliver(self) -> None:
        to, message = self.wire.pop(self.chance.randrange(len(self.wire)))
        (self.at_source if to == "P" else self.at_sink)(message)

    def end_write(self) -> None:
        transfer_id, attempt, sink = self.writing.pop(self.chance.randrange(len(self.writing)))
        failure = "told to" if self.chance.random() < 0.2 else ""
        self.at_source(WriteEnded(transfer_id, attempt, 1, failure))
        if not failure and sink not in self.taken_back:
            self.taken_back.add(sink)  # landed: vLLM goes on to use the blocks as it likes
            self.at_sink(Received(sink))

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.perform_source(self.matcher.tick(self.now))
        self.perform_sink(self.registrar.tick(self.now))


def run(seed: int, loss: float) -> World:
    chance = random.Random(seed)
    world = World(chance, loss=loss)
    steps: list[Callable[[], None]] = []
    for number in range(6):
        steps += script(world, chance, f"t{number}")
    for step in interleave(chance, steps):
        step()
        for _ in range(chance.randrange(4)):
            if world.wire:
                world.deliver()
            if world.writing and chance.random() < 0.5:
                world.end_write()
            if chance.random() < 0.3:
                world.tick(chance.random())
    world.loss = 0.0
    for _ in range(2000):
        if not world.wire and not world.writing and not len(world.registrar):
            break
        while world.wire:
            world.deliver()
        while world.writing:
            world.end_write()
        world.tick(1.0)
    world.tick(1000.0)
    return world


def interleave(chance: random.Random, steps: list[Callable[[], None]]) -> list[Callable[[], None]]:
    order = list(steps)
    chance.shuffle(order)
    return order


def script(world: World, chance: random.Random, name: str) -> list[Callable[[], None]]:
    """What the engines do for one transfer."""
    registration = Registration(name, 1, "D", 1, f"d-{name}", (((chance.randrange(900), 3),),), 96)
    about = {"transfer_id": name, "source_engine": "P", "source_incarnation": 1, "request_id": f"p-{name}"}
    completed = PrefillCompleted(**about, blocks=(((0, 3),),), tokens=96)

    def finish() -> None:
        world.completed.add(f"p-{name}")
        world.send("P", completed, reliable=True)
        world.send("P", completed)
        world.send("D", completed)

    def fail() -> None:
        world.send("P", PrefillFailed(**about, reason="aborted"), reliable=True)

    steps: list[Callable[[], None]] = [
        lambda: world.at_sink(Register(registration, "P" if chance.random() < 0.5 else "")),
        lambda: world.send("P", PrefillProgress(**about, computed=0, total=96)),
        finish if chance.random() < 0.8 else fail,
    ]
    if chance.random() < 0.3:
        steps.append(lambda: world.at_sink(Aborted(f"d-{name}")))
    if chance.random() < 0.2:
        steps.append(lambda: world.at_sink(BusBack()))
    return steps


@pytest.mark.parametrize("loss", [0.0, 0.3])
@pytest.mark.parametrize("batch", range(4))
def test_the_laws_hold_in_random_walks(batch: int, loss: float) -> None:
    for seed in range(batch * 250, batch * 250 + 250):
        world = run(seed, loss)
        assert len(world.registrar) == 0, f"seed {seed}: a receive never ended"
        assert set(world.released) == world.completed, f"seed {seed}: blocks leaked"
        assert world.matcher.counts["transfers"] == 0, f"seed {seed}: the matcher remembers too much"


def test_a_late_registration_of_a_new_attempt_is_told_the_truth() -> None:
    world = World(random.Random(1))
    about = {"transfer_id": "t", "source_engine": "P", "source_incarnation": 1, "request_id": "p"}
    world.at_source(PrefillCompleted(**about, blocks=(((0, 3),),), tokens=96))
    registration = Registration("t", 1, "D", 1, "d", (((5, 3),),), 96)
    world.at_source(registration)
    world.end_write()
    world.wire.clear()
    world.at_source(replace(registration, attempt=2))
    [(_, ack)] = world.wire[:1]
    assert isinstance(ack, Message)
    assert getattr(ack, "refused", "") == "already transferred"
