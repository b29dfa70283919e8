"""``kvbus soak``: minutes of load on a local cluster of real engines, every answer compared with a single engine's."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from kvbus.errors import LocalClusterError
from kvbus.local.cluster import Cluster, Engine, EngineSpec, Say, wait_until
from kvbus.local.load import Figures, Prompt, figures, make_prompt, plain_stream, run_load
from kvbus.local.model import cache_dir

STALL_S = 10.0
# In bfloat16 even a single engine's answers depend on what else is in its batch.
ARGUMENTS = ("--max-model-len", "4096", "--seed", "1", "--dtype", "float32")


@dataclass(frozen=True, slots=True)
class Soak:
    """What to run. ``pin`` binds each engine to a core of its own."""

    minutes: float
    rate: float
    prompt_tokens: int
    max_tokens: int
    pin: bool
    seed: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened. Memory in MiB, of all processes of the engines, at a quarter of the run and at its end."""

    figures: Figures
    stalled: bool
    rss_quarter_mib: float
    rss_end_mib: float
    hand_off_p50_ms: float
    idle_cpu_percent: float
    free_blocks: dict[str, str]


async def reference_answers(
    model: Path, logs: Path, prompts: Sequence[Prompt], max_tokens: int, say: Say
) -> list[list[int]]:
    """What a single engine without a connector answers; computed once for a set of prompts and kept."""
    key = hashlib.sha256(json.dumps([prompts, max_tokens, str(model), ARGUMENTS]).encode()).hexdigest()[:16]
    kept = cache_dir() / "references" / f"{key}.json"
    if kept.is_file():
        answers: list[list[int]] = json.loads(kept.read_text())
        return answers
    engine = Engine(EngineSpec("reference", model, model.name, arguments=ARGUMENTS), logs)
    try:
        wait_until(lambda: engine.healthy, [engine.child], "booting the reference engine", say)
        say(f"asking it {len(prompts)} prompts")
        stream = plain_stream(engine.url, model.name)
        finished = await run_load(stream, prompts, rate=None, max_tokens=max_tokens)
    finally:
        engine.child.stop()
    if failed := [result for result in finished if result.error]:
        raise LocalClusterError(f"kvbus: the reference engine failed: {failed[0].error}")
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps([result.tokens for result in finished]))
    return [result.tokens for result in finished]


async def run_soak(model: Path, logs: Path, soak: Soak, say: Say) -> Outcome:
    """Boot, load, watch, compare. An engine that dies, or nothing finished for ten seconds, ends it early."""
    count = max(1, int(soak.minutes * 60 * soak.rate))
    prompts = [make_prompt(soak.prompt_tokens, soak.seed + index) for index in range(count)]
    expected = await reference_answers(model, logs, prompts, soak.max_tokens, say)
    with Cluster(model, logs, arguments=ARGUMENTS, say=say) as cluster:
        if soak.pin:
            for core, engine in enumerate(cluster.engines.values()):
                pin(engine.child.pid, core % (os.cpu_count() or 1))
        watch = _Watch(cluster, count, say)
        stream = plain_stream(cluster.url, cluster.served_name)
        try:
            finished = await run_load(
                stream,
                prompts,
                rate=soak.rate,
                max_tokens=soak.max_tokens,
                seed=soak.seed,
                progress=watch.progress,
            )
        except* LocalClusterError as ended:
            raise LocalClusterError(f"kvbus: the load ended early: {ended.exceptions[0]}") from None
        watch.rss_end = watch.rss()
        await asyncio.sleep(10)
        idle = idle_cpu_percent(cluster)
        return Outcome(
            figures=figures(finished, expected),
            stalled=watch.stalled,
            rss_quarter_mib=round(watch.rss_quarter or watch.rss_end, 1),
            rss_end_mib=round(watch.rss_end, 1),
            idle_cpu_percent=round(idle, 1),
            hand_off_p50_ms=round(1e3 * statistics.median(cluster.observer.hand_offs or [0.0]), 2),
            free_blocks={
                name: f"{beat.free_blocks}/{beat.total_blocks}" for name, beat in cluster.observer.engines.items()
            },
        )


def pin(pid: int, core: int) -> None:
    """Bind a process, its descendants and all their threads to one core."""
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        for thread in process.threads():
            os.sched_setaffinity(thread.id, {core})


def idle_cpu_percent(cluster: Cluster, over_s: float = 5.0) -> float:
    """How much of one core the engines' processes use together, without torch's own polling.

    An engine has some thirty threads of gloo, which wake up all the time whatever vLLM does; on a
    busy machine they alone are a tenth of a core.
    """
    processes = _engine_processes(cluster)
    before, started = _cpu_seconds(processes), time.monotonic()
    time.sleep(over_s)
    return 100 * (_cpu_seconds(processes) - before) / (time.monotonic() - started)


def _cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    return sum(
        thread.user_time + thread.system_time
        for process in processes
        for thread in process.threads()
        if _thread_name(process.pid, thread.id) != "gloo_tcp_loop"
    )


def _thread_name(pid: int, thread_id: int) -> str:
    """As Linux has it; nothing on systems without ``/proc``, or when the thread has just ended."""
    try:
        return Path(f"/proc/{pid}/task/{thread_id}/comm").read_text().strip()
    except OSError:
        return ""


def _engine_processes(cluster: Cluster) -> list[psutil.Process]:
    roots = [psutil.Process(engine.child.pid) for engine in cluster.engines.values()]
    return [process for root in roots for process in (root, *root.children(recursive=True))]


class _Watch:
    """Looks at a run once a second."""

    def __init__(self, cluster: Cluster, count: int, say: Say) -> None:
        self._cluster, self._count, self._say = cluster, count, say
        self._last, self._last_at = 0, time.monotonic()
        self._said_at = 0.0
        self.stalled = False
        self.rss_quarter = self.rss_end = 0.0

    def rss(self) -> float:
        return sum(process.memory_info().rss for process in _engine_processes(self._cluster)) / 2**20

    async def progress(self, finished: int, failed: int, count: int) -> None:
        self._cluster.check()
        now = time.monotonic()
        if finished != self._last:
            self._last, self._last_at = finished, now
        if not self.rss_quarter and finished >= count / 4:
            self.rss_quarter = self.rss()
        if now - self._said_at >= 10:
            self._said_at = now
            self._say(f"{finished}/{count} finished, {failed} failed, engines use {self.rss():.0f} MiB")
        if now - self._last_at > STALL_S:
            self.stalled = True
            self.dump()
            self._last_at = now

    def dump(self) -> None:
        """Nothing finishes: let every engine process write all its threads' stacks into its log."""
        self._say(f"stalled: nothing finished for {STALL_S:.0f} s; dumping all threads")
        for process in _engine_processes(self._cluster):
            if "resource_tracker" not in " ".join(process.cmdline()):
                process.send_signal(signal.SIGUSR1)


def as_json(outcome: Outcome) -> str:
    return json.dumps(asdict(outcome))
