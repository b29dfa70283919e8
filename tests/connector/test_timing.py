"""When blocks are taken: every mode against everything that can be known."""

from __future__ import annotations

import pytest
from kvbus_connector.timing import SILENCE_S, Progress, RegistrationTiming, take_blocks_now

NOTHING, BEGUN = None, Progress(10.0)
NEARLY, DONE = Progress(10.0, nearly_done=True), Progress(10.0, nearly_done=True, done=True)


@pytest.mark.parametrize(
    ("when", "room", "expected"),
    [
        (RegistrationTiming.EAGER, 0.0, [True, True, True, True]),
        (RegistrationTiming.JIT, 0.9, [False, False, True, True]),
        (RegistrationTiming.AFTER_PREFILL, 0.9, [False, False, False, True]),
        (RegistrationTiming.AUTO, 0.9, [True, True, True, True]),
        (RegistrationTiming.AUTO, 0.4, [False, False, True, True]),
        (RegistrationTiming.AUTO, -0.1, [False, False, True, True]),
    ],
)
def test_blocks_are_taken(when: RegistrationTiming, room: float, expected: list[bool]) -> None:
    known = [NOTHING, BEGUN, NEARLY, DONE]
    assert [take_blocks_now(when, each, waits_since=10.0, now=11.0, room=room) for each in known] == expected


@pytest.mark.parametrize("progress", [NOTHING, BEGUN, NEARLY])
def test_word_that_was_lost_is_not_waited_for_for_ever(progress: Progress | None) -> None:
    late = 10.0 + SILENCE_S
    for when in RegistrationTiming:
        assert take_blocks_now(when, progress, waits_since=10.0, now=late + 0.1, room=0.0)
    assert not take_blocks_now(RegistrationTiming.AFTER_PREFILL, progress, waits_since=10.0, now=late - 0.1, room=0.0)
