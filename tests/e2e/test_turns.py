"""Conversations: what their next turn costs, and that every answer is one engine's."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.engines import ARGUMENTS, TRANSFER_ALL, complete, metrics, prompt, prompt_tokens, say

from kvbus.local import Cluster
from kvbus.local.load import RequestResult, plain_stream, run_load

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SESSIONS, TURNS = 4, 5
ANSWER, NEW = 10, 20  # tokens of an answer, and of what the user says next


@pytest.fixture(scope="module")
def transferring(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(
        model, tmp_path_factory.mktemp("transferring"), arguments=ARGUMENTS, extra=TRANSFER_ALL, say=say
    ) as running:
        yield running


@pytest.fixture(scope="module")
def computing(model: Path, transferring: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """As it comes: decode computes short tails."""
    with Cluster(model, tmp_path_factory.mktemp("computing"), arguments=ARGUMENTS, say=say) as running:
        yield running


async def turn(cluster: Cluster, ids: list[int]) -> RequestResult:
    [result] = await run_load(plain_stream(cluster.url, "tiny-qwen3"), [ids], rate=None, max_tokens=ANSWER)
    assert not result.error
    return result


async def test_a_short_tail_is_computed_on_decode_and_costs_less(
    computing: Cluster, transferring: Cluster, reference: str
) -> None:
    """Interleaved: each turn goes to one cluster, then to the other."""
    ttft_s: dict[Cluster, list[float]] = {computing: [], transferring: []}
    decode, prefill = (computing.engines[name].url for name in ("decode-0", "prefill-0"))
    later_tokens = 0
    for session in range(SESSIONS):
        ids = prompt(600, seed=700 + session)
        for number in range(TURNS):
            spent = {url: await prompt_tokens(url) for url in (decode, prefill)}
            expected = (await complete(reference, ids, ANSWER)).tokens
            for cluster, times in ttft_s.items():
                result = await turn(cluster, ids)
                assert tuple(result.tokens) == expected
                if number:
                    times.append(result.ttft_s)
            on_decode = await prompt_tokens(decode) - spent[decode]
            if number:
                later_tokens += len(ids)
                assert on_decode.external == 0
                assert 0 < on_decode.computed <= 64
            ids = [*ids, *expected, *prompt(NEW, seed=800 + 10 * session + number)]
    here, there = (1e3 * statistics.median(times) for times in ttft_s.values())
    say(
        f"{SESSIONS * (TURNS - 1)} later turns: TTFT p50 {here:.0f} ms with the tail on decode, {there:.0f} ms with a "
        f"transfer, ratio {here / there:.2f}"
    )
    assert here < 0.8 * there
    text = await metrics(computing.url)
    assert f'kvbus_router_alone_total{{why="decode"}} {SESSIONS * (TURNS - 1)}.0' in text
    assert 'finished_reason="abort"' in await metrics(prefill), "its legs were ended"
