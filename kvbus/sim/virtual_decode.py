"""A decode engine in virtual time: a real registrar and real ranks between a fake vLLM and the virtual bus."""

from __future__ import annotations

from kvbus.engine import Greet
from kvbus.protocol import Change, PeerJoined, PeerLeft
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
    Reject,
    SourceLeft,
)
from kvbus.sim.fake_decode import FakeDecode
from kvbus.sim.virtual_bus import VirtualBus
from kvbus.sim.virtual_engine import VirtualEngine
from kvbus.sim.world import World
from kvbus.wire import (
    Bye,
    Cancel,
    Heartbeat,
    LeaseEcho,
    Registration,
    TransferDone,
    TransferFailed,
    TransferStarted,
    Wanted,
)


class VirtualDecode(VirtualEngine):
    """It stands for vLLM's sink port, too."""

    def __init__(self, world: World, bus: VirtualBus, own: Heartbeat) -> None:
        super().__init__(world, bus, own)
        self.vllm: FakeDecode = FakeDecode(world, own, self.submit, self)
        bus.subscribe(self.member, f"ack.{own.engine}", self._apply)
        bus.subscribe(self.member, f"done.{own.engine}", self._hear_transfer)
        bus.subscribe(self.member, "pulse", self._apply)
        bus.subscribe(self.member, "hb", self._hear_heartbeat)
        self.start()

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
        self.publish(_to(hint, "cancel"), cancel)

    def want(self, wanted: Wanted, hint: str) -> None:
        self.publish(_to(hint, "reg"), wanted)

    # From the bus

    def on_tick(self) -> None:
        self._perform(self.registrar.tick(self.clock()))

    def on_bus(self, up: bool) -> None:
        self._apply(BusBack() if up else BusLost())

    def on_peer(self, change: Change) -> None:
        match change:
            case PeerLeft(engine, incarnation, role, _) if role.prefills:
                self._apply(SourceLeft(engine, incarnation))
            case PeerJoined():
                self.submit_all(Greet())
            case _:
                pass

    def _apply(self, event: Event) -> None:
        if self.alive:
            self._perform(self.registrar.apply(event, self.clock()))

    def _hear_heartbeat(self, message: Heartbeat | Bye) -> None:
        if isinstance(message, Heartbeat) and message.role.prefills:
            self._apply(message)

    def _hear_transfer(self, message: TransferStarted | TransferDone | TransferFailed) -> None:
        self._apply(message)
        self.submit_all(message)

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Publish(engine, message):
                    self.publish(_to(engine, "cancel" if isinstance(message, Cancel) else "reg"), message)
                case Echo(engine, echoes, epoch):
                    self.publish(f"echo.{engine}", LeaseEcho(self.own.engine, self.own.incarnation, echoes, epoch))
                case Abandon(request_id, reason):
                    if "fenced" in reason:
                        self.world.runtime.counts["fenced by the lease"] += 1
                    self.vllm.abandon(request_id)
                case Reject(reason):
                    self.world.runtime.counts[f"refused: {reason}"] += 1


def _to(engine: str, subject: str) -> str:
    """The subject of this one engine, or of any if none is named."""
    return f"{subject}.{engine}" if engine else subject
