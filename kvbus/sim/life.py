"""One life: a few engines, some hundred requests, faults, then calm; and the laws that must hold in it.

The laws: no WRITE lands in a block that changed owner (checked when it lands); nothing is released or reported twice
(checked when it happens); every request ends within its bound; in the end every block is free and every table empty.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvbus.sim.engines import BOUND_S, SimDecode, SimPrefill, Ticket
from kvbus.sim.plane import NUM_BLOCKS, Fabric
from kvbus.sim.world import CALM, Faults, Violation, World

TRANSFERS_PER_LIFE = 200
BUSY_S = 60.0
CALM_S = 200.0


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


class Life:
    """Builds the engines from the seed, lets them live, and takes stock."""

    def __init__(self, seed: int, faults: Faults, transfers: int = TRANSFERS_PER_LIFE) -> None:
        self.world = World(seed, faults)
        chance = self.world.chance
        self._fabric = Fabric()
        ranks = chance.choice((1, 1, 2))
        self._prefills = {
            name: SimPrefill(self.world, self._fabric, name, ranks) for name in _names("P", chance.randint(1, 3))
        }
        self._decodes = {
            name: SimDecode(self.world, self._fabric, name, ranks) for name in _names("D", chance.randint(1, 3))
        }
        self._tickets: list[Ticket] = []
        for number in range(transfers):
            self.world.at(3.0 + chance.random() * BUSY_S, lambda number=number: self._request(number))  # type: ignore[misc]
        self.world.every(faults.cut_every_s, self._cut)
        self.world.every(faults.kill_every_s, self._kill)
        self.world.every(faults.outage_every_s, lambda: self.world.bus.restart(chance.uniform(0.2, 8.0)))
        self.world.every(faults.stall_every_s, self._stall)

    def live(self) -> Account:
        """Run to the end.

        Raises:
            Violation: a law was broken.
        """
        world = self.world
        world.run(3.0 + BUSY_S)
        world.faults = CALM
        calm_until = world.now + CALM_S
        while world.now < calm_until and not self._over():
            world.run(world.now + 1.0)
        self._take_stock()
        return Account(len(self._tickets), world.counts, max(self._waits(), default=0.0))

    def _request(self, number: int) -> None:
        """Both legs of one request, sent by a router at about the same time."""
        chance = self.world.chance
        prefill = chance.choice(sorted(self._prefills))
        decode = chance.choice(sorted(self._decodes))
        blocks = chance.randint(1, 12)
        aborts = chance.random() < self.world.faults.abort
        ticket = Ticket(
            transfer_id=f"t{number}",
            prompt_blocks=blocks,
            cached_blocks=chance.choice((0, 0, blocks // 2)),
            hint=prefill if chance.random() < 0.7 else "",
            started=self.world.now,
            abort_after_s=chance.expovariate(1.0) if aborts else None,
        )
        self._tickets.append(ticket)
        sequential = chance.random() < 0.2
        self.world.at(chance.expovariate(100.0), lambda: self._prefills[prefill].take(ticket))
        later_s = chance.uniform(0.5, 2.0) if sequential else chance.expovariate(100.0)
        self.world.at(later_s, lambda: self._decodes[decode].take(ticket))

    def _cut(self) -> None:
        chance = self.world.chance
        one, other = chance.sample([*sorted(self._prefills), *sorted(self._decodes)], 2)
        self.world.counts["partitions"] += 1
        self.world.bus.cut(one, other, both=chance.random() < 0.5, for_s=chance.uniform(0.5, 12.0))

    def _stall(self) -> None:
        chance = self.world.chance
        engine = chance.choice([*self._prefills.values(), *self._decodes.values()])
        self.world.counts["stalls"] += 1
        self.world.bus.stall(engine.member, chance.uniform(0.2, 6.0))

    def _kill(self) -> None:
        """Kill one, and start it again under its name: vLLM takes longer to boot than a write lease and a WRITE."""
        chance, counts = self.world.chance, self.world.counts
        alive = [each.name for each in [*self._prefills.values(), *self._decodes.values()] if each.alive]
        if not alive:
            return
        name = chance.choice(sorted(alive))
        boot_s = chance.uniform(0.5, 10.0)
        counts["kills"] += 1
        if name in self._prefills:
            dead = self._prefills[name]
            dead.kill()
            self.world.at(boot_s, lambda: self._prefills.update({name: self._reborn_prefill(dead)}))
        else:
            gone = self._decodes[name]
            gone.kill()
            self.world.at(boot_s, lambda: self._decodes.update({name: self._reborn_decode(gone)}))

    def _reborn_prefill(self, dead: SimPrefill) -> SimPrefill:
        current = self._prefills[dead.name]
        if current is not dead:
            return current  # killed again meanwhile, and started again already
        return SimPrefill(self.world, self._fabric, dead.name, dead.ranks_count, dead.incarnation + 1)

    def _reborn_decode(self, gone: SimDecode) -> SimDecode:
        current = self._decodes[gone.name]
        if current is not gone:
            return current
        return SimDecode(self.world, self._fabric, gone.name, gone.ranks_count, gone.incarnation + 1)

    def _over(self) -> bool:
        engines = [*self._prefills.values(), *self._decodes.values()]
        return all(ticket.ended for ticket in self._tickets) and all(engine.idle for engine in engines)

    def _waits(self) -> list[float]:
        return [ticket.ended_at - ticket.started for ticket in self._tickets if ticket.ended]

    def _take_stock(self) -> None:
        for ticket in self._tickets:
            if not ticket.ended:
                raise Violation(f"{ticket.transfer_id} never ended")
            if ticket.ended_at - ticket.started > BOUND_S:
                raise Violation(f"{ticket.transfer_id} took {ticket.ended_at - ticket.started:.1f} s: {ticket.ended}")
        for engine in [*self._prefills.values(), *self._decodes.values()]:
            if engine.arena.free_blocks != NUM_BLOCKS:
                raise Violation(f"{engine.name} has {engine.arena.free_blocks} of {NUM_BLOCKS} blocks free")
            if not engine.idle:
                raise Violation(f"{engine.name} still remembers something")


def _names(letter: str, count: int) -> list[str]:
    return [f"{letter}{number}" for number in range(count)]
