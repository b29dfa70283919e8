"""One life: a few engines, some hundred requests, faults, then calm; and the laws that must hold in it.

The laws: no WRITE lands in a block that changed owner (checked when it lands); nothing is released or reported twice
(checked when it happens); every request ends within its bound; in the end every block is free and every table empty.

:class:`Play` is the script and the laws, whoever plays; :class:`Life` plays it in virtual time.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvbus.sim.engines import make_engine
from kvbus.sim.faults import CALM, Faults, Violation
from kvbus.sim.plane import NUM_BLOCKS, Arena, Fabric
from kvbus.sim.scene import Scene
from kvbus.sim.stage import VIRTUAL, Pace, Ticket
from kvbus.sim.weather import EVERYBODY, Weather
from kvbus.sim.world import SimBus, World
from kvbus.wire import Heartbeat, Role, State

TRANSFERS_PER_LIFE = 200


@dataclass(frozen=True, slots=True)
class Account:
    """What a life, or many, came to. ``worst_wait_s``: the longest that a request took."""

    transfers: int
    counts: Counter[str]
    worst_wait_s: float

    def __add__(self, other: Account) -> Account:
        return Account(
            self.transfers + other.transfers,
            self.counts + other.counts,
            max(self.worst_wait_s, other.worst_wait_s),
        )


class PlayedVllm(Protocol):
    @property
    def arena(self) -> Arena: ...

    def rebind(self, ticket: Ticket, attempt: int, engine: str) -> None: ...


class Actor(Protocol):
    """An engine, as the script knows it."""

    @property
    def own(self) -> Heartbeat: ...

    @property
    def alive(self) -> bool: ...

    @property
    def played(self) -> PlayedVllm: ...

    def take(self, ticket: Ticket) -> None: ...

    def kill(self) -> None: ...

    def leftovers(self) -> dict[str, int]: ...


class Play:
    """Draws the script from the seed, performs it on engines, and takes stock.

    Args:
        make: makes an engine, and starts it.
        outage: the server goes away for so many seconds; ``freeze``: it stands still for so many.
    """

    def __init__(
        self,
        seed: int,
        scene: Scene,
        transfers: int,
        make: Callable[[Heartbeat], Actor],
        outage: Callable[[float], None],
        freeze: Callable[[float], None],
    ) -> None:
        self.stage, self.pace, self._scene, self._make = scene.stage, scene.pace, scene, make
        self._outage, self._freeze, self._weather = outage, freeze, scene.weather or Weather(scene.stage, scene.pace)
        # The script has its own: what happens in a life must not change what was to happen.
        self._chance, self._router = random.Random(seed), random.Random(~seed)
        self._transfers, self._ended = transfers, 0
        self.busy_s = transfers * self.pace.request_every_s
        self._tickets: list[Ticket] = []
        ranks = self._chance.choice((1, 1, 2))
        self._prefills = [f"P{number}" for number in range(self._chance.randint(1, 3))]
        self._decodes = [f"D{number}" for number in range(self._chance.randint(1, 3))]
        roles = {**dict.fromkeys(self._prefills, Role.PREFILL), **dict.fromkeys(self._decodes, Role.DECODE)}
        self.engines = {
            name: make(Heartbeat(name, 1, 0, role, State.READY, ranks, "m")) for name, role in roles.items()
        }

    @property
    def ended(self) -> int:
        """How many requests have ended."""
        return self._ended

    def begin(self) -> None:
        """Have everything happen from now on."""
        faults, chance, wait = self.stage.faults, self._chance, self.pace.wait
        for number in range(self._transfers):
            self._plan_request(number)
        self._plan(faults.cut_every_s, self._cut)
        self._plan(faults.kill_every_s, self._kill)
        self._plan(faults.outage_every_s, lambda: self._outage(chance.uniform(0.2, 8.0) * wait), "outages")
        self._plan(faults.freeze_every_s, lambda: self._freeze(chance.uniform(0.2, 8.0) * wait), "freezes")
        self._plan(faults.stall_every_s, self._stall)

    def over(self) -> bool:
        """Whether every request has ended and nobody remembers anything."""
        return self._ended == self._transfers and not any(any(e.leftovers().values()) for e in self.engines.values())

    def take_stock(self) -> Account:
        """Check what must hold in the end.

        Raises:
            Violation: a law was broken.
        """
        bound_s = self.pace.bound_s
        for ticket in self._tickets:
            if not ticket.ended:
                raise Violation(f"{ticket.transfer_id} never ended")
            if ticket.ended_at - ticket.started > bound_s:
                raise Violation(f"{ticket.transfer_id} took {ticket.ended_at - ticket.started:.1f} s: {ticket.ended}")
        for name, engine in self.engines.items():
            if left := {table: size for table, size in engine.leftovers().items() if size}:
                raise Violation(f"{name} still remembers {left}")
            if engine.played.arena.free_blocks != NUM_BLOCKS:
                raise Violation(f"{name} has {engine.played.arena.free_blocks} of {NUM_BLOCKS} blocks free")
        counts = self.stage.counts + Counter({"writes overdue": self._scene.counters["writes_overdue"]})
        worst_s = max((ticket.ended_at - ticket.started for ticket in self._tickets), default=0.0)
        return Account(len(self._tickets), counts, worst_s)

    def _plan(self, mean_s: float, do: Callable[[], None], name: str = "") -> None:
        """Have it happen again and again, at random intervals, for as long as requests come."""

        def happen() -> None:
            self.stage.counts[name] += bool(name)
            do()

        at = 0.0
        while mean_s > 0 and (at := at + self._chance.expovariate(1 / (mean_s * self.pace.work))) < self.busy_s:
            self.stage.at(self.pace.lead_s + at, happen)

    def _plan_request(self, number: int) -> None:
        """Both legs of one request, sent by a router at about the same time."""
        chance, pace = self._chance, self.pace
        prefill, decode = chance.choice(self._prefills), chance.choice(self._decodes)
        blocks = chance.randint(1, 12)
        aborts, fails = (chance.random() < self.stage.faults.abort / part for part in (1, 2))
        ticket = Ticket(
            transfer_id=f"t{number}",
            prompt_blocks=blocks,
            cached_blocks=chance.choice((0, 0, blocks // 2)),
            abort_after_s=chance.expovariate(1.0) * pace.wait if aborts else None,
            takeover_s=self._router.choice((0.0, 2.0)) * pace.wait,
            prefill_fails=fails,
            junk=self._router.random() < self.stage.faults.junk,
        )
        ticket.watcher = lambda what: self._count(ticket, what)
        ticket.lost = lambda: self._replace_sink(ticket)
        self._tickets.append(ticket)
        hinted, sequential = chance.random() < 0.7, chance.random() < 0.2
        prefill_s = chance.expovariate(100.0)
        decode_s = chance.uniform(0.5, 2.0) * pace.wait if sequential else chance.expovariate(100.0)

        def arrive() -> None:
            ticket.started = self.stage.now
            source, sink = self._alive(prefill, self._prefills), self._alive(decode, self._decodes)
            ticket.hint, ticket.source, ticket.sink = source if hinted else "", source, sink
            self.stage.at(prefill_s, lambda: self.engines[source].take(ticket))
            self.stage.at(decode_s, lambda: self.engines[sink].take(ticket))
            if self._router.random() < self.stage.faults.rebind:
                self.stage.at(self._notice_s(), lambda: self._replace_source(ticket))

        self.stage.at(pace.lead_s + chance.random() * self.busy_s, arrive)

    def _alive(self, chosen: str, others: list[str]) -> str:
        """The engine chosen, or another one if it is dead, as routers know soon."""
        return next((name for name in (chosen, *others) if self.engines[name].alive), chosen)

    def _count(self, ticket: Ticket, what: str) -> None:
        self.stage.counts[what] += 1
        ticket.prefilled = ticket.prefilled or what == "prefilled"
        self._ended += what != "prefilled"

    def _replace_sink(self, ticket: Ticket) -> bool:
        """Its decode engine died before the first token: another one asks for the same KV, under the next attempt."""
        if not ticket.takeover_s:
            return False
        ticket.attempt, ticket.hint = ticket.attempt + 1, ticket.source
        self.stage.counts["decode engines replaced"] += 1

        def send() -> None:
            ticket.sink = self._alive(ticket.sink, self._decodes)
            self.engines[ticket.sink].take(ticket)

        self.stage.at(self._notice_s(), send)
        return True

    def _replace_source(self, ticket: Ticket) -> None:
        """Another prefill engine computes it (or the same has it still), and decode is told so."""
        self.stage.counts["prefill engines replaced"] += 1
        attempt = ticket.attempt + 1

        def send() -> None:
            if ticket.ended or attempt <= ticket.attempt:
                return
            source = self._alive(self._router.choice(self._prefills), self._prefills)
            if source != ticket.source or not self.engines[source].alive:
                self.engines[source].take(ticket)
            ticket.source = source
            self.engines[ticket.sink].played.rebind(ticket, attempt, ticket.source)

        self.stage.at(self._notice_s(), send)

    def _notice_s(self) -> float:
        """How long a router takes to notice."""
        return self._router.expovariate(2.0) * self.pace.wait

    def _cut(self) -> None:
        one, other = self._chance.sample([*self.engines], 2)
        self.stage.counts["partitions"] += 1
        for_s = self._chance.uniform(0.5, 12.0) * self.pace.wait
        self._weather.cut(one, other, both=self._chance.random() < 0.5, for_s=for_s)

    def _stall(self) -> None:
        self.stage.counts["stalls"] += 1
        for_s = self._chance.uniform(0.2, 6.0) * self.pace.wait
        self._weather.stall(self._chance.choice([*self.engines]), for_s)

    def _kill(self) -> None:
        """Kill one, and start it again under its name."""
        boot_s = (0.2 + self._chance.expovariate(0.25)) * self.pace.wait
        name = self._chance.choice([*self.engines])
        dead = self.engines[name]
        if not dead.alive:
            return
        self.stage.counts["kills"] += 1
        dead.kill()
        for ticket in self._tickets:
            if ticket.source == name and not ticket.prefilled and not ticket.ended and ticket.takeover_s:
                self._replace_source(ticket)
        self.stage.at(boot_s, lambda: self._restart(dead))

    def _restart(self, dead: Actor) -> None:
        self.stage.counts["restarts"] += 1
        own = dead.own
        again = Heartbeat(own.engine, own.incarnation + 1, 0, own.role, State.READY, own.tp_size, "m")
        self.engines[own.engine] = self._make(again)


class Life:
    """A play in virtual time: the same seed gives the same life."""

    def __init__(self, seed: int, faults: Faults, transfers: int = TRANSFERS_PER_LIFE, pace: Pace = VIRTUAL) -> None:
        world = self.world = World(seed, faults)
        weather = Weather(world, pace)
        scene = Scene(world, pace, Fabric(world), weather)
        bus = SimBus(world, weather)
        self._play = Play(
            seed,
            scene,
            transfers,
            make=lambda own: make_engine(scene, bus, own),
            outage=bus.restart,
            freeze=lambda for_s: weather.stall(EVERYBODY, for_s),
        )
        self._play.begin()

    def live(self) -> Account:
        """Run to the end.

        Raises:
            Violation: a law was broken.
        """
        world, play = self.world, self._play
        world.run(play.pace.lead_s + play.busy_s)
        world.faults = CALM
        calm_until = world.now + play.pace.calm_s
        while world.now < calm_until and not play.over():
            world.run(world.now + 1.0)
        return play.take_stock()
