"""What the two halves mark for a traced request, and that others cost nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from support.fake_engine import Boot, FakeEngine, Request, legs
from support.kept import Kept
from support.waiting import eventually_sync

from kvbus.bus import MemoryBroker, MemoryBus, Node
from kvbus.protocol import Membership
from kvbus.tools.view import problems, views_of
from kvbus.trace import HISTORY_STAGES, Collector, Marker, MarkName, NoMarks, Outcome, Path, StageName, Traced, traced
from kvbus.trace.marks import host_clock
from kvbus.wire import Marks, Role, Subjects

SAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = SAMPLED[:-1] + "0"
SUBJECTS = Subjects("default")


class Heard:
    """Every mark on the bus: ``(time, role, rank, name, attempt, note)``."""

    def __init__(self) -> None:
        self.messages: list[Marks] = []

    @property
    def marks(self) -> list[tuple[int, str, int, str, int, str]]:
        return sorted(
            (at_ns, message.role.value, message.rank, name, attempt, note)
            for message in self.messages
            for attempt, name, at_ns, note in message.marks
        )

    @property
    def names(self) -> list[str]:
        return [mark[3] for mark in self.marks]


@pytest.fixture
def heard(broker: MemoryBroker) -> Iterator[Heard]:
    ears = Heard()
    node = Node(MemoryBus(broker), SUBJECTS, name="ears", membership=Membership())
    node.listen(SUBJECTS.marks("*"), Marks, ears.messages.append)
    node.start()
    yield ears
    node.close()


def traced_legs(traceparent: str = SAMPLED) -> tuple[Request, Request]:
    p_leg, d_leg = legs()
    for leg in (p_leg, d_leg):
        assert leg.kv_transfer_params is not None
        leg.kv_transfer_params["traceparent"] = traceparent
    return p_leg, d_leg


def serve(prefill: FakeEngine, decode: FakeEngine, p_leg: Request, d_leg: Request) -> None:
    """One request from both arrivals to its first token, as vLLM would drive it."""
    prefill.scheduler.arrived(p_leg)
    assert decode.allocate(d_leg, [10, 11, 12]) == 96
    decode.step()
    prefill.step({p_leg.request_id: 96})
    prefill.scheduler.finished(p_leg, [[1, 2, 3]], prefilled=True)
    decode.decodes_at_once = False
    eventually_sync(lambda: decode.has_received(d_leg.request_id))
    decode.step({d_leg.request_id: 1})
    decode.start_decoding(d_leg)
    eventually_sync(lambda: prefill.has_released(p_leg.request_id))


@pytest.mark.parametrize("ranks", [1, 2])
def test_everything_on_the_way_is_marked_once(boot: Boot, heard: Heard, ranks: int) -> None:
    prefill, decode = boot("P", ranks=ranks), boot("D", ranks=ranks)
    eventually_sync(lambda: decode.knows(prefill) and prefill.knows(decode))
    serve(prefill, decode, *traced_legs())
    of_prefill = ["prefill arrived", "prefill scheduled", "prefill done"]
    of_rank = ["registered", "completed", "posting", "posted", "written"]
    of_decode = ["decode arrived", "registering", "received", "resumed", "token"]
    eventually_sync(lambda: len(heard.names) >= 8 + 6 * ranks)
    every = [(role, rank, name, attempt) for _, role, rank, name, attempt, _ in heard.marks]
    assert len(every) == len(set(every)) == 8 + 6 * ranks
    assert [name for _, role, _, name, _, _ in heard.marks if role == "prefill" and name in of_prefill] == of_prefill
    assert [name for _, role, _, name, _, _ in heard.marks if role == "decode" and name in of_decode] == of_decode
    for rank in range(ranks):
        there = [name for _, role, each, name, _, _ in heard.marks if each == rank and role == "prefill"]
        assert set(of_rank) <= set(there)
        landed = [mark for mark in heard.marks if mark[3] == "landed" and mark[2] == rank]
        assert len(landed) == 1
    notes = {name: note for _, _, _, name, _, note in heard.marks}
    assert notes["prefill done"] == "96"
    assert int(notes["written"]) > 0
    assert {message.host for message in heard.messages} == {host_clock()}
    assert {message.transfer_id for message in heard.messages} == {"t"}


@pytest.mark.parametrize("traceparent", ["", UNSAMPLED, "junk"])
def test_who_is_not_sampled_leaves_no_mark(
    pair: tuple[FakeEngine, FakeEngine], heard: Heard, broker: MemoryBroker, traceparent: str
) -> None:
    prefill, decode = pair
    serve(prefill, decode, *traced_legs(traceparent))
    p_leg, d_leg = legs("second")
    for leg in (p_leg, d_leg):
        assert leg.kv_transfer_params is not None
        leg.kv_transfer_params["traceparent"] = SAMPLED
    prefill.scheduler.arrived(p_leg)
    eventually_sync(lambda: heard.messages)
    assert {message.transfer_id for message in heard.messages} == {"second"}


def test_what_is_computed_here_says_why(boot: Boot, heard: Heard) -> None:
    decode = boot("D")
    eventually_sync(lambda: decode.scheduler.node.bus.connected)
    _, d_leg = traced_legs()
    decode.arrive(d_leg)
    assert decode.scheduler.tokens_from_outside(d_leg, 0) == 0
    eventually_sync(lambda: "local" in heard.names)
    assert heard.marks[-1][5] == "prefill engine P is not on the bus"


def test_a_receive_that_is_given_up_says_why(pair: tuple[FakeEngine, FakeEngine], heard: Heard) -> None:
    prefill, decode = pair
    _, d_leg = traced_legs()
    decode.allocate(d_leg, [10, 11, 12])
    decode.step()
    prefill.close()
    eventually_sync(lambda: decode.step() is not None and "given up" in heard.names)
    assert next(note for *_, name, _, note in heard.marks if name == "given up")


@pytest.mark.slow
@pytest.mark.parametrize("sampled", [True, False])
def test_requests_of_another_router_are_collected_from_marks_alone(
    pair: tuple[FakeEngine, FakeEngine], broker: MemoryBroker, sampled: bool
) -> None:
    prefill, decode = pair
    node = Node(MemoryBus(broker), SUBJECTS, name="collect", membership=Membership(), hears=())
    kept, paths = Kept(), list[Path]()
    collector = Collector(node, [kept], paths.append, adopts=True)
    node.start()
    try:
        serve(prefill, decode, *traced_legs(SAMPLED if sampled else UNSAMPLED))
        if sampled:
            eventually_sync(lambda: kept.spans)
    finally:
        node.close()
        collector.close()
    assert len(paths) == sampled
    if sampled:
        [view] = views_of(kept.spans)
        assert problems(view) == []
        assert (view.trace_id, view.root.parent_id if view.root else "") == (SAMPLED[3:35], SAMPLED[36:52])
        assert paths[0].outcome is Outcome.PUSHED
        others = {*HISTORY_STAGES, StageName.LOST, StageName.DECODE_QUEUE, StageName.DECODE_COMPUTE}
        assert [stage.name for stage in view.stages] == [name for name in StageName if name not in others]


def test_many_marks_of_one_transfer_go_in_several_messages(broker: MemoryBroker, heard: Heard) -> None:
    node = Node(MemoryBus(broker), SUBJECTS, name="n", membership=Membership())
    marker = Marker(node, "P", Role.PREFILL)
    node.start()
    try:
        for number in range(3000):
            marker.mark(Traced("t", SAMPLED), MarkName.POSTED, number, at_s=1.0 + number)
        eventually_sync(lambda: len(heard.names) == 3000)
    finally:
        node.close()


def test_marks_wait_while_the_bus_is_away(broker: MemoryBroker, heard: Heard) -> None:
    node = Node(MemoryBus(broker), SUBJECTS, name="n", membership=Membership())
    marker = Marker(node, "P", Role.PREFILL)
    node.start()
    try:
        with broker.down():
            eventually_sync(lambda: not node.bus.connected)
            marker.mark(Traced("t", SAMPLED), MarkName.PREFILL_ARRIVED)
        eventually_sync(lambda: heard.names == ["prefill arrived"])
    finally:
        node.close()


def test_an_unsampled_mark_costs_next_to_nothing() -> None:
    """Compared with the cheapest thing there is; a span of the SDK costs some hundred times as much."""

    def best_ns(marking: Marker | NoMarks, what: Traced | None) -> float:
        rounds = []
        for _ in range(5):
            started = time.perf_counter_ns()
            for _ in range(20_000):
                marking.mark(what, MarkName.PREFILL_ARRIVED)
            rounds.append((time.perf_counter_ns() - started) / 20_000)
        return min(rounds)

    node = Node(MemoryBus(MemoryBroker()), SUBJECTS, name="n", membership=Membership())
    marker = Marker(node, "P", Role.PREFILL)
    nothing, unsampled = best_ns(NoMarks(), None), best_ns(marker, traced("t", UNSAMPLED))
    sampled = best_ns(marker, traced("t", SAMPLED))
    print(f"\nempty call {nothing:.0f} ns, unsampled {unsampled:.0f} ns, sampled {sampled:.0f} ns")
    assert unsampled < 10 * nothing + 1000, "a span of the SDK takes 15,000 and more"
