"""Other routers, engines by themselves, and what a user meets when something is wrong; on real engines."""

from __future__ import annotations

import asyncio
import itertools
import re
import signal
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import psutil
import pytest
from support.ears import listening
from support.engines import ARGUMENTS, assert_came_from_outside, complete, metrics, post, prompt, prompt_tokens, say
from support.waiting import eventually

from kvbus.bus import Keys
from kvbus.local import Child, Cluster, free_port
from kvbus.local.cluster import Engine, EngineSpec, wait_until
from kvbus.local.soak import idle_cpu_percent
from kvbus.wire import Heartbeat, Message, Registration, RegistrationAck, Role, Subjects, encode

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def body(ids: list[int], max_tokens: int, params: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": "tiny-qwen3",
        "prompt": ids,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "kv_transfer_params": params,
    }


async def test_a_sequential_router_that_knows_nothing_of_kvbus(cluster: Cluster, reference: str) -> None:
    """P first, then D with what P returned: the completion is there before the registration."""
    ids = prompt(333, seed=21)
    prefill, decode = cluster.engines["prefill-0"].url, cluster.engines["decode-0"].url
    before = await prompt_tokens(decode)
    status, first = await post(f"{prefill}/v1/completions", body(ids, 1, {"do_remote_decode": True}))
    assert status == 200
    params = first["kv_transfer_params"]
    status, second = await post(f"{decode}/v1/completions", body(ids, 12, params))
    assert status == 200
    assert tuple(second["choices"][0]["token_ids"]) == (await complete(reference, ids)).tokens
    assert_came_from_outside(await prompt_tokens(decode) - before, 333)
    [done] = cluster.observer.transfer(params["transfer_id"])
    assert done.late_side == "decode"


async def test_a_concurrent_router_with_one_request_id_and_no_hint(cluster: Cluster, reference: str) -> None:
    """Neither a transfer id nor an engine is named: the pool's subject, and the request id, pair the legs."""
    ids = prompt(1500, seed=22)
    prefill, decode = cluster.engines["prefill-0"].url, cluster.engines["decode-0"].url
    before = await prompt_tokens(decode)
    same = uuid.uuid4().hex
    decode_leg = asyncio.create_task(
        post(f"{decode}/v1/completions", body(ids, 12, {"do_remote_prefill": True}), **{"X-Request-Id": same})
    )
    await post(f"{prefill}/v1/completions", body(ids, 1, {"do_remote_decode": True}), **{"X-Request-Id": same})
    status, answer = await decode_leg
    assert status == 200
    assert tuple(answer["choices"][0]["token_ids"]) == (await complete(reference, ids)).tokens
    assert_came_from_outside(await prompt_tokens(decode) - before, 1500)


async def test_the_router_registers_first(cluster: Cluster) -> None:
    got = await complete(cluster.url, prompt(2000, seed=23))
    [done] = cluster.observer.transfer(got.headers["X-KVBus-Transfer-Id"])
    assert done.late_side == "prefill"


async def test_a_silent_recompute_does_not_pass_for_a_transfer(cluster: Cluster, reference: str) -> None:
    """The answer is right and the check still fails, since D computed it all itself."""
    ids = prompt(200, seed=24)
    decode = cluster.engines["decode-0"].url
    before = await prompt_tokens(decode)
    params = {"do_remote_prefill": True, "transfer_id": uuid.uuid4().hex, "prefill_engine_id": "nobody"}
    status, answer = await post(f"{decode}/v1/completions", body(ids, 12, params))
    assert status == 200
    assert tuple(answer["choices"][0]["token_ids"]) == (await complete(reference, ids)).tokens
    with pytest.raises(AssertionError):
        assert_came_from_outside(await prompt_tokens(decode) - before, 200)
    log = cluster.engines["decode-0"].child.log.read_text()
    assert "expected remote KV, computed locally: prefill engine nobody is not on the bus" in log


async def test_stale_and_invented_parameters_never_give_another_prompts_answer(
    cluster: Cluster, reference: str
) -> None:
    """H5: an id that was used up, and one that another prompt uses at the same time."""
    decode, prefill = cluster.engines["decode-0"].url, cluster.engines["prefill-0"].url
    one, two, three = prompt(260, seed=26), prompt(290, seed=27), prompt(260, seed=28)
    expected = {tuple(ids): (await complete(reference, ids)).tokens for ids in (one, two, three)}
    _, first = await post(f"{prefill}/v1/completions", body(one, 1, {"do_remote_decode": True}))
    stale = first["kv_transfer_params"]
    for ids in (one, two, three):
        status, answer = await post(f"{decode}/v1/completions", body(ids, 12, dict(stale)))
        assert status == 200
        assert tuple(answer["choices"][0]["token_ids"]) == expected[tuple(ids)]
    for ids in (two, three):
        _, first = await post(f"{prefill}/v1/completions", body(one, 1, {"do_remote_decode": True}))
        status, answer = await post(f"{decode}/v1/completions", body(ids, 12, first["kv_transfer_params"]))
        assert status == 200
        assert tuple(answer["choices"][0]["token_ids"]) == expected[tuple(ids)], "the KV of another prompt"


async def test_sixty_legs_that_nobody_announced_are_answered_in_seconds(cluster: Cluster, reference: str) -> None:
    """P4: decode legs with invented ids, straight to the engine; a prefill engine is named, and lives."""
    decode = cluster.engines["decode-0"].url
    prompts = [prompt(200 + number, seed=300 + number) for number in range(60)]
    expected = [(await complete(reference, ids)).tokens for ids in prompts]

    async def invented(ids: list[int]) -> tuple[tuple[int, ...], float]:
        started = time.monotonic()
        params = {"do_remote_prefill": True, "transfer_id": uuid.uuid4().hex, "prefill_engine_id": "prefill-0"}
        status, answer = await post(f"{decode}/v1/completions", body(ids, 12, params))
        assert status == 200
        return tuple(answer["choices"][0]["token_ids"]), time.monotonic() - started

    answers = await asyncio.gather(*(invented(ids) for ids in prompts))
    slowest = max(took_s for _, took_s in answers)
    print(f"60 decode legs of unknown transfers: the slowest was answered after {slowest:.1f} s")
    assert [tokens for tokens, _ in answers] == expected
    assert slowest < 15


async def test_vllms_own_metrics_show_the_bus(cluster: Cluster) -> None:
    """H2 among others: whatever is refused, given up or computed locally is counted where operators look."""

    async def count(name: str, label: str) -> float:
        text = await metrics(cluster.engines[name].url)
        found = re.search(rf"^vllm:kvbus_{label}[^}}]*}} ([0-9.e+]+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    shown = 'transfers_total{.*outcome="done"', "written_bytes_total{", "write_seconds_count{", "write_seconds_sum{"
    before = [await count("prefill-0", each) for each in shown]
    await complete(cluster.url, prompt(320, seed=29))
    await complete(cluster.url, prompt(10, seed=29))  # what is counted is shown with the next step
    after = [await count("prefill-0", each) for each in shown]
    assert after[0] - before[0] >= 1
    assert after[1] - before[1] >= 320 * 1024
    assert after[2] - before[2] == after[0] - before[0]
    assert after[3] > before[3]
    assert await count("prefill-0", "peers_refused_total{") == 0
    local = await count("decode-0", "computed_locally_total{")
    params = {"do_remote_prefill": True, "transfer_id": uuid.uuid4().hex, "prefill_engine_id": "nobody"}
    await post(f"{cluster.engines['decode-0'].url}/v1/completions", body(prompt(40, seed=30), 2, params))
    assert await count("decode-0", "computed_locally_total{") == local + 1


async def test_a_prompt_that_is_too_long_gets_the_engines_own_refusal(cluster: Cluster) -> None:
    """H4."""
    status, answer = await post(f"{cluster.url}/v1/completions", body(prompt(4200), 5, {}))
    assert status == 400
    assert "4096" in str(answer)
    await complete(cluster.url, prompt(50, seed=25))


async def test_a_client_that_gives_up_frees_both_engines(cluster: Cluster) -> None:
    """A8, A1: blocks return to where they were."""

    def free() -> dict[str, int]:
        return {name: beat.free_blocks for name, beat in cluster.observer.engines.items()}

    await settled(lambda: free())
    before = free()
    for seed in range(5):
        asking = asyncio.create_task(complete(cluster.url, prompt(3000, seed=30 + seed), 500))
        await asyncio.sleep(0.05 * seed)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    deadline = time.monotonic() + 15
    while free() != before:
        assert time.monotonic() < deadline, f"{before} became {free()}"
        await asyncio.sleep(0.1)


async def settled(read: Callable[[], object], for_s: float = 1.5) -> None:
    """Return when ``read()`` has not changed for a while."""
    last, since = read(), time.monotonic()
    while time.monotonic() - since < for_s:
        await asyncio.sleep(0.1)
        if read() != last:
            last, since = read(), time.monotonic()


async def test_idle_engines_idle_and_nothing_listens_for_a_side_channel(cluster: Cluster) -> None:
    """S3. The NATS URL is the only address that the engines were given."""
    await asyncio.sleep(10)
    used = await asyncio.to_thread(idle_cpu_percent, cluster, 10.0)
    print(f"idle engines: {used:.1f} % of a core")
    assert used < 5
    for engine in cluster.engines.values():
        root = psutil.Process(engine.child.pid)
        listening = {
            connection.laddr.port
            for process in (root, *root.children(recursive=True))
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        assert 5600 not in listening
        commands = [argument for argument in root.cmdline() if "kv_connector" in argument]
        assert len(commands) == 1
        assert "side_channel" not in commands[0]
        assert "port" not in commands[0]


@pytest.fixture
def alone(model: Path, logs: Path) -> Any:
    """Starts one decode engine with a given ``kv_connector_extra_config``."""
    running: list[Engine] = []

    def start(name: str, extra: dict[str, Any]) -> Engine:
        transfer = {"kv_connector": "KVBusConnector", "kv_role": "kv_consumer", "kv_connector_extra_config": extra}
        running.append(Engine(EngineSpec(name, model, "tiny-qwen3", transfer, ARGUMENTS), logs))
        return running[-1]

    yield start
    for engine in running:
        engine.child.stop()


async def test_with_nats_away_an_engine_starts_and_computes_locally(alone: Any, reference: str) -> None:
    engine = alone("no-nats", {"nats_url": f"nats://127.0.0.1:{free_port()}"})
    await asyncio.to_thread(wait_until, lambda: engine.healthy, [engine.child], "booting without NATS", say)
    ids = prompt(150, seed=41)
    status, answer = await post(f"{engine.url}/v1/completions", body(ids, 12, {"do_remote_prefill": True}))
    assert status == 200
    assert tuple(answer["choices"][0]["token_ids"]) == (await complete(reference, ids)).tokens
    log = engine.child.log.read_text()
    assert "no NATS server at nats://127.0.0.1:" in log
    assert "expected remote KV, computed locally: the bus is not connected" in log


async def test_a_failed_receive_under_policy_fail_is_an_error_and_never_an_empty_answer(
    alone: Any, cluster: Cluster
) -> None:
    """C7. The prefill engine is played: it refuses whatever is registered."""
    engine = alone("policy-fail", {"nats_url": cluster.nats_url, "namespace": "c7"})
    subjects = Subjects("c7")
    await asyncio.to_thread(wait_until, lambda: engine.healthy, [engine.child], "booting for policy fail", say)
    async with listening(cluster.nats_url, "c7") as ears:
        own = await ears.first(Heartbeat)
        keys = Keys(b"played", "P", 7)
        keys.learn(own, 0.0)

        def refuse(_: str, message: Message) -> None:
            if isinstance(message, Registration):
                about = (message.transfer_id, "P", 7, message.attempt, 0, 1, message.request_id)
                [key] = keys.towards(own.engine, own.incarnation)
                ears.say(subjects.acks(own.engine, "P"), encode(RegistrationAck(*about, refused="full"), key))

        async def live() -> None:
            for number in itertools.count(1):
                beat = keys.introduce(replace(own, engine="P", incarnation=7, number=number, role=Role.PREFILL))
                ears.say(subjects.heartbeats("prefill", "P"), encode(beat))
                await asyncio.sleep(0.3)

        ears.react = refuse
        living = asyncio.create_task(live())
        try:
            for stream in (False, True):
                params = {"do_remote_prefill": True, "transfer_id": uuid.uuid4().hex, "prefill_engine_id": "P"}
                await eventually(lambda: len(ears.all(Heartbeat, engine="P")) > 3)
                async with aiohttp.ClientSession() as session:
                    asked = {**body(prompt(100, seed=31), 5, params), "stream": stream}
                    async with session.post(f"{engine.url}/v1/completions", json=asked) as answer:
                        status, text = answer.status, await answer.text()
                assert ears.all(Registration, transfer_id=params["transfer_id"])
                assert "error" in text, text
                assert "token_ids" not in text, text
                assert stream or status >= 500
        finally:
            living.cancel()
    status, answer = await post(f"{engine.url}/v1/completions", body(prompt(100, seed=31), 5, {}))
    assert (status, len(answer["choices"][0]["token_ids"])) == (200, 5), "it serves others"


async def test_an_engine_in_the_foreground_joins_serves_and_is_drained_when_stopped(
    cluster: Cluster, reference: str, tmp_path: Path
) -> None:
    """``kvbus engine``, as containers run it: nothing but a NATS URL, a model and a port."""
    port, ids = free_port(), prompt(300, seed=77)
    command = [sys.executable, "-m", "kvbus", "engine", "decode", "--nats-url", cluster.nats_url]
    command += ["--model", str(cluster.model), "--engine-id", "decode-by-hand", "--host", "127.0.0.1"]
    child = Child("by-hand", [*command, "--port", str(port), "--", *ARGUMENTS], tmp_path)
    cluster.engines["decode-by-hand"] = SimpleNamespace(port=port)  # type: ignore[assignment]
    try:
        await eventually(lambda: child.alive and cluster.is_ready("decode-by-hand"), 240)
        prefill = cluster.engines["prefill-0"].url
        transfer = {"transfer_id": uuid.uuid4().hex, "prefill_engine_id": "prefill-0"}
        legs = [
            post(f"{prefill}/v1/completions", body(ids, 1, {"do_remote_decode": True, **transfer})),
            post(f"http://127.0.0.1:{port}/v1/completions", body(ids, 12, {"do_remote_prefill": True, **transfer})),
        ]
        _, (status, answer) = await asyncio.gather(*legs)
        assert status == 200
        assert tuple(answer["choices"][0]["token_ids"]) == (await complete(reference, ids)).tokens
        child.signal(signal.SIGTERM)
        await eventually(lambda: not child.alive, 60)
    finally:
        del cluster.engines["decode-by-hand"]
        child.stop()
    assert "decode-by-hand is drained" in child.log.read_text()
