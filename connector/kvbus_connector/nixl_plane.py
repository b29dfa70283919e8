"""The data plane: vLLM's own NIXL worker code (:mod:`.vllm_nixl`) behind kvbus's port ``Transport``.

The one rule: everything here, the constructor too, runs on the writer thread. NIXL's agent has no lock and no progress
thread, which would spin at 100 % of a core in each worker.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    NixlAgentMetadata,
    NixlHandshakePayload,
    RemoteMeta,
    ReqMeta,
)
from vllm.platforms import current_platform

from kvbus.errors import PeerRefusedError, TransferRefusedError
from kvbus.protocol.prefill import WriteEnded, WriteJob
from kvbus.wire import blocks

from .vllm_nixl import UpstreamWorker, check_upstream, prepare_nixl

logger = logging.getLogger(__name__)

HELLO = b"kvbus: hello"
MAX_REASON_CHARS = 256


@dataclass(slots=True)
class _Write:
    job: WriteJob
    handles: list[Any]
    failure: str = ""
    nbytes: int = 0


class NixlPlane:
    """See the module's docstring, and ``kvbus.engine.transport.Transport``.

    Args:
        device: where the caches are: :func:`.vllm_nixl.current_device`, called by the worker's main thread.
    """

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any, device: Any) -> None:
        check_upstream()
        prepare_nixl(vllm_config)
        if device is not None:
            current_platform.set_device(device)  # without a context in this thread UCX gives up its GPU transports
        # On CPU upstream binds the calling thread to a core that it keeps for transfers: this one, as it should be.
        self._upstream = UpstreamWorker(vllm_config, engine_id, kv_cache_config)
        self.rank: int = self._upstream.tp_rank
        self.ranks: int = self._upstream.world_size
        self._writes: list[_Write] = []

    @property
    def handshake_metadata(self) -> Any:
        """What other engines need to write here; None before :meth:`register`."""
        return self._upstream.xfer_handshake_metadata

    def register(self, kv_caches: dict[str, Any]) -> None:
        self._upstream.register_kv_caches(kv_caches)

    def peer_ranks(self, tp_size: int) -> Sequence[int]:
        topology = self._upstream.transfer_topo
        return [int(rank) for rank in topology.handshake_target_ranks(tp_size, 1)]

    def add_peer(self, engine: str, tp_size: int, metadata: Mapping[int, bytes]) -> int:
        agents: dict[tuple[int, int], str] = {}
        num_blocks = 0
        try:
            for rank, payload in metadata.items():
                theirs = _decode_metadata(payload)
                self._check_fit(engine, theirs)
                agents[0, rank] = self._upstream.add_remote_agent(theirs, rank, tp_size, theirs.dcp_size)
                num_blocks = theirs.num_blocks // theirs.physical_blocks_per_logical_kv_block
                self._connect(agents[0, rank])
            self._upstream._remote_agents[engine] = agents
        except PeerRefusedError:
            self._forget(engine, agents)
            raise
        except Exception as error:
            self._forget(engine, agents)
            raise PeerRefusedError(engine, f"{type(error).__name__}: {error}") from error
        return num_blocks

    def drop_peer(self, engine: str) -> None:
        if engine in self._upstream._remote_agents:
            self._upstream._cleanup_remote_engine(engine, log_eviction=False)

    def post(self, job: WriteJob, notification: str) -> None:
        upstream = self._upstream
        key = f"{job.transfer_id}/{job.attempt}"
        source = blocks.from_runs(job.source_blocks)
        physical = upstream._logical_to_kernel_block_ids(source, upstream._physical_blocks_per_logical_kv_block)
        remote = RemoteMeta(
            block_ids=blocks.from_runs(job.sink_blocks),
            host="",
            port=0,
            engine_id=job.sink_engine,
            request_id=notification,
        )
        meta = ReqMeta(local_block_ids=source, local_physical_block_ids=physical, tp_size=1, remote=remote)
        handles: list[Any] = []
        upstream.posted = handles
        failure = ""
        try:
            upstream._xfer_blocks_for_req(key, meta)
        except Exception as error:  # noqa: BLE001 - NIXL's errors have no common base
            failure = f"{type(error).__name__}: {error}"
        upstream._sending_transfers.pop(key, None)
        if key in upstream._send_failures:
            upstream._send_failures.discard(key)
            failure = failure or "NIXL refused a WRITE"
        if not handles:
            raise TransferRefusedError(failure or "no blocks to write")
        self._writes.append(_Write(job, handles, failure))

    def poll(self) -> list[WriteEnded]:
        ended: list[WriteEnded] = []
        for write in list(self._writes):
            write.handles = [handle for handle in write.handles if not self._has_ended(write, handle)]
            if not write.handles:
                self._writes.remove(write)
                job = write.job
                ended.append(WriteEnded(job.transfer_id, job.attempt, write.nbytes, write.failure[:MAX_REASON_CHARS]))
        return ended

    def notifications(self) -> list[str]:
        found: list[str] = []
        for notifications in self._upstream.nixl_wrapper.get_new_notifs().values():
            # Upstream appends its own world size to what it is told to send.
            heard = (raw for raw in notifications if raw != HELLO)
            found += [raw.decode("utf-8", "replace").rpartition(":")[0] for raw in heard]
        return found

    def close(self) -> None:
        for write in self._writes:
            for handle in write.handles:
                self._release(write, handle)
        self._upstream.shutdown()

    def _has_ended(self, write: _Write, handle: Any) -> bool:
        nixl = self._upstream.nixl_wrapper
        try:
            state = nixl.check_xfer_state(handle)
        except Exception as error:  # noqa: BLE001 - NIXL's errors have no common base
            state, write.failure = "ERR", f"{type(error).__name__}: {error}"
        if state == "PROC":
            return False
        if state == "DONE":
            write.nbytes += int(nixl.get_xfer_telemetry(handle).totalBytes)
        else:
            write.failure = write.failure or f"NIXL reports {state}"
        return self._release(write, handle)

    def _release(self, write: _Write, handle: Any) -> bool:
        """Whether NIXL has let go of the handle; if not, the WRITE may still be running and is asked about again."""
        try:
            self._upstream.nixl_wrapper.release_xfer_handle(handle)
        except Exception as error:  # noqa: BLE001 - as above
            logger.warning("kvbus: NIXL keeps the WRITE of %s: %s", write.job.transfer_id, error)
            return False
        return True

    def _check_fit(self, engine: str, theirs: NixlAgentMetadata) -> None:
        mine = self._upstream.xfer_handshake_metadata
        ours = _decode_metadata(msgspec.msgpack.encode(mine))
        if theirs.engine_id != engine:
            raise PeerRefusedError(engine, f"the metadata is of engine {theirs.engine_id}")
        for name in ("block_size", "physical_blocks_per_logical_kv_block", "kv_cache_layout", "attn_backend_name"):
            if getattr(ours, name) != getattr(theirs, name):
                raise PeerRefusedError(engine, f"{name}: {getattr(ours, name)} here, {getattr(theirs, name)} there")

    def _connect(self, agent: str) -> None:
        """Make contact now rather than at the first WRITE; not all backends need or know it.

        UCX connects when something is sent, so something is.
        """
        try:
            self._upstream.nixl_wrapper.make_connection(agent)
            self._upstream.nixl_wrapper.send_notif(agent, HELLO)
        except Exception as error:  # noqa: BLE001 - as above; the first WRITE will tell
            logger.debug("kvbus: no connection ahead of time to %s: %s", agent, error)

    def _forget(self, engine: str, agents: Mapping[tuple[int, int], str]) -> None:
        self._upstream._remote_agents[engine] = dict(agents)
        try:
            self._upstream._cleanup_remote_engine(engine, log_eviction=False)
        except Exception as error:  # noqa: BLE001 - as above
            logger.warning("kvbus: peer engine %s is not wholly forgotten: %s", engine, error)


def _decode_metadata(payload: bytes) -> Any:
    handshake = msgspec.msgpack.decode(payload, type=NixlHandshakePayload)
    return msgspec.msgpack.decode(handshake.agent_metadata_bytes, type=NixlAgentMetadata)
