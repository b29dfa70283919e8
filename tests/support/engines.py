"""Talking to engines and routers in end-to-end tests."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
# Summing in another order, over ranks or in a batch, changes the last bits; in float32 too few to change an answer.
EXACT = ("--dtype", "float32", "--seed", "1")
ARGUMENTS = ("--max-model-len", "4096", "--block-size", "32", "--max-num-batched-tokens", "256", *EXACT, *TOOLS)
TRANSFER_ALL = {"local_prefill_tokens": 0}  # short prompts, too
BLOCK_LEASE_S = 10.0  # of the shared cluster
VOCABULARY = range(300, 4000)  # of the tiny model, without its special tokens and single bytes


def prompt(tokens: int, seed: int = 0) -> list[int]:
    """A prompt of exactly so many tokens."""
    chance = random.Random(seed * 100_003 + tokens)
    return [chance.choice(VOCABULARY) for _ in range(tokens)]


@dataclass(frozen=True)
class Completion:
    """What a client got. ``tokens`` are ids."""

    tokens: tuple[int, ...]
    text: str
    headers: dict[str, str]


async def complete(url: str, prompt: Sequence[int], max_tokens: int = 12, **body: Any) -> Completion:
    """One greedy completion, as token ids."""
    request = {
        "model": "tiny-qwen3",
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **body,
    }
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=request) as answer:
        content = await answer.json()
        assert answer.status == 200, content
        choice = content["choices"][0]
        return Completion(tuple(choice["token_ids"]), choice["text"], dict(answer.headers))


async def complete_all(
    url: str, prompts: Sequence[Sequence[int]], max_tokens: int = 12, **body: Any
) -> list[Completion]:
    """All of them at once."""
    return await asyncio.gather(*(complete(url, each, max_tokens, **body) for each in prompts))


@dataclass(frozen=True)
class PromptTokens:
    """Where an engine's prompt tokens came from, so far."""

    computed: int
    cached: int
    external: int

    def __sub__(self, other: PromptTokens) -> PromptTokens:
        return PromptTokens(self.computed - other.computed, self.cached - other.cached, self.external - other.external)


async def metrics(url: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as answer:
        return await answer.text()


async def prompt_tokens(url: str) -> PromptTokens:
    """vLLM's own counters, of all data parallel ranks behind this address."""
    text = await metrics(url)

    def read(source: str) -> int:
        counter = rf'vllm:prompt_tokens_by_source_total{{[^}}]*source="{source}"[^}}]*}} ([0-9.e+]+)'
        return sum(int(float(count)) for count in re.findall(counter, text))

    return PromptTokens(read("local_compute"), read("local_cache_hit"), read("external_kv_transfer"))


async def post(url: str, body: dict[str, Any], **headers: str) -> tuple[int, dict[str, Any]]:
    async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as answer:
        text = await answer.text()
        return answer.status, json.loads(text) if text else {}


def assert_came_from_outside(spent: PromptTokens, tokens: int) -> None:
    """D computes each prompt's last token to get the first new one; vLLM counts it as external all the same, but for a
    prompt of that one token, which it counts as computed."""
    assert (spent.computed, spent.external) == ((1, 0) if tokens == 1 else (0, tokens))


def say(text: str) -> None:
    print(text, flush=True)
