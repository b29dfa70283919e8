"""The scheduler half: tells the bus what vLLM's scheduler decides, and vLLM's scheduler what the bus says.

Called by EngineCore's thread only. Imports no vLLM: it is handed vLLM's objects.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from kvbus import blocks as block_runs
from kvbus.bus import Bus
from kvbus.config import Config
from kvbus.errors import PayloadTooLargeError
from kvbus.lease import SinkLease
from kvbus.membership import Membership
from kvbus.messages import (
    Cancel,
    Heartbeat,
    PrefillCompleted,
    PrefillFailed,
    PrefillProgress,
    Registration,
    State,
    Wanted,
)
from kvbus.metrics import OncePer
from kvbus.node import Node
from kvbus.registrar import Registrar
from kvbus.sink import SinkScheduler, serve_metadata
from kvbus.subjects import Subjects, is_token
from kvbus.tracing import Recorder

from .identity import TransferName, digest_of, listening_address, name_transfer
from .step import StepPlan

logger = logging.getLogger(__name__)

FIRST_ATTEMPT = 1
ADDRESS_RETRY_S = 0.25
IDLE_WAIT_S = 0.005


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


class SchedulerHalf:
    """See the module's docstring.

    Args:
        own: this engine's first heartbeat.
        pid: of this process; its ancestor serves HTTP.
    """

    def __init__(self, config: Config, own: Heartbeat, rules: BlockRules, bus: Bus, pid: int) -> None:
        self._config, self._own, self._rules, self._pid = config, own, rules, pid
        self._recorder = Recorder(f"kvbus-{own.role.value}", {"kvbus.engine": own.engine})
        self.node = Node(
            bus,
            Subjects(config.namespace),
            name=f"kvbus-{own.engine[:8]}-scheduler",
            membership=Membership(dead_after_s=config.dead_after_s),
            heartbeat_interval_s=config.heartbeat_interval_s,
        )
        self._payloads: dict[int, bytes] = {}
        self._address = config.http_address
        self._block_pool: Any = None
        self._plan = StepPlan()
        self._receiving: dict[str, bool] = {}
        self._queued: dict[str, tuple[dict[str, Any], str]] = {}
        self._prefilling: dict[str, tuple[TransferName, Any]] = {}
        self._requests = 0
        self._once = OncePer()
        self._closed = threading.Event()
        lease = SinkLease(config.write_lease_s, config.max_write_s)
        registrar = Registrar(lease=lease, transfer_timeout_s=config.transfer_timeout_s)
        self._sink = SinkScheduler(self.node, registrar, own.engine, own, self._recorder)
        serve_metadata(self.node, own.engine, own.incarnation, self._payloads)
        self.node.present(self._heartbeat)
        self.node.start()
        threading.Thread(target=self._want_queued, name="kvbus-wanted", daemon=True).start()
        if not self._address:
            threading.Thread(target=self._find_address, name="kvbus-address", daemon=True).start()

    # Set-up

    def bind_block_pool(self, block_pool: Any) -> None:
        self._block_pool = block_pool

    def set_metadata(self, payloads: Mapping[int, bytes]) -> None:
        """NIXL agent metadata of every rank: from now on other engines can meet this one."""
        self._payloads.update(payloads)

    def close(self) -> None:
        self._closed.set()
        self.node.close()
        self._recorder.close()

    # Decode

    def tokens_from_outside(self, request: Any, computed_tokens: int) -> int:
        """How many of the prompt's tokens beyond ``computed_tokens`` will come from a prefill engine."""
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill"):
            return 0
        if reason := self._sink.why_not(_hint(params)):
            self._compute_locally(request, reason)
            return 0
        return max(0, self._rules.external_tokens(request.num_prompt_tokens) - computed_tokens)

    def allocated(self, request: Any, block_ids: Sequence[Sequence[int]], external_tokens: int) -> None:
        """vLLM has allocated ``block_ids`` (those still to be filled) for ``external_tokens`` tokens from outside."""
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill"):
            return
        if external_tokens <= 0:
            self._decline(request, "the prompt is cached")
            return
        params["do_remote_prefill"] = False  # vLLM calls again after the receive, and after a preemption
        self._queued.pop(request.request_id, None)
        prompt_tokens = self._rules.external_tokens(request.num_prompt_tokens)
        registration = Registration(
            **self._sink_of(request),
            blocks=block_runs.to_runs(self._rules.clip(block_ids)),
            prompt_tokens=prompt_tokens,
            cached_tokens=prompt_tokens - external_tokens,
            digest=digest_of(request.prompt_token_ids, prompt_tokens),
            traceparent=_traceparent(request),
        )
        self._receiving[request.request_id] = True
        self._plan.expect[request.request_id] = registration.attempt
        try:
            self._sink.register(registration, _hint(params))
        except PayloadTooLargeError as error:
            self._complain_local(request, str(error))
            self._abandon(request.request_id)

    # Prefill

    def arrived(self, request: Any) -> None:
        """A new request is in the scheduler."""
        self._requests += 1
        params = request.kv_transfer_params
        if not params:
            return
        if params.get("do_remote_prefill"):
            self._queued[request.request_id] = (self._sink_of(request), _hint(params))
        if not params.get("do_remote_decode"):
            return
        self._rules.truncate(request)
        name = name_transfer(request.request_id, params)
        self._prefilling[request.request_id] = (name, request)
        self._publish_prefill(
            PrefillProgress(**self._about(name, request.request_id), computed=0, total=request.num_prompt_tokens)
        )

    # Both

    def finished(
        self, request: Any, block_ids: Sequence[Sequence[int]], *, prefilled: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request is over; returns whether its blocks must stay, and the parameters for a sequential router.

        Args:
            prefilled: it ended well, with its whole prompt computed.
        """
        self._requests -= 1
        request_id, params = request.request_id, request.kv_transfer_params
        if not params:
            return False, None
        if params.get("do_remote_decode"):
            return self._finish_prefill(request, block_ids, prefilled)
        if params.get("do_remote_prefill"):
            self._decline(request, "finished before it was scheduled")
        elif request_id in self._receiving:
            self._sink.aborted(request_id)  # vLLM keeps the blocks until the worker half reports the receive
        return False, None

    def plan_step(self, scheduled_tokens: Mapping[str, int]) -> StepPlan:
        """What the worker half must know in this step; ``scheduled_tokens`` of each request that runs in it."""
        for given_up in self._sink.poll():
            self._abandon(given_up.request_id)
        if self._prefilling:
            self._publish_progress(scheduled_tokens)
        plan, self._plan = self._plan, StepPlan()
        if not scheduled_tokens and not plan and self._receiving:
            # Nothing to run and nothing to say: vLLM would step a thousand times a second for as long as a prefill
            # takes, on two processes that other engines may need the cores of.
            self._sink.wait_for_news(IDLE_WAIT_S)
        return plan

    def step_done(self, received: Sequence[str]) -> None:
        """The workers have reported these receives as over."""
        for request_id in received:
            if self._receiving.pop(request_id, False):
                self._sink.received(request_id)

    def _finish_prefill(
        self, request: Any, block_ids: Sequence[Sequence[int]], prefilled: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        request_id, params = request.request_id, request.kv_transfer_params
        name = name_transfer(request_id, params)
        self._prefilling.pop(request_id, None)
        runs = block_runs.to_runs(self._rules.clip(block_ids))
        if not prefilled or not block_runs.count(runs):
            reason = "aborted" if not prefilled else "no blocks"
            self._publish_prefill(PrefillFailed(**self._about(name, request_id), reason=reason), reliable=True)
            return False, None
        completed = PrefillCompleted(
            **self._about(name, request_id),
            blocks=runs,
            tokens=request.num_computed_tokens,
            digest=digest_of(request.prompt_token_ids, request.num_computed_tokens),
            traceparent=_traceparent(request),
        )
        self._publish_prefill(completed, reliable=True)
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": name.base,
            "prefill_engine_id": self._own.engine,
        }

    def _publish_prefill(
        self, message: PrefillProgress | PrefillCompleted | PrefillFailed, *, reliable: bool = False
    ) -> None:
        if reliable and not isinstance(message, PrefillProgress):
            self._plan.prefills.append(message)
        try:
            self.node.publish(self.node.subjects.prefill(self._own.engine), message)
        except PayloadTooLargeError as error:
            logger.warning("%s; it takes the slower way, with the next step", error)

    def _publish_progress(self, scheduled_tokens: Mapping[str, int]) -> None:
        for request_id, (name, request) in self._prefilling.items():
            computed = request.num_computed_tokens + scheduled_tokens.get(request_id, 0)
            if request_id in scheduled_tokens and computed < request.num_prompt_tokens:
                about = self._about(name, request_id)
                self._publish_prefill(PrefillProgress(**about, computed=computed, total=request.num_prompt_tokens))

    def _abandon(self, request_id: str) -> None:
        if request_id in self._receiving:
            self._receiving[request_id] = False
            self._plan.abandon.append(request_id)

    def _compute_locally(self, request: Any, reason: str) -> None:
        self._complain_local(request, reason)
        self._decline(request, reason)

    def _complain_local(self, request: Any, reason: str) -> None:
        self.node.counters.add("computed_locally")
        if self._once.due(reason):
            logger.warning(
                "kvbus: expected remote KV, computed locally: %s (request %s; the reason is logged once a minute)",
                reason,
                request.request_id,
            )

    def _decline(self, request: Any, reason: str) -> None:
        """Tell the prefill side that nobody will take this transfer."""
        params = request.kv_transfer_params
        params["do_remote_prefill"] = False
        self._queued.pop(request.request_id, None)
        self._sink.unwanted(Cancel(**self._sink_of(request), reason=reason[:256]), _hint(params))

    def _sink_of(self, request: Any) -> dict[str, Any]:
        return {
            "transfer_id": name_transfer(request.request_id, request.kv_transfer_params).transfer_id,
            "attempt": FIRST_ATTEMPT,
            "sink_engine": self._own.engine,
            "sink_incarnation": self._own.incarnation,
            "request_id": request.request_id,
        }

    def _want_queued(self) -> None:
        """Renew the block leases of what waits in vLLM's queue; from a thread that does not depend on vLLM's steps."""
        while not self._closed.wait(self._config.block_lease_s / 3):
            for about, hint in list(self._queued.values()):
                self._sink.want(Wanted(**about), hint)

    def _about(self, name: TransferName, request_id: str) -> dict[str, Any]:
        return {
            "transfer_id": name.transfer_id,
            "source_engine": self._own.engine,
            "source_incarnation": self._own.incarnation,
            "request_id": request_id,
        }

    def _heartbeat(self, number: int) -> Heartbeat:
        pool = self._block_pool
        ready = bool(self._payloads) and bool(self._address)
        return replace(
            self._own,
            number=number,
            state=State.READY if ready else State.STARTING,
            address=self._address,
            free_blocks=pool.get_num_free_blocks() if pool is not None else 0,
            total_blocks=pool.num_gpu_blocks if pool is not None else 0,
            requests=max(0, self._requests),
        )

    def _find_address(self) -> None:
        while not self._address and not self._closed.wait(ADDRESS_RETRY_S):
            self._address = listening_address(self._pid, self.node.bus.local_host or "127.0.0.1")
        logger.info("kvbus: this engine serves HTTP at %s", self._address)


def _hint(params: Mapping[str, Any]) -> str:
    """The prefill engine that the router names; what cannot be an engine's id is no hint."""
    hint = params.get("prefill_engine_id")
    return hint if isinstance(hint, str) and is_token(hint) else ""


def _traceparent(request: Any) -> str:
    headers = getattr(request, "trace_headers", None) or {}
    found = headers.get("traceparent") or (request.kv_transfer_params or {}).get("traceparent")
    return found if isinstance(found, str) and len(found) <= 128 else ""
