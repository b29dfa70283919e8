"""Asks an engine for the token ids of a prompt that came as text (``POST /tokenize``), and remembers them for a while.

The one rule: no request waits longer than ``answer_s`` for it. After a failure nobody is asked for
:data:`PAUSE_S`, so that an engine which is slow at it costs next to nothing. Lives in one event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from array import array
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp

from kvbus.router.http import Raw, upstream
from kvbus.wire import Heartbeat

ANSWER_S = 0.05
PAUSE_S = 5.0
AT_ONCE = 8
MAX_TOKENS = 1 << 22
"""That are remembered, 4 bytes each."""
MAX_PROMPT_TOKENS = 1 << 18


class Tokenizing:
    """See the module's docstring.

    Args:
        answer_s: how long a request waits for an answer, seconds.
        count: told what became of each question: asked, remembered, busy or failed.
    """

    def __init__(self, count: Callable[[str], None] = lambda _: None, *, answer_s: float = ANSWER_S) -> None:
        self._known: dict[bytes, array[int]] = {}
        self._tokens = self._asking = 0
        self._paused_until = float("-inf")
        self._told, self._answer_s = count, answer_s

    async def ids(
        self, session: aiohttp.ClientSession, engine: Heartbeat, question: Mapping[str, Any], headers: Mapping[str, str]
    ) -> array[int] | None:
        """The token ids that ``question``, a body for ``/tokenize``, has at the engine; None if they do not come."""
        name = _digest(question)
        if (known := self._known.pop(name, None)) is not None:
            self._known[name] = known
            return self._count("remembered", known)
        if self._asking >= AT_ONCE or time.monotonic() < self._paused_until:
            return self._count("busy", None)
        self._asking += 1
        try:
            async with asyncio.timeout(self._answer_s):
                answer = await upstream.post(session, engine, "/tokenize", question, headers)
            ids = _read(answer.body) if answer.status == 200 else None
            is_broken = ids is None and not 400 <= answer.status < 500  # else it is this prompt that it refuses
        except upstream.LOST:
            ids, is_broken = None, True
        finally:
            self._asking -= 1
        if is_broken:
            self._paused_until = time.monotonic() + PAUSE_S
        if ids is None:
            return self._count("failed", None)
        self._keep(name, ids)
        return self._count("asked", ids)

    def _keep(self, name: bytes, ids: array[int]) -> None:
        self._tokens += len(ids) - len(self._known.pop(name, ()))  # two may have asked the same
        self._known[name] = ids
        while self._tokens > MAX_TOKENS:
            oldest = next(iter(self._known))
            self._tokens -= len(self._known.pop(oldest))

    def _count(self, outcome: str, ids: array[int] | None) -> array[int] | None:
        self._told(outcome)
        return ids


def _read(body: bytes) -> array[int] | None:
    try:
        tokens = json.loads(body)["tokens"]
        return array("I", tokens) if 0 < len(tokens) <= MAX_PROMPT_TOKENS else None
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def _digest(question: Mapping[str, Any]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for name, value in question.items():
        text = value.raw if isinstance(value, Raw) else json.dumps(value).encode()
        digest.update(f"{name}\0{len(text)}\0".encode())
        digest.update(text)
    return digest.digest()
