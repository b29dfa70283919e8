"""A decode engine's requests whose KV comes from outside, from vLLM's queue to the first token.

vLLM asks for each request in its queue how many tokens will come from outside, and asks again when a receive has
failed (policy ``recompute``): then another prefill engine may take over, under the next attempt and with new blocks.

Called by EngineCore's thread, but for :meth:`Incoming.rebind` (the node's) and :meth:`Incoming.want_queued` (any).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from kvbus.bounded import BoundedDict
from kvbus.engine import SinkScheduler
from kvbus.errors import PayloadTooLargeError
from kvbus.metrics import Counters, OncePer
from kvbus.protocol.decode import NEVER_SEEN, UNCLAIMED_S, unknown_at
from kvbus.trace import Marking, MarkName, Traced, traced
from kvbus.wire import (
    FIRST_ATTEMPT,
    Cancel,
    Heartbeat,
    PrefillCompleted,
    PrefillFailed,
    PrefillProgress,
    Rebind,
    Registration,
    Wanted,
    is_token,
)
from kvbus.wire import blocks as block_runs

from .identity import TransferName, digest_of, fits, name_transfer, traceparent_of
from .step import StepPlan
from .timing import Progress, take_blocks_now
from .timing import Registration as When

logger = logging.getLogger(__name__)

MAX_TAKEOVER_S = 30.0
MAX_ATTEMPT = 1_000_000
MAX_PREFILLS = 1 << 14
WANT_INTERVAL_S = 1.0
ANSWER_S = 1.5  # a prefill engine that has a request says so in milliseconds; one word and its answer may be lost
LOOK_INTERVAL_S = 0.05


class BlockRules(Protocol):
    """What vLLM's own NIXL connector knows about a model's blocks and tokens."""

    def clip(self, block_ids: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """The blocks of each KV group that hold what the other engine needs."""
        ...

    def external_tokens(self, prompt_tokens: int) -> int:
        """How many of a prompt's tokens the prefill engine computes."""
        ...

    def truncate(self, request: Any) -> None:
        """Drop from a prefill engine's request what the decode engine computes itself."""
        ...


class Stage(Enum):
    QUEUED = "queued"  # in vLLM's queue, without blocks
    DEFERRED = "deferred"  # likewise, because its prefill is not far enough
    RECEIVING = "receiving"  # registered
    GIVEN_UP = "given up"  # the workers are told, and will report it to vLLM
    ORPHANED = "orphaned"  # reported: vLLM asks again, and for a while the router may name another prefill engine
    STARTING = "starting"  # received, no token yet


_WITHOUT_BLOCKS = (Stage.QUEUED, Stage.DEFERRED, Stage.ORPHANED)
_WAITING = (Stage.DEFERRED, Stage.RECEIVING, Stage.GIVEN_UP, Stage.ORPHANED)


@dataclass(slots=True)
class _Request:
    request: Any
    name: TransferName
    attempt: int
    hint: str
    takeover_s: float
    when: When
    traced: Traced | None
    stage: Stage = Stage.QUEUED
    waits_since: float = field(default_factory=time.monotonic)
    busy_at: float = float("-inf")  # when a prefill engine could not announce it
    asked_at: float = 0.0
    wanted_since: float = float("inf")
    wanted_at: float = float("-inf")
    deferred_at: float = 0.0
    orphaned_until: float = 0.0
    rebound: tuple[int, str] | None = None
    resumed: bool = False
    over: bool = False  # vLLM only waits for the workers' report


class Incoming:
    """The table of these requests; see the module's docstring.

    ``kv_transfer_params`` that count: ``do_remote_prefill``, ``transfer_id``, ``prefill_engine_id`` (a hint),
    ``attempt`` (from 1), ``takeover_s`` (for how long a router may name another prefill engine when one is lost),
    ``registration`` (see :mod:`kvbus_connector.timing`).

    Args:
        when: where a request does not say.
        room: the share of this engine's KV blocks that would stay free if so many tokens were allocated.
        unclaimed_s: see :mod:`kvbus.protocol.decode.patience`.
    """

    def __init__(
        self,
        own: Heartbeat,
        rules: BlockRules,
        sink: SinkScheduler,
        counters: Counters,
        marking: Marking,
        when: When,
        room: Callable[[int], float],
        unclaimed_s: float = UNCLAIMED_S,
    ) -> None:
        self._own, self._rules, self._sink = own, rules, sink
        self._counters, self._marking = counters, marking
        self._when, self._room, self._unclaimed_s = when, room, unclaimed_s
        self._prefills: BoundedDict[str, tuple[str, Progress]] = BoundedDict(MAX_PREFILLS)
        self._requests: dict[str, _Request] = {}
        self._expect: dict[str, int] = {}
        self._abandon: list[str] = []
        self._once = OncePer()

    @property
    def waiting(self) -> bool:
        """Whether the bus, not vLLM, will move something on."""
        return any(incoming.stage in _WAITING for incoming in self._requests.values())

    def arrived(self, request: Any) -> None:
        """A request that names a prefill has come into vLLM's queue."""
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill"):
            return
        hint, attempt, takeover_s = (params.get(key) for key in ("prefill_engine_id", "attempt", "takeover_s"))
        when = params.get("registration")
        if not fits(request.request_id):
            self._complain(request, f"its id has {len(request.request_id)} characters")
            return
        name = name_transfer(request.request_id, params)
        incoming = self._requests[request.request_id] = _Request(
            request,
            name,
            attempt if type(attempt) is int and 0 < attempt <= MAX_ATTEMPT else FIRST_ATTEMPT,
            hint if isinstance(hint, str) and is_token(hint) else "",  # what cannot be an engine's id is no hint
            min(max(0.0, takeover_s), MAX_TAKEOVER_S) if type(takeover_s) in (int, float) else 0.0,
            When(when) if when in (*When,) else self._when,
            traced(name.transfer_id, traceparent_of(request)),
        )
        self._mark(incoming, MarkName.DECODE_ARRIVED)

    def tokens_from_outside(self, request: Any, computed_tokens: int) -> int | None:
        """How many of the prompt's tokens beyond ``computed_tokens`` will come; None: ask again."""
        incoming = self._requests.get(request.request_id)
        if incoming is None or incoming.stage is Stage.STARTING:
            return 0
        now = time.monotonic()
        if self._rests(incoming, now):
            return None
        if incoming.stage is Stage.ORPHANED and incoming.rebound is None:
            if now < incoming.orphaned_until:
                return None
            self._counters.add("recomputed")
            self._compute(incoming, "no prefill engine took over")
            return 0
        if incoming.rebound is not None:
            (incoming.attempt, incoming.hint), incoming.rebound = incoming.rebound, None
            incoming.asked_at = incoming.waits_since = now
            incoming.wanted_since, incoming.wanted_at = float("inf"), float("-inf")
            if not incoming.hint:
                self._counters.add("recomputed")
                self._compute(incoming, "the router has no prefill engine for it")
                return 0
        progress = self._progress(incoming)
        if reason := self._sink.why_not(incoming.hint) or self._why_unknown(incoming, progress, now):
            if incoming.takeover_s and self._sink.connected:
                incoming.stage, incoming.orphaned_until = Stage.ORPHANED, now + incoming.takeover_s
                return None
            self._complain(request, reason)
            self._compute(incoming, reason)
            return 0
        tokens = max(0, self._rules.external_tokens(request.num_prompt_tokens) - computed_tokens)
        incoming.asked_at = incoming.asked_at or now
        takes = take_blocks_now(
            incoming.when, progress, waits_since=incoming.asked_at, now=now, room=self._room(tokens)
        )
        if progress is None and now - incoming.waits_since > self._unclaimed_s:
            takes = False  # not before somebody says that he has it: it shall not hold blocks for nothing
        if tokens and not takes:
            if incoming.stage is not Stage.DEFERRED:
                self._mark(incoming, MarkName.DEFERRED, incoming.when.value)
            incoming.stage, incoming.deferred_at = Stage.DEFERRED, now
            if now - incoming.wanted_at > WANT_INTERVAL_S:  # the prefill engine answers, and tells what changes
                incoming.wanted_since, incoming.wanted_at = min(incoming.wanted_since, now), now
                self._sink.want(Wanted(**self._about(incoming)), incoming.hint)
            return None
        incoming.stage = Stage.QUEUED
        return tokens

    def allocated(self, request: Any, block_ids: Sequence[Sequence[int]], external_tokens: int) -> None:
        """vLLM has allocated ``block_ids`` (those still to be filled) for ``external_tokens`` tokens from outside."""
        incoming = self._requests.get(request.request_id)
        if incoming is None or incoming.stage is not Stage.QUEUED:
            return  # vLLM calls again after the receive, and after a preemption
        if external_tokens <= 0:
            self._compute(incoming, "the prompt is cached")
            return
        prompt_tokens = self._rules.external_tokens(request.num_prompt_tokens)
        registration = Registration(
            **self._about(incoming),
            blocks=block_runs.to_runs(self._rules.clip(block_ids)),
            prompt_tokens=prompt_tokens,
            cached_tokens=prompt_tokens - external_tokens,
            digest=digest_of(request, prompt_tokens),
            traceparent=traceparent_of(request),
        )
        incoming.stage = Stage.RECEIVING
        self._mark(incoming, MarkName.REGISTERING)
        self._expect[request.request_id] = registration.attempt
        try:
            self._sink.register(registration, incoming.hint)
        except PayloadTooLargeError as error:
            self._complain(request, str(error))
            incoming.takeover_s = 0.0
            self._give_up(request.request_id, str(error))
            return
        if (rebound := incoming.rebound) is not None:  # it came meanwhile, and found nothing registered
            self._sink.rebound(request.request_id, *rebound)

    def finished(self, request: Any) -> None:
        """A request is over, well or not, whatever its stage."""
        incoming = self._requests.get(request.request_id)
        if incoming is None:
            return
        match incoming.stage:
            case Stage.RECEIVING | Stage.GIVEN_UP:
                incoming.over = True
                self._sink.aborted(request.request_id)
            case Stage.STARTING:
                self._start(request.request_id)
            case Stage.QUEUED | Stage.DEFERRED | Stage.ORPHANED:
                self._decline(incoming, "finished before it was scheduled")

    def plan(self, plan: StepPlan, scheduled: Collection[str]) -> None:
        """Put into ``plan`` what the workers must know; look who runs in this step, and who has got a first token."""
        for given_up in self._sink.poll():
            self._give_up(given_up.request_id, given_up.reason)
        starting = [each for each in self._requests.values() if each.stage is Stage.STARTING]
        for incoming in starting:
            if incoming.request.num_output_tokens:
                self._mark(incoming, MarkName.TOKEN)
                self._start(incoming.request.request_id)
            elif not incoming.resumed and incoming.request.request_id in scheduled:
                incoming.resumed = True
                self._mark(incoming, MarkName.RESUMED)
        plan.expect, self._expect = self._expect, {}
        expected = [self._requests[each] for each in plan.expect if each in self._requests]
        plan.traced = {each.request.request_id: each.traced for each in expected if each.traced is not None}
        plan.abandon, self._abandon = self._abandon, []

    def awaits(self, request_id: str) -> bool:
        """Whether vLLM waits for word of this receive."""
        incoming = self._requests.get(request_id)
        return incoming is not None and incoming.stage in (Stage.RECEIVING, Stage.GIVEN_UP)

    def reported(self, request_ids: Collection[str], failed: Collection[str]) -> None:
        """The workers have reported these receives as over; those in ``failed`` too are not here."""
        for request_id in request_ids:
            incoming = self._requests.get(request_id)
            if incoming is None:
                continue
            if request_id in failed:
                incoming.stage, incoming.orphaned_until = Stage.ORPHANED, time.monotonic() + incoming.takeover_s
            else:
                incoming.stage = Stage.STARTING
                self._mark(incoming, MarkName.RECEIVED)
                self._sink.received(request_id)
            if incoming.over:
                self._start(request_id)

    def rebind(self, rebind: Rebind) -> str:
        """A router gives a transfer to another prefill engine; returns why not, empty if it is so."""
        found = [each for each in list(self._requests.values()) if each.name.base == rebind.transfer_id]
        waiting = [each for each in found if each.stage is not Stage.STARTING and not each.over]
        if not waiting:
            return "its KV is here" if found else "unknown transfer"
        current = {each.rebound or (each.attempt, each.hint) for each in waiting}
        if current == {(rebind.attempt, rebind.source_engine)}:
            return ""  # our word of it was lost
        if rebind.source_engine and not is_token(rebind.source_engine):
            return f"source_engine: {rebind.source_engine!r:.80} cannot be an engine's id"
        latest = max(attempt for attempt, _ in current)
        if rebind.attempt > MAX_ATTEMPT:
            return f"attempt {rebind.attempt} is over {MAX_ATTEMPT}"
        if rebind.attempt <= latest:
            return f"attempt {rebind.attempt} is not later than {latest}"
        for incoming in waiting:
            incoming.rebound = (rebind.attempt, rebind.source_engine)
            self._sink.rebound(incoming.request.request_id, rebind.attempt, rebind.source_engine)
        return ""

    def prefill_moved(self, message: PrefillProgress | PrefillCompleted | PrefillFailed) -> None:
        """A prefill engine says how far it is. Called from the node's thread."""
        done = not isinstance(message, PrefillProgress)
        nearly = isinstance(message, PrefillProgress) and message.computed >= message.total
        self._prefills[message.transfer_id] = (message.source_engine, Progress(time.monotonic(), done or nearly, done))

    def want_queued(self) -> None:
        """Renew the block leases of what waits in vLLM's queue."""
        for incoming in list(self._requests.values()):
            if incoming.stage in _WITHOUT_BLOCKS:
                self._sink.want(Wanted(**self._about(incoming)), incoming.hint)

    def _progress(self, incoming: _Request) -> Progress | None:
        """What was heard of its prefill, from the engine that it is to come from."""
        source, progress = self._prefills.get(incoming.name.transfer_id, ("", None))
        return progress if incoming.hint in ("", source) else None

    def _why_unknown(self, incoming: _Request, progress: Progress | None, now: float) -> str:
        """Empty, or why its prefill is waited for no longer: whoever had it would have said so."""
        if progress is not None:
            return ""
        if self._sink.is_busy(incoming.hint):
            incoming.busy_at = now
        at = unknown_at(incoming.waits_since, incoming.busy_at, self._unclaimed_s)
        return NEVER_SEEN if now >= max(at, incoming.wanted_since + ANSWER_S) else ""

    def _rests(self, incoming: _Request, now: float) -> bool:
        """vLLM asks in every step, for every request in its queue; without news the answer is known for a while."""
        if incoming.stage is not Stage.DEFERRED or incoming.rebound is not None:
            return False
        progress = self._progress(incoming)
        news = progress is not None and progress.at > incoming.deferred_at
        return not news and now < incoming.deferred_at + LOOK_INTERVAL_S

    def _start(self, request_id: str) -> None:
        incoming = self._requests[request_id]
        self._sink.first_token(request_id)
        if incoming.rebound is None:
            del self._requests[request_id]
        else:  # its KV, or its end, was faster: the other prefill engine works for nobody
            self._decline(incoming, "not needed any more")

    def _give_up(self, request_id: str, reason: str) -> None:
        incoming = self._requests.get(request_id)
        if incoming is not None and incoming.stage is Stage.RECEIVING:
            self._mark(incoming, MarkName.GIVEN_UP, reason)
            incoming.stage = Stage.GIVEN_UP
            self._abandon.append(request_id)

    def _complain(self, request: Any, reason: str) -> None:
        self._counters.add("computed_locally")
        if self._once.due(reason):
            logger.warning(
                "kvbus: expected remote KV, computed locally: %s (request %s; the reason is logged once a minute)",
                reason,
                request.request_id,
            )

    def _mark(self, incoming: _Request, name: MarkName, note: str = "") -> None:
        self._marking.mark(incoming.traced, name, incoming.attempt, note)

    def _compute(self, incoming: _Request, reason: str) -> None:
        """The prompt is computed here."""
        self._mark(incoming, MarkName.LOCAL, reason)
        self._decline(incoming, reason)

    def _decline(self, incoming: _Request, reason: str) -> None:
        """Tell the prefill side that nobody will take this transfer."""
        del self._requests[incoming.request.request_id]
        if incoming.rebound is not None:
            (incoming.attempt, incoming.hint), incoming.rebound = incoming.rebound, None
        self._sink.unwanted(Cancel(**self._about(incoming), reason=reason[:256]), incoming.hint)

    def _about(self, incoming: _Request) -> Mapping[str, Any]:
        return {
            "transfer_id": incoming.name.transfer_id,
            "attempt": incoming.attempt,
            "sink_engine": self._own.engine,
            "sink_incarnation": self._own.incarnation,
            "request_id": incoming.request.request_id,
        }
