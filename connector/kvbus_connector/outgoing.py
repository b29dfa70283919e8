"""A prefill engine's requests whose KV goes to a decode engine, from vLLM's queue to the end of the prefill.

Called by EngineCore's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbus.bus import Node
from kvbus.errors import PayloadTooLargeError
from kvbus.trace import Marking, MarkName, Traced, traced
from kvbus.wire import FIRST_ATTEMPT, NO_TOKEN, Heartbeat, PrefillCompleted, PrefillFailed, PrefillProgress, Release
from kvbus.wire import blocks as block_runs

from .block_rules import BlockRules
from .first_token import first_token_of
from .identity import TransferName, digest_of, fits, name_transfer, traceparent_of
from .step import StepPlan

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Prefill:
    name: TransferName
    request: Any
    traced: Traced | None
    scheduled: bool = False


class Outgoing:
    """The table of these requests. Each message goes over the bus, which may lose it, and with the next step."""

    def __init__(self, own: Heartbeat, rules: BlockRules, node: Node, marking: Marking) -> None:
        self._own, self._rules, self._node, self._marking = own, rules, node, marking
        self._prefilling: dict[str, _Prefill] = {}
        self._held: set[str] = set()
        self._said: list[PrefillProgress | PrefillCompleted | PrefillFailed] = []
        self._withdrawn: list[Release] = []
        self._number = 0

    @property
    def held(self) -> int:
        """How many prefills are over whose KV is still needed."""
        return len(self._held)

    def holds(self, request_id: str) -> bool:
        """Whether vLLM waits for word that the KV of this request is no longer needed."""
        return request_id in self._held

    def released(self, request_ids: Collection[str]) -> None:
        """The workers no longer need the KV of these."""
        self._held.difference_update(request_ids)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that are still to be computed."""
        waiting = [prefill.request for prefill in list(self._prefilling.values())]
        return sum(max(0, request.num_prompt_tokens - request.num_computed_tokens) for request in waiting)

    def arrived(self, request: Any) -> None:
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_decode"):
            return
        if not fits(request.request_id):
            logger.warning("kvbus: no transfer: the request's id has %d characters", len(request.request_id))
            return
        self._rules.truncate(request)
        name = name_transfer(request.request_id, params)
        what = traced(name.transfer_id, traceparent_of(request))
        self._prefilling[request.request_id] = _Prefill(name, request, what)
        self._marking.mark(what, MarkName.PREFILL_ARRIVED)
        about = self._about(name, request.request_id)
        self._say(PrefillProgress(**about, computed=0, total=request.num_prompt_tokens))

    def finished(
        self, request: Any, block_ids: Sequence[Sequence[int]], *, prefilled: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """See :meth:`kvbus_connector.scheduler.SchedulerHalf.finished`."""
        request_id, params = request.request_id, request.kv_transfer_params
        name = name_transfer(request_id, params)
        prefill = self._prefilling.pop(request_id, None)
        if prefill is None and not fits(request_id):
            self._say(PrefillFailed(**self._about(name, ""), reason="the request's id is too long"))
            return False, None
        what = prefill.traced if prefill is not None else None
        runs = block_runs.to_runs(self._rules.clip(block_ids))
        if not prefilled or not block_runs.count(runs):
            reason = "aborted" if not prefilled else "no blocks"
            self._say(PrefillFailed(**self._about(name, request_id), reason=reason))
            return False, None
        self._marking.mark(what, MarkName.PREFILL_DONE, note=str(request.num_computed_tokens))
        self._say(
            PrefillCompleted(
                **self._about(name, request_id),
                blocks=runs,
                tokens=request.num_computed_tokens,
                digest=digest_of(request, request.num_computed_tokens),
                traceparent=traceparent_of(request),
                first_token=first_token_of(request) if self._own.first_token else NO_TOKEN,
            )
        )
        self._held.add(request_id)
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": name.base,
            "prefill_engine_id": self._own.engine,
        }

    def announce_history(self, request: Any, name: str, tokens: int) -> None:
        """The first ``tokens`` of a request that another engine prefills are here, or soon are; see :mod:`.history`."""
        about = self._about(TransferName(name, name), request.request_id)
        self._say(PrefillProgress(**about, computed=0, total=tokens))

    def offer_history(self, request: Any, name: str, block_ids: Sequence[Sequence[int]], tokens: int) -> None:
        """These blocks can be written now."""
        self._say(
            PrefillCompleted(
                **self._about(TransferName(name, name), request.request_id),
                blocks=block_runs.to_runs(block_ids),
                tokens=tokens,
                digest=digest_of(request, tokens),
                traceparent=traceparent_of(request),
            )
        )

    def say_no_history(self, request: Any, name: str) -> None:
        about = self._about(TransferName(name, name), request.request_id)
        self._say(PrefillFailed(**about, reason="nothing is cached"))

    def withdraw(self, name: str) -> None:
        """Let the ranks drop the history ``name``, unless they are writing it. Not over the bus, which may be away."""
        me = self._own
        word = Release(name, FIRST_ATTEMPT, me.engine, me.engine, me.incarnation, "nobody waits for it")
        self._withdrawn.append(word)

    def plan(self, plan: StepPlan, scheduled_tokens: Mapping[str, int]) -> None:
        """Tell the bus how far the prefills are, and put into ``plan`` what has ended."""
        for request_id, prefill in self._prefilling.items():
            if request_id not in scheduled_tokens:
                continue
            if not prefill.scheduled:
                prefill.scheduled = True
                note = str(prefill.request.num_computed_tokens or "")
                self._marking.mark(prefill.traced, MarkName.PREFILL_SCHEDULED, note=note)
            request = prefill.request
            computed = request.num_computed_tokens + scheduled_tokens[request_id]
            if computed <= request.num_prompt_tokens:
                about = self._about(prefill.name, request_id)
                self._say(PrefillProgress(**about, computed=computed, total=request.num_prompt_tokens))
        plan.prefills, self._said = self._said, []
        plan.withdraw, self._withdrawn = self._withdrawn, []
        plan.told = self._number

    def _say(self, message: PrefillProgress | PrefillCompleted | PrefillFailed) -> None:
        self._said.append(message)
        me = self._own.engine
        try:
            self._node.publish(self._node.subjects.prefill(me), message, to=me)
        except PayloadTooLargeError as error:
            logger.warning("%s; the ranks get it with the next step instead", error)

    def _about(self, name: TransferName, request_id: str) -> dict[str, Any]:
        """What each message about a prefill says first; each has the next number."""
        self._number += 1
        return {
            "number": self._number,
            "transfer_id": name.transfer_id,
            "source_engine": self._own.engine,
            "source_incarnation": self._own.incarnation,
            "request_id": request_id,
        }
