"""Traces of real requests: what they add up to, and that vLLM's spans and kvbus's are one trace."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from support.critical_path import critical_path
from support.engines import say
from support.otlp import Endpoint, otlp_endpoint
from support.span_model import differences
from support.waiting import eventually

from kvbus.local import Cluster, make_prompt
from kvbus.local.load import completion_body, read_events
from kvbus.tools.sources import read_files
from kvbus.tools.traffic import quantile
from kvbus.tools.view import MS, TraceView, problems, views_of
from kvbus.tools.why import why
from kvbus.trace import HISTORY_STAGES, SpanData, StageName
from kvbus.trace.spans import STREAM

pytestmark = pytest.mark.e2e

REQUESTS = 50
ROUNDS = 2
OTHERS = {*HISTORY_STAGES, StageName.LOST, StageName.DECODE_QUEUE, StageName.DECODE_COMPUTE}
PUSHED = [name for name in StageName if name not in OTHERS]


@dataclass(frozen=True, slots=True)
class Traced:
    cluster: Cluster
    endpoint: Endpoint


@pytest.fixture(scope="module")
def traced(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    logs = tmp_path_factory.mktemp("traced")
    with otlp_endpoint() as endpoint, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.url)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "500")
        with Cluster(model, logs, arguments=("--max-model-len", "4096"), say=say) as cluster:
            yield Traced(cluster, endpoint)


async def ask(
    session: aiohttp.ClientSession, cluster: Cluster, number: int, headers: dict[str, str] | None = None
) -> float:
    """One streamed completion; returns the client's TTFT, seconds."""
    body = completion_body(cluster.served_name, make_prompt(1024, 1000 + number), 8)
    named = {"X-Request-Id": f"request-{number}", **(headers or {})}
    started, ttft_s = time.perf_counter(), 0.0
    async with session.post(f"{cluster.url}/v1/completions", json=body, headers=named) as answer:
        async for _ in read_events(answer):
            ttft_s = ttft_s or time.perf_counter() - started
    return ttft_s


def of_vllm(spans: list[SpanData]) -> list[SpanData]:
    return [span for span in spans if span.name == "llm_request"]


@pytest.mark.timeout(600)
async def test_the_stages_of_fifty_requests_add_up_to_what_the_client_saw(traced: Traced) -> None:
    """S2: and vLLM's spans of both engines share their root."""
    cluster, endpoint = traced.cluster, traced.endpoint
    async with aiohttp.ClientSession() as session:
        for warm_up in range(3):
            await ask(session, cluster, -1 - warm_up)
        ttft_ms = [1e3 * await ask(session, cluster, number) for number in range(REQUESTS)]

    def whole() -> dict[str, TraceView]:
        """Those that have come whole: they are exported in order, and a batch may end in the midst of one."""
        found: dict[str, TraceView] = {}
        for view in views_of(endpoint.spans):
            name, others = str(view.about("kvbus.request_id", "")), list(view.others)
            is_last = any(span.name == STREAM for span in others)
            if is_last and len(of_vllm(others)) == 2 and re.fullmatch(r"request-\d+", name):
                found[name] = view
        return found

    await eventually(lambda: len(whole()) == REQUESTS, 30)
    worst_ms, worst_percent, late = 0.0, 0.0, []
    for number, seen_ms in enumerate(ttft_ms):
        view = whole()[f"request-{number}"]
        assert problems(view) == []
        assert [stage.name for stage in view.stages] == PUSHED
        ours = [span for span in view.spans if span.service.startswith("kvbus-")]
        assert differences(ours) == []
        assert view.root is not None
        assert {span.parent_id for span in of_vllm(list(view.others))} == {view.root.span_id}
        on_path = {name for name, _, _ in critical_path(view.spans, view.root)}
        assert set(PUSHED) <= on_path
        apart_ms = abs(seen_ms - sum(stage.duration_ns for stage in view.stages) / MS)
        worst_ms, worst_percent = max(worst_ms, apart_ms), max(worst_percent, 100 * apart_ms / seen_ms)
        late.append(apart_ms)
    late.sort()
    print(f"\n{REQUESTS} requests: the client's TTFT less the sum of its stages: p50 {late[len(late) // 2]:.2f} ms,")
    print(f"worst {worst_ms:.2f} ms, worst {worst_percent:.2f} % of its TTFT")
    usual_ms = sorted(ttft_ms)[REQUESTS // 2]  # a slow machine is slow before and behind the router, too
    assert late[len(late) // 2] < max(2.0, 0.02 * usual_ms)
    assert worst_ms < max(25.0, 0.1 * usual_ms)


@pytest.mark.timeout(600)
async def test_tracing_costs_no_time_that_a_client_would_see(traced: Traced) -> None:
    """Off, one in a hundred, every request: interleaved, on the same engines; the client's context decides."""
    arms = {"off": 0, "1 %": 100, "100 %": 1}
    ttft: dict[str, list[float]] = {arm: [] for arm in arms}
    hand_offs: dict[str, list[float]] = {arm: [] for arm in arms}
    number = 2000
    async with aiohttp.ClientSession() as session:
        for _ in range(ROUNDS):
            for arm, one_in in arms.items():
                traced.cluster.observer.hand_offs.clear()
                for each in range(25):
                    number += 1
                    sampled = one_in and (number + each) % one_in == 0
                    context = f"00-{number:032x}-{number:016x}-{'01' if sampled else '00'}"
                    ttft[arm].append(1e3 * await ask(session, traced.cluster, number, {"traceparent": context}))
                hand_offs[arm] += [1e3 * each for each in traced.cluster.observer.hand_offs]
    for arm in arms:
        seen, delays = sorted(ttft[arm]), sorted(hand_offs[arm])
        print(f"\n{arm} sampled: TTFT p50 {quantile(seen, 0.5):.1f} ms, p90 {quantile(seen, 0.9):.1f};")
        print(f"completion to WRITE p50 {quantile(delays, 0.5):.2f} ms, p99 {quantile(delays, 0.99):.2f}")
    assert quantile(sorted(ttft["100 %"]), 0.5) < 1.3 * quantile(sorted(ttft["off"]), 0.5)


async def test_the_clients_own_trace_goes_on(traced: Traced) -> None:
    given = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with aiohttp.ClientSession() as session:
        await ask(session, traced.cluster, 900, {"traceparent": given})
        await ask(session, traced.cluster, 901, {"traceparent": given.replace("0af7", "1bf7")[:-1] + "0"})

    def mine() -> list[SpanData]:
        return [span for span in traced.endpoint.spans if span.trace_id == given[3:35]]

    await eventually(lambda: len(of_vllm(mine())) == 2 and any(span.name == "request" for span in mine()), 20)
    root = next(span for span in mine() if span.name == "request")
    assert root.parent_id == given[36:52]
    assert not [span for span in traced.endpoint.spans if span.trace_id.startswith("1bf7")], "the client said no"


async def test_the_last_traces_are_kept_in_a_file_too(traced: Traced) -> None:
    async with aiohttp.ClientSession() as session:
        await ask(session, traced.cluster, 950)

    def last() -> TraceView:
        return read_files([traced.cluster.trace_file])[-1]

    await eventually(lambda: last().about("kvbus.request_id", "") == "request-950", 10)
    assert problems(last()) == []
    assert "prefill" in why(last()).text or "decode" in why(last()).text
