"""What a fake prefill engine and a fake decode engine share: real kvbus code runs around a vLLM that computes nothing.

Each of them gives KV and takes it: prompts' KV goes from prefill to decode, and history (:mod:`kvbus.sim.fake_history`)
the other way. How such an engine speaks to the bus is not here: :mod:`kvbus.sim.virtual_engine` (virtual time and bus)
and :mod:`kvbus.sim.realtime_engine` (real shells in real time) each connect it in their way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvbus.engine import Abandon, Item, OfPrefill, RankReport, Told
from kvbus.protocol.decode import Arrived
from kvbus.sim.fabric import BlockPool
from kvbus.sim.faults import Violation
from kvbus.sim.request import Request
from kvbus.sim.world import World
from kvbus.wire import Cancel, Heartbeat, Registration, Wanted

TOKENS_PER_BLOCK = 32
NEXT_STEP_S = 0.002
"""What the scheduler half tells the worker half travels with the next step."""


class SinkPort(Protocol):
    """The calls of :class:`kvbus.engine.decode_scheduler.SinkScheduler` that vLLM's thread makes; see there."""

    def why_not(self, hint: str) -> str: ...

    def register(self, registration: Registration, hint: str) -> None: ...

    def received(self, request_id: str) -> None: ...

    def aborted(self, request_id: str) -> None: ...

    def first_token(self, request_id: str) -> None: ...

    def rebound(self, request_id: str, attempt: int, engine: str) -> None: ...

    def unwanted(self, cancel: Cancel, hint: str) -> None: ...

    def want(self, wanted: Wanted, hint: str) -> None: ...


@dataclass(slots=True)
class Receive:
    """A receive that vLLM waits for: ``blocks`` are to be filled, ``others`` are the request's, too."""

    request: Request
    blocks: list[int]
    others: list[int] = field(default_factory=list)
    ok: bool = True
    aborted: bool = False
    rebound: tuple[int, str] | None = None
    ended_on: set[int] = field(default_factory=set)
    """The ranks that have reported it."""


class FakeVllm(ABC):
    """The vLLM of one incarnation of an engine.

    Args:
        own: who it is.
        submit: hands an item to one of its ranks, by number.
        publish: says on the bus what this engine has of a prompt.
        sink: registers what it receives.
    """

    def __init__(
        self,
        world: World,
        own: Heartbeat,
        submit: Callable[[int, Item], None],
        publish: Callable[[OfPrefill], None],
        sink: SinkPort,
    ) -> None:
        self.world, self.own = world, own
        self._submit, self._publish, self._sink = submit, publish, sink
        self.alive = True
        self.pool = world.fabric.pools[own.engine] = BlockPool(own.incarnation, world.fabric.settle)
        self._receives: dict[str, Receive] = {}
        self._held: dict[str, list[int]] = {}
        self._let_go_on: Counter[str] = Counter()
        self._number = 0

    @abstractmethod
    def take(self, request: Request) -> None:
        """The engine's leg of a request has arrived."""

    @abstractmethod
    def step(self) -> None:
        """Schedule what can be scheduled; to be called now and then."""

    @abstractmethod
    def leftovers(self) -> dict[str, int]:
        """How many requests it remembers, by table."""

    @abstractmethod
    def _let_go(self, request_id: str, block_ids: list[int]) -> None:
        """No rank reads these blocks of a request any more."""

    @abstractmethod
    def _arrived(self, request_id: str, receive: Receive) -> None:
        """Every rank has reported this receive as over."""

    @abstractmethod
    def moved(self, message: OfPrefill) -> None:
        """Another engine says, since it was asked, what it has of a prompt."""

    def on_report(self, rank: int, report: RankReport) -> None:
        """Take what a rank has to tell vLLM."""
        for request_id in report.released:
            self._released(request_id)
        for arrived in report.arrived:
            self._end_receive(rank, arrived)

    def abandon(self, request_id: str) -> None:
        """kvbus has given up this receive; the ranks report it, unless they have already."""
        self.world.runtime.counts["receives given up"] += 1
        self._tell_ranks(Abandon(request_id))

    def kill(self) -> None:
        """As SIGKILL: nothing more is done, and what was posted still lands."""
        pools = self.world.fabric.pools
        self.world.fabric.settle()
        self.alive = False
        if pools.get(self.own.engine) is self.pool:
            del pools[self.own.engine]

    def _released(self, request_id: str) -> None:
        if request_id not in self._held:
            raise Violation(f"{self.own.engine} released {request_id:.64}, which it does not hold: vLLM dies of it")
        self._let_go_on[request_id] += 1
        if self._let_go_on[request_id] == self.own.tp_size:
            del self._let_go_on[request_id]
            self._let_go(request_id, self._held.pop(request_id))

    def _end_receive(self, rank: int, arrived: Arrived) -> None:
        receive = self._receives.get(arrived.request_id)
        if receive is None or rank in receive.ended_on:
            raise Violation(f"{self.own.engine} reported {arrived.request_id} twice: vLLM dies of it")
        receive.ended_on.add(rank)
        receive.ok = receive.ok and arrived.ok
        if self._is_over(receive):
            self._arrived(arrived.request_id, receive)

    def _is_over(self, receive: Receive) -> bool:
        return len(receive.ended_on) == self.own.tp_size

    def _check_content(self, block_ids: Sequence[int], request: Request, first: int) -> None:
        """These blocks have come: they must be of the prompt that this engine was given."""
        if self.world.fabric.copies:
            self.pool.check_content(block_ids, self.own.tp_size, request.prompt_on(self.own.role), first)

    def _digest(self, request: Request, tokens: int) -> str:
        return f"{request.prompt_on(self.own.role)}:{tokens}"

    def _tell(self, message: OfPrefill) -> None:
        self._publish(message)
        self._tell_ranks(message)  # this way it cannot be lost
        self._tell_ranks(Told(message.number))

    def _tell_ranks(self, item: Item) -> None:
        for rank in range(self.own.tp_size):
            self._call_later(NEXT_STEP_S, lambda rank=rank: self._submit(rank, item))  # type: ignore[misc]

    def _call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        def unless_dead() -> None:
            if self.alive:
                callback()

        self.world.runtime.call_later(delay_s, unless_dead)

    def _as_source(self, request: Request, suffix: str = "") -> dict[str, Any]:
        """What each message about KV that is here says first."""
        self._number += 1
        return {
            "transfer_id": request.transfer_id + suffix,
            "source_engine": self.own.engine,
            "source_incarnation": self.own.incarnation,
            "request_id": self._id_of(request),
            "number": self._number,
        }

    def _as_sink(self, request: Request, attempt: int, suffix: str = "") -> dict[str, Any]:
        """What each message about KV that is wanted here says first."""
        return {
            "transfer_id": request.transfer_id + suffix,
            "attempt": attempt,
            "sink_engine": self.own.engine,
            "sink_incarnation": self.own.incarnation,
            "request_id": self._id_of(request),
        }

    def _id_of(self, request: Request) -> str:
        return f"{'p' if self.own.role.prefills else 'd'}-{request.transfer_id}"
