"""Engines in real time: the real shells, put together as the connector does, around a played vLLM.

All of them live in one event loop and need no thread: a rank, which a writer thread drives in real engines, is driven
from the loop here. So a process can hold a hundred.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import replace

from kvbus.bus import Bus, Keys, Node
from kvbus.engine import Item, Rank, RankNode, RankReport, SinkScheduler, serve_metadata, sinks_of, sources_of
from kvbus.protocol import Membership, SinkLease, term_s
from kvbus.protocol.decode import Registrar
from kvbus.protocol.prefill import Matcher
from kvbus.sim.live_bus import FaultyBus
from kvbus.sim.live_stage import LiveStage
from kvbus.sim.played import PlayedPrefill
from kvbus.sim.played_decode import PlayedDecode
from kvbus.sim.scene import Scene
from kvbus.sim.stage import Ticket
from kvbus.trace import NoMarks
from kvbus.wire import Heartbeat, PrefillCompleted, PrefillFailed, PrefillProgress, Role, Subjects

STEP_S = 0.02
# The plane says when something has landed, so nothing must be polled for quickly.
MIN_POLL_S = 0.02
SUBJECTS = Subjects("sim")


class RankDriver:
    """Drives one rank from the event loop, as :class:`kvbus.engine.writer.Writer` does from a thread."""

    def __init__(self, stage: LiveStage, report: Callable[[RankReport], None]) -> None:
        self._stage, self._report = stage, report
        self._items: deque[Item] = deque()
        self._rank: Rank | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due = float("inf")

    def drive(self, rank: Rank) -> None:
        self._rank = rank
        self.wake()

    def submit(self, item: Item) -> None:
        self._items.append(item)
        self.wake()

    def wake(self, delay_s: float = 0.0) -> None:
        due = self._stage.now + delay_s
        if due < self._due:
            if self._timer is not None:
                self._timer.cancel()
            self._due = due
            self._timer = self._stage.timer(delay_s, self._run)

    def close(self) -> None:
        self._rank = None
        if self._timer is not None:
            self._timer.cancel()

    def _run(self) -> None:
        self._due, self._timer = float("inf"), None
        rank = self._rank
        if rank is None:
            return
        with self._stage.instant():
            while self._items:
                rank.handle(self._items.popleft())
            wait_s = rank.poll()
        self._report(rank.report())
        if wait_s is not None:
            self.wake(max(wait_s, MIN_POLL_S))


class LiveEngine:
    """One engine: its scheduler's node, and a node, a rank and a played data plane for each of its ranks.

    Args:
        make_bus: given a name for the connection; one for each node, as each is a process of its own.
    """

    def __init__(self, scene: Scene, stage: LiveStage, own: Heartbeat, make_bus: Callable[[str], Bus]) -> None:
        self._keys = Keys(b"sim", own.engine, own.incarnation)
        own = self._keys.introduce(own)
        self.scene, self.own = scene, own
        self._stage = stage
        self._buses: list[FaultyBus] = []
        self._open = contextlib.AsyncExitStack()
        self._make_inner = make_bus
        self._rate = 1 + stage.chance.uniform(-1, 1) * stage.faults.drift
        pace = scene.pace
        self._registrar = Registrar(
            lease=SinkLease(pace.write_lease_s, pace.max_write_s),
            patience_s=pace.patience_s,
            transfer_timeout_s=pace.bound_s / 2,
            cancel_timeout_s=pace.cancel_timeout_s,
        )
        self.node = self._make_node("scheduler", sources_of(own.role))
        self._sink = SinkScheduler(self.node, self._registrar, own.engine, own)
        metadata = scene.fabric.metadata_of(own.incarnation)
        serve_metadata(self.node, own, dict.fromkeys(range(own.tp_size), metadata))
        self.node.present(lambda number: replace(own, number=number) if self.alive else None)
        self.played: PlayedPrefill | PlayedDecode
        if own.role is Role.PREFILL:
            self.played = PlayedPrefill(scene, own, self._submit, self._say)
        else:
            self.played = PlayedDecode(scene, own, self._submit, self._sink)
        self._drivers = [RankDriver(stage, self._report_of(rank)) for rank in range(own.tp_size)]
        self._nodes = [self.node, *(self._make_node(f"rank{rank}", sinks_of(own.role)) for rank in range(own.tp_size))]
        self._ranks = [self._make_rank(rank) for rank in range(own.tp_size)]

    @property
    def alive(self) -> bool:
        return self.played.alive

    async def start(self) -> None:
        for node in self._nodes:
            await self._open.enter_async_context(node)
        for driver, rank in zip(self._drivers, self._ranks, strict=True):
            driver.drive(rank)
        self._step()

    def take(self, ticket: Ticket) -> None:
        """A request's leg has arrived; ``ticket.watcher`` is told what becomes of it."""
        self.played.take(ticket)

    def kill(self) -> None:
        """As SIGKILL: nobody says goodbye, and what was posted still lands."""
        self.played.kill()
        for bus in self._buses:
            bus.cut_off()
        self._stage.spawn(self.close(), f"end-of-{self.own.engine}")

    async def close(self) -> None:
        """Leave the bus; idempotent."""
        for driver in self._drivers:
            driver.close()
        await self._open.aclose()

    def knows(self, other: Heartbeat) -> bool:
        """Whether the scheduler and every rank have heard of it, if they need to."""
        listening = [node for node in self._nodes if other.role in node.hears]
        return all(node.membership.get(other.engine) is not None for node in listening)

    def leftovers(self) -> dict[str, int]:
        """How much it remembers of requests, by table."""
        return {
            **self.played.leftovers(),
            "registrations": len(self._registrar),
            "transfers of ranks": sum(rank.transfers for rank in self._ranks),
            "receives of ranks": sum(rank.receiving for rank in self._ranks),
            "WRITEs": sum(rank.writing for rank in self._ranks),
        }

    def _make_node(self, part: str, hears: Collection[Role]) -> Node:
        name = f"{self.own.engine}-{self.own.incarnation}-{part}"
        bus = self._make_inner(name)
        if self.scene.weather is not None:
            faulty = FaultyBus(bus, self.own.engine, self.scene.weather, self._stage)
            self._buses.append(faulty)
            bus = faulty
        pace = self.scene.pace
        membership = Membership(dead_after_s=pace.dead_after_s)
        return Node(
            bus,
            SUBJECTS,
            name=name,
            membership=membership,
            heartbeat_interval_s=pace.beat_s,
            hears=hears,
            keys=self._keys,
            speaker=self.own.engine,
        )

    def _make_rank(self, number: int) -> Rank:
        pace, own, driver = self.scene.pace, self.own, self._drivers[number]
        plane = self.scene.fabric.make_plane(self._stage, pace, own.engine, number)
        plane.on_news = driver.wake
        ears = RankNode(self._nodes[1 + number], own, number, driver.submit, plane.peer_ranks)
        offset = self._stage.chance.uniform(0, 1e6)

        def clock() -> float:
            return offset + self._stage.now * self._rate

        return Rank(
            matcher=Matcher(
                engine=own.engine,
                incarnation=own.incarnation,
                rank=number,
                ranks=own.tp_size,
                block_lease_s=pace.block_lease_s,
                pool_hold_s=pace.pool_hold_s,
                registration_hold_s=pace.registration_hold_s,
                write_lease_s=pace.write_lease_s,
            ),
            transport=plane,
            rank=number,
            ranks=own.tp_size,
            publish=ears.publish,
            introduce=ears.introduce,
            clock=clock,
            counters=self.scene.counters,
            marking=NoMarks(),
            pulse_interval_s=pace.beat_s if own.role.prefills else None,
            first_pulse_at=clock() + (term_s(pace.write_lease_s, pace.max_write_s) if own.incarnation > 1 else 0.0),
            max_write_s=pace.max_write_s,
        )

    def _submit(self, rank: int, item: Item) -> None:
        self._drivers[rank].submit(item)

    def _say(self, message: PrefillProgress | PrefillCompleted | PrefillFailed) -> None:
        self.node.publish(SUBJECTS.prefill(self.own.engine), message, to=self.own.engine)

    def _report_of(self, rank: int) -> Callable[[RankReport], None]:
        def report(found: RankReport) -> None:
            if isinstance(self.played, PlayedPrefill):
                self.played.release(found.released)
            else:
                self.played.report(rank, found.arrived)

        return report

    def _step(self) -> None:
        """As a step of vLLM's loop."""
        if not self.alive:
            return
        if isinstance(self.played, PlayedDecode):
            for given_up in self._sink.poll():
                if "fenced" in given_up.reason:
                    self._stage.counts["fenced by the lease"] += 1
                self.played.abandon(given_up.request_id)
        self.played.tick()
        self._stage.at(STEP_S, self._step)
