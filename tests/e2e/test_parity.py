"""The main promise: through P/D the answer is the one that a single engine gives, and D did not compute it itself."""

from __future__ import annotations

import pytest
from support.engines import assert_came_from_outside, complete, complete_all, prompt, prompt_tokens

from kvbus.local import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

BLOCK = 32
CHUNK = 256


@pytest.mark.parametrize(
    "tokens",
    [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 100, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 700, 1024, 2000],
)
async def test_equals_reference(cluster: Cluster, reference: str, tokens: int) -> None:
    ids = prompt(tokens)
    expected = await complete(reference, ids)
    before = await prompt_tokens(cluster.engines["decode-0"].url)
    got = await complete(cluster.url, ids)
    spent = await prompt_tokens(cluster.engines["decode-0"].url) - before
    assert got.tokens == expected.tokens
    assert_came_from_outside(spent, tokens)
    done = cluster.observer.transfer(got.headers["X-KVBus-Transfer-Id"])
    assert [each.blocks for each in done] == [-(-tokens // BLOCK)]


async def test_same_prompt_twice_and_then_longer(cluster: Cluster, reference: str) -> None:
    """Full hit on D, then a partial one: only the missing tail is pushed."""
    ids = prompt(300, seed=5)
    longer = ids + prompt(150, seed=6)
    await complete(cluster.url, ids)
    again = await complete(cluster.url, ids)
    assert again.tokens == (await complete(reference, ids)).tokens
    assert cluster.observer.transfer(again.headers["X-KVBus-Transfer-Id"])[0].blocks == 1
    tail = await complete(cluster.url, longer)
    assert tail.tokens == (await complete(reference, longer)).tokens
    cached_blocks = 300 // BLOCK
    assert cluster.observer.transfer(tail.headers["X-KVBus-Transfer-Id"])[0].blocks == -(-450 // BLOCK) - cached_blocks


async def test_sixteen_at_once(cluster: Cluster, reference: str) -> None:
    prompts = [prompt(64 + 37 * index, seed=100 + index) for index in range(16)]
    expected = [await complete(reference, each) for each in prompts]
    before = await prompt_tokens(cluster.engines["decode-0"].url)
    got = await complete_all(cluster.url, prompts)
    spent = await prompt_tokens(cluster.engines["decode-0"].url) - before
    assert [each.tokens for each in got] == [each.tokens for each in expected]
    assert_came_from_outside(spent, sum(len(each) for each in prompts))
