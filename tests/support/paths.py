"""Marks of a request whose KV was pushed, and the laws that every path and its spans obey."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count

from kvbus.trace import GAP_NS, HISTORY_STAGES, MarkName, Path, SpanData, StageName
from kvbus.trace.path import Mark
from kvbus.trace.spans import Ids, spans_of
from kvbus.trace.stages import path_of
from support.span_model import differences

MS = 1_000_000
IDS = Ids("ab" * 16, "cd" * 8, "ef" * 8)
ANCHOR_NS = 1_700_000_000_000_000_000


def router(name: MarkName, at_ms: float, attempt: int = 0, engine: str = "", note: str = "") -> Mark:
    return Mark(name, int(at_ms * MS), attempt, engine, note=note)


def prefill(name: MarkName, at_ms: float, attempt: int = 0, note: str = "", rank: int = 0, engine: str = "P") -> Mark:
    return Mark(name, int(at_ms * MS), attempt, engine, "prefill", rank, note)


def decode(name: MarkName, at_ms: float, attempt: int = 1, note: str = "", rank: int = 0, engine: str = "D") -> Mark:
    return Mark(name, int(at_ms * MS), attempt, engine, "decode", rank, note)


FRONT = [
    router(MarkName.ARRIVED, 0),
    router(MarkName.SENT, 1, 1, "D"),
    decode(MarkName.DECODE_ARRIVED, 4),
    prefill(MarkName.PREFILL_ARRIVED, 5),
    prefill(MarkName.PREFILL_SCHEDULED, 6),
]
MIDDLE = [decode(MarkName.REGISTERING, 7), prefill(MarkName.PREFILL_DONE, 100, note="1024")]
WRITTEN = [
    prefill(MarkName.REGISTERED, 8, 1),
    prefill(MarkName.COMPLETED, 101, 1),
    prefill(MarkName.POSTING, 102, 1),
    prefill(MarkName.POSTED, 103, 1),
    prefill(MarkName.WRITTEN, 107, 1, "4096"),
    decode(MarkName.LANDED, 106),
]
BACK = [
    decode(MarkName.RECEIVED, 108),
    decode(MarkName.RESUMED, 109),
    decode(MarkName.TOKEN, 118),
    router(MarkName.FIRST_TOKEN, 120),
    router(MarkName.ENDED, 200, note="200"),
]
PUSHED = [*FRONT, *MIDDLE, *WRITTEN, *BACK]
PUSHED_STAGES = [
    name
    for name in StageName
    if name not in {*HISTORY_STAGES, StageName.LOST, StageName.DECODE_COMPUTE, StageName.DECODE_QUEUE}
]


def path(marks: Iterable[Mark]) -> Path:
    found = path_of(marks)
    assert found is not None
    assert found.stages[0].start_ns == found.start_ns
    assert found.stages[-1].end_ns == found.first_token_ns
    for before, after in zip(found.stages, found.stages[1:], strict=False):
        assert after.start_ns == before.end_ns + GAP_NS
    assert all(stage.duration_ns >= GAP_NS for stage in found.stages)
    total = sum(stage.duration_ns for stage in found.stages) + GAP_NS * (len(found.stages) - 1)
    assert total == found.ttft_ns
    return found


def lengths(found: Path) -> dict[str, float]:
    return {stage.name.value: round(stage.duration_ns / MS, 1) for stage in found.stages}


def spans(found: Path) -> list[SpanData]:
    numbers = count(1)
    drawn = spans_of(found, IDS, ANCHOR_NS, lambda: f"{next(numbers):016x}", {"http.route": "/v1/completions"})
    assert differences(drawn) == []
    return drawn


def names(found: Path) -> list[str]:
    return [stage.name.value for stage in found.stages]


def check_worsened(whole: Sequence[Mark], chance: random.Random) -> None:
    """Marks lost, doubled and moved: never an overlap, a gap, or an exception."""
    marks = [mark for mark in whole if mark.name in (MarkName.ARRIVED, MarkName.ENDED) or chance.random() < 0.8]
    for _ in range(chance.randrange(4)):
        of = chance.choice(whole)
        moved = int(chance.uniform(-50, 300) * MS)
        marks.append(replace(of, at_ns=moved, attempt=chance.randrange(4), note="x", rank=chance.randrange(3)))
    if any(mark.name == MarkName.ARRIVED and mark.at_ns < 0 for mark in marks):
        return
    drawn = spans(path(marks))
    assert len({span.span_id for span in drawn}) == len(drawn)
    by_id = {span.span_id: span for span in drawn}
    for span in drawn[1:]:
        parent = by_id[span.parent_id]
        assert parent.start_ns <= span.start_ns <= span.end_ns <= parent.end_ns, span
