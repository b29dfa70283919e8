"""Every interleaving of the small case: one transfer, one abort, one restart of the prefill engine, one lost message.

A state is both cores, what is under way between them, and the WRITEs that run. From each, everything that can happen
next is tried; a state seen before is not tried again. When a path has used up its steps of time it is played to
its end in the plain order, so that what must happen in the end is checked for every one of them.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvbus.lease import SinkLease, term_s
from kvbus.matcher import Matcher
from kvbus.matching import PooledCancel, PooledRegistration, PostWrite, ReleaseBlocks, Send, SinkJoined, WriteEnded
from kvbus.messages import Cancel, LeaseEcho, PrefillCompleted, Registration, TransferStarted
from kvbus.registrar import Abandon, Aborted, Echo, Publish, Received, Register, Registrar, SourceLeft

LEASE_S, MAX_WRITE_S = 1.5, 2.0


@dataclass
class State:
    """See the module's docstring. ``may`` is what can still happen once."""

    steps_of_time: int
    may: set[str]
    hint: str
    now: float = 0.0
    incarnation: int = 1
    first_pulse_at: float = 0.0
    wire: list[tuple[str, Any]] = field(default_factory=list)
    writes: list[tuple[str, int, float, int]] = field(default_factory=list)
    given_back: bool = False
    landed: bool = False
    completed: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        lease = SinkLease(LEASE_S, MAX_WRITE_S)
        self.registrar = Registrar(lease=lease, patience_s=3.0, transfer_timeout_s=6.0, cancel_timeout_s=0.5)
        self.matcher = self.new_matcher()
        self.at_sink(self.matcher.pulse(0.0))
        self.at_sink(Register(Registration("t", 1, "D", 1, "d", (((5, 1),),), 32), self.hint))

    def new_matcher(self) -> Matcher:
        matcher = Matcher(
            engine="P",
            incarnation=self.incarnation,
            rank=0,
            ranks=1,
            block_lease_s=4.0,
            pool_hold_s=4.0,
            registration_hold_s=8.0,
            write_lease_s=LEASE_S,
        )
        matcher.apply(SinkJoined("D", 1, 100), self.now)
        return matcher

    def key(self) -> bytes:
        """Equal for states with the same future: in what order messages were sent does not matter."""
        self.wire.sort(key=repr)
        return pickle.dumps([sorted(value) if isinstance(value, set) else value for value in vars(self).values()])

    def next_states(self) -> Iterator[tuple[str, State]]:
        """Everything that can happen next."""
        for number in range(len(self.wire)):
            if self.wire[number] in self.wire[:number]:
                continue
            yield self.after(f"deliver {self.wire[number]}", lambda s, n=number: s.deliver(n))
            if "lose" in self.may:
                yield self.after(f"lose {self.wire[number]}", lambda s, n=number: s.lose(n))
        for number in range(len(self.writes)):
            yield self.after("land", lambda s, n=number: s.land(n))
        if f"complete {self.incarnation}" in self.may:
            yield self.after("complete", State.complete)
        if "abort" in self.may:
            yield self.after("abort", State.abort)
        if "restart" in self.may:
            yield self.after("restart", State.restart)
        if self.steps_of_time and (at := self.next_time()) is not None:
            yield self.after(f"time {at:.2f}", lambda s: s.advance(at))

    def after(self, name: str, do: Any) -> tuple[str, State]:
        copy: State = pickle.loads(pickle.dumps(self))
        do(copy)
        return name, copy

    def next_time(self) -> float | None:
        """The next moment at which something is due; a WRITE must have landed before it is overdue."""
        if any(posted + MAX_WRITE_S <= self.now for _, _, posted, _ in self.writes):
            return None
        pulse = max(self.now + 0.5, self.first_pulse_at)
        due = [self.matcher.next_deadline(), self.registrar.next_deadline(), pulse]
        due += [posted + MAX_WRITE_S for _, _, posted, _ in self.writes]
        return min(at for at in due if at is not None)

    def advance(self, at: float) -> None:
        self.steps_of_time -= 1
        pulse = max(self.now + 0.5, self.first_pulse_at)
        self.now = max(at, self.now)
        if self.now >= pulse and self.registrar_waits():
            self.wire.append(("D", self.matcher.pulse(self.now)))
        self.source(self.matcher.tick(self.now))
        self.sink(self.registrar.tick(self.now))

    def registrar_waits(self) -> bool:
        return len(self.registrar) > 0

    def deliver(self, number: int) -> None:
        to, message = self.wire.pop(number)
        (self.at_source if to == "P" else self.at_sink)(message)

    def lose(self, number: int) -> None:
        self.may.discard("lose")
        self.wire.pop(number)

    def complete(self) -> None:
        """The prefill is done: on the bus, and surely in the next step."""
        self.may.discard(f"complete {self.incarnation}")
        request_id = f"p{self.incarnation}"
        completed = PrefillCompleted("t", "P", self.incarnation, request_id, (((0, 1),),), 32)
        self.completed.append(request_id)
        self.at_source(completed)

    def abort(self) -> None:
        self.may.discard("abort")
        if not (self.given_back or self.landed):
            self.at_sink(Aborted("d"))

    def restart(self) -> None:
        """Killed, and started again: its WRITEs still land, what it knew is gone."""
        self.may.discard("restart")
        self.incarnation += 1
        self.first_pulse_at = self.now + term_s(LEASE_S, MAX_WRITE_S)
        self.matcher = self.new_matcher()
        self.completed.clear()
        self.released.clear()
        self.wire.append(("D", SourceLeft("P", self.incarnation - 1)))

    def land(self, number: int) -> None:
        transfer_id, attempt, _, incarnation = self.writes.pop(number)
        assert not self.given_back, "a WRITE landed in blocks that changed owner"
        assert not self.landed, "a WRITE landed in blocks that are in use"
        self.landed = True
        if len(self.registrar):
            self.at_sink(Received("d"))
        if incarnation == self.incarnation:
            self.at_source(WriteEnded(transfer_id, attempt, 1))

    def at_source(self, event: Any) -> None:
        self.source(self.matcher.apply(event, self.now))

    def at_sink(self, event: Any) -> None:
        self.sink(self.registrar.apply(event, self.now))

    def source(self, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case Send(_, TransferStarted()):
                    pass  # it only says that waiting is worth it
                case Send(_, message):
                    self.wire.append(("D", message))
                case PostWrite(job):
                    self.writes.append((job.transfer_id, job.attempt, self.now, self.incarnation))
                case ReleaseBlocks(request_id):
                    assert request_id not in self.released, "released twice"
                    self.released.append(request_id)

    def sink(self, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case Publish("", Registration() as message):
                    self.wire.append(("P", PooledRegistration(message)))
                case Publish("", Cancel() as message):
                    self.wire.append(("P", PooledCancel(message)))
                case Publish(_, message):
                    self.wire.append(("P", message))
                case Echo(echoes, epoch):
                    self.wire.append(("P", LeaseEcho("D", 1, echoes, epoch)))
                case Abandon():
                    assert not self.given_back, "given back twice"
                    assert not self.landed, "given back after it was reported"
                    self.given_back = True

    def play_to_the_end(self) -> None:
        """The plain order, and then what must hold."""
        for _ in range(200):
            while self.wire:
                self.deliver(0)
            while self.writes:
                self.land(0)
            if not len(self.registrar) and not self.matcher.counts["transfers"]:
                break
            at = self.next_time()
            assert at is not None
            self.advance(at)
        assert len(self.registrar) == 0, "the receive never ended"
        assert self.given_back or self.landed
        assert self.released == self.completed, "blocks leaked"


def explore(start: State, limit: int) -> int:
    """Try everything; returns how many different states there were."""
    seen: set[bytes] = set()
    todo: list[tuple[State, tuple[str, ...]]] = [(start, ())]
    while todo:
        state, path = todo.pop()
        ended = True
        for name, after in attempt(state, path):
            ended = False
            if (key := after.key()) not in seen:
                seen.add(key)
                assert len(seen) <= limit, "more states than this case is meant to have"
                todo.append((after, (*path, name)))
        if ended or not state.steps_of_time:
            finish(state, path)
    return len(seen)


def attempt(state: State, path: tuple[str, ...]) -> Iterator[tuple[str, State]]:
    try:
        yield from state.next_states()
    except AssertionError as error:
        raise AssertionError(f"{error}, after:\n" + "\n".join(path)) from error


def finish(state: State, path: tuple[str, ...]) -> None:
    try:
        state.after("", State.play_to_the_end)
    except AssertionError as error:
        raise AssertionError(f"{error}, in the end, after:\n" + "\n".join(path)) from error


@pytest.mark.timeout(600)
@pytest.mark.parametrize("hint", ["P", ""], ids=["hint", "pool"])
@pytest.mark.parametrize(
    ("may", "steps"),
    [
        ({"abort", "complete 1"}, 2),
        ({"abort", "lose", "complete 1"}, 1),
        ({"restart", "lose", "complete 1", "complete 2"}, 1),
        ({"abort", "restart", "complete 1", "complete 2"}, 1),
    ],
    ids=["abort", "abort-lose", "restart-lose", "abort-restart"],
)
def test_no_interleaving_breaks_a_law(may: set[str], steps: int, hint: str) -> None:
    states = explore(State(steps, set(may), hint), limit=400_000)
    print(f"{states} states")
    assert states > 100
