"""The critical path as Jaeger's UI finds it, in its unit, microseconds.

From the root's end backwards: the child that finishes last before the point reached so far is on the path; what lies
between is the parent's own. Links do not count; a sibling counts only if it ends before the point, not at it.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvbus.trace import SpanData


def _us(ns: int) -> int:
    return ns // 1000


def critical_path(spans: Sequence[SpanData], root: SpanData) -> list[tuple[str, int, int]]:
    """Sections ``(span's name, start, end)``, the last one first."""
    children: dict[str, list[SpanData]] = {}
    for span in spans:
        children.setdefault(span.parent_id, []).append(span)
    sections: list[tuple[str, int, int]] = []

    def walk(span: SpanData, until: int) -> None:
        point, first = until, True
        while True:
            fitting = [
                child
                for child in children.get(span.span_id, [])
                if (_us(child.end_ns) <= point if first else _us(child.end_ns) < point)
            ]
            if not fitting:
                break
            last = max(fitting, key=lambda child: child.end_ns)
            if _us(last.end_ns) != point:
                sections.append((span.name, _us(last.end_ns), point))
            walk(last, _us(last.end_ns))
            point, first = _us(last.start_ns), False
        if point != _us(span.start_ns):
            sections.append((span.name, _us(span.start_ns), point))

    walk(root, _us(root.end_ns))
    return sections
