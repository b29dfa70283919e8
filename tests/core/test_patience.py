"""When a prefill that was not announced counts as one that nobody has."""

from __future__ import annotations

from kvbus.protocol.decode import unknown_at

NEVER = float("-inf")


def test_some_seconds_after_it_was_asked_for() -> None:
    assert unknown_at(10.0, NEVER, 5.0) == 15.0


def test_a_long_step_begins_the_seconds_anew() -> None:
    assert unknown_at(10.0, 50.0, 5.0) == 55.0


def test_a_step_without_an_end_does_not() -> None:
    assert unknown_at(10.0, 69.0, 5.0, patience_s=60.0) == 70.0


def test_a_step_that_was_over_before_it_came_is_none() -> None:
    assert unknown_at(10.0, 3.0, 5.0) == 15.0
