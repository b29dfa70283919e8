"""Every interleaving of the small case: one transfer with one abort, one re-registration, one restart of the prefill
engine and one lost message. Likewise of history, a transfer whose source is a decode engine that offers and may
withdraw, and of a short tail, which the decode engine computes itself.

A state is both cores, what is under way between them, and the WRITEs that run. From each, everything that can happen
next is tried; a state seen before is not tried again. Time moves to the next moment at which something is due, so many
times; then whatever is still under way arrives (in every order), and from there time runs on by itself until all is
quiet, so that what must happen in the end is checked for every path.

``KVBUS_SEARCH=deep`` runs the cases that take minutes.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvbus.protocol import SinkLease, term_s
from kvbus.protocol.decode import (
    Abandon,
    Aborted,
    Echo,
    FirstToken,
    Publish,
    Rebound,
    Received,
    Register,
    Registrar,
    SourceLeft,
)
from kvbus.protocol.decode.give_back import GiveBack
from kvbus.protocol.prefill import (
    Matcher,
    PooledCancel,
    PooledRegistration,
    PostWrite,
    ReleaseBlocks,
    Released,
    Send,
    SinkJoined,
    SinkLeft,
    WriteEnded,
)
from kvbus.protocol.prefill.prefills import Prefills
from kvbus.protocol.prefill.registrations import Registrations
from kvbus.protocol.prefill.transfer import Outcome
from kvbus.wire import (
    Cancel,
    LeaseEcho,
    Message,
    PrefillCompleted,
    PrefillFailed,
    PrefillProgress,
    Registration,
    Release,
    TransferStarted,
    Wanted,
)

LEASE_S, MAX_WRITE_S = 1.5, 2.0
REQUEST = "d"


@dataclass
class State:
    """See the module's docstring.

    Attributes:
        may: what can still happen, once each.
        wire: messages under way, which may be lost and overtake each other; ``local`` may only overtake.
        writes: attempt, when it was posted, and by which incarnation.
    """

    steps_of_time: int
    may: set[str]
    hint: str
    now: float = 0.0
    incarnation: int = 1
    first_pulse_at: float = 0.0
    wire: list[tuple[str, Any]] = field(default_factory=list)
    local: list[tuple[str, Any]] = field(default_factory=list)
    writes: list[tuple[int, float, int]] = field(default_factory=list)
    attempt: int = 0
    aborted: bool = False
    given_back: set[int] = field(default_factory=set)
    landed: set[int] = field(default_factory=set)
    completed: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        lease = SinkLease(LEASE_S, MAX_WRITE_S)
        self.registrar = Registrar(lease=lease, patience_s=3.0, transfer_timeout_s=6.0, cancel_timeout_s=0.5)
        self.matcher = self.new_matcher()
        self.at_sink(self.matcher.pulse(0.0))
        self.begin()

    def begin(self) -> None:
        self.register()

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

    def choices(self) -> Iterator[tuple[str, Callable[[State], None]]]:
        """Everything that can happen next."""
        for number, item in enumerate(self.wire):
            if item in self.wire[:number]:
                continue
            yield f"deliver {item}", lambda s, n=number: s.deliver(s.wire, n)
            if "lose" in self.may:
                yield f"lose {item}", lambda s, n=number: s.lose(n)
        for number, item in enumerate(self.local):
            yield f"deliver {item}", lambda s, n=number: s.deliver(s.local, n)
        for number in range(len(self.writes)):
            yield "land", lambda s, n=number: s.land(n)
        if f"complete {self.incarnation}" in self.may:
            yield "complete", State.complete
        if "abort" in self.may and not self.aborted:
            yield "abort", State.abort
        if "again" in self.may and self.attempt == 1 and not self.aborted and not self.landed:
            if self.given_back:
                yield "register again", State.register_again
            elif "rebind" in self.may:
                yield "rebind", State.rebind
        if "restart" in self.may:
            yield "restart", State.restart
        if self.steps_of_time and (at := self.next_time()) is not None:
            yield f"time {at:.2f}", lambda s: s.advance(at)

    def next_time(self) -> float | None:
        """The next moment at which something is due; a WRITE must have landed before it is overdue."""
        if any(posted + MAX_WRITE_S <= self.now for _, posted, _ in self.writes):
            return None
        pulse = max(self.now + 0.5, self.first_pulse_at)
        due = [self.matcher.next_deadline(), self.registrar.next_deadline(), pulse]
        due += [posted + MAX_WRITE_S for _, posted, _ in self.writes]
        return min(at for at in due if at is not None)

    def advance(self, at: float) -> None:
        self.steps_of_time -= 1
        pulse = max(self.now + 0.5, self.first_pulse_at)
        self.now = max(at, self.now)
        if self.now >= pulse and len(self.registrar):
            self.wire.append(("D", self.matcher.pulse(self.now)))
        self.source(self.matcher.tick(self.now))
        self.sink(self.registrar.tick(self.now))

    def deliver(self, queue: list[tuple[str, Any]], number: int) -> None:
        to, message = queue.pop(number)
        (self.at_source if to == "P" else self.at_sink)(message)

    def lose(self, number: int) -> None:
        self.may.discard("lose")
        self.wire.pop(number)

    def register(self) -> None:
        self.attempt += 1
        blocks = (((4 + self.attempt, 1),),)
        self.at_sink(Register(Registration("t", self.attempt, "D", 1, REQUEST, blocks, 32), self.hint))

    def rebind(self) -> None:
        self.may.discard("rebind")
        self.at_sink(Rebound(REQUEST, 2, "P"))

    def register_again(self) -> None:
        """vLLM was told that the first attempt is over, and has allocated other blocks."""
        self.may.discard("again")
        self.register()

    def complete(self) -> None:
        """The prefill is done: on the bus, and surely in the next step."""
        self.may.discard(f"complete {self.incarnation}")
        request_id = f"p{self.incarnation}"
        completed = PrefillCompleted("t", "P", self.incarnation, request_id, (((0, 1),),), 32)
        self.completed.append(request_id)
        self.at_source(completed)

    def abort(self) -> None:
        self.may.discard("abort")
        self.aborted = True
        if self.attempt not in self.given_back | self.landed:
            self.at_sink(Aborted(REQUEST))

    def restart(self) -> None:
        """Killed, and started again: its WRITEs still land, what it knew is gone."""
        self.may.discard("restart")
        self.incarnation += 1
        self.first_pulse_at = self.now + term_s(LEASE_S, MAX_WRITE_S)
        self.matcher = self.new_matcher()
        self.completed.clear()
        self.released.clear()
        self.local = [(to, message) for to, message in self.local if to == "D"]
        self.wire.append(("D", SourceLeft("P", self.incarnation - 1)))

    def land(self, number: int) -> None:
        attempt, _, incarnation = self.writes.pop(number)
        assert attempt not in self.given_back, "a WRITE landed in blocks that changed owner"
        assert attempt not in self.landed, "a WRITE landed in blocks that are in use"
        self.landed.add(attempt)
        self.at_sink(Received(REQUEST))
        self.local.append(("D", FirstToken(REQUEST)))
        if incarnation == self.incarnation:
            self.local.append(("P", WriteEnded("t", attempt, 1)))

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
                    self.writes.append((job.attempt, self.now, self.incarnation))
                case ReleaseBlocks(request_id):
                    assert request_id not in self.released, "released twice"
                    assert all(incarnation != self.incarnation for *_, incarnation in self.writes), (
                        "released under a WRITE"
                    )
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
                case Echo(engine, echoes, epoch):
                    self.wire.append((engine, LeaseEcho("D", 1, echoes, epoch)))
                case Abandon():
                    assert self.attempt not in self.given_back, "given back twice"
                    assert self.attempt not in self.landed, "given back after it was reported"
                    self.given_back.add(self.attempt)

    @property
    def quiet(self) -> bool:
        return not (self.wire or self.local or self.writes)

    def play_to_the_end(self) -> None:
        """The plain order, and then what must hold."""
        for _ in range(200):
            while not self.quiet:
                if self.wire:
                    self.deliver(self.wire, 0)
                elif self.local:
                    self.deliver(self.local, 0)
                else:
                    self.land(0)
            if not len(self.registrar) and not self.matcher.counts["transfers"]:
                break
            at = self.next_time()
            assert at is not None
            self.advance(at)
        assert len(self.registrar) == 0, "the receive never ended"
        for attempt in range(1, self.attempt + 1):
            assert (attempt in self.given_back) != (attempt in self.landed), f"attempt {attempt} has no end, or two"
        assert self.released == self.completed, "blocks leaked"


@dataclass
class History(State):
    """The source is a decode engine that may have the prompt's beginning, the sink a prefill engine that asks for it.

    Attributes:
        asks: the sink waits for an offer.
        dead: the sink was killed.
    """

    asks: bool = True
    dead: bool = False

    def begin(self) -> None:
        self.wire.append(("P", Wanted("t", 1, "D", 1, REQUEST)))

    def choices(self) -> Iterator[tuple[str, Callable[[State], None]]]:
        yield from super().choices()
        if "nothing" in self.may and "complete 1" in self.may and self.incarnation == 1:
            yield "nothing is cached", History.say_nothing
        if "withdraw" in self.may and self.completed:
            yield "withdraw", History.withdraw
        if "die" in self.may:
            yield "die", History.die
        if self.asks:
            yield "too late", History.decline

    def say_nothing(self) -> None:
        self.may.discard("complete 1")
        self.at_source(PrefillFailed("t", "P", 1, "p1", "nothing is cached"))

    def withdraw(self) -> None:
        """The source's own receive is over."""
        self.may.discard("withdraw")
        self.at_source(Released(Release("t", 1, "P", "P", self.incarnation, "nobody waits for it")))

    def die(self) -> None:
        """Killed: nothing is said any more, and what was posted still lands."""
        self.may -= {"die", "abort"}
        self.asks, self.dead = False, True
        self.registrar = Registrar()
        self.local = [(to, message) for to, message in self.local if to == "P"]
        self.wire = [(to, message) for to, message in self.wire if to == "P"] + [("P", SinkLeft("D", 1))]

    def decline(self) -> None:
        self.asks = False
        self.wire.append(("P", Cancel("t", 1, "D", 1, REQUEST, "too late")))

    def abort(self) -> None:
        if not self.asks:
            super().abort()
            return
        self.may.discard("abort")
        self.decline()

    def land(self, number: int) -> None:
        if not self.dead:
            super().land(number)
            return
        attempt, _, incarnation = self.writes.pop(number)
        if incarnation == self.incarnation:
            self.local.append(("P", WriteEnded("t", attempt, 1)))

    def at_sink(self, event: Any) -> None:
        if self.dead:
            return
        if not isinstance(event, PrefillCompleted | PrefillFailed):
            super().at_sink(event)
        elif self.asks and isinstance(event, PrefillFailed):
            self.decline()
        elif self.asks:
            self.asks = False
            self.register()

    def play_to_the_end(self) -> None:
        if self.asks:
            self.decline()  # it waits for milliseconds
        if self.dead:
            self.attempt = 0  # nobody waits for its end
        super().play_to_the_end()


@dataclass
class Tail(State):
    """The decode engine computes the prompt itself; the prefill may be stopped, or be over."""

    def begin(self) -> None:
        self.at_source(PrefillProgress("t", "P", 1, "p1", 0, 32))
        cancel = Cancel("t", 1, "D", 1, REQUEST, "a short tail", local_tokens=2)
        self.wire.append(("P", cancel if self.hint else PooledCancel(cancel)))

    def choices(self) -> Iterator[tuple[str, Callable[[State], None]]]:
        yield from super().choices()
        if "stop" in self.may and f"complete {self.incarnation}" in self.may:
            yield "stop", Tail.stop

    def stop(self) -> None:
        self.may -= {"stop", f"complete {self.incarnation}"}
        self.at_source(PrefillFailed("t", "P", self.incarnation, f"p{self.incarnation}", "aborted"))

    def source(self, effects: list[Any]) -> None:
        assert not any(isinstance(effect, PostWrite) for effect in effects), "a WRITE that nobody asked for"
        super().source(effects)


_MESSAGES: list[Any] = []


def message_of(number: int) -> Any:
    return _MESSAGES[number]


def leaves(kind: type[Any]) -> list[type[Any]]:
    below = kind.__subclasses__()
    return [leaf for each in below for leaf in leaves(each)] if below else [kind]


class Freezer:
    """States as bytes: equal bytes have the same future. Messages never change, so each is kept once.

    Args:
        kind: of all states.
    """

    def __init__(self, kind: type[State]) -> None:
        self._kind = kind
        self._known: dict[Any, int] = {}
        kinds = [*leaves(Message), PooledRegistration, PooledCancel, WriteEnded, SourceLeft, SinkLeft, FirstToken]
        self._reducers = dict.fromkeys(kinds, self._reduce)

    def freeze(self, state: State) -> bytes:
        state.wire.sort(key=self._order)  # in what order they were sent does not matter
        state.local.sort(key=self._order)
        target = io.BytesIO()
        pickler = pickle.Pickler(target, protocol=5)
        pickler.dispatch_table = self._reducers
        pickler.dump([sorted(value) if isinstance(value, set) else value for value in vars(state).values()])
        return target.getvalue()

    def thaw(self, data: bytes) -> State:
        state = self._kind.__new__(self._kind)
        names = [*self._kind.__dataclass_fields__, "registrar", "matcher"]
        vars(state).update(zip(names, pickle.loads(data), strict=True))
        for name in ("may", "given_back", "landed"):
            setattr(state, name, set(getattr(state, name)))
        return state

    def _reduce(self, obj: Any) -> tuple[Any, ...]:
        return message_of, (self._number(obj),)

    def _order(self, item: tuple[str, Any]) -> tuple[str, int]:
        return item[0], self._number(item[1])

    def _number(self, obj: Any) -> int:
        number = self._known.setdefault(obj, len(_MESSAGES))
        if number == len(_MESSAGES):
            _MESSAGES.append(obj)
        return number


def explore(start: State, limit: int) -> int:
    """Try everything; returns how many different states there were."""
    freezer = Freezer(type(start))
    paths: list[tuple[int, str]] = [(-1, "")]
    seen: set[bytes] = set()
    todo: list[tuple[bytes, int]] = [(freezer.freeze(start), 0)]
    while todo:
        frozen, here = todo.pop()
        state = freezer.thaw(frozen)
        name = ""
        try:
            for name, do in state.choices():
                after = freezer.thaw(frozen)
                do(after)
                ice = freezer.freeze(after)
                digest = hashlib.blake2b(ice, digest_size=12).digest()
                if digest not in seen:
                    seen.add(digest)
                    assert len(seen) <= limit, "more states than this case is meant to have"
                    paths.append((here, name))
                    todo.append((ice, len(paths) - 1))
            if state.quiet:  # any other one has a successor that is nearer to it
                name = "and then to the end"
                state.play_to_the_end()
        except AssertionError as error:
            raise AssertionError("\n".join([f"{error}, after:", *trail(paths, here), name])) from error
    return len(seen)


def trail(paths: list[tuple[int, str]], at: int) -> list[str]:
    names: list[str] = []
    while at >= 0:
        at, name = paths[at]
        names.append(name)
    return names[::-1]


COMPLETE = {"complete 1"}
BOTH = {"complete 1", "complete 2"}
AGAIN = {"rebind", "again"}
CASES: dict[str, tuple[set[str], int]] = {
    "abort": (COMPLETE | {"abort"}, 1),
    "abort-lose": (COMPLETE | {"abort", "lose"}, 1),
    "restart-lose": (BOTH | {"restart", "lose"}, 1),
    "again-lose": (COMPLETE | AGAIN | {"lose"}, 1),
}
DEEP = {
    "abort-2": (COMPLETE | {"abort"}, 2),
    "abort-restart": (BOTH | {"abort", "restart"}, 1),
    "again-2": (COMPLETE | AGAIN, 2),
    "again-restart": (BOTH | AGAIN | {"restart"}, 1),
    "again-abort": (COMPLETE | AGAIN | {"abort"}, 1),
    "all-0": (BOTH | AGAIN | {"abort", "restart", "lose"}, 0),
    "all": (BOTH | AGAIN | {"abort", "restart", "lose"}, 1),
}
if os.environ.get("KVBUS_SEARCH") == "deep":
    CASES |= DEEP


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("hint", ["P", ""], ids=["hint", "pool"])
@pytest.mark.parametrize("case", CASES)
def test_no_interleaving_breaks_a_law(case: str, hint: str) -> None:
    may, steps = CASES[case]
    states = explore(State(steps, set(may), hint), limit=20_000_000)
    print(f"{case}: {states} states")
    assert states > 100


HISTORIES = {
    "lose": (COMPLETE | {"nothing", "withdraw", "abort", "lose"}, 0),
    "time": (COMPLETE | {"withdraw", "abort"}, 1),
    "restart": (COMPLETE | {"withdraw", "restart"}, 1),
    "die": (COMPLETE | {"withdraw", "die"}, 1),
}
if os.environ.get("KVBUS_SEARCH") == "deep":
    HISTORIES["all"] = (COMPLETE | {"nothing", "withdraw", "abort", "restart", "die", "lose"}, 1)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("case", HISTORIES)
def test_no_interleaving_of_a_history_breaks_a_law(case: str) -> None:
    may, steps = HISTORIES[case]
    states = explore(History(steps, set(may), "P"), limit=20_000_000)
    print(f"{case}: {states} states")
    assert states > 100


@pytest.mark.slow
@pytest.mark.parametrize("hint", ["P", ""], ids=["hint", "pool"])
def test_no_interleaving_of_a_short_tail_breaks_a_law(hint: str) -> None:
    states = explore(Tail(2, BOTH | {"stop", "restart", "lose"}, hint), limit=1_000_000)
    print(f"{states} states")
    assert states > 100


def withdraw_under_a_write(self: Any, word: Released) -> Any:
    transfer = self._transfers.get(word.transfer_id)
    return [] if transfer is None else self._transfers.end(word.transfer_id, transfer, Outcome.CANCELLED)


def give_back_at_once(self: Any, receive: Any, reason: str, now: float) -> Any:
    self._receives.remove(receive.request_id)
    return [Abandon(receive.request_id, reason)]


def keep_a_late_offer(self: Any, completion: Any, now: float) -> Any:
    late = self._transfers.ending(completion.transfer_id) is not None
    return [] if late else COMPLETED(self, completion, now)


COMPLETED = Prefills.complete
BROKEN: dict[str, tuple[Any, str, Any]] = {
    "released under a WRITE": (Registrations, "release_unserved", withdraw_under_a_write),
    "a WRITE landed in blocks that changed owner": (GiveBack, "cancel", give_back_at_once),
    "blocks leaked": (Prefills, "complete", keep_a_late_offer),
}


@pytest.mark.parametrize("law", BROKEN)
def test_a_broken_rule_of_history_is_found(law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*BROKEN[law])
    with pytest.raises(AssertionError, match=law):
        explore(History(0, COMPLETE | {"withdraw", "abort"}, "P"), limit=100_000)
