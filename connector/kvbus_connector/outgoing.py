"""A prefill engine's requests whose KV goes to a decode engine, from vLLM's queue to the end of the prefill.

Called by EngineCore's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kvbus import blocks as block_runs
from kvbus.errors import PayloadTooLargeError
from kvbus.messages import Heartbeat, PrefillCompleted, PrefillFailed, PrefillProgress
from kvbus.node import Node

from .identity import TransferName, digest_of, fits, name_transfer, traceparent_of
from .incoming import BlockRules
from .step import StepPlan

logger = logging.getLogger(__name__)


class Outgoing:
    """The table of these requests. What ends a prefill goes over the bus at once, and surely with the next step."""

    def __init__(self, own: Heartbeat, rules: BlockRules, node: Node) -> None:
        self._own, self._rules, self._node = own, rules, node
        self._prefilling: dict[str, tuple[TransferName, Any]] = {}
        self._held: set[str] = set()
        self._ended: list[PrefillCompleted | PrefillFailed] = []

    @property
    def held(self) -> int:
        """How many prefills are over whose KV is still needed."""
        return len(self._held)

    def released(self, request_ids: Collection[str]) -> None:
        """The workers no longer need the KV of these."""
        self._held.difference_update(request_ids)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that are still to be computed."""
        waiting = [request for _, request in list(self._prefilling.values())]
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
        self._prefilling[request.request_id] = (name, request)
        about = self._about(name, request.request_id)
        self._publish(PrefillProgress(**about, computed=0, total=request.num_prompt_tokens))

    def finished(
        self, request: Any, block_ids: Sequence[Sequence[int]], *, prefilled: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """See :meth:`kvbus_connector.scheduler.SchedulerHalf.finished`."""
        request_id, params = request.request_id, request.kv_transfer_params
        name = name_transfer(request_id, params)
        if self._prefilling.pop(request_id, None) is None and not fits(request_id):
            self._end(PrefillFailed(**self._about(name, ""), reason="the request's id is too long"))
            return False, None
        runs = block_runs.to_runs(self._rules.clip(block_ids))
        if not prefilled or not block_runs.count(runs):
            reason = "aborted" if not prefilled else "no blocks"
            self._end(PrefillFailed(**self._about(name, request_id), reason=reason))
            return False, None
        self._end(
            PrefillCompleted(
                **self._about(name, request_id),
                blocks=runs,
                tokens=request.num_computed_tokens,
                digest=digest_of(request.prompt_token_ids, request.num_computed_tokens),
                traceparent=traceparent_of(request),
            )
        )
        self._held.add(request_id)
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": name.base,
            "prefill_engine_id": self._own.engine,
        }

    def plan(self, plan: StepPlan, scheduled_tokens: Mapping[str, int]) -> None:
        """Tell the bus how far the prefills are, and put into ``plan`` what has ended."""
        for request_id, (name, request) in self._prefilling.items():
            computed = request.num_computed_tokens + scheduled_tokens.get(request_id, 0)
            if request_id in scheduled_tokens and computed <= request.num_prompt_tokens:
                about = self._about(name, request_id)
                self._publish(PrefillProgress(**about, computed=computed, total=request.num_prompt_tokens))
        plan.prefills, self._ended = self._ended, []

    def _end(self, message: PrefillCompleted | PrefillFailed) -> None:
        self._ended.append(message)
        self._publish(message)

    def _publish(self, message: PrefillProgress | PrefillCompleted | PrefillFailed) -> None:
        try:
            self._node.publish(self._node.subjects.prefill(self._own.engine), message)
        except PayloadTooLargeError as error:
            logger.warning("%s; it takes the slower way, with the next step", error)

    def _about(self, name: TransferName, request_id: str) -> dict[str, Any]:
        return {
            "transfer_id": name.transfer_id,
            "source_engine": self._own.engine,
            "source_incarnation": self._own.incarnation,
            "request_id": request_id,
        }
