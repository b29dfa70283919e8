"""`kvbus cache`: asks the engines for what is in their prefix caches, and looks one prompt up in it."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvbus.bus import Bus, Caches, NobodyError, Node, nobody_in
from kvbus.errors import BusUnavailableError, KVBusError
from kvbus.protocol import Membership, Prompt
from kvbus.tools.listen import CONNECT_TIMEOUT_S, unreachable
from kvbus.wire import Heartbeat, Subjects

ROUND_S = 1.0  # every engine has said twice that it is there
WHOLE_S = 5.0
TOKENIZE_S = 10.0
MAX_ANSWER_BYTES = 16 << 20


class NoTokensError(KVBusError):
    """The prompt's token ids could not be had."""


@dataclass(frozen=True, slots=True)
class CacheRow:
    """An engine. ``blocks``: in its prefix cache, None if it does not tell; ``tokens``: of the prompt, None without."""

    engine: str
    role: str
    model: str
    blocks: int | None
    total_blocks: int
    block_size: int
    tokens: int | None


@dataclass(frozen=True, slots=True)
class CacheView:
    """``complete``: all that engines tell of their caches had come; ``prompt_tokens``: None without a prompt."""

    engines: tuple[CacheRow, ...]
    prompt_tokens: int | None
    complete: bool


async def cache(
    bus: Bus,
    subjects: Subjects,
    *,
    where: str,
    prompt: str | Sequence[int] | None,
    model: str = "",
    lora: str = "",
    salt: str = "",
) -> CacheView:
    """What each engine has, and of ``prompt``, a text or token ids.

    Args:
        model: of the prompt; needed only where engines have several.

    Raises:
        BusUnavailableError: no NATS server answers.
        NobodyError: no engine is in the namespace.
        NoTokensError: no engine tells the text's token ids, or the ids are none.
    """
    node = Node(bus, subjects, name="kvbus-cache", membership=Membership())
    index = Caches(node).index
    async with node:
        if not await _until(lambda: node.bus.connected, CONNECT_TIMEOUT_S):
            raise BusUnavailableError(unreachable(bus, where))
        await asyncio.sleep(ROUND_S)
        if not (engines := node.membership.peers()):
            raise NobodyError(
                await nobody_in(bus, subjects.namespace, where) or f"kvbus: no engine is heard at {where}"
            )
        complete = await _until(index.whole, WHOLE_S)
        name = model or _only_model(engines, needed=prompt is not None)
        ids = prompt
        if isinstance(ids, str):
            ids = await _token_ids([each for each in engines if each.model == name and each.address], ids)
        try:
            held = index.held(Prompt(name, ids, lora, salt)) if ids is not None else {}
        except ValueError as error:
            raise NoTokensError(f"kvbus: the prompt: {error}") from None
        blocks = index.blocks()
    rows = [
        CacheRow(
            engine=each.engine,
            role=each.role.value,
            model=each.model,
            blocks=blocks.get(each.engine),
            total_blocks=each.total_blocks,
            block_size=each.cache_block_size,
            tokens=held.get(each.engine, 0) if ids is not None and each.engine in blocks else None,
        )
        for each in engines
    ]
    return CacheView(tuple(rows), len(ids) if ids is not None else None, complete)


def read_ids(text: str) -> list[int]:
    """Token ids as a JSON list.

    Raises:
        NoTokensError: it is none.
    """
    try:
        ids = json.loads(text)
    except ValueError:
        ids = None
    if not isinstance(ids, list) or not all(type(each) is int for each in ids):
        raise NoTokensError("kvbus: the token ids are no JSON list of whole numbers, such as [1, 2, 3]")
    return ids


def _only_model(engines: Sequence[Heartbeat], *, needed: bool) -> str:
    models = sorted({engine.model for engine in engines})
    if needed and len(models) > 1:
        raise NoTokensError(f"kvbus: engines have several models; --model names one of {', '.join(models[:20])}")
    return models[0]


async def _token_ids(engines: Sequence[Heartbeat], text: str) -> list[int]:
    why = "no engine of that model serves HTTP"
    for engine in engines:
        try:
            return await asyncio.to_thread(_ask, engine, text)
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = f"{engine.engine} at {engine.address}: {error}"
    raise NoTokensError(f"kvbus: no engine tells the text's token ids ({why}); --tokens takes the ids themselves")


def _ask(engine: Heartbeat, text: str) -> list[int]:
    body = json.dumps({"model": engine.model, "prompt": text}).encode()
    request = urllib.request.Request(
        f"http://{engine.address}/tokenize", data=body, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=TOKENIZE_S) as answer:
        return read_ids(json.dumps(json.loads(answer.read(MAX_ANSWER_BYTES))["tokens"]))


async def _until(condition: Callable[[], bool], for_s: float) -> bool:
    deadline = time.monotonic() + for_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.01)
    return True
