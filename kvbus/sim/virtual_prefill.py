"""A prefill engine in virtual time: real ranks between a fake vLLM and the virtual bus."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvbus.engine import Item, Overheard
from kvbus.protocol import Change, PeerJoined, PeerLeft
from kvbus.protocol.prefill import PooledCancel, PooledRegistration, SinkLeft
from kvbus.sim.fake_prefill import FakePrefill, PrefillMessage
from kvbus.sim.virtual_bus import VirtualBus
from kvbus.sim.virtual_engine import VirtualEngine
from kvbus.sim.world import World
from kvbus.wire import Heartbeat, Registration, Wanted


class VirtualPrefill(VirtualEngine):
    def __init__(self, world: World, bus: VirtualBus, own: Heartbeat) -> None:
        super().__init__(world, bus, own)
        self.vllm = FakePrefill(world, own, self.submit, self._publish_prefill)
        for area in ("reg", "cancel", "echo"):
            bus.subscribe(self.member, f"{area}.{own.engine}", self._hand_on(lambda message: message))
        bus.subscribe(self.member, f"prefill.{own.engine}", self._hand_on(Overheard))
        bus.subscribe(self.member, "reg", self._hand_on(_pooled))
        bus.subscribe(self.member, "cancel", self._hand_on(PooledCancel))
        self.start()

    def on_peer(self, change: Change) -> None:
        match change:
            case PeerJoined(heartbeat) if heartbeat.role.decodes:
                self.introduce(heartbeat.engine)
            case PeerLeft(engine, incarnation, role, _) if role.decodes:
                self.submit_all(SinkLeft(engine, incarnation))
            case _:
                pass

    def _publish_prefill(self, message: PrefillMessage) -> None:
        self.publish(f"prefill.{self.own.engine}", message)

    def _hand_on(self, wrap: Callable[[Any], Item]) -> Callable[[Any], None]:
        return lambda message: self.submit_all(wrap(message))


def _pooled(message: Registration | Wanted) -> Item:
    return PooledRegistration(message) if isinstance(message, Registration) else replace(message, attempt=0)
