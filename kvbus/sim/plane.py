"""The played data plane: blocks carry the tag of the request that owns them, and a WRITE that lands checks it."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kvbus.engine import Transport
from kvbus.errors import PeerRefusedError, TransferRefusedError
from kvbus.protocol.prefill import WriteEnded, WriteJob
from kvbus.sim.faults import Violation
from kvbus.sim.stage import Pace, Stage
from kvbus.wire import blocks

NUM_BLOCKS = 96
_ROUNDING_S = 1e-6


class Plane(Transport, Protocol):
    """A played transport; ``on_news`` is called when something has landed, here or at the peer."""

    on_news: Callable[[], None]


class Arena:
    """The memory of one incarnation of an engine, all ranks alike: which request owns each block.

    Args:
        settle: lands every WRITE that is due, before owners change.
    """

    def __init__(self, incarnation: int, settle: Callable[[], None]) -> None:
        self.incarnation, self._settle = incarnation, settle
        self.owner: dict[int, str] = {}
        self._free = deque(range(NUM_BLOCKS))

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def take(self, request_id: str, count: int) -> list[int] | None:
        """Allocate, last freed first; None if there are too few."""
        if count > len(self._free):
            return None
        taken = [self._free.popleft() for _ in range(count)]
        self.owner.update(dict.fromkeys(taken, request_id))
        return taken

    def give_back(self, block_ids: Sequence[int]) -> None:
        self._settle()
        for block in block_ids:
            if self.owner.pop(block, None) is None:
                raise Violation(f"block {block} freed twice")
            # Reused at once: the worst that can happen to a late WRITE.
            self._free.appendleft(block)


class Fabric:
    """Who has which memory, by engine, and the WRITEs under way.

    A WRITE lands at its time, whatever engines do meanwhile: where time is real and timers are late, it still lands
    before anything that happens after its time.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._landings: list[tuple[float, int, Callable[[], None]]] = []
        self._tie = itertools.count()
        self.arenas: dict[str, Arena] = {}
        self.ranks: dict[tuple[str, int], SimPlane] = {}

    def make_plane(self, stage: Stage, pace: Pace, engine: str, rank: int) -> Plane:
        """The transport of one rank."""
        return SimPlane(stage, pace, self, engine, rank)

    def metadata_of(self, incarnation: int) -> bytes:
        """What a rank answers to a metadata request."""
        return metadata_of(incarnation)

    def land_after(self, takes_s: float, land: Callable[[], None]) -> None:
        heapq.heappush(self._landings, (self._stage.now + takes_s, next(self._tie), land))
        self._stage.at(takes_s, self.settle)

    def settle(self) -> None:
        """Land every WRITE that is due."""
        while self._landings and self._landings[0][0] <= self._stage.now + _ROUNDING_S:
            _, _, land = heapq.heappop(self._landings)
            land()


class SimPlane:
    """``kvbus.engine.transport.Transport`` of one rank."""

    def __init__(self, stage: Stage, pace: Pace, fabric: Fabric, engine: str, rank: int) -> None:
        self._stage, self._pace, self._fabric, self._engine, self._rank = stage, pace, fabric, engine, rank
        self._peers: dict[str, Arena] = {}
        self._ended: list[WriteEnded] = []
        self._stuck: list[WriteJob] = []
        self._notifications: list[str] = []
        self.on_news: Callable[[], None] = lambda: None
        fabric.ranks[engine, rank] = self

    def peer_ranks(self, tp_size: int) -> Sequence[int]:
        return [self._rank % tp_size]

    def add_peer(self, engine: str, tp_size: int, metadata: Mapping[int, bytes]) -> int:
        arena = self._fabric.arenas.get(engine)
        if arena is None or any(payload != metadata_of(arena.incarnation) for payload in metadata.values()):
            raise PeerRefusedError(engine, "it is gone")
        self._peers[engine] = arena
        return NUM_BLOCKS

    def drop_peer(self, engine: str) -> None:
        self._peers.pop(engine, None)
        broken = [job for job in self._stuck if job.sink_engine == engine]
        self._stuck = [job for job in self._stuck if job.sink_engine != engine]
        self._ended += [WriteEnded(job.transfer_id, job.attempt, failure="disconnected") for job in broken]

    def post(self, job: WriteJob, notification: str) -> None:
        stage = self._stage
        arena = self._peers.get(job.sink_engine)
        if arena is None or stage.chance.random() < stage.faults.write_failure:
            raise TransferRefusedError("no way to the peer")
        stage.counts["writes"] += 1
        if stage.chance.random() < stage.faults.stuck:
            stage.counts["writes stuck"] += 1
            self._stuck.append(job)
            return
        takes_s = stage.chance.expovariate(1 / (stage.faults.mean_write_s * self._pace.wait))
        # The rank that posted it disconnects before this; a dead one's last WRITE is over by then, too.
        takes_s = min(takes_s, 0.98 * self._pace.max_write_s)
        target = self._fabric.ranks.get((job.sink_engine, self._rank))
        source = self._fabric.arenas.get(self._engine)
        self._fabric.land_after(takes_s, lambda: self._land(job, notification, source, arena, target))

    def poll(self) -> list[WriteEnded]:
        self._fabric.settle()
        ended, self._ended = self._ended, []
        return ended

    def notifications(self) -> list[str]:
        self._fabric.settle()
        found, self._notifications = self._notifications, []
        return found

    def close(self) -> None:
        """Nothing to let go of."""

    def _land(
        self, job: WriteJob, notification: str, source: Arena | None, arena: Arena, target: SimPlane | None
    ) -> None:
        if source is not None and self._fabric.arenas.get(self._engine) is source:
            for block in (each for group in blocks.from_runs(job.source_blocks) for each in group):
                if source.owner.get(block) != job.source_request:
                    raise Violation(f"a WRITE for {job.source_request} read block {block} of {source.owner.get(block)}")
        if self._fabric.arenas.get(job.sink_engine) is arena:
            for group in blocks.from_runs(job.sink_blocks):
                for block in group:
                    if arena.owner.get(block) != owner_tag(job.sink_request, job.attempt):
                        raise Violation(
                            f"a WRITE for {job.sink_request}, attempt {job.attempt}, landed in block {block} of "
                            f"{arena.owner.get(block)}"
                        )
            if target is not None:
                target._notifications.append(notification)
                target.on_news()
        self._ended.append(WriteEnded(job.transfer_id, job.attempt, blocks.count(job.sink_blocks)))
        self.on_news()


def owner_tag(request_id: str, attempt: int) -> str:
    """What a decode engine's blocks are marked with while they wait for this attempt's KV."""
    return f"{request_id}/{attempt}"


def metadata_of(incarnation: int) -> bytes:
    """What a rank answers to a metadata request."""
    return str(incarnation).encode()
