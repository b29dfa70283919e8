"""The port ``Transport``: how KV blocks get from one engine's memory into another's.

``kvbus_connector.nixl_plane`` is the real one, :mod:`kvbus.engine.memory_transport` the one for tests and the
simulator; both pass the same contract tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvbus.protocol.prefill import WriteEnded, WriteJob


class Transport(Protocol):
    """One rank's end of the data plane.

    Threading: every call comes from one thread, the writer's; none may wait for a peer for long.
    """

    def peer_ranks(self, tp_size: int) -> Sequence[int]:
        """Ranks of a peer of ``tp_size`` ranks into which this rank writes."""
        ...

    def add_peer(self, engine: str, tp_size: int, metadata: Mapping[int, bytes]) -> int:
        """Make the memory of a decode engine writable; returns how many blocks each of its ranks has.

        Args:
            metadata: what each of :meth:`peer_ranks` answered to a metadata request.

        Raises:
            PeerRefusedError: its memory does not fit ours; nothing is kept.
        """
        ...

    def drop_peer(self, engine: str) -> None:
        """Forget a peer and disconnect from it; WRITEs that are posted into it fail. Unknown peers are ignored."""
        ...

    def post(self, job: WriteJob, notification: str) -> None:
        """Post the WRITEs of a job. The peer's ranks find ``notification`` once the data is in their memory.

        Of each KV group the last source blocks are written into the sink's blocks, in order.

        Raises:
            TransferRefusedError: nothing is posted.
        """
        ...

    def poll(self) -> list[WriteEnded]:
        """Jobs whose every WRITE has ended since the last call. Drives the transfers on."""
        ...

    def notifications(self) -> list[str]:
        """Notifications that have come since the last call. Drives the transfers into this rank on."""
        ...

    def close(self) -> None: ...
