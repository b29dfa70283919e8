"""Engines in virtual time: the real pure machines and ranks between played vLLMs and the played bus."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvbus.engine import Greet, Item, Overheard
from kvbus.protocol import Change, PeerJoined, PeerLeft, SinkLease
from kvbus.protocol.decode import (
    Abandon,
    Aborted,
    BusBack,
    BusLost,
    Echo,
    FirstToken,
    Publish,
    Rebound,
    Received,
    Register,
    Registrar,
    Reject,
    SourceLeft,
)
from kvbus.protocol.prefill import PooledCancel, PooledRegistration, SinkLeft
from kvbus.sim.engine import INTRODUCED_AFTER_S, Engine
from kvbus.sim.played import PlayedPrefill
from kvbus.sim.played_decode import PlayedDecode
from kvbus.sim.scene import Scene
from kvbus.sim.stage import Ticket
from kvbus.sim.world import SimBus
from kvbus.wire import (
    Cancel,
    Delivered,
    Heartbeat,
    LeaseEcho,
    Message,
    PrefillCompleted,
    PrefillFailed,
    PrefillProgress,
    Registration,
    Role,
    Wanted,
)


class SimPrefill(Engine):
    """A prefill engine."""

    def __init__(self, scene: Scene, bus: SimBus, own: Heartbeat) -> None:
        super().__init__(scene, bus, own)
        self.played: PlayedPrefill = PlayedPrefill(scene, own, self.submit, self._say)
        for area in (f"reg.{own.engine}", f"cancel.{own.engine}", f"echo.{own.engine}"):
            bus.subscribe(self.member, area, self._each_rank(lambda message: message))
        bus.subscribe(self.member, f"prefill.{own.engine}", self._each_rank(Overheard))
        bus.subscribe(self.member, "reg", self._each_rank(_pooled))
        bus.subscribe(self.member, "cancel", self._each_rank(PooledCancel))
        self.start()

    def take(self, ticket: Ticket) -> None:
        self.played.take(ticket)

    def on_peer(self, change: Change) -> None:
        match change:
            case PeerJoined(heartbeat) if heartbeat.role.decodes:
                self.scene.stage.at(INTRODUCED_AFTER_S, lambda: self._meet_again(heartbeat.engine))
            case PeerLeft(engine, incarnation, role, _) if role.decodes:
                for rank in range(self.own.tp_size):
                    self.submit(rank, SinkLeft(engine, incarnation))
            case _:
                pass

    def report(self, rank: int) -> None:
        self.played.release(self.ranks[rank].report().released)

    def _say(self, message: PrefillProgress | PrefillCompleted | PrefillFailed) -> None:
        self.publish(f"prefill.{self.own.engine}", message)

    def _each_rank(self, wrap: Callable[[Any], Any]) -> Callable[[Message], None]:
        def handle(message: Message) -> None:
            for rank in range(self.own.tp_size):
                self.submit(rank, wrap(message))

        return handle


def _pooled(message: Registration | Wanted) -> Item:
    return PooledRegistration(message) if isinstance(message, Registration) else replace(message, attempt=0)


class SimDecode(Engine):
    """A decode engine: its scheduler half's registrar, and ranks that count arrivals. It is vLLM's sink port, too."""

    def __init__(self, scene: Scene, bus: SimBus, own: Heartbeat) -> None:
        pace = scene.pace
        self.registrar = Registrar(
            lease=SinkLease(pace.write_lease_s, pace.max_write_s),
            patience_s=pace.patience_s,
            transfer_timeout_s=pace.bound_s / 2,
            cancel_timeout_s=pace.cancel_timeout_s,
        )
        super().__init__(scene, bus, own)
        self.played: PlayedDecode = PlayedDecode(scene, own, self.submit, self)
        bus.subscribe(self.member, f"ack.{own.engine}", self._apply)
        bus.subscribe(self.member, f"done.{own.engine}", self._hear_done)
        bus.subscribe(self.member, "pulse", self._apply)
        bus.subscribe(self.member, "hb", self._apply_prefill_beat)
        self.start()

    def take(self, ticket: Ticket) -> None:
        self.played.take(ticket)

    def leftovers(self) -> dict[str, int]:
        return {**super().leftovers(), "registrations": len(self.registrar)}

    # For vLLM

    def why_not(self, hint: str) -> str:
        if not self.bus.up:
            return "the bus is not connected"
        peers = self.membership.peers(prefill=True)
        return "" if any(not hint or peer.engine == hint for peer in peers) else "no prefill engine"

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
        self.publish(f"cancel.{hint}" if hint else "cancel", cancel)

    def want(self, wanted: Wanted, hint: str) -> None:
        self.publish(f"reg.{hint}" if hint else "reg", wanted)

    # From the bus

    def tick(self) -> None:
        self._perform(self.registrar.tick(self.clock()))

    def on_bus(self, up: bool) -> None:
        self._apply(BusBack() if up else BusLost())

    def on_peer(self, change: Change) -> None:
        match change:
            case PeerLeft(engine, incarnation, role, _) if role.prefills:
                self._apply(SourceLeft(engine, incarnation))
            case PeerJoined():
                for rank in range(self.own.tp_size):
                    self.submit(rank, Greet())
            case _:
                pass

    def report(self, rank: int) -> None:
        self.played.report(rank, self.ranks[rank].report().arrived)

    def _apply(self, event: Any) -> None:
        if self.alive:
            self._perform(self.registrar.apply(event, self.clock()))

    def _apply_prefill_beat(self, message: Message) -> None:
        if isinstance(message, Heartbeat) and message.role.prefills:
            self._apply(message)

    def _hear_done(self, message: Message) -> None:
        self._apply(message)
        for rank in range(self.own.tp_size):
            self.submit(rank, message)  # type: ignore[arg-type]

    def _perform(self, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case Publish(engine, Registration() as message):
                    self.publish(f"reg.{engine}" if engine else "reg", message)
                case Publish(engine, Delivered() as message):
                    self.publish(f"reg.{engine}", message)
                case Publish(engine, Cancel() as message):
                    self.publish(f"cancel.{engine}" if engine else "cancel", message)
                case Echo(engine, echoes, epoch):
                    self.publish(f"echo.{engine}", LeaseEcho(self.own.engine, self.own.incarnation, echoes, epoch))
                case Abandon(request_id, reason):
                    if "fenced" in reason:
                        self.scene.stage.counts["fenced by the lease"] += 1
                    self.played.abandon(request_id)
                case Reject(reason):
                    self.scene.stage.counts[f"refused: {reason}"] += 1


def make_engine(scene: Scene, bus: SimBus, own: Heartbeat) -> SimPrefill | SimDecode:
    return SimPrefill(scene, bus, own) if own.role is Role.PREFILL else SimDecode(scene, bus, own)
