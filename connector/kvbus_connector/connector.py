"""The connector that vLLM instantiates: checks at start, then forwards each hook to one of the two halves."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from kvbus.bus import NatsBus, connection_name
from kvbus.config import Config
from kvbus.wire import Heartbeat, check_token

from . import nixl_plane, reason, vllm_nixl
from .compat import check_version, check_vllm_config
from .identity import engine_secret, heartbeat_of
from .plugin import choose_state_layout
from .prometheus import BusPromMetrics, BusStats, Meter
from .scheduler import SchedulerHalf
from .step import StepPlan
from .worker import WorkerHalf

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

# vLLM imports this module in each process, and only where it is the connector, before anything asks for the layout.
choose_state_layout()

_PREFILLED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class KVBusMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """A :class:`StepPlan` in the form that vLLM ships."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan


class KVBusConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Push-based KV transfer, coordinated over NATS.

    Raises:
        ConfigError: a bad value in ``kv_connector_extra_config``, or a vLLM setting that is not supported.
        VllmMismatchError: the installed vLLM is not one that this connector works with.
    """

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_like_vllm()
        self._meter = Meter()
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        with reason.told():
            self._start(vllm_config, role, kv_cache_config)

    def _start(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        config, own, cache_group = _checked(vllm_config, kv_cache_config)
        engine = own.engine
        if role is KVConnectorRole.SCHEDULER:
            rules = vllm_nixl.UpstreamBlockRules(vllm_config, engine, kv_cache_config)
            bus = NatsBus(config.servers, connection_name(engine, own.incarnation))
            self._scheduler = SchedulerHalf(config, own, rules, bus, os.getpid(), engine_secret(), cache_group)
        else:
            device = vllm_nixl.current_device()
            self._worker = WorkerHalf(
                config,
                own,
                lambda: nixl_plane.NixlPlane(vllm_config, engine, kv_cache_config, device),
                lambda name: NatsBus(config.servers, name),
                engine_secret(),
            )

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> BusStats:
        return BusStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> BusPromMetrics:
        return BusPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        layout: str | None = NixlBaseConnector.get_required_kvcache_layout(vllm_config)
        return layout

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return True

    # Scheduler process

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduling.bind_block_pool(kv_cache_manager.block_pool)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self._scheduling.set_metadata({tp: msgspec.msgpack.encode(ours) for (_, tp), ours in metadata.items()})

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        groups: tuple[int, ...] = self._kv_cache_config.transfer_group_ids
        return groups

    def on_new_request(self, request: Request) -> None:
        self._scheduling.arrived(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens = self._scheduling.tokens_from_outside(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        missing, all_blocks = blocks.get_unhashed_block_ids_all_groups(), blocks.get_block_ids()
        self._scheduling.allocated(request, missing, num_external_tokens, all_blocks)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVBusMetadata:
        return KVBusMetadata(self._scheduling.plan_step(scheduler_output.num_scheduled_tokens))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        reported = (
            connector_output.finished_recving,
            connector_output.failed_recving,
            connector_output.finished_sending,
        )
        received, failed, sent = (each if each is not None else set() for each in reported)
        self._scheduling.admit(received, failed, sent)
        # vLLM looks at these next, and not at what was None before; failed_recving it has looked at already.
        connector_output.finished_recving, connector_output.finished_sending = received, sent
        self._scheduling.step_done(received, failed, sent)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduling.finished(request, block_ids, prefilled=request.status in _PREFILLED)

    # Worker process

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        with reason.told():
            self._working.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        plane = self._working.plane
        return plane.handshake_metadata if isinstance(plane, nixl_plane.NixlPlane) else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if isinstance(self._connector_metadata, KVBusMetadata):
            self._working.begin_step(self._connector_metadata.plan)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        report = self._working.results()
        return KVConnectorTransferResults(
            finished_sending=set(report.released),
            finished_recving={arrived.request_id for arrived in report.arrived},
            failed_recving={arrived.request_id for arrived in report.arrived if not arrived.ok},
        )

    def wait_for_layer_load(self, layer_name: str) -> None:
        """KV comes for whole prompts, before they are scheduled: no layer has to wait."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """KV leaves when the prefill is complete: no layer is saved by itself."""

    def wait_for_save(self) -> None:
        """Blocks are kept until their WRITE has ended: nothing to wait for."""

    # Both

    def get_kv_connector_stats(self) -> BusStats | None:
        half = self._scheduler or self._worker
        return self._meter.read(half.all_counters) if half is not None else None

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()

    @property
    def _scheduling(self) -> SchedulerHalf:
        assert self._scheduler is not None, "a hook of the scheduler process was called in a worker"
        return self._scheduler

    @property
    def _working(self) -> WorkerHalf:
        assert self._worker is not None, "a hook of a worker was called in the scheduler process"
        return self._worker


def _checked(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> tuple[Config, Heartbeat, int]:
    """What this engine is configured to be, and the KV group that it tells of; raises what the class says."""
    check_version(vllm.__version__)
    vllm_nixl.check_upstream()
    check_vllm_config(vllm_config)
    vllm_nixl.check_state_layout(kv_cache_config)
    check_token("engine_id", vllm_config.kv_transfer_config.engine_id)
    config = Config.from_mapping(vllm_config.kv_transfer_config.kv_connector_extra_config)
    own = heartbeat_of(vllm_config, vllm.__version__, config)
    group, block_size = vllm_nixl.cached_group(vllm_config, kv_cache_config) if config.cache_events else (0, 0)
    obstacle = vllm_nixl.why_no_history(vllm_config, kv_cache_config) if config.history else ""
    if obstacle:
        logger.info("kvbus: conversations' histories stay where they are: %s", obstacle)
    own = replace(own, history=config.history and not obstacle, cache_block_size=block_size)
    obstacle = vllm_nixl.why_no_first_token(vllm_config) if config.first_token else ""
    if obstacle:
        logger.info("kvbus: each decode samples its own first token: %s", obstacle)
    own = replace(own, first_token=config.first_token and not obstacle)
    return config, own, group


def _log_like_vllm() -> None:
    """Let kvbus's log lines appear where and how vLLM's do, unless somebody has configured them."""
    theirs = logging.getLogger("vllm")
    for name in ("kvbus", "kvbus_connector"):
        ours = logging.getLogger(name)
        if not ours.handlers and theirs.handlers:
            ours.handlers, ours.propagate = list(theirs.handlers), False
            ours.setLevel(theirs.getEffectiveLevel())
