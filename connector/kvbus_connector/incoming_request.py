"""One request of a decode engine whose KV comes from outside: its stage, and what its router said of it.

``kv_transfer_params`` that count: ``do_remote_prefill``, ``transfer_id``, ``prefill_engine_id`` (a hint), ``attempt``
(from 1), ``takeover_s`` (for how long a router may name another prefill engine when one is lost), ``registration`` (see
:mod:`kvbus_connector.timing`), ``takes_token`` (see :mod:`kvbus_connector.first_token`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from kvbus.trace import Traced, traced
from kvbus.wire import FIRST_ATTEMPT, Heartbeat, is_token

from .first_token import taker_of
from .identity import TransferName, name_transfer, traceparent_of
from .timing import Progress, RegistrationTiming

MAX_TAKEOVER_S = 30.0
MAX_ATTEMPT = 1_000_000
LOOK_INTERVAL_S = 0.05


class Stage(Enum):
    QUEUED = "queued"  # in vLLM's queue, without blocks
    DEFERRED = "deferred"  # likewise, because its prefill is not far enough
    RECEIVING = "receiving"  # registered
    GIVEN_UP = "given up"  # the workers are told, and will report it to vLLM
    ORPHANED = "orphaned"  # reported: vLLM asks again, and for a while the router may name another prefill engine
    STARTING = "starting"  # received, no token yet


WITHOUT_BLOCKS = (Stage.QUEUED, Stage.DEFERRED, Stage.ORPHANED)
WAITING = (Stage.DEFERRED, Stage.RECEIVING, Stage.GIVEN_UP, Stage.ORPHANED)


@dataclass(slots=True)
class IncomingRequest:
    """``hint`` is the prefill engine that is to have it, empty for any; times are seconds of the monotonic clock."""

    request: Any
    name: TransferName
    attempt: int
    hint: str
    takeover_s: float
    timing: RegistrationTiming
    traced: Traced | None
    taker: str = ""  # how the sampler knows it, if it goes on from prefill's first token
    stage: Stage = Stage.QUEUED
    waits_since: float = field(default_factory=time.monotonic)
    busy_at: float = float("-inf")  # when a prefill engine could not announce it
    asked_at: float = 0.0
    wanted_since: float = float("inf")
    wanted_at: float = float("-inf")
    deferred_at: float = 0.0
    orphaned_until: float = 0.0
    rebound: tuple[int, str] | None = None
    """The attempt and the prefill engine that a router has named since; an empty one if it has none."""
    resumed: bool = False
    over: bool = False  # vLLM only waits for the workers' report

    @classmethod
    def of(cls, request: Any, default: RegistrationTiming) -> IncomingRequest:
        """Of vLLM's request. A client may have said anything: what makes no sense is as if it were not there."""
        params = request.kv_transfer_params
        hint, attempt, takeover_s = (params.get(key) for key in ("prefill_engine_id", "attempt", "takeover_s"))
        timing, name = params.get("registration"), name_transfer(request.request_id, params)
        return cls(
            request,
            name,
            attempt if type(attempt) is int and 0 < attempt <= MAX_ATTEMPT else FIRST_ATTEMPT,
            hint if isinstance(hint, str) and is_token(hint) else "",
            min(max(0.0, takeover_s), MAX_TAKEOVER_S) if type(takeover_s) in (int, float) else 0.0,
            RegistrationTiming(timing) if timing in (*RegistrationTiming,) else default,
            traced(name.transfer_id, traceparent_of(request)),
            taker_of(params, request.prompt_token_ids) if name.transfer_id == name.base else "",
        )

    @property
    def request_id(self) -> str:
        return str(self.request.request_id)

    @property
    def latest(self) -> tuple[int, str]:
        """The latest attempt, and the prefill engine that is to have it."""
        return self.rebound or (self.attempt, self.hint)

    def rests(self, progress: Progress | None, now: float) -> bool:
        """vLLM asks in every step, for every request in its queue; without news the answer is known for a while."""
        if self.rebound is not None:
            return False
        if self.stage is Stage.ORPHANED:
            return now < self.orphaned_until
        if self.stage is not Stage.DEFERRED:
            return False
        news = progress is not None and progress.at > self.deferred_at
        return not news and now < self.deferred_at + LOOK_INTERVAL_S

    def follow_router(self, now: float) -> None:
        """Go on with the latest attempt, and with a new wait for it."""
        (self.attempt, self.hint), self.rebound = self.latest, None
        self.asked_at = self.waits_since = now
        self.wanted_since, self.wanted_at = float("inf"), float("-inf")

    def orphan(self, now: float) -> None:
        self.stage, self.orphaned_until = Stage.ORPHANED, now + self.takeover_s

    def about(self, own: Heartbeat) -> Mapping[str, Any]:
        """What each message about it says first, of the engine ``own``."""
        return {
            "transfer_id": self.name.transfer_id,
            "attempt": self.attempt,
            "sink_engine": own.engine,
            "sink_incarnation": own.incarnation,
            "request_id": self.request_id,
        }
