"""The simulated data plane between processes: a WRITE is a line over a local socket, checked where it lands.

The socket's path travels in the rank's metadata, over the bus, as NIXL's addresses do. The checks are those of the
fabric within one process: the source still owns the blocks that are read, and the sink those that are written.
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
from kvbus.sim.fabric import NUM_BLOCKS, Fabric, SimTransport, owner_of_attempt
from kvbus.sim.faults import Violation
from kvbus.sim.realtime_runtime import RealTimeRuntime
from kvbus.sim.timing import Timing
from kvbus.wire import blocks

CONNECT_TIMEOUT_S = 5.0
OnEnded = Callable[[str], None]


class SocketFabric(Fabric):
    """The memory of one process's engines, which other processes write into.

    Args:
        path: of the socket to listen on.
    """

    copies = False

    def __init__(self, runtime: RealTimeRuntime, timing: Timing, path: Path) -> None:
        super().__init__(runtime, timing)
        self._guard, self._fail, self._path = runtime.guard, runtime.fail, str(path)
        self._peers: dict[str, asyncio.StreamWriter] = {}
        self._unanswered: dict[int, OnEnded] = {}
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._clients: set[asyncio.StreamWriter] = set()

    def make_transport(self, engine: str, rank: int) -> SimTransport:
        transport = self.transports[engine, rank] = SocketTransport(self, engine, rank)
        return transport

    def metadata_of(self, incarnation: int) -> bytes:
        return f"{incarnation}@{self._path}".encode()

    async def open(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self._path)

    async def connect(self, paths: Sequence[str]) -> None:
        """Connect to the process behind each of these sockets."""
        for path in paths:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                reader, self._peers[path] = await asyncio.open_unix_connection(path)
            self._tasks.add(asyncio.create_task(self._read_answers(reader), name=f"answers-of-{path}"))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._server.close()
        for writer in [*self._peers.values(), *self._clients]:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in self._clients), return_exceptions=True)

    def send(self, path: str, write: dict[str, Any], on_ended: OnEnded) -> bool:
        """Send a WRITE; ``on_ended`` gets why it failed, or an empty text. False if there is no such process."""
        writer = self._peers.get(path)
        if writer is None or writer.is_closing():
            return False
        number = next(self._numbers)
        self._unanswered[number] = on_ended
        writer.write(json.dumps({"number": number, **write}).encode() + b"\n")
        return True

    async def _read_answers(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            answer = json.loads(line)
            on_ended = self._unanswered.pop(answer["number"])
            self._guard(lambda on_ended=on_ended, answer=answer: on_ended(answer["failure"]))  # type: ignore[misc]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients.add(writer)
        try:
            while line := await reader.readline():
                write = json.loads(line)
                answer = {"number": write["number"], "failure": self._land(write)}
                writer.write(json.dumps(answer).encode() + b"\n")
        except Violation as violation:
            self._fail(violation)
        finally:
            self._clients.discard(writer)
            writer.close()

    def _land(self, write: dict[str, Any]) -> str:
        engine = write["engine"]
        pool = self.pools.get(engine)
        if pool is None or pool.incarnation != write["incarnation"]:
            return "the peer is gone"
        pool.check_owner(write["blocks"], write["owner"], "landed in")
        self.transports[engine, write["rank"]].arrive(write["notification"])
        return ""


class SocketTransport(SimTransport):
    """Between engines of different processes."""

    def __init__(self, fabric: SocketFabric, engine: str, rank: int) -> None:
        super().__init__(fabric, engine, rank)
        self._send_write = fabric.send
        self._peers: dict[str, str] = {}
        self._posted: dict[tuple[str, int], WriteJob] = {}

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
        runtime = self._runtime
        runtime.counts["writes"] += 1
        self._posted[job.transfer_id, job.attempt] = job
        takes_s = runtime.rng.expovariate(1 / runtime.faults.mean_write_s)
        takes_s = min(takes_s, 0.5 * self._timing.max_write_s)
        runtime.call_later(takes_s, lambda: self._send(job, notification, path))

    def _send(self, job: WriteJob, notification: str, path: str) -> None:
        if (job.transfer_id, job.attempt) not in self._posted:
            return  # the peer was dropped meanwhile
        self._fabric.pools[self._engine].check_owner(job.source_blocks, job.source_request, "read")
        write = {
            "engine": job.sink_engine,
            "incarnation": job.sink_incarnation,
            "rank": self._rank,
            "blocks": job.sink_blocks,
            "owner": owner_of_attempt(job.sink_request, job.attempt),
            "notification": notification,
        }
        if not self._send_write(path, write, lambda failure: self._end(job, failure)):
            self._end(job, "no way to the peer")

    def _end(self, job: WriteJob, failure: str) -> None:
        if self._posted.pop((job.transfer_id, job.attempt), None) is not None:
            self._ended.append(WriteEnded(job.transfer_id, job.attempt, blocks.count(job.sink_blocks), failure=failure))
            self.on_progress()
