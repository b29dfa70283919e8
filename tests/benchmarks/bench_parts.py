"""What the parts cost: ``make bench-micro`` prints it, saves it and compares it with the time before."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Iterator
from itertools import count
from random import Random
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture
from support.paths import ANCHOR_NS, BACK, FRONT, IDS, MIDDLE, WRITTEN

from kvbus.bus import NatsBus, Node
from kvbus.local import NatsServer
from kvbus.protocol import Membership
from kvbus.protocol.prefill import Matcher, PostWrite, SinkJoined, WriteEnded
from kvbus.router.fleet import Choice
from kvbus.router.fleet.loads import Loads
from kvbus.trace.spans import spans_of
from kvbus.trace.stages import path_of
from kvbus.wire import (
    Delivered,
    Heartbeat,
    LeaseEcho,
    Message,
    PrefillCompleted,
    PrefillProgress,
    Registration,
    Role,
    State,
    Subjects,
    decode,
    encode,
)

TRANSFERS = 2000
LIVE = 100_000
BLOCKS = (((100, 20), (400, 12)),)


def say(capsys: pytest.CaptureFixture[str], benchmark: BenchmarkFixture, what: str, figure: int) -> None:
    """Print a figure that the table of times does not have, and save it with them."""
    benchmark.extra_info[what] = figure
    with capsys.disabled():
        print(f"\n{what}: {figure:,}")


def make_matcher() -> Matcher:
    """It may write into D for ever."""
    matcher = Matcher(
        engine="P",
        incarnation=5,
        rank=0,
        ranks=1,
        block_lease_s=1e9,
        pool_hold_s=1e9,
        write_lease_s=1e9,
        max_transfers=2 * LIVE,
    )
    matcher.pulse(0.0)
    matcher.apply(LeaseEcho("D", 7, (("P", 5, 0, 1),)), 0.0)
    matcher.apply(SinkJoined("D", 7, 1024), 0.0)
    return matcher


def registration(name: str) -> Registration:
    return Registration(name, 1, "D", 7, f"d{name}", BLOCKS, 1024, source_incarnation=5, digest="0123456789abcdef")


def completion(name: str) -> PrefillCompleted:
    return PrefillCompleted(name, "P", 5, f"p{name}", BLOCKS, 1024, digest="0123456789abcdef")


def test_matcher_events(benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str]) -> None:
    """Five events a transfer."""
    events: list[Any] = []
    for number in range(TRANSFERS):
        name = f"{number:032x}"
        events += [
            PrefillProgress(name, "P", 5, f"p{name}", 0, 1024),
            registration(name),
            completion(name),
            WriteEnded(name, 1, 1 << 20),
            Delivered(name, 1, "D", 7, f"d{name}"),
        ]

    def run(matcher: Matcher) -> None:
        for event in events:
            matcher.apply(event, 1.0)
        assert len(matcher) == 0

    benchmark.pedantic(run, setup=lambda: ((make_matcher(),), {}), rounds=15, warmup_rounds=1)
    say(capsys, benchmark, "matcher: events/s", round(len(events) / benchmark.stats.stats.median))


@pytest.mark.parametrize("message", [registration("1"), completion("1")], ids=["registration", "completion"])
def test_encode(benchmark: BenchmarkFixture, message: Message) -> None:
    assert decode(benchmark(encode, message)) == message


@pytest.mark.parametrize("message", [registration("1"), completion("1")], ids=["registration", "completion"])
def test_decode(benchmark: BenchmarkFixture, message: Message) -> None:
    assert benchmark(decode, encode(message)) == message


@pytest.mark.parametrize("engines", [8, 64, 512])
def test_choice_of_a_pair(benchmark: BenchmarkFixture, engines: int) -> None:
    """A prefill and a decode engine of a pool of which half are each."""
    pool = [
        Heartbeat(f"e{number}", 1, 1, role, State.READY, 1, "m", f"10.0.0.1:{8000 + number}", compat=(("model", "m"),))
        for number, role in zip(range(engines), [Role.PREFILL, Role.DECODE] * engines, strict=False)
    ]
    choice = Choice(pool, Loads(lambda: 0.0), Random(1), session="s", tokens=1024)

    def run() -> Heartbeat | None:
        sink = choice.sink(None)
        assert sink is not None
        return choice.source(sink)

    assert benchmark(run) is not None


def test_spans_of_a_request(benchmark: BenchmarkFixture) -> None:
    marks, ids = [*FRONT, *MIDDLE, *WRITTEN, *BACK], count(1)
    spans = benchmark(lambda: spans_of(path_of(marks), IDS, ANCHOR_NS, lambda: f"{next(ids):016x}", {}))
    assert len(spans) > 5


def test_memory_of_live_transfers(benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str]) -> None:
    """What the matcher and the messages that it keeps take for each transfer."""
    matcher = make_matcher()

    def fill() -> None:
        for number in range(LIVE):
            matcher.apply(registration(f"{number:032x}"), 1.0)

    tracemalloc.start()
    try:
        benchmark.pedantic(fill, rounds=1)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(matcher) == LIVE
    say(capsys, benchmark, f"matcher: bytes for each of {LIVE:,} live transfers", taken // LIVE)


@pytest.fixture
def nodes(nats_server: NatsServer) -> Iterator[tuple[Node, Node]]:
    """Of a decode and a prefill engine."""
    two = tuple(
        Node(NatsBus([nats_server.url], name), Subjects("bench"), name=name, membership=Membership())
        for name in ("D", "P")
    )
    yield two  # type: ignore[misc]
    for node in two:
        node.close()


def test_registration_to_write(benchmark: BenchmarkFixture, nodes: tuple[Node, Node]) -> None:
    """Published, delivered by a real nats-server, decoded, joined with a completion that waits, up to the WRITE."""
    sink, source = nodes
    matcher, numbers, posted = make_matcher(), count(), threading.Event()

    def hear(message: Registration) -> None:
        if any(isinstance(effect, PostWrite) for effect in matcher.apply(message, 1.0)):
            posted.set()

    source.listen(source.subjects.registrations("P"), Registration, hear, sealed=False)
    for node in nodes:
        node.start()

    def prepare() -> tuple[tuple[str], dict[str, Any]]:
        name = f"{next(numbers):032x}"
        matcher.apply(completion(name), 1.0)
        posted.clear()
        return (name,), {}

    def post(name: str) -> None:
        sink.publish(sink.subjects.registrations("P", "D"), registration(name))
        assert posted.wait(5.0)

    (name,), _ = prepare()
    for _ in range(100):  # a subscription takes a moment to be there; what was lost before it is not measured
        sink.publish(sink.subjects.registrations("P", "D"), registration(name))
        if posted.wait(0.1):
            break
    benchmark.pedantic(post, setup=prepare, rounds=300)
