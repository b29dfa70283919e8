"""P1 to P3: nothing that came over the bus reaches vLLM unless vLLM named it, whoever forges what.

``vLLM`` here is the method of its scheduler that ends EngineCore by an assert; the halves are the real ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from kvbus_connector.door import Door, RankDoor
from kvbus_connector.history_giver import HistoryGiver
from kvbus_connector.step import StepPlan
from support.fake_engine import Boot, FakeEngine, legs
from support.waiting import eventually_sync

from kvbus.bus import Keys, MemoryBroker
from kvbus.engine import Rank, RankReport
from kvbus.metrics import Counters
from kvbus.protocol.decode import Arrived
from kvbus.wire import (
    CancelAck,
    Heartbeat,
    LeaseEcho,
    Message,
    PrefillCompleted,
    PrefillProgress,
    Pulse,
    Registration,
    RegistrationAck,
    Role,
    State,
    Subjects,
    TransferFailed,
    encode,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch's
    from kvbus_connector.connector import KVBusConnector
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import RequestStatus

S = Subjects("default")
P_BLOCKS, D_BLOCKS = [1, 2, 3], [10, 11, 12]
KV = {10: "P:1", 11: "P:2", 12: "P:3"}
HOOKS = ("finished_sending", "finished_recving", "failed_recving")


def vllm_takes(engine: FakeEngine, output: KVConnectorOutput, **requests: RequestStatus) -> list[str]:
    """What vLLM's scheduler does with a step's result; returns whose blocks it freed."""
    freed: list[str] = []
    connector = KVBusConnector.__new__(KVBusConnector)
    connector._scheduler = engine.scheduler
    scheduler = SimpleNamespace(
        connector=connector,
        requests={name: SimpleNamespace(request_id=name, status=status) for name, status in requests.items()},
        finished_recving_kv_req_ids=set(),
        _free_blocks=lambda request: freed.append(request.request_id),
        _set_kv_fetch_stage=lambda *_: None,
    )
    Scheduler._update_from_kv_xfer_finished(scheduler, output)
    return freed


@pytest.mark.parametrize("hook", HOOKS)
def test_vllm_is_told_of_no_request_that_it_does_not_wait_for(pair: tuple[FakeEngine, FakeEngine], hook: str) -> None:
    for engine in pair:
        output = KVConnectorOutput(**{each: set() for each in HOOKS} | {hook: {"nobody", "running"}})
        assert vllm_takes(engine, output, running=RequestStatus.RUNNING) == []
        assert getattr(output, hook) == set()
        assert engine.scheduler.node.counters[f"rejected: {hook} of nobody"] == 2


def test_vllm_dies_without_the_door(pair: tuple[FakeEngine, FakeEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation "no door": the test above would find it."""
    monkeypatch.setattr(Door, "keep", lambda *_: None)
    for hook, running in (("finished_sending", {}), ("finished_recving", {"x": RequestStatus.RUNNING})):
        with pytest.raises(AssertionError):
            vllm_takes(pair[0], KVConnectorOutput(**{hook: {"x"}}), **running)


def test_what_vllm_waits_for_goes_through(pair: tuple[FakeEngine, FakeEngine]) -> None:
    prefill, decode = pair
    p_leg, d_leg = legs()
    decode.allocate(d_leg, D_BLOCKS)
    prefill.prefill(p_leg, P_BLOCKS)
    decode.step()
    sent = KVConnectorOutput(finished_sending={p_leg.request_id})
    assert vllm_takes(prefill, sent, **{p_leg.request_id: RequestStatus.FINISHED_LENGTH_CAPPED}) == [p_leg.request_id]
    again = KVConnectorOutput(finished_sending={p_leg.request_id})
    assert vllm_takes(prefill, again) == [], "each once"
    came = KVConnectorOutput(finished_recving={d_leg.request_id})
    assert vllm_takes(decode, came, **{d_leg.request_id: RequestStatus.WAITING_FOR_REMOTE_KVS}) == []
    assert came.finished_recving == {d_leg.request_id}


def test_vllm_hears_of_a_receive_that_was_held_back_also_in_a_step_that_reports_none(
    pair: tuple[FakeEngine, FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM gathers its ranks' reports, and makes None of an empty one."""
    _, decode = pair
    _, d_leg = legs()
    decode.allocate(d_leg, D_BLOCKS)
    decode.step()

    def admit(_: Any, received: set[str], _failed: set[str], _sent: set[str]) -> None:
        received.add(d_leg.request_id)

    monkeypatch.setattr(HistoryGiver, "admit", admit)
    output = KVConnectorOutput(finished_sending={"a history"}, finished_recving=None)
    assert vllm_takes(decode, output, **{d_leg.request_id: RequestStatus.WAITING_FOR_REMOTE_KVS}) == []
    assert output.finished_recving == {d_leg.request_id}


def test_outputs_that_are_not_there_are_no_trouble(pair: tuple[FakeEngine, FakeEngine]) -> None:
    assert vllm_takes(pair[0], KVConnectorOutput()) == []


def test_a_rank_reports_what_the_step_plan_named_and_nothing_else() -> None:
    counters = Counters()
    door = RankDoor(counters)
    completion = PrefillCompleted("t", "P", 1, "p", (((1, 3),),), 96, number=1)
    early = RankReport(("p", "nobody"), (Arrived("d", ok=True),))
    assert door.let_out(early) == RankReport()
    assert counters["rejected: receive of nobody"] == 1
    door.hear(StepPlan(prefills=[completion], expect={"d": 1}))
    assert door.let_out(RankReport((), (Arrived("d", ok=True),))) == RankReport(("p",), (Arrived("d", ok=True),))
    assert door.let_out(early) == RankReport(), "each once"


def test_a_worker_with_another_secret_says_so(pair: tuple[FakeEngine, FakeEngine]) -> None:
    plan = pair[0].scheduler.plan_step({})
    plan.public_key = b"another"
    with pytest.raises(Exception, match="KVBUS_ENGINE_SECRET"):
        pair[0].workers[0].begin_step(plan)


# A client of the bus that may say anything

KNOWN = {"source_engine": "P", "source_incarnation": 1}


def push(prefill: FakeEngine, decode: FakeEngine, name: str, lie: Callable[[Any, Any], None] = lambda *_: None) -> None:
    """One request whose KV must come, and be right; ``lie`` is told when it is registered."""
    p_leg, d_leg = legs(name)
    decode.planes[0].content.clear()
    decode.allocate(d_leg, D_BLOCKS)
    decode.step()
    lie(p_leg, d_leg)
    prefill.prefill(p_leg, P_BLOCKS)
    eventually_sync(lambda: decode.has_received(d_leg.request_id) and prefill.has_released(p_leg.request_id))
    assert decode.received[d_leg.request_id] is True
    assert decode.planes[0].content == KV


def forged(p_leg: Any, d_leg: Any) -> list[tuple[str, Message]]:
    """What would end an engine, or write wrong text, if it were believed."""
    about = {"transfer_id": "t", **KNOWN}
    rank = {**about, "attempt": 1, "rank": 0, "ranks": 1, "request_id": d_leg.request_id}
    return [
        (S.prefill("P"), PrefillCompleted(**about, request_id="nobody", blocks=(((1, 3),),), tokens=96, number=99)),
        (S.prefill("P"), PrefillCompleted(**about, request_id="x", blocks=(((20, 3),),), tokens=96, number=99)),
        (S.prefill("P"), PrefillProgress(**about, request_id="x", computed=0, total=96, number=99)),
        (S.acks("D", "P"), RegistrationAck(**rank, refused="full")),
        (S.acks("D", "P"), CancelAck(**rank)),
        (S.transfers("D", "P"), TransferFailed(**rank, reason="broken")),
        (S.echoes("P", "D"), LeaseEcho("D", 1 << 62, (), 99)),
        (S.registrations("P", "D"), Registration("t", 9, "D", 1, d_leg.request_id, (((20, 3),),), 96)),
        (S.registrations("P", "D"), Registration("t", 1, "D", 1 << 62, "x", (((20, 3),),), 96)),
        (S.pulses("P"), Pulse("P", 1, 0, (1 << 63) - 1)),
        (S.pulses("P"), Pulse("P", 1 << 62, 0, (1 << 63) - 1)),
        (S.heartbeats("prefill", "P"), Heartbeat("P", 1 << 62, 1, Role.PREFILL, State.READY, 1)),
        (S.heartbeats("decode", "D"), Heartbeat("D", 1 << 62, 1, Role.DECODE, State.READY, 1)),
    ]


def test_forged_words_change_nothing(pair: tuple[FakeEngine, FakeEngine], broker: MemoryBroker) -> None:
    prefill, decode = pair

    def lie(p_leg: Any, d_leg: Any) -> None:
        for subject, message in forged(p_leg, d_leg):
            broker.route(subject, encode(message))
            broker.route(subject, encode(message, b"a key of its own"))

    push(prefill, decode, "t", lie)
    push(prefill, decode, "after")
    assert sum(prefill.released.values()) == 2


def test_what_was_said_again_changes_nothing(pair: tuple[FakeEngine, FakeEngine], broker: MemoryBroker) -> None:
    prefill, decode = pair
    push(prefill, decode, "first")
    said = list(broker.log)

    def again(*_: Any) -> None:
        for subject, payload in said:
            broker.route(subject, payload)

    push(prefill, decode, "t", again)
    push(prefill, decode, "after")


def test_an_older_kvbus_is_refused_with_the_reason(boot: Boot, caplog: pytest.LogCaptureFixture) -> None:
    """It has no key, so nothing that it says can be believed."""
    prefill = boot("P", compat=(("bus", "sealed"), ("model", "m")))
    decode = boot("D", compat=(("model", "m"),))
    eventually_sync(lambda: decode.knows(prefill) and prefill.knows(decode))
    assert decode.allocate(legs()[1], D_BLOCKS) == 0
    assert "bus: unset here, sealed on P" in caplog.text


def believe_all(self: Keys, message: Message, payload: bytes) -> bool:
    return True


def believe_the_bus(self: Rank, item: Any, came_at: float | None = None) -> None:
    HANDLE(self, getattr(item, "word", item), came_at)


HANDLE = Rank.handle


def a_lie(pair: tuple[FakeEngine, FakeEngine], broker: MemoryBroker, subject: str, message: Message) -> Any:
    """A registered request of which only a lie is heard; returns its decode leg."""
    prefill, decode = pair
    _, d_leg = legs()
    decode.allocate(d_leg, D_BLOCKS)
    decode.step()
    eventually_sync(lambda: prefill.workers[0].waiting == 1)
    broker.route(subject, encode(message, b"a key of its own"))
    return d_leg


def test_believing_a_bus_completion_is_found(
    pair: tuple[FakeEngine, FakeEngine], broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutation "no seal check": P2, blocks that nobody computed are written."""
    monkeypatch.setattr(Keys, "believes", believe_all)
    lie = PrefillCompleted("t", **KNOWN, request_id="x", blocks=(((20, 3),),), tokens=96, number=99)
    d_leg = a_lie(pair, broker, S.prefill("P"), lie)
    eventually_sync(lambda: pair[1].has_received(d_leg.request_id))
    assert pair[1].planes[0].content != KV


def test_the_engines_own_words_said_again_are_not_heard_again(
    pair: tuple[FakeEngine, FakeEngine], broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A completion that the step plan has covered already; long after, its blocks are somebody else's."""
    prefill, decode = pair
    push(prefill, decode, "t")
    [payload] = [each for subject, each in broker.log if subject == S.prefill("P") and b"completed" in each]
    known, worker = "rejected: known from the step plan", prefill.workers[0]
    for round_number in (1, 2):
        before = worker.counters[known]
        broker.route(S.prefill("P"), payload)
        eventually_sync(lambda before=before: worker.counters[known] > before)
        assert worker.waiting == 0, round_number
    monkeypatch.setattr(Rank, "handle", believe_the_bus)  # the mutation "no horizon": it reaches the matcher
    heard, before = "rejected: duplicate completion", worker.counters["rejected: duplicate completion"]
    broker.route(S.prefill("P"), payload)
    eventually_sync(lambda: worker.counters[heard] > before)
