"""The worker half: one rank's memory, its writer thread and its ears on the bus.

Called by the worker's main thread only, which never touches NIXL. Imports no vLLM: the plane comes from a factory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from kvbus.bus import Bus
from kvbus.config import Config
from kvbus.lease import TERM_S
from kvbus.matcher import Matcher
from kvbus.membership import Membership
from kvbus.messages import Heartbeat
from kvbus.metrics import Counters
from kvbus.node import Node
from kvbus.rank import Abandon, Expect, Item, Rank, RankReport
from kvbus.source import RankNode
from kvbus.subjects import Subjects
from kvbus.tracing import Recorder
from kvbus.transport import Transport
from kvbus.writer import Writer

from .step import StepPlan

logger = logging.getLogger(__name__)


class Plane(Transport, Protocol):
    """A transport that vLLM's KV caches can be registered with."""

    rank: int
    ranks: int

    def register(self, kv_caches: dict[str, Any]) -> None:
        """Register the caches with NIXL; once, before any other call of the transport."""
        ...


class WorkerHalf:
    """See the module's docstring.

    Args:
        make_plane: called on the writer thread, which owns the plane from then on.
        make_bus: given a name for the connection.
    """

    def __init__(
        self,
        config: Config,
        own: Heartbeat,
        make_plane: Callable[[], Plane],
        make_bus: Callable[[str], Bus],
    ) -> None:
        self._config, self._own, self._make_bus = config, own, make_bus
        self._counters = Counters()
        self._writer = Writer("kvbus-writer", self._counters)
        self._plane: Plane = self._writer.call(make_plane)
        self._rank: Rank | None = None
        self._node: Node | None = None
        self._recorder = Recorder(f"kvbus-{own.role.value}", {"kvbus.engine": own.engine, "kvbus.rank": self.rank})

    @property
    def rank(self) -> int:
        return self._plane.rank

    @property
    def plane(self) -> Plane:
        return self._plane

    def register(self, kv_caches: dict[str, Any]) -> None:
        """Register vLLM's KV caches, then begin to listen on the bus."""
        plane, own = self._plane, self._own
        self._writer.call(lambda: plane.register(kv_caches))
        name = f"kvbus-{own.engine[:8]}-rank{plane.rank}"
        node = self._node = Node(
            self._make_bus(name),
            Subjects(self._config.namespace),
            name=name,
            membership=Membership(dead_after_s=self._config.dead_after_s),
        )
        ears = RankNode(node, own, plane.rank, self._submit_from_bus, plane.peer_ranks)
        matcher = Matcher(
            engine=own.engine,
            incarnation=own.incarnation,
            rank=plane.rank,
            ranks=plane.ranks,
            block_lease_s=self._config.block_lease_s,
        )
        self._rank = Rank(
            matcher=matcher,
            transport=plane,
            rank=plane.rank,
            ranks=plane.ranks,
            publish=ears.publish,
            introduce=ears.introduce,
            clock=time.monotonic,
            counters=self._counters,
            recorder=self._recorder,
            pulse_interval_s=self._config.heartbeat_interval_s if own.role.prefills else None,
            first_pulse_at=time.monotonic() + own.incarnation / 1e9 + TERM_S - time.time(),
        )
        self._writer.drive(self._rank)
        node.start()

    def begin_step(self, plan: StepPlan) -> None:
        """Pass on what the scheduler half said."""
        for request_id, attempt in plan.expect.items():
            self._writer.submit(Expect(request_id, attempt))
        for prefill in plan.prefills:
            self._writer.submit(prefill)
        for request_id in plan.abandon:
            self._writer.submit(Abandon(request_id))

    def results(self) -> RankReport:
        """What vLLM is to be told in this step."""
        return self._rank.report() if self._rank is not None else RankReport()

    def close(self) -> None:
        if self._node is not None:
            self._node.close()
        self._writer.close()
        self._recorder.close()

    def _submit_from_bus(self, item: Item) -> None:
        self._writer.submit(item, droppable=True)
