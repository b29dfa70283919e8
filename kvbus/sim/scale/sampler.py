"""Looks from outside at what the processes of a run use, and at the messages that the nats-server counts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
import psutil

from kvbus.local import Child, NatsServer


@dataclass(frozen=True, slots=True)
class Sample:
    """CPU in percent of a core since the sample before, memory in MiB, messages per second."""

    at_s: float
    router_cpu: float
    router_mib: float
    nats_cpu: float
    nats_mib: float
    engines_cpu: float
    engines_mib: float
    load_cpu: float
    machine_cpu: float
    published: float
    delivered: float


class Sampler:
    def __init__(self, nats: NatsServer, router: Child, load: Child, engines: Sequence[Child]) -> None:
        parts = {"nats": [nats.child], "router": [router], "load": [load], "engines": engines}
        self._processes = {part: [psutil.Process(child.pid) for child in children] for part, children in parts.items()}
        self._monitor_url = nats.monitor_url
        self._began = time.monotonic()
        self._sampled_at = 0.0
        self._published = self._delivered = 0

    async def sample(self, session: aiohttp.ClientSession) -> Sample:
        """Raises psutil.Error if a process has ended."""
        async with session.get(f"{self._monitor_url}/varz") as answer:
            varz = await answer.json()
        now = time.monotonic()
        passed_s = max(now - self._sampled_at, 1e-3)
        published, delivered = varz["in_msgs"] - self._published, varz["out_msgs"] - self._delivered
        self._sampled_at, self._published, self._delivered = now, varz["in_msgs"], varz["out_msgs"]
        cpu, mib = {}, {}
        for part, processes in self._processes.items():
            cpu[part] = round(sum(each.cpu_percent() for each in processes), 1)
            mib[part] = round(sum(each.memory_info().rss for each in processes) / 2**20, 1)
        return Sample(
            at_s=round(now - self._began, 1),
            router_cpu=cpu["router"],
            router_mib=mib["router"],
            nats_cpu=cpu["nats"],
            nats_mib=mib["nats"],
            engines_cpu=cpu["engines"],
            engines_mib=mib["engines"],
            load_cpu=cpu["load"],
            machine_cpu=psutil.cpu_percent(),
            published=round(published / passed_s),
            delivered=round(delivered / passed_s),
        )
