"""H1: whatever comes on any subject, running engines go on, count it, and do not grow.

``KVBUS_FUZZ=1000000`` sets how many payloads; the suite sends fewer.
"""

from __future__ import annotations

import logging
import os
import random
import time

import psutil
import pytest
from support.fake_engine import FakeEngine, legs
from support.waiting import eventually_sync

from kvbus.bus import MemoryBroker, Node
from kvbus.bus.presence import DISCONNECTS
from kvbus.engine.memory_transport import Fabric
from kvbus.wire import (
    Bye,
    Cancel,
    CancelAck,
    Delivered,
    DrainRequest,
    Heartbeat,
    LeaseEcho,
    Message,
    MetadataReply,
    MetadataRequest,
    PrefillCompleted,
    PrefillFailed,
    PrefillProgress,
    Pulse,
    Rebind,
    Registration,
    RegistrationAck,
    Role,
    State,
    Subjects,
    TransferDone,
    TransferFailed,
    TransferStarted,
    Wanted,
    Who,
    encode,
)

PAYLOADS = int(os.environ.get("KVBUS_FUZZ", "30000"))
BATCH = 5_000
MAX_GROWTH_MIB = 200

S = Subjects("default")
SUBJECTS = [
    S.pool("D"),
    S.registrations("P", "D"),
    S.cancels("P", "D"),
    S.cancels_pool("D"),
    S.releases("P", "router"),
    S.acks("D", "P"),
    S.transfers("D", "P"),
    S.prefill("P"),
    S.prefill("Q"),
    S.heartbeats("prefill", "P"),
    S.heartbeats("decode", "Q"),
    S.who("x"),
    S.bye("Q"),
    S.pulses("P"),
    S.echoes("P", "D"),
    S.metadata("D", 0, "P"),
    S.metadata("D", "x", "P"),
    S.rebind("D", "router"),
    S.drain("P", "x"),
    DISCONNECTS,
]
SOURCE = {"transfer_id": "t", "source_engine": "P", "source_incarnation": 1}
RANK = {**SOURCE, "attempt": 1, "rank": 0, "ranks": 1, "request_id": "r"}
SINK = {"transfer_id": "t", "attempt": 1, "sink_engine": "D", "sink_incarnation": 1, "request_id": "r"}
SAMPLES: list[Message] = [
    Registration(**SINK, blocks=(((1, 3),),), prompt_tokens=96),
    Wanted(**SINK),
    Cancel(**SINK, reason="x"),
    PrefillProgress(**SOURCE, request_id="p", computed=0, total=96),
    PrefillFailed(**SOURCE, request_id="p", reason="x"),
    PrefillCompleted(**SOURCE, request_id="p", blocks=(((1, 3),),), tokens=96, number=1),
    RegistrationAck(**RANK),
    CancelAck(**RANK),
    TransferStarted(**RANK),
    TransferDone(**RANK),
    TransferFailed(**RANK),
    Heartbeat("Q", 1, 1, Role.DECODE, State.READY, 1, "m"),
    Who("x"),
    Bye("Q", 1),
    Pulse("Q", 1, 0, 1),
    LeaseEcho("D", 1, (("P", 1, 0, 1),)),
    Delivered(**SINK),
    Rebind("t", 2, "Q"),
    DrainRequest("x"),
    MetadataRequest("P", 1, 1),
    MetadataReply("Q", 1, 0, b"x"),
]
ENCODED = [encode(sample) for sample in SAMPLES]


def payload(chance: random.Random) -> bytes:
    """Random bytes, a message as it is, or one with some bytes changed, cut off or doubled."""
    kind = chance.random()
    if kind < 0.2:
        return chance.randbytes(chance.randrange(200))
    made = bytearray(chance.choice(ENCODED))
    if kind < 0.4:
        return bytes(made)
    for _ in range(chance.randint(1, 6)):
        made[chance.randrange(len(made))] = chance.randrange(256)
    if kind > 0.9:
        made = made[: chance.randrange(len(made))]
    return bytes(made)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_whatever_comes_engines_go_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "kvbus")
    broker, fabric, chance = MemoryBroker(), Fabric(), random.Random(1)
    prefill, decode = FakeEngine(broker, fabric, "P", Role.PREFILL), FakeEngine(broker, fabric, "D", Role.DECODE)
    try:
        eventually_sync(lambda: decode.knows(prefill) and prefill.knows(decode))
        process = psutil.Process()
        before_mib = 0.0
        for sent in range(0, PAYLOADS, BATCH):
            for _ in range(BATCH):
                broker.route(chance.choice(SUBJECTS), payload(chance), reply="inbox")
            settle(prefill, decode)
            prefill.step()
            decode.step()
            if sent >= PAYLOADS // 4 and not before_mib:
                before_mib = process.memory_info().rss / 2**20
        grown_mib = process.memory_info().rss / 2**20 - before_mib
        rejected = sum(each.counters["rejected_messages"] for each in nodes(prefill, decode))
        print(f"{PAYLOADS} payloads, {rejected} rejected, memory grew by {grown_mib:.0f} MiB")
        assert rejected > PAYLOADS / 4
        assert grown_mib < MAX_GROWTH_MIB
        for each in nodes(prefill, decode):
            assert [each.counters[kind] for kind in ("node_errors", "callback_errors", "task_errors")] == [0, 0, 0]
        assert [worker.counters["writer_errors"] for worker in (*prefill.workers, *decode.workers)] == [0, 0]
        eventually_sync(lambda: decode.knows(prefill))
        p_leg, d_leg = legs("after")
        decode.allocate(d_leg, [10, 11, 12])
        prefill.prefill(p_leg, [1, 2, 3])
        eventually_sync(
            lambda: all((decode.has_received(d_leg.request_id), prefill.has_released(p_leg.request_id))), timeout_s=30
        )
    finally:
        prefill.close()
        decode.close()


def nodes(*engines: FakeEngine) -> list[Node]:
    workers = [worker.node for engine in engines for worker in engine.workers]
    return [engine.scheduler.node for engine in engines] + [node for node in workers if node is not None]


def settle(*engines: FakeEngine) -> None:
    """Return when what was sent so far has been dealt with."""
    for each in nodes(*engines):
        done: list[float] = []
        each.call(done.append, time.monotonic())
        eventually_sync(lambda done=done: done, timeout_s=60)
    for engine in engines:
        for worker in engine.workers:
            assert worker.waiting >= 0
