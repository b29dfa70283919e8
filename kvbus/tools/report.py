"""Many traces: the TTFT budget by stage, and what the requests waited for. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvbus.tools.traffic import quantile
from kvbus.tools.view import MS, TraceView
from kvbus.trace import Outcome, StageName


@dataclass(frozen=True, slots=True)
class Spread:
    """The distribution of one quantity, ms. ``share`` is its part of the sum of all TTFTs."""

    name: str
    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    largest: float
    share: float


@dataclass(frozen=True, slots=True)
class Report:
    """Figures of the requests that had a first token; ``unusable`` counts traces without a root or stages.

    A stage that a request has twice counts once, with the sum. ``history``: requests by what became of the KV that a
    decode engine had of their prompts; ``history_tokens`` came from there, ``missed_tokens`` were computed instead.
    """

    traces: int
    unusable: int
    ttft: Spread
    stages: tuple[Spread, ...]
    late_sides: tuple[Spread, ...]
    outcomes: dict[str, int]
    longest: dict[str, int]
    history: dict[str, int]
    history_tokens: int
    missed_tokens: int


def report_of(views: Iterable[TraceView]) -> Report:
    """Aggregate traces."""
    everything = list(views)
    whole = [view for view in everything if view.root is not None and view.stages]
    usable = [view for view in whole if view.about("kvbus.outcome", "") != Outcome.FAILED]
    total = sum(view.ttft_ms for view in usable) or 1.0
    of_stage: dict[str, list[float]] = {name: [] for name in StageName}
    of_side: dict[str, list[float]] = {}
    for view in usable:
        for name in {stage.name for stage in view.stages}:
            of_stage[name].append(sum(stage.duration_ns for stage in view.stages if stage.name == name) / MS)
        if side := str(view.about("kvbus.late_side", "")):
            of_side.setdefault(side, []).append(float(view.about("kvbus.late_by_ms", 0.0)))
    return Report(
        len(usable),
        len(everything) - len(whole),
        _spread("TTFT", [view.ttft_ms for view in usable], total),
        tuple(_spread(name, values, total) for name, values in of_stage.items() if values),
        tuple(_spread(side, values, total) for side, values in sorted(of_side.items())),
        dict(Counter(str(view.about("kvbus.outcome", "?")) for view in whole).most_common()),
        dict(Counter(max(view.stages, key=lambda stage: stage.duration_ns).name for view in usable).most_common()),
        dict(Counter(str(found) for view in usable if (found := view.about("kvbus.history", ""))).most_common()),
        sum(int(view.about("kvbus.history_tokens", 0)) for view in usable),
        sum(int(view.about("kvbus.history_missed_tokens", 0)) for view in usable),
    )


def _spread(name: str, values: Sequence[float], total: float) -> Spread:
    ordered = sorted(values)
    return Spread(
        str(name),
        len(ordered),
        sum(ordered) / len(ordered) if ordered else 0.0,
        quantile(ordered, 0.5),
        quantile(ordered, 0.9),
        quantile(ordered, 0.99),
        ordered[-1] if ordered else 0.0,
        sum(ordered) / total,
    )
