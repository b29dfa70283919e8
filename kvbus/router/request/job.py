"""A client's request as the router works on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvbus.router.request.apis import Body, Dialect
from kvbus.trace import MarkName, Trace


@dataclass(frozen=True, slots=True)
class Job:
    """Read and found good. ``tokens`` of its prompts, about; ``arrived_at`` in seconds, monotonic.

    ``traceparent`` is what its legs carry, empty if there is none; ``trace`` is None if it is not sampled.
    """

    path: str
    dialect: Dialect
    body: Body
    headers: Mapping[str, str]
    transfer_id: str
    traceparent: str
    tokens: int
    arrived_at: float
    trace: Trace | None = None

    @property
    def streams(self) -> bool:
        """Whether the client asked for a stream."""
        return self.body.get("stream") is True

    def mark(self, name: MarkName, attempt: int = 0, engine: str = "", note: str = "") -> None:
        """Mark what happens now, if the request is traced."""
        if self.trace is not None:
            self.trace.mark(name, attempt, engine, note)
