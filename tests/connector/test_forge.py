"""P3: valid messages of running engines, changed one field at a time, moved, repeated, and late. Engines go on.

Two real halves of each role, on a memory bus, do transfers while a forger that hears everything talks.
``KVBUS_FORGE=1000000`` sets how many messages it says; the suite has it say fewer.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import time
from collections import deque

import psutil
import pytest
from support.fake_engine import FakeEngine, legs
from support.waiting import eventually_sync

from kvbus.bus import MemoryBroker, Node
from kvbus.engine.memory_transport import Fabric
from kvbus.sim.forge import Forger
from kvbus.wire import Role

MESSAGES = int(os.environ.get("KVBUS_FORGE", "20000"))
BATCH = 1_000
MAX_GROWTH_MIB = 200
# Short, so that what is replayed late comes after them within a test.
LEASES = {"block_lease_s": 2.0, "transfer_timeout_s": 4.0, "max_write_s": 1.0}
LATE_S = 5.0
NEVER_NAMED = "reported what vLLM did not name"


class Tapped(MemoryBroker):
    """A broker at which somebody listens."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: deque[tuple[str, bytes]] = deque(maxlen=1 << 14)

    def route(self, subject: str, payload: bytes, reply: str = "") -> int:
        self.heard.append((subject, payload))
        return super().route(subject, payload, reply)


class Cluster:
    """Two prefill and two decode engines, and the requests that they were given."""

    def __init__(self) -> None:
        self.broker, fabric = Tapped(), Fabric()
        self.prefills = [FakeEngine(self.broker, fabric, name, Role.PREFILL, options=LEASES) for name in ("P", "Q")]
        self.decodes = [FakeEngine(self.broker, fabric, name, Role.DECODE, options=LEASES) for name in ("D", "E")]
        self.engines = [*self.prefills, *self.decodes]
        self._numbers = itertools.count()
        self.named: set[str] = set()

    def meet(self) -> None:
        eventually_sync(lambda: all(one.knows(other) for one in self.engines for other in self.engines))

    def transfer(self) -> tuple[FakeEngine, str, FakeEngine, str]:
        """Begin one; returns who has which request."""
        number = next(self._numbers)
        source, sink = self.prefills[number % 2], self.decodes[number // 2 % 2]
        p_leg, d_leg = legs(f"t{number}", source.name)
        self.named |= {p_leg.request_id, d_leg.request_id}
        first = number % 20 * 3
        sink.allocate(d_leg, [first, first + 1, first + 2])
        source.prefill(p_leg, [first, first + 1, first + 2])
        return source, p_leg.request_id, sink, d_leg.request_id

    def step(self) -> None:
        for engine in self.engines:
            engine.step()

    def settle(self) -> None:
        """Return when what was sent so far has been dealt with."""
        for node in self.nodes():
            done: list[float] = []
            node.call(done.append, time.monotonic())
            eventually_sync(lambda done=done: done, timeout_s=60)  # type: ignore[misc]

    def nodes(self) -> list[Node]:
        found = [each.scheduler.node for each in self.engines]
        return found + [worker.node for each in self.engines for worker in each.workers if worker.node is not None]

    def check(self) -> None:
        """The laws that hold all the time."""
        for node in self.nodes():
            assert [node.counters[kind] for kind in ("node_errors", "callback_errors", "task_errors")] == [0, 0, 0]
        workers = [worker for engine in self.engines for worker in engine.workers]
        assert [worker.counters["writer_errors"] for worker in workers] == [0] * len(workers)
        reported = {request_id for each in self.engines for request_id in (*each.released, *each.received)}
        assert reported <= self.named, f"{NEVER_NAMED}: {sorted(reported - self.named)[:3]}"

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_whatever_a_forger_says_engines_go_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "kvbus")
    cluster, process = Cluster(), psutil.Process()
    forger, before_mib = Forger(random.Random(1), LATE_S), 0.0
    broker, started = cluster.broker, time.monotonic()
    try:
        cluster.meet()
        for said in range(0, MESSAGES, BATCH):
            for _ in range(3):
                cluster.transfer()
            for number in range(BATCH):
                while broker.heard:
                    forger.hear(*broker.heard.popleft(), now=time.monotonic())
                if (forged := forger.forge(time.monotonic())) is not None:
                    broker.route(forged.subject, forged.payload, reply="inbox")
                if number % 100 == 0:
                    cluster.step()
            cluster.settle()
            cluster.step()
            cluster.check()
            if said >= MESSAGES // 4 and not before_mib:
                before_mib = process.memory_info().rss / 2**20
        grown_mib = process.memory_info().rss / 2**20 - before_mib
        took_s, rejected = (
            time.monotonic() - started,
            sum(node.counters["rejected_messages"] for node in cluster.nodes()),
        )
        print(f"{MESSAGES} changed messages in {took_s:.0f} s, {rejected} rejected, memory grew by {grown_mib:.0f} MiB")
        assert grown_mib < MAX_GROWTH_MIB
        quiet_until = time.monotonic() + LATE_S + 2.0
        while time.monotonic() < quiet_until:  # what was forged runs out
            cluster.step()
            time.sleep(0.01)
        cluster.check()
        cluster.meet()
        for _ in range(4):
            source, sent, sink, received = cluster.transfer()
            eventually_sync(
                lambda: all((sink.has_received(received), source.has_released(sent))),  # noqa: B023
                timeout_s=30,
            )
            assert sink.received[received], "pushes go on"
        cluster.check()
    finally:
        cluster.close()
