"""Conversations whose beginning only decode has: it is pushed to prefill, and every answer is one engine's."""

from __future__ import annotations

import asyncio
import itertools
import re
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.ears import listening
from support.engines import ARGUMENTS, TRANSFER_ALL, complete, metrics, prompt, prompt_tokens, say
from support.waiting import eventually

from kvbus.bus import NatsBus
from kvbus.local import Cluster
from kvbus.local.load import plain_stream, run_load
from kvbus.tools.caches import CacheRow, cache
from kvbus.wire import Message, Registration, Subjects

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SESSIONS, TURNS = 8, 6
ANSWER, NEW = 40, 60  # tokens of an answer, and of what the user says next
CONVERSATIONS = 200
TRIES = 24  # of what prefill does only if it pays
SMALL = 140  # blocks of 32 tokens: too few for the conversations


@pytest.fixture(scope="module")
def wide(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(
        model,
        tmp_path_factory.mktemp("wide"),
        prefill=2,
        decode=2,
        arguments=ARGUMENTS,
        prefill_arguments=["--num-gpu-blocks-override", str(SMALL)],
        extra={"history": True, "cache_events": True, **TRANSFER_ALL},
        say=say,
    ) as running:
        yield running


async def by_hand(
    wide: Cluster, prefill: str, decode: str, ids: list[int], *, history: bool = True, salt: str = ""
) -> tuple[int, ...]:
    """One turn on these engines, its legs sent as a router does."""
    name, body = uuid.uuid4().hex, {"cache_salt": salt} if salt else {}
    to_prefill = {"do_remote_decode": True, "transfer_id": name}
    to_decode = {"do_remote_prefill": True, "transfer_id": name, "prefill_engine_id": prefill}
    if history:
        to_prefill["history_engine_id"], to_decode["history"] = decode, True
    urls = (wide.engines[prefill].url, wide.engines[decode].url)
    _, got = await asyncio.gather(
        complete(urls[0], ids, 1, kv_transfer_params=to_prefill, **body),
        complete(urls[1], ids, ANSWER, kv_transfer_params=to_decode, **body),
    )
    return got.tokens


async def taken(wide: Cluster, *names: str) -> int:
    """Tokens that these prefill engines have taken from decode so far."""
    texts = [await metrics(wide.engines[name].url) for name in names]
    counter = r"vllm:kvbus_history_tokens_total{[^}]*} ([0-9.e+]+)"
    return sum(int(float(count)) for text in texts for count in re.findall(counter, text))


async def test_every_turn_equals_one_engines(wide: Cluster, reference: str) -> None:
    """Prefill engines alternate; a history is there whole, in part (prefill has its beginning), or not at all."""
    wrong, computed, prompts = 0, 0, 0
    began = {name: await prompt_tokens(wide.engines[name].url) for name in ("prefill-0", "prefill-1")}
    for session in range(SESSIONS):
        ids = prompt(200 + 50 * session, seed=900 + session)
        for turn in range(TURNS):
            decode = "decode-1" if turn == 3 and session % 2 else "decode-0"
            got = await by_hand(wide, f"prefill-{(session + turn) % 2}", decode, ids)
            expected = (await complete(reference, ids, ANSWER)).tokens
            wrong += got != expected
            prompts += len(ids)
            ids = [*ids, *expected, *prompt(NEW, seed=1000 + 10 * session + turn)]
    for name, before in began.items():
        computed += (await prompt_tokens(wide.engines[name].url) - before).computed
    came = await taken(wide, "prefill-0", "prefill-1")
    say(f"{SESSIONS * TURNS} turns, {wrong} wrong; {prompts} tokens of prompts: {computed} computed, {came} taken")
    assert wrong == 0
    assert came > 0, "how much depends on the machine: prefill computes what does not come in time, or hardly pays"


async def test_turns_of_all_sessions_at_once_equal_one_engines(wide: Cluster, reference: str) -> None:
    """Through the router, which knows the session by its prompt's head."""
    before = await taken(wide, "prefill-0", "prefill-1")
    talks = await talk(wide, reference, seed=2000)
    say(f"slowest first token {max(talks):.2f} s; {await taken(wide, 'prefill-0', 'prefill-1') - before} tokens taken")
    assert await taken(wide, "prefill-0", "prefill-1") > before


async def talk(wide: Cluster, reference: str, seed: int, *, cut: int = 0) -> list[float]:
    """All sessions through the router at once; returns the times to first token, seconds.

    Args:
        cut: how many streams may break after their first token.
    """
    first_tokens, broken = list[float](), list[str]()

    async def session(number: int) -> None:
        ids = prompt(400 + 40 * number, seed=seed + number)
        for turn in range(TURNS):
            [expected] = await run_load(plain_stream(reference, "tiny-qwen3"), [ids], rate=None, max_tokens=ANSWER)
            [got] = await run_load(plain_stream(wide.url, "tiny-qwen3"), [ids], rate=None, max_tokens=ANSWER)
            assert got.ttft_s, got.error
            first_tokens.append(got.ttft_s)
            if got.error:
                broken.append(got.error)
                assert got.tokens == expected.tokens[: len(got.tokens)]
            else:
                assert got.tokens == expected.tokens
            ids = [*ids, *expected.tokens, *prompt(NEW, seed=seed + 100 + 10 * number + turn)]

    await asyncio.gather(*(session(number) for number in range(SESSIONS)))
    assert len(broken) <= cut, broken
    return first_tokens


async def test_a_router_that_never_saw_a_conversation_finds_it_by_the_caches(wide: Cluster) -> None:
    """Each was served by two engines, past the router, which has not heard of it."""
    for number, (prefill, decode) in enumerate(itertools.product(("prefill-1", "prefill-0"), ("decode-0", "decode-1"))):
        ids = prompt(900, seed=70 + number)
        ids = [*ids, *await by_hand(wide, prefill, decode, ids)]
        async with asyncio.timeout(30):
            while not {prefill, decode} <= {each.engine for each in await holders(wide, ids)}:
                await asyncio.sleep(0.2)
        got = await complete(wide.url, [*ids, *prompt(NEW, seed=80)], ANSWER)
        assert (got.headers["X-KVBus-Prefill"], got.headers["X-KVBus-Decode"]) == (prefill, decode)


async def holders(wide: Cluster, ids: list[int]) -> list[CacheRow]:
    """The engines that have nearly all of a prompt, as ``kvbus cache`` shows it."""
    view = await cache(NatsBus([wide.nats_url], "cache"), Subjects("default"), where=wide.nats_url, prompt=ids)
    return [each for each in view.engines if (each.tokens or 0) > len(ids) - 100]


async def test_another_salt_gets_nothing(wide: Cluster, reference: str) -> None:
    ids = prompt(600, seed=77)
    ids = [*ids, *await by_hand(wide, "prefill-0", "decode-0", ids, salt="a"), *prompt(NEW, seed=78)]
    before = await taken(wide, "prefill-0", "prefill-1")
    expected = (await complete(reference, ids, ANSWER)).tokens
    assert await by_hand(wide, "prefill-1", "decode-0", ids, salt="b") == expected
    assert await taken(wide, "prefill-0", "prefill-1") == before
    for turn in range(TRIES):
        ids = [*ids, *expected, *prompt(NEW, seed=79 + turn)]
        expected = (await complete(reference, ids, ANSWER)).tokens
        assert await by_hand(wide, f"prefill-{turn % 2}", "decode-0", ids, salt="a") == expected
        if await taken(wide, "prefill-0", "prefill-1") > before:
            return
    pytest.fail("this salt's own history was not taken either")


async def free(wide: Cluster, name: str) -> int:
    """The free blocks of an engine that has nothing to do."""
    await eventually(lambda: name in wide.observer.engines and not wide.observer.engines[name].requests, 60)
    await asyncio.sleep(1)  # two heartbeats
    return wide.observer.engines[name].free_blocks


def sends_to(name: str) -> Callable[[str, Message], bool]:
    """Whether a decode engine is about to write a history into this prefill engine."""
    return lambda _, said: isinstance(said, Registration) and "~" in said.transfer_id and said.sink_engine == name


def is_sent_by(name: str) -> Callable[[str, Message], bool]:
    """Whether this decode engine is about to write a history."""
    return lambda to, said: isinstance(said, Registration) and "~" in said.transfer_id and f".{name}." in f"{to}."


@pytest.mark.parametrize(("name", "when"), [("prefill-0", sends_to), ("decode-0", is_sent_by)])
async def test_an_engine_killed_while_a_history_is_written_fails_no_request(
    wide: Cluster, reference: str, name: str, when: Callable[[str], Callable[[str, Message], bool]]
) -> None:
    killed: list[float] = []
    async with listening(wide.nats_url) as ears:

        def kill(subject: str, message: Message) -> None:
            if not killed and when(name)(subject, message):
                killed.append(time.monotonic())
                wide.engines[name].child.signal(signal.SIGKILL)

        ears.react = kill
        first_tokens = await talk(wide, reference, seed=4000 + len(name), cut=SESSIONS if name == "decode-0" else 0)
    assert killed
    say(f"{name} killed: {len(first_tokens)} turns, slowest first token {max(first_tokens):.2f} s")
    assert max(first_tokens) < 10
    wide.forget(name)
    for other in wide.engines:
        whole = SMALL - 1 if other.startswith("prefill") else wide.observer.engines[other].total_blocks - 1
        await eventually(lambda other=other, whole=whole: wide.observer.engines[other].free_blocks == whole, 30)  # type: ignore[misc]
    wide.start_engine(name)
    await asyncio.to_thread(wide.wait_ready)


async def test_without_nats_for_seconds_no_request_fails(wide: Cluster, reference: str) -> None:
    assert wide.nats is not None

    async def away() -> None:
        await asyncio.sleep(1)
        wide.nats.child.signal(signal.SIGSTOP)  # type: ignore[union-attr]
        await asyncio.sleep(3)
        wide.nats.child.signal(signal.SIGCONT)  # type: ignore[union-attr]

    hurting = asyncio.create_task(away())
    first_tokens = await talk(wide, reference, seed=6000)
    await hurting
    say(f"NATS away for 3 s: {len(first_tokens)} turns, slowest first token {max(first_tokens):.2f} s")
    for name in ("prefill-0", "prefill-1"):
        await eventually(lambda name=name: wide.observer.engines[name].free_blocks == SMALL - 1, 30)  # type: ignore[misc]


async def test_idle_conversations_cost_decode_nothing(wide: Cluster) -> None:
    before = await free(wide, "decode-0")
    for first in range(0, CONVERSATIONS, 8):
        turns = (
            by_hand(wide, f"prefill-{number % 2}", "decode-0", prompt(100, seed=3000 + number), history=number % 4 != 0)
            for number in range(first, first + 8)
        )
        await asyncio.gather(*turns)
    assert await free(wide, "decode-0") == before
    assert await free(wide, "prefill-0") == SMALL - 1
