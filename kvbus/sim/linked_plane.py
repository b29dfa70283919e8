"""The played memory across processes: a WRITE is a line over a local socket, checked where it lands.

The socket's path travels in the rank's metadata, over the bus, as NIXL's addresses do. Checked is what the plane within
one process checks: that the source still owns the blocks that it reads, and the sink those that are written.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbus.errors import PeerRefusedError, TransferRefusedError
from kvbus.protocol.prefill import WriteEnded, WriteJob
from kvbus.sim.faults import Violation
from kvbus.sim.live_stage import LiveStage
from kvbus.sim.plane import NUM_BLOCKS, Fabric, Plane, owner_tag
from kvbus.sim.stage import Pace, Stage
from kvbus.wire import blocks

CONNECT_TIMEOUT_S = 5.0
Ended = Callable[[str], None]


class LinkedFabric(Fabric):
    """The memory of one process's engines, which other processes write into.

    Args:
        path: of the socket to listen on.
    """

    def __init__(self, stage: LiveStage, path: Path) -> None:
        super().__init__(stage)
        self._live_stage, self._path = stage, str(path)
        self._peers: dict[str, asyncio.StreamWriter] = {}
        self._waiting: dict[int, Ended] = {}
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._served: set[asyncio.StreamWriter] = set()
        self.planes: dict[tuple[str, int], LinkedPlane] = {}

    def make_plane(self, stage: Stage, pace: Pace, engine: str, rank: int) -> Plane:
        plane = self.planes[engine, rank] = LinkedPlane(stage, pace, self, engine, rank)
        return plane

    def metadata_of(self, incarnation: int) -> bytes:
        return f"{incarnation}@{self._path}".encode()

    async def open(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self._path)

    async def meet(self, paths: Sequence[str]) -> None:
        """Connect to every process of these sockets."""
        for path in paths:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                reader, self._peers[path] = await asyncio.open_unix_connection(path)
            task = asyncio.create_task(self._hear(reader), name=f"answers-of-{path}")
            self._tasks.add(task)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._server.close()
        for writer in [*self._peers.values(), *self._served]:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in self._served), return_exceptions=True)

    def write(self, path: str, what: dict[str, Any], ended: Ended) -> bool:
        """Send a WRITE; ``ended`` is told of it, with a reason if it failed. False if there is no such process."""
        writer = self._peers.get(path)
        if writer is None or writer.is_closing():
            return False
        number = next(self._numbers)
        self._waiting[number] = ended
        writer.write(json.dumps({"number": number, **what}).encode() + b"\n")
        return True

    async def _hear(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            answer = json.loads(line)
            ended = self._waiting.pop(answer["number"])
            self._live_stage.guard(lambda ended=ended, answer=answer: ended(answer["failure"]))  # type: ignore[misc]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._served.add(writer)
        try:
            while line := await reader.readline():
                what = json.loads(line)
                failure = self._land(what)
                writer.write(json.dumps({"number": what["number"], "failure": failure}).encode() + b"\n")
        except Violation as violation:
            self._live_stage.fail(violation)
        finally:
            self._served.discard(writer)
            writer.close()

    def _land(self, what: dict[str, Any]) -> str:
        engine = what["engine"]
        arena = self.arenas.get(engine)
        if arena is None or arena.incarnation != what["incarnation"]:
            return "the peer is gone"
        for block in (each for group in blocks.from_runs(what["blocks"]) for each in group):
            if (owner := arena.owner.get(block)) != what["owner"]:
                raise Violation(f"a WRITE for {what['owner']} landed in block {block} of {owner}")
        plane = self.planes[engine, what["rank"]]
        plane.arrive(what["notification"])
        return ""


class LinkedPlane:
    """``kvbus.engine.transport.Transport`` of one rank."""

    def __init__(self, stage: Stage, pace: Pace, fabric: LinkedFabric, engine: str, rank: int) -> None:
        self._stage, self._pace, self._fabric, self._engine, self._rank = stage, pace, fabric, engine, rank
        self._peers: dict[str, str] = {}
        self._posted: dict[tuple[str, int], WriteJob] = {}
        self._ended: list[WriteEnded] = []
        self._notifications: list[str] = []
        self.on_news: Callable[[], None] = lambda: None

    def peer_ranks(self, tp_size: int) -> Sequence[int]:
        return [self._rank % tp_size]

    def add_peer(self, engine: str, tp_size: int, metadata: Mapping[int, bytes]) -> int:
        _, at, path = metadata[self._rank % tp_size].decode().partition("@")
        if not at:
            raise PeerRefusedError(engine, "its memory is of another kind")
        self._peers[engine] = path
        return NUM_BLOCKS

    def drop_peer(self, engine: str) -> None:
        self._peers.pop(engine, None)
        for job in [each for each in self._posted.values() if each.sink_engine == engine]:
            self._end(job, "disconnected")

    def post(self, job: WriteJob, notification: str) -> None:
        path = self._peers.get(job.sink_engine)
        if path is None:
            raise TransferRefusedError("no way to the peer")
        self._stage.counts["writes"] += 1
        self._posted[job.transfer_id, job.attempt] = job
        takes_s = self._stage.chance.expovariate(1 / self._stage.faults.mean_write_s)
        self._stage.at(min(takes_s, 0.5 * self._pace.max_write_s), lambda: self._send(job, notification, path))

    def poll(self) -> list[WriteEnded]:
        ended, self._ended = self._ended, []
        return ended

    def notifications(self) -> list[str]:
        found, self._notifications = self._notifications, []
        return found

    def close(self) -> None:
        """Nothing to let go of."""

    def arrive(self, notification: str) -> None:
        """A WRITE into this rank's memory has landed."""
        self._notifications.append(notification)
        self.on_news()

    def _send(self, job: WriteJob, notification: str, path: str) -> None:
        if (job.transfer_id, job.attempt) not in self._posted:
            return  # disconnected from meanwhile
        source = self._fabric.arenas[self._engine]
        for block in (each for group in blocks.from_runs(job.source_blocks) for each in group):
            if source.owner.get(block) != job.source_request:
                raise Violation(f"a WRITE for {job.source_request} read block {block} of {source.owner.get(block)}")
        what = {
            "engine": job.sink_engine,
            "incarnation": job.sink_incarnation,
            "rank": self._rank,
            "blocks": job.sink_blocks,
            "owner": owner_tag(job.sink_request, job.attempt),
            "notification": notification,
        }
        if not self._fabric.write(path, what, lambda failure: self._end(job, failure)):
            self._end(job, "no way to the peer")

    def _end(self, job: WriteJob, failure: str) -> None:
        if self._posted.pop((job.transfer_id, job.attempt), None) is not None:
            self._ended.append(WriteEnded(job.transfer_id, job.attempt, blocks.count(job.sink_blocks), failure=failure))
            self.on_news()
