"""A client in a process of its own: streams, and how late each event came that says when it was sent."""

from __future__ import annotations

import asyncio
import json
import sys
import time

import aiohttp


async def watch(url: str, count: int) -> None:
    late: list[float] = []

    async def one(session: aiohttp.ClientSession) -> None:
        body = {"model": "m", "messages": [], "stream": True}
        async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    late.append(time.monotonic() - json.loads(line[6:])["sent_at"])

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(one(session) for _ in range(count)))
    print(json.dumps({"events": len(late), "latest_ms": round(1000 * max(late), 1)}))


if __name__ == "__main__":
    asyncio.run(watch(sys.argv[1], int(sys.argv[2])))
