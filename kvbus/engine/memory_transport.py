"""A :class:`~kvbus.engine.transport.Transport` without NIXL: block contents in dicts, WRITEs that end when told to.

For tests and the simulator; the real plane passes the same contract tests.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence

from kvbus.errors import PeerRefusedError, TransferRefusedError
from kvbus.protocol.prefill import WriteEnded, WriteJob
from kvbus.wire import blocks

BLOCK_BYTES = 1024


class Fabric:
    """What the ranks' memories are reached through.

    Attributes:
        slow: WRITEs do not end by themselves but when :meth:`MemoryTransport.finish` is called.
    """

    def __init__(self) -> None:
        self.memories: dict[tuple[str, int], MemoryTransport] = {}
        self.slow = False


class MemoryTransport:
    """One rank's memory: ``content[block]`` is what was written there last.

    Args:
        num_blocks: of this rank.
    """

    def __init__(self, fabric: Fabric, engine: str, rank: int = 0, ranks: int = 1, num_blocks: int = 64) -> None:
        self._fabric, self._engine, self._rank, self._ranks = fabric, engine, rank, ranks
        self.num_blocks = num_blocks
        self.content: dict[int, str] = {}
        self.fail_next = ""
        self._peers: dict[str, int] = {}
        self._posted: list[tuple[WriteJob, str, str]] = []
        self._ended: list[tuple[WriteJob, str, str]] = []
        self._notifications: deque[str] = deque()
        self.closed = False
        fabric.memories[engine, rank] = self

    @property
    def metadata(self) -> bytes:
        """What a peer's :meth:`add_peer` takes."""
        return json.dumps({"engine": self._engine, "num_blocks": self.num_blocks}).encode()

    def peer_ranks(self, tp_size: int) -> Sequence[int]:
        if tp_size >= self._ranks:
            share = tp_size // self._ranks
            return range(self._rank * share, (self._rank + 1) * share)
        return [self._rank * tp_size // self._ranks]

    def add_peer(self, engine: str, tp_size: int, metadata: Mapping[int, bytes]) -> int:
        try:
            found = [json.loads(payload) for payload in metadata.values()]
        except ValueError as error:
            raise PeerRefusedError(engine, f"{type(error).__name__}: {error}") from error
        if any(each["engine"] != engine for each in found):
            raise PeerRefusedError(engine, f"the metadata is of engine {found[0]['engine']}")
        self._peers[engine] = tp_size
        return int(found[0]["num_blocks"])

    def drop_peer(self, engine: str) -> None:
        self._peers.pop(engine, None)
        broken = [each for each in self._posted if each[0].sink_engine == engine]
        self._posted = [each for each in self._posted if each[0].sink_engine != engine]
        self._ended += [(job, notification, "disconnected") for job, notification, _ in broken]

    def post(self, job: WriteJob, notification: str) -> None:
        if job.sink_engine not in self._peers:
            raise TransferRefusedError(f"peer {job.sink_engine} is not known")
        source, sink = blocks.from_runs(job.source_blocks), blocks.from_runs(job.sink_blocks)
        if any(len(to) > len(of) for of, to in zip(source, sink, strict=True)):
            raise TransferRefusedError("more blocks on decode than on prefill")
        if not any(sink):
            raise TransferRefusedError("no blocks to write")
        failure, self.fail_next = self.fail_next, ""
        if failure == "post":
            raise TransferRefusedError("told to")
        self._posted.append((job, notification, failure))

    def finish(self) -> None:
        """Let every posted WRITE end at the next poll, though the fabric is slow."""
        self._ended = [*self._ended, *self._posted]
        self._posted = []

    def poll(self) -> list[WriteEnded]:
        if not self._fabric.slow:
            self.finish()
        ended, self._ended = self._ended, []
        return [self._write(*each) for each in ended]

    def notifications(self) -> list[str]:
        return [self._notifications.popleft() for _ in range(len(self._notifications))]

    def close(self) -> None:
        self.closed = True

    def _write(self, job: WriteJob, notification: str, failure: str) -> WriteEnded:
        if failure:
            return WriteEnded(job.transfer_id, job.attempt, failure=failure)
        nbytes = 0
        for rank in self.peer_ranks(self._peers[job.sink_engine]):
            target = self._fabric.memories[job.sink_engine, rank]
            for of, to in zip(blocks.from_runs(job.source_blocks), blocks.from_runs(job.sink_blocks), strict=True):
                for source, sink in zip(of[len(of) - len(to) :], to, strict=True):
                    target.content[sink] = self.content.get(source, f"{self._engine}:{source}")
                    nbytes += BLOCK_BYTES
            target._notifications.append(notification)
        return WriteEnded(job.transfer_id, job.attempt, nbytes)
