"""P3 on real engines: somebody on the bus changes, moves and repeats what the cluster says, under load.

``KVBUS_FORGE_MINUTES=15`` lets it take that long; the suite has it take twenty seconds.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time
from collections import Counter
from pathlib import Path

import pytest
from support.engines import ARGUMENTS as PLAIN
from support.engines import TRANSFER_ALL, assert_came_from_outside, complete, prompt, prompt_tokens, say
from support.waiting import eventually

from kvbus.bus import NatsBus
from kvbus.local import Cluster
from kvbus.sim.forge import Forger
from kvbus.wire import Subjects

MINUTES = float(os.environ.get("KVBUS_FORGE_MINUTES", "0.35"))
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900 + 60 * MINUTES)]

LATE_S = 35.0  # longer than any lease
EVERY_S = 0.01
AT_ONCE = 3
PROMPTS = 24
ENGINES = ("prefill-0", "decode-0")
# Nothing may be kept of a prompt, so that each request is a transfer.
ARGUMENTS = (*PLAIN, "--no-enable-prefix-caching")


async def forge(nats_url: str, until: float, said: Counter[str]) -> None:
    """Hear everything, and say something changed every :data:`EVERY_S`."""
    forger = Forger(random.Random(7), LATE_S)
    async with NatsBus([nats_url], "forger") as bus:
        await bus.subscribe(
            Subjects("default").everything, lambda subject, payload: forger.hear(subject, payload, time.monotonic())
        )
        while time.monotonic() < until:
            if (forged := forger.forge(time.monotonic())) is not None:
                bus.publish(forged.subject, forged.payload)
                said[forged.how] += 1
            await asyncio.sleep(EVERY_S)


async def ask(url: str, prompts: list[list[int]], expected: list[tuple[int, ...]], until: float) -> list[float]:
    """Requests one after the other; each answer must be right. Returns how long each took, seconds."""
    took: list[float] = []
    for number in itertools.count():
        if time.monotonic() > until:
            return took
        started = time.monotonic()
        got = await complete(url, prompts[number % len(prompts)])
        assert got.tokens == expected[number % len(prompts)], "another prompt's text"
        took.append(time.monotonic() - started)
    return took


def free_blocks(cluster: Cluster) -> dict[str, int]:
    return {name: cluster.observer.engines[name].free_blocks for name in ENGINES}


async def test_whatever_a_forger_says_the_cluster_answers_right(model: Path, tmp_path: Path, reference: str) -> None:
    prompts = [prompt(40 + 23 * number, seed=500 + number) for number in range(PROMPTS)]
    expected = [(await complete(reference, ids)).tokens for ids in prompts]
    with Cluster(model, tmp_path, arguments=ARGUMENTS, extra=TRANSFER_ALL, say=say) as cluster:
        for ids in prompts[:2]:
            await complete(cluster.url, ids)
        await eventually(lambda: len(set(free_blocks(cluster).values())) == 1)
        before, said = free_blocks(cluster), Counter[str]()
        decode = cluster.engines["decode-0"].url
        until = time.monotonic() + 60 * MINUTES
        shares = [(prompts[each::AT_ONCE], expected[each::AT_ONCE]) for each in range(AT_ONCE)]
        forging = asyncio.create_task(forge(cluster.nats_url, until, said))
        spent = await prompt_tokens(decode)
        asked = await asyncio.gather(*(ask(cluster.url, *share, until) for share in shares))
        took = sorted(itertools.chain(*asked))
        spent = await prompt_tokens(decode) - spent
        await forging
        cluster.check()
        print(f"{sum(said.values())} forged messages: {dict(said)}")
        print(f"{len(took)} requests, all right: p50 {took[len(took) // 2]:.2f} s, slowest {took[-1]:.1f} s")
        print(f"prompt tokens: {spent.external} from outside, {spent.computed} computed on decode")
        assert sum(said.values()) > 20 * 60 * MINUTES
        await eventually(lambda: free_blocks(cluster) == before, timeout_s=90)
        for ids, answer in zip(prompts[:6], expected, strict=False):
            spent = await prompt_tokens(decode)
            assert (await complete(cluster.url, ids)).tokens == answer
            assert_came_from_outside(await prompt_tokens(decode) - spent, len(ids))
