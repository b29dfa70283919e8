"""The node, the writer thread and the recorder."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import pytest
from support.waiting import eventually_sync

from kvbus.bus import Keys, MemoryBroker, MemoryBus, Node
from kvbus.engine import Rank, Writer
from kvbus.engine.memory_transport import Fabric, MemoryTransport
from kvbus.metrics import Counters
from kvbus.protocol import Membership, PeerJoined, PeerLeft
from kvbus.protocol.prefill import Matcher
from kvbus.trace import NoMarks
from kvbus.wire import Bye, Heartbeat, PrefillCompleted, Registration, Role, State, Subjects, Who, decode, encode

SUBJECTS = Subjects("default")
BEAT = Heartbeat("P", 5, 1, Role.PREFILL, State.READY, 1)
REGISTRATION = Registration("t", 1, "D", 7, "d1", (((10, 3),),), 96)
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
def node(broker: MemoryBroker) -> Iterator[Node]:
    node = Node(
        MemoryBus(broker), SUBJECTS, name="test", membership=Membership(dead_after_s=0.3), heartbeat_interval_s=0.05
    )
    yield node
    node.close()
    node.close()


class TestNode:
    def test_junk_is_counted_logged_once_and_nothing_stops(
        self, node: Node, broker: MemoryBroker, caplog: pytest.LogCaptureFixture
    ) -> None:
        """H1."""
        got: list[Registration] = []
        node.listen(SUBJECTS.pool(), Registration, got.append)
        node.start()
        with caplog.at_level(logging.WARNING, "kvbus"):
            for payload in (b"", b"\xff\xff", b"\x93\x01\x02\x03", encode(BEAT)):
                broker.route(SUBJECTS.pool("D"), payload)
            broker.route(SUBJECTS.pool("D"), encode(REGISTRATION))
            eventually_sync(lambda: got == [REGISTRATION])
        assert node.counters["rejected_messages"] == 4
        assert len([record for record in caplog.records if "dropped a message" in record.message]) == 1

    def test_engines_come_and_go(self, node: Node, broker: MemoryBroker) -> None:
        changes: list[object] = []
        node.watch_peers(changes.append)
        node.start()
        broker.route(SUBJECTS.heartbeats("prefill", "P"), encode(BEAT))
        eventually_sync(lambda: changes == [PeerJoined(BEAT)])
        eventually_sync(lambda: changes[1:] == [PeerLeft("P", 5, Role.PREFILL, "silent")])

    def test_many_who_ask_at_once_get_one_answer(self, broker: MemoryBroker) -> None:
        """After a restart of the server every node asks: N x N answers, each heard by N."""
        node = Node(MemoryBus(broker), SUBJECTS, name="P", membership=Membership(), heartbeat_interval_s=60.0, hears=[])
        node.present(lambda number: Heartbeat("P", 5, number, Role.PREFILL, State.READY, 1))
        node.start()

        def beats() -> int:
            return sum(isinstance(decode(payload), Heartbeat) for _, payload in broker.log)

        eventually_sync(beats)
        before = beats()
        for _ in range(50):
            broker.route(SUBJECTS.who("x"), encode(Who("x")))
        eventually_sync(lambda: beats() > before)
        assert beats() <= before + 10
        assert not any(isinstance(decode(payload), Who) and decode(payload) == Who("P") for _, payload in broker.log)
        node.close()

    def test_engines_hear_what_lasts_and_routers_hear_each_heartbeat(self, broker: MemoryBroker) -> None:
        """A pool of 64 would else deliver 8,000 heartbeats a second."""
        state, step_s = [State.READY], [0.0]
        node = Node(
            MemoryBus(broker),
            SUBJECTS,
            name="P",
            membership=Membership(),
            heartbeat_interval_s=0.02,
            to_all_interval_s=60.0,
            hears=[],
        )
        node.present(
            lambda number: Heartbeat("P", 5, number, Role.PREFILL, state[0], 1, requests=number, step_s=step_s[0])
        )
        heard: dict[str, list[Heartbeat]] = {}
        others = {}
        for name, keys in (("router", None), ("engine", Keys(b"x" * 32, "engine", 3))):
            bus, listening = MemoryBus(broker), heard.setdefault(name, [])
            others[name] = Node(bus, SUBJECTS, name=name, membership=Membership(), keys=keys)
            others[name].watch_heartbeats(listening.append)
            others[name].start()
        node.start()
        eventually_sync(lambda: len(heard["router"]) >= 10)
        state[0] = State.DRAINING
        eventually_sync(lambda: heard["router"][-1].state is State.DRAINING)
        eventually_sync(lambda: heard["engine"][-1].state is State.DRAINING)
        step_s[0] = 2.0  # a decode engine waits by what it hears of this
        eventually_sync(lambda: len([each for each in heard["engine"] if each.is_in_long_step]) >= 5)
        step_s[0] = 0.0
        eventually_sync(lambda: not heard["engine"][-1].is_in_long_step)
        for each in (node, *others.values()):
            each.close()
        in_time = [each for each in heard["engine"] if each.state is State.READY]
        assert 1 <= len(in_time) <= 4, "at the start, and to those who asked who is there"

    def test_only_the_roles_asked_for_are_heard(self, broker: MemoryBroker) -> None:
        changes: list[object] = []
        node = Node(MemoryBus(broker), SUBJECTS, name="deaf", membership=Membership(), hears=[Role.DECODE, Role.BOTH])
        node.watch_peers(changes.append)
        node.start()
        both = Heartbeat("B", 5, 1, Role.BOTH, State.READY, 1)
        broker.route(SUBJECTS.heartbeats("prefill", "P"), encode(BEAT))
        broker.route(SUBJECTS.heartbeats("both", "B"), encode(both))
        eventually_sync(lambda: changes)
        node.close()
        assert changes == [PeerJoined(both)]

    def test_nobody_is_dead_because_the_bus_is(self, node: Node, broker: MemoryBroker) -> None:
        changes: list[object] = []
        node.watch_peers(changes.append)
        node.start()
        broker.route(SUBJECTS.heartbeats("prefill", "P"), encode(BEAT))
        eventually_sync(lambda: changes)
        with broker.down():
            ended = time.monotonic() + 0.6
            eventually_sync(lambda: time.monotonic() > ended)
        assert changes == [PeerJoined(BEAT)]

    def test_it_announces_answers_who_and_says_goodbye(self, node: Node, broker: MemoryBroker) -> None:
        node.present(lambda number: Heartbeat("P", 5, number, Role.PREFILL, State.READY, 1))
        node.start()

        def heard() -> list[object]:
            return [decode(payload) for _, payload in broker.log]

        eventually_sync(lambda: sum(isinstance(message, Heartbeat) for message in heard()) >= 3)
        numbers = [message.number for message in heard() if isinstance(message, Heartbeat)]
        assert numbers == sorted(set(numbers))
        before = len(numbers)
        broker.route(SUBJECTS.who("x"), encode(Who("x")))
        eventually_sync(lambda: sum(isinstance(message, Heartbeat) for message in heard()) > before)
        node.close()
        assert heard()[-1] == Bye("P", 5)

    def test_a_call_that_raises_does_not_end_it(self, node: Node, caplog: pytest.LogCaptureFixture) -> None:
        node.start()
        called = threading.Event()
        with caplog.at_level(logging.CRITICAL, "kvbus"):
            node.call(lambda: 1 / 0)
            node.call(called.set)
            assert called.wait(5)
        assert node.counters["callback_errors"] == 1


class TestWriter:
    @pytest.fixture
    def writer(self) -> Iterator[Writer]:
        writer = Writer("test-writer", Counters())
        yield writer
        writer.close()

    def make_rank(self, transport: MemoryTransport, counters: Counters, sent: list[object]) -> Rank:
        return Rank(
            matcher=Matcher(engine="P", incarnation=5, rank=0, ranks=1),
            transport=transport,
            rank=0,
            ranks=1,
            publish=lambda engine, message: sent.append((engine, message.KIND)),
            introduce=lambda engine: sent.append(("introduce", engine)),
            clock=time.monotonic,
            counters=counters,
            marking=NoMarks(),
        )

    def test_everything_runs_on_one_thread(self, writer: Writer) -> None:
        names = {writer.call(lambda: threading.current_thread().name) for _ in range(3)}
        assert names == {"test-writer"}

    def test_a_call_hands_back_what_it_raises(self, writer: Writer) -> None:
        with pytest.raises(ZeroDivisionError):
            writer.call(lambda: 1 / 0)

    def test_items_from_before_the_rank_are_not_lost_and_a_bad_one_ends_nothing(
        self, writer: Writer, caplog: pytest.LogCaptureFixture
    ) -> None:
        sent: list[object] = []
        counters = Counters()
        transport = MemoryTransport(Fabric(), "P")
        writer.submit(REGISTRATION)
        with caplog.at_level(logging.CRITICAL, "kvbus"):
            writer.submit(object())  # type: ignore[arg-type]
            writer.drive(self.make_rank(transport, counters, sent))
            eventually_sync(lambda: sent == [("D", "ack"), ("introduce", "D")])
            writer.submit(PrefillCompleted("t", "P", 4, "p1", (((0, 3),),), 96))
            eventually_sync(lambda: counters["rejected: foreign prefill"] == 1)

    def test_close_ends_the_transport_and_is_idempotent(self) -> None:
        writer, transport = Writer("test-writer", Counters()), MemoryTransport(Fabric(), "P")
        writer.drive(self.make_rank(transport, Counters(), []))
        writer.close()
        writer.close()
        assert transport.closed

    def test_a_flood_from_peers_is_dropped_not_queued_for_ever(self, monkeypatch: pytest.MonkeyPatch) -> None:
        counters = Counters()
        monkeypatch.setattr("kvbus.engine.writer.MAX_QUEUE", 10)
        writer, go = Writer("test-writer", counters), threading.Event()
        blocked = threading.Thread(target=lambda: writer.call(lambda: go.wait(5)))
        blocked.start()
        for _ in range(100):
            writer.submit(REGISTRATION, droppable=True)
        assert counters["writer_queue_full"] >= 80
        go.set()
        blocked.join()
        writer.close()
