"""What a fake prefill engine and a fake decode engine share: real kvbus code runs around a vLLM that computes nothing.

How such an engine speaks to the bus is not here: :mod:`kvbus.sim.virtual_engine` (virtual time and bus) and
:mod:`kvbus.sim.realtime_engine` (real shells in real time) each connect it in their way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from kvbus.engine import Item, RankReport
from kvbus.sim.fabric import BlockPool
from kvbus.sim.request import Request
from kvbus.sim.world import World
from kvbus.wire import Heartbeat

TOKENS_PER_BLOCK = 32
NEXT_STEP_S = 0.002
"""What the scheduler half tells the worker half travels with the next step."""


class FakeVllm(ABC):
    """The vLLM of one incarnation of an engine.

    Args:
        own: who it is.
        submit: hands an item to one of its ranks, by number.
    """

    def __init__(self, world: World, own: Heartbeat, submit: Callable[[int, Item], None]) -> None:
        self.world, self.own, self._submit = world, own, submit
        self.alive = True
        self.pool = world.fabric.pools[own.engine] = BlockPool(own.incarnation, world.fabric.settle)

    @abstractmethod
    def take(self, request: Request) -> None:
        """The engine's leg of a request has arrived."""

    @abstractmethod
    def step(self) -> None:
        """Schedule what can be scheduled; to be called now and then."""

    @abstractmethod
    def on_report(self, rank: int, report: RankReport) -> None:
        """Take what a rank has to tell vLLM."""

    @abstractmethod
    def leftovers(self) -> dict[str, int]:
        """How many requests it remembers, by table."""

    def kill(self) -> None:
        """As SIGKILL: nothing more is done, and what was posted still lands."""
        pools = self.world.fabric.pools
        self.world.fabric.settle()
        self.alive = False
        if pools.get(self.own.engine) is self.pool:
            del pools[self.own.engine]

    def _tell_ranks(self, item: Item) -> None:
        for rank in range(self.own.tp_size):
            self._call_later(NEXT_STEP_S, lambda rank=rank: self._submit(rank, item))  # type: ignore[misc]

    def _call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        def unless_dead() -> None:
            if self.alive:
                callback()

        self.world.runtime.call_later(delay_s, unless_dead)
