"""Cases that need a fault at one exact moment, on two real engines, real NIXL and a real nats-server.

Both engines run the real connector, which holds back what a test orders it to (:mod:`support.hurt_connector`). They are
booted once, with the handshake held: the first tests need engines that have never met.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

import msgpack
import psutil
import pytest
from support.ears import Ears, listening
from support.engines import (
    ARGUMENTS,
    TRANSFER_ALL,
    Completion,
    complete,
    complete_all,
    post,
    prompt,
    prompt_tokens,
    say,
)
from support.hurt import Hurt, Orders
from support.waiting import eventually

from kvbus.local import Cluster
from kvbus.local.cluster import is_healthy
from kvbus.protocol import WRITE_LEASE_S, term_s
from kvbus.protocol.decode import UNCLAIMED_S
from kvbus.wire import (
    CancelAck,
    Message,
    PrefillCompleted,
    Registration,
    RegistrationAck,
    Subjects,
    TransferDone,
    TransferFailed,
    TransferStarted,
    encode,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

BLOCK = 32
POOL = 140
BLOCK_LEASE_S = 8.0
TRANSFER_TIMEOUT_S = 10.0
MAX_WRITE_S = 4.0
DEAD_AFTER_S = 5.0
SOON_S = 2.5
SLOTS = 4
LARGE = 2600  # tokens; two such prompts do not fit into the pool side by side
P, D = "prefill-0", "decode-0"


@pytest.fixture(scope="module")
def hurt(tmp_path_factory: pytest.TempPathFactory) -> Hurt:
    return Hurt(tmp_path_factory.mktemp("hurt"))


@pytest.fixture(scope="module")
def pair(model: Any, hurt: Hurt, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    hurt.order(Orders(hold_handshake=True))
    with Cluster(
        model,
        tmp_path_factory.mktemp("pair"),
        arguments=[*ARGUMENTS, "--num-gpu-blocks-override", str(POOL)],
        decode_arguments=["--max-num-seqs", str(SLOTS)],
        extra={
            **TRANSFER_ALL,
            "block_lease_s": BLOCK_LEASE_S,
            "transfer_timeout_s": TRANSFER_TIMEOUT_S,
            "max_write_s": MAX_WRITE_S,
            "dead_after_s": DEAD_AFTER_S,
            "registration": "eager",  # the faults of blocks that are held early
        },
        transfer={"kv_connector": "HurtConnector", "kv_connector_module_path": "support.hurt_connector"},
        environment={**hurt.environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},  # two processes: each can fail alone
        say=say,
    ) as running:
        yield running


@pytest.fixture
async def ears(pair: Cluster) -> AsyncIterator[Ears]:
    async with listening(pair.nats_url) as heard:
        yield heard


@pytest.fixture
def met(hurt: Hurt, ears: Ears) -> Ears:
    """Nothing is held back, whatever the test before has left: the engines meet if they have not."""
    hurt.order(Orders())
    return ears


def url(pair: Cluster, name: str) -> str:
    return pair.engines[name].url


def free(pair: Cluster, name: str) -> int:
    """As its last heartbeat said; -1 while it is taken for gone."""
    beat = pair.observer.engines.get(name)
    return beat.free_blocks if beat is not None else -1


async def until_free(pair: Cluster, name: str, within_s: float) -> float:
    """Wait until nothing of an engine's pool is in use; returns how long that took, seconds."""
    started = time.monotonic()
    await eventually(lambda: free(pair, name) == POOL - 1, within_s)
    return time.monotonic() - started


async def all_free(pair: Cluster) -> None:
    for name in (P, D):
        await until_free(pair, name, TRANSFER_TIMEOUT_S + BLOCK_LEASE_S)


def to_prefill(transfer_id: str) -> dict[str, Any]:
    return {"kv_transfer_params": {"do_remote_decode": True, "transfer_id": transfer_id}}


def to_decode(transfer_id: str) -> dict[str, Any]:
    return {"kv_transfer_params": {"do_remote_prefill": True, "transfer_id": transfer_id, "prefill_engine_id": P}}


async def prefilled(pair: Cluster, ears: Ears, ids: list[int], transfer_id: str) -> None:
    """Let P, which has nothing else to do, compute a prompt and keep its blocks."""
    await complete(url(pair, P), ids, 1, **to_prefill(transfer_id))
    await ears.first(PrefillCompleted, transfer_id=transfer_id)
    await eventually(lambda: free(pair, P) == POOL - 1 - -(-len(ids) // BLOCK))


async def came_over(pair: Cluster, reference: str, seed: int) -> None:
    """The engines serve, and KV goes from P to D."""
    ids = prompt(400, seed)
    got = await complete(pair.url, ids)
    assert got.tokens == (await complete(reference, ids)).tokens
    assert pair.observer.transfer(got.headers["X-KVBus-Transfer-Id"]), "computed on D"


@asynccontextmanager
async def busy_slots(pair: Cluster) -> AsyncIterator[None]:
    """All of D's slots are taken by requests of its own: whatever comes now is queued."""
    fillers = [asyncio.create_task(complete(url(pair, D), prompt(40, 900 + each), 620)) for each in range(SLOTS)]
    try:
        await eventually(lambda: pair.observer.engines[D].requests == SLOTS)
        yield
        assert not any(filler.done() for filler in fillers), "the slots were not taken for long enough"
    finally:
        await drop(*fillers)


async def drop(*asking: asyncio.Task[Any]) -> None:
    """Go away, as a client does."""
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)


@contextmanager
def frozen(*pids: int) -> Iterator[None]:
    """These processes stop."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def processes(pair: Cluster, name: str) -> list[psutil.Process]:
    root = psutil.Process(pair.engines[name].child.pid)
    return [root, *root.children(recursive=True)]


def pids(pair: Cluster, name: str) -> list[int]:
    return [process.pid for process in processes(pair, name)]


async def test_prefill_killed_between_registration_and_handshake(
    pair: Cluster, hurt: Hurt, ears: Ears, reference: str
) -> None:
    """C2."""
    ids = prompt(700, seed=1)
    expected = await complete(reference, ids)
    asking = asyncio.create_task(complete(pair.url, ids))
    acknowledged = await ears.first(RegistrationAck)
    assert hurt.notes("handshake held"), "P has not met D's memory"
    pair.engines[P].child.signal(signal.SIGKILL)
    killed_at = time.monotonic()
    try:
        got = await asking
        took_s = time.monotonic() - killed_at
        print(f"C2: answered {took_s:.1f} s after the kill")
        assert got.tokens == expected.tokens
        assert took_s < DEAD_AFTER_S + term_s(WRITE_LEASE_S, MAX_WRITE_S)
        assert acknowledged.transfer_id == got.headers["X-KVBus-Transfer-Id"]
        assert not hurt.notes("posted")
        assert (await complete(url(pair, D), ids)).tokens == expected.tokens, "D lives"
        await until_free(pair, D, SOON_S)
    finally:  # the other tests need it, whatever became of this one
        pair.forget(P)
        pair.start_engine(P)
        await asyncio.to_thread(pair.wait_ready)


async def test_a_handshake_later_than_the_block_lease(pair: Cluster, hurt: Hurt, ears: Ears, reference: str) -> None:
    """L4: P's blocks are another prompt's by then."""
    ids, others = prompt(900, seed=2), [prompt(LARGE, seed=3 + each) for each in range(2)]
    expected = await complete(reference, ids)
    held = len(hurt.notes("handshake held"))
    await eventually(lambda: len(hurt.notes("handshake held")) >= held > 0)
    asking = asyncio.create_task(complete(pair.url, ids, 200))
    completed = await ears.first(PrefillCompleted)
    since = time.monotonic()
    about = {"transfer_id": completed.transfer_id}
    await ears.first(Registration, source_incarnation=completed.source_incarnation, **about)
    failed = await ears.first(TransferFailed, timeout_s=BLOCK_LEASE_S + 5, **about)
    told_s = time.monotonic() - since
    assert failed.reason == "block lease expired"
    assert told_s > BLOCK_LEASE_S - 0.5
    for other in others:
        await complete(url(pair, P), other, 1)
    hurt.order(Orders())
    await came_over(pair, reference, seed=5)
    assert (await asking).tokens[:12] == expected.tokens
    print(f"L4: D was told {told_s:.1f} s after the prefill")
    assert not hurt.notes("posted", completed.transfer_id), "written after the lease"
    assert not ears.all(TransferStarted, **about)
    await all_free(pair)


async def test_a_request_that_is_aborted_in_decodes_queue_frees_prefill(
    pair: Cluster, met: Ears, reference: str
) -> None:
    """A2."""
    same = uuid.uuid4().hex
    async with busy_slots(pair):
        asking = asyncio.create_task(complete(url(pair, D), prompt(1000, seed=6), **to_decode(same)))
        await prefilled(pair, met, prompt(1000, seed=6), same)
        await eventually(lambda: pair.observer.engines[D].requests == SLOTS + 1)
        assert not met.all(Registration, transfer_id=same), "it is still queued"
        await drop(asking)
        took_s = await until_free(pair, P, SOON_S)
    print(f"A2: P free {took_s:.1f} s after the abort; the lease is {BLOCK_LEASE_S} s")
    await all_free(pair)


@pytest.mark.parametrize("bad", [{"min_tokens": 20}, {"stream_options": {"include_usage": True}}])
async def test_a_request_that_decode_rejects_frees_prefill(pair: Cluster, met: Ears, bad: dict[str, Any]) -> None:
    """A2: a bad value that P is not sent; P has computed the prompt before D says so. vLLM tells its connector of the
    first kind of refusal, not of the second."""
    body = {"model": "tiny-qwen3", "prompt": prompt(1000, seed=7), "max_tokens": 10, **bad}
    with frozen(pair.engines[D].child.pid):  # its API server alone
        asking = asyncio.create_task(post(f"{pair.url}/v1/completions", body))
        completed = await met.first(PrefillCompleted)
        await eventually(lambda: free(pair, P) < POOL - 1)
    status, answer = await asking
    assert status == 400, answer
    assert not met.all(Registration, transfer_id=completed.transfer_id)
    took_s = await until_free(pair, P, SOON_S)
    print(f"A2: P free {took_s:.1f} s after the refusal; the lease is {BLOCK_LEASE_S} s")


async def test_requests_whose_prefill_never_answers_do_not_hold_decode_for_ever(
    pair: Cluster, met: Ears, reference: str
) -> None:
    """A9: P is there and never gets these; parked they take D's whole pool."""
    parked, later = [prompt(1080, 10 + each) for each in range(SLOTS)], [prompt(500, 20 + each) for each in range(3)]
    expected = [(await complete(reference, ids)).tokens for ids in parked + later]
    started, ended = time.monotonic(), []

    async def timed(asking: Any) -> Completion:
        got: Completion = await asking
        ended.append(time.monotonic() - started)
        return got

    same = [uuid.uuid4().hex for _ in parked]
    asking = [
        asyncio.create_task(timed(complete(url(pair, D), ids, **to_decode(transfer_id))))
        for ids, transfer_id in zip(parked, same, strict=True)
    ]
    for transfer_id in same:
        await met.first(RegistrationAck, transfer_id=transfer_id)
    await eventually(lambda: free(pair, D) < 500 // BLOCK)
    got_later = asyncio.create_task(complete_all(pair.url, later))
    got = [each.tokens for each in await asyncio.gather(*asking)]
    served = [each.tokens for each in await got_later]
    later_s = time.monotonic() - started
    assert got + served == expected
    print(f"A9: parked ones ended after {min(ended):.1f} to {max(ended):.1f} s, later ones after {later_s:.1f} s")
    assert min(ended) > UNCLAIMED_S - 0.5, "they were parked"
    assert max(ended) < UNCLAIMED_S + 5
    assert later_s < UNCLAIMED_S + 5
    await all_free(pair)


SAID_BY_SINK = ("reg", "wanted", "cancel")
SAID_BY_SOURCE = ("progress", "completed", "prefill_failed", "ack", "cancel_ack", "started", "done", "failed")
JUNK = (
    b"",
    b"\xff\xfe junk that is no msgpack",
    os.urandom(4096),
    msgpack.packb([1, 2, 3]),
    msgpack.packb({"v": 1}),
    msgpack.packb({"v": 99, "k": "reg"}),
    msgpack.packb({"v": 1, "k": "nonsense"}),
    *(msgpack.packb({"v": 1, "k": kind, "transfer_id": 7, "rank": "x"}) for kind in (*SAID_BY_SINK, *SAID_BY_SOURCE)),
    *(
        msgpack.packb({"v": 1, "k": kind, "engine": ["x"], "incarnation": -1})
        for kind in ["hb", "pulse", "echo", "who", "bye", "meta?", "meta!"]
    ),
)
HUGE = (
    msgpack.packb({"v": 1, "k": "reg", "blocks": [[[0, 1]] * 70_000]}),
    msgpack.packb({"v": 1, "k": "echo", "sink_engine": D, "sink_incarnation": 1, "echoes": [["x", 1, 1, 1]] * 60_000}),
    msgpack.packb([0] * 900_000),
    b"\x91" * 100_000,
)


def every_subject() -> list[str]:
    """All that there are, whoever has spoken so far."""
    subjects = Subjects("default")
    known = {subjects.pool(D), subjects.cancels_pool(D), subjects.who("x")}
    for engine in (P, D):
        known |= {subjects.registrations(engine, D), subjects.cancels(engine, D), subjects.acks(engine, P)}
        known |= {subjects.transfers(engine, P), subjects.echoes(engine, D), subjects.releases(engine, "router")}
        known |= {subjects.prefill(engine), subjects.pulses(engine), subjects.bye(engine), subjects.marks(engine)}
        known |= {subjects.rebind(engine, "router"), subjects.drain(engine, "x"), subjects.clock(engine, "x")}
        known |= {subjects.metadata(engine, rank, P) for rank in (0, 1, "x")}
        known |= {subjects.heartbeats(role, engine) for role in ("prefill", "decode", "nonsense")}
    return sorted(known)


def dropped(pair: Cluster) -> list[str]:
    """The lines that engines logged about it."""
    logs = [pair.engines[name].child.log.read_text() for name in (P, D)]
    return [line for log in logs for line in log.splitlines() if "dropped a message on kvbus" in line]


def memory_mib(pair: Cluster) -> float:
    return sum(process.memory_info().rss for name in (P, D) for process in processes(pair, name)) / (1 << 20)


async def test_junk_on_every_subject(pair: Cluster, met: Ears, reference: str) -> None:
    """H1."""
    prompts = [prompt(300 + 50 * each, seed=30 + each) for each in range(4)]
    expected = [(await complete(reference, ids, 60)).tokens for ids in prompts]
    wrong_ranks = 0

    def misrank(subject: str, message: Message) -> None:
        """Whatever a rank says, another rank says too that does not exist."""
        nonlocal wrong_ranks
        if getattr(message, "rank", 99) == 0:
            wrong_ranks += 1
            met.say(subject, encode(replace(message, rank=7)))  # type: ignore[call-arg]

    met.react = misrank
    await came_over(pair, reference, seed=29)

    async def round_of_junk(number: int) -> None:
        asking = asyncio.create_task(complete_all(pair.url, [[*ids, 400 + number] for ids in prompts], 60))
        for place, subject in enumerate(every_subject()):
            for junk in (*JUNK, HUGE[(place + number) % len(HUGE)]):
                met.say(subject, junk)
            await asyncio.sleep(0.05)  # junk, not a flood
        right = [(await complete(reference, [*ids, 400 + number], 60)).tokens for ids in prompts]
        assert [got.tokens for got in await asking] == right

    await round_of_junk(0)
    before = memory_mib(pair)
    for number in range(1, 3):
        await round_of_junk(number)
    grown = memory_mib(pair) - before
    met.react = None
    print(f"H1: {len(every_subject())} subjects, {wrong_ranks} wrong ranks, {grown:.0f} MiB more")
    assert [got.tokens for got in await complete_all(pair.url, prompts, 60)] == expected
    assert wrong_ranks > 10
    assert grown < 50
    for area in ("reg", "cancel", "ack", "done", "prefill", "hb", "pulse", "echo", "who", "bye", "meta"):
        await eventually(lambda: any(f"kvbus.v1.default.{area}." in line for line in dropped(pair)))  # noqa: B023
    assert len(dropped(pair)) < 4 * len(every_subject()), "logged once a minute"
    await all_free(pair)
    await came_over(pair, reference, seed=28)


@pytest.mark.parametrize("hold_s", [1.5, 3.0])
async def test_blocks_under_a_slow_write_are_nobodys(
    pair: Cluster, hurt: Hurt, met: Ears, reference: str, hold_s: float
) -> None:
    """K3: the second request needs the blocks of the first, which is aborted in the middle of its WRITE."""
    first, second = prompt(LARGE, seed=40), prompt(LARGE, seed=41 + int(hold_s))
    expected = await complete(reference, second, 200)
    same = uuid.uuid4().hex
    hurt.order(Orders(hold_write_s=hold_s))
    await prefilled(pair, met, first, same)
    asking = asyncio.create_task(complete(url(pair, D), first, **to_decode(same)))
    await eventually(lambda: hurt.notes("held", same))
    hurt.order(Orders())
    await drop(asking)
    aborted_at = time.time()
    got = await complete(url(pair, D), second, 200)
    [posted] = hurt.notes("posted", same)
    print(f"K3: the WRITE landed {posted.at - aborted_at:.1f} s after the abort")
    assert posted.at > aborted_at + 0.5
    assert got.tokens == expected.tokens, "written over"
    assert met.all(CancelAck, transfer_id=same)
    await all_free(pair)
    await came_over(pair, reference, seed=42)


async def test_a_decode_engine_whose_scheduler_stalls_keeps_its_kv(
    pair: Cluster, hurt: Hurt, met: Ears, reference: str
) -> None:
    """L3: stalled for longer than a block lease, alive all the same, with a request in its queue."""
    ids, same = prompt(1000, seed=50), uuid.uuid4().hex
    expected = await complete(reference, ids)
    before = await prompt_tokens(url(pair, D))
    async with busy_slots(pair):
        asking = asyncio.create_task(complete(url(pair, D), ids, **to_decode(same)))
        await prefilled(pair, met, ids, same)
        hurt.order(Orders(stall=D))
        await eventually(lambda: hurt.notes("stalled", D))
        held = free(pair, P)
        stalled_at = time.monotonic()
        while time.monotonic() - stalled_at < BLOCK_LEASE_S + 4:
            assert free(pair, P) == held < POOL - 1, "freed though D lives"
            await asyncio.sleep(0.2)
        hurt.order(Orders())
    assert (await asking).tokens == expected.tokens
    assert (await prompt_tokens(url(pair, D)) - before).external == len(ids)
    await met.first(TransferDone, transfer_id=same)
    await all_free(pair)


async def test_a_frozen_decode_engine_serves_again(pair: Cluster, hurt: Hurt, met: Ears, reference: str) -> None:
    """L3: not even its heartbeats are heard; WRITEs are posted into it meanwhile."""
    prompts = [prompt(1000, seed=60 + each) for each in range(3)]
    expected = [(await complete(reference, ids, 100)).tokens for ids in prompts]
    hurt.order(Orders(hold_write_s=1.0))
    asking = asyncio.create_task(complete_all(pair.url, prompts, 100))
    registered = await met.first(Registration)
    await eventually(lambda: hurt.notes("held", registered.transfer_id))
    with frozen(*pids(pair, D)):
        stopped_at = time.monotonic()
        await eventually(lambda: hurt.notes("posted", registered.transfer_id) and free(pair, P) < POOL - 1)
        took_s = await until_free(pair, P, DEAD_AFTER_S + MAX_WRITE_S + BLOCK_LEASE_S + 5)
        hurt.order(Orders())
        while time.monotonic() - stopped_at < BLOCK_LEASE_S + 4:
            await asyncio.sleep(0.1)
    assert met.all(TransferFailed, transfer_id=registered.transfer_id)
    print(f"L3: P free {took_s:.1f} s after a WRITE was posted into a stopped D; the lease is {BLOCK_LEASE_S} s")
    assert [got.tokens for got in await asking] == expected
    await all_free(pair)
    await came_over(pair, reference, seed=63)


async def test_what_was_posted_into_a_frozen_decode_engine_lands_in_nobodys_blocks(
    pair: Cluster, hurt: Hurt, met: Ears, reference: str
) -> None:
    """L3, K3: when it goes on, the request is gone, another one has its blocks, and a third lets NIXL run."""
    first, second, third = prompt(LARGE, seed=65), prompt(LARGE, seed=66), prompt(300, seed=67)
    expected = [(await complete(reference, ids, 250)).tokens for ids in (second, third)]
    same = uuid.uuid4().hex
    await prefilled(pair, met, first, same)
    hurt.order(Orders(hold_write_s=0.5))
    asking = asyncio.create_task(complete(url(pair, D), first, **to_decode(same)))
    await eventually(lambda: hurt.notes("held", same))
    with frozen(*pids(pair, D)):
        hurt.order(Orders())
        await eventually(lambda: hurt.notes("posted", same))
        await met.first(TransferFailed, transfer_id=same, timeout_s=MAX_WRITE_S + 5)
        await drop(asking)
        again = asyncio.create_task(complete(url(pair, D), second, 250))
        await eventually(lambda: D not in pair.observer.engines)
    await eventually(lambda: is_healthy(pair.port, "/ready?pairs=1"))
    assert not again.done()
    pushed = await complete(pair.url, third, 250)
    assert [(await again).tokens, pushed.tokens] == expected, "written over"
    await all_free(pair)
    await came_over(pair, reference, seed=68)


async def test_a_prefill_engine_frozen_in_mid_write_never_lands_it(
    pair: Cluster, hurt: Hurt, met: Ears, reference: str
) -> None:
    """L3: D gives up meanwhile and another request has the blocks when P runs again."""
    first, second = prompt(LARGE, seed=70), prompt(LARGE, seed=71)
    expected = [(await complete(reference, ids, 100)).tokens for ids in (first, second)]
    same = uuid.uuid4().hex
    await prefilled(pair, met, first, same)
    hurt.order(Orders(hold_write_s=2.0))
    asking = asyncio.create_task(complete(url(pair, D), first, 100, **to_decode(same)))
    await eventually(lambda: hurt.notes("held", same))
    with frozen(*pids(pair, P)):
        stopped_at = time.monotonic()
        got = await asking
        took_s = time.monotonic() - stopped_at
        again = asyncio.create_task(complete(url(pair, D), second, 100))
        await eventually(lambda: free(pair, D) < POOL - 1 - LARGE // BLOCK)
    print(f"L3: D gave up {took_s:.1f} s after P was stopped")
    assert (got.tokens, (await again).tokens) == (expected[0], expected[1])
    assert took_s > MAX_WRITE_S
    await eventually(lambda: hurt.notes("disconnected", same))
    assert not hurt.notes("posted", same), "written into blocks that D had given back"
    hurt.order(Orders())
    await all_free(pair)
    await came_over(pair, reference, seed=72)


async def test_a_prefill_engine_frozen_under_load_loses_no_request(pair: Cluster, met: Ears, reference: str) -> None:
    """L3: longer than it takes to be given up."""
    prompts = [prompt(500, seed=80 + each) for each in range(24)]
    expected = [(await complete(reference, ids, 8)).tokens for ids in prompts]
    asking: list[asyncio.Task[tuple[Completion, float]]] = []

    async def timed(ids: list[int]) -> tuple[Completion, float]:
        started = time.monotonic()
        return await complete(pair.url, ids, 8), time.monotonic() - started

    async def send(some: list[list[int]]) -> None:
        for ids in some:
            asking.append(asyncio.create_task(timed(ids)))
            await asyncio.sleep(0.4)

    await send(prompts[:4])
    with frozen(*pids(pair, P)):
        await send(prompts[4:-4])
    await send(prompts[-4:])
    got = await asyncio.gather(*asking)
    slowest_s = max(took_s for _, took_s in got)
    print(f"L3: the slowest of {len(got)} answers took {slowest_s:.1f} s")
    assert [each.tokens for each, _ in got] == expected
    assert slowest_s < DEAD_AFTER_S + term_s(WRITE_LEASE_S, MAX_WRITE_S) + 3
    await all_free(pair)
    await came_over(pair, reference, seed=81)
