"""Each fault of shared/CASES.md that ends in a fallback: what ``kvbus why`` says of it. And broken traces."""

from __future__ import annotations

import json
from itertools import count

import pytest

from kvbus.errors import TraceError
from kvbus.tools.report import report_of
from kvbus.tools.view import TraceView, problems, views_of
from kvbus.tools.why import why
from kvbus.trace import MarkName, SpanData, read_otlp
from kvbus.trace.otlp_json import to_otlp
from kvbus.trace.path import Mark
from kvbus.trace.spans import Ids, spans_of
from kvbus.trace.stages import path_of

MS = 1_000_000


def marks(
    *spoken: tuple[MarkName, float] | tuple[MarkName, float, str], engine: str = "", role: str = "router"
) -> list[Mark]:
    return [Mark(name, int(at_ms * MS), 1, engine, role, note=note[0] if note else "") for name, at_ms, *note in spoken]


def view(*spoken: list[Mark]) -> TraceView:
    numbers = count(1)
    path = path_of([mark for group in spoken for mark in group])
    assert path is not None
    drawn = spans_of(
        path, Ids("ab" * 16, "cd" * 8), 10**18, lambda: f"{next(numbers):016x}", {"kvbus.transfer_id": "t1"}
    )
    [found] = views_of(drawn)
    assert problems(found) == []
    return found


M = MarkName
START = marks((M.ARRIVED, 0), (M.SENT, 1), engine="D")
P_ALL = marks(
    (M.PREFILL_ARRIVED, 5), (M.PREFILL_SCHEDULED, 6), (M.PREFILL_DONE, 100, "1024"), engine="P", role="prefill"
)
D_BEGIN = marks((M.DECODE_ARRIVED, 4), engine="D", role="decode")


def end(first_token_ms: float) -> list[Mark]:
    return marks((M.FIRST_TOKEN, first_token_ms), (M.ENDED, first_token_ms + 100, "200"))


def given_up(reason: str, at_ms: float = 600) -> TraceView:
    """Decode's receive ended so; it computed the prompt."""
    local = marks(
        (M.GIVEN_UP, at_ms, reason), (M.LOCAL, at_ms + 1, "no prefill engine took over"), engine="D", role="decode"
    )
    return view(START, D_BEGIN, P_ALL, local, end(at_ms + 100))


def computed(reason: str) -> TraceView:
    """Decode computed the prompt without asking for it."""
    return view(START, D_BEGIN, P_ALL, marks((M.LOCAL, 5, reason), engine="D", role="decode"), end(90))


def pushed(*, waited_for: str = "", **moved: float) -> TraceView:
    """A request whose KV came, with some of its boundaries moved."""
    times = {
        "prefill_arrived": 5.0,
        "scheduled": 6.0,
        "done": 100.0,
        "registered": 8.0,
        "posting": 101.0,
        "posted": 101.5,
        "landed": 104.0,
        "resumed": 106.0,
        "token": 112.0,
        **moved,
    }
    return view(
        START,
        D_BEGIN,
        marks(
            (M.PREFILL_ARRIVED, times["prefill_arrived"]),
            (M.PREFILL_SCHEDULED, times["scheduled"]),
            (M.PREFILL_DONE, times["done"], "1024"),
            (M.REGISTERED, times["registered"]),
            (M.COMPLETED, times.get("completed", times["done"] + 0.5)),
            (M.POSTING, times["posting"], waited_for),
            (M.POSTED, times["posted"]),
            (M.WRITTEN, times["landed"], str(64 << 20)),
            engine="P",
            role="prefill",
        ),
        marks(
            (M.LANDED, times["landed"]),
            (M.RECEIVED, times["landed"] + 0.5),
            (M.RESUMED, times["resumed"]),
            engine="D",
            role="decode",
        ),
        end(times["token"]),
    )


def turn(*history: Mark, had: int, cached: int, done_ms: float) -> TraceView:
    """A conversation's next turn of 2,000 tokens: prefill had so many at its start, at 20 ms, and decode ``cached``."""
    return view(
        START,
        marks((M.DECODE_ARRIVED, 4), (M.REGISTERING, 7, str(cached)), engine="D", role="decode"),
        marks(
            (M.PREFILL_ARRIVED, 5),
            (M.PREFILL_SCHEDULED, 20, str(had or "")),
            (M.PREFILL_DONE, done_ms, "2000"),
            (M.REGISTERED, 8),
            (M.COMPLETED, done_ms),
            (M.POSTING, done_ms + 1),
            (M.POSTED, done_ms + 2),
            engine="P",
            role="prefill",
        ),
        list(history),
        marks((M.LANDED, done_ms + 3), (M.RECEIVED, done_ms + 3), (M.RESUMED, done_ms + 4), engine="D", role="decode"),
        end(done_ms + 8),
    )


def taker(name: MarkName, at_ms: float, note: str = "") -> Mark:
    """What prefill marks of history."""
    return Mark(name, int(at_ms * MS), 0, "P", "prefill", note=note)


CAME = [
    taker(M.HISTORY_ASKED, 5, "D"),
    taker(M.HISTORY_OFFERED, 8),
    *marks((M.HISTORY_POSTED, 9), engine="D", role="decode"),
    taker(M.HISTORY_RECEIVED, 11, "1900"),
]


def later(posting_ms: float) -> dict[str, float]:
    """What follows the post of a WRITE."""
    steps = {"posting": 0, "posted": 0.5, "landed": 3, "resumed": 4, "token": 9}
    return {name: posting_ms + after_ms for name, after_ms in steps.items()}


def lost(what: str) -> TraceView:
    """The router put another engine in the place of one that was lost."""
    return view(
        START,
        D_BEGIN,
        [Mark(M.ENGINE_LOST, 3000 * MS, 2, "P", note=what)],
        marks(
            (M.PREFILL_ARRIVED, 3005),
            (M.PREFILL_SCHEDULED, 3007),
            (M.PREFILL_DONE, 3100),
            (M.REGISTERED, 3008),
            (M.COMPLETED, 3101),
            (M.POSTING, 3102),
            (M.POSTED, 3103),
            engine="Q",
            role="prefill",
        ),
        marks((M.LANDED, 3104), (M.RECEIVED, 3105), (M.RESUMED, 3106), engine="D", role="decode"),
        end(3112),
    )


# Case -> a trace of it, and what the verdict must say.
VERDICTS = [
    (
        "A9",
        given_up("no sign of life from the prefill engine"),
        "(no sign of life from the prefill engine) and computed the prompt itself",
    ),
    ("L1", given_up("block lease expired"), "decode came too late for the KV: add decode capacity"),
    ("L4", given_up("block lease expired", 8000), "gave its receive up after 7901 ms (block lease expired)"),
    ("C1, C2", given_up("prefill engine P left"), "prefill engine P left) and computed the prompt itself in 99 ms"),
    ("C1, Q takes over", lost("prefill engine P: silent"), "prefill engine P: silent: 3000 ms lost, answered under"),
    (
        "C2, E takes over",
        lost("decode engine D: reset"),
        "decode engine D: reset: 3000 ms lost, answered under attempt 2",
    ),
    ("C5", given_up("draining"), "gave its receive up after"),
    ("A8, router", given_up("no prefill engine saw the request"), "did the router send the prefill leg"),
    ("C3", given_up("no prefill engine acknowledged the registration"), "same NATS server and namespace?"),
    ("C6", computed("the bus is not connected"), "look after the NATS server"),
    ("H2", computed("prefill engine P does not fit: dtype: a here, b on P"), "make the named field the same"),
    ("H3", computed("prefill engine P is not on the bus"), "start it, or look why its heartbeats do not come"),
    ("H5", given_up("decode and prefill were given different prompts under one transfer id"), "mixes requests up"),
    ("H6", given_up("message on x has 2 bytes, the NATS server accepts max_payload=1"), "raise max_payload"),
    ("K2", computed("the prompt is cached"), "nothing to do"),
    ("K4, K7", given_up("WRITE failed on rank 1"), "WRITE failed on rank 1"),
    ("late decode", pushed(registered=312.5, **later(313)), "decode registered 212 ms after prefill ended: add decode"),
    (
        "busy prefill",
        pushed(scheduled=900, done=990, **later(991)),
        "in the prefill engine's queue: add prefill capacity",
    ),
    ("busy decode", pushed(resumed=500, token=510), "its steps are long; add decode capacity"),
    (
        "slow network",
        pushed(landed=901.5, resumed=902, token=910),
        "at the network between the two (64.0 MiB at 80 MiB/s)",
    ),
    ("long prompt", pushed(), "computing the prompt"),
    ("slow front", pushed(prefill_arrived=500, scheduled=501, done=600, **later(601)), "before prefill had it"),
    ("busy writer", pushed(**later(900)), "waiting to post the WRITE: for others that were before it"),
    (
        "no lease",
        pushed(waited_for="a write lease of the decode engine", **later(900)),
        "waiting to post the WRITE: for a write lease of the decode engine",
    ),
    ("slow bus", pushed(registered=900, completed=901, **later(902)), "look at the NATS server, and at the CPU of"),
    (
        "history came",
        turn(*CAME, had=1900, cached=1900, done_ms=31),
        "1,900 tokens of history came from D in 6.0 ms; computing them would have taken about 209 ms",
    ),
    (
        "history is slow",
        turn(*(*CAME[:3], taker(M.HISTORY_RECEIVED, 19, "1900")), had=1900, cached=1900, done_ms=24),
        "moving the history: look at the network between the two; 1,900 tokens",
    ),
    (
        "history too late",
        turn(CAME[0], taker(M.HISTORY_DECLINED, 15, "it did not answer in time"), had=0, cached=1900, done_ms=240),
        "prefill computed 1,900 tokens that D had, in about 209 ms: it was asked, but it did not answer in time",
    ),
    (
        "history fails",
        turn(*CAME[:3], taker(M.HISTORY_FAILED, 15, "decode engine D left"), had=0, cached=1900, done_ms=240),
        "that D had, in about 209 ms: they were asked for and did not come: decode engine D left",
    ),
    (
        "history without a source",
        turn(taker(M.HISTORY_NOT_ASKED, 5, "the bus is not connected"), had=0, cached=1900, done_ms=240),
        "that D had, in about 209 ms: it was not asked, because the bus is not connected",
    ),
    (
        "history without a hint",
        turn(had=100, cached=1900, done_ms=240),
        "1,800 tokens that D had, in about 208 ms: it was not asked, because the request named no engine",
    ),
    ("failed", view(START, D_BEGIN, marks((M.ENDED, 50, "502"))), "failed without a token: status 502"),
]


@pytest.mark.parametrize(("case", "trace", "says"), VERDICTS, ids=[case for case, _, _ in VERDICTS])
def test_each_fault_is_told(case: str, trace: TraceView, says: str) -> None:
    verdict = why(trace)
    print(f"\n| {case} | {verdict.text} |")
    assert says in verdict.text
    assert "\n" not in verdict.text


def test_history_that_is_of_no_weight_is_not_spoken_of() -> None:
    for trace in (
        turn(had=1840, cached=1856, done_ms=60),  # 16 tokens
        turn(had=1984, cached=1990, done_ms=60),  # a prefill of 16 tokens says nothing about the speed of many
        pushed(),
    ):
        assert "D had" not in why(trace).text
    assert "computing the prompt" in why(turn(had=1500, cached=1500, done_ms=60)).text
    few = why(turn(*CAME, had=1990, cached=1990, done_ms=31)).text
    assert few.endswith("; 1,900 tokens of history came from D in 6.0 ms"), "likewise"


def test_a_trace_without_a_root_or_stages_is_said_to_be_so() -> None:
    whole = pushed()
    [headless] = views_of(whole.spans[1:])
    assert why(headless).text == "nothing can be said: the trace has no root span"
    assert problems(headless)[0].startswith("its root span is missing")
    assert whole.root is not None
    [bare] = views_of([whole.root])
    assert "it has no stages" in problems(bare)
    [holed] = views_of([span for span in whole.spans if span.name != "match.wait"])
    assert any("between prefill.compute and write.queue" in problem for problem in problems(holed))


def test_otlp_json_reads_back() -> None:
    spans = pushed().spans
    assert {span.span_id: span for span in read_otlp(json.dumps(to_otlp(spans)), "x")} == {
        span.span_id: span for span in spans
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "x, line 1: not JSON"),
        ("{}", "x: not OTLP JSON"),
        ("[1]", "x: not OTLP JSON"),
        ('{"resourceSpans": 7}', "x: not OTLP JSON"),
        ('{"resourceSpans": [{"scopeSpans": [{"spans": [{"name": "a"}]}]}]}', "KeyError: 'traceId'"),
        ("{\n{", "x, line 1: not JSON"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_place(text: str, says: str) -> None:
    with pytest.raises(TraceError) as refused:
        read_otlp(text, "x")
    assert says in str(refused.value)


def test_a_line_that_was_cut_off_hides_no_other() -> None:
    line = json.dumps(to_otlp(pushed().spans))
    assert len(read_otlp(f"{line}\n{line[:-30]}\n{line}\n", "x")) == 2 * len(pushed().spans)


def test_a_verdict_is_one_line_whatever_engines_say() -> None:
    assert "\n" not in why(given_up("a\nb\x1b[31m")).text


def test_vllms_and_foreign_spans_are_others() -> None:
    whole = pushed()
    assert whole.root is not None
    llm = SpanData(
        "llm_request", whole.trace_id, "f" * 16, whole.root.span_id, whole.start_ns, whole.start_ns + MS, 2, "vllm"
    )
    [found] = views_of([*whole.spans, llm])
    assert llm in found.others
    assert problems(found) == []
    orphan = SpanData("llm_request", whole.trace_id, "e" * 16, "1" * 16, whole.start_ns, whole.start_ns + MS, 2, "vllm")
    [found] = views_of([*whole.spans, orphan])
    assert problems(found) == ["the parents of 1 spans are missing: llm_request"]


def test_a_report_of_many() -> None:
    views = [pushed(token=112.0 + number) for number in range(100)] + [computed("the prompt is cached")]
    found = report_of(views)
    assert (found.traces, found.unusable) == (101, 0)
    assert found.outcomes == {"pushed": 100, "computed locally": 1}
    by_name = {stage.name: stage for stage in found.stages}
    first = by_name["decode.first_token"]
    assert (round(first.p50), round(first.p90), round(first.largest), first.count) == (55, 95, 105, 100)
    assert abs(sum(stage.share for stage in found.stages) - 1) < 0.001
    assert [side.name for side in found.late_sides] == ["prefill"]
    assert (found.history, found.history_tokens, found.missed_tokens) == ({}, 0, 0)


def test_a_report_counts_history_and_a_stage_once_for_each_request() -> None:
    found = report_of(
        [
            *(turn(*CAME, had=1900, cached=1900, done_ms=31) for _ in range(3)),
            turn(had=100, cached=1900, done_ms=240),
        ]
    )
    assert found.history == {"received": 3, "not asked": 1}
    assert (found.history_tokens, found.missed_tokens) == (5700, 1800)
    by_name = {stage.name: stage for stage in found.stages}
    assert by_name["history.write"].count == 3
    assert by_name["prefill.queue"].count == 4, "a turn with history has two of them"
    assert round(by_name["prefill.queue"].largest) == 15
