"""2P2D of real engines under load: a prefill engine is killed, then a decode engine; then both are drained."""

from __future__ import annotations

import asyncio
import itertools
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.ears import Ears, listening
from support.engines import ARGUMENTS, say

from kvbus.local import Cluster, make_prompt
from kvbus.local.load import RequestResult, plain_stream, run_load
from kvbus.wire import Delivered, Message, PrefillCompleted, PrefillProgress, Registration

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

RATE, SECONDS = 4.0, 14
PROMPT_TOKENS = 1500


@pytest.fixture(scope="module")
def crowd(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    logs = tmp_path_factory.mktemp("crowd")
    with Cluster(model, logs, prefill=2, decode=2, arguments=ARGUMENTS, say=say) as running:
        yield running


async def load_and_kill(
    crowd: Cluster, reference: str, seed: int, name: str, when: Callable[[Message], bool]
) -> tuple[list[RequestResult], Ears]:
    """Load the router, kill an engine in the middle at a moment ``when`` it has work, and compare every answer."""
    prompts = [make_prompt(PROMPT_TOKENS, seed + number) for number in range(int(SECONDS * RATE))]
    alone = await run_load(plain_stream(reference, "tiny-qwen3"), prompts, rate=None, max_tokens=16)
    killed: list[float] = []
    kill_from = time.monotonic() + SECONDS / 3

    async with listening(crowd.nats_url) as ears:

        def kill(_: str, message: Message) -> None:
            if not killed and time.monotonic() > kill_from and when(message):
                killed.append(time.monotonic())
                crowd.engines[name].child.signal(signal.SIGKILL)

        ears.react = kill
        finished = await run_load(
            plain_stream(crowd.url, "tiny-qwen3"), prompts, rate=RATE, max_tokens=16, timeout_s=60
        )
        ears.react = None
    assert killed
    wrong = [result.index for result in finished if not result.error and result.tokens != alone[result.index].tokens]
    assert wrong == [], "an answer differs from the reference"
    failed = [result for result in finished if result.error]
    slowest = max(result.ttft_s for result in finished)
    say(
        f"{name} killed: {len(finished)} requests, {sum(not result.ttft_s for result in failed)} failed before their "
        f"first token, {len(failed)} in all; slowest first token {slowest:.2f} s; attempts {dict(attempts(ears))}"
    )
    assert [result.error for result in failed if not result.ttft_s] == []
    assert attempts(ears)[2] > 0, "nothing had to be taken over: this shows nothing"
    return finished, ears


async def back_in_use(crowd: Cluster, name: str, seed: int) -> None:
    """The engine is started again under its name, and gets requests without any command."""
    crowd.forget(name)
    crowd.start_engine(name)
    await asyncio.to_thread(crowd.wait_ready)
    prompts = [make_prompt(200, seed + number) for number in range(24)]
    async with listening(crowd.nats_url) as ears:
        finished = await run_load(plain_stream(crowd.url, "tiny-qwen3"), prompts, rate=8, max_tokens=4, timeout_s=60)
    assert [result.error for result in finished if result.error] == []
    if name.startswith("prefill"):
        assert ears.all(PrefillCompleted, source_engine=name)
    else:
        assert ears.all(Registration, sink_engine=name)


async def test_a_killed_prefill_engine_is_replaced(crowd: Cluster, reference: str) -> None:
    """Decode keeps its request and its stream; another prefill engine computes the prompt under the next attempt."""

    def computing(message: Message) -> bool:
        return isinstance(message, PrefillProgress) and message.source_engine == "prefill-0" and message.computed > 0

    finished, _ = await load_and_kill(crowd, reference, 5000, "prefill-0", computing)
    assert [result.error for result in finished if result.error] == [], "no stream depends on a prefill engine"
    await back_in_use(crowd, "prefill-0", 5500)


async def test_a_killed_decode_engine_is_replaced_without_a_second_prefill(crowd: Cluster, reference: str) -> None:
    """Unless it had just said that the first token is out: prefill has let the KV go then, and the token is lost."""

    def registering(message: Message) -> bool:
        return isinstance(message, Registration) and message.sink_engine == "decode-0"

    _, ears = await load_and_kill(crowd, reference, 6000, "decode-0", registering)
    prefills = Counter(transfer_id for transfer_id, _ in {(m.transfer_id, m.request_id) for m in completed(ears)})
    second = {transfer_id for transfer_id, number in prefills.items() if number > 1}
    needed = {said.transfer_id for said in ears.all(Delivered, sink_engine="decode-0")}
    say(f"second prefills: {len(second)}, {len(second & needed)} of them since the first token died with decode-0")
    await back_in_use(crowd, "decode-0", 6500)
    assert second <= needed


async def test_engines_are_drained_removed_and_added_without_losing_a_request(crowd: Cluster, reference: str) -> None:
    """As an operator does it: ``kvbus drain``, stop, start again, while clients ask."""
    numbers, changed, finished = itertools.count(7000), asyncio.Event(), list[tuple[int, RequestResult]]()

    async def some() -> None:
        """Five seconds of load."""
        asked = list(itertools.islice(numbers, 10))
        prompts = [make_prompt(400, number) for number in asked]
        got = await run_load(plain_stream(crowd.url, "tiny-qwen3"), prompts, rate=2.0, max_tokens=8, timeout_s=60)
        finished.extend(zip(asked, got, strict=True))

    async def until_changed() -> None:
        while not changed.is_set():
            await some()

    load = asyncio.create_task(until_changed())
    for name in ("prefill-0", "decode-0"):
        drained = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvbus", "drain", name, "--nats-url", crowd.nats_url, stderr=subprocess.PIPE
        )
        _, said = await drained.communicate()
        say(said.decode())
        assert drained.returncode == 0
        assert f"{name} is drained" in said.decode()
        await asyncio.to_thread(crowd.forget, name)
    for name in ("prefill-0", "decode-0"):
        crowd.start_engine(name)
    await asyncio.to_thread(crowd.wait_ready)
    changed.set()
    await load
    async with listening(crowd.nats_url) as ears:
        await some()
        await some()
    failed = [result.error for _, result in finished if result.error]
    say(f"{len(finished)} requests while two engines were drained, removed and added: {len(failed)} failed")
    assert failed == []
    prompts = [make_prompt(400, number) for number, _ in finished]
    alone = await run_load(plain_stream(reference, "tiny-qwen3"), prompts, rate=None, max_tokens=8)
    assert [result.tokens for _, result in finished] == [result.tokens for result in alone]
    assert ears.all(PrefillCompleted, source_engine="prefill-0")
    assert ears.all(Registration, sink_engine="decode-0")


def completed(ears: Ears) -> list[PrefillCompleted]:
    return ears.all(PrefillCompleted)


def attempts(ears: Ears) -> Counter[int]:
    """How many registrations there were under each attempt, however often they were sent."""
    return Counter(attempt for _, attempt in {(each.transfer_id, each.attempt) for each in ears.all(Registration)})
