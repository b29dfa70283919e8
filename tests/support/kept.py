"""A span sink that keeps what it is given."""

from __future__ import annotations

from collections.abc import Sequence

from kvbus.trace import SpanData


class Kept:
    """``spans``, in the order in which they came; ``closed`` once it is."""

    def __init__(self) -> None:
        self.spans: list[SpanData] = []
        self.closed = False

    def write(self, spans: Sequence[SpanData]) -> None:
        self.spans += spans

    def close(self) -> None:
        self.closed = True
