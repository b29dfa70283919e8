"""The worker half: one rank's memory, its writer thread and its ears on the bus.

Called by the worker's main thread only, which never touches NIXL. Imports no vLLM: the plane comes from a factory.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from typing import Any, Protocol

from kvbus.bus import Bus, Keys, Node
from kvbus.config import Config
from kvbus.engine import Abandon, Expect, Item, Rank, RankNode, RankReport, Told, Transport, Writer, sinks_of
from kvbus.errors import ConfigError
from kvbus.metrics import Counters
from kvbus.protocol import Membership, term_s
from kvbus.protocol.prefill import Drain, Matcher, Released
from kvbus.trace import Marker
from kvbus.wire import NO_TOKEN, Heartbeat, Subjects

from .door import RankDoor
from .first_token import FIRST_TOKENS
from .identity import SECRET
from .step import StepPlan

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 2.0
PULSE_BITS = 62


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
        secret: what all processes of this engine share; see :mod:`kvbus.bus.keys`.
    """

    def __init__(
        self,
        config: Config,
        own: Heartbeat,
        make_plane: Callable[[], Plane],
        make_bus: Callable[[str], Bus],
        secret: bytes,
    ) -> None:
        self._keys = Keys(secret, own.engine, own.incarnation)
        self._config, self._own, self._make_bus = config, self._keys.introduce(own), make_bus
        self.counters = Counters()
        self._door = RankDoor(self.counters)
        self._writer = Writer("kvbus-writer", self.counters)
        self._plane: Plane = self._writer.call(make_plane)
        self._rank: Rank | None = None
        FIRST_TOKENS.on = own.first_token
        self._takers: dict[str, str] = {}
        self.node: Node | None = None

    @property
    def rank(self) -> int:
        return self._plane.rank

    @property
    def all_counters(self) -> list[Counters]:
        return [self.counters, *([self.node.counters] if self.node is not None else [])]

    @property
    def waiting(self) -> int:
        """How many transfers this rank knows of."""
        rank = self._rank
        return self._writer.call(lambda: rank.transfers) if rank is not None else 0

    @property
    def plane(self) -> Plane:
        return self._plane

    def register(self, kv_caches: dict[str, Any]) -> None:
        """Register vLLM's KV caches, then begin to listen on the bus."""
        plane, own = self._plane, self._own
        self._writer.call(lambda: plane.register(kv_caches))
        name = f"kvbus-{own.engine[:8]}-rank{plane.rank}"
        node = self.node = Node(
            self._make_bus(name),
            Subjects(self._config.namespace),
            name=name,
            membership=Membership(dead_after_s=self._config.dead_after_s),
            hears=sinks_of(own),
            keys=self._keys,
            speaker=own.engine,
        )
        ears = RankNode(node, own, plane.rank, self._submit_from_bus, plane.peer_ranks)
        matcher = Matcher(
            engine=own.engine,
            incarnation=own.incarnation,
            rank=plane.rank,
            ranks=plane.ranks,
            block_lease_s=self._config.block_lease_s,
            write_lease_s=self._config.write_lease_s,
            pulse_number=lambda: secrets.randbits(PULSE_BITS),
        )
        self._rank = Rank(
            matcher=matcher,
            transport=plane,
            rank=plane.rank,
            ranks=plane.ranks,
            publish=ears.publish,
            introduce=ears.introduce,
            clock=time.monotonic,
            counters=self.counters,
            marking=Marker(node, own.engine, own.role, plane.rank),
            pulse_interval_s=self._config.heartbeat_interval_s if own.writes else None,
            calm_pulse_interval_s=self._config.calm_pulse_interval_s,
            first_pulse_at=self._first_pulse_at(),
            max_write_s=self._config.max_write_s,
        )
        self._writer.drive(self._rank)
        node.start()

    def begin_step(self, plan: StepPlan) -> None:
        """Pass on what the scheduler half said."""
        self._door.hear(plan)
        if plan.public_key != self._keys.public_key:
            raise ConfigError(SECRET, "another one in this worker than in the scheduler", "one for the whole engine")
        for request_id, attempt in plan.expect.items():
            self._writer.submit(Expect(request_id, attempt, plan.traced.get(request_id)))
        self._takers.update(plan.takers)
        for prefill in plan.prefills:
            self._writer.submit(prefill)
        if plan.prefills:
            self._writer.submit(Told(plan.told))
        for withdrawn in plan.withdraw:
            self._writer.submit(Released(withdrawn))
        for request_id in plan.abandon:
            self._writer.submit(Abandon(request_id))

    def results(self) -> RankReport:
        """What vLLM is to be told in this step."""
        if self._rank is None:
            return RankReport()
        report = self._door.let_out(self._rank.report())
        for arrived in report.arrived:  # the sampler asks for it when vLLM first runs the request, after this report
            taker = self._takers.pop(arrived.request_id, "")
            if taker and arrived.first_token != NO_TOKEN:
                FIRST_TOKENS.put(taker, arrived.first_token)
                self.counters.add("first_tokens")
        return report

    def close(self) -> None:
        """Tell whoever waits, let posted WRITEs end (bounded in time), then leave."""
        rank, self._rank = self._rank, None
        if rank is not None:
            with contextlib.suppress(TimeoutError):  # NIXL holds the thread: nothing can be waited for
                self._writer.call(lambda: rank.handle(Drain()), timeout_s=CLOSE_TIMEOUT_S)
            deadline = time.monotonic() + self._config.max_write_s
            while rank.writing and time.monotonic() < deadline:
                time.sleep(0.01)
        if self.node is not None:
            self.node.close()
        self._writer.close()

    def _first_pulse_at(self) -> float:
        """A term after this engine began to start: by then what its predecessor posted has ended."""
        age_s = time.time() - self._own.incarnation / 1e9
        return time.monotonic() - age_s + term_s(self._config.write_lease_s, self._config.max_write_s)

    def _submit_from_bus(self, item: Item) -> None:
        self._writer.submit(item, droppable=True)
