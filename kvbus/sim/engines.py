"""Played engines around real ranks and registrars: they take time to compute, hold blocks, abort, die and come back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvbus import blocks
from kvbus.lease import SinkLease, term_s
from kvbus.matcher import Matcher
from kvbus.matching import PooledCancel, PooledRegistration, SinkLeft
from kvbus.membership import Change, Membership, PeerJoined, PeerLeft
from kvbus.messages import (
    Bye,
    Cancel,
    CancelAck,
    Delivered,
    Heartbeat,
    LeaseEcho,
    Message,
    PrefillCompleted,
    PrefillProgress,
    Pulse,
    Registration,
    RegistrationAck,
    Role,
    State,
)
from kvbus.metrics import Counters
from kvbus.rank import Abandon, AddPeer, Expect, Greet, Item, Rank
from kvbus.registrar import Abandon as GiveUp
from kvbus.registrar import (
    Aborted,
    BusBack,
    BusLost,
    Echo,
    FirstToken,
    Publish,
    Received,
    Register,
    Registrar,
    Reject,
    SourceLeft,
)
from kvbus.sim.plane import Arena, Fabric, SimPlane
from kvbus.sim.world import Violation, World
from kvbus.tracing import Recorder

BEAT_S = 0.5
TICK_S = 0.2
DEAD_AFTER_S = 3.0
BLOCK_LEASE_S = 10.0
PATIENCE_S = 8.0
WRITE_LEASE_S, MAX_WRITE_S = 1.5, 2.0
BOUND_S = 60.0
"""No request may take longer, whatever happens."""


@dataclass(slots=True)
class Ticket:
    """One client's request."""

    transfer_id: str
    prompt_blocks: int
    cached_blocks: int
    hint: str
    started: float
    abort_after_s: float | None = None
    ended: str = ""
    ended_at: float = 0.0


class Engine:
    """What both kinds share: a clock of its own, a membership, ranks that are driven."""

    def __init__(self, world: World, fabric: Fabric, name: str, role: Role, ranks: int, incarnation: int) -> None:
        self.world, self.fabric, self.name, self.role = world, fabric, name, role
        self.ranks_count, self.incarnation, self.alive = ranks, incarnation, True
        self._rate = 1 + world.chance.uniform(-1, 1) * world.faults.drift
        self._offset = world.chance.uniform(0, 1e6)
        self.arena = fabric.arenas[name] = Arena(incarnation)
        self.membership = Membership(dead_after_s=DEAD_AFTER_S)
        self.counters = Counters()
        self.planes = [SimPlane(world, fabric, name, rank, ranks, MAX_WRITE_S) for rank in range(ranks)]
        first_pulse_at = self.clock() + (term_s(WRITE_LEASE_S, MAX_WRITE_S) if incarnation > 1 else 0.0)
        self.ranks = [self._make_rank(plane, number, first_pulse_at) for number, plane in enumerate(self.planes)]
        self._number = 0
        self.member = f"{name}/{incarnation}"
        bus = world.bus
        bus.subscribe(self.member, "hb", self._hear)
        bus.watch(self.member, self._on_bus)
        self._beat()
        self._tick()

    def clock(self) -> float:
        return self._offset + self.world.now * self._rate

    def publish(self, subject: str, message: Message) -> None:
        if self.alive:
            self.world.bus.publish(self.member, subject, message)

    def kill(self) -> None:
        """As SIGKILL: nothing more is said, and what was posted still lands."""
        self.alive = False
        self.world.bus.leave(self.member)
        if self.fabric.arenas.get(self.name) is self.arena:
            del self.fabric.arenas[self.name]

    def submit(self, rank: int, item: Item) -> None:
        if self.alive:
            self.ranks[rank].handle(item)
            self._drive(rank)

    def _make_rank(self, plane: SimPlane, number: int, first_pulse_at: float) -> Rank:
        plane.on_news = lambda: self.world.at(0.0005, lambda: self._drive(number))
        return Rank(
            matcher=Matcher(
                engine=self.name,
                incarnation=self.incarnation,
                rank=number,
                ranks=self.ranks_count,
                block_lease_s=BLOCK_LEASE_S,
                pool_hold_s=3.0,
                registration_hold_s=30.0,
                write_lease_s=WRITE_LEASE_S,
            ),
            transport=plane,
            rank=number,
            ranks=self.ranks_count,
            publish=self._publish_rank,
            introduce=lambda engine: self.world.at(0.02, lambda: self._meet_again(engine)),
            clock=self.clock,
            counters=self.counters,
            recorder=Recorder("sim"),
            pulse_interval_s=BEAT_S if self.role.prefills else None,
            first_pulse_at=first_pulse_at,
            max_write_s=MAX_WRITE_S,
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

    @property
    def idle(self) -> bool:
        """Whether it remembers nothing of any request."""
        raise NotImplementedError

    def report(self, rank: int) -> None:
        """Take what the rank has to tell vLLM."""
        raise NotImplementedError

    def tick(self) -> None:
        """More to do now and then."""

    def _tick(self) -> None:
        if not self.alive:
            return
        if self.world.bus.up:
            self._tell(self.membership.tick(self.clock()))
        for rank in range(self.ranks_count):
            self._drive(rank)
        self.tick()
        self.world.at(TICK_S, self._tick)

    def _beat(self) -> None:
        if self.alive:
            self._number += 1
            beat = Heartbeat(self.name, self.incarnation, self._number, self.role, State.READY, self.ranks_count, "m")
            self.publish("hb", beat)
            self.world.at(BEAT_S, self._beat)

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
        if peer is not None and self.alive:
            self.meet(peer)

    def meet(self, peer: Heartbeat) -> None:
        """A decode engine's memory, if it is still the one that was heard."""
        arena = self.fabric.arenas.get(peer.engine)
        if arena is not None and arena.incarnation == peer.incarnation:
            for rank in range(self.ranks_count):
                metadata = {rank % peer.tp_size: str(peer.incarnation).encode()}
                self.submit(rank, AddPeer(peer.engine, peer.incarnation, peer.tp_size, metadata))


class SimPrefill(Engine):
    """A prefill engine: one prompt at a time."""

    def __init__(self, world: World, fabric: Fabric, name: str, ranks: int, incarnation: int = 1) -> None:
        self._queue: list[tuple[Ticket, str]] = []
        self._held: dict[str, list[int]] = {}
        self._released: Counter[str] = Counter()
        self._busy = False
        super().__init__(world, fabric, name, Role.PREFILL, ranks, incarnation)
        bus = world.bus
        bus.subscribe(self.member, f"reg.{name}", self._each_rank(lambda message: message))
        bus.subscribe(self.member, "reg", self._each_rank(PooledRegistration))
        bus.subscribe(self.member, f"cancel.{name}", self._each_rank(lambda message: message))
        bus.subscribe(self.member, "cancel", self._each_rank(PooledCancel))
        bus.subscribe(self.member, "echo", self._each_rank(lambda message: message))
        bus.subscribe(self.member, f"prefill.{name}", self._each_rank(lambda message: message))

    @property
    def idle(self) -> bool:
        return not self._held and not self._queue and not self._busy

    def take(self, ticket: Ticket) -> None:
        """The prefill leg has arrived."""
        if not self.alive:
            return
        request_id = f"p-{ticket.transfer_id}"
        self._queue.append((ticket, request_id))
        self._say(PrefillProgress(**self._about(ticket, request_id), computed=0, total=ticket.prompt_blocks * 32))
        self._next()

    def on_peer(self, change: Change) -> None:
        match change:
            case PeerJoined(heartbeat) if heartbeat.role.decodes:
                self.world.at(0.02, lambda: self._meet_again(heartbeat.engine))
            case PeerLeft(engine, incarnation, role, _) if role.decodes:
                for rank in range(self.ranks_count):
                    self.submit(rank, SinkLeft(engine, incarnation))
            case _:
                pass

    def report(self, rank: int) -> None:
        for request_id in self.ranks[rank].report().released:
            self._released[request_id] += 1
            if self._released[request_id] > self.ranks_count:
                raise Violation(f"{self.name} released {request_id} twice")
            if self._released[request_id] == self.ranks_count:
                self.arena.give_back(self._held.pop(request_id))
                self._next()

    def _next(self) -> None:
        if self._busy or not self._queue or not self.alive:
            return
        ticket, request_id = self._queue[0]
        taken = self.arena.take(request_id, ticket.prompt_blocks)
        if taken is None:
            return
        self._queue.pop(0)
        self._busy = True
        self.world.at(
            ticket.prompt_blocks * self.world.chance.uniform(0.01, 0.04),
            lambda: self._finish(ticket, request_id, taken),
        )

    def _finish(self, ticket: Ticket, request_id: str, taken: list[int]) -> None:
        if not self.alive:
            return
        self._busy = False
        self._held[request_id] = taken
        completed = PrefillCompleted(
            **self._about(ticket, request_id), blocks=blocks.to_runs([taken]), tokens=ticket.prompt_blocks * 32
        )
        self._say(completed)
        for rank in range(self.ranks_count):  # the next step's metadata: it cannot be lost
            self.world.at(0.002, lambda rank=rank: self.submit(rank, completed))  # type: ignore[misc]
        self._next()

    def _say(self, message: PrefillProgress | PrefillCompleted) -> None:
        self.publish(f"prefill.{self.name}", message)
        self.publish("prefill", message)

    def _about(self, ticket: Ticket, request_id: str) -> dict[str, Any]:
        return {
            "transfer_id": ticket.transfer_id,
            "source_engine": self.name,
            "source_incarnation": self.incarnation,
            "request_id": request_id,
        }

    def _each_rank(self, wrap: Callable[[Any], Any]) -> Callable[[Message], None]:
        def handle(message: Message) -> None:
            for rank in range(self.ranks_count):
                self.submit(rank, wrap(message))

        return handle


@dataclass(slots=True)
class _Receive:
    ticket: Ticket
    taken: list[int]
    reports: int = 0
    ok: bool = True
    aborted: bool = False
    landed: set[int] = field(default_factory=set)


class SimDecode(Engine):
    """A decode engine: its scheduler half's registrar, and ranks that count arrivals."""

    def __init__(self, world: World, fabric: Fabric, name: str, ranks: int, incarnation: int = 1) -> None:
        self.registrar = Registrar(
            lease=SinkLease(WRITE_LEASE_S, MAX_WRITE_S),
            patience_s=PATIENCE_S,
            transfer_timeout_s=BOUND_S / 2,
            cancel_timeout_s=1.0,
        )
        self._queue: list[Ticket] = []
        self._receives: dict[str, _Receive] = {}
        self._running: dict[str, Ticket] = {}
        super().__init__(world, fabric, name, Role.DECODE, ranks, incarnation)
        bus = world.bus
        bus.subscribe(self.member, f"ack.{name}", self._apply)
        bus.subscribe(self.member, f"done.{name}", self._hear_done)
        bus.subscribe(self.member, "prefill", self._apply)
        bus.subscribe(self.member, "pulse", self._apply)
        bus.subscribe(self.member, "hb", self._apply_prefill_beat)

    @property
    def idle(self) -> bool:
        return not self._queue and not self._receives and not self._running and not len(self.registrar)

    def take(self, ticket: Ticket) -> None:
        """The decode leg has arrived."""
        if not self.alive:
            self._end(ticket, "lost with its decode engine")
            return
        self._queue.append(ticket)
        self._next()

    def kill(self) -> None:
        super().kill()
        for ticket in [*self._queue, *(each.ticket for each in self._receives.values()), *self._running.values()]:
            self._end(ticket, "lost with its decode engine")

    def tick(self) -> None:
        self._perform(self.registrar.tick(self.clock()))
        self._next()

    def on_bus(self, up: bool) -> None:
        self._apply(BusBack() if up else BusLost())

    def on_peer(self, change: Change) -> None:
        match change:
            case PeerLeft(engine, incarnation, role, _) if role.prefills:
                self._apply(SourceLeft(engine, incarnation))
            case PeerJoined():
                for rank in range(self.ranks_count):
                    self.submit(rank, Greet())
            case _:
                pass

    def report(self, rank: int) -> None:
        for arrived in self.ranks[rank].report().arrived:
            receive = self._receives.get(arrived.request_id)
            if receive is None or rank in receive.landed:
                raise Violation(f"{self.name} reported {arrived.request_id} twice: vLLM dies of it")
            receive.landed.add(rank)
            receive.ok = receive.ok and arrived.ok
            if len(receive.landed) == self.ranks_count:
                self._finish(arrived.request_id, receive)

    def _next(self) -> None:
        while self._queue and self.alive:
            ticket = self._queue[0]
            request_id = f"d-{ticket.transfer_id}"
            if ticket.abort_after_s is not None and self.world.now > ticket.started + ticket.abort_after_s:
                self._queue.pop(0)
                self._end(ticket, "aborted")
                continue
            if not self.world.bus.up or not self.membership.peers(prefill=True):
                self._queue.pop(0)
                self._compute(ticket, "computed locally")
                continue
            taken = self.arena.take(request_id, ticket.prompt_blocks - ticket.cached_blocks)
            if taken is None:
                return
            self._queue.pop(0)
            self._register(ticket, request_id, taken)

    def _register(self, ticket: Ticket, request_id: str, taken: list[int]) -> None:
        self._receives[request_id] = _Receive(ticket, taken)
        registration = Registration(
            ticket.transfer_id,
            1,
            self.name,
            self.incarnation,
            request_id,
            blocks.to_runs([taken]),
            ticket.prompt_blocks * 32,
            ticket.cached_blocks * 32,
        )
        for rank in range(self.ranks_count):
            self.world.at(0.002, lambda rank=rank: self.submit(rank, Expect(request_id, 1)))  # type: ignore[misc]
        self._apply(Register(registration, ticket.hint))
        if ticket.abort_after_s is not None:
            self.world.at(ticket.abort_after_s, lambda: self._abort(request_id))

    def _abort(self, request_id: str) -> None:
        receive = self._receives.get(request_id)
        if receive is not None and self.alive:
            receive.aborted = True
            self._apply(Aborted(request_id))

    def _finish(self, request_id: str, receive: _Receive) -> None:
        del self._receives[request_id]
        self._apply(Received(request_id))
        if receive.aborted or not receive.ok:
            self.arena.give_back(receive.taken)
            if receive.aborted:
                self._end(receive.ticket, "aborted")
            else:
                self._compute(receive.ticket, "recomputed")
            return
        self._running[request_id] = receive.ticket
        self.world.counts["pushed blocks"] += len(receive.taken)

        def done() -> None:
            if self.alive:
                self._apply(FirstToken(request_id))
                del self._running[request_id]
                self.arena.give_back(receive.taken)
                self._end(receive.ticket, "pushed")

        self.world.at(self.world.chance.uniform(0.05, 0.5), done)

    def _compute(self, ticket: Ticket, how: str) -> None:
        self._running[ticket.transfer_id] = ticket

        def done() -> None:
            if self.alive:
                del self._running[ticket.transfer_id]
                self._end(ticket, how)

        self.world.at(ticket.prompt_blocks * 0.03, done)

    def _end(self, ticket: Ticket, how: str) -> None:
        if ticket.ended:
            raise Violation(f"{ticket.transfer_id} ended twice: {ticket.ended}, then {how}")
        ticket.ended, ticket.ended_at = how, self.world.now
        self.world.counts[how] += 1

    def _apply(self, event: Any) -> None:
        if self.alive:
            self._perform(self.registrar.apply(event, self.clock()))

    def _apply_prefill_beat(self, message: Message) -> None:
        if isinstance(message, Heartbeat) and message.role.prefills:
            self._apply(message)

    def _hear_done(self, message: Message) -> None:
        self._apply(message)
        for rank in range(self.ranks_count):
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
                case Echo(echoes, epoch):
                    self.publish("echo", LeaseEcho(self.name, self.incarnation, echoes, epoch))
                case GiveUp(request_id, reason):
                    self.world.counts["receives given up"] += 1
                    if "fenced" in reason:
                        self.world.counts["fenced by the lease"] += 1
                    for rank in range(self.ranks_count):
                        self.world.at(0.002, lambda rank=rank, r=request_id: self.submit(rank, Abandon(r)))  # type: ignore[misc]
                case Reject(reason):
                    self.world.counts[f"refused: {reason}"] += 1
