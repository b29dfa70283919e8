"""The HTTP API in front of a simulated engine: the part of vLLM's that the router and the client need."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from typing import Any

from aiohttp import web

from kvbus.sim.engine import Engine
from kvbus.sim.fake_vllm import TOKENS_PER_BLOCK
from kvbus.sim.request import Request
from kvbus.sim.scale.process import MODEL, SENT_HEADER

TPOT_S = 0.005
DECODE_ENDS = {"pushed", "recomputed", "computed locally", "aborted"}
COMPLETION = {
    "object": "text_completion",
    "model": MODEL,
    "choices": [{"index": 0, "text": "a", "finish_reason": None}],
}


class EngineApi:
    """Every answer is streamed, but for prefill legs.

    Processes of one machine share its monotonic clock, so the time in ``X-Sent-At`` may be compared with our own.
    """

    def __init__(self, counts: Counter[str], prefill_way_s: list[float]) -> None:
        self._counts, self._prefill_way_s = counts, prefill_way_s
        self.engine: Engine | None = None
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, access_log=None)

    async def open(self) -> str:
        """Listen on a free port; returns ``host:port``."""
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"127.0.0.1:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        await self._runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        arrived = time.monotonic()
        body = json.loads(await request.read())
        params = body.get("kv_transfer_params") or {}
        if params.get("do_remote_decode"):
            self._prefill_way_s.append(arrived - float(request.headers.get(SENT_HEADER, arrived)))
            await self._compute(body, params, {"prefilled"})
            return web.json_response(COMPLETION)
        how = await self._compute(body, params, DECODE_ENDS) if params.get("do_remote_prefill") else "direct"
        self._counts[how] += 1
        return await self._stream(request, int(body["max_tokens"]), arrived, how)

    async def _compute(self, body: dict[str, Any], params: dict[str, Any], ends: set[str]) -> str:
        """Give the engine its leg of a request; returns how it ended."""
        engine = self.engine
        assert engine is not None
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def on_event(event: str) -> None:
            if event in ends and not ended.done():
                ended.set_result(event)

        prompt_blocks = -(-len(body["prompt"]) // TOKENS_PER_BLOCK)
        hint = params.get("prefill_engine_id") or ""
        now = engine.world.runtime.now
        engine.vllm.take(Request(params["transfer_id"], prompt_blocks, 0, hint, started=now, on_event=on_event))
        return await ended

    async def _stream(self, request: web.Request, tokens: int, arrived: float, how: str) -> web.StreamResponse:
        """The first event tells the client how long the engine itself took until then, for it to subtract."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number in range(tokens):
            event: dict[str, Any] = COMPLETION
            if number:
                await asyncio.sleep(TPOT_S)
            else:
                event = {**COMPLETION, "simulated": {"service_s": time.monotonic() - arrived, "how": how}}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response
