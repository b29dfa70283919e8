"""Engines and the NATS server of the shared cluster killed under load, and started again."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable

import pytest
from support.engines import BLOCK_LEASE_S, complete, prompt, say

from kvbus.local import Cluster, NatsServer, make_prompt
from kvbus.local.load import RequestResult, plain_stream, run_load

pytestmark = [pytest.mark.e2e, pytest.mark.hurts_the_cluster, pytest.mark.timeout(900)]

RATE = 4.0
AWAY_S = 20.0


async def load_with(
    cluster: Cluster, reference: str, seconds: float, seed: int, hurt: Callable[[], None], after_s: float
) -> list[RequestResult]:
    """Load the router, call ``hurt`` in the middle, and check every answer that was given."""
    prompts = [make_prompt(900, seed + number) for number in range(int(seconds * RATE))]
    alone = await run_load(plain_stream(reference, "tiny-qwen3"), prompts, rate=None, max_tokens=8)

    async def later() -> None:
        await asyncio.sleep(after_s)
        hurt()

    hurting = asyncio.create_task(later())
    finished = await run_load(plain_stream(cluster.url, "tiny-qwen3"), prompts, rate=RATE, max_tokens=8, timeout_s=60)
    await hurting
    slowest = max((result for result in finished if not result.error), key=lambda result: result.ttft_s)
    failed = sum(bool(result.error) for result in finished)
    say(f"{len(finished)} requests, {failed} failed; slowest first token {slowest.ttft_s:.2f} s")
    wrong = [result.index for result in finished if not result.error and result.tokens != alone[result.index].tokens]
    assert wrong == [], "an answer differs from the reference"
    return finished


async def until_free(cluster: Cluster, name: str, blocks: int, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while (beat := cluster.observer.engines.get(name)) is None or beat.free_blocks != blocks:
        assert time.monotonic() < deadline, f"{name}: {beat}, expected {blocks} free blocks"
        await asyncio.sleep(0.1)
    say(f"{name}: {blocks} blocks free again, as at the start, {within_s - (deadline - time.monotonic()):.1f} s later")


async def free(cluster: Cluster, name: str) -> int:
    """The free blocks of an engine that has nothing to do."""
    await asyncio.to_thread(cluster.wait_ready)  # what the test before has started again
    beats = [cluster.observer.engines[name]]
    while beats[-1].requests or len(beats) < 15 or beats[-1] != beats[-15]:
        await asyncio.sleep(0.1)
        beats.append(cluster.observer.engines[name])
    return beats[-1].free_blocks


def restart(cluster: Cluster, name: str) -> None:
    """Start a killed engine again under its name."""
    cluster.forget(name)
    cluster.start_engine(name)


async def test_nats_killed_for_twenty_seconds_loses_no_request(cluster: Cluster, reference: str) -> None:
    """C6."""
    blocks = await free(cluster, "decode-0")
    assert cluster.nats is not None
    server = cluster.nats

    killed = asyncio.Event()

    def kill() -> None:
        server.child.signal(signal.SIGKILL)
        killed.set()

    async def come_back() -> None:
        await killed.wait()
        await asyncio.sleep(AWAY_S)
        # In this thread: a child ends with the thread that started it.
        cluster.replace_nats(NatsServer(cluster.logs, server.port, "nats-again"))

    back = asyncio.create_task(come_back())
    finished = await load_with(cluster, reference, 16, 1000, kill, after_s=4)
    assert [result.error for result in finished if result.error] == []
    assert max(result.ttft_s for result in finished) < 8
    await back
    await asyncio.sleep(3)
    got = await complete(cluster.url, prompt(300, seed=77))
    assert cluster.observer.transfer(got.headers["X-KVBus-Transfer-Id"]), "full speed afterwards"
    await until_free(cluster, "decode-0", blocks, 10)


async def test_a_prefill_engine_that_is_told_to_end_loses_no_request(cluster: Cluster, reference: str) -> None:
    """C5: SIGTERM under load."""
    blocks = await free(cluster, "decode-0")
    end = cluster.engines["prefill-0"].child.signal
    finished = await load_with(cluster, reference, 8, 4000, lambda: end(signal.SIGTERM), after_s=4)
    assert [result.error for result in finished if result.error] == []
    await until_free(cluster, "decode-0", blocks, 10)
    restart(cluster, "prefill-0")


async def test_a_killed_prefill_engine_loses_no_request(cluster: Cluster, reference: str) -> None:
    """C1."""
    blocks = await free(cluster, "decode-0")
    kill = cluster.engines["prefill-0"].child.signal
    finished = await load_with(cluster, reference, 16, 2000, lambda: kill(signal.SIGKILL), after_s=5)
    assert [result.error for result in finished if result.error] == []
    assert max(result.ttft_s for result in finished) < 5 + 2
    await until_free(cluster, "decode-0", blocks, 10)
    restart(cluster, "prefill-0")
    await asyncio.to_thread(cluster.wait_ready)
    got = await complete(cluster.url, prompt(300, seed=78))
    assert cluster.observer.transfer(got.headers["X-KVBus-Transfer-Id"]), "it is used again without any command"


async def test_a_killed_decode_engine_leaks_nothing_on_prefill(cluster: Cluster, reference: str) -> None:
    """L3, C3."""
    blocks = await free(cluster, "prefill-0")
    kill = cluster.engines["decode-0"].child.signal
    await load_with(cluster, reference, 8, 3000, lambda: kill(signal.SIGKILL), after_s=4)
    await until_free(cluster, "prefill-0", blocks, BLOCK_LEASE_S + 5)
    restart(cluster, "decode-0")
    await asyncio.to_thread(cluster.wait_ready)
    ids = prompt(700, seed=79)
    got = await complete(cluster.url, ids)
    assert got.tokens == (await complete(reference, ids)).tokens
    assert cluster.observer.transfer(got.headers["X-KVBus-Transfer-Id"])
