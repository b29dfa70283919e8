"""``kvbus bench``: time to first token of kvbus and of vLLM's own NIXL connectors, in interleaved rounds.

vLLM's connectors are driven without a router, each leg straight to its engine: the best that they can do. kvbus is
driven through its router, as users drive it. Prefix caching is off, so that every prompt's whole KV is transferred, but
for conversations (:class:`~kvbus.local.turns.Turns`).

The arms of :data:`EXTRA` are kvbus with these settings of its connector; ``single`` is one engine by itself.
"""

from __future__ import annotations

import contextlib
import json
import re
import statistics
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvbus.config import REGISTRATIONS
from kvbus.local.cluster import Cluster, Engine, EngineSpec, Say, wait_until
from kvbus.local.load import (
    Figures,
    RequestResult,
    Stream,
    figures,
    make_prompt,
    plain_stream,
    run_load,
)
from kvbus.local.turns import Turns
from kvbus.local.upstream import CONNECTORS, upstream_pair
from kvbus.signals import run

EXTRA: dict[str, dict[str, Any]] = {
    "kvbus": {},
    "transfer": {"local_prefill_tokens": 0},
    "nohistory": {"history": False},
    **{each: {"registration": each} for each in REGISTRATIONS},
}
ARMS = (*CONNECTORS, "single", *EXTRA)
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
    with upstream_pair(arm, model, logs, arguments, layout.arguments, say) as pair:
        yield pair
