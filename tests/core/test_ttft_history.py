"""The stages of a turn whose history may come from decode: they add up with all the others, and are told."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from support.paths import (
    FRONT,
    MS,
    PUSHED,
    PUSHED_STAGES,
    check_worsened,
    decode,
    lengths,
    names,
    path,
    prefill,
    router,
    spans,
)

from kvbus.trace import HISTORY_STAGES, HistoryOutcome, MarkName
from kvbus.trace.path import History, Mark

ASKED = [prefill(MarkName.HISTORY_ASKED, 5.2, note="D")]
TAKEN = [
    *ASKED,
    prefill(MarkName.HISTORY_OFFERED, 8),
    prefill(MarkName.HISTORY_RECEIVED, 12.5, note="768"),
]
HISTORY = [*TAKEN, decode(MarkName.HISTORY_POSTED, 9.5)]
"""Before prefill's first step, which is at 20 ms then, with the tokens that came."""
HAS_MORE = decode(MarkName.REGISTERING, 7, note="768")


def with_history(*marks: Mark, had: str = "768", scheduled_ms: float = 20) -> list[Mark]:
    """A pushed request with these marks of history; prefill computes what it has not ``had``."""
    rest = [mark for mark in PUSHED if mark.name not in (MarkName.PREFILL_SCHEDULED, MarkName.REGISTERING)]
    return [*rest, HAS_MORE, prefill(MarkName.PREFILL_SCHEDULED, scheduled_ms, note=had), *marks]


def test_history_is_told_between_two_waits_in_prefills_queue() -> None:
    found = path(with_history(*HISTORY))
    at = [(stage.name.value, round(stage.duration_ns / MS, 1)) for stage in found.stages]
    assert at[:7] == [
        ("route", 5.0),
        ("prefill.queue", 0.2),
        ("history.ask", 2.8),
        ("history.match", 1.5),
        ("history.write", 3.0),
        ("prefill.queue", 7.5),
        ("prefill.compute", 80.0),
    ]
    assert found.stages[7:] == path(PUSHED).stages[3:], "the rest is as it is without history"
    assert found.history == History("D", HistoryOutcome.RECEIVED, 768, 0, 256)
    assert (found.missing, found.attempts) == ((), 1)
    drawn = spans(found)
    about = {key: value for key, value in drawn[0].attributes.items() if "history" in key or "computed" in key}
    assert about == {
        "kvbus.history": "received",
        "kvbus.history_engine": "D",
        "kvbus.history_tokens": 768,
        "kvbus.computed_tokens": 256,
    }
    owners = {span.name: (span.service, span.engine) for span in drawn if span.name.startswith("history")}
    assert owners == {
        "history.ask": ("kvbus-prefill", "P"),
        "history.match": ("kvbus-decode", "D"),
        "history.write": ("kvbus-prefill", "P"),
    }


def test_every_rank_of_decode_posts_its_part_of_the_history() -> None:
    drawn = spans(path(with_history(*HISTORY, decode(MarkName.HISTORY_POSTED, 10, rank=1))))
    assert [span.name for span in drawn if span.name.startswith("history.match rank")] == [
        "history.match rank 1",
        "history.match rank 0",
    ]


def test_a_wait_for_blocks_is_a_wait_in_the_queue_also_after_the_offer() -> None:
    late = [
        *ASKED,
        prefill(MarkName.HISTORY_OFFERED, 8),
        prefill(MarkName.HISTORY_REGISTERING, 14),
        decode(MarkName.HISTORY_POSTED, 15),
        prefill(MarkName.HISTORY_RECEIVED, 17, note="768"),
    ]
    found = path(with_history(*late))
    assert names(found)[1:7] == [
        "prefill.queue",
        "history.ask",
        "prefill.queue",
        "history.match",
        "history.write",
        "prefill.queue",
    ]
    assert lengths(found)["history.match"] == 1.0


@pytest.mark.parametrize(
    ("marks", "stages", "expected"),
    [
        (
            [prefill(MarkName.HISTORY_DECLINED, 9, note="too late")],
            ["history.ask"],
            (HistoryOutcome.DECLINED, "too late"),
        ),
        (
            [prefill(MarkName.HISTORY_OFFERED, 8), prefill(MarkName.HISTORY_FAILED, 11, note="digest")],
            ["history.ask", "history.match"],
            (HistoryOutcome.FAILED, "digest"),
        ),
        (
            [
                prefill(MarkName.HISTORY_OFFERED, 8),
                decode(MarkName.HISTORY_POSTED, 9),
                prefill(MarkName.HISTORY_FAILED, 11, note="decode engine D left"),
            ],
            ["history.ask", "history.match", "history.write"],
            (HistoryOutcome.FAILED, "decode engine D left"),
        ),
    ],
)
def test_an_ask_that_ends_without_history_adds_up_and_says_why(
    marks: list[Mark], stages: list[str], expected: tuple[HistoryOutcome, str]
) -> None:
    found = path(with_history(*ASKED, *marks, had=""))
    assert names(found)[1 : 3 + len(stages)] == ["prefill.queue", *stages, "prefill.queue"]
    outcome, reason = expected
    assert found.history == History("D", outcome, 0, 768, 1024, reason)
    assert found.missing == ()
    last = next(span for span in spans(found) if span.name == stages[-1])
    assert last.attributes["kvbus.reason"] == reason


def test_what_decode_had_is_told_where_nobody_asked_for_it() -> None:
    found = path(with_history(had="256"))
    assert names(found) == PUSHED_STAGES
    assert found.history == History("D", HistoryOutcome.NOT_ASKED, 0, 512, 768)
    refused = path(with_history(prefill(MarkName.HISTORY_NOT_ASKED, 5, note="decode engine E left"), had="768"))
    assert names(refused) == PUSHED_STAGES
    assert refused.history == History("D", HistoryOutcome.NOT_ASKED, 0, 0, 256, "decode engine E left")


def test_a_path_without_history_is_as_if_there_were_none() -> None:
    assert path(PUSHED).history is None
    assert not [key for span in spans(path(PUSHED)) for key in span.attributes if "history" in key or "computed" in key]
    assert path(with_history(had="768")).history is None, "decode had no more than prefill"
    lost_begin = [mark for mark in with_history() if mark.name != MarkName.PREFILL_SCHEDULED]
    assert path(lost_begin).history is None, "what prefill had is not known, so nothing is claimed"


@pytest.mark.parametrize(
    ("lost", "missing"),
    [
        (MarkName.HISTORY_ASKED, ()),
        (MarkName.HISTORY_OFFERED, ("history.ask",)),
        (MarkName.HISTORY_POSTED, ("history.match",)),
        (MarkName.HISTORY_RECEIVED, ("history.write",)),
    ],
)
def test_a_mark_of_history_that_is_lost_is_named(lost: MarkName, missing: tuple[str, ...]) -> None:
    found = path(with_history(*(mark for mark in HISTORY if mark.name != lost)))
    assert found.missing == missing
    assert found.history is not None
    assert found.history.engine == "D"
    unknown = lost == MarkName.HISTORY_RECEIVED
    assert found.history.outcome is (HistoryOutcome.UNKNOWN if unknown else HistoryOutcome.RECEIVED)


@pytest.mark.parametrize("skew_ms", [-30.0, -3.0, 3.0, 30.0])
def test_history_adds_up_when_decodes_clock_is_wrong(skew_ms: float) -> None:
    skewed = [
        replace(mark, at_ns=mark.at_ns + int(skew_ms * MS), offset_ns=1, error_ns=int(abs(skew_ms) * MS))
        if mark.role == "decode"
        else mark
        for mark in with_history(*HISTORY)
    ]
    found = path(skewed)
    assert [name for name in names(found) if name.startswith("history")] == [*HISTORY_STAGES]
    match = next(span for span in spans(found) if span.name == "history.match")
    assert match.attributes["kvbus.clock_error_ms"] == abs(skew_ms)


def test_history_of_a_prefill_engine_that_is_lost_is_not_the_others() -> None:
    """Q, which took over, asked nobody: what P got is no saving of the request's."""
    lost = [
        *(mark for mark in FRONT if mark.name != MarkName.PREFILL_SCHEDULED),
        *HISTORY,
        prefill(MarkName.PREFILL_SCHEDULED, 20, note="768"),
        router(MarkName.ENGINE_LOST, 3000, 2, "P", "prefill engine P: silent"),
        prefill(MarkName.PREFILL_ARRIVED, 3002, engine="Q"),
        prefill(MarkName.PREFILL_SCHEDULED, 3003, engine="Q"),
        prefill(MarkName.PREFILL_DONE, 3100, note="1024", engine="Q"),
        prefill(MarkName.REGISTERED, 3005, 2, engine="Q"),
        prefill(MarkName.COMPLETED, 3101, 2, engine="Q"),
        prefill(MarkName.POSTING, 3102, 2, engine="Q"),
        prefill(MarkName.POSTED, 3103, 2, engine="Q"),
        decode(MarkName.LANDED, 3106, 2),
        decode(MarkName.RECEIVED, 3107, 2),
        decode(MarkName.RESUMED, 3108, 2),
        router(MarkName.FIRST_TOKEN, 3120),
        router(MarkName.ENDED, 3200, note="200"),
    ]
    found = path(lost)
    assert names(found)[:7] == ["route", "prefill.queue", *HISTORY_STAGES, "prefill.queue", "lost"]
    assert names(found)[7:10] == ["route", "prefill.queue", "prefill.compute"]
    assert (found.history, found.missing) == (None, ())
    assert spans(found)


@pytest.mark.parametrize("seed", range(300))
def test_whatever_arrives_of_history_the_stages_add_up(seed: int) -> None:
    check_worsened(with_history(*HISTORY), random.Random(seed))
