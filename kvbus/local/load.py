"""Load on an OpenAI completions API: when requests start, what each client saw, and the figures of a run.

Open loop: requests start at their time whether or not earlier ones are answered, as users do.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import aiohttp

VOCABULARY = range(300, 4000)  # of the tiny model, without its special tokens and single bytes

Prompt = list[int]
Stream = Callable[[aiohttp.ClientSession, Prompt, int], AsyncIterator[list[int]]]
"""Sends a prompt, asks for so many tokens, and yields the ids of the new tokens as they come."""


def make_prompt(tokens: int, seed: int) -> Prompt:
    """A prompt of exactly so many tokens, always the same one for a seed."""
    chance = random.Random(seed * 1_000_003 + tokens)
    return [chance.choice(VOCABULARY) for _ in range(tokens)]


class WholeAnswer(list[int]):
    """All tokens of an answer that was not streamed, and how long its first one took, seconds."""

    def __init__(self, tokens: Sequence[int], ttft_s: float) -> None:
        super().__init__(tokens)
        self.ttft_s = ttft_s


@dataclass(slots=True)
class RequestResult:
    """One request as its client saw it. Times in seconds."""

    index: int
    ttft_s: float = 0.0
    total_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    error: str = ""

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first."""
        return (self.total_s - self.ttft_s) / (len(self.tokens) - 1) if len(self.tokens) > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run. Times in ms; ``wrong`` counts answers that differ from the reference."""

    requests: int
    failed: int
    wrong: int
    ttft_p50: float
    ttft_p90: float
    ttft_max: float
    tpot_p50: float


def figures(finished: Sequence[RequestResult], expected: Sequence[Sequence[int]] | None = None) -> Figures:
    good = [result for result in finished if not result.error]
    ttft = sorted(result.ttft_s * 1e3 for result in good) or [0.0]
    wrong = 0
    if expected is not None:
        wrong = sum(result.tokens != list(expected[result.index]) for result in good)
    return Figures(
        requests=len(finished),
        failed=len(finished) - len(good),
        wrong=wrong,
        ttft_p50=_quantile(ttft, 0.5),
        ttft_p90=_quantile(ttft, 0.9),
        ttft_max=ttft[-1],
        tpot_p50=statistics.median([result.tpot_s * 1e3 for result in good] or [0.0]),
    )


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def send_request(
    session: aiohttp.ClientSession, stream: Stream, index: int, prompt: Prompt, max_tokens: int, timeout_s: float
) -> RequestResult:
    """Send one request and take its times."""
    result, started = RequestResult(index), time.perf_counter()
    try:
        async with asyncio.timeout(timeout_s):
            async for new in stream(session, prompt, max_tokens):
                took_s = new.ttft_s if isinstance(new, WholeAnswer) else time.perf_counter() - started
                result.ttft_s = result.ttft_s or took_s
                result.tokens += new
        if len(result.tokens) != max_tokens:
            result.error = f"{len(result.tokens)} of {max_tokens} tokens"
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
        result.error = f"{type(error).__name__}: {error}"[:300]
    result.total_s = time.perf_counter() - started
    return result


async def run_load(
    stream: Stream,
    prompts: Sequence[Prompt],
    *,
    rate: float | None,
    max_tokens: int,
    seed: int = 0,
    timeout_s: float = 120.0,
    progress: Callable[[int, int, int], Awaitable[None]] | None = None,
) -> list[RequestResult]:
    """Send every prompt once.

    Args:
        rate: requests per second, at exponential intervals; None sends one after the other.
        progress: told (finished, failed, all) about once a second.
    """
    chance = random.Random(seed)
    finished: list[RequestResult] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(index: int) -> None:
            finished.append(await send_request(session, stream, index, prompts[index], max_tokens, timeout_s))

        async def report() -> None:
            while progress is not None:
                await progress(len(finished), sum(bool(result.error) for result in finished), len(prompts))
                await asyncio.sleep(1)

        async with asyncio.TaskGroup() as watching:  # what the progress callback raises ends the run
            reporting = watching.create_task(report())
            async with asyncio.TaskGroup() as group:
                for index in range(len(prompts)):
                    if rate is None:
                        await one(index)
                    else:
                        group.create_task(one(index))
                        await asyncio.sleep(chance.expovariate(rate))
            reporting.cancel()
    return sorted(finished, key=lambda result: result.index)


async def read_events(answer: aiohttp.ClientResponse) -> AsyncIterator[list[int]]:
    """Token ids from a streamed completion that was asked for ``return_token_ids``."""
    if answer.status != 200:
        raise ValueError(f"status {answer.status}: {(await answer.text())[:200]}")
    async for line in answer.content:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise ValueError(str(event["error"])[:200])
        for choice in event["choices"]:
            if ids := choice.get("token_ids"):
                yield ids


def completion_body(model: str, prompt: Prompt, max_tokens: int) -> dict[str, object]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }


def plain_stream(url: str, model: str) -> Stream:
    """Requests to one URL: a router's, or a single engine's."""

    async def stream(session: aiohttp.ClientSession, prompt: Prompt, max_tokens: int) -> AsyncIterator[list[int]]:
        body = completion_body(model, prompt, max_tokens)
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            async for ids in read_events(answer):
                yield ids

    return stream
