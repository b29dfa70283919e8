"""Engines in virtual time: the real pure machines and ranks between played vLLMs and the played bus."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvbus.lease import SinkLease, term_s
from kvbus.matcher import Matcher
from kvbus.matching import PooledCancel, PooledRegistration, SinkLeft
from kvbus.membership import Change, Membership, PeerJoined, PeerLeft
from kvbus.messages import (
    Bye,
    Cancel,
    CancelAck,
    Heartbeat,
    LeaseEcho,
    Message,
    PrefillCompleted,
    PrefillFailed,
    PrefillProgress,
    Pulse,
    Registration,
    RegistrationAck,
    Role,
    State,
    Wanted,
)
from kvbus.rank import AddPeer, Greet, Item, Rank
from kvbus.registrar import (
    Abandon,
    Aborted,
    BusBack,
    BusLost,
    Echo,
    Publish,
    Received,
    Register,
    Registrar,
    Reject,
    SourceLeft,
)
from kvbus.sim.plane import SimPlane, metadata_of
from kvbus.sim.played import Played, PlayedDecode, PlayedPrefill
from kvbus.sim.stage import Scene, Ticket
from kvbus.sim.world import SimBus
from kvbus.tracing import Recorder

TICK_S = 0.2
INTRODUCED_AFTER_S = 0.02


class Engine:
    """What both kinds share: a clock of its own, a membership, ranks that are driven."""

    played: Played

    def __init__(self, scene: Scene, bus: SimBus, own: Heartbeat) -> None:
        self.scene, self.bus, self.own = scene, bus, own
        stage, pace = scene.stage, scene.pace
        self.alive = True
        self._rate = 1 + stage.chance.uniform(-1, 1) * stage.faults.drift
        self._offset = stage.chance.uniform(0, 1e6)
        self.membership = Membership(dead_after_s=pace.dead_after_s)
        first_pulse_at = self.clock() + (term_s(pace.write_lease_s, pace.max_write_s) if own.incarnation > 1 else 0.0)
        self.ranks = [self._make_rank(rank, first_pulse_at) for rank in range(own.tp_size)]
        self._number = 0
        self.member = f"{own.engine}/{own.incarnation}"
        bus.subscribe(self.member, "hb", self._hear)
        bus.watch(self.member, self._on_bus)

    def start(self) -> None:
        self._beat()
        self._tick()

    def clock(self) -> float:
        return self._offset + self.scene.stage.now * self._rate

    def publish(self, subject: str, message: Message) -> None:
        if self.alive:
            self.bus.publish(self.member, subject, message)

    def kill(self) -> None:
        self.alive = False
        self.bus.leave(self.member)
        self.played.kill()

    def submit(self, rank: int, item: Item) -> None:
        if self.alive:
            self.ranks[rank].handle(item)
            self._drive(rank)

    def leftovers(self) -> dict[str, int]:
        """How much it remembers of requests, by table."""
        return {
            **self.played.leftovers(),
            "transfers of ranks": sum(rank.transfers for rank in self.ranks),
            "receives of ranks": sum(rank.receiving for rank in self.ranks),
            "WRITEs": sum(rank.writing for rank in self.ranks),
        }

    def _make_rank(self, number: int, first_pulse_at: float) -> Rank:
        stage, pace, own = self.scene.stage, self.scene.pace, self.own
        plane = SimPlane(stage, pace, self.scene.fabric, own.engine, number)
        plane.on_news = lambda: stage.at(0.0005, lambda: self._drive(number))
        return Rank(
            matcher=Matcher(
                engine=own.engine,
                incarnation=own.incarnation,
                rank=number,
                ranks=own.tp_size,
                block_lease_s=pace.block_lease_s,
                pool_hold_s=pace.pool_hold_s,
                registration_hold_s=pace.registration_hold_s,
                write_lease_s=pace.write_lease_s,
            ),
            transport=plane,
            rank=number,
            ranks=own.tp_size,
            publish=self._publish_rank,
            introduce=lambda engine: stage.at(INTRODUCED_AFTER_S, lambda: self._meet_again(engine)),
            clock=self.clock,
            counters=self.scene.counters,
            recorder=Recorder("sim"),
            pulse_interval_s=pace.beat_s if own.role.prefills else None,
            first_pulse_at=first_pulse_at,
            max_write_s=pace.max_write_s,
        )

    def _publish_rank(self, engine: str, message: Message) -> None:
        if isinstance(message, Pulse):
            self.publish("pulse", message)
        elif isinstance(message, RegistrationAck | CancelAck):
            self.publish(f"ack.{engine}", message)
        else:
            self.publish(f"done.{engine}", message)

    def _drive(self, rank: int) -> None:
        if self.alive:
            self.ranks[rank].poll()
            self.report(rank)

    def report(self, rank: int) -> None:
        """Take what the rank has to tell vLLM."""
        raise NotImplementedError

    def tick(self) -> None:
        """More to do now and then."""

    def _tick(self) -> None:
        if not self.alive:
            return
        if self.bus.up:
            self._tell(self.membership.tick(self.clock()))
        for rank in range(self.own.tp_size):
            self._drive(rank)
        self.tick()
        self.played.tick()
        self.scene.stage.at(TICK_S, self._tick)

    def _beat(self) -> None:
        if self.alive:
            self._number += 1
            own = self.own
            beat = Heartbeat(own.engine, own.incarnation, self._number, own.role, State.READY, own.tp_size, "m")
            self.publish("hb", beat)
            self.scene.stage.at(self.scene.pace.beat_s, self._beat)

    def _hear(self, message: Message) -> None:
        assert isinstance(message, Heartbeat | Bye)
        self._tell(self.membership.hear(message, self.clock()))

    def _tell(self, changes: list[Change]) -> None:
        for change in changes:
            self.on_peer(change)

    def on_peer(self, change: Change) -> None:
        raise NotImplementedError

    def _on_bus(self, up: bool) -> None:
        self.membership.excuse_silence(self.clock())
        self.on_bus(up)

    def on_bus(self, up: bool) -> None:
        """The server went away, or is back."""

    def _meet_again(self, engine: str) -> None:
        peer = self.membership.get(engine)
        arena = self.scene.fabric.arenas.get(engine)
        if peer is None or arena is None or arena.incarnation != peer.incarnation:
            return
        for rank in range(self.own.tp_size):
            metadata = {rank % peer.tp_size: metadata_of(peer.incarnation)}
            self.submit(rank, AddPeer(peer.engine, peer.incarnation, peer.tp_size, metadata))


class SimPrefill(Engine):
    """A prefill engine."""

    def __init__(self, scene: Scene, bus: SimBus, own: Heartbeat) -> None:
        super().__init__(scene, bus, own)
        self.played: PlayedPrefill = PlayedPrefill(scene, own, self.submit, self._say)
        for area in (f"reg.{own.engine}", f"cancel.{own.engine}", "echo", f"prefill.{own.engine}"):
            bus.subscribe(self.member, area, self._each_rank(lambda message: message))
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
        self.publish("prefill", message)

    def _each_rank(self, wrap: Callable[[Any], Any]) -> Callable[[Message], None]:
        def handle(message: Message) -> None:
            for rank in range(self.own.tp_size):
                self.submit(rank, wrap(message))

        return handle


def _pooled(message: Registration | Wanted) -> Item:
    return PooledRegistration(message) if isinstance(message, Registration) else message


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
        bus.subscribe(self.member, "prefill", self._apply)
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
                case Publish(engine, Cancel() as message):
                    self.publish(f"cancel.{engine}" if engine else "cancel", message)
                case Echo(echoes, epoch):
                    self.publish("echo", LeaseEcho(self.own.engine, self.own.incarnation, echoes, epoch))
                case Abandon(request_id, reason):
                    if "fenced" in reason:
                        self.scene.stage.counts["fenced by the lease"] += 1
                    self.played.abandon(request_id)
                case Reject(reason):
                    self.scene.stage.counts[f"refused: {reason}"] += 1


def make_engine(scene: Scene, bus: SimBus, own: Heartbeat) -> SimPrefill | SimDecode:
    return SimPrefill(scene, bus, own) if own.role is Role.PREFILL else SimDecode(scene, bus, own)
