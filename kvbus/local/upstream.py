"""vLLM's own NIXL connectors as arms of ``kvbus bench``: two engines, driven without a router.

``push`` sends both legs at once, ``pull`` one after the other, ``bidirectional`` likewise, with
``bidirectional_kv_xfer`` on: what a decode engine returns with a turn's answer goes with the next turn to the prefill
engine, which pulls what it lacks. vLLM returns that only with answers that are not streamed; so of that arm the time to
first token is the prefill leg's time and the decode engine's own figure.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from kvbus.bounded import BoundedDict
from kvbus.local.cluster import HOST, Engine, EngineSpec, Say, wait_until
from kvbus.local.load import Prompt, Stream, WholeAnswer, completion_body, read_events
from kvbus.local.process import free_port, stop_all
from kvbus.router.request import new_transfer_id

CONNECTORS = {"push": "NixlPushConnector", "pull": "NixlConnector", "bidirectional": "NixlConnector"}
HEAD_TOKENS = 64  # of a conversation: its name here
MAX_CONVERSATIONS = 4096


@contextlib.contextmanager
def upstream_pair(
    arm: str,
    model: Path,
    logs: Path,
    arguments: Sequence[str],
    more_arguments: Callable[[str], Sequence[str]],
    say: Say,
) -> Iterator[tuple[Stream, Engine]]:
    """Yields how to send a prompt, and the decode engine. ``more_arguments``: of ``prefill`` and of ``decode``."""
    side_ports = {"prefill": free_port(), "decode": free_port()}
    engines: list[Engine] = []
    try:
        for kind, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
            transfer: dict[str, Any] = {"kv_connector": CONNECTORS[arm], "kv_role": role, "engine_id": kind}
            transfer["kv_buffer_device"] = "cpu"
            if arm == "bidirectional":
                transfer |= {"kv_role": "kv_both", "kv_connector_extra_config": {"bidirectional_kv_xfer": True}}
            environment = {
                "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_ports[kind]),
            }
            words = [*arguments, *more_arguments(kind)]
            engines.append(Engine(EngineSpec(kind, model, model.name, transfer, words, environment), logs))
        children = [engine.child for engine in engines]
        wait_until(lambda: all(engine.healthy for engine in engines), children, f"booting two engines ({arm})", say)
        make = {"push": _push_stream, "pull": _pull_stream, "bidirectional": _bidirectional_stream}[arm]
        yield make(engines[0], engines[1], model.name, side_ports["prefill"]), engines[1]
    finally:
        stop_all([engine.child for engine in engines])


async def _prefill(
    session: aiohttp.ClientSession,
    engine: Engine,
    body: dict[str, Any],
    request_id: str,
    returned: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Send the prefill leg; returns the parameters for the decode leg of a pull.

    Args:
        returned: by the decode engine, with the last turn of the conversation.
    """
    params = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
        **(returned or {}),
    }
    leg = {**body, "stream": False, "max_tokens": 1, "kv_transfer_params": params}
    async with session.post(f"{engine.url}/v1/completions", json=leg, headers={"X-Request-Id": request_id}) as answer:
        content = await answer.json()
        if answer.status != 200:
            raise ValueError(f"prefill: status {answer.status}: {content}"[:200])
        found: dict[str, Any] = content["kv_transfer_params"]
        return found


async def _decode(
    session: aiohttp.ClientSession, engine: Engine, body: dict[str, Any], request_id: str, params: dict[str, Any]
) -> AsyncIterator[list[int]]:
    leg = {**body, "kv_transfer_params": params}
    async with session.post(f"{engine.url}/v1/completions", json=leg, headers={"X-Request-Id": request_id}) as answer:
        async for ids in read_events(answer):
            yield ids


def _pull_stream(prefill: Engine, decode: Engine, model: str, _: int) -> Stream:
    async def stream(session: aiohttp.ClientSession, prompt: Prompt, max_tokens: int) -> AsyncIterator[list[int]]:
        body, request_id = completion_body(model, prompt, max_tokens), new_transfer_id()
        params = await _prefill(session, prefill, body, request_id)
        async for ids in _decode(session, decode, body, request_id, params):
            yield ids

    return stream


def _push_stream(prefill: Engine, decode: Engine, model: str, side_port: int) -> Stream:
    async def stream(session: aiohttp.ClientSession, prompt: Prompt, max_tokens: int) -> AsyncIterator[list[int]]:
        body, request_id = completion_body(model, prompt, max_tokens), new_transfer_id()
        params = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_engine_id": prefill.spec.name,
            "remote_request_id": f"cmpl-{request_id}-0",
            "remote_host": HOST,
            "remote_port": side_port,
            "tp_size": 1,
        }
        prefilling = asyncio.create_task(_prefill(session, prefill, body, request_id))
        try:
            async for ids in _decode(session, decode, body, request_id, params):
                yield ids
        finally:
            prefilling.cancel()
            await asyncio.gather(prefilling, return_exceptions=True)

    return stream


def _bidirectional_stream(prefill: Engine, decode: Engine, model: str, _: int) -> Stream:
    last: BoundedDict[tuple[int, ...], dict[str, Any]] = BoundedDict(MAX_CONVERSATIONS)

    async def stream(session: aiohttp.ClientSession, prompt: Prompt, max_tokens: int) -> AsyncIterator[list[int]]:
        body, request_id = completion_body(model, prompt, max_tokens), new_transfer_id()
        name = tuple(prompt[:HEAD_TOKENS])
        clock = asyncio.get_running_loop().time
        started = clock()
        params = await _prefill(session, prefill, body, request_id, last.get(name))
        prefill_s, before = clock() - started, await _first_tokens(session, decode)
        leg = {**body, "stream": False, "kv_transfer_params": params}
        headers = {"X-Request-Id": request_id}
        async with session.post(f"{decode.url}/v1/completions", json=leg, headers=headers) as answer:
            content = await answer.json()
            if answer.status != 200:
                raise ValueError(f"decode: status {answer.status}: {content}"[:200])
        after = await _first_tokens(session, decode)
        last[name] = content["kv_transfer_params"]
        decode_s = (after[0] - before[0]) / max(1, after[1] - before[1])
        yield WholeAnswer(content["choices"][0]["token_ids"], prefill_s + decode_s)

    return stream


async def _first_tokens(session: aiohttp.ClientSession, engine: Engine) -> tuple[float, float]:
    """The sum of an engine's times to first token so far, seconds, and how many there were."""
    async with session.get(f"{engine.url}/metrics") as answer:
        text = await answer.text()
    pattern = r"^vllm:time_to_first_token_seconds_{}{{.*}} (\S+)$"
    total, count = (re.search(pattern.format(part), text, re.MULTILINE) for part in ("sum", "count"))
    return float(total[1]) if total else 0.0, float(count[1]) if count else 0.0
