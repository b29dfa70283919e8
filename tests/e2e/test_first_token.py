"""Decode goes on from the token that prefill sampled, on real engines."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest
from support.engines import complete, metrics, prompt

from kvbus.local import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SAMPLED: dict[str, Any] = {"temperature": 2.0}  # nearly any token may come
HUGE = (1 << 31) - 1
OWN = 9000  # seeds of prompts that no other test has: those that count tokens must not find theirs in a cache


async def both_legs(cluster: Cluster, ids: list[int], on_decode: dict[str, Any]) -> tuple[int, tuple[int, ...]]:
    """The token that prefill sampled, and decode's answer."""
    name = uuid.uuid4().hex
    on_prefill = {"do_remote_decode": True, "transfer_id": name, "takes_token": True}
    on_decode = {"do_remote_prefill": True, "transfer_id": name, **on_decode}
    prefill, decode = (cluster.engines[each] for each in ("prefill-0", "decode-0"))
    first, rest = await asyncio.gather(
        complete(prefill.url, ids, 1, kv_transfer_params=on_prefill, **SAMPLED),
        complete(decode.url, ids, 5, kv_transfer_params=on_decode, **SAMPLED),
    )
    return first.tokens[0], rest.tokens


@pytest.mark.parametrize("tokens", [2, 100, 700])
async def test_sampled_answers_go_on_from_prefills_token(cluster: Cluster, tokens: int) -> None:
    """Eight at once, so that the batch of the sampler changes, and with a prompt of several steps."""
    answers = await asyncio.gather(
        *(both_legs(cluster, prompt(tokens, seed=OWN + seed), {"takes_token": True}) for seed in range(8))
    )
    assert [first for first, _ in answers] == [answer[0] for _, answer in answers]
    assert any(set(answer) != {answer[0]} for _, answer in answers), "what follows is sampled"


async def test_who_does_not_ask_samples_its_own(cluster: Cluster) -> None:
    answers = await asyncio.gather(*(both_legs(cluster, prompt(100, seed=OWN + 50 + seed), {}) for seed in range(8)))
    assert any(first != answer[0] for first, answer in answers)


async def test_a_token_can_be_named(cluster: Cluster) -> None:
    """Also by a request whose prompt decode computes: a router has sent this token to its client already."""
    _, answer = await both_legs(cluster, prompt(100, seed=OWN + 60), {"first_token": 1234})
    assert answer[0] == 1234
    alone = await complete(
        cluster.engines["decode-0"].url, prompt(700, seed=OWN + 61), 5, kv_transfer_params={"first_token": 1234}
    )
    assert alone.tokens[0] == 1234


@pytest.mark.parametrize("token", [HUGE, -1, "5", True])
async def test_a_token_that_there_is_not_changes_nothing(cluster: Cluster, reference: str, token: object) -> None:
    ids = prompt(90, seed=OWN + 62)
    params = {"first_token": token}
    got = await complete(cluster.engines["decode-0"].url, ids, kv_transfer_params=params)
    assert got.tokens == (await complete(reference, ids)).tokens


async def test_it_is_counted(cluster: Cluster) -> None:
    await both_legs(cluster, prompt(100, seed=OWN + 70), {"takes_token": True})
    text = await metrics(cluster.engines["decode-0"].url)
    counts = [line for line in text.splitlines() if line.startswith("vllm:kvbus_first_tokens_total{")]
    assert float(counts[0].rsplit(" ", 1)[1]) >= 1
