"""A trace for display: one root, its stages, and the other spans with the same trace id. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvbus.trace import GAP_NS, ROOT, SpanData, StageName, Value

STAGES = frozenset(StageName)
MS = 1e6
MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class TraceView:
    """One trace. ``root`` is None if its span is missing; ``others`` are spans that are no stages: vLLM's, messages."""

    trace_id: str
    root: SpanData | None
    stages: tuple[SpanData, ...]
    others: tuple[SpanData, ...] = field(repr=False)

    @property
    def start_ns(self) -> int:
        return self.root.start_ns if self.root is not None else min(span.start_ns for span in self.spans)

    @property
    def first_token_ns(self) -> int:
        """When the last stage ended."""
        return max((stage.end_ns for stage in self.stages), default=self.start_ns)

    @property
    def ttft_ms(self) -> float:
        return (self.first_token_ns - self.start_ns) / MS

    @property
    def spans(self) -> tuple[SpanData, ...]:
        return (*((self.root,) if self.root is not None else ()), *self.stages, *self.others)

    @property
    def transfer_id(self) -> str:
        return str(self.about("kvbus.transfer_id", ""))

    def about(self, key: str, default: Value) -> Value:
        """An attribute of the root."""
        return self.root.attributes.get(key, default) if self.root is not None else default

    def has_id(self, wanted: str) -> bool:
        """Whether ``wanted`` begins its trace or transfer id, or is its request id."""
        ids = (self.trace_id, self.transfer_id)
        return wanted == self.about("kvbus.request_id", "") or any(each and each.startswith(wanted) for each in ids)


def views_of(spans: Iterable[SpanData]) -> list[TraceView]:
    """The traces in some spans, oldest first."""
    traces: dict[str, list[SpanData]] = {}
    for span in spans:
        traces.setdefault(span.trace_id, []).append(span)
    views = [_view(trace_id, each) for trace_id, found in traces.items() for each in _by_root(found)]
    return sorted(views, key=lambda view: view.start_ns)


def _by_root(spans: Sequence[SpanData]) -> list[list[SpanData]]:
    """The spans of each request in a trace: a client may have made several under one trace of its own."""
    by_id = {span.span_id: span for span in spans}
    roots = [span.span_id for span in spans if _is_root(span)]
    if len(roots) < 2:
        return [list(spans)]
    groups: dict[str, list[SpanData]] = {root: [] for root in roots}
    for span in spans:
        above: SpanData | None = span
        for _ in range(MAX_DEPTH):
            if above is None or above.span_id in groups:
                break
            above = by_id.get(above.parent_id)
        if above is not None and above.span_id in groups:
            groups[above.span_id].append(span)
    return list(groups.values())


def _is_root(span: SpanData) -> bool:
    return span.name == ROOT and span.service.startswith("kvbus-")


def _view(trace_id: str, spans: Sequence[SpanData]) -> TraceView:
    ours = [span for span in spans if span.service.startswith("kvbus-")]
    root = next((span for span in ours if _is_root(span)), None)
    stages = sorted(
        (span for span in ours if span.name in STAGES and (root is None or span.parent_id == root.span_id)),
        key=lambda span: span.start_ns,
    )
    shown = {span.span_id for span in stages} | ({root.span_id} if root is not None else set())
    others = sorted((span for span in spans if span.span_id not in shown), key=lambda span: span.start_ns)
    return TraceView(trace_id, root, tuple(stages), tuple(others))


def problems(view: TraceView) -> list[str]:
    """What is wrong with a trace, a line for each problem; tools say it instead of drawing something false."""
    found = (
        [] if view.root is not None else ["its root span is missing: the request may be running, or was not exported"]
    )
    known = {span.span_id for span in view.spans}
    outside = view.root.parent_id if view.root is not None else ""
    orphans = [span.name for span in view.spans if span.parent_id not in (*known, "", outside)]
    if orphans:
        found.append(f"the parents of {len(orphans)} spans are missing: {', '.join(sorted(set(orphans))[:5])}")
    if not view.stages:
        found.append("it has no stages")
    for before, after in zip(view.stages, view.stages[1:], strict=False):
        if after.start_ns < before.end_ns:
            found.append(
                f"{after.name} begins {(before.end_ns - after.start_ns) / MS:.3f} ms before {before.name} ends"
            )
        elif after.start_ns > before.end_ns + GAP_NS:
            found.append(f"{(after.start_ns - before.end_ns) / MS:.3f} ms between {before.name} and {after.name}")
    if view.root is not None and view.stages and view.stages[0].start_ns != view.root.start_ns:
        found.append(f"{(view.stages[0].start_ns - view.root.start_ns) / MS:.3f} ms before the first stage")
    missing = str(view.about("kvbus.missing_stages", ""))
    if missing:
        found.append(f"no marks of {missing}: their time is in the stage after them")
    return found
