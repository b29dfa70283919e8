"""An engine in virtual time: real ranks, registrar and membership around a fake vLLM, driven by timers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvbus.engine import PREFILL, AddPeer, Greet, Item, OfPrefill, Overheard, Rank
from kvbus.protocol import Change, Membership, PeerJoined, PeerLeft
from kvbus.protocol.prefill import PooledCancel, PooledRegistration, SinkLeft
from kvbus.sim.engine import Engine
from kvbus.sim.fake_decode import FakeDecode
from kvbus.sim.fake_prefill import FakePrefill
from kvbus.sim.virtual_bus import VirtualBus
from kvbus.sim.virtual_sink import VirtualSink
from kvbus.sim.world import World
from kvbus.wire import Bye, CancelAck, Heartbeat, Message, Pulse, Registration, RegistrationAck, Wanted

TICK_S = 0.2
METADATA_DELAY_S = 0.02
PROGRESS_DELAY_S = 0.0005


class VirtualEngine(Engine):
    """See the module's docstring. It listens to what the ranks and the scheduler of a real one listen to."""

    def __init__(self, world: World, bus: VirtualBus, own: Heartbeat) -> None:
        super().__init__(world, own)
        self.bus = bus
        self.clock = self.make_clock()
        self.membership = Membership(dead_after_s=world.timing.dead_after_s)
        self.ranks = [self._make_rank(number) for number in range(own.tp_size)]
        self.member = f"{own.engine}/{own.incarnation}"
        self.sink = VirtualSink(
            world,
            bus,
            own,
            self.membership,
            self.registrar,
            self.clock,
            self.publish,
            lambda request_id: self.vllm.abandon(request_id),
            lambda message: self.vllm.moved(message),
        )
        make_vllm = FakePrefill if own.role.prefills else FakeDecode
        self.vllm = make_vllm(world, own, self.submit, self._publish_prefill, self.sink)
        for area in ("reg", "cancel", "echo"):
            bus.subscribe(self.member, f"{area}.{own.engine}", self._hand_on(lambda message: message))
        bus.subscribe(self.member, f"prefill.{own.engine}", self._hand_on(Overheard))
        bus.subscribe(self.member, "reg", self._hand_on(_pooled))
        bus.subscribe(self.member, "cancel", self._hand_on(PooledCancel))
        bus.subscribe(self.member, f"done.{own.engine}", self.submit_all)
        bus.subscribe(self.member, "hb", self._hear_membership)
        bus.watch(self.member, self._on_bus)
        self._beat(1)
        self._tick()

    def publish(self, subject: str, message: Message) -> None:
        if self.alive:
            self.bus.publish(self.member, subject, message)

    def kill(self) -> None:
        self.bus.leave(self.member)
        self.vllm.kill()

    def submit(self, rank: int, item: Item) -> None:
        if self.alive:
            self.ranks[rank].handle(item)
            self._drive(rank)

    def submit_all(self, item: Item) -> None:
        for rank in range(self.own.tp_size):
            self.submit(rank, item)

    def introduce(self, engine: str) -> None:
        """Hand the metadata of another engine to every rank, as if it had been asked for."""
        self.world.runtime.call_later(METADATA_DELAY_S, lambda: self._add_peer(engine))

    def _make_rank(self, number: int) -> Rank:
        transport = self.world.fabric.make_transport(self.own.engine, number)
        transport.on_progress = lambda: self.world.runtime.call_later(PROGRESS_DELAY_S, lambda: self._drive(number))
        return self.make_rank(
            number, clock=self.clock, transport=transport, publish=self._publish_rank, introduce=self.introduce
        )

    def _publish_rank(self, engine: str, message: Message) -> None:
        if isinstance(message, Pulse):
            self.publish("pulse", message)
        elif isinstance(message, (RegistrationAck, CancelAck, *PREFILL)):
            self.publish(f"ack.{engine}", message)
        else:
            self.publish(f"done.{engine}", message)

    def _publish_prefill(self, message: OfPrefill) -> None:
        self.publish(f"prefill.{self.own.engine}", message)

    def _hand_on(self, wrap: Callable[[Any], Item]) -> Callable[[Any], None]:
        return lambda message: self.submit_all(wrap(message))

    def _drive(self, rank: int) -> None:
        if self.alive:
            self.ranks[rank].poll()
            self.vllm.on_report(rank, self.ranks[rank].report())

    def _tick(self) -> None:
        if not self.alive:
            return
        if self.bus.up:
            self._on_changes(self.membership.tick(self.clock()))
        for rank in range(self.own.tp_size):
            self._drive(rank)
        self.sink.tick()
        self.vllm.step()
        self.world.runtime.call_later(TICK_S, self._tick)

    def _beat(self, number: int) -> None:
        if self.alive:
            self.publish("hb", replace(self.own, number=number))
            self.world.runtime.call_later(self.world.timing.heartbeat_s, lambda: self._beat(number + 1))

    def _hear_membership(self, message: Heartbeat | Bye) -> None:
        self._on_changes(self.membership.hear(message, self.clock()))

    def _on_changes(self, changes: list[Change]) -> None:
        for change in changes:
            self.sink.on_peer(change)
            match change:
                case PeerJoined(heartbeat):
                    if heartbeat.may_write_into(self.own):
                        self.submit_all(Greet())
                    if self.own.may_write_into(heartbeat):
                        self.introduce(heartbeat.engine)
                case PeerLeft(engine, incarnation, _, _):
                    self.submit_all(SinkLeft(engine, incarnation))
                case _:
                    pass

    def _on_bus(self, up: bool) -> None:
        self.membership.excuse_silence(self.clock())
        self.sink.on_bus(up)

    def _add_peer(self, engine: str) -> None:
        peer = self.membership.get(engine)
        fabric = self.world.fabric
        pool = fabric.pools.get(engine)
        if peer is None or pool is None or pool.incarnation != peer.incarnation:
            return
        for rank in range(self.own.tp_size):
            metadata = {rank % peer.tp_size: fabric.metadata_of(peer.incarnation)}
            self.submit(rank, AddPeer(peer.engine, peer.incarnation, peer.tp_size, metadata))


def _pooled(message: Registration | Wanted) -> Item:
    return PooledRegistration(message) if isinstance(message, Registration) else replace(message, attempt=0)
