"""What kvbus uses of vLLM's own NIXL connector, and what must be so before it can be used.

Registering caches, descriptor lists, heterogeneous TP, MLA and hybrid groups are vLLM's. Every internal of vLLM that
is used here or in :mod:`.nixl_plane` stands in :data:`INTERNALS`. Left out is all of upstream's coordination: its side
channel, its notifications' meaning, its leases, its threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.platforms import current_platform
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, UniformTypeKVCacheSpecs

from kvbus.errors import ConfigError

from .backends import check_backends
from .compat import check_internals

logger = logging.getLogger(__name__)

INTERNALS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "nixl.base_worker": (base_worker, ("NixlWrapper", "nixl_agent_config")),
    "BlockPool": (BlockPool, ("take_events",)),
    "mamba_utils": (mamba_utils, ("get_conv_state_layout",)),
    "NixlBaseConnectorWorker": (
        NixlBaseConnectorWorker,
        (
            "register_kv_caches",
            "add_remote_agent",
            "_cleanup_remote_engine",
            "_logical_to_kernel_block_ids",
            "shutdown",
        ),
    ),
    "NixlPushConnectorWorker": (NixlPushConnectorWorker, ("_xfer_blocks_for_req", "_xfer_blocks")),
    "NixlBaseConnectorScheduler": (
        NixlBaseConnectorScheduler,
        ("get_exchange_clipped_blocks", "_get_remote_prefill_token_count", "_truncate_request_for_prefill"),
    ),
}


def current_device() -> Any:
    """The accelerator of the calling thread, None on CPU."""
    if current_platform.device_type == "cpu":
        return None
    return torch.device(current_platform.device_type, torch.accelerator.current_device_index())


def check_upstream() -> None:
    """Raise VllmMismatchError if the installed vLLM lacks what kvbus uses."""
    check_internals(vllm.__version__, INTERNALS)


def check_state_layout(kv_cache_config: Any) -> None:
    """Raise ConfigError if this model has states of convolutions in a layout that NIXL's WRITEs cannot cut by rank."""
    if not kv_cache_config.has_mamba_layers:
        return
    layout = mamba_utils.get_conv_state_layout()
    if layout != "DS":
        raise ConfigError("VLLM_SSM_CONV_STATE_LAYOUT", layout, "DS in the environment, for a model with Mamba layers")
    logger.info("kvbus: the states of Mamba layers lie in the layout that NIXL needs: VLLM_SSM_CONV_STATE_LAYOUT=DS")


def why_no_history(vllm_config: Any, kv_cache_config: Any) -> str:
    """Why this engine cannot give or take the beginning of a conversation; empty if it can.

    Only a cache of full attention keeps all blocks of a prefix. One of a sliding window, or of Mamba states, has holes.
    """
    if not vllm_config.cache_config.enable_prefix_caching:
        return "prefix caching is off"
    if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
        return 'kv_load_failure_policy is not "recompute", so one that does not come would fail the request'
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if len(specs) == 1 and isinstance(specs[0], UniformTypeKVCacheSpecs):
        kinds = {type(each) for each in specs[0].kv_cache_specs.values()}
    else:
        kinds = {type(each) for each in specs}
    if len(specs) != 1 or not kinds <= {FullAttentionSpec, MLAAttentionSpec}:
        return f"the model's cache is not one of full attention: {', '.join(sorted(each.__name__ for each in kinds))}"
    return ""


def why_no_first_token(vllm_config: Any) -> str:
    """Why this engine cannot go on from a token that another one sampled; empty if it can."""
    if vllm_config.model_config.runner_type == "pooling":
        return "the model samples no tokens"
    if vllm_config.speculative_config is not None:
        return "with speculative decoding vLLM has no logits processors"
    if vllm_config.use_v2_model_runner:
        return "vLLM's new model runner takes no logits processors of plugins (VLLM_USE_V2_MODEL_RUNNER=0 is the old)"
    return ""


def cached_group(vllm_config: Any, kv_cache_config: Any) -> tuple[int, int]:
    """The KV group whose blocks say how much of a prompt is cached, and how many tokens one of them holds.

    Groups with full attention hold a prompt from its beginning on; others a window at its end, or a state.

    Raises:
        ConfigError: there is no such group, or no prefix cache.
    """
    wanted = "false, for this engine"
    if not vllm_config.cache_config.enable_prefix_caching:
        raise ConfigError("cache_events", True, f"{wanted} has no prefix cache (--enable-prefix-caching)")
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        if isinstance(group.kv_cache_spec, FullAttentionSpec):
            return number, int(group.kv_cache_spec.block_size)
    raise ConfigError("cache_events", True, f"{wanted}'s model has no layers with full attention")


def _backends(vllm_config: Any) -> list[str]:
    return list(vllm_config.kv_transfer_config.kv_connector_extra_config.get("backends", ["UCX"]))


def prepare_nixl(vllm_config: Any) -> None:
    """What must be done before the first agent is made.

    Raises:
        ConfigError: NIXL cannot load a backend. Its own error is a ``NIXL_ERR_NOT_FOUND`` without a name.
    """
    _load_system_libnl()
    bindings = importlib.import_module(base_worker.NixlWrapper.__module__).nixlBind
    nixl = bindings.nixlAgent("kvbus-check", bindings.nixlAgentConfig())

    def loads(name: str) -> bool:
        try:
            nixl.getPluginParams(name)
        except Exception:  # noqa: BLE001 - NIXL's errors have no common base
            return False
        return True

    package = Path(bindings.__file__).parent
    folders = [Path(os.environ["NIXL_PLUGIN_DIR"])] if "NIXL_PLUGIN_DIR" in os.environ else []
    folders.append(package.parent / f".{package.name}.mesonpy.libs" / "plugins")
    check_backends(_backends(vllm_config), nixl.getAvailPlugins(), loads, folders)


def _load_system_libnl() -> None:
    """Load the system's libnl before NIXL brings its own.

    With RDMA packages installed, UCX loads the system's libibverbs and libnl into a scope where NIXL's own copies come
    first: the system's libnl-route registers itself with the wrong libnl, and the process ends with a segmentation
    fault. Loaded before, it binds to its own.
    """
    with contextlib.suppress(OSError):  # it is not installed, and nothing can be mixed up
        ctypes.CDLL("libnl-route-3.so.200")


class UpstreamBlockRules:
    """What vLLM's NIXL connector knows of a model's blocks: see :class:`.block_rules.BlockRules`."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        self._upstream = NixlBaseConnectorScheduler(vllm_config, engine_id, kv_cache_config)

    def clip(self, block_ids: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        clipped: Sequence[Sequence[int]] = self._upstream.get_exchange_clipped_blocks(block_ids)
        return clipped

    def external_tokens(self, prompt_tokens: int) -> int:
        return int(self._upstream._get_remote_prefill_token_count(prompt_tokens))

    def truncate(self, request: Any) -> None:
        self._upstream._truncate_request_for_prefill(request)


class UpstreamWorker(NixlPushConnectorWorker):  # type: ignore[misc]
    """Upstream's worker without its writer thread.

    Attributes:
        posted: the handles of the job that is being posted: upstream forgets them if a later rank's WRITE raises.
    """

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        self.posted: list[Any] = []
        with _quiet_agent(vllm_config):
            super().__init__(vllm_config, engine_id, kv_cache_config)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        NixlBaseConnectorWorker.register_kv_caches(self, kv_caches)

    def _xfer_blocks(self, *args: Any, **kwargs: Any) -> Any:
        handle = super()._xfer_blocks(*args, **kwargs)
        if handle is not None:
            self.posted.append(handle)
        return handle


@contextlib.contextmanager
def _quiet_agent(vllm_config: Any) -> Iterator[None]:
    """Let upstream's constructor make an agent without a progress thread and without worker threads."""
    make_config = base_worker.nixl_agent_config
    backends = _backends(vllm_config)

    def quiet(**_: Any) -> Any:
        return make_config(enable_prog_thread=False, backends=backends, capture_telemetry=True)

    base_worker.nixl_agent_config = quiet
    try:
        yield
    finally:
        base_worker.nixl_agent_config = make_config
