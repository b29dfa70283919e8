"""The registrar: a decode engine's registrations, from allocation until vLLM may have the blocks back.

The one rule: a registration ends in :class:`Abandon` only when every prefill rank that may write into it has said done,
failed or cancel-acknowledged, or its write lease has certainly run out. Until then the blocks may still be written.

Pure; times are seconds on a monotonic clock. Called by :class:`kvbus.engine.decode_scheduler.SinkScheduler` only.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from kvbus.bounded import BoundedDict, Deadlines
from kvbus.protocol import SinkLease
from kvbus.protocol.decode.patience import LONG_STEP_S, NEVER_SEEN, PATIENCE_S, UNCLAIMED_S, unknown_at
from kvbus.wire import (
    Cancel,
    CancelAck,
    Delivered,
    Echoes,
    Heartbeat,
    Pulse,
    Registration,
    RegistrationAck,
    TransferDone,
    TransferFailed,
    TransferStarted,
)

FIRST_RESEND_S = 0.25
MAX_RESEND_S = 2.0
# Nothing but the answer to it brings back word of a failure that was lost while the prefill engine lives on.
HELD_RESEND_S = 5.0
BUS_PATIENCE_S = 1.0
MAX_RECEIVED = 1 << 14


@dataclass(frozen=True, slots=True)
class Register:
    """Blocks are allocated; ``hint`` is the prefill engine's id if it is known, else empty."""

    registration: Registration
    hint: str


@dataclass(frozen=True, slots=True)
class Received:
    """vLLM has taken the receive as finished: nothing is left to do."""

    request_id: str


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first token of a received request is out, or the request is over: its KV will not be asked for again."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Rebound:
    """The router has given this request to the prefill engine ``engine``, or to none: the present attempt is to end."""

    request_id: str
    attempt: int
    engine: str


@dataclass(frozen=True, slots=True)
class Aborted:
    """vLLM has dropped the request; its blocks stay until :class:`Abandon`."""

    request_id: str


@dataclass(frozen=True, slots=True)
class SourceLeft:
    """This incarnation of a prefill engine is gone: it will answer nothing any more."""

    engine: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class BusLost:
    """The bus is away: nobody can be asked, and no lease is renewed."""


@dataclass(frozen=True, slots=True)
class BusBack:
    """The bus is connected again: whatever was published meanwhile is lost."""


FromSource = RegistrationAck | CancelAck | TransferStarted | TransferDone | TransferFailed
Event = (
    Register
    | Received
    | FirstToken
    | Rebound
    | Aborted
    | SourceLeft
    | BusLost
    | BusBack
    | Heartbeat
    | Pulse
    | FromSource
)


@dataclass(frozen=True, slots=True)
class Publish:
    """Publish to the prefill engine ``engine``, or to the pool if it is empty."""

    engine: str
    message: Registration | Cancel | Delivered


@dataclass(frozen=True, slots=True)
class Echo:
    """Publish these echoes to the ranks of the prefill engine ``engine``."""

    engine: str
    echoes: Echoes
    epoch: int


@dataclass(frozen=True, slots=True)
class Abandon:
    """Nothing is written into this request's blocks any more, and its KV is not (all) here."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Reject:
    """The event changed nothing."""

    reason: str


Effect = Publish | Echo | Abandon | Reject


class Phase(Enum):
    REGISTERED = "registered"  # sent, and sent again until every rank has acknowledged
    HELD = "held"  # by every rank of one prefill engine; sent again, rarely
    CANCELLING = "cancelling"  # the blocks wait for the ranks that may still write to say that they will not
    FENCING = "fencing"  # nobody answers: the blocks wait until every write lease has run out


_GIVING_UP = (Phase.CANCELLING, Phase.FENCING)


@dataclass(slots=True)
class _Receive:
    registration: Registration
    engine: str
    registered_at: float
    patience_until: float
    give_up_at: float
    phase: Phase = Phase.REGISTERED
    incarnation: int = 0
    sent_to: int = 0  # the incarnation that was last given the right to write
    ranks: int = 0
    acknowledged: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    claimed: bool = False
    resend_s: float = FIRST_RESEND_S
    resend_at: float = 0.0
    reason: str = ""
    release: bool = True  # by the cancel: the prefill engine may free its blocks


class Registrar:
    """The table of registrations of one decode engine; see the module's docstring.

    Args:
        lease: what this engine heard of prefill ranks and echoed.
        unclaimed_s: how long a registration waits for a prefill engine to say that it has the request, seconds. A
            request is announced when it arrives, however long it is queued then: see
            :mod:`kvbus.protocol.decode.patience`.
        patience_s: how long it waits for a sign of life from a prefill engine that has the request, seconds.
        transfer_timeout_s: the longest any registration waits, seconds.
        cancel_timeout_s: how long a cancel waits for its acknowledgement before the lease decides, seconds.
    """

    def __init__(
        self,
        *,
        lease: SinkLease | None = None,
        unclaimed_s: float = UNCLAIMED_S,
        patience_s: float = PATIENCE_S,
        transfer_timeout_s: float = 600.0,
        cancel_timeout_s: float = 2.0,
    ) -> None:
        self._lease = lease or SinkLease()
        self._bus_up = True
        self._epoch = 0
        self._unclaimed_s = min(unclaimed_s, patience_s)
        self._patience_s, self._transfer_timeout_s = patience_s, transfer_timeout_s
        self._cancel_timeout_s = cancel_timeout_s
        self._receives: dict[str, _Receive] = {}
        self._by_transfer: dict[str, str] = {}
        self._by_engine: dict[str, dict[str, _Receive]] = {}  # what a heartbeat or pulse of this engine is about
        self._received: BoundedDict[str, _Receive] = BoundedDict(MAX_RECEIVED)
        self._timers: Deadlines[str] = Deadlines()

    def __len__(self) -> int:
        return len(self._receives)

    def next_deadline(self) -> float | None:
        return self._timers.next()

    def apply(self, event: Event, now: float) -> list[Effect]:
        """Apply one event; the only way, with :meth:`tick`, that this table changes."""
        match event:
            case Register():
                return self._register(event, now)
            case Received(request_id):
                if (receive := self._receives.get(request_id)) is not None:
                    self._received[request_id] = receive
                return self._forget(request_id)
            case FirstToken(request_id):
                return self._deliver(request_id)
            case Rebound():
                return self._rebind(event, now)
            case Aborted(request_id):
                receive = self._receives.get(request_id)
                return self._cancel(receive, "aborted", now) if receive else [Reject("abort of unknown request")]
            case SourceLeft():
                return self._source_left(event, now)
            case Pulse():
                return self._hear_pulse(event, now)
            case Heartbeat():
                return self._heartbeat(event, now)
            case BusLost():
                return self._lose_bus(now)
            case BusBack():
                return self._regain_bus(now)
            case _:
                receive = self._receives.get(self._by_transfer.get(event.transfer_id, ""))
                if receive is None:
                    return [Reject("unknown transfer")]
                return self._from_source(event, receive, now)

    def tick(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for request_id in self._timers.pop_due(now):
            receive = self._receives[request_id]
            if receive.phase is Phase.FENCING:
                effects += self._fence(receive, now)
            elif not self._bus_up:
                receive.reason = receive.reason or "the bus is away"
                effects += self._begin_fence(receive, now)
            elif now < min(receive.patience_until, receive.give_up_at):
                if now >= receive.resend_at:
                    effects.append(self._publish(receive, now))
                self._arm(receive)
            elif receive.phase is Phase.CANCELLING:
                effects += self._begin_fence(receive, now)
            else:
                effects += self._cancel(receive, self._why_late(receive), now)
        return effects

    def _lose_bus(self, now: float) -> list[Effect]:
        self._bus_up = False
        for receive in self._receives.values():
            if receive.phase is not Phase.FENCING:
                self._timers.set(receive.registration.request_id, now + BUS_PATIENCE_S)
        return []

    def _regain_bus(self, now: float) -> list[Effect]:
        self._bus_up = True
        effects: list[Effect] = []
        for receive in self._receives.values():
            if receive.phase is not Phase.FENCING:
                effects.append(self._publish(receive, now))
                self._arm(receive)
        return effects

    def _register(self, event: Register, now: float) -> list[Effect]:
        registration = event.registration
        if registration.request_id in self._receives or registration.transfer_id in self._by_transfer:
            return [Abandon(registration.request_id, "transfer id in use")]
        receive = _Receive(
            registration,
            event.hint,
            registered_at=now,
            patience_until=now + self._unclaimed_s,
            give_up_at=now + self._transfer_timeout_s,
        )
        self._receives[registration.request_id] = receive
        self._by_engine.setdefault(receive.engine, {})[registration.request_id] = receive
        self._by_transfer[registration.transfer_id] = registration.request_id
        effects: list[Effect] = [self._publish(receive, now)]
        self._arm(receive)
        return effects

    def _from_source(self, event: FromSource, receive: _Receive, now: float) -> list[Effect]:
        if event.request_id != receive.registration.request_id:
            return [Reject("another request")]
        if event.attempt != receive.registration.attempt:
            return [Reject("another attempt")]
        if receive.ranks and event.source_engine != receive.engine:
            return [Reject("another prefill engine")]
        if receive.ranks and event.source_incarnation != receive.incarnation:
            return [Reject("another incarnation")]
        if not 0 <= event.rank < event.ranks or (receive.ranks and event.ranks != receive.ranks):
            return [Reject("bad rank")]
        self._bind(receive, event.source_engine)
        receive.incarnation, receive.ranks = event.source_incarnation, event.ranks
        receive.acknowledged.add(event.rank)
        effects: list[Effect] = []
        match event:
            case RegistrationAck(refused=reason) if reason:
                receive.ended.add(event.rank)
                effects += self._cancel(receive, f"refused: {reason}", now)
            case RegistrationAck(claimed=claimed):
                if claimed and not receive.claimed:
                    receive.resend_at = max(receive.resend_at, now + HELD_RESEND_S)
                receive.claimed = receive.claimed or claimed
            case TransferStarted():
                receive.claimed = True
            case TransferFailed(reason=reason):
                receive.ended.add(event.rank)
                effects += self._cancel(receive, reason, now)
                if len(receive.ended) == receive.ranks:  # its KV is still kept: see Matcher
                    effects.append(self._publish(receive, now))
            case TransferDone() | CancelAck():
                receive.ended.add(event.rank)
        if receive.claimed:
            receive.patience_until = max(receive.patience_until, now + self._patience_s)
        if receive.phase is Phase.REGISTERED and receive.sent_to != receive.incarnation:
            effects.append(self._publish(receive, now))  # to this very incarnation: only that lets it write
        if receive.phase is Phase.REGISTERED and len(receive.acknowledged) == receive.ranks:
            receive.phase = Phase.HELD
            receive.resend_at = now + _held_resend_s(receive)
        if receive.registration.request_id not in self._receives:
            return effects
        if receive.phase in _GIVING_UP and len(receive.ended) == receive.ranks:
            return [*effects, *self._fence(receive, now)]
        if receive.phase is not Phase.FENCING:
            self._arm(receive)
        return effects

    def _heartbeat(self, heartbeat: Heartbeat, now: float) -> list[Effect]:
        """A prefill engine that lives and knows of the request may take its time; so may one that cannot know yet."""
        for receive in self._by_engine.get(heartbeat.engine, {}).values():
            if receive.claimed and receive.phase is Phase.HELD:
                receive.patience_until = max(receive.patience_until, now + self._patience_s)
        if heartbeat.step_s > LONG_STEP_S:
            for engine in (heartbeat.engine, ""):  # to the pool it may have been sent as well
                for receive in self._by_engine.get(engine, {}).values():
                    if not receive.claimed and receive.phase not in _GIVING_UP:
                        until = unknown_at(receive.registered_at, now, self._unclaimed_s, self._patience_s)
                        receive.patience_until = max(receive.patience_until, until)
        return []

    def _hear_pulse(self, pulse: Pulse, now: float) -> list[Effect]:
        """Remember it, and echo it if this rank may have something to write for us."""
        self._lease.hear((pulse.source_engine, pulse.source_incarnation, pulse.rank), pulse.number, now)
        engine = pulse.source_engine
        wanted = self._by_engine.get(engine) and not self._is_silenced(engine)
        echoes = self._lease.echo(engine) if wanted else ()
        return [Echo(pulse.source_engine, echoes, self._epoch)] if echoes else []

    def _source_left(self, left: SourceLeft, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for receive in list(self._by_engine.get(left.engine, {}).values()):
            if receive.incarnation > left.incarnation:
                continue
            if receive.phase is not Phase.FENCING:
                receive.reason = receive.reason or "prefill engine left"
                effects += self._begin_fence(receive, now)
        self._lease.forget(left.engine, left.incarnation, now)
        return effects

    def _cancel(self, receive: _Receive, reason: str, now: float) -> list[Effect]:
        if receive.phase in _GIVING_UP:
            return []
        receive.phase, receive.reason = Phase.CANCELLING, reason
        receive.patience_until = now + self._cancel_timeout_s
        receive.give_up_at = receive.patience_until
        receive.resend_s = FIRST_RESEND_S
        if receive.ranks and len(receive.ended) == receive.ranks:
            return self._fence(receive, now)
        effects: list[Effect] = [self._publish(receive, now)]
        self._arm(receive)
        return effects

    def _rebind(self, rebound: Rebound, now: float) -> list[Effect]:
        receive, engine = self._receives.get(rebound.request_id), rebound.engine
        if receive is None:
            return [Reject("unknown request")]
        if receive.registration.attempt >= rebound.attempt:
            return [Reject("stale attempt")]  # vLLM was faster: this is the attempt that it asked for
        if receive.phase in _GIVING_UP:
            return []
        # To the pool a release would reach the new prefill engine, too.
        receive.release = receive.engine not in ("", engine)
        return self._cancel(receive, f"its prefill is given to {engine or 'nobody'}", now)

    def _deliver(self, request_id: str) -> list[Effect]:
        receive = self._received.pop(request_id, None)
        if receive is None or not receive.engine:
            return []
        registration = receive.registration
        delivered = Delivered(
            registration.transfer_id,
            registration.attempt,
            registration.sink_engine,
            registration.sink_incarnation,
            request_id,
        )
        return [Publish(receive.engine, delivered)]

    def _begin_fence(self, receive: _Receive, now: float) -> list[Effect]:
        """Nobody answers: stop echoing to whoever may write here, and wait until their leases have run out."""
        receive.phase = Phase.FENCING
        return self._fence(receive, now)

    def _fence(self, receive: _Receive, now: float) -> list[Effect]:
        """Give up if no rank can be writing here: ranks that answered, and those whose lease has run out, cannot."""
        # To the pool no right to write is given: only a registration sent to an engine itself is one.
        safe_at = self._lease.safe_at(receive.engine, receive.incarnation, receive.ended) if receive.engine else now
        if now < safe_at:
            receive.phase = Phase.FENCING
            self._timers.set(receive.registration.request_id, safe_at)
            return []
        if receive.ranks and len(receive.ended) == receive.ranks:
            return self._abandon(receive, receive.reason)
        self._epoch += 1  # whoever still holds this registration shall forget it before it may write again
        given_up = self._abandon(receive, f"{receive.reason}; unanswered, fenced by the write lease")
        return given_up + [self._publish(live, now) for live in self._receives.values() if live.phase not in _GIVING_UP]

    def _is_silenced(self, engine: str) -> bool:
        """Whether this engine gets no echo, because a receive waits for its lease to run out."""
        return any(receive.phase is Phase.FENCING for receive in self._by_engine.get(engine, {}).values())

    def _bind(self, receive: _Receive, engine: str) -> None:
        """This prefill engine has answered for it."""
        if engine == receive.engine:
            return
        request_id = receive.registration.request_id
        self._leave_engine(receive.engine, request_id)
        receive.engine = engine
        self._by_engine.setdefault(engine, {})[request_id] = receive

    def _leave_engine(self, engine: str, request_id: str) -> None:
        receives = self._by_engine[engine]
        del receives[request_id]
        if not receives:
            del self._by_engine[engine]

    def _abandon(self, receive: _Receive, reason: str) -> list[Effect]:
        self._forget(receive.registration.request_id)
        return [Abandon(receive.registration.request_id, reason)]

    def _forget(self, request_id: str) -> list[Effect]:
        receive = self._receives.pop(request_id, None)
        if receive is None:
            return [Reject("unknown request")]
        del self._by_transfer[receive.registration.transfer_id]
        self._leave_engine(receive.engine, request_id)
        self._timers.drop(request_id)
        return []

    def _publish(self, receive: _Receive, now: float) -> Publish:
        if receive.phase is Phase.HELD:
            receive.resend_at = now + _held_resend_s(receive)
        else:
            receive.resend_at = now + receive.resend_s
            receive.resend_s = min(2 * receive.resend_s, MAX_RESEND_S)
        registration = receive.registration
        if receive.phase not in _GIVING_UP:
            if not receive.engine:
                return Publish("", replace(registration, epoch=self._epoch))
            receive.sent_to = receive.incarnation or self._lease.incarnation(receive.engine)
            echoes = () if self._is_silenced(receive.engine) else self._lease.echo(receive.engine)
            sent = replace(registration, source_incarnation=receive.sent_to, echoes=echoes, epoch=self._epoch)
            return Publish(receive.engine, sent)
        cancel = Cancel(
            registration.transfer_id,
            registration.attempt,
            registration.sink_engine,
            registration.sink_incarnation,
            registration.request_id,
            reason=receive.reason[:256],
            release=receive.release,
        )
        return Publish(receive.engine, cancel)

    def _arm(self, receive: _Receive) -> None:
        at = min(receive.patience_until, receive.give_up_at, receive.resend_at)
        self._timers.set(receive.registration.request_id, at)

    @staticmethod
    def _why_late(receive: _Receive) -> str:
        if not receive.engine:
            return NEVER_SEEN
        if not receive.acknowledged:
            return "no prefill engine acknowledged the registration"
        if not receive.claimed:
            return "the prefill engine never saw the request"
        return "no sign of life from the prefill engine"


def _held_resend_s(receive: _Receive) -> float:
    """Word that its request was seen may be lost, and the time for it is short."""
    return HELD_RESEND_S if receive.claimed else MAX_RESEND_S
