"""A client's request as the router works on it, and what all requests of one router use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp

from kvbus.bus import Node
from kvbus.router.fleet import Fleet
from kvbus.router.metrics import Meters
from kvbus.router.request.apis import Body, Dialect
from kvbus.router.request.leg_bodies import transfers_of
from kvbus.router.settings import Settings
from kvbus.trace import MarkName, Trace


@dataclass(frozen=True, slots=True)
class Resources:
    """What all requests of one router use. ``session``: the HTTP session with the engines."""

    node: Node
    session: aiohttp.ClientSession
    fleet: Fleet
    meters: Meters
    settings: Settings


@dataclass(frozen=True, slots=True)
class Job:
    """One request that was read and found valid.

    Args:
        headers: the client's, as they go to the engines.
        traceparent: what the legs carry, empty if there is none.
        tokens: about how many its prompts have.
        arrived_at: seconds, monotonic.
        trace: None if the request is not sampled.
        history_engine: the decode engine that had this session's last turn, if it can give its KV; else empty.
    """

    path: str
    dialect: Dialect
    body: Body
    headers: Mapping[str, str]
    transfer_id: str
    traceparent: str
    tokens: int
    arrived_at: float
    trace: Trace | None
    history_engine: str = ""

    @property
    def transfers(self) -> list[str]:
        """The ids of its transfers: one for each sample of each prompt."""
        return transfers_of(self.body, self.transfer_id, self.dialect)

    @property
    def streams(self) -> bool:
        """Whether the client asked for a stream."""
        return self.body.get("stream") is True

    def mark(self, name: MarkName, attempt: int = 0, engine: str = "", note: str = "") -> None:
        """Mark what happens now, if the request is traced."""
        if self.trace is not None:
            self.trace.mark(name, attempt, engine, note)
