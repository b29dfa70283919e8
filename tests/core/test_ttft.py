"""Marks to a path to spans: stages without overlap or gap, whatever happened on the way."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from support.critical_path import critical_path
from support.paths import (
    BACK,
    FRONT,
    IDS,
    MIDDLE,
    MS,
    PUSHED,
    PUSHED_STAGES,
    check_worsened,
    decode,
    lengths,
    path,
    prefill,
    router,
    spans,
)

from kvbus.tools.view import problems, views_of
from kvbus.trace import ROOT, WHOLE, MarkName, Outcome, StageName
from kvbus.trace.path import Mark
from kvbus.trace.spans import PRODUCER
from kvbus.trace.stages import path_of


def test_a_pushed_request() -> None:
    found = path(PUSHED)
    assert lengths(found) == {
        "route": 5.0,
        "prefill.queue": 1.0,
        "prefill.compute": 94.0,
        "match.wait": 1.0,
        "write.queue": 1.0,
        "write.post": 1.0,
        "write.transfer": 3.0,
        "decode.resume": 3.0,
        "decode.first_token": 11.0,
    }
    assert (found.outcome, found.late_side, found.late_by_ns) == (Outcome.PUSHED, "prefill", 93 * MS)
    assert (found.prompt_tokens, found.nbytes, found.status, found.missing) == (1024, 4096, "200", ())
    assert (found.prefill_engine, found.decode_engine) == ("P", "D")


def test_decode_registers_late() -> None:
    late = [mark for mark in PUSHED if mark.name not in (MarkName.REGISTERED, MarkName.POSTING, MarkName.POSTED)]
    late = [mark for mark in late if mark.name != MarkName.LANDED and mark not in BACK]
    late += [
        prefill(MarkName.REGISTERED, 301, 1),
        prefill(MarkName.POSTING, 301.5, 1),
        prefill(MarkName.POSTED, 302, 1),
        decode(MarkName.LANDED, 305),
        decode(MarkName.RECEIVED, 306),
        decode(MarkName.RESUMED, 307),
        router(MarkName.FIRST_TOKEN, 320),
        router(MarkName.ENDED, 400, note="200"),
    ]
    found = path(late)
    assert (found.late_side, found.late_by_ns) == ("decode", 200 * MS)
    assert lengths(found)["match.wait"] == 201.0


def test_with_several_ranks_the_last_one_counts_and_each_has_its_span() -> None:
    second = [
        prefill(MarkName.REGISTERED, 8.5, 1, rank=1),
        prefill(MarkName.COMPLETED, 103, 1, rank=1),
        prefill(MarkName.POSTING, 103.5, 1, rank=1),
        prefill(MarkName.POSTED, 104, 1, rank=1),
        decode(MarkName.LANDED, 107, rank=1),
    ]
    found = path([*PUSHED, *second])
    assert lengths(found)["match.wait"] == 3.0
    assert lengths(found)["write.transfer"] == 3.0
    drawn = spans(found)
    assert sorted(span.name for span in drawn if "rank" in span.name) == [
        f"{stage} rank {rank}"
        for stage in ("match.wait", "write.post", "write.queue", "write.transfer")
        for rank in (0, 1)
    ]
    by_id = {span.span_id: span for span in drawn}
    for span in drawn:
        if "rank" in span.name:
            parent = by_id[span.parent_id]
            assert parent.name == span.name.partition(" ")[0]
            assert parent.start_ns <= span.start_ns < span.end_ns <= parent.end_ns


def test_a_prefill_engine_that_is_lost() -> None:
    lost = [
        *FRONT,
        decode(MarkName.REGISTERING, 7),
        router(MarkName.ENGINE_LOST, 3000, 2, "P", "prefill engine P: silent"),
        decode(MarkName.GIVEN_UP, 3001, note="its prefill is given to Q"),
        prefill(MarkName.PREFILL_ARRIVED, 3002, engine="Q"),
        prefill(MarkName.PREFILL_SCHEDULED, 3003, engine="Q"),
        decode(MarkName.REGISTERING, 3004, 2),
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
    assert [stage.name for stage in found.stages] == [
        StageName.ROUTE,
        StageName.PREFILL_QUEUE,
        StageName.LOST,
        StageName.ROUTE,
        StageName.PREFILL_QUEUE,
        StageName.PREFILL_COMPUTE,
        StageName.MATCH_WAIT,
        StageName.WRITE_QUEUE,
        StageName.WRITE_POST,
        StageName.WRITE_TRANSFER,
        StageName.DECODE_RESUME,
        StageName.FIRST_TOKEN,
    ]
    assert (found.outcome, found.attempts, found.prefill_engine) == (Outcome.PUSHED, 2, "Q")
    assert found.reason == "prefill engine P: silent"


def test_a_decode_engine_that_is_lost_costs_no_second_prefill() -> None:
    lost = [
        *FRONT,
        *MIDDLE,
        router(MarkName.ENGINE_LOST, 110, 2, "D", "decode engine D: Connection reset by peer"),
        router(MarkName.SENT, 110, 2, "E"),
        decode(MarkName.DECODE_ARRIVED, 113, 2, engine="E"),
        decode(MarkName.REGISTERING, 114, 2, engine="E"),
        prefill(MarkName.REGISTERED, 115, 2),
        prefill(MarkName.COMPLETED, 101, 2),
        prefill(MarkName.POSTING, 116, 2),
        prefill(MarkName.POSTED, 117, 2),
        decode(MarkName.LANDED, 119, 2, engine="E"),
        decode(MarkName.RECEIVED, 120, 2, engine="E"),
        decode(MarkName.RESUMED, 121, 2, engine="E"),
        router(MarkName.FIRST_TOKEN, 130),
        router(MarkName.ENDED, 140, note="200"),
    ]
    found = path(lost)
    assert list(lengths(found)) == [
        "route",
        "prefill.queue",
        "prefill.compute",
        "lost",
        "match.wait",
        "write.queue",
        "write.post",
        "write.transfer",
        "decode.resume",
        "decode.first_token",
    ]
    assert (found.decode_engine, found.attempts, found.late_side) == ("E", 2, "decode")


def test_a_receive_that_is_given_up_and_computed_on_decode() -> None:
    marks = [
        *FRONT,
        decode(MarkName.REGISTERING, 7),
        decode(MarkName.GIVEN_UP, 5000, note="prefill engine P left"),
        decode(MarkName.LOCAL, 5001, note="no prefill engine took over"),
        router(MarkName.FIRST_TOKEN, 5100),
        router(MarkName.ENDED, 5200, note="200"),
    ]
    found = path(marks)
    assert list(lengths(found)) == ["route", "prefill.queue", "lost", "decode.compute"]
    assert (found.outcome, found.reason) == (Outcome.RECOMPUTED, "prefill engine P left")


def test_computed_locally_alone_and_failed() -> None:
    local = [
        *FRONT,
        decode(MarkName.LOCAL, 5, note="the bus is not connected"),
        router(MarkName.FIRST_TOKEN, 60),
        router(MarkName.ENDED, 70, note="200"),
    ]
    found = path(local)
    assert lengths(found) == {"route": 4.0, "decode.queue": 1.0, "decode.compute": 55.0}
    assert (found.outcome, found.reason) == (Outcome.LOCAL, "the bus is not connected")
    alone = [
        router(MarkName.ARRIVED, 0),
        router(MarkName.SENT, 1, 1, "D", "alone"),
        router(MarkName.FIRST_TOKEN, 60),
        router(MarkName.ENDED, 70, note="200"),
    ]
    assert path(alone).outcome is Outcome.ALONE
    failed = path([*FRONT, router(MarkName.ENDED, 70, note="502")])
    assert (failed.outcome, failed.reason) == (Outcome.FAILED, "status 502")
    assert spans(failed)[0].error == "status 502"


def test_without_a_stream_decodes_own_word_of_its_first_token_counts() -> None:
    """The answer goes out when all of it is there; that is no time to its first token."""
    whole = [mark for mark in PUSHED if mark.name not in (MarkName.FIRST_TOKEN, MarkName.ENDED)]
    whole += [router(MarkName.FIRST_TOKEN, 9000, note=WHOLE), router(MarkName.ENDED, 9001, note="200")]
    found = path(whole)
    assert lengths(found)["decode.first_token"] == 9.0
    assert found.end_ns == 9001 * MS
    alone = path([each for each in whole if each.name != MarkName.TOKEN])
    assert lengths(alone)["decode.first_token"] == 8891.0


def test_a_client_that_leaves_and_a_stream_that_breaks() -> None:
    left = path([*FRONT, router(MarkName.ENDED, 50, note="client left")])
    assert (left.outcome, left.reason) == (Outcome.FAILED, "client left")
    assert spans(left)[0].error == "client left"
    broken = path([*PUSHED[:-1], router(MarkName.ENDED, 130, note="broken: reset")])
    assert broken.outcome is Outcome.PUSHED
    assert spans(broken)[0].error == "broken: reset"
    refused = path([*PUSHED[:-2], router(MarkName.ENDED, 130, note="502")])
    assert refused.outcome is Outcome.FAILED, "its token was seen by nobody"
    assert spans(path([*FRONT, router(MarkName.ENDED, 9, note="400")]))[0].error == "", "the client's own doing"


@pytest.mark.parametrize("thawed_ms", [3090, 3150])
def test_an_engine_that_was_lost_and_lives_again_changes_nothing(thawed_ms: float) -> None:
    after = [
        *FRONT,
        router(MarkName.ENGINE_LOST, 3000, 2, "P", "prefill engine P: silent"),
        *(
            prefill(name, at_ms, engine="Q")
            for name, at_ms in ((MarkName.PREFILL_ARRIVED, 3002), (MarkName.PREFILL_SCHEDULED, 3003))
        ),
        prefill(MarkName.PREFILL_DONE, 3080, note="7", engine="Q"),
        prefill(MarkName.REGISTERED, 3005, 2, engine="Q"),
        prefill(MarkName.COMPLETED, 3081, 2, engine="Q"),
        prefill(MarkName.POSTING, 3082, 2, engine="Q"),
        prefill(MarkName.POSTED, 3083, 2, engine="Q"),
        decode(MarkName.LANDED, 3106, 2),
        decode(MarkName.RECEIVED, 3107, 2),
        decode(MarkName.RESUMED, 3108, 2),
        router(MarkName.FIRST_TOKEN, 3120),
        router(MarkName.ENDED, 3200, note="200"),
    ]
    found = path(
        [*after, prefill(MarkName.PREFILL_DONE, thawed_ms, note="99"), prefill(MarkName.WRITTEN, thawed_ms, 1, "5")]
    )
    assert found.stages == path(after).stages
    assert (found.prefill_engine, found.prompt_tokens, found.nbytes) == ("Q", 7, 0)
    drawn = spans(found)
    known = {span.span_id for span in drawn}
    assert all(link in known for span in drawn for link in span.links)


def test_without_a_word_of_the_engines_nothing_is_claimed() -> None:
    found = path([router(MarkName.ARRIVED, 0), router(MarkName.SENT, 1, 1, "D"), *BACK[-2:]])
    assert found.outcome is Outcome.UNKNOWN
    assert found.missing == tuple(PUSHED_STAGES[:-1])


def test_what_decode_deferred_and_what_the_router_took_is_told() -> None:
    root = spans(path([*PUSHED, decode(MarkName.DEFERRED, 5, note="jit")]))[0]
    assert root.attributes["kvbus.deferred"] == "jit"
    assert root.attributes["kvbus.router_ms"] == 1.0


def test_several_requests_of_one_client_trace_are_several() -> None:
    one, two = spans(path(PUSHED)), spans(path(PUSHED))
    other = {span.span_id: f"{number + 100:016x}" for number, span in enumerate(two)}
    moved = [
        replace(
            span,
            span_id=other[span.span_id],
            parent_id=other.get(span.parent_id, span.parent_id),
            start_ns=span.start_ns + 1,
        )
        for span in two
    ]
    views = views_of([*one, *moved])
    assert [len(view.spans) for view in views] == [len(one), len(two)]
    assert [len(view.stages) for view in views] == [9, 9]


def test_marks_that_are_lost_are_named_and_their_time_is_not() -> None:
    found = path([mark for mark in PUSHED if mark.name not in (MarkName.PREFILL_SCHEDULED, MarkName.LANDED)])
    assert found.missing == ("prefill.queue", "write.transfer")
    [view] = views_of(spans(found))
    assert problems(view) == ["no marks of prefill.queue, write.transfer: their time is in the stage after them"]


def test_without_a_beginning_or_an_end_there_is_no_path() -> None:
    assert path_of([]) is None
    assert path_of([router(MarkName.ARRIVED, 0)]) is None
    assert path_of([router(MarkName.ENDED, 0)]) is None


def test_clocks_that_disagree_never_make_a_stage_negative() -> None:
    """Another host's marks seem to come before what caused them."""
    skewed = [
        Mark(mark.name, mark.at_ns - 3 * MS, mark.attempt, "P", "prefill", 0, mark.note, -3 * MS, 4 * MS)
        if mark.role == "prefill"
        else mark
        for mark in PUSHED
    ]
    drawn = {span.name: span for span in spans(path(skewed))}
    assert drawn["write.post"].attributes["kvbus.clock_error_ms"] == 4.0
    assert drawn["write.post"].attributes["kvbus.below_clock_error"] is True
    assert "kvbus.below_clock_error" not in drawn["prefill.compute"].attributes
    assert "kvbus.clock_error_ms" not in drawn["decode.resume"].attributes


@pytest.mark.parametrize("seed", range(300))
def test_whatever_arrives_the_stages_add_up(seed: int) -> None:
    check_worsened(PUSHED, random.Random(seed))


def test_spans_have_one_root_one_trace_and_links_to_what_was_matched() -> None:
    drawn = spans(path(PUSHED))
    root = drawn[0]
    assert (root.name, root.span_id, root.parent_id) == (ROOT, IDS.root, IDS.parent)
    assert {span.trace_id for span in drawn} == {IDS.trace_id}
    by_name = {span.name: span for span in drawn}
    sent = [span for span in drawn if span.kind == PRODUCER]
    assert {span.span_id for span in sent} == set(by_name["match.wait"].links)
    assert {span.name for span in sent} == {"kvbus.publish registration", "kvbus.publish completion"}
    assert all(by_name[StageName.PREFILL_COMPUTE].span_id == span.parent_id for span in sent)
    assert by_name["decode.first_token"].engine == "D"
    assert by_name["route"].service == "kvbus-router"
    assert by_name["decode.stream"].end_ns == root.end_ns


@pytest.mark.parametrize("shift_ns", [0, 1, 499, 999])
def test_every_stage_is_on_jaegers_critical_path(shift_ns: int) -> None:
    moved = [
        Mark(
            mark.name, mark.at_ns + shift_ns * (number % 3), mark.attempt, mark.engine, mark.role, mark.rank, mark.note
        )
        for number, mark in enumerate(PUSHED)
    ]
    drawn = spans(path(moved))
    sections = critical_path(drawn, drawn[0])
    on_path = {name for name, _, _ in sections}
    assert {*PUSHED_STAGES} <= on_path
    total = sum(end - start for _, start, end in sections)
    assert abs(total - drawn[0].duration_ns // 1000) <= 1
    own = sum(end - start for name, start, end in sections if name == ROOT)
    assert own <= len(StageName) + 2  # the gaps
