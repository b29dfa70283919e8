from __future__ import annotations

import pytest

from kvbus.protocol.decode import Arrivals, Arrived, Landed


def landed(rank: int = 0, writers: int = 1, attempt: int = 1) -> Landed:
    return Landed("r", attempt, rank, writers)


def test_one_writer() -> None:
    arrivals = Arrivals()
    assert arrivals.expect("r", 1) == []
    assert arrivals.land(landed()) == [Arrived("r", ok=True)]


def test_the_notification_may_be_faster_than_the_scheduler() -> None:
    arrivals = Arrivals()
    assert arrivals.land(landed()) == []
    assert arrivals.expect("r", 1) == [Arrived("r", ok=True)]


def test_every_writer_counts_once() -> None:
    arrivals = Arrivals()
    arrivals.expect("r", 1)
    assert arrivals.land(landed(0, writers=2)) == []
    assert arrivals.land(landed(0, writers=2)) == []
    assert arrivals.land(landed(1, writers=2)) == [Arrived("r", ok=True)]


def test_reported_once_and_never_again() -> None:
    """A6, F5: vLLM dies of a second report."""
    arrivals = Arrivals()
    arrivals.expect("r", 1)
    assert arrivals.land(landed()) == [Arrived("r", ok=True)]
    assert arrivals.land(landed()) == []
    assert arrivals.abandon("r") == []
    assert arrivals.expect("r", 1) == []
    assert arrivals.rejected == {"late notification": 1, "abandoned after report": 1, "expected again": 1}


def test_abandoned_then_landed() -> None:
    arrivals = Arrivals()
    arrivals.expect("r", 1)
    assert arrivals.abandon("r") == [Arrived("r", ok=False)]
    assert arrivals.land(landed()) == []


def test_another_attempt_does_not_count() -> None:
    arrivals = Arrivals()
    arrivals.expect("r", 2)
    assert arrivals.land(landed(attempt=1)) == []
    assert arrivals.land(landed(attempt=2)) == [Arrived("r", ok=True)]


def test_unknown_requests_are_bounded() -> None:
    arrivals = Arrivals(max_early=3)
    for number in range(10):
        arrivals.land(Landed(f"r{number}", 1, 0, 1))
    assert arrivals.expect("r0", 1) == []
    assert arrivals.expect("r9", 1) == [Arrived("r9", ok=True)]


def test_the_text_carries_any_request_id() -> None:
    note = Landed("cmpl-a:b:c-0-12345678", 3, 1, 2)
    assert Landed.decode(note.encode()) == note


@pytest.mark.parametrize("text", ["", "r", "r:1:2", "r:a:0:1", "r:1:0:0", "r:1:-1:1", "r:1:0:99999999999", "r:1:0:²"])
def test_other_text_is_no_notification(text: str) -> None:
    assert Landed.decode(text) is None


def test_a_first_token_comes_with_the_notification() -> None:
    note = Landed("cmpl-a:b!c", 3, 1, 2, 151_000)
    assert Landed.decode(note.encode()) == note
    for bad in ("r:1:0:1!", "r:1:0:1!-1", "r:1:0:1!x", "r:1:0:1!2147483648", "r:1:0:1!5!6", "r:1:0!5:1"):
        assert Landed.decode(bad) is None, bad
    arrivals = Arrivals()
    arrivals.expect("r", 1)
    assert arrivals.land(Landed("r", 1, 0, 1, 5)) == [Arrived("r", ok=True, first_token=5)]
    arrivals.expect("s", 1)
    arrivals.land(Landed("s", 1, 0, 2, 5))
    assert arrivals.abandon("s") == [Arrived("s", ok=False)]
