"""What both kinds of engine in virtual time share: a real membership and real ranks, driven by hand."""

from __future__ import annotations

from kvbus.engine import AddPeer, Item, Rank
from kvbus.protocol import Change, Membership, term_s
from kvbus.protocol.prefill import Matcher
from kvbus.sim.plane import SimPlane, metadata_of
from kvbus.sim.played import Played
from kvbus.sim.scene import Scene
from kvbus.sim.world import SimBus
from kvbus.trace import NoMarks
from kvbus.wire import Bye, CancelAck, Heartbeat, Message, Pulse, RegistrationAck, State

TICK_S = 0.2
INTRODUCED_AFTER_S = 0.02


class Engine:
    """See the module's docstring. It has a clock of its own."""

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
            marking=NoMarks(),
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
