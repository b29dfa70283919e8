"""Conversations as a load: each turn's prompt is the last one's, its answer, and something new.

Sessions run side by side; the next turn follows after the user has thought. Prefix caches are on.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from kvbus.local.load import RequestResult, Stream, make_prompt, send_request

TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Turns:
    """``first_tokens`` of the first prompt, ``new_tokens`` are added by each turn, ``max_tokens`` of each answer.

    ``think_s``: the mean of the exponential pause before each turn, seconds.
    """

    sessions: int
    turns: int
    first_tokens: int
    new_tokens: int
    max_tokens: int
    think_s: float

    @property
    def name(self) -> str:
        return f"turns 2-{self.turns}, {self.new_tokens} new tokens"

    async def run(self, stream: Stream, seed: int) -> list[RequestResult]:
        """Run all sessions; returns the results of every turn but the first, in no particular order.

        A session ends with its first turn that fails.
        """
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            results = await asyncio.gather(
                *(self._session(http, stream, seed * self.sessions + each) for each in range(self.sessions))
            )
        return [result for session in results for result in session[1:]]

    async def _session(self, http: aiohttp.ClientSession, stream: Stream, seed: int) -> Sequence[RequestResult]:
        chance, prompt = random.Random(seed), make_prompt(self.first_tokens, seed)
        results: list[RequestResult] = []
        for number in range(self.turns):
            await asyncio.sleep(chance.expovariate(1 / self.think_s) if self.think_s else 0.0)
            result = await send_request(http, stream, seed * self.turns + number, prompt, self.max_tokens, TIMEOUT_S)
            results.append(result)
            if result.error:
                break
            prompt = [*prompt, *result.tokens, *make_prompt(self.new_tokens, seed * self.turns + number)]
        return results
