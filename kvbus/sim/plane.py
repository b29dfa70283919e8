"""The played data plane: blocks carry the tag of the request that owns them, and a WRITE that lands checks it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from kvbus import blocks
from kvbus.errors import PeerRefusedError, TransferRefusedError
from kvbus.matching import WriteEnded, WriteJob
from kvbus.sim.world import Violation, World

NUM_BLOCKS = 96


class Arena:
    """The memory of one incarnation of an engine, all ranks alike: which request owns each block."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.owner: dict[int, str] = {}
        self._free = deque(range(NUM_BLOCKS))

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def take(self, request_id: str, count: int) -> list[int] | None:
        """Allocate, oldest freed first; None if there are too few."""
        if count > len(self._free):
            return None
        taken = [self._free.popleft() for _ in range(count)]
        self.owner.update(dict.fromkeys(taken, request_id))
        return taken

    def give_back(self, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            if self.owner.pop(block, None) is None:
                raise Violation(f"block {block} freed twice")
            # Reused at once: the worst that can happen to a late WRITE.
            self._free.appendleft(block)


class Fabric:
    """Who has which memory, by engine."""

    def __init__(self) -> None:
        self.arenas: dict[str, Arena] = {}
        self.ranks: dict[tuple[str, int], SimPlane] = {}


class SimPlane:
    """``kvbus.transport.Transport`` of one rank."""

    def __init__(self, world: World, fabric: Fabric, engine: str, rank: int, ranks: int, max_write_s: float) -> None:
        self._world, self._fabric = world, fabric
        self._engine, self._rank, self._ranks, self._max_write_s = engine, rank, ranks, max_write_s
        self._peers: dict[str, Arena] = {}
        self._ended: list[WriteEnded] = []
        self._posted: dict[tuple[str, int], str] = {}
        self._notifications: list[str] = []
        self.on_news: Callable[[], None] = lambda: None
        fabric.ranks[engine, rank] = self

    def peer_ranks(self, tp_size: int) -> Sequence[int]:
        return [self._rank % tp_size]

    def add_peer(self, engine: str, tp_size: int, metadata: Mapping[int, bytes]) -> int:
        arena = self._fabric.arenas.get(engine)
        if arena is None or any(payload != str(arena.incarnation).encode() for payload in metadata.values()):
            raise PeerRefusedError(engine, "it is gone")
        self._peers[engine] = arena
        return NUM_BLOCKS

    def drop_peer(self, engine: str) -> None:
        self._peers.pop(engine, None)

    def post(self, job: WriteJob, notification: str) -> None:
        arena = self._peers.get(job.sink_engine)
        if arena is None or self._world.chance.random() < self._world.faults.write_failure:
            raise TransferRefusedError("no way to the peer")
        key = (job.transfer_id, job.attempt)
        self._posted[key] = job.sink_engine
        self._world.counts["writes"] += 1
        takes_s = self._world.chance.expovariate(1 / self._world.faults.mean_write_s)
        # The rank that posted it disconnects before this; a dead one's last WRITE is over by then, too.
        takes_s = min(takes_s, 0.98 * self._max_write_s)
        target = self._fabric.ranks.get((job.sink_engine, self._rank))
        self._world.at(takes_s, lambda: self._land(key, job, notification, arena, target))

    def poll(self) -> list[WriteEnded]:
        ended, self._ended = self._ended, []
        return ended

    def notifications(self) -> list[str]:
        found, self._notifications = self._notifications, []
        return found

    def close(self) -> None:
        """Nothing to let go of."""

    def _land(
        self, key: tuple[str, int], job: WriteJob, notification: str, arena: Arena, target: SimPlane | None
    ) -> None:
        if self._fabric.arenas.get(job.sink_engine) is arena:
            for group in blocks.from_runs(job.sink_blocks):
                for block in group:
                    if arena.owner.get(block) != job.sink_request:
                        raise Violation(
                            f"a WRITE for {job.sink_request} landed in block {block} of {arena.owner.get(block)}"
                        )
            if target is not None:
                target._notifications.append(notification)
                target.on_news()
        self._posted.pop(key, None)
        self._ended.append(WriteEnded(job.transfer_id, job.attempt, blocks.count(job.sink_blocks)))
        self.on_news()
