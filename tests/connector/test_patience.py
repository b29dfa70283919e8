"""P4: a decode engine waits for seconds, and not for longer, for a prefill that no prefill engine has announced."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from support.fake_engine import Boot, FakeEngine, Request, legs
from support.waiting import eventually_sync

SOON_S = 0.4
LATE_S = 20.0  # on a busy machine; the patience with an engine that has the request is 60 s
D_BLOCKS = [10, 11, 12]


def engines(boot: Boot, sources: Sequence[str], registration: str) -> list[FakeEngine]:
    """The decode engine last."""
    found = [boot(name) for name in sources]
    sink = boot("D", options={"unclaimed_s": SOON_S, "registration": registration})
    eventually_sync(lambda: all(sink.knows(each) and each.knows(sink) for each in found))
    return [*found, sink]


def answer(sink: FakeEngine, leg: Request) -> int | None:
    sink.step()
    return sink.scheduler.tokens_from_outside(leg, 0)


@pytest.mark.parametrize("hint", ["P", None])
@pytest.mark.parametrize("sources", ["P", "PQ"])
def test_what_is_registered_and_unknown_is_given_up(boot: Boot, sources: str, hint: str | None) -> None:
    *_, sink = engines(boot, sources, "eager")
    many = [legs(f"t{number}", hint)[1] for number in range(20)]
    started = time.monotonic()
    for number, leg in enumerate(many):
        assert sink.allocate(leg, [3 * number, 3 * number + 1, 3 * number + 2]) == 96
    for leg in many:
        eventually_sync(lambda leg=leg: sink.has_received(leg.request_id))  # type: ignore[misc]
        assert sink.received[leg.request_id] is False
        assert answer(sink, leg) == 0, "vLLM computes it"
    assert SOON_S < time.monotonic() - started < LATE_S


@pytest.mark.slow
@pytest.mark.parametrize("hint", ["P", None])
@pytest.mark.parametrize("registration", ["jit", "after_prefill"])
def test_what_is_deferred_and_unknown_never_takes_blocks(boot: Boot, registration: str, hint: str | None) -> None:
    _, sink = engines(boot, "P", registration)
    leg = legs("t", hint)[1]
    sink.arrive(leg)
    started = time.monotonic()
    assert answer(sink, leg) is None
    eventually_sync(lambda: answer(sink, leg) is not None)
    assert answer(sink, leg) == 0
    assert SOON_S < time.monotonic() - started < LATE_S


@pytest.mark.slow
def test_what_waited_for_blocks_is_asked_for_before_it_takes_them(boot: Boot) -> None:
    """Else each round of requests that fill decode's memory would wait anew."""
    source, sink = engines(boot, "P", "eager")
    known, unknown = legs("known"), legs("unknown")
    sink.arrive(known[1])
    sink.arrive(unknown[1])
    source.scheduler.arrived(known[0])
    time.sleep(SOON_S + 0.1)  # vLLM has no blocks for them, and does not ask
    assert answer(sink, known[1]) is None
    assert answer(sink, unknown[1]) is None
    eventually_sync(lambda: answer(sink, known[1]) == 96)

    def is_given_up() -> bool:
        source.step()
        return answer(sink, unknown[1]) == 0

    eventually_sync(is_given_up)


@pytest.mark.slow
def test_a_prefill_that_is_queued_for_long_is_waited_for(boot: Boot) -> None:
    """L5: it was announced when it arrived."""
    source, sink = engines(boot, "P", "eager")
    p_leg, d_leg = legs()
    sink.allocate(d_leg, D_BLOCKS)
    source.scheduler.arrived(p_leg)
    deadline = time.monotonic() + 4 * SOON_S
    while time.monotonic() < deadline:
        assert not sink.has_received(d_leg.request_id)
        source.step()
        time.sleep(0.02)
    source.scheduler.finished(p_leg, [[1, 2, 3]], prefilled=True)
    eventually_sync(lambda: sink.has_received(d_leg.request_id))
    assert sink.received[d_leg.request_id] is True


@pytest.mark.slow
def test_a_prefill_engine_says_when_it_is_in_a_long_step(boot: Boot) -> None:
    source, sink = engines(boot, "P", "eager")
    running = legs("running")[0]

    def step_s() -> float:
        return sink.scheduler.node.membership["P"].step_s

    time.sleep(1.1)
    assert step_s() == 0.0, "idle"
    source.scheduler.arrived(running)
    source.step({running.request_id: 96})
    eventually_sync(lambda: step_s() > 1.0)
    waiting = legs("w")[1]
    sink.allocate(waiting, D_BLOCKS)
    deadline = time.monotonic() + 3 * SOON_S
    while time.monotonic() < deadline:
        assert not sink.has_received(waiting.request_id), "it may still be announced"
        time.sleep(0.02)
    source.step()
    eventually_sync(lambda: sink.has_received(waiting.request_id))
    assert sink.received[waiting.request_id] is False
