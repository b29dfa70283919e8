"""``kvbus bench``: time to first token of kvbus and of vLLM's own NIXL connectors, in interleaved rounds.

vLLM's connectors are driven without a router, each leg straight to its engine: the best that they can do. kvbus is
driven through its router, as users drive it. Prefix caching is off, so that every prompt's whole KV is transferred, but
for conversations (:class:`~kvbus.local.turns.Turns`).

The arms of :data:`EXTRA` are kvbus with these settings of its connector; ``single`` is one engine by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import statistics
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from kvbus.config import REGISTRATIONS
from kvbus.local.cluster import HOST, Cluster, Engine, EngineSpec, Say, wait_until
from kvbus.local.load import (
    Figures,
    Prompt,
    RequestResult,
    Stream,
    completion_body,
    figures,
    make_prompt,
    plain_stream,
    read_events,
    run_load,
)
from kvbus.local.process import free_port, stop_all
from kvbus.local.turns import Turns
from kvbus.router.request import new_transfer_id
from kvbus.signals import run

EXTRA: dict[str, dict[str, Any]] = {
    "kvbus": {},
    "transfer": {"local_prefill_tokens": 0},
    "nohistory": {"history": False},
    **{each: {"registration": each} for each in REGISTRATIONS},
}
ARMS = ("push", "pull", "single", *EXTRA)
ARGUMENTS = ("--max-model-len", "4096", "--seed", "1")
UNCACHED = ("--no-enable-prefix-caching",)
FINE = ("--block-size", "32")  # only full blocks are cached, and by default a CPU's have 128 tokens
WARM_UP, WARM_UP_TOKENS = 5, 1024


@dataclass(frozen=True, slots=True)
class Layout:
    """How many prefill engines, and how many KV blocks each engine has; None leaves that to vLLM."""

    prefill: int = 1
    prefill_blocks: int | None = None
    decode_blocks: int | None = None

    def arguments(self, kind: str) -> list[str]:
        blocks = {"prefill": self.prefill_blocks, "decode": self.decode_blocks}[kind]
        return [] if blocks is None else ["--num-gpu-blocks-override", str(blocks)]


@dataclass(frozen=True, slots=True)
class Workload:
    """``rate`` in requests per second; None sends one at a time."""

    prompt_tokens: int
    rate: float | None
    requests: int
    max_tokens: int

    @property
    def name(self) -> str:
        return f"{self.prompt_tokens} tokens, " + ("one at a time" if self.rate is None else f"{self.rate:g}/s")

    async def run(self, stream: Stream, seed: int) -> list[RequestResult]:
        prompts = [make_prompt(self.prompt_tokens, 1000 * seed + index) for index in range(self.requests)]
        return await run_load(stream, prompts, rate=self.rate, max_tokens=self.max_tokens, seed=seed)


@dataclass(frozen=True, slots=True)
class Result:
    arm: str
    workload: str
    round: int
    figures: Figures
    preemptions: int


def run_bench(
    model: Path,
    logs: Path,
    arms: Sequence[str],
    loads: Sequence[Workload | Turns],
    rounds: int,
    say: Say,
    layout: Layout,
) -> list[Result]:
    """Boot each arm anew in each round, one arm after the other, and run every workload on it."""
    results: list[Result] = []
    for number in range(rounds):
        for arm in arms:
            folder = logs / f"{number}-{arm}"
            folder.mkdir(parents=True)
            say(f"round {number + 1}/{rounds}: {arm}")
            arguments = [*ARGUMENTS, *(FINE if any(isinstance(load, Turns) for load in loads) else UNCACHED)]
            with _boot(arm, model, folder, arguments, say, layout) as (stream, decode):
                warm = [make_prompt(WARM_UP_TOKENS, 9_000 + index) for index in range(WARM_UP)]
                run(run_load(stream, warm, rate=None, max_tokens=loads[0].max_tokens))
                for load in loads:
                    before = _preemptions(decode)
                    finished = run(load.run(stream, number))
                    preempted = _preemptions(decode) - before
                    results.append(Result(arm, load.name, number, figures(finished), preempted))
                    say(f"  {load.name}: {_line(results[-1].figures)}, {preempted} preemptions on decode")
    return results


def _line(got: Figures) -> str:
    failed = f", {got.failed} FAILED" if got.failed else ""
    return f"TTFT p50 {got.ttft_p50:.0f} p90 {got.ttft_p90:.0f} ms, TPOT p50 {got.tpot_p50:.1f} ms{failed}"


@dataclass(frozen=True, slots=True)
class Summary:
    """Medians over the rounds of one arm and workload, ms; ``ratio`` is its TTFT p50 over the first arm's."""

    arm: str
    workload: str
    ttft_p50: float
    ttft_p90: float
    tpot_p50: float
    failed: int
    preemptions: int
    ratio: float


def summarize(results: Sequence[Result]) -> list[Summary]:
    def median(arm: str, workload: str, name: str) -> float:
        values = [getattr(r.figures, name) for r in results if (r.arm, r.workload) == (arm, workload)]
        return statistics.median(values) if values else 0.0

    def total(arm: str, workload: str, read: Callable[[Result], int]) -> int:
        return sum(read(r) for r in results if (r.arm, r.workload) == (arm, workload))

    keys = dict.fromkeys((r.workload, r.arm) for r in results)
    first = results[0].arm if results else ""
    return [
        Summary(
            arm,
            workload,
            median(arm, workload, "ttft_p50"),
            median(arm, workload, "ttft_p90"),
            median(arm, workload, "tpot_p50"),
            total(arm, workload, lambda r: r.figures.failed),
            total(arm, workload, lambda r: r.preemptions),
            median(arm, workload, "ttft_p50") / (median(first, workload, "ttft_p50") or 1.0),
        )
        for workload, arm in sorted(keys)
    ]


def as_json(results: Sequence[Result]) -> str:
    return json.dumps(
        {"rounds": [asdict(result) for result in results], "summary": [asdict(each) for each in summarize(results)]}
    )


def _preemptions(engine: Engine) -> int:
    """vLLM's own counter."""
    with urllib.request.urlopen(f"{engine.url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return sum(int(float(value)) for value in re.findall(r"^vllm:num_preemptions_total{.*} (\S+)$", text, re.MULTILINE))


@contextlib.contextmanager
def _boot(
    arm: str, model: Path, logs: Path, arguments: Sequence[str], say: Say, layout: Layout
) -> Iterator[tuple[Stream, Engine]]:
    """Yields how to send a prompt, and the decode engine."""
    if arm in EXTRA:
        with Cluster(
            model,
            logs,
            prefill=layout.prefill,
            arguments=arguments,
            prefill_arguments=layout.arguments("prefill"),
            decode_arguments=layout.arguments("decode"),
            extra=EXTRA[arm],
            say=say,
        ) as cluster:
            yield plain_stream(cluster.url, model.name), cluster.engines["decode-0"]
        return
    if arm == "single":
        single = Engine(EngineSpec("single", model, model.name, None, [*arguments, *layout.arguments("decode")]), logs)
        try:
            wait_until(lambda: single.healthy, [single.child], "booting one engine", say)
            yield plain_stream(single.url, model.name), single
        finally:
            single.child.stop()
        return
    connector = {"push": "NixlPushConnector", "pull": "NixlConnector"}[arm]
    side_ports = {"prefill": free_port(), "decode": free_port()}
    engines: list[Engine] = []
    try:
        for kind, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
            transfer = {"kv_connector": connector, "kv_role": role, "engine_id": kind, "kv_buffer_device": "cpu"}
            environment = {
                "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_ports[kind]),
            }
            words = [*arguments, *layout.arguments(kind)]
            engines.append(Engine(EngineSpec(kind, model, model.name, transfer, words, environment), logs))
        children = [engine.child for engine in engines]
        wait_until(lambda: all(engine.healthy for engine in engines), children, f"booting two engines ({arm})", say)
        make = _push_stream if arm == "push" else _pull_stream
        yield make(engines[0], engines[1], model.name, side_ports["prefill"]), engines[1]
    finally:
        stop_all([engine.child for engine in engines])


async def _prefill(
    session: aiohttp.ClientSession, engine: Engine, body: dict[str, Any], request_id: str
) -> dict[str, Any]:
    """Send the prefill leg; returns the parameters for the decode leg of a pull."""
    params = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    leg = {**body, "stream": False, "max_tokens": 1, "kv_transfer_params": params}
    async with session.post(f"{engine.url}/v1/completions", json=leg, headers={"X-Request-Id": request_id}) as answer:
        content = await answer.json()
        if answer.status != 200:
            raise ValueError(f"prefill: status {answer.status}: {content}"[:200])
        returned: dict[str, Any] = content["kv_transfer_params"]
        return returned


async def _decode(
    session: aiohttp.ClientSession, engine: Engine, body: dict[str, Any], request_id: str, params: dict[str, Any]
) -> AsyncIterator[list[int]]:
    leg = {**body, "kv_transfer_params": params}
    async with session.post(f"{engine.url}/v1/completions", json=leg, headers={"X-Request-Id": request_id}) as answer:
        async for ids in read_events(answer):
            yield ids


def _pull_stream(prefill: Engine, decode: Engine, model: str, _: int) -> Stream:
    async def stream(session: aiohttp.ClientSession, prompt: Prompt, max_tokens: int) -> AsyncIterator[list[int]]:
        body, request_id = completion_body(model, prompt, max_tokens), new_transfer_id()
        params = await _prefill(session, prefill, body, request_id)
        async for ids in _decode(session, decode, body, request_id, params):
            yield ids

    return stream


def _push_stream(prefill: Engine, decode: Engine, model: str, side_port: int) -> Stream:
    async def stream(session: aiohttp.ClientSession, prompt: Prompt, max_tokens: int) -> AsyncIterator[list[int]]:
        body, request_id = completion_body(model, prompt, max_tokens), new_transfer_id()
        params = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_engine_id": prefill.spec.name,
            "remote_request_id": f"cmpl-{request_id}-0",
            "remote_host": HOST,
            "remote_port": side_port,
            "tp_size": 1,
        }
        prefilling = asyncio.create_task(_prefill(session, prefill, body, request_id))
        try:
            async for ids in _decode(session, decode, body, request_id, params):
                yield ids
        finally:
            prefilling.cancel()
            await asyncio.gather(prefilling, return_exceptions=True)

    return stream
