"""What each event does in each state of the protocol's two machines, found by driving them, as the tables of docs.

A machine with one transfer is given events in seeded random order at random times, and each step is written down: the
state before, the event, the state after, the kinds of effects. Only public names are used.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from kvbus.protocol import decode, prefill
from kvbus.protocol.decode import Publish, Registrar
from kvbus.protocol.prefill import Matcher, PooledCancel, PooledRegistration, Send, SinkJoined, SinkLeft, SinkRefused
from kvbus.wire import (
    Cancel,
    CancelAck,
    Delivered,
    Heartbeat,
    LeaseEcho,
    PrefillCompleted,
    PrefillFailed,
    PrefillProgress,
    Pulse,
    Registration,
    RegistrationAck,
    Release,
    TransferDone,
    TransferFailed,
    TransferStarted,
    Wanted,
)

NONE = "none"
TICK = "a deadline"
"""The event's name for time that passes."""


@dataclass
class Found:
    """Steps: ``(event, state before)`` to ``state after`` to the kinds of effects that came with it."""

    rows: list[str]
    steps: dict[tuple[str, str], dict[str, set[str]]] = field(default_factory=lambda: defaultdict(dict))

    def note(self, event: str, before: str, state: Callable[[], str], effects: Iterable[Any]) -> None:
        kinds = {kind_of(effect) for effect in effects}
        self.steps[event, before].setdefault(state(), set()).update(kinds or {""})

    def edges(self) -> set[tuple[str, str]]:
        """Every change of state that was seen."""
        return {(before, after) for (_, before), to in self.steps.items() for after in to if after != before}

    def table(self, states: Sequence[str]) -> str:
        """Markdown: a row per event, a column per state before it."""
        lines = [f"| event | {' | '.join(states)} |", f"|---|{'---|' * len(states)}"]
        for event in self.rows:
            cells = " | ".join(self._cell(event, before, states) for before in states)
            lines.append(f"| {event if event == TICK else f'`{event}`'} | {cells} |")
        return "\n".join(lines)

    def _cell(self, event: str, before: str, states: Sequence[str]) -> str:
        to = self.steps.get((event, before), {})
        lines = []
        for after in (state for state in states if state in to):
            effects = ", ".join(sorted(to[after] - {"", "Reject"}))
            if after != before:
                lines.append(f"**{after}**{f': {effects}' if effects else ''}")
            elif effects:
                lines.append(effects)
            elif len(to) == 1:
                lines.append("refused" if to[after] == {"Reject"} else "noted")
        return "<br>".join(lines)


def kind_of(effect: Any) -> str:
    if isinstance(effect, (Send, Publish)):
        return type(effect.message).__name__
    return type(effect).__name__


def matcher_steps(seeds: int) -> Found:
    """Of one transfer in rank 0 of a prefill engine; ``seeds`` short lives of it."""
    found = Found(rows=_names(MATCHER_EVENTS))
    for seed in range(seeds):
        chance = random.Random(seed)
        matcher = Matcher(engine="P", incarnation=5, rank=0, ranks=1, block_lease_s=4.0, pool_hold_s=3.0)

        def renew(now: float, matcher: Matcher = matcher) -> None:
            """P has a write lease of D."""
            matcher.apply(LeaseEcho("D", 7, (("P", 5, 0, matcher.pulse(now).number),)), now)

        start = chance.choice(MATCHER_STARTS)
        _live(chance, matcher, start, MATCHER_EVENTS, renew, lambda matcher=matcher: _stage(matcher), found)
    return found


def registrar_steps(seeds: int) -> Found:
    """Of one receive of a decode engine, from a prefill engine with two ranks; ``seeds`` short lives of it."""
    found = Found(rows=_names(REGISTRAR_EVENTS))
    for seed in range(seeds):
        chance = random.Random(seed)
        registrar = Registrar(patience_s=5.0, transfer_timeout_s=60.0, unclaimed_s=3.0)

        def renew(now: float, registrar: Registrar = registrar) -> None:
            """A pulse of each rank."""
            for rank in (0, 1):
                registrar.apply(Pulse("P", 5, rank, int(now * 100) + 1), now)

        start = chance.choice(REGISTRAR_STARTS)
        _live(chance, registrar, start, REGISTRAR_EVENTS, renew, lambda registrar=registrar: _phase(registrar), found)
    return found


class Machine(Protocol):
    """What the two machines have in common."""

    def apply(self, event: Any, now: float, /) -> Sequence[Any]: ...

    def tick(self, now: float, /) -> Sequence[Any]: ...


def _live(
    chance: random.Random,
    machine: Machine,
    start: Sequence[Any],
    events: Sequence[Any],
    renew: Callable[[float], None],
    state: Callable[[], str],
    found: Found,
) -> None:
    now = 0.0
    renew(now)
    for event in start:
        machine.apply(event, now)
    for _ in range(chance.randrange(1, 6)):
        now += 0.01
        if chance.random() < 0.3:
            renew(now)
        before = state()
        if chance.random() < 0.1:
            now += chance.choice((1.0, 3.2, 700.0))
            found.note(TICK, before, state, machine.tick(now))
        else:
            event = chance.choice(events)
            found.note(type(event).__name__, before, state, machine.apply(event, now))


def _names(events: Iterable[Any]) -> list[str]:
    return [*dict.fromkeys(type(event).__name__ for event in events), TICK]


def _stage(matcher: Matcher) -> str:
    counts = matcher.counts
    return next((name for name in ("writing", "written") if counts[name]), "waiting" if counts["transfers"] else NONE)


def _phase(registrar: Registrar) -> str:
    return next((phase for phase, number in registrar.counts.items() if number), NONE)


SOURCE: dict[str, Any] = {"transfer_id": "t", "source_engine": "P", "source_incarnation": 5}
RANK: dict[str, Any] = {**SOURCE, "attempt": 1, "rank": 0, "ranks": 1, "request_id": "d1"}
JOINED = SinkJoined("D", 7, 64)
POOLED = Registration("t", 1, "D", 7, "d1", (((10, 3),),), 96)
DIRECT = replace(POOLED, source_incarnation=5)
CANCEL = Cancel("t", 1, "D", 7, "d1", "aborted")
KEEP = replace(CANCEL, release=False)
COMPLETED = PrefillCompleted(**SOURCE, request_id="p1", blocks=(((0, 3),),), tokens=96)
FAILED = PrefillFailed(**SOURCE, request_id="p1", reason="aborted")
MATCHER_EVENTS = [
    PrefillProgress(**SOURCE, request_id="p1", computed=0, total=96),
    COMPLETED,
    replace(COMPLETED, request_id="p2", tokens=95),
    FAILED,
    DIRECT,
    replace(DIRECT, attempt=2),
    replace(DIRECT, epoch=1),
    PooledRegistration(POOLED),
    Wanted("t", 1, "D", 7, "d1"),
    CANCEL,
    KEEP,
    replace(KEEP, attempt=2),
    PooledCancel(CANCEL),
    PooledCancel(KEEP),
    prefill.Released(Release("t", 1, "router", "D", 7, "declined")),
    Delivered("t", 1, "D", 7, "d1"),
    Delivered("t", 2, "D", 7, "d1"),
    prefill.WriteEnded("t", 1, 900),
    prefill.WriteEnded("t", 1, failure="lost"),
    prefill.WriteEnded("t", 2, 900),
    JOINED,
    SinkLeft("D", 7),
    SinkRefused("D", 7, "unfit"),
    LeaseEcho("D", 7, (), 1),
    prefill.Drain(),
]
WRITTEN = [JOINED, COMPLETED, DIRECT, prefill.WriteEnded("t", 1, 900)]
MATCHER_STARTS: list[list[Any]] = [
    [],
    [JOINED],
    [DIRECT],
    [JOINED, PooledRegistration(POOLED)],
    [FAILED],
    [JOINED, COMPLETED],
    [COMPLETED, DIRECT],
    WRITTEN[:3],
    WRITTEN[:3],
    WRITTEN,
    WRITTEN,
    [*WRITTEN, Delivered("t", 1, "D", 7, "d1")],
    [*WRITTEN[:3], prefill.WriteEnded("t", 1, failure="lost"), KEEP],
]
REGISTER = [decode.Register(POOLED, "P"), decode.Register(POOLED, "")]


def _of_rank(kind: Any, **more: Any) -> list[Any]:
    return [kind(**{**RANK, "ranks": 2, "rank": rank, **more}) for rank in (0, 1)]


REGISTRAR_EVENTS = [
    *REGISTER,
    *_of_rank(RegistrationAck),
    *_of_rank(RegistrationAck, claimed=True),
    *_of_rank(RegistrationAck, refused="full"),
    *_of_rank(TransferStarted),
    *_of_rank(TransferDone, blocks=3, nbytes=900),
    *_of_rank(TransferFailed, reason="lost"),
    *_of_rank(CancelAck),
    decode.Received("d1"),
    decode.FirstToken("d1"),
    decode.Rebound("d1", 2, "Q"),
    decode.Aborted("d1"),
    decode.SourceLeft("P", 5),
    Pulse("P", 5, 0, 1),
    Heartbeat("P", 5, 1, "prefill", "ready", 2),
    Heartbeat("P", 5, 2, "prefill", "ready", 2, step_s=3.0),
    decode.BusLost(),
    decode.BusBack(),
]
_POOLED, _SENT = [decode.Register(POOLED, "")], [decode.Register(POOLED, "P")]
_HELD = [*_SENT, *_of_rank(RegistrationAck)]
REGISTRAR_STARTS: list[list[Any]] = [
    [],
    _POOLED,
    [*_POOLED, decode.Aborted("d1")],
    _SENT,
    [*_SENT, _of_rank(RegistrationAck)[0]],
    _HELD,
    [*_HELD, *_of_rank(RegistrationAck, claimed=True)],
    [*_HELD, _of_rank(TransferDone, blocks=3, nbytes=900)[0]],
    [*_SENT, decode.Aborted("d1")],
    [*_HELD, decode.Aborted("d1"), _of_rank(CancelAck)[0]],
    [*_HELD, decode.SourceLeft("P", 5)],
    [*_HELD, decode.SourceLeft("P", 5), _of_rank(CancelAck)[0]],
    [*_HELD, decode.Received("d1")],
]
