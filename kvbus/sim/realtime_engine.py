"""Engines in real time: the real shells, put together as the connector does, around a fake vLLM.

All of them live in one event loop and need no thread: a rank, which a writer thread drives in real engines, is driven
from the loop here. So a process can hold a hundred engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import replace

from kvbus.bus import Bus, Keys, Node
from kvbus.engine import (
    Item,
    OfPrefill,
    Rank,
    RankNode,
    RankReport,
    SinkScheduler,
    serve_metadata,
    sinks_of,
    sources_of,
)
from kvbus.protocol import Membership, to_all_interval_s
from kvbus.sim.engine import Engine
from kvbus.sim.fake_decode import FakeDecode
from kvbus.sim.fake_prefill import FakePrefill
from kvbus.sim.network import Network
from kvbus.sim.realtime_bus import FaultyBus
from kvbus.sim.realtime_runtime import RealTimeRuntime
from kvbus.sim.world import World
from kvbus.wire import Heartbeat, Role, Subjects

STEP_S = 0.02
# The transport says when something has landed, so nothing must be polled for quickly.
MIN_POLL_S = 0.02
SUBJECTS = Subjects("sim")


class RankDriver:
    """Drives one rank from the event loop, as :class:`kvbus.engine.writer.Writer` does from a thread."""

    def __init__(self, runtime: RealTimeRuntime, report: Callable[[RankReport], None]) -> None:
        self._runtime, self._report = runtime, report
        self._items: deque[Item] = deque()
        self._rank: Rank | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due = float("inf")

    def start(self, rank: Rank) -> None:
        self._rank = rank
        self.wake()

    def submit(self, item: Item) -> None:
        self._items.append(item)
        self.wake()

    def wake(self, delay_s: float = 0.0) -> None:
        due = self._runtime.now + delay_s
        if due < self._due:
            if self._timer is not None:
                self._timer.cancel()
            self._due = due
            self._timer = self._runtime.call_later(delay_s, self._run)

    def close(self) -> None:
        self._rank = None
        if self._timer is not None:
            self._timer.cancel()

    def _run(self) -> None:
        self._due, self._timer = float("inf"), None
        rank = self._rank
        if rank is None:
            return
        with self._runtime.stopped_clock():
            while self._items:
                rank.handle(self._items.popleft())
            wait_s = rank.poll()
        self._report(rank.report())
        if wait_s is not None:
            self.wake(max(wait_s, MIN_POLL_S))


class RealTimeEngine(Engine):
    """One engine: a node for its scheduler, and a node and a rank for each of its ranks.

    Args:
        make_bus: called with a name for each node's connection; in real engines each node is a process of its own.
        network: the faults of these connections; None for none.
    """

    def __init__(
        self,
        world: World,
        runtime: RealTimeRuntime,
        own: Heartbeat,
        make_bus: Callable[[str], Bus],
        network: Network | None = None,
    ) -> None:
        self._keys = Keys(b"sim", own.engine, own.incarnation)
        own = self._keys.introduce(own)
        super().__init__(world, own)
        self._runtime, self._make_bus, self._network = runtime, make_bus, network
        self._buses: list[FaultyBus] = []
        self._entered = contextlib.AsyncExitStack()
        scheduler = self._make_node("scheduler", sources_of(own))
        self._sink = SinkScheduler(scheduler, self.registrar, own.engine, own)
        metadata = world.fabric.metadata_of(own.incarnation)
        serve_metadata(scheduler, own, dict.fromkeys(range(own.tp_size), metadata))
        scheduler.present(lambda number: replace(own, number=number) if self.alive else None)

        def publish(message: OfPrefill) -> None:
            scheduler.publish(SUBJECTS.prefill(own.engine), message, to=own.engine)

        make_vllm = FakePrefill if own.role is Role.PREFILL else FakeDecode
        self.vllm = make_vllm(world, own, self._submit, publish, self._sink)
        self._sink.watch_prefills(self.vllm.moved)
        on_report = self.vllm.on_report
        self._drivers = [RankDriver(runtime, functools.partial(on_report, rank)) for rank in range(own.tp_size)]
        self._nodes = [scheduler, *(self._make_node(f"rank{rank}", sinks_of(own)) for rank in range(own.tp_size))]
        self.ranks = [self._make_rank(rank) for rank in range(own.tp_size)]

    async def start(self) -> None:
        for node in self._nodes:
            await self._entered.enter_async_context(node)
        for driver, rank in zip(self._drivers, self.ranks, strict=True):
            driver.start(rank)
        self._step()

    def kill(self) -> None:
        self.vllm.kill()
        for bus in self._buses:
            bus.cut_off()
        self._runtime.spawn(self.close(), f"end-of-{self.own.engine}")

    async def close(self) -> None:
        """Leave the bus; idempotent."""
        for driver in self._drivers:
            driver.close()
        await self._entered.aclose()

    def knows(self, other: Heartbeat) -> bool:
        """Whether the scheduler and every rank have heard of it, if they need to."""
        listening = [node for node in self._nodes if other.role in node.hears]
        return all(node.membership.get(other.engine) is not None for node in listening)

    def _make_node(self, part: str, hears: Collection[Role]) -> Node:
        timing, name = self.world.timing, f"{self.own.engine}-{self.own.incarnation}-{part}"
        bus = self._make_bus(name)
        if self._network is not None:
            faulty = FaultyBus(bus, self.own.engine, self._network, self._runtime)
            self._buses.append(faulty)
            bus = faulty
        return Node(
            bus,
            SUBJECTS,
            name=name,
            membership=Membership(dead_after_s=timing.dead_after_s),
            heartbeat_interval_s=timing.heartbeat_s,
            to_all_interval_s=to_all_interval_s(timing.heartbeat_s, timing.dead_after_s),
            hears=hears,
            keys=self._keys,
            speaker=self.own.engine,
        )

    def _make_rank(self, number: int) -> Rank:
        driver = self._drivers[number]
        transport = self.world.fabric.make_transport(self.own.engine, number)
        transport.on_progress = driver.wake
        node = RankNode(self._nodes[1 + number], self.own, number, driver.submit, transport.peer_ranks)
        return self.make_rank(
            number, clock=self.make_clock(), transport=transport, publish=node.publish, introduce=node.introduce
        )

    def _submit(self, rank: int, item: Item) -> None:
        self._drivers[rank].submit(item)

    def _step(self) -> None:
        """As a step of vLLM's loop."""
        if not self.alive:
            return
        for given_up in self._sink.poll():
            self._runtime.counts["fenced by the lease"] += "fenced" in given_up.reason
            self.vllm.abandon(given_up.request_id)
        self.vllm.step()
        self._runtime.call_later(STEP_S, self._step)
