"""A client's request as the router works on it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvbus.router.legs import Body


@dataclass(frozen=True, slots=True)
class Job:
    """Read and found good. ``tokens`` of its prompts, about; ``arrived_at`` in seconds, monotonic."""

    path: str
    body: Body
    headers: Mapping[str, str]
    transfer_id: str
    traceparent: str
    tokens: int
    arrived_at: float
