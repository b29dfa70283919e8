"""Looks from outside at what the processes of a run use, and at the messages that the nats-server counts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

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


@dataclass(frozen=True, slots=True)
class Kinds:
    """How many messages of each kind were delivered until ``at_s``, for which there is somebody who listens."""

    at_s: float
    by_kind: Counter[str] = field(default_factory=Counter)

    def per_second(self, earlier: Kinds) -> dict[str, float]:
        """Since ``earlier``, the most frequent first."""
        passed_s = max(self.at_s - earlier.at_s, 1e-3)
        grown = Counter({kind: number - earlier.by_kind[kind] for kind, number in self.by_kind.items()})
        return {kind: round(number / passed_s, 1) for kind, number in grown.most_common() if number > 0}


SUBJECT_AREA = 3
"""Which token of a subject says what is told there: see :class:`kvbus.wire.Subjects`."""


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

    async def delivered_by_kind(self, session: aiohttp.ClientSession) -> Counter[str]:
        """How many messages each kind of subject has brought to those who listen now, since the server started."""
        async with session.get(f"{self._monitor_url}/connz?subs=detail&limit=4096") as answer:
            connz = await answer.json()
        kinds: Counter[str] = Counter()
        for connection in connz["connections"]:
            for each in connection.get("subscriptions_list_detail", ()):
                kinds[kind_of(each["subject"])] += each["msgs"]
        return kinds


def kind_of(subject: str) -> str:
    """What is told on a subject: the name of its area, or ``replies``."""
    tokens = subject.split(".")
    return tokens[SUBJECT_AREA] if tokens[0] == "kvbus" and len(tokens) > SUBJECT_AREA else "replies"
