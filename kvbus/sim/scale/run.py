"""Starts the processes of ``kvbus scale``, watches them while the client loads them, and ends them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from kvbus.errors import LocalClusterError
from kvbus.local import Child, NatsServer, free_port, stop_all
from kvbus.sim.realtime_engine import SUBJECTS
from kvbus.sim.scale.client import LoadPlan
from kvbus.sim.scale.engines import GroupPlan, deal_engines
from kvbus.sim.scale.plan import Scale
from kvbus.sim.scale.process import read_json
from kvbus.sim.scale.report import Outcome, quantiles_ms
from kvbus.sim.scale.sampler import Kinds, Sample, Sampler

Say = Callable[[str], None]

READY_TIMEOUT_S = 120.0
SAMPLE_INTERVAL_S = 1.0
SAY_INTERVAL_S = 10.0
GRACE_S = 120.0
LAST_MESSAGES_S = 1.0
MAX_PREFILL_S = 0.004
MEAN_BLOCK_S = 0.025  # see FakePrefill


async def run_scale(plan: Scale, logs: Path, say: Say) -> Outcome:
    """Start everything, load it, watch it, end it.

    Raises:
        LocalClusterError: a process ended, or did not get ready.
    """
    with tempfile.TemporaryDirectory(prefix="kvbus-scale-") as folder:  # sockets need a short path
        processes = _Processes(plan, Path(folder), logs, say)
        try:
            await processes.start()
            return await processes.collect(await processes.watch())
        finally:
            processes.close()


@dataclass(frozen=True, slots=True)
class Watched:
    """What was seen while the load counted; ``delivered``: messages per second of each kind."""

    samples: list[Sample]
    delivered: dict[str, float]


class _Processes:
    """The processes of one run."""

    def __init__(self, plan: Scale, folder: Path, logs: Path, say: Say) -> None:
        self._plan, self._folder, self._logs, self._say = plan, folder, logs, say
        self._nats = NatsServer(logs, monitored=True)
        self._groups: list[Child] = []
        self._children = [self._nats.child]

    async def start(self) -> None:
        plan, dealt = self._plan, deal_engines(self._plan.engines, self._plan.processes)
        names = tuple(f"group{number}" for number in range(len(dealt)))
        for number, (name, engines) in enumerate(zip(names, dealt, strict=True)):
            group = GroupPlan(
                name, self._nats.url, str(self._folder), engines, names, plan.seed + number, self._work_factor()
            )
            self._groups.append(self._start(name, "kvbus.sim.scale.engines", json.dumps(asdict(group))))
        port = free_port()
        options = ["--nats-url", self._nats.url, "--namespace", SUBJECTS.namespace, "--port", str(port)]
        self._router = self._start("router", "kvbus", "router", *options)
        self._router_url = f"http://127.0.0.1:{port}"

        async def started() -> bool:
            return all(self._read(f"{name}.ready") for name in names)

        self._say("starting the engines")
        await self._wait_until(started, lambda: f"starting the engines: not done after {READY_TIMEOUT_S:.0f} s")
        await self._wait_for_router()
        addresses = {name: at for group in names for name, at in self._read(f"{group}.ready").items()}
        direct = [address for name, address in addresses.items() if name.startswith("D")]
        load = LoadPlan(plan, self._router_url, str(self._folder), direct)
        self._load = self._start("load", "kvbus.sim.scale.client", json.dumps(asdict(load)))

    async def watch(self) -> Watched:
        """Return when the load has ended, with the samples taken while it counted."""
        plan, samples, said_at = self._plan, list[Sample](), time.monotonic()
        sampler = Sampler(self._nats, self._router, self._load, self._groups)
        first = last = Kinds(0.0)
        async with aiohttp.ClientSession() as session:
            sample = await sampler.sample(session)
            while self._load.alive:
                await asyncio.sleep(SAMPLE_INTERVAL_S)
                self._check()
                with contextlib.suppress(psutil.Error):  # the load has just ended
                    sample = await sampler.sample(session)
                    samples.append(sample)
                    if plan.warm_s < sample.at_s < plan.end_s:
                        last = Kinds(sample.at_s, await sampler.delivered_by_kind(session))
                        first = first if first.by_kind else last
                if time.monotonic() - said_at >= SAY_INTERVAL_S:
                    said_at = time.monotonic()
                    self._say_progress(sample)
                if sample.at_s > plan.end_s + GRACE_S:
                    raise LocalClusterError("kvbus: the load does not end")
        return Watched([each for each in samples if plan.warm_s < each.at_s < plan.end_s], last.per_second(first))

    async def collect(self, watched: Watched) -> Outcome:
        """End the engines, which then write what they counted, and put the figures together."""
        load = self._read("load.json")
        if not load.get("over"):
            raise LocalClusterError(f"kvbus: the load ended early: {self._load.tail()}")
        await asyncio.sleep(LAST_MESSAGES_S)
        stop_all(self._groups)
        groups = [self._read(f"{group.name}.json") for group in self._groups]

        def total(name: str) -> Counter[str]:
            return sum((Counter(group.get(name, {})) for group in groups), Counter())

        return Outcome(
            self._plan,
            load["all"],
            load["windows"],
            quantiles_ms([each for group in groups for each in group.get("prefill_way_s", [])]),
            dict(total("counts")),
            dict(total("bus") + total("ranks")),
            sum(group.get("leftovers", 0) for group in groups),
            load["errors"],
            watched.samples,
            watched.delivered,
        )

    def close(self) -> None:
        stop_all(self._children)

    def _start(self, name: str, module: str, *arguments: str) -> Child:
        child = Child(name, [sys.executable, "-m", module, *arguments], self._logs)
        self._children.append(child)
        return child

    def _work_factor(self) -> float:
        """Let prefills take a quarter of the prefill engines' time, however many there are, but 4 ms each at most."""
        rate_per_engine = max(self._plan.rate, 1.0) / max(1, self._plan.engines // 2)
        return min(0.25 / rate_per_engine, MAX_PREFILL_S) / (self._plan.prompt_blocks * MEAN_BLOCK_S)

    async def _wait_for_router(self) -> None:
        known = 0

        async def all_known() -> bool:
            nonlocal known
            try:
                async with session.get(f"{self._router_url}/health") as answer:
                    body = await answer.json()
            except aiohttp.ClientError:
                return False
            known = len(body["prefill_engines"]) + len(body["decode_engines"])
            return known == self._plan.engines

        async with aiohttp.ClientSession() as session:
            await self._wait_until(all_known, lambda: f"the router knows {known} of {self._plan.engines} engines")
        self._say(f"the router knows {known} engines")

    async def _wait_until(self, ready: Callable[[], Awaitable[bool]], failure: Callable[[], str]) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not await ready():
            self._check()
            if time.monotonic() > deadline:
                raise LocalClusterError(f"kvbus: {failure()}")
            await asyncio.sleep(0.1)

    def _check(self) -> None:
        for child in (self._nats.child, *self._groups, self._router):
            child.check()

    def _read(self, name: str) -> dict[str, Any]:
        return read_json(self._folder / name)

    def _say_progress(self, sample: Sample) -> None:
        load = self._read("load.json")
        self._say(
            f"{load.get('finished', 0)} of {load.get('started', 0)} requests answered; router "
            f"{sample.router_cpu:.0f} % of a core, {sample.router_mib:.0f} MiB; nats-server {sample.nats_cpu:.0f} %; "
            f"engines {sample.engines_cpu:.0f} %; {sample.published:.0f} messages/s published, "
            f"{sample.delivered:.0f} delivered"
        )
