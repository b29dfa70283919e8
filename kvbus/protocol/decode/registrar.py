"""The registrar: a decode engine's registrations, from allocation until vLLM may have the blocks back.

The one rule: a registration ends in :class:`Abandon` only as :mod:`kvbus.protocol.decode.give_back` allows.

Pure; times are seconds on a monotonic clock. Called by :class:`kvbus.engine.decode_scheduler.SinkScheduler` only. What
each event does in each phase: ``docs/protocol.md``.
"""

from __future__ import annotations

from kvbus.bounded import BoundedDict
from kvbus.protocol import SinkLease
from kvbus.protocol.decode.events import (
    Abandon,
    Aborted,
    BusBack,
    BusLost,
    Effect,
    Event,
    FirstToken,
    FromSource,
    Publish,
    Rebound,
    Received,
    Register,
    Reject,
    SourceLeft,
)
from kvbus.protocol.decode.give_back import GiveBack
from kvbus.protocol.decode.patience import PATIENCE_S, UNCLAIMED_S, unknown_at
from kvbus.protocol.decode.receives import HELD_RESEND_S, Phase, Receive, Receives, Step
from kvbus.wire import (
    CancelAck,
    Delivered,
    Heartbeat,
    Pulse,
    RegistrationAck,
    TransferDone,
    TransferFailed,
    TransferStarted,
)

BUS_PATIENCE_S = 1.0
MAX_RECEIVED = 1 << 14


class Registrar:
    """The registrations of one decode engine; see the module's docstring.

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
        self._bus_up = True
        self._unclaimed_s = min(unclaimed_s, patience_s)
        self._patience_s, self._transfer_timeout_s = patience_s, transfer_timeout_s
        self._receives = Receives()
        self._give_back = GiveBack(self._receives, lease or SinkLease(), cancel_timeout_s)
        self._received: BoundedDict[str, Receive] = BoundedDict(MAX_RECEIVED)

    def __len__(self) -> int:
        return len(self._receives)

    @property
    def counts(self) -> dict[str, int]:
        """Receives by phase. The tables of ``docs/protocol.md`` are made with it."""
        return self._receives.counts()

    def next_deadline(self) -> float | None:
        return self._receives.next_deadline()

    def apply(self, event: Event, now: float) -> list[Effect]:
        """Apply one event; the only way, with :meth:`tick`, that this table changes."""
        match event:
            case Register():
                return self._register(event, now)
            case Received(request_id):
                return self._receive(request_id)
            case FirstToken(request_id):
                return self._deliver(request_id)
            case Rebound():
                return self._rebind(event, now)
            case Aborted(request_id):
                receive = self._receives.get(request_id)
                if receive is None:
                    return [Reject("abort of unknown request")]
                return self._give_back.cancel(receive, "aborted", now)
            case SourceLeft():
                return self._source_left(event, now)
            case Pulse():
                return self._give_back.hear(event, now)
            case Heartbeat():
                return self._heartbeat(event, now)
            case BusLost():
                return self._lose_bus(now)
            case BusBack():
                return self._regain_bus(now)
            case _:
                receive = self._receives.of_transfer(event.transfer_id)
                return [Reject("unknown transfer")] if receive is None else self._from_source(event, receive, now)

    def tick(self, now: float) -> list[Effect]:
        """Send again what is due, and give up what has waited too long."""
        effects: list[Effect] = []
        for receive in self._receives.due(now):
            if receive.phase is Phase.FENCING:
                effects += self._give_back.fence(receive, now)
            elif not self._bus_up:
                effects += self._give_back.begin_fence(receive, "the bus is away", now)
            elif now < min(receive.patience_until, receive.give_up_at):
                if now >= receive.resend_at:
                    effects.append(self._give_back.publish(receive, now))
                self._receives.wait(receive)
            elif receive.phase is Phase.CANCELLING:
                effects += self._give_back.begin_fence(receive, "", now)
            else:
                effects += self._give_back.cancel(receive, receive.why_late(), now)
        return effects

    def _lose_bus(self, now: float) -> list[Effect]:
        self._bus_up = False
        for receive in self._receives.all():
            if receive.phase is not Phase.FENCING:
                self._receives.wait(receive, now + BUS_PATIENCE_S)
        return []

    def _regain_bus(self, now: float) -> list[Effect]:
        self._bus_up = True
        effects: list[Effect] = []
        for receive in self._receives.all():
            if receive.phase is not Phase.FENCING:
                effects.append(self._give_back.publish(receive, now))
                self._receives.wait(receive)
        return effects

    def _register(self, event: Register, now: float) -> list[Effect]:
        receive = Receive(
            event.registration,
            event.hint,
            registered_at=now,
            patience_until=now + self._unclaimed_s,
            give_up_at=now + self._transfer_timeout_s,
        )
        if not self._receives.add(receive):
            return [Abandon(receive.request_id, "transfer id in use")]
        effects: list[Effect] = [self._give_back.publish(receive, now)]
        self._receives.wait(receive)
        return effects

    def _from_source(self, event: FromSource, receive: Receive, now: float) -> list[Effect]:
        if reason := _why_not(event, receive):
            return [Reject(reason)]
        self._receives.bind(receive, event.source_engine)
        receive.incarnation, receive.ranks = event.source_incarnation, event.ranks
        receive.acknowledged.add(event.rank)
        effects = self._hear_rank(event, receive, now)
        if receive.claimed:
            receive.patience_until = max(receive.patience_until, now + self._patience_s)
        if receive.phase is Phase.REGISTERED and receive.sent_to != receive.incarnation:
            effects.append(self._give_back.publish(receive, now))  # to this very incarnation: only that lets it write
        if receive.phase is Phase.REGISTERED and len(receive.acknowledged) == receive.ranks:
            receive.take(Step.ACKNOWLEDGE)
            receive.resend_later(now)
        if self._receives.get(receive.request_id) is None:
            return effects
        if receive.is_given_up and receive.is_answered:
            return [*effects, *self._give_back.fence(receive, now)]
        if receive.phase is not Phase.FENCING:
            self._receives.wait(receive)
        return effects

    def _hear_rank(self, event: FromSource, receive: Receive, now: float) -> list[Effect]:
        effects: list[Effect] = []
        match event:
            case RegistrationAck(refused=reason) if reason:
                receive.ended.add(event.rank)
                effects += self._give_back.cancel(receive, f"refused: {reason}", now)
            case RegistrationAck(claimed=claimed):
                if claimed and not receive.claimed:
                    receive.resend_at = max(receive.resend_at, now + HELD_RESEND_S)
                receive.claimed = receive.claimed or claimed
            case TransferStarted():
                receive.claimed = True
            case TransferFailed(reason=reason):
                receive.ended.add(event.rank)
                effects += self._give_back.cancel(receive, reason, now)
                if receive.is_answered:  # its KV is still kept: see Matcher
                    effects.append(self._give_back.publish(receive, now))
            case TransferDone() | CancelAck():
                receive.ended.add(event.rank)
        return effects

    def _heartbeat(self, heartbeat: Heartbeat, now: float) -> list[Effect]:
        """A prefill engine that lives and knows of the request may take its time; so may one that cannot know yet."""
        for receive in self._receives.of_engine(heartbeat.engine):
            if receive.claimed and receive.phase is Phase.HELD:
                receive.patience_until = max(receive.patience_until, now + self._patience_s)
        if heartbeat.is_in_long_step:
            for engine in (heartbeat.engine, ""):  # to the pool it may have been sent as well
                for receive in self._receives.of_engine(engine):
                    if not receive.claimed and not receive.is_given_up:
                        until = unknown_at(receive.registered_at, now, self._unclaimed_s, self._patience_s)
                        receive.patience_until = max(receive.patience_until, until)
        return []

    def _source_left(self, left: SourceLeft, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for receive in self._receives.of_engine(left.engine):
            if receive.incarnation <= left.incarnation and receive.phase is not Phase.FENCING:
                effects += self._give_back.begin_fence(receive, "prefill engine left", now)
        self._give_back.forget(left.engine, left.incarnation, now)
        return effects

    def _rebind(self, rebound: Rebound, now: float) -> list[Effect]:
        receive, engine = self._receives.get(rebound.request_id), rebound.engine
        if receive is None:
            return [Reject("unknown request")]
        if receive.registration.attempt >= rebound.attempt:
            return [Reject("stale attempt")]  # vLLM was faster: this is the attempt that it asked for
        if receive.is_given_up:
            return []
        # To the pool a release would reach the new prefill engine, too.
        receive.release = receive.engine not in ("", engine)
        return self._give_back.cancel(receive, f"its prefill is given to {engine or 'nobody'}", now)

    def _receive(self, request_id: str) -> list[Effect]:
        receive = self._receives.remove(request_id)
        if receive is None:
            return [Reject("unknown request")]
        self._received[request_id] = receive
        return []

    def _deliver(self, request_id: str) -> list[Effect]:
        receive = self._received.pop(request_id, None)
        if receive is None or not receive.engine:
            return []
        held = receive.registration
        delivered = Delivered(held.transfer_id, held.attempt, held.sink_engine, held.sink_incarnation, request_id)
        return [Publish(receive.engine, delivered)]


def _why_not(event: FromSource, receive: Receive) -> str:
    """Why this word of a prefill rank is not about this receive; empty if it is."""
    if event.request_id != receive.request_id:
        return "another request"
    if event.attempt != receive.registration.attempt:
        return "another attempt"
    if receive.ranks and event.source_engine != receive.engine:
        return "another prefill engine"
    if receive.ranks and event.source_incarnation != receive.incarnation:
        return "another incarnation"
    if not 0 <= event.rank < event.ranks or (receive.ranks and event.ranks != receive.ranks):
        return "bad rank"
    return ""
