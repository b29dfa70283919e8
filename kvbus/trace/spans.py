"""A request's path as spans: the span model of ``traces/README.md``. Pure.

The one rule: the stages are INTERNAL siblings under one root. Whatever else there is to show (each rank's share, each
message) lies inside a stage, as its child.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from kvbus.trace.path import GAP_NS, History, Mark, MarkName, Outcome, Path, Stage, StageName
from kvbus.wire import Role

ROOT = "request"
STREAM = "decode.stream"
REGISTRATION, COMPLETION = "kvbus.publish registration", "kvbus.publish completion"
_NO_HISTORY = (MarkName.HISTORY_DECLINED, MarkName.HISTORY_FAILED)
INTERNAL, SERVER, PRODUCER = 1, 2, 4  # opentelemetry.proto.trace.v1.Span.SpanKind
MS = 1e6

Value = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Ids:
    """Of a trace, in lower-case hex. ``parent`` is the client's own span, empty if it has none."""

    trace_id: str
    root: str
    parent: str = ""


@dataclass(frozen=True, slots=True)
class SpanData:
    """One finished span. Times in ns since the epoch, ids in lower-case hex; ``links`` are to spans of this trace."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    kind: int = INTERNAL
    service: str = "kvbus-router"
    engine: str = ""
    attributes: Mapping[str, Value] = field(default_factory=dict)
    links: tuple[str, ...] = ()
    error: str = ""

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


def spans_of(
    path: Path, ids: Ids, anchor_ns: int, new_id: Callable[[], str], about: Mapping[str, Value]
) -> list[SpanData]:
    """The spans of a path; the root comes first.

    Args:
        anchor_ns: what turns the path's clock into ns since the epoch.
        new_id: makes a span id.
        about: further attributes of the root.
    """
    return list(_SpanBuilder(path, ids, anchor_ns, new_id).build(about))


@dataclass(slots=True)
class _SpanBuilder:
    path: Path
    ids: Ids
    anchor_ns: int
    new_id: Callable[[], str]

    def build(self, about: Mapping[str, Value]) -> Iterator[SpanData]:
        path = self.path
        yield SpanData(
            ROOT,
            self.ids.trace_id,
            self.ids.root,
            self.ids.parent,
            path.start_ns + self.anchor_ns,
            path.end_ns + self.anchor_ns,
            SERVER,
            attributes={**about, **_about_path(path)},
            error=_error(path),
        )
        sent = [(REGISTRATION, path.registering), (COMPLETION, path.completing)]
        owners = self._owners()
        messages = [(name, mark, self.new_id()) for name, mark in sent if mark is not None]
        built: set[str] = set()
        for stage in path.stages:
            stage_id = self.new_id()
            is_match = stage.name is StageName.MATCH_WAIT
            links = tuple(each for _, mark, each in messages if is_match and mark.at_ns <= stage.end_ns)
            role, engine = owners.get(stage.name, (stage.mark.role, stage.mark.engine))
            mark = replace(stage.mark, role=role, engine=engine)
            yield self._span(stage.name, stage.start_ns, stage.end_ns, mark, stage_id, _about(stage, path), links)
            for name, mark, span_id in messages:
                if span_id not in built and mark.at_ns <= stage.end_ns:
                    built.add(span_id)
                    end = min(max(mark.at_ns + GAP_NS, stage.start_ns + GAP_NS), stage.end_ns)
                    yield self._span(name, end - GAP_NS, end, mark, span_id, {}, (), PRODUCER, stage_id)
            if len(stage.ranks) > 1:
                for mark in stage.ranks:
                    end = min(max(mark.at_ns, stage.start_ns + GAP_NS), stage.end_ns)
                    about_rank = {"kvbus.rank": mark.rank, "kvbus.attempt": mark.attempt}
                    name = f"{stage.name} rank {mark.rank}"
                    yield self._span(name, stage.start_ns, end, mark, self.new_id(), about_rank, (), INTERNAL, stage_id)
        if path.end_ns > path.first_token_ns + GAP_NS and path.outcome is not Outcome.FAILED:
            last = Mark(STREAM, path.end_ns, engine=path.decode_engine, role="decode")
            yield self._span(STREAM, path.first_token_ns + GAP_NS, path.end_ns, last, self.new_id(), {}, ())

    def _owners(self) -> dict[StageName, tuple[str, str]]:
        """Role and engine that a stage's time belongs to, where another one's mark ends the stage."""
        router, decode = ("router", ""), ("decode", self.path.decode_engine)
        ours = {StageName.ROUTE: router, StageName.LOST: router}
        return ours | dict.fromkeys((StageName.FIRST_TOKEN, StageName.DECODE_COMPUTE, StageName.DECODE_QUEUE), decode)

    def _span(
        self,
        name: str,
        start_ns: int,
        end_ns: int,
        mark: Mark,
        span_id: str,
        attributes: Mapping[str, Value],
        links: tuple[str, ...],
        kind: int = INTERNAL,
        parent_id: str = "",
    ) -> SpanData:
        clock: dict[str, Value] = {}
        if mark.error_ns:
            clock = {"kvbus.clock_offset_ms": mark.offset_ns / MS, "kvbus.clock_error_ms": mark.error_ns / MS}
            if end_ns - start_ns < mark.error_ns:
                clock["kvbus.below_clock_error"] = True
        return SpanData(
            name,
            self.ids.trace_id,
            span_id,
            parent_id or self.ids.root,
            start_ns + self.anchor_ns,
            end_ns + self.anchor_ns,
            kind,
            _service(name, mark),
            mark.engine,
            {**attributes, **clock},
            links,
        )


def _service(name: str, mark: Mark) -> str:
    """The service of a span. An engine of role both acts as one of the two here."""
    if mark.role != Role.BOTH:
        return f"kvbus-{mark.role}"
    of_decode = (StageName.HISTORY_MATCH, StageName.WRITE_TRANSFER, StageName.DECODE_RESUME, REGISTRATION)
    return "kvbus-decode" if name.partition(" rank")[0] in of_decode else "kvbus-prefill"


def _error(path: Path) -> str:
    """The root's error: not what the client caused (OpenTelemetry's conventions for HTTP server spans)."""
    if path.status.isdigit():
        return f"status {path.status}" if int(path.status) >= 500 else ""
    return path.status or (path.reason if path.outcome is Outcome.FAILED else "")


def _about_path(path: Path) -> dict[str, Value]:
    about: dict[str, Value] = {
        "kvbus.outcome": path.outcome.value,
        "kvbus.attempts": path.attempts,
        "kvbus.ttft_ms": path.ttft_ns / MS,
    }
    optional: dict[str, Value] = {
        "kvbus.reason": path.reason,
        "kvbus.prefill_engine": path.prefill_engine,
        "kvbus.decode_engine": path.decode_engine,
        "kvbus.prompt_tokens": path.prompt_tokens,
        "kvbus.bytes": path.nbytes,
        "kvbus.missing_stages": ", ".join(path.missing),
        "kvbus.router_ms": path.router_ns / MS,
        "kvbus.deferred": path.deferred,
    }
    if path.late_side:
        about |= {"kvbus.late_side": path.late_side, "kvbus.late_by_ms": path.late_by_ns / MS}
    if path.status.isdigit():
        about["http.response.status_code"] = int(path.status)
    if path.history is not None:
        about["kvbus.history"] = path.history.outcome.value
        optional |= _about_history(path.history)
    return about | {name: value for name, value in optional.items() if value}


def _about_history(history: History) -> dict[str, Value]:
    return {
        "kvbus.history_engine": history.engine,
        "kvbus.history_tokens": history.tokens,
        "kvbus.history_missed_tokens": history.missed_tokens,
        "kvbus.history_reason": history.reason,
        "kvbus.computed_tokens": history.computed_tokens,
    }


def _about(stage: Stage, path: Path) -> dict[str, Value]:
    about: dict[str, Value] = {"kvbus.attempt": stage.mark.attempt} if stage.mark.attempt else {}
    match stage.name:
        case StageName.MATCH_WAIT:
            about |= {"kvbus.late_side": path.late_side, "kvbus.late_by_ms": path.late_by_ns / MS}
        case _ if stage.mark.name in _NO_HISTORY:
            about["kvbus.reason"] = stage.mark.note
        case StageName.PREFILL_COMPUTE:
            about["kvbus.prompt_tokens"] = path.prompt_tokens
        case StageName.WRITE_TRANSFER:
            about["kvbus.bytes"] = path.nbytes
        case StageName.WRITE_QUEUE if stage.mark.note:
            about["kvbus.waited_for"] = stage.mark.note
        case StageName.LOST | StageName.DECODE_QUEUE:
            about["kvbus.reason"] = stage.mark.note
        case StageName.DECODE_COMPUTE:
            about["kvbus.reason"] = path.reason
        case _:
            pass
    return about
