"""``kvbus scale``: many engines without a GPU behind one router and one nats-server, and what that costs.

Real: the router, the nats-server, every connection and message on the bus, the HTTP APIs. Played: what vLLM computes,
and the memory that KV is written into. See :mod:`kvbus.sim.scale_group` and :mod:`kvbus.sim.scale_load`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from kvbus.errors import ConfigError, LocalClusterError
from kvbus.local import Child, NatsServer, free_port, stop_all
from kvbus.sim import scale_group, scale_load
from kvbus.sim.live_engine import SUBJECTS

Say = Callable[[str], None]

READY_TIMEOUT_S = 120.0
SAMPLE_S = 1.0
SAY_EVERY_S = 10.0
GRACE_S = 120.0
BUSY_S = 0.004  # how long the played engines compute in all, for each request


@dataclass(frozen=True, slots=True)
class Scale:
    """What to run.

    Attributes:
        processes: that the engines are dealt to.
        prompt_blocks: of each prompt; ``max_tokens`` of each answer.
        direct_rate: requests a second that go past the router, to measure the floor.
        warm_s: the first seconds of load, which do not count.
    """

    engines: int = 64
    rate: float = 500.0
    minutes: float = 10.0
    processes: int = 4
    prompt_blocks: int = 2
    max_tokens: int = 4
    direct_rate: float = 5.0
    warm_s: float = 10.0
    seed: int = 1

    def __post_init__(self) -> None:
        if self.engines < 2:
            raise ConfigError("--engines", self.engines, "at least 2")
        if not 1 <= self.processes <= self.engines:
            raise ConfigError("--processes", self.processes, f"1 to --engines={self.engines}")


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at the processes: CPU in percent of a core since the last look, memory in MiB, messages per second."""

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
class Outcome:
    """What happened. ``load`` is what the client says (times in ms), ``prefill_way`` how long a request took from there
    to its prefill engine, ``counts`` and ``bus`` the engines' counters; ``errors`` some of the client's."""

    plan: Scale
    load: dict[str, Any]
    windows: list[dict[str, Any]]
    prefill_way: dict[str, float]
    counts: dict[str, int]
    bus: dict[str, int]
    leftovers: int
    errors: list[str]
    samples: list[Sample]

    @property
    def achieved_rate(self) -> float:
        """Requests answered through the router, per second."""
        how: dict[str, int] = self.load["how"]
        answered = sum(number for what, number in how.items() if not what.startswith(("failed", "not sent")))
        return round(answered / (60 * self.plan.minutes), 1)

    def cpu_ms(self, name: str) -> float:
        """CPU for each request answered, ms; ``name`` is of a sample's figure. It says more than latencies where other
        programs have the machine, too."""
        return round(10 * self.mean(name) / max(self.achieved_rate, 0.1), 3)

    def mean(self, name: str) -> float:
        values: list[float] = [getattr(each, name) for each in self.samples]
        return round(sum(values) / max(1, len(values)), 1)


async def run_scale(plan: Scale, logs: Path, say: Say) -> Outcome:
    """Start everything, load it, look at it, end it.

    Raises:
        LocalClusterError: a process ended, or did not get ready.
    """
    with tempfile.TemporaryDirectory(prefix="kvbus-scale-") as folder:  # sockets need a short path
        stage = _Stage(plan, Path(folder), logs, say)
        try:
            await stage.start()
            return await stage.watch()
        finally:
            stage.close()


class _Stage:
    """The processes of one run."""

    def __init__(self, plan: Scale, folder: Path, logs: Path, say: Say) -> None:
        self._plan, self._folder, self._logs, self._say = plan, folder, logs, say
        self._nats = NatsServer(logs, monitored=True)
        self._groups: list[Child] = []
        self._children: list[Child] = []
        self._before = (0, 0)
        self._looked_at = 0.0

    async def start(self) -> None:
        plan, dealt = self._plan, scale_group.engines_of(self._plan.engines, self._plan.processes)
        names = tuple(f"group{number}" for number in range(len(dealt)))
        for number, (name, engines) in enumerate(zip(names, dealt, strict=True)):
            told = scale_group.GroupPlan(
                name, self._nats.url, str(self._folder), engines, names, plan.seed + number, self._work()
            )
            argument = scale_group.as_argument(told)
            self._groups.append(self._child(name, ["-m", "kvbus.sim.scale_group", argument]))
        port = free_port()
        command = ["router", "--nats-url", self._nats.url, "--namespace", SUBJECTS.namespace, "--port", str(port)]
        self._router = self._child("router", ["-m", "kvbus", *command])
        self._router_url = f"http://127.0.0.1:{port}"
        await self._until(lambda: all(self._read(f"{name}.ready") for name in names), "starting the engines")
        await self._meet()
        addresses = {name: at for group in names for name, at in self._read(f"{group}.ready").items()}
        self._load = self._child("load", ["-m", "kvbus.sim.scale_load", self._load_plan(addresses)])

    async def watch(self) -> Outcome:
        """Wait for the load to end; then ask the engines to say what they counted, and to end."""
        plan = self._plan
        looking = {each.name: psutil.Process(each.pid) for each in (*self._children,)}
        looking["nats"] = psutil.Process(self._nats.child.pid)
        samples: list[Sample] = []
        began, said_at = time.monotonic(), time.monotonic()
        async with aiohttp.ClientSession() as session:
            sample = await self._look(session, looking, began)
            while self._load.alive:
                await asyncio.sleep(SAMPLE_S)
                self._check()
                with contextlib.suppress(psutil.Error):  # the load has just ended
                    sample = await self._look(session, looking, began)
                    samples.append(sample)
                if time.monotonic() - said_at >= SAY_EVERY_S:
                    said_at = time.monotonic()
                    self._tell(sample)
                if sample.at_s > plan.warm_s + 60 * plan.minutes + GRACE_S:
                    raise LocalClusterError("kvbus: the load does not end")
        load = self._read("load.json")
        if not load.get("over"):
            raise LocalClusterError(f"kvbus: the load ended early: {self._load.tail()}")
        await asyncio.sleep(1.0)  # the last requests' words on the bus
        stop_all(self._groups)
        groups = [self._read(f"{group.name}.json") for group in self._groups]
        ways = [each for group in groups for each in group.get("prefill_way_s", [])]
        return Outcome(
            plan,
            load["all"],
            load["windows"],
            scale_load.quantiles_ms(ways),
            dict(sum((Counter(group.get("counts", {})) for group in groups), Counter())),
            dict(sum((Counter({**group.get("bus", {}), **group.get("ranks", {})}) for group in groups), Counter())),
            sum(group.get("leftovers", 0) for group in groups),
            load["errors"],
            [each for each in samples if plan.warm_s < each.at_s < plan.warm_s + 60 * plan.minutes],
        )

    def close(self) -> None:
        stop_all([self._nats.child, *self._children])

    def _child(self, name: str, arguments: Sequence[str]) -> Child:
        child = Child(name, [sys.executable, *arguments], self._logs)
        self._children.append(child)
        return child

    def _work(self) -> float:
        """So that a quarter of the prefill engines' time goes into prefills, however many there are; 4 ms at most."""
        per_engine = max(self._plan.rate, 1.0) / max(1, self._plan.engines // 2)
        prefill_s = min(0.25 / per_engine, BUSY_S)
        return prefill_s / (self._plan.prompt_blocks * 0.025)

    def _load_plan(self, addresses: dict[str, str]) -> str:
        plan = self._plan
        direct = tuple(address for name, address in addresses.items() if name.startswith("D"))
        return scale_load.as_argument(
            scale_load.LoadPlan(
                self._router_url,
                str(self._folder),
                direct,
                plan.rate,
                plan.direct_rate,
                60 * plan.minutes,
                plan.warm_s,
                plan.prompt_blocks,
                plan.max_tokens,
                plan.seed,
            )
        )

    async def _meet(self) -> None:
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

        until = time.monotonic() + READY_TIMEOUT_S
        async with aiohttp.ClientSession() as session:
            while not await all_known():
                self._check()
                if time.monotonic() > until:
                    raise LocalClusterError(f"kvbus: the router knows {known} of {self._plan.engines} engines")
                await asyncio.sleep(0.2)
        self._say(f"the router knows {known} engines")

    async def _until(self, true: Callable[[], bool], what: str) -> None:
        self._say(what)
        until = time.monotonic() + READY_TIMEOUT_S
        while not true():
            self._check()
            if time.monotonic() > until:
                raise LocalClusterError(f"kvbus: {what}: not done after {READY_TIMEOUT_S:.0f} s")
            await asyncio.sleep(0.1)

    def _check(self) -> None:
        for child in (self._nats.child, *self._groups, self._router):
            child.check()

    def _read(self, name: str) -> dict[str, Any]:
        path = self._folder / name
        said: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return said

    async def _look(self, session: aiohttp.ClientSession, looking: dict[str, psutil.Process], began: float) -> Sample:
        async with session.get(f"{self._nats.monitor_url}/varz") as answer:
            varz = await answer.json()
        now = time.monotonic()
        passed_s = max(now - self._looked_at, 1e-3)
        (published_before, delivered_before), self._before = self._before, (varz["in_msgs"], varz["out_msgs"])
        self._looked_at = now
        groups = [looking[group.name] for group in self._groups]
        mib = {name: process.memory_info().rss / 2**20 for name, process in looking.items()}
        return Sample(
            at_s=round(now - began, 1),
            router_cpu=looking["router"].cpu_percent(),
            router_mib=round(mib["router"], 1),
            nats_cpu=looking["nats"].cpu_percent(),
            nats_mib=round(mib["nats"], 1),
            engines_cpu=round(sum(each.cpu_percent() for each in groups), 1),
            engines_mib=round(sum(mib[group.name] for group in self._groups), 1),
            load_cpu=looking["load"].cpu_percent(),
            machine_cpu=psutil.cpu_percent(),
            published=round((varz["in_msgs"] - published_before) / passed_s),
            delivered=round((varz["out_msgs"] - delivered_before) / passed_s),
        )

    def _tell(self, sample: Sample) -> None:
        load = self._read("load.json")
        self._say(
            f"{load.get('finished', 0)} of {load.get('started', 0)} requests answered; router "
            f"{sample.router_cpu:.0f} % of a core, {sample.router_mib:.0f} MiB; nats-server {sample.nats_cpu:.0f} %; "
            f"engines {sample.engines_cpu:.0f} %; {sample.published:.0f} messages/s published, "
            f"{sample.delivered:.0f} delivered"
        )


def as_json(outcome: Outcome) -> str:
    said = asdict(outcome)
    cpu_ms = {name: outcome.cpu_ms(f"{name}_cpu") for name in ("router", "nats", "engines", "load")}
    return json.dumps({**said, "achieved_rate": outcome.achieved_rate, "cpu_ms_per_request": cpu_ms})


def rows(outcome: Outcome) -> list[tuple[str, str]]:
    """The summary, line by line."""
    load, samples = outcome.load, outcome.samples

    def times(of: dict[str, float]) -> str:
        return f"{of['p50']:.1f} / {of['p99']:.1f} / {of['max']:.0f}"

    def memory(name: str) -> str:
        return f"{getattr(samples[0], name):.0f} -> {getattr(samples[-1], name):.0f}" if samples else "unknown"

    return [
        ("requests/s answered", f"{outcome.achieved_rate:.1f}"),
        ("how they ended", ", ".join(f"{number} {how}" for how, number in load["how"].items())),
        ("TTFT less the engine's own time, ms p50 / p99 / max", times(load["overhead"])),
        ("the same without a router (floor)", times(load["direct"])),
        ("from the client to the prefill engine, ms", times(outcome.prefill_way)),
        ("TTFT, ms", times(load["ttft"])),
        ("client behind its own plan, ms", times(load["late"])),
        ("router, % of a core", f"{outcome.mean('router_cpu'):.0f}"),
        ("router, ms of CPU for each request", f"{outcome.cpu_ms('router_cpu'):.2f}"),
        ("router, MiB start -> end", memory("router_mib")),
        ("nats-server, % of a core", f"{outcome.mean('nats_cpu'):.0f}"),
        ("nats-server, MiB start -> end", memory("nats_mib")),
        ("messages/s published / delivered", f"{outcome.mean('published'):.0f} / {outcome.mean('delivered'):.0f}"),
        ("played engines, % of a core", f"{outcome.mean('engines_cpu'):.0f}"),
        ("played engines, MiB start -> end", memory("engines_mib")),
        ("client, % of a core", f"{outcome.mean('load_cpu'):.0f}"),
        ("machine, % of all cores", f"{outcome.mean('machine_cpu'):.0f}"),
        ("requests still remembered by engines", str(outcome.leftovers)),
    ]
