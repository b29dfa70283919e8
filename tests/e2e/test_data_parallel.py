"""Data parallel ranks behind one HTTP port: each leg reaches the rank that the router chose (R17)."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from pathlib import Path

import pytest
from openai import AsyncOpenAI
from support.engines import ARGUMENTS, complete, metrics, prompt, say

from kvbus.local import Cluster
from kvbus.wire import State

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

RANKS = ("0", "1")


class DataParallel(Cluster):
    """Engines of two ranks each."""

    def is_ready(self, name: str) -> bool:
        ranks = [self.observer.engines.get(f"{name}_dp{rank}") for rank in RANKS]
        return all(rank is not None and rank.state is State.READY for rank in ranks)


async def computed(url: str) -> int:
    """Prompt tokens that the ranks have computed themselves."""
    found = re.findall(
        r'vllm:prompt_tokens_by_source_total{[^}]*source="local_compute"} ([0-9.e+]+)', await metrics(url)
    )
    assert len(found) == len(RANKS)
    return sum(int(float(value)) for value in found)


async def finished(url: str) -> Counter[str]:
    """How many requests each rank has ended."""
    found = re.findall(r'vllm:request_success_total{[^}]*engine="(\d)"[^}]*} ([0-9.e+]+)', await metrics(url))
    count: Counter[str] = Counter()
    for rank, value in found:
        count[rank] += int(float(value))
    return count


async def test_each_leg_reaches_the_rank_that_was_chosen(model: Path, tmp_path: Path, reference: str) -> None:
    with DataParallel(model, tmp_path, arguments=[*ARGUMENTS, "--data-parallel-size", "2"], say=say) as cluster:
        urls = {name: cluster.engines[name].url for name in ("prefill-0", "decode-0")}
        chosen: Counter[str] = Counter()
        before = {name: await finished(url) for name, url in urls.items()}
        computed_before = await computed(urls["decode-0"])
        prompts = [prompt(100 + number, seed=90 + number) for number in range(12)]
        for ids in prompts:
            got = await complete(cluster.url, ids)
            assert got.tokens == (await complete(reference, ids)).tokens
            chosen.update((got.headers["X-KVBus-Prefill"], got.headers["X-KVBus-Decode"]))
        print(dict(chosen))
        assert set(chosen) == {f"{name}_dp{rank}" for name in urls for rank in RANKS}, "chance spreads them"
        for name, url in urls.items():
            async with asyncio.timeout(10):
                while (done := await finished(url) - before[name]).total() < len(prompts):
                    await asyncio.sleep(0.1)
            assert done == {rank: chosen[f"{name}_dp{rank}"] for rank in RANKS}
        assert await computed(urls["decode-0"]) == computed_before, "no hint was wrong"
        async with AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
            answer = await client.responses.with_raw_response.create(model=model.name, input="Hi", max_output_tokens=4)
            assert "X-KVBus-Prefill" not in answer.headers
