"""A conversation's history: KV of a prompt's beginning that a decode engine has and the prefill engine lacks.

It is a transfer like any other, with the roles turned round: the decode engine is its source, the prefill engine its
sink. Its id is that of the request's own transfer and :data:`kvbus.wire.HISTORY_SUFFIX`.

The decode engine offers what its prefix cache has of a request, once vLLM has given the request its blocks: they are
the request's own from then on, so nothing is kept for a conversation that is idle. The prefill engine, which a router
has told that there may be history, asks for the offer and waits for it for milliseconds; then it takes what it lacks,
or computes.

EngineCore's thread calls it; only :meth:`HistoryTaker.moved` is called by the node's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kvbus.bounded import BoundedDict
from kvbus.engine import OfPrefill, SinkScheduler
from kvbus.errors import PayloadTooLargeError
from kvbus.metrics import Counters
from kvbus.trace import Marking, MarkName, Traced, traced
from kvbus.wire import (
    FIRST_ATTEMPT,
    HISTORY_SUFFIX,
    Cancel,
    Heartbeat,
    PrefillCompleted,
    PrefillProgress,
    Registration,
    Wanted,
    is_token,
)
from kvbus.wire import blocks as block_runs

from .history_worth import PrefillSpeed, Worth
from .identity import digest_of, history_name, is_of_tokens, traceparent_of
from .steps import Steps

MIN_WAIT_S, MAX_WAIT_S = 0.005, 0.05  # for an offer
MAX_OFFERS = 1 << 14
MIN_RECEIVE_S, MAX_RECEIVE_S = 0.1, 10.0


class Stage(Enum):
    ASKED = "asked"  # for an offer
    OFFERED = "offered"  # vLLM is told how much comes, and allocates
    RECEIVING = "receiving"
    OVER = "over"


@dataclass(slots=True)
class _Taken:
    request: Any
    name: str
    source: str
    until: float = 0.0
    """Until when an offer, then the KV, is waited for, seconds, monotonic; 0 before vLLM has asked."""
    stage: Stage = Stage.ASKED
    tokens: int = 0
    """How many the decode engine has, of the whole prompt."""
    comes: int = 0
    """How many of them vLLM was told will come."""
    lacking: int = 0
    """How many of the prompt's tokens this engine would have to compute."""
    asked_at: float = 0.0
    registered_at: float = 0.0
    """Seconds, monotonic: when vLLM first asked, and when the receive was registered."""
    blocked: bool = False
    """Whether vLLM had no blocks for them at once."""

    @property
    def traced(self) -> Traced | None:
        """Marks go to the trace of the request, not to one of the history's transfer."""
        return traced(self.name.removesuffix(HISTORY_SUFFIX), traceparent_of(self.request))

    def about(self, own: Heartbeat) -> Mapping[str, Any]:
        return {
            "transfer_id": self.name,
            "attempt": FIRST_ATTEMPT,
            "sink_engine": own.engine,
            "sink_incarnation": own.incarnation,
            "request_id": self.request.request_id,
        }


class HistoryTaker:
    """In a prefill engine; see the module's docstring."""

    def __init__(
        self,
        own: Heartbeat,
        sink: SinkScheduler,
        counters: Counters,
        marking: Marking,
        block_size: int,
        speed: PrefillSpeed,
        steps: Steps,
    ) -> None:
        self._own, self._sink, self._counters, self._marking = own, sink, counters, marking
        self._block_size, self._speed, self._worth, self._steps = block_size, speed, Worth(speed), steps
        self._unsaid: list[tuple[int, _Taken, Registration]] = []
        self._requests: dict[str, _Taken] = {}
        self._offers: BoundedDict[str, int] = BoundedDict(MAX_OFFERS)
        self._expect: dict[str, int] = {}
        self._abandon: list[str] = []

    @property
    def waiting(self) -> bool:
        """Whether the bus, not vLLM, will move something on."""
        return any(taken.stage is not Stage.OVER for taken in self._requests.values())

    def arrived(self, request: Any) -> None:
        """A prefill has come into vLLM's queue."""
        params = request.kv_transfer_params
        source = params.get("history_engine_id") if params and params.get("do_remote_decode") else None
        if not self._own.history or not isinstance(source, str) or not is_token(source):
            return
        if getattr(request, "skip_reading_prefix_cache", False):
            return  # vLLM takes nothing from outside for it, whatever it is told
        taken = _Taken(request, history_name(request), source)
        if not is_of_tokens(request):
            self._marking.mark(taken.traced, MarkName.HISTORY_NOT_ASKED, note="its prompt is not of tokens only")
            return
        if reason := self._sink.why_not(source):
            self._counters.add("history: no source")
            self._marking.mark(taken.traced, MarkName.HISTORY_NOT_ASKED, note=reason)
            return
        self._requests[request.request_id] = taken
        self._offers[taken.name] = 0
        self._sink.want(Wanted(**taken.about(self._own)), source)

    def moved(self, message: OfPrefill) -> None:
        """A decode engine offers, or has nothing to offer."""
        if message.transfer_id not in self._offers:
            return
        match message:
            case PrefillProgress(total=tokens) | PrefillCompleted(tokens=tokens):
                self._offers[message.transfer_id] = tokens
            case _:
                self._offers[message.transfer_id] = -1
        self._sink.tell()

    def tokens_from_outside(self, request: Any, computed_tokens: int) -> int | None:
        """How many tokens beyond ``computed_tokens`` will come; None: ask again."""
        taken = self._requests.get(request.request_id)
        if taken is None or taken.stage is Stage.OVER:
            return 0
        offered, now = self._offers.get(taken.name, 0), time.monotonic()
        if not taken.asked_at:
            taken.asked_at, taken.lacking = now, request.num_prompt_tokens - computed_tokens
            taken.until = now + self._speed.takes_s(taken.lacking, MIN_WAIT_S, MAX_WAIT_S)
            if not self._worth.asking(taken.lacking):
                self._decline(taken, "does not pay")
                self._marking.mark(taken.traced, MarkName.HISTORY_NOT_ASKED, note="it would hardly pay")
                return 0
            self._marking.mark(taken.traced, MarkName.HISTORY_ASKED, note=taken.source)
        if not offered and now < taken.until:
            return None
        if reason := self._why_not(taken, offered, computed_tokens):
            self._worth.learn(taken.lacking, 0, now - taken.asked_at)
            self._decline(taken, reason)
            self._marking.mark(taken.traced, MarkName.HISTORY_DECLINED, note=_why_declined(offered, computed_tokens))
            return 0
        taken.tokens = offered
        if taken.stage is Stage.ASKED:
            self._marking.mark(taken.traced, MarkName.HISTORY_OFFERED)
        else:
            taken.blocked = True
        taken.stage, taken.comes = Stage.OFFERED, offered - computed_tokens
        return taken.comes

    def _why_not(self, taken: _Taken, offered: int, computed_tokens: int) -> str:
        """Why an offer of so many tokens is not taken; empty if it is."""
        most = (taken.request.num_prompt_tokens - 1) // self._block_size * self._block_size
        if not offered:
            return "too late"
        if offered > most or offered % self._block_size or offered <= computed_tokens:
            return "nothing is missing"
        is_decided = taken.stage is not Stage.ASKED
        return "" if is_decided or self._worth.taking(offered - computed_tokens) else "does not pay"

    def allocated(self, request: Any, block_ids: Sequence[Sequence[int]], external_tokens: int) -> None:
        """vLLM has allocated ``block_ids``, those still to be filled, for ``external_tokens`` and what it computes."""
        taken = self._requests.get(request.request_id)
        if taken is None or taken.stage is not Stage.OFFERED:
            return
        if external_tokens <= 0:
            self._decline(taken, "nothing is missing")
            return
        count = external_tokens // self._block_size
        registration = Registration(
            **taken.about(self._own),
            blocks=block_runs.to_runs([list(group)[:count] for group in block_ids]),
            prompt_tokens=taken.tokens,
            cached_tokens=taken.tokens - external_tokens,
            digest=digest_of(request, taken.tokens),
            traceparent=traceparent_of(request),
        )
        taken.stage, taken.registered_at = Stage.RECEIVING, time.monotonic()
        taken.until = taken.registered_at + self._speed.takes_s(external_tokens, MIN_RECEIVE_S, MAX_RECEIVE_S)
        if taken.blocked:
            self._marking.mark(taken.traced, MarkName.HISTORY_REGISTERING)
        self._expect[request.request_id] = FIRST_ATTEMPT
        self._unsaid.append((self._steps.next, taken, registration))

    def plan(self) -> tuple[dict[str, int], list[str]]:
        """What the ranks must know: receives that are expected, and those that are given up."""
        now = time.monotonic()
        unsaid, self._unsaid = self._unsaid, []
        for step, taken, registration in unsaid:
            if not self._steps.have_ended(step):
                self._unsaid.append((step, taken, registration))
            elif self.awaits(taken.request.request_id):
                self._register(taken, registration)
        for taken in self._requests.values():
            if taken.stage is Stage.RECEIVING and now >= taken.until:
                taken.until = math.inf
                self._sink.aborted(taken.request.request_id)
        expect, self._expect = self._expect, {}
        abandon, self._abandon = self._abandon, []
        return expect, abandon

    @property
    def hurries(self) -> bool:
        """Whether the next step must come soon."""
        return bool(self._unsaid)

    def _register(self, taken: _Taken, registration: Registration) -> None:
        try:
            self._sink.register(registration, taken.source)
        except PayloadTooLargeError as error:
            self.give_up(taken.request.request_id, str(error))

    def give_up(self, request_id: str, reason: str) -> None:
        """Nothing is written for this request any more."""
        if self.awaits(request_id):
            self._marking.mark(self._requests[request_id].traced, MarkName.HISTORY_FAILED, note=reason)
            self._abandon.append(request_id)

    def awaits(self, request_id: str) -> bool:
        """Whether vLLM waits for word of this receive."""
        taken = self._requests.get(request_id)
        return taken is not None and taken.stage is Stage.RECEIVING

    def reported(self, request_ids: Collection[str], failed: Collection[str]) -> None:
        """The workers have reported these receives as over."""
        for taken in [self._requests[each] for each in request_ids if self.awaits(each)]:
            request_id = taken.request.request_id
            taken.stage = Stage.OVER
            now, came = time.monotonic(), 0 if request_id in failed else taken.comes
            self._worth.learn(taken.lacking, came, now - taken.asked_at, now - taken.registered_at)
            if not came:
                self._counters.add("history: lost")
            else:
                self._marking.mark(taken.traced, MarkName.HISTORY_RECEIVED, note=str(taken.comes))
                self._counters.add("history: taken")
                self._counters.add("history_tokens", taken.comes)
                self._sink.received(request_id)
                self._sink.first_token(request_id)  # the source may let go: nobody will ask for this again
            self._forget(taken)

    def finished(self, request: Any) -> None:
        """The prefill is over, well or not."""
        taken = self._requests.get(request.request_id)
        if taken is None:
            return
        if taken.stage is Stage.RECEIVING:
            self._sink.aborted(request.request_id)
        else:
            self._decline(taken, "finished before it was scheduled")

    def _decline(self, taken: _Taken, reason: str) -> None:
        self._counters.add(f"history: {reason}")
        self._sink.unwanted(Cancel(**taken.about(self._own), reason=reason), taken.source)
        self._forget(taken)

    def _forget(self, taken: _Taken) -> None:
        self._requests.pop(taken.request.request_id, None)
        self._offers.pop(taken.name, None)


def _why_declined(offered: int, computed_tokens: int) -> str:
    """What a trace says of an offer that is not taken; ``offered`` is 0 before it is heard, -1 if there is nothing."""
    if not offered:
        return "it did not answer in time"
    if offered < 0:
        return "it had nothing to offer"
    return f"it offered {offered} tokens, of which {computed_tokens} were here"
