"""The real connector, with WRITEs, handshakes or steps held back when a test says so (:mod:`support.hurt`).

vLLM loads it by ``kv_connector_module_path``. Everything that is not held back is the real thing.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from kvbus_connector import connector, nixl_plane

from kvbus.bus import NatsBus
from kvbus.errors import TransferRefusedError
from kvbus.protocol.prefill import WriteEnded, WriteJob
from support.hurt import Hurt

_hurt = Hurt.from_environment()


@dataclass(frozen=True)
class _Held:
    job: WriteJob
    notification: str
    due: float

    def failed(self, why: str) -> WriteEnded:
        return WriteEnded(self.job.transfer_id, self.job.attempt, failure=why[:256])


class HurtPlane(nixl_plane.NixlPlane):
    """To the rank a WRITE that is held is one that the network has not carried yet: it lands late, or fails with the
    peer's connection."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._held: list[_Held] = []
        self._failed: list[WriteEnded] = []

    def post(self, job: WriteJob, notification: str) -> None:
        hold_s = _hurt.orders.hold_write_s
        if hold_s > 0:
            self._held.append(_Held(job, notification, time.monotonic() + hold_s))
            _hurt.note("held", job.transfer_id)
        else:
            self._post_now(job, notification)

    def drop_peer(self, engine: str) -> None:
        for held in [each for each in self._held if each.job.sink_engine == engine]:
            self._held.remove(held)
            self._failed.append(held.failed("disconnected"))
            _hurt.note("disconnected", held.job.transfer_id)
        super().drop_peer(engine)

    def poll(self) -> list[WriteEnded]:
        for held in [each for each in self._held if each.due <= time.monotonic()]:
            self._held.remove(held)
            try:
                self._post_now(held.job, held.notification)
            except TransferRefusedError as error:
                self._failed.append(held.failed(str(error)))
        failed, self._failed = self._failed, []
        return failed + super().poll()

    def _post_now(self, job: WriteJob, notification: str) -> None:
        super().post(job, notification)
        _hurt.note("posted", job.transfer_id)


class HurtBus(NatsBus):
    async def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        if ".meta." in subject and _hurt.orders.hold_handshake:
            _hurt.note("handshake held", subject)
            while _hurt.orders.hold_handshake:
                await asyncio.sleep(0.05)
        return await super().request(subject, payload, timeout_s)


class HurtConnector(connector.KVBusConnector):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._name = vllm_config.kv_transfer_config.engine_id

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        if _hurt.orders.stall == self._name:
            _hurt.note("stalled", self._name)
            while _hurt.orders.stall == self._name:
                time.sleep(0.05)
        return super().build_connector_meta(scheduler_output)


nixl_plane.NixlPlane = HurtPlane  # type: ignore[misc]
connector.NatsBus = HurtBus  # type: ignore[misc]
