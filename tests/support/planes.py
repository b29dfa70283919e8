"""Two ends of a data plane in one process: the in-memory one, and the real one on vLLM's and NIXL's code."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from kvbus.engine import Transport
from kvbus.engine.memory_transport import BLOCK_BYTES, Fabric, MemoryTransport

NUM_BLOCKS = 64


class End(Protocol):
    """One rank's transport and its memory, block by block."""

    name: str
    block_bytes: int

    @property
    def transport(self) -> Transport: ...

    @property
    def metadata(self) -> bytes: ...

    def fill(self, block: int, value: int) -> None: ...

    def read(self, block: int) -> int | None:
        """The value that the whole block holds; None if it was never filled."""
        ...


class MemoryEnd:
    block_bytes = BLOCK_BYTES

    def __init__(self, fabric: Fabric, name: str) -> None:
        self.name, self.transport = name, MemoryTransport(fabric, name, num_blocks=NUM_BLOCKS)

    @property
    def metadata(self) -> bytes:
        return self.transport.metadata

    def fill(self, block: int, value: int) -> None:
        self.transport.content[block] = str(value)

    def read(self, block: int) -> int | None:
        found = self.transport.content.get(block)
        return None if found is None else int(found)


@dataclass
class RealEnd:
    """A :class:`NixlPlane` over two layers' caches of the tiny model's shape."""

    name: str
    plane: Any
    caches: dict[str, Any]

    @property
    def transport(self) -> Transport:
        return self.plane  # type: ignore[no-any-return]

    @property
    def metadata(self) -> bytes:
        import msgspec

        return msgspec.msgpack.encode(self.plane.handshake_metadata)

    @property
    def block_bytes(self) -> int:
        return sum(cache[0].nbytes for cache in self.caches.values())

    def fill(self, block: int, value: int) -> None:
        for layer, cache in enumerate(self.caches.values()):
            cache[block].fill_(value + layer)

    def read(self, block: int) -> int | None:
        values = {float(cache[block].min()) - layer for layer, cache in enumerate(self.caches.values())}
        values |= {float(cache[block].max()) - layer for layer, cache in enumerate(self.caches.values())}
        assert len(values) == 1, f"block {block} is torn: {values}"
        value = int(values.pop())
        return None if value < 0 else value


def memory_ends() -> Iterator[tuple[End, End]]:
    fabric = Fabric()
    yield MemoryEnd(fabric, "P"), MemoryEnd(fabric, "D")


def real_ends(model: str, port: int) -> Iterator[tuple[End, End]]:
    os.environ.setdefault("UCX_TLS", "tcp,self,sm")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    affinity = os.sched_getaffinity(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch and vLLM warn about themselves
        ends = _boot_real_ends(model, port)
    try:
        yield ends[0], ends[1]
    finally:
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        for each in ends:
            each.plane.close()
        del each
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cleanup_dist_env_and_memory()
        ends.clear()
        gc.collect()  # upstream's finalizer does not survive the interpreter's end
        os.sched_setaffinity(0, affinity)  # vLLM binds whoever makes a plane to one core


def _boot_real_ends(model: str, port: int) -> list[RealEnd]:
    from vllm.config import KVTransferConfig, set_current_vllm_config
    from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs

    def configure(name: str) -> Any:
        transfer = KVTransferConfig(kv_connector="NixlPushConnector", kv_role="kv_both", engine_id=name)
        arguments = EngineArgs(
            model=model, dtype="bfloat16", enforce_eager=True, block_size=32, kv_transfer_config=transfer
        )
        config = arguments.create_engine_config()
        config.cache_config.kv_cache_layout = "LBHNC"
        return config

    configs = {name: configure(name) for name in ("P", "D")}
    with set_current_vllm_config(configs["P"]):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
        initialize_model_parallel(1, 1)
    return [_real_end(name, config) for name, config in configs.items()]


def _real_end(name: str, config: Any) -> RealEnd:
    import torch
    from kvbus_connector.nixl_plane import NixlPlane
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    layers = [f"model.layers.{number}.self_attn.attn" for number in range(2)]
    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    caches_config = KVCacheConfig(
        num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(layers, spec)]
    )
    plane = NixlPlane(config, name, caches_config, None)
    caches = {
        layer: torch.full((NUM_BLOCKS, 2, 32, 128), number - 9.0, dtype=torch.bfloat16)
        for number, layer in enumerate(layers)
    }
    plane.register(caches)
    return RealEnd(name, plane, caches)
