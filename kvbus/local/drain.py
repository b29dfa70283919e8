"""``kvbus drain ENGINE``: let an engine take nothing new and wait until it has no requests left, or undo that.

The one rule: the last engine of its kind for its model is drained only if the caller forces it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import Enum

from kvbus.bus import Bus, Node
from kvbus.errors import BusUnavailableError, KVBusError
from kvbus.protocol import Membership
from kvbus.wire import DrainReply, DrainRequest, Heartbeat, State, Subjects

FIND_TIMEOUT_S = 5.0
LOOK_ROUND_S = 0.6  # long enough for every engine to answer, or to send its next heartbeat
ASK_TIMEOUT_S = 2.0
TAKE_BACK_S = 5.0
SAY_INTERVAL_S = 2.0

Say = Callable[[str], None]


class Outcome(Enum):
    """How it ended, with the command's exit status."""

    DRAINED = "drained", 0
    LEFT = "left", 0
    TAKEN_BACK = "ready", 0
    FAILED = "failed", 1
    LAST = "last", 3
    NOT_EMPTY = "not empty", 4

    def __init__(self, word: str, status: int) -> None:
        self.word, self.status = word, status


class DrainError(KVBusError):
    """The engine could not be drained, or taken back; the message says why."""

    def __init__(self, why: str, outcome: Outcome = Outcome.FAILED, report: Report | None = None) -> None:
        self.outcome, self.report = outcome, report
        super().__init__(f"kvbus: {why}")


@dataclass(frozen=True, slots=True)
class Report:
    """How things stand: the engine's requests, and which other engines of its model are ready."""

    engine: str
    model: str
    requests: int
    prefill_left: list[str] = field(default_factory=list)
    decode_left: list[str] = field(default_factory=list)

    def as_json(self, outcome: Outcome) -> dict[str, object]:
        return {**asdict(self), "outcome": outcome.word}

    def __str__(self) -> str:
        prefill, decode = (", ".join(names) or "none" for names in (self.prefill_left, self.decode_left))
        return f"left for model {self.model}: prefill {prefill}; decode {decode}"


async def drain(
    bus: Bus, subjects: Subjects, engine: str, timeout_s: float, say: Say, *, force: bool = False
) -> tuple[Outcome, Report]:
    """Ask ``engine`` to drain and return when it has no requests, and nobody needs its KV any more.

    Args:
        force: also if it is the last one of its kind.

    Raises:
        DrainError: no such engine, the last one, no answer, or not empty in time.
    """
    node = Node(bus, subjects, name="kvbus-drain", membership=Membership())
    async with node:
        first = await _find(node, engine)
        if not force and first.state is State.READY:
            await asyncio.sleep(LOOK_ROUND_S)
            _guard(node, first)
        await _ask(node, first, DrainRequest(node.me))
        if force:
            await asyncio.sleep(LOOK_ROUND_S)
        say(str(_report(node, first)))
        deadline, said_at = time.monotonic() + timeout_s, 0.0
        while (now := time.monotonic()) < deadline:
            beat = node.membership.get(engine)
            if beat is None or beat.incarnation != first.incarnation:
                say(f"{engine} has left")
                return Outcome.LEFT, _report(node, first)
            if beat.state is State.DRAINING and not beat.requests:
                say(f"{engine} is drained: it has no requests, and nobody needs its KV; it can be stopped")
                return Outcome.DRAINED, _report(node, beat)
            if now - said_at > SAY_INTERVAL_S:
                said_at = now
                say(f"{engine} is draining: {beat.requests} requests left")
            await asyncio.sleep(0.1)
        why = f"engine {engine} is not empty after {timeout_s:.0f} s; it goes on draining"
        raise DrainError(why, Outcome.NOT_EMPTY, _report(node, node.membership.get(engine) or first))


async def take_back(bus: Bus, subjects: Subjects, engine: str, say: Say) -> tuple[Outcome, Report]:
    """Undo a drain: return when ``engine`` says that it takes requests again.

    Raises:
        DrainError: no such engine, no answer, or it goes on draining.
    """
    node = Node(bus, subjects, name="kvbus-drain", membership=Membership())
    async with node:
        first = await _find(node, engine)
        await _ask(node, first, DrainRequest(node.me, undo=True))
        until = time.monotonic() + TAKE_BACK_S
        while (beat := node.membership.get(engine)) is not None and beat.state is State.DRAINING:
            if time.monotonic() > until:
                raise DrainError(f"engine {engine} goes on draining: it is stopping, or older than this command")
            await asyncio.sleep(0.05)
        if beat is None:
            raise DrainError(f"engine {engine} has left")
        say(f"{engine} takes requests again")
        return Outcome.TAKEN_BACK, _report(node, beat)


async def _ask(node: Node, first: Heartbeat, request: DrainRequest) -> None:
    engine = first.engine
    try:
        reply = await node.request(node.subjects.drain(engine, node.me), request, ASK_TIMEOUT_S)
    except BusUnavailableError as error:
        raise DrainError(f"engine {engine} does not answer: {error}") from error
    if not isinstance(reply, DrainReply) or reply.incarnation != first.incarnation:
        raise DrainError(f"engine {engine} is not the one that was heard; try again")


def _guard(node: Node, engine: Heartbeat) -> None:
    """Raise DrainError if it is the last one of its model that is ready."""
    left = _report(node, engine)
    missing = []
    if engine.role.decodes and not left.decode_left:
        missing.append("decode engine: without it every request gets 503")
    if engine.role.prefills and not left.prefill_left:
        missing.append("prefill engine: without it decode engines compute prompts themselves")
    if missing:
        what = f"{engine.engine} is the last ready {' and the last ready '.join(missing)}"
        raise DrainError(f"{what} (model {engine.model}); --force drains it all the same", Outcome.LAST, left)


def _report(node: Node, engine: Heartbeat) -> Report:
    others = [
        peer
        for peer in node.membership.peers(ready=True)
        if peer.model == engine.model and peer.engine != engine.engine
    ]
    return Report(
        engine.engine,
        engine.model,
        engine.requests,
        [peer.engine for peer in others if peer.role.prefills],
        [peer.engine for peer in others if peer.role.decodes],
    )


async def _find(node: Node, engine: str) -> Heartbeat:
    deadline = time.monotonic() + FIND_TIMEOUT_S
    while (beat := node.membership.get(engine)) is None:
        if time.monotonic() > deadline:
            if not node.bus.connected:
                trouble = node.bus.trouble
                raise DrainError(
                    f"the NATS server: {trouble}" if trouble else "no NATS server answers; is --nats-url right?"
                )
            known = ", ".join(peer.engine for peer in node.membership.peers()) or "none"
            raise DrainError(f"no engine {engine!r} is on the bus; engines: {known}")
        await asyncio.sleep(0.05)
    return beat
