"""The scheduler half: tells the bus what vLLM's scheduler decides, and vLLM's scheduler what the bus says.

Called by EngineCore's thread only. Imports no vLLM: it is handed vLLM's objects.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvbus.bus import Bus, Keys, Node
from kvbus.config import Config
from kvbus.engine import SinkScheduler, serve_metadata, sources_of
from kvbus.metrics import Counters
from kvbus.protocol import Membership, SinkLease, to_all_interval_s
from kvbus.protocol.decode import Registrar
from kvbus.trace import Marker, serve_clock
from kvbus.wire import DrainReply, DrainRequest, Heartbeat, State, Subjects

from .address import wait_for_address
from .block_rules import BlockRules
from .cache_events import CacheEvents
from .door import Door
from .history import HistoryTaker
from .history_giver import HistoryGiver
from .history_worth import PrefillSpeed
from .hits import Hits
from .incoming import Incoming
from .outgoing import Outgoing
from .step import StepPlan
from .steps import Steps
from .timing import RegistrationTiming

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 0.005


class SchedulerHalf:
    """See the module's docstring.

    Args:
        own: this engine's first heartbeat.
        pid: of this process; its ancestor serves HTTP.
        secret: what all processes of this engine share; see :mod:`kvbus.bus.keys`.
        cache_group: the KV group whose blocks :class:`CacheEvents` tells.
    """

    def __init__(
        self,
        config: Config,
        own: Heartbeat,
        rules: BlockRules,
        bus: Bus,
        pid: int,
        secret: bytes,
        cache_group: int = 0,
    ) -> None:
        keys = Keys(secret, own.engine, own.incarnation)
        own = keys.introduce(own)
        self._config, self._own, self._pid = config, own, pid
        self.node = _make_node(config, own, bus, keys)
        self._payloads: dict[int, bytes] = {}
        self._address = config.http_address
        self._block_pool: Any = None
        self._block_size = int(dict(own.compat).get("block_size", 16))
        self._requests = 0
        self._looked_at = 0.0
        self._draining = False
        self._closed = threading.Event()
        self._door = Door(self.node.counters)
        lease = SinkLease(config.write_lease_s, config.max_write_s)
        registrar = Registrar(lease=lease, transfer_timeout_s=config.transfer_timeout_s, unclaimed_s=config.unclaimed_s)
        self._sink = SinkScheduler(self.node, registrar, own.engine, own)
        marking = Marker(self.node, own.engine, own.role)
        self._incoming = Incoming(
            own,
            rules,
            self._sink,
            self.node.counters,
            marking,
            RegistrationTiming(config.registration),
            self._room,
            config.unclaimed_s,
            config.local_prefill_tokens,
        )
        self._outgoing = Outgoing(own, rules, self.node, marking)
        self._speed = PrefillSpeed()
        self._steps = Steps()
        self._giver = HistoryGiver(own, self._outgoing, self._block_size, self._steps)
        about = (self.node.counters, marking, self._block_size, self._speed, self._steps)
        self._taker = HistoryTaker(own, self._sink, *about)
        self._hits = Hits()
        self._cache = CacheEvents(self.node, own, cache_group) if own.cache_block_size else None
        self._sink.watch_prefills(self._incoming.prefill_moved)
        self._sink.watch_prefills(self._taker.moved)
        self._sink.serve_rebind(self._incoming.rebind)
        self.node.serve(self.node.subjects.drain(own.engine), DrainRequest, self._drain)
        serve_metadata(self.node, own, self._payloads)
        serve_clock(self.node, own.engine)
        self.node.present(self._heartbeat)
        self.node.start()
        threading.Thread(target=self._want_queued, name="kvbus-wanted", daemon=True).start()
        if not self._address:
            threading.Thread(target=self._find_address, name="kvbus-address", daemon=True).start()

    @property
    def all_counters(self) -> list[Counters]:
        return [self.node.counters]

    # Set-up

    def bind_block_pool(self, block_pool: Any) -> None:
        self._block_pool = block_pool
        if self._cache is not None:
            self._cache.watch(block_pool)

    def set_metadata(self, payloads: Mapping[int, bytes]) -> None:
        """NIXL agent metadata of every rank: from now on other engines can meet this one."""
        self._payloads.update(payloads)

    def close(self) -> None:
        self._closed.set()
        if self._cache is not None:
            self._cache.close()
        self.node.close()

    # vLLM's hooks

    def arrived(self, request: Any) -> None:
        """A new request is in the scheduler."""
        self._requests += 1
        if not isinstance(request.kv_transfer_params, dict | None):
            request.kv_transfer_params = None  # a client of this engine may have said anything
        self._looked_at = time.monotonic()
        self._incoming.arrived(request)
        self._outgoing.arrived(request)
        self._taker.arrived(request)

    def tokens_from_outside(self, request: Any, computed_tokens: int) -> int | None:
        """See :meth:`Incoming.tokens_from_outside`; of a prefill, :meth:`HistoryTaker.tokens_from_outside`."""
        self._hits.looked_up(request, computed_tokens)
        params = request.kv_transfer_params
        end = self._taker if params and params.get("do_remote_decode") else self._incoming
        return end.tokens_from_outside(request, computed_tokens)

    def allocated(
        self,
        request: Any,
        block_ids: Sequence[Sequence[int]],
        external_tokens: int,
        all_block_ids: Sequence[Sequence[int]] = (),
    ) -> None:
        """vLLM has allocated blocks.

        Args:
            block_ids: those still to be filled.
            external_tokens: as :meth:`tokens_from_outside` said.
            all_block_ids: those that were cached, too.
        """
        self._incoming.allocated(request, block_ids, external_tokens)
        self._taker.allocated(request, block_ids, external_tokens)
        if external_tokens and self._incoming.awaits(request.request_id):
            self._giver.offer(request, all_block_ids, request.num_prompt_tokens - external_tokens)

    def finished(
        self, request: Any, block_ids: Sequence[Sequence[int]], *, prefilled: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request is over; returns whether its blocks must stay, and the parameters for a sequential router.

        Args:
            prefilled: it ended well, with its whole prompt computed.
        """
        self._requests -= 1
        self._hits.finished(request)
        self._incoming.finished(request)
        self._taker.finished(request)
        params = request.kv_transfer_params
        if params and params.get("do_remote_decode"):
            return self._outgoing.finished(request, block_ids, prefilled=prefilled)
        return False, None

    def plan_step(self, scheduled_tokens: Mapping[str, int]) -> StepPlan:
        """What the worker half must know in this step; ``scheduled_tokens`` of each request that runs in it."""
        self._looked_at = time.monotonic()
        self._speed.begin_step(sum(scheduled_tokens.values()), self._looked_at)
        self._steps.plan(bool(scheduled_tokens))
        plan = StepPlan(public_key=self._own.public_key)
        for given_up in self._sink.poll():
            self._incoming.give_up(given_up.request_id, given_up.reason)
            self._taker.give_up(given_up.request_id, given_up.reason)
        self._incoming.plan(plan, scheduled_tokens)
        expect, abandon = self._taker.plan()
        plan.expect.update(expect)
        plan.abandon += abandon
        hurry = self._giver.plan() or self._taker.hurries
        self._outgoing.plan(plan, scheduled_tokens)
        if not scheduled_tokens and not plan and not hurry and (self._incoming.waiting or self._taker.waiting):
            # Nothing to run and nothing to say: vLLM would step a thousand times a second for as long as a prefill
            # takes, on two processes that other engines may need the cores of.
            self._sink.wait_for_news(IDLE_WAIT_S)
        return plan

    def admit(self, received: set[str], failed: set[str], sent: set[str]) -> None:
        """The last door before vLLM, which ends the engine for an id that it does not wait for: such are taken out."""
        self._speed.end_step(time.monotonic())
        self._giver.admit(received, failed, sent)
        self._door.keep(received, self._awaits, "finished_recving")
        self._door.keep(failed, self._awaits, "failed_recving")
        self._door.keep(sent, self._outgoing.holds, "finished_sending")

    def step_done(self, received: Collection[str], failed: Collection[str], sent: Collection[str]) -> None:
        """The workers have reported these receives as over, some of them as failed, and no longer need ``sent``."""
        self._incoming.reported(received, failed)
        self._taker.reported(received, failed)
        self._outgoing.released(sent)

    def _awaits(self, request_id: str) -> bool:
        return self._incoming.awaits(request_id) or self._taker.awaits(request_id)

    # Other threads

    def _want_queued(self) -> None:
        """Block leases are renewed from a thread that does not depend on vLLM's steps."""
        while not self._closed.wait(self._config.block_lease_s / 3):
            self._incoming.want_queued()

    @property
    def _busy(self) -> int:
        return max(0, self._requests) + self._outgoing.held

    @property
    def _step_s(self) -> float:
        """For how long vLLM has not looked for new requests: it does so before each step, and whenever it has none."""
        return round(time.monotonic() - self._looked_at, 1) if self._requests > 0 else 0.0

    def _drain(self, _: str, request: DrainRequest) -> DrainReply:
        if self._draining is request.undo:
            self._draining = not request.undo
            what = "draining" if self._draining else "no longer draining"
            logger.info("kvbus: %s, as %s asked", what, request.sender)
            self.node.announce()
        return DrainReply(self._own.engine, self._own.incarnation, self._busy)

    def _room(self, tokens: int) -> float:
        pool = self._block_pool
        if pool is None:
            return 1.0
        free, total = int(pool.get_num_free_blocks()), int(pool.num_gpu_blocks)
        return (free - tokens / self._block_size) / total

    def _heartbeat(self, number: int) -> Heartbeat:
        pool = self._block_pool
        ready = bool(self._payloads) and bool(self._address)
        state = State.DRAINING if self._draining else State.READY if ready else State.STARTING
        return replace(
            self._own,
            number=number,
            state=state,
            address=self._address,
            free_blocks=pool.get_num_free_blocks() if pool is not None else 0,
            total_blocks=pool.num_gpu_blocks if pool is not None else 0,
            requests=self._busy,
            queued_tokens=self._outgoing.queued_tokens,
            step_s=self._step_s,
            cache_number=self._cache.number if self._cache is not None else 0,
            prompt_tokens=self._hits.prompt_tokens,
            cached_tokens=self._hits.cached_tokens,
        )

    def _find_address(self) -> None:
        self._address = wait_for_address(self._pid, lambda: self.node.bus.local_host or "127.0.0.1", self._closed)


def _make_node(config: Config, own: Heartbeat, bus: Bus, keys: Keys) -> Node:
    return Node(
        bus,
        Subjects(config.namespace),
        name=f"kvbus-{own.engine[:8]}-scheduler",
        membership=Membership(dead_after_s=config.dead_after_s),
        heartbeat_interval_s=config.heartbeat_interval_s,
        to_all_interval_s=to_all_interval_s(config.heartbeat_interval_s, config.dead_after_s),
        hears=sources_of(own),
        keys=keys,
        speaker=own.engine,
    )
