"""``kvbus demo``: the main job on a real model, three questions through the router."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass

import aiohttp
from rich.console import Console

from kvbus.errors import LocalClusterError
from kvbus.local.cluster import Cluster
from kvbus.router.request import DECODE_HEADER, PREFILL_HEADER, TRANSFER_HEADER

QUESTIONS = (
    "What is the capital of France?",
    "Name three primary colors.",
    "In one sentence: why is the sky blue?",
)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client saw. Times in seconds."""

    transfer_id: str
    prefill: str
    decode: str
    prompt_tokens: int
    tokens: int
    ttft_s: float


async def ask(session: aiohttp.ClientSession, cluster: Cluster, question: str, console: Console) -> Answer:
    """Ask one chat question and print the answer as it streams."""
    body = {
        "model": cluster.served_name,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 48,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started, ttft_s, usage = time.monotonic(), 0.0, {"prompt_tokens": 0, "completion_tokens": 0}
    async with session.post(f"{cluster.url}/v1/chat/completions", json=body) as answer:
        if answer.status != 200:
            raise LocalClusterError(f"kvbus: the router answered {answer.status}: {await answer.text()}")
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                if text := choice["delta"].get("content"):
                    ttft_s = ttft_s or time.monotonic() - started
                    console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
        console.print()
        marks = answer.headers
    return Answer(
        marks[TRANSFER_HEADER],
        marks[PREFILL_HEADER],
        marks[DECODE_HEADER],
        usage["prompt_tokens"],
        usage["completion_tokens"],
        ttft_s,
    )


async def run_demo(cluster: Cluster, console: Console) -> None:
    """Ask the questions; raises LocalClusterError if one is not answered with pushed KV."""
    async with aiohttp.ClientSession() as session:
        for question in QUESTIONS:
            console.print(f"\n[bold]Q: {question}[/bold]")
            answer = await ask(session, cluster, question, console)
            done = await asyncio.to_thread(cluster.observer.transfer, answer.transfer_id)
            if not done:
                raise LocalClusterError(f"kvbus: no KV was pushed for transfer {answer.transfer_id}")
            first = done[0]
            console.print(
                f"[green]{answer.prefill} -> {answer.decode}[/green]  "
                f"{answer.prompt_tokens} prompt + {answer.tokens} answer tokens  "
                f"{sum(each.blocks for each in done)} blocks, {sum(each.nbytes for each in done):,} bytes pushed  "
                f"match wait {first.match_wait_s * 1e3:.1f} ms ({first.late_side} late)  "
                f"write {max(each.write_s for each in done) * 1e3:.1f} ms  "
                f"TTFT {answer.ttft_s * 1e3:.0f} ms",
                soft_wrap=True,
            )
