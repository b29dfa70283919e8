"""The simulated data plane: each block knows which request owns it, and every WRITE is checked when it lands."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from kvbus.engine import Transport
from kvbus.errors import PeerRefusedError, TransferRefusedError
from kvbus.protocol.prefill import WriteEnded, WriteJob
from kvbus.sim.faults import Violation
from kvbus.sim.runtime import Runtime
from kvbus.sim.timing import Timing
from kvbus.wire import blocks

NUM_BLOCKS = 96
_ROUNDING_S = 1e-6
Content = tuple[str, int]
"""What KV is of: a prompt, and the number of a block of it."""


class BlockPool:
    """The KV blocks of one incarnation of an engine, the same on all ranks: which request owns each block.

    Args:
        settle: lands every WRITE that is due, before owners change.
    """

    def __init__(self, incarnation: int, settle: Callable[[], None]) -> None:
        self.incarnation, self._settle = incarnation, settle
        self._owners: dict[int, str] = {}
        self._content: dict[tuple[int, int], Content] = {}  # by rank and block; whoever frees a block leaves it there
        self._free = deque(range(NUM_BLOCKS))

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def allocate(self, owner: str, count: int) -> list[int] | None:
        """Allocate the blocks freed last; None if there are too few."""
        if count > len(self._free):
            return None
        taken = [self._free.popleft() for _ in range(count)]
        self._owners.update(dict.fromkeys(taken, owner))
        return taken

    def free(self, block_ids: Sequence[int]) -> None:
        self._settle()
        for block in block_ids:
            if self._owners.pop(block, None) is None:
                raise Violation(f"block {block} freed twice")
            # Reused at once: the worst that can happen to a late WRITE.
            self._free.appendleft(block)

    def hand_over(self, block_ids: Sequence[int], owner: str) -> None:
        """These are another owner's from now on."""
        self._settle()
        self._owners.update(dict.fromkeys(block_ids, owner))

    def fill(self, block_ids: Sequence[int], ranks: int, prompt: str, first: int = 0) -> None:
        """Every rank has computed these blocks of a prompt, from its block ``first`` on."""
        for number, block in enumerate(block_ids, first):
            self._content.update(dict.fromkeys([(rank, block) for rank in range(ranks)], (prompt, number)))

    def copy(self, block_ids: Sequence[int], rank: int, source: BlockPool, source_ids: Sequence[int]) -> None:
        """A WRITE of this rank: the last of the source's blocks line up with these."""
        for block, source_block in zip(block_ids, source_ids[len(source_ids) - len(block_ids) :], strict=True):
            self._content[rank, block] = source._content.get((rank, source_block), ("nothing", 0))

    def check_content(self, block_ids: Sequence[int], ranks: int, prompt: str, first: int) -> None:
        """Raise Violation if these are not the blocks of a prompt from its block ``first`` on."""
        for number, block in enumerate(block_ids, first):
            for rank in range(ranks):
                if (found := self._content.get((rank, block), ("nothing", 0))) != (prompt, number):
                    raise Violation(f"block {number} of prompt {prompt} was to come, and {found[0]}:{found[1]} did")

    def check_owner(self, runs: blocks.BlockRuns, owner: str, touched: str) -> None:
        """Raise Violation if a block that a WRITE ``touched`` is not its request's."""
        for block in itertools.chain.from_iterable(blocks.from_runs(runs)):
            if (found := self._owners.get(block)) != owner:
                raise Violation(f"a WRITE for {owner} {touched} block {block} of {found}")


class Fabric:
    """The memory of every engine, the transports of their ranks, and the WRITEs under way.

    A WRITE lands at its time, whatever engines do meanwhile: where time is real and timers are late, it still lands
    before anything that happens after its time. ``copies``: what is in the blocks is written with them.
    """

    copies = True

    def __init__(self, runtime: Runtime, timing: Timing) -> None:
        self.runtime, self.timing = runtime, timing
        self._landings: list[tuple[float, int, Callable[[], None]]] = []
        self._tie = itertools.count()
        self.pools: dict[str, BlockPool] = {}
        self.transports: dict[tuple[str, int], SimTransport] = {}

    def make_transport(self, engine: str, rank: int) -> SimTransport:
        transport = self.transports[engine, rank] = MemoryTransport(self, engine, rank)
        return transport

    def metadata_of(self, incarnation: int) -> bytes:
        """What a rank answers to a metadata request."""
        return str(incarnation).encode()

    def land_after(self, delay_s: float, land: Callable[[], None]) -> None:
        heapq.heappush(self._landings, (self.runtime.now + delay_s, next(self._tie), land))
        self.runtime.call_later(delay_s, self.settle)

    def settle(self) -> None:
        """Land every WRITE that is due."""
        while self._landings and self._landings[0][0] <= self.runtime.now + _ROUNDING_S:
            _, _, land = heapq.heappop(self._landings)
            land()


class SimTransport(Transport):
    """What every simulated :class:`~kvbus.engine.Transport` shares.

    ``on_progress`` is called when a WRITE has landed, here or at the peer.
    """

    def __init__(self, fabric: Fabric, engine: str, rank: int) -> None:
        self._fabric, self._engine, self._rank = fabric, engine, rank
        self._runtime, self._timing = fabric.runtime, fabric.timing
        self._ended: list[WriteEnded] = []
        self._notifications: list[str] = []
        self.on_progress: Callable[[], object] = lambda: None

    def peer_ranks(self, tp_size: int) -> Sequence[int]:
        return [self._rank % tp_size]

    def poll(self) -> list[WriteEnded]:
        self._fabric.settle()
        ended, self._ended = self._ended, []
        return ended

    def notifications(self) -> list[str]:
        self._fabric.settle()
        found, self._notifications = self._notifications, []
        return found

    def arrive(self, notification: str) -> None:
        """A WRITE into this rank's memory has landed."""
        self._notifications.append(notification)
        self.on_progress()

    def close(self) -> None:
        """Nothing is held."""


class MemoryTransport(SimTransport):
    """Between engines of one process."""

    def __init__(self, fabric: Fabric, engine: str, rank: int) -> None:
        super().__init__(fabric, engine, rank)
        self._peers: dict[str, BlockPool] = {}
        self._stuck: list[WriteJob] = []

    def add_peer(self, engine: str, tp_size: int, metadata: Mapping[int, bytes]) -> int:
        pool = self._fabric.pools.get(engine)
        if pool is None or any(payload != self._fabric.metadata_of(pool.incarnation) for payload in metadata.values()):
            raise PeerRefusedError(engine, "it is gone")
        self._peers[engine] = pool
        return NUM_BLOCKS

    def drop_peer(self, engine: str) -> None:
        self._peers.pop(engine, None)
        broken = [job for job in self._stuck if job.sink_engine == engine]
        self._stuck = [job for job in self._stuck if job.sink_engine != engine]
        self._ended += [WriteEnded(job.transfer_id, job.attempt, failure="disconnected") for job in broken]

    def post(self, job: WriteJob, notification: str) -> None:
        runtime, rng, faults = self._runtime, self._runtime.rng, self._runtime.faults
        pool, source = self._peers.get(job.sink_engine), self._fabric.pools.get(self._engine)
        if pool is None or source is None or rng.random() < faults.write_failure:
            raise TransferRefusedError("no way to the peer")
        runtime.counts["writes"] += 1
        if rng.random() < faults.stuck:
            runtime.counts["writes stuck"] += 1
            self._stuck.append(job)
            return
        takes_s = rng.expovariate(1 / (faults.mean_write_s * self._timing.wait))
        # The rank that posted it disconnects before this; a dead rank's last WRITE is over by then, too.
        takes_s = min(takes_s, 0.98 * self._timing.max_write_s)
        target = self._fabric.transports.get((job.sink_engine, self._rank))
        self._fabric.land_after(takes_s, lambda: self._land(job, notification, source, pool, target))

    def _land(
        self, job: WriteJob, notification: str, source: BlockPool, sink: BlockPool, target: SimTransport | None
    ) -> None:
        if self._fabric.pools.get(self._engine) is source:
            source.check_owner(job.source_blocks, job.source_request, "read")
        if self._fabric.pools.get(job.sink_engine) is sink:
            sink.check_owner(job.sink_blocks, owner_of_attempt(job.sink_request, job.attempt), "landed in")
            for ids, source_ids in zip(*map(blocks.from_runs, (job.sink_blocks, job.source_blocks)), strict=True):
                sink.copy(ids, self._rank, source, source_ids)
            if target is not None:
                target.arrive(notification)
        self._ended.append(WriteEnded(job.transfer_id, job.attempt, blocks.count(job.sink_blocks)))
        self.on_progress()


def owner_of_attempt(request_id: str, attempt: int) -> str:
    """The owner of a decode engine's blocks while they wait for this attempt's KV."""
    return f"{request_id}/{attempt}"
