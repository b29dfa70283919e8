"""What receives KV in an engine in virtual time: a real registrar between a fake vLLM and the virtual bus."""

from __future__ import annotations

from collections.abc import Callable

from kvbus.engine import OfPrefill
from kvbus.protocol import Change, Membership, PeerLeft
from kvbus.protocol.decode import (
    Abandon,
    Aborted,
    BusBack,
    BusLost,
    Echo,
    Effect,
    Event,
    FirstToken,
    Publish,
    Rebound,
    Received,
    Register,
    Registrar,
    Reject,
    SourceLeft,
)
from kvbus.sim.virtual_bus import VirtualBus
from kvbus.sim.world import World
from kvbus.wire import (
    Bye,
    Cancel,
    CancelAck,
    Heartbeat,
    LeaseEcho,
    Message,
    Pulse,
    Registration,
    RegistrationAck,
    Wanted,
)


class VirtualSink:
    """Stands for :class:`kvbus.engine.decode_scheduler.SinkScheduler`.

    Args:
        member: of the bus.
        publish: on the bus, unless the engine is dead.
        on_abandoned: called with the id of a request that gets no KV.
        on_moved: called with what another engine says of a prompt's KV.
    """

    def __init__(
        self,
        world: World,
        bus: VirtualBus,
        own: Heartbeat,
        membership: Membership,
        registrar: Registrar,
        clock: Callable[[], float],
        publish: Callable[[str, Message], None],
        on_abandoned: Callable[[str], None],
        on_moved: Callable[[OfPrefill], None],
    ) -> None:
        self._counts, self._bus, self._own, self._membership = world.runtime.counts, bus, own, membership
        self._registrar, self._clock, self._publish = registrar, clock, publish
        self._on_abandoned, self._on_moved = on_abandoned, on_moved
        member = f"{own.engine}/{own.incarnation}"
        bus.subscribe(member, f"ack.{own.engine}", self._hear_source)
        bus.subscribe(member, f"done.{own.engine}", self._apply)
        bus.subscribe(member, "pulse", self._hear_pulse)
        bus.subscribe(member, "hb", self._hear_heartbeat)

    # For vLLM

    def why_not(self, hint: str) -> str:
        if not self._bus.up:
            return "the bus is not connected"
        peers = [peer for peer in self._membership.peers() if peer.may_write_into(self._own)]
        return "" if any(not hint or peer.engine == hint for peer in peers) else "no engine to take it from"

    def register(self, registration: Registration, hint: str) -> None:
        self._apply(Register(registration, hint))

    def received(self, request_id: str) -> None:
        self._apply(Received(request_id))

    def aborted(self, request_id: str) -> None:
        self._apply(Aborted(request_id))

    def first_token(self, request_id: str) -> None:
        self._apply(FirstToken(request_id))

    def rebound(self, request_id: str, attempt: int, engine: str) -> None:
        self._apply(Rebound(request_id, attempt, engine))

    def unwanted(self, cancel: Cancel, hint: str) -> None:
        self._publish(_to(hint, "cancel"), cancel)

    def want(self, wanted: Wanted, hint: str) -> None:
        self._publish(_to(hint, "reg"), wanted)

    # For the engine

    def tick(self) -> None:
        self._perform(self._registrar.tick(self._clock()))

    def on_bus(self, up: bool) -> None:
        self._apply(BusBack() if up else BusLost())

    def on_peer(self, change: Change) -> None:
        if isinstance(change, PeerLeft):
            self._apply(SourceLeft(change.engine, change.incarnation))

    def _hear_source(self, message: RegistrationAck | CancelAck | OfPrefill) -> None:
        if isinstance(message, RegistrationAck | CancelAck):
            self._apply(message)
        else:
            self._on_moved(message)

    def _hear_pulse(self, pulse: Pulse) -> None:
        peer = self._membership.get(pulse.source_engine)
        if peer is not None and peer.incarnation == pulse.source_incarnation and peer.may_write_into(self._own):
            self._apply(pulse)

    def _hear_heartbeat(self, message: Heartbeat | Bye) -> None:
        if isinstance(message, Heartbeat) and message.may_write_into(self._own):
            self._apply(message)

    def _apply(self, event: Event) -> None:
        self._perform(self._registrar.apply(event, self._clock()))

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Publish(engine, message):
                    self._publish(_to(engine, "cancel" if isinstance(message, Cancel) else "reg"), message)
                case Echo(engine, echoes, epoch):
                    self._publish(f"echo.{engine}", LeaseEcho(self._own.engine, self._own.incarnation, echoes, epoch))
                case Abandon(request_id, reason):
                    self._counts["fenced by the lease"] += "fenced" in reason
                    self._on_abandoned(request_id)
                case Reject(reason):
                    self._counts[f"refused: {reason}"] += 1


def _to(engine: str, subject: str) -> str:
    """The subject of this one engine, or of any if none is named."""
    return f"{subject}.{engine}" if engine else subject
