"""A decode engine's requests whose KV comes from outside, from vLLM's queue to the first token.

vLLM asks for each request in its queue how many tokens will come from outside, and asks again when a receive has
failed (policy ``recompute``): then another prefill engine may take over, under the next attempt and with new blocks.

EngineCore's thread calls it; only :meth:`Incoming.rebind` and :meth:`Incoming.prefill_moved` are called by the node's,
and :meth:`Incoming.want_queued` by any.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from kvbus.engine import OfPrefill, SinkScheduler
from kvbus.errors import PayloadTooLargeError
from kvbus.metrics import Counters, OncePer
from kvbus.protocol.decode import NEVER_SEEN, unknown_at
from kvbus.trace import Marking, MarkName
from kvbus.wire import Cancel, Heartbeat, Rebind, Registration, Wanted, is_token
from kvbus.wire import blocks as block_runs

from .block_rules import BlockRules
from .identity import digest_of, fits, traceparent_of
from .incoming_request import MAX_ATTEMPT, WAITING, WITHOUT_BLOCKS, IncomingRequest, Stage
from .short_tails import ShortTails
from .step import StepPlan
from .timing import Prefills, Progress, RegistrationTiming, take_blocks_now

logger = logging.getLogger(__name__)

WANT_INTERVAL_S = 1.0
ANSWER_S = 1.5  # a prefill engine that has a request says so in milliseconds; one word and its answer may be lost
MAX_REASON_CHARS = 256


class Incoming:
    """The table of these requests; see the module's docstring.

    Args:
        timing: of requests that do not say.
        room: the share of this engine's KV blocks that would stay free if so many tokens were allocated.
        unclaimed_s: see :mod:`kvbus.protocol.decode.patience`.
        local_prefill_tokens: see :mod:`kvbus_connector.short_tails`.
    """

    def __init__(
        self,
        own: Heartbeat,
        rules: BlockRules,
        sink: SinkScheduler,
        counters: Counters,
        marking: Marking,
        timing: RegistrationTiming,
        room: Callable[[int], float],
        unclaimed_s: float,
        local_prefill_tokens: int,
    ) -> None:
        self._own, self._rules, self._sink = own, rules, sink
        self._counters, self._marking = counters, marking
        self._timing, self._room, self._unclaimed_s = timing, room, unclaimed_s
        self._prefills, self._tails = Prefills(), ShortTails(local_prefill_tokens)
        self._requests: dict[str, IncomingRequest] = {}
        self._expect: dict[str, int] = {}
        self._abandon: list[str] = []
        self._once = OncePer()

    @property
    def waiting(self) -> bool:
        """Whether the bus, not vLLM, will move something on."""
        return any(incoming.stage in WAITING for incoming in self._requests.values())

    def arrived(self, request: Any) -> None:
        """A request that names a prefill has come into vLLM's queue."""
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill"):
            return
        if not fits(request.request_id):
            self._complain(request, f"its id has {len(request.request_id)} characters")
            return
        incoming = self._requests[request.request_id] = IncomingRequest.of(request, self._timing)
        self._mark(incoming, MarkName.DECODE_ARRIVED)

    def tokens_from_outside(self, request: Any, computed_tokens: int) -> int | None:
        """How many of the prompt's tokens beyond ``computed_tokens`` will come; None: ask again."""
        incoming = self._requests.get(request.request_id)
        if incoming is None or incoming.stage is Stage.STARTING:
            return 0
        now, tail = time.monotonic(), request.num_prompt_tokens - computed_tokens
        if incoming.rests(self._prefills.of(incoming.name.transfer_id, incoming.hint), now):
            return None
        if incoming.rebound is not None:
            incoming.follow_router(now)
            if not incoming.hint:
                return self._recompute(incoming, "the router has no prefill engine for it", tail)
        elif incoming.stage is Stage.ORPHANED:
            return self._recompute(incoming, "no prefill engine took over", tail)
        if self._tails.take(tail):
            self._counters.add("short_tails")
            return self._compute(incoming, f"only {tail} of its tokens are not cached", tail)
        progress = self._prefills.of(incoming.name.transfer_id, incoming.hint)
        if reason := self._sink.why_not(incoming.hint) or self._why_unknown(incoming, progress, now):
            if incoming.takeover_s and self._sink.connected:
                incoming.orphan(now)
                return None
            self._complain(request, reason)
            return self._compute(incoming, reason, tail)
        tokens = max(0, self._rules.external_tokens(request.num_prompt_tokens) - computed_tokens)
        if not self._takes_blocks(incoming, progress, tokens, now) and tokens:
            self._defer(incoming, now)
            return None
        incoming.stage = Stage.QUEUED
        return tokens

    def allocated(self, request: Any, block_ids: Sequence[Sequence[int]], external_tokens: int) -> None:
        """vLLM has allocated ``block_ids`` (those still to be filled) for ``external_tokens`` tokens from outside."""
        incoming = self._requests.get(request.request_id)
        if incoming is None or incoming.stage is not Stage.QUEUED:
            return  # vLLM calls again after the receive, and after a preemption
        if external_tokens <= 0:
            self._compute(incoming, "the prompt is cached", 1)
            return
        prompt_tokens = self._rules.external_tokens(request.num_prompt_tokens)
        registration = Registration(
            **incoming.about(self._own),
            blocks=block_runs.to_runs(self._rules.clip(block_ids)),
            prompt_tokens=prompt_tokens,
            cached_tokens=prompt_tokens - external_tokens,
            digest=digest_of(request, prompt_tokens),
            traceparent=traceparent_of(request),
            takes_token=self._own.first_token and bool(incoming.taker),
        )
        incoming.stage = Stage.RECEIVING
        self._mark(incoming, MarkName.REGISTERING, str(registration.cached_tokens or ""))
        self._expect[request.request_id] = registration.attempt
        try:
            self._sink.register(registration, incoming.hint)
        except PayloadTooLargeError as error:
            self._complain(request, str(error))
            incoming.takeover_s = 0.0
            self.give_up(request.request_id, str(error))
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
                self._forget(incoming)
            case Stage.QUEUED | Stage.DEFERRED | Stage.ORPHANED:
                self._decline(incoming, "finished before it was scheduled")

    def plan(self, plan: StepPlan, scheduled: Collection[str]) -> None:
        """Put into ``plan`` what the workers must know; look who runs in this step, and who has got a first token."""
        self._tails.begin_step()
        for incoming in [each for each in self._requests.values() if each.stage is Stage.STARTING]:
            if incoming.request.num_output_tokens:
                self._mark(incoming, MarkName.TOKEN)
                self._forget(incoming)
            elif not incoming.resumed and incoming.request_id in scheduled:
                incoming.resumed = True
                self._mark(incoming, MarkName.RESUMED)
        plan.expect, self._expect = self._expect, {}
        expected = [self._requests[each] for each in plan.expect if each in self._requests]
        plan.traced = {each.request_id: each.traced for each in expected if each.traced is not None}
        plan.takers = {each.request_id: each.taker for each in expected if each.taker}
        plan.abandon, self._abandon = self._abandon, []

    def awaits(self, request_id: str) -> bool:
        """Whether vLLM waits for word of this receive."""
        incoming = self._requests.get(request_id)
        return incoming is not None and incoming.stage in (Stage.RECEIVING, Stage.GIVEN_UP)

    def reported(self, request_ids: Collection[str], failed: Collection[str]) -> None:
        """The workers have reported these receives as over. For those in ``failed`` no KV came."""
        for incoming in [self._requests[each] for each in request_ids if each in self._requests]:
            if incoming.request_id in failed:
                incoming.orphan(time.monotonic())
            else:
                incoming.stage = Stage.STARTING
                self._mark(incoming, MarkName.RECEIVED)
                self._sink.received(incoming.request_id)
            if incoming.over:
                self._forget(incoming)

    def rebind(self, rebind: Rebind) -> str:
        """A router gives a transfer to another prefill engine; returns why not, empty if it is so."""
        found = [each for each in list(self._requests.values()) if each.name.base == rebind.transfer_id]
        waiting = [each for each in found if each.stage is not Stage.STARTING and not each.over]
        if not waiting:
            return "its KV is here" if found else "unknown transfer"
        current = {each.latest for each in waiting}
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
            self._sink.rebound(incoming.request_id, rebind.attempt, rebind.source_engine)
        return ""

    def prefill_moved(self, message: OfPrefill) -> None:
        """A prefill engine says how far it is."""
        self._prefills.hear(message, time.monotonic())

    def want_queued(self) -> None:
        """Renew the block leases of what waits in vLLM's queue."""
        for incoming in list(self._requests.values()):
            if incoming.stage in WITHOUT_BLOCKS:
                self._want(incoming)

    def _why_unknown(self, incoming: IncomingRequest, progress: Progress | None, now: float) -> str:
        """Why its prefill is waited for no longer, empty if it is: an engine that had it would have said so."""
        if progress is not None:
            return ""
        if self._sink.is_busy(incoming.hint):
            incoming.busy_at = now
        at = unknown_at(incoming.waits_since, incoming.busy_at, self._unclaimed_s)
        return NEVER_SEEN if now >= max(at, incoming.wanted_since + ANSWER_S) else ""

    def _takes_blocks(self, incoming: IncomingRequest, progress: Progress | None, tokens: int, now: float) -> bool:
        """Whether blocks for so many tokens are taken now."""
        incoming.asked_at = incoming.asked_at or now
        if progress is None and now - incoming.waits_since > self._unclaimed_s:
            return False  # not before an engine says that it has the request: it shall not hold blocks for nothing
        room = self._room(tokens)
        return take_blocks_now(incoming.timing, progress, waits_since=incoming.asked_at, now=now, room=room)

    def _defer(self, incoming: IncomingRequest, now: float) -> None:
        if incoming.stage is not Stage.DEFERRED:
            self._mark(incoming, MarkName.DEFERRED, incoming.timing.value)
        incoming.stage, incoming.deferred_at = Stage.DEFERRED, now
        if now - incoming.wanted_at > WANT_INTERVAL_S:  # the prefill engine answers, and tells what changes
            incoming.wanted_since, incoming.wanted_at = min(incoming.wanted_since, now), now
            self._want(incoming)

    def _want(self, incoming: IncomingRequest) -> None:
        self._sink.want(Wanted(**incoming.about(self._own)), incoming.hint)

    def _forget(self, incoming: IncomingRequest) -> None:
        self._sink.first_token(incoming.request_id)
        if incoming.rebound is None:
            del self._requests[incoming.request_id]
        else:  # its KV, or its end, was faster: the other prefill engine works for nobody
            self._decline(incoming, "not needed any more")

    def give_up(self, request_id: str, reason: str) -> None:
        """Nothing is written for this request any more."""
        incoming = self._requests.get(request_id)
        if incoming is not None and incoming.stage is Stage.RECEIVING:
            self._mark(incoming, MarkName.GIVEN_UP, reason)
            incoming.stage = Stage.GIVEN_UP
            self._abandon.append(request_id)

    def _complain(self, request: Any, reason: str) -> None:
        self._counters.add("computed_locally")
        if self._once.due(reason):
            text = "kvbus: expected remote KV, computed locally: %s (request %s; the reason is logged once a minute)"
            logger.warning(text, reason, request.request_id)

    def _mark(self, incoming: IncomingRequest, name: MarkName, note: str = "") -> None:
        self._marking.mark(incoming.traced, name, incoming.attempt, note)

    def _recompute(self, incoming: IncomingRequest, reason: str, tail: int) -> int:
        """The prompt is computed here, after a receive has failed; no token comes from outside."""
        self._counters.add("recomputed")
        return self._compute(incoming, reason, tail)

    def _compute(self, incoming: IncomingRequest, reason: str, tail: int) -> int:
        """The prompt's last ``tail`` tokens are computed here; no token comes from outside."""
        self._mark(incoming, MarkName.LOCAL, reason)
        self._decline(incoming, reason, tail)
        return 0

    def _decline(self, incoming: IncomingRequest, reason: str, local_tokens: int = 0) -> None:
        """Tell the prefill side, and routers, that this engine will not take this transfer."""
        del self._requests[incoming.request_id]
        incoming.attempt, incoming.hint = incoming.latest
        cancel = Cancel(**incoming.about(self._own), reason=reason[:MAX_REASON_CHARS], local_tokens=local_tokens)
        self._sink.unwanted(cancel, incoming.hint)
