"""Recorded traces of real runs, and today's spans, are what ``traces/model.json`` says."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from support.critical_path import critical_path
from support.span_model import MODEL, differences

from kvbus.tools.view import MS, TraceView, problems, views_of
from kvbus.tools.why import why
from kvbus.trace import SpanData, StageName, read_otlp

TRACES = Path(__file__).parents[2] / "traces"
RECORDED = sorted((TRACES / "recorded").glob("*.json"))


def recorded(name: str) -> TraceView:
    path = TRACES / "recorded" / f"{name}.json"
    [view] = views_of(read_otlp(path.read_text(), path.name))
    return view


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_traces_match_the_model(path: Path) -> None:
    view = recorded(path.stem)
    assert differences(view.spans) == []
    assert problems(view) == []
    assert abs(sum(stage.duration_ns for stage in view.stages) / MS - view.ttft_ms) < 0.001 * len(view.stages)
    assert view.root is not None
    on_path = {name.partition(" rank")[0] for name, _, _ in critical_path(view.spans, view.root)}
    assert {stage.name for stage in view.stages} <= on_path


def test_there_is_a_recorded_trace_of_each_kind() -> None:
    assert [path.stem for path in RECORDED] == ["push-early", "push-late", "recompute", "tensor-parallel"]
    assert recorded("push-early").about("kvbus.late_side", "") == "prefill"
    late = recorded("push-late")
    assert late.about("kvbus.late_side", "") == "decode"
    of_ranks = {f"write.transfer rank {rank}" for rank in (0, 1)}
    assert of_ranks <= {span.name for span in recorded("tensor-parallel").others}
    recomputed = recorded("recompute")
    assert [stage.name for stage in recomputed.stages][-2:] == ["lost", "decode.compute"]
    assert "prefill engine prefill-0" in why(recomputed).text


def test_the_model_names_every_stage_and_the_readme_too() -> None:
    assert {*StageName} <= MODEL["spans"].keys()
    readme = (TRACES / "README.md").read_text()
    for name in StageName:
        assert f"| `{name}` |" in readme
    for path in RECORDED:
        assert f"`{path.name}`" in readme


def test_a_span_that_differs_is_found() -> None:
    view = recorded("push-early")
    spans = list(view.spans)
    chance = random.Random(1)
    stage = chance.choice(view.stages)
    odd = SpanData("new.stage", stage.trace_id, "1" * 16, stage.parent_id, stage.start_ns, stage.end_ns)
    assert differences([*spans, odd]) == ["new.stage: not in the model"]
    rest = [span for span in spans if span.span_id != stage.span_id and span.parent_id != stage.span_id]
    moved = SpanData(stage.name, stage.trace_id, "2" * 16, "3" * 16, 1, 2, service=stage.service, attributes={"x": 1})
    assert differences([*rest, moved]) == [
        f"{stage.name}: its parent is missing",
        f"{stage.name}: attribute x is not in the model",
    ]
    assert json.loads(RECORDED[0].read_text())["resourceSpans"]
