"""An engine without vLLM: the connector's real halves, on a memory bus, over a memory transport, stepped by hand."""

from __future__ import annotations

import os
import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvbus_connector.scheduler import SchedulerHalf
from kvbus_connector.step import StepPlan
from kvbus_connector.worker import WorkerHalf

from kvbus.bus import MemoryBroker, MemoryBus
from kvbus.config import Config
from kvbus.engine.memory_transport import Fabric, MemoryTransport
from kvbus.wire import Heartbeat, Role, State

COMPAT = (("dtype", "bfloat16"), ("model", "m"))
BLOCK = 32

SECRET = b"of the engines in tests"


class PlainRules:
    """Block rules of a model with full attention only."""

    def clip(self, block_ids: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        return block_ids

    def external_tokens(self, prompt_tokens: int) -> int:
        return prompt_tokens

    def truncate(self, request: Any) -> None:
        pass


class FakePlane(MemoryTransport):
    def __init__(self, fabric: Fabric, engine: str, rank: int, ranks: int, num_blocks: int) -> None:
        super().__init__(fabric, engine, rank, ranks, num_blocks)
        self.rank, self.ranks = rank, ranks
        self.heard: list[str] = []

    def notifications(self) -> list[str]:
        """Kept in ``heard``: what the rank knows to have landed, which is later than ``content``."""
        found = super().notifications()
        self.heard += found
        return found

    def register(self, kv_caches: dict[str, Any]) -> None:
        assert kv_caches == {}


@dataclass
class Request:
    """What the connector sees of vLLM's request."""

    request_id: str
    kv_transfer_params: dict[str, Any] | None
    num_prompt_tokens: int = 96
    num_computed_tokens: int = 96
    prompt_token_ids: list[int] | None = None
    trace_headers: dict[str, str] | None = None
    num_output_tokens: int = 0
    output_token_ids: Sequence[int] = ()


@dataclass
class FakeEngine:
    """One engine of ``ranks`` ranks."""

    broker: MemoryBroker
    fabric: Fabric
    name: str
    role: Role
    ranks: int = 1
    num_blocks: int = 64
    incarnation: int = 1
    compat: tuple[tuple[str, str], ...] = COMPAT
    options: dict[str, Any] = field(default_factory=dict)
    decodes_at_once: bool = True

    def __post_init__(self) -> None:
        options = {"heartbeat_interval_s": 0.05, "local_prefill_tokens": 0, **self.options}
        config = Config(nats_url="nats://memory", http_address="127.0.0.1:1", **options)
        own = Heartbeat(
            self.name,
            self.incarnation,
            0,
            self.role,
            State.STARTING,
            self.ranks,
            "m",
            compat=self.compat,
            history=config.history,
            first_token=config.first_token,
        )
        self.own = own
        self.planes = [
            FakePlane(self.fabric, self.name, rank, self.ranks, self.num_blocks) for rank in range(self.ranks)
        ]
        self.scheduler = SchedulerHalf(config, own, PlainRules(), MemoryBus(self.broker), os.getpid(), SECRET)
        self.workers = [
            WorkerHalf(config, own, lambda plane=plane: plane, lambda _: MemoryBus(self.broker), SECRET)  # type: ignore[misc]
            for plane in self.planes
        ]
        for worker in self.workers:
            worker.register({})
        self.scheduler.set_metadata({plane.rank: plane.metadata for plane in self.planes})
        self.released: Counter[str] = Counter()
        self.received: dict[str, bool] = {}
        self._reports: Counter[str] = Counter()
        self._arrived: dict[str, Request] = {}

    def close(self) -> None:
        self.scheduler.close()
        for worker in self.workers:
            worker.close()

    def die(self) -> None:
        """As kill -9: nobody says goodbye."""
        for node in (self.scheduler.node, *(worker.node for worker in self.workers)):
            assert node is not None
            node.bus.cut_off()  # type: ignore[attr-defined]

    def step(self, scheduled: dict[str, int] | None = None) -> StepPlan:
        """One step of vLLM's loop; results are gathered as its aggregator does: when every rank has reported."""
        plan = self.scheduler.plan_step(scheduled or {})
        finished: list[str] = []
        sent: list[str] = []
        for worker in self.workers:
            worker.begin_step(pickle.loads(pickle.dumps(plan)))
            report = worker.results()
            for request_id in report.released:
                self._reports[f"sent {request_id}"] += 1
                if self._reports[f"sent {request_id}"] == self.ranks:
                    self.released[request_id] += 1
                    sent.append(request_id)
            for arrived in report.arrived:
                self._reports[arrived.request_id] += 1
                assert self._reports[arrived.request_id] <= self.ranks, "reported twice"
                self.received[arrived.request_id] = self.received.get(arrived.request_id, True) and arrived.ok
                if self._reports[arrived.request_id] == self.ranks:
                    finished.append(arrived.request_id)
        received, failed = set(finished), {each for each in finished if not self.received[each]}
        self.scheduler.admit(received, failed, kept := set(sent))
        if not self.own.history:
            assert (received, kept) == (set(finished), set(sent)), "a rank reported what vLLM does not wait for"
        self.scheduler.step_done(received, failed, kept)
        if finished and self.decodes_at_once:
            self.start_decoding(*(self._arrived[each] for each in finished if self.received[each]))
        return plan

    def start_decoding(self, *requests: Request) -> None:
        """Their first tokens are out."""
        for request in requests:
            request.num_output_tokens = 1
        self.step()

    def expect_again(self, request_id: str) -> None:
        """vLLM has allocated blocks for another attempt."""
        self._reports[request_id] = 0

    def has_received(self, request_id: str) -> bool:
        self.step()
        return self._reports[request_id] == self.ranks

    def has_released(self, request_id: str) -> bool:
        self.step()
        return self.released[request_id] == 1

    def knows(self, other: FakeEngine) -> bool:
        """Whether its scheduler and ranks have heard of the other, those of them that need to."""
        found = [self.scheduler.node, *(worker.node for worker in self.workers if worker.node is not None)]
        listening = [node for node in found if other.role in node.hears]
        return all(node.membership.get(other.name) is not None for node in listening)

    def prefill(self, request: Request, blocks: Sequence[int], *, well: bool = True) -> dict[str, Any] | None:
        """A prefill from arrival to end; returns the parameters for a sequential router."""
        self.scheduler.arrived(request)
        stays, params = self.scheduler.finished(request, [list(blocks)], prefilled=well)
        assert stays == (params is not None)
        return params

    def allocate(self, request: Request, blocks: Sequence[int], cached_tokens: int = 0) -> int:
        """What vLLM does when it schedules a request; returns the tokens that will come from outside."""
        self.arrive(request)
        tokens = self.scheduler.tokens_from_outside(request, cached_tokens)
        assert tokens is not None
        self.scheduler.allocated(request, [list(blocks)], tokens)
        return tokens

    def arrive(self, request: Request) -> None:
        """The request is in the queue; asked again, it is there already."""
        if request.request_id not in self._arrived:
            self._arrived[request.request_id] = request
            self.scheduler.arrived(request)


Boot = Callable[..., FakeEngine]
"""Starts an engine by its name."""


def legs(transfer_id: str = "t", hint: str | None = "P") -> tuple[Request, Request]:
    """The two requests that a router makes of one."""
    remote: dict[str, Any] = {"do_remote_prefill": True, "transfer_id": transfer_id}
    if hint is not None:
        remote["prefill_engine_id"] = hint
    return (
        Request(f"cmpl-{transfer_id}-0-aaaaaaaa", {"do_remote_decode": True, "transfer_id": transfer_id}),
        Request(f"cmpl-{transfer_id}-0-bbbbbbbb", remote),
    )


def restarted(engine: FakeEngine) -> FakeEngine:
    return replace(engine, incarnation=engine.incarnation + 1)
