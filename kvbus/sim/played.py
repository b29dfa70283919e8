"""What vLLM does in an engine, played; here a prefill engine: requests queue, take time to compute, and hold blocks.

How such an engine speaks to the bus is not here: :mod:`kvbus.sim.engines` (played bus, virtual time) and
:mod:`kvbus.sim.live_engine` (real shells, real time) each put it together in their way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from kvbus.engine import Item, Told
from kvbus.sim.faults import Violation
from kvbus.sim.plane import Arena
from kvbus.sim.scene import Scene
from kvbus.sim.stage import Ticket
from kvbus.wire import Heartbeat, PrefillCompleted, PrefillFailed, PrefillProgress, blocks

TOKENS_PER_BLOCK = 32
NEXT_STEP_S = 0.002
"""What the scheduler half tells the worker half travels with the next step."""


class Played:
    """What both kinds of engine share.

    Args:
        own: who it is.
        submit: hands an item to one of its ranks, by number.
    """

    def __init__(self, scene: Scene, own: Heartbeat, submit: Callable[[int, Item], None]) -> None:
        self.scene, self.own, self._submit = scene, own, submit
        self.alive = True
        self.arena = scene.fabric.arenas[own.engine] = Arena(own.incarnation, scene.fabric.settle)

    def kill(self) -> None:
        """As SIGKILL: nothing more is done, and what was posted still lands."""
        self.scene.fabric.settle()
        self.alive = False
        if self.scene.fabric.arenas.get(self.own.engine) is self.arena:
            del self.scene.fabric.arenas[self.own.engine]

    def leftovers(self) -> dict[str, int]:
        """How much it remembers of requests, by table."""
        raise NotImplementedError

    def tick(self) -> None:
        """To be called now and then."""
        raise NotImplementedError

    def rebind(self, ticket: Ticket, attempt: int, engine: str) -> None:
        """A router's word to a decode engine."""
        raise NotImplementedError

    def _tell_ranks(self, item: Item) -> None:
        for rank in range(self.own.tp_size):
            self._later(NEXT_STEP_S, lambda rank=rank: self._submit(rank, item))  # type: ignore[misc]

    def _later(self, delay_s: float, do: Callable[[], None]) -> None:
        def unless_dead() -> None:
            if self.alive:
                do()

        self.scene.stage.at(delay_s, unless_dead)


class PlayedPrefill(Played):
    """A prefill engine: one prompt at a time.

    Args:
        say: publishes.
    """

    def __init__(
        self,
        scene: Scene,
        own: Heartbeat,
        submit: Callable[[int, Item], None],
        say: Callable[[PrefillProgress | PrefillCompleted | PrefillFailed], None],
    ) -> None:
        super().__init__(scene, own, submit)
        self._say = say
        self._queue: list[Ticket] = []
        self._computing: Ticket | None = None
        self._held: dict[str, list[int]] = {}
        self._number = 0
        self._released: Counter[str] = Counter()

    def leftovers(self) -> dict[str, int]:
        return {"queued": len(self._queue) + (self._computing is not None), "held": len(self._held)}

    def take(self, ticket: Ticket) -> None:
        """The prefill leg has arrived."""
        if not self.alive:
            return
        self._queue.append(ticket)
        total = ticket.prompt_blocks * TOKENS_PER_BLOCK
        self._tell(PrefillProgress(**self._about(ticket), computed=0, total=total, number=self._next()))
        self.tick()

    def release(self, request_ids: Sequence[str]) -> None:
        """A rank no longer reads the blocks of these."""
        for request_id in request_ids:
            if request_id not in self._held:
                raise Violation(f"{self.own.engine} released {request_id:.64}, which it does not hold: vLLM dies of it")
            self._released[request_id] += 1
            if self._released[request_id] == self.own.tp_size:
                self.arena.give_back(self._held.pop(request_id))
        self.tick()

    def tick(self) -> None:
        if self._computing is not None or not self._queue or not self.alive:
            return
        ticket = self._queue[0]
        taken = self.arena.take(self._about(ticket)["request_id"], ticket.prompt_blocks)
        if taken is None:
            return
        self._computing = self._queue.pop(0)
        takes_s = ticket.prompt_blocks * self.scene.stage.chance.uniform(0.01, 0.04) * self.scene.pace.work
        self._later(takes_s, lambda: self._finish(ticket, taken))

    def _finish(self, ticket: Ticket, taken: list[int]) -> None:
        self._computing = None
        about = {**self._about(ticket), "number": self._next()}
        word: PrefillCompleted | PrefillFailed
        if ticket.prefill_fails:
            self.arena.give_back(taken)
            word = PrefillFailed(**about, reason="aborted")
        else:
            self._held[about["request_id"]] = taken
            tokens = ticket.prompt_blocks * TOKENS_PER_BLOCK
            word = PrefillCompleted(**about, blocks=blocks.to_runs([taken]), tokens=tokens)
        self._tell(word)
        ticket.watcher("prefilled")
        self.tick()

    def _tell(self, word: PrefillProgress | PrefillCompleted | PrefillFailed) -> None:
        self._say(word)
        self._tell_ranks(word)  # this way it cannot be lost
        self._tell_ranks(Told(word.number))

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _about(self, ticket: Ticket) -> dict[str, Any]:
        return {
            "transfer_id": ticket.transfer_id,
            "source_engine": self.own.engine,
            "source_incarnation": self.own.incarnation,
            "request_id": f"p-{ticket.transfer_id}",
        }
