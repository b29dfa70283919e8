"""Clusters that are not the one of the other tests: unequal TP, and a real model."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.engines import (
    ARGUMENTS,
    TRANSFER_ALL,
    assert_came_from_outside,
    complete,
    complete_all,
    post,
    prompt,
    prompt_tokens,
    say,
)
from support.waiting import eventually

from kvbus.local import Cluster, smollm2
from kvbus.local.cluster import Engine, EngineSpec, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 2), (2, 1)])
async def test_unequal_tp_equals_the_reference(
    model: Path, tmp_path: Path, reference: str, prefill_tp: int, decode_tp: int
) -> None:
    """K5."""
    with Cluster(
        model,
        tmp_path,
        arguments=ARGUMENTS,
        prefill_arguments=["--tensor-parallel-size", str(prefill_tp)],
        decode_arguments=["--tensor-parallel-size", str(decode_tp)],
        extra={"history": True, **TRANSFER_ALL},
        say=say,
    ) as cluster:
        decode = cluster.engines["decode-0"].url
        for tokens in (31, 33, 300, 1024):
            ids = prompt(tokens, seed=50 + prefill_tp)
            before = await prompt_tokens(decode)
            got = await complete(cluster.url, ids)
            assert got.tokens == (await complete(reference, ids)).tokens
            assert_came_from_outside(await prompt_tokens(decode) - before, tokens)
            assert len(cluster.observer.transfer(got.headers["X-KVBus-Transfer-Id"])) == prefill_tp
        prompts = [prompt(100 + 50 * number, seed=60 + number) for number in range(6)]
        expected = [(await complete(reference, ids)).tokens for ids in prompts]
        assert [got.tokens for got in await complete_all(cluster.url, prompts)] == expected
        # Ranks sum in another order than one engine does, so these prompts must not tie: the two likeliest of all
        # 1,200 tokens differ by 2.8e-4 in log probability or more (seed 70 had two that differ by 4e-6).
        ids = prompt(200, seed=170)
        for turn in range(12):  # each answer's KV comes back from decode, if it pays
            answer = (await complete(reference, ids, 100)).tokens
            assert (await complete(cluster.url, ids, 100)).tokens == answer
            ids = [*ids, *answer, *prompt(20, seed=171 + turn)]
        assert (await prompt_tokens(cluster.engines["prefill-0"].url)).external >= 96


@pytest.fixture(scope="module")
def tiny_pools(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    arguments = [*ARGUMENTS, "--num-gpu-blocks-override", "140"]
    with Cluster(
        model, tmp_path_factory.mktemp("tiny-pools"), arguments=arguments, extra=TRANSFER_ALL, say=say
    ) as cluster:
        yield cluster


async def test_tiny_pools_with_preemption_equal_the_reference(tiny_pools: Cluster, reference: str) -> None:
    """K6, A9: more requests than blocks on both sides: some wait, some are preempted, none hangs."""
    prompts = [prompt(400 + 60 * number, seed=80 + number) for number in range(12)]
    expected = [(await complete(reference, ids, 100)).tokens for ids in prompts]
    got = await asyncio.wait_for(complete_all(tiny_pools.url, prompts, 100), 120)
    assert [each.tokens for each in got] == expected


@pytest.mark.parametrize("registration", ["auto", "eager"])
async def test_unknown_transfers_that_do_not_fit_into_decodes_memory_are_answered_in_seconds(
    tiny_pools: Cluster, reference: str, registration: str
) -> None:
    """P4: sixty legs want five times the blocks that there are; half of them name their prefill engine."""
    decode = tiny_pools.engines["decode-0"].url
    prompts = [prompt(200 + 6 * number, seed=500 + number) for number in range(60)]
    expected = [(await complete(reference, ids)).tokens for ids in prompts]

    def free() -> int:
        return tiny_pools.observer.engines["decode-0"].free_blocks

    await eventually(lambda: free() == 139)

    async def invented(number: int) -> tuple[tuple[int, ...], float]:
        started = time.monotonic()
        params = {"do_remote_prefill": True, "transfer_id": uuid.uuid4().hex, "registration": registration}
        named = {"prefill_engine_id": "prefill-0"} if number % 2 else {}
        got = await complete(decode, prompts[number], kv_transfer_params={**params, **named})
        return got.tokens, time.monotonic() - started

    answers = await asyncio.gather(*(invented(number) for number in range(60)))
    took = sorted(took_s for _, took_s in answers)
    print(f"{registration}: 60 unknown transfers answered after {took[0]:.1f} to {took[-1]:.1f} s")
    assert [tokens for tokens, _ in answers] == expected
    assert took[-1] < 15
    await eventually(lambda: free() == 139)


CHATS = [
    "What is the capital of France?",
    "Name three primary colors.",
    "Write a haiku about the sea.",
]


async def test_chat_with_the_real_model_equals_the_reference(tmp_path: Path) -> None:
    folder = smollm2(say)
    arguments = ("--max-model-len", "2048", "--seed", "1")
    engine = Engine(EngineSpec("real-reference", folder, folder.name, arguments=arguments), tmp_path)
    try:
        with Cluster(folder, tmp_path, arguments=arguments, extra=TRANSFER_ALL, say=say) as cluster:
            wait_until(lambda: engine.healthy, [engine.child], "booting the reference", say)
            expected = [await chat(engine.url, folder.name, question) for question in CHATS]
            before = await prompt_tokens(cluster.engines["decode-0"].url)
            got = [await chat(cluster.url, folder.name, question) for question in CHATS]
            spent = await prompt_tokens(cluster.engines["decode-0"].url) - before
    finally:
        engine.child.stop()
    assert "Paris" in expected[0]["choices"][0]["message"]["content"]
    router = (tmp_path / "router.log").read_text()
    assert router.rstrip().endswith("every request has ended; stopping"), "told once, in time (R2)"
    assert len((tmp_path / "traces.jsonl").read_text().splitlines()) == len(CHATS)
    contents = [[answer["choices"][0]["message"]["content"] for answer in answers] for answers in (got, expected)]
    assert contents[0] == contents[1]
    assert_came_from_outside(spent, sum(answer["usage"]["prompt_tokens"] for answer in got))


async def chat(url: str, model: str, question: str) -> dict[str, Any]:
    request = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 40,
        "temperature": 0,
    }
    status, answer = await post(f"{url}/v1/chat/completions", request)
    assert status == 200, answer
    return answer
