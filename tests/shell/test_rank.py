"""A rank on a memory transport, driven by hand: time is a number."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import pytest

from kvbus.engine import AddPeer, Greet, Overheard, Rank
from kvbus.engine.memory_transport import Fabric, MemoryTransport
from kvbus.metrics import Counters, durations
from kvbus.protocol.prefill import Matcher
from kvbus.trace import MarkName, NoMarks
from kvbus.wire import (
    LeaseEcho,
    Message,
    PrefillCompleted,
    Pulse,
    Registration,
    TransferDone,
    TransferFailed,
    TransferStarted,
)

MAX_WRITE_S = 2.0


@dataclass
class Driven:
    """A prefill rank that has posted a WRITE into D, which does not end by itself."""

    now: float = 0.0
    said: list[Message] = field(default_factory=list)
    introduced: list[str] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        fabric = Fabric()
        fabric.slow = True
        sink, self.source = MemoryTransport(fabric, "D"), MemoryTransport(fabric, "P")
        self.rank = Rank(
            matcher=Matcher(engine="P", incarnation=5, rank=0, ranks=1),
            transport=self.source,
            rank=0,
            ranks=1,
            publish=lambda _, message: self.said.append(message),
            introduce=self.introduced.append,
            clock=lambda: self.now,
            counters=self.counters,
            marking=NoMarks(),
            pulse_interval_s=0.5,
            max_write_s=MAX_WRITE_S,
        )
        self.metadata = {0: sink.metadata}
        self.rank.poll()
        pulse = next(message for message in self.said if isinstance(message, Pulse))
        self.rank.handle(AddPeer("D", 7, 1, self.metadata))
        self.rank.handle(Registration("t", 1, "D", 7, "d1", (((10, 3),),), 96, source_incarnation=5))
        self.rank.handle(LeaseEcho("D", 7, (("P", 5, 0, pulse.number),)))
        self.rank.handle(PrefillCompleted("t", "P", 5, "p1", (((1, 3),),), 96))
        assert self.rank.writing == 1

    @property
    def failures(self) -> list[str]:
        return [message.reason for message in self.said if isinstance(message, TransferFailed)]


@pytest.fixture
def driven(caplog: pytest.LogCaptureFixture) -> Driven:
    caplog.set_level(logging.CRITICAL, "kvbus")
    return Driven()


def test_a_write_that_runs_too_long_is_disconnected_and_its_peer_met_anew(driven: Driven) -> None:
    """F3."""
    driven.now = MAX_WRITE_S
    driven.rank.poll()
    assert (driven.rank.writing, driven.introduced) == (1, [])
    driven.now = MAX_WRITE_S + 0.01
    driven.rank.poll()
    assert driven.failures == ["disconnected"]
    assert driven.introduced == ["D"]
    assert driven.rank.report().released == (), "another decode engine may take over"
    driven.now += 31
    driven.rank.poll()
    assert driven.rank.report().released == ("p1",)
    assert driven.counters["writes_overdue"] == 1


@pytest.mark.parametrize("incarnation", [7, 8])
def test_a_peer_that_is_met_again_meanwhile_is_disconnected_all_the_same(driven: Driven, incarnation: int) -> None:
    """F3: the decode engine counts on it, whatever else becomes of the two."""
    driven.now = 1.0
    driven.rank.handle(AddPeer("D", incarnation, 1, driven.metadata))
    driven.now = MAX_WRITE_S + 0.01
    driven.rank.poll()
    assert driven.failures == ["disconnected"]
    assert driven.introduced == ["D"]
    assert driven.rank.writing == 0


def pulses_until(rank: Rank, said: list[Message], at: list[float], until_s: float) -> list[float]:
    """When pulses are said, if the rank is called whenever it asks for it."""
    found: list[float] = []
    while at[0] <= until_s:
        before = sum(isinstance(each, Pulse) for each in said)
        wait_s = rank.poll()
        found += [at[0]] * (sum(isinstance(each, Pulse) for each in said) - before)
        assert wait_s is not None
        at[0] = round(at[0] + max(wait_s, 0.05), 3)
    return found


def test_a_rank_without_a_long_transfer_pulses_less_often() -> None:
    """Every decode engine hears each pulse."""
    said, at = list[Message](), [0.0]
    rank = Rank(
        matcher=Matcher(engine="P", incarnation=5, rank=0, ranks=1),
        transport=MemoryTransport(Fabric(), "P"),
        rank=0,
        ranks=1,
        publish=lambda _, message: said.append(message),
        introduce=lambda _: None,
        clock=lambda: at[0],
        counters=Counters(),
        marking=NoMarks(),
        pulse_interval_s=0.5,
        calm_pulse_interval_s=1.0,
    )
    assert pulses_until(rank, said, at, 2.5) == [0.0, 1.0, 2.0]
    at[0] = 2.7
    rank.handle(Overheard(PrefillCompleted("t", "P", 5, "p1", (((1, 3),),), 96, number=1)))
    assert pulses_until(rank, said, at, 4.5) == [3.0, 3.5, 4.0, 4.5], "a write lease needs its echo"


def test_how_long_a_match_waited_and_its_write_took_is_counted(driven: Driven) -> None:
    driven.now = 1.5
    driven.source.finish()
    driven.rank.poll()
    assert sorted(durations(driven.counters.snapshot())) == [("match_wait_decode", 1, 0.0), ("write", 1, 1.5)]


def test_a_word_that_waited_for_the_writer_thread_is_marked_when_it_came() -> None:
    """P8: else a trace blames the bus for it."""
    noted: list[tuple[str, str, float]] = []

    class Noting:
        def mark(self, what: object, name: str, attempt: int = 0, note: str = "", at_s: float = 0.0) -> None:
            noted.append((name, note, at_s))

    fabric, said, now = Fabric(), list[Message](), [0.0]
    sink = MemoryTransport(fabric, "D")
    rank = Rank(
        matcher=Matcher(engine="P", incarnation=5, rank=0, ranks=1),
        transport=MemoryTransport(fabric, "P"),
        rank=0,
        ranks=1,
        publish=lambda _, message: said.append(message),
        introduce=lambda _: None,
        clock=lambda: now[0],
        counters=Counters(),
        marking=Noting(),
        pulse_interval_s=0.5,
    )
    rank.poll()
    [pulse] = [message for message in said if isinstance(message, Pulse)]
    rank.handle(AddPeer("D", 7, 1, {0: sink.metadata}), 0.0)
    now[0] = 1.0
    about = {"source_incarnation": 5, "echoes": (("P", 5, 0, pulse.number),), "traceparent": f"00-{1:032x}-{1:016x}-01"}
    rank.handle(Registration("t", 1, "D", 7, "d1", (((10, 3),),), 96, **about), 0.3)  # type: ignore[arg-type]
    rank.handle(Overheard(PrefillCompleted("t", "P", 5, "p1", (((1, 3),),), 96, number=1)), 0.4)
    assert noted[:3] == [
        (MarkName.REGISTERED, "", 0.3),
        (MarkName.COMPLETED, "", 0.4),
        (MarkName.POSTING, "the rank's writer thread", 1.0),
    ]


@pytest.mark.parametrize("meeting", ["a new peer", "its metadata asked for"])
def test_both_sides_of_a_first_contact_poll_for_a_while(meeting: str) -> None:
    """S1: connecting needs both of them to progress, before there is any WRITE."""
    fabric = Fabric()
    source = MemoryTransport(fabric, "P")
    clock = [100.0]
    rank = Rank(
        matcher=Matcher(engine="P", incarnation=5, rank=0, ranks=1),
        transport=source,
        rank=0,
        ranks=1,
        publish=lambda _, message: None,
        introduce=lambda _: None,
        clock=lambda: clock[0],
        counters=Counters(),
        marking=NoMarks(),
    )
    assert rank.poll() is None
    peer = AddPeer("D", 7, 1, {0: MemoryTransport(fabric, "D").metadata})
    rank.handle(peer if meeting == "a new peer" else Greet())
    assert (wait_s := rank.poll()) is not None
    assert wait_s <= 0.01
    clock[0] += 10
    assert rank.poll() is None


@pytest.mark.parametrize("word", [TransferStarted, TransferDone])
def test_word_of_a_write_that_nobody_waits_for_keeps_no_rank_awake(word: type[TransferStarted | TransferDone]) -> None:
    """S3: it can come after the WRITE itself, and anybody can say it."""
    clock = [100.0]
    rank = Rank(
        matcher=Matcher(engine="D", incarnation=5, rank=0, ranks=1),
        transport=MemoryTransport(Fabric(), "D"),
        rank=0,
        ranks=1,
        publish=lambda _, message: None,
        introduce=lambda _: None,
        clock=lambda: clock[0],
        counters=Counters(),
        marking=NoMarks(),
    )
    for number in range(100):
        rank.handle(word("t", "P", 7, 1, 0, 1, f"d{number}"))
    assert (wait_s := rank.poll()) is not None
    assert wait_s <= 0.01
    clock[0] += MAX_WRITE_S + 0.01
    assert rank.poll() is None
