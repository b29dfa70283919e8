"""``python -m kvbus.sim.scale_group PLAN``: some of ``kvbus scale``'s engines, in one process and one event loop.

The bus is real, and so is the HTTP API in front of each engine. Played are what vLLM computes and the memory that KV is
written into: :mod:`kvbus.sim.played`, :mod:`kvbus.sim.played_decode`, :mod:`kvbus.sim.linked_plane`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import sys
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import uvloop
from aiohttp import web

from kvbus.bus import NatsBus
from kvbus.config import Config
from kvbus.sim.faults import CALM
from kvbus.sim.linked_plane import LinkedFabric
from kvbus.sim.live_engine import LiveEngine
from kvbus.sim.live_stage import LiveStage
from kvbus.sim.played import TOKENS_PER_BLOCK
from kvbus.sim.scene import Scene
from kvbus.sim.stage import Pace, Ticket
from kvbus.wire import Heartbeat, Role, State

MODEL = "played"
SENT_HEADER = "X-Sent-At"
TPOT_S = 0.005
MEAN_WRITE_S = 0.002
_SHIPPED = Config(nats_url="nats://127.0.0.1")


class ShippedPace(Pace):
    """Heartbeats, death and block leases as engines have them; a short prompt is computed in a few ms."""

    @property
    def beat_s(self) -> float:
        return _SHIPPED.heartbeat_interval_s

    @property
    def dead_after_s(self) -> float:
        return _SHIPPED.dead_after_s

    @property
    def block_lease_s(self) -> float:
        return _SHIPPED.block_lease_s


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """What one process of engines is told.

    Attributes:
        name: of the process; its files in ``folder`` have this name.
        engines: name and role of each.
        groups: of all the processes.
    """

    name: str
    nats_url: str
    folder: str
    engines: tuple[tuple[str, str], ...]
    groups: tuple[str, ...]
    seed: int
    work: float


class Front:
    """An engine's HTTP API: what of vLLM's the router needs.

    Times: processes of one machine share its monotonic clock, so ``X-Sent-At`` may be compared with our own.
    """

    def __init__(self, counts: Counter[str], came_s: list[float]) -> None:
        self._counts, self._came_s = counts, came_s
        self.engine: LiveEngine | None = None
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, access_log=None)

    async def open(self) -> str:
        """Listen on a free port; returns ``host:port``."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return f"127.0.0.1:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        await self._runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        came = time.monotonic()
        body = json.loads(await request.read())
        params = body.get("kv_transfer_params") or {}
        sent = float(request.headers.get(SENT_HEADER, came))
        if params.get("do_remote_decode"):
            self._came_s.append(came - sent)
            await self._outcome(body, params, {"prefilled"})
            return web.json_response({"object": "text_completion", "model": MODEL, "choices": [_choice()]})
        how = "direct"
        if params.get("do_remote_prefill"):
            how = await self._outcome(body, params, {"pushed", "recomputed", "computed locally", "aborted"})
        self._counts[how] += 1
        tokens = int(body.get("max_tokens", 1))
        if body.get("stream"):
            return await self._stream(request, tokens, came - sent, came, how)
        said = _played(came - sent, came, how)
        choices = [_choice(tokens)]
        return web.json_response({"object": "text_completion", "model": MODEL, "choices": choices, "played": said})

    async def _outcome(self, body: dict[str, Any], params: dict[str, Any], ends: set[str]) -> str:
        engine = self.engine
        assert engine is not None
        over: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def watch(what: str) -> None:
            if what in ends and not over.done():
                over.set_result(what)

        prompt_blocks = -(-len(body["prompt"]) // TOKENS_PER_BLOCK)
        hint = params.get("prefill_engine_id") or ""
        now = engine.scene.stage.now
        engine.take(Ticket(params["transfer_id"], prompt_blocks, 0, hint, started=now, watcher=watch))
        return await over

    async def _stream(
        self, request: web.Request, tokens: int, way_s: float, came: float, how: str
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number in range(tokens):
            event: dict[str, Any] = {"object": "text_completion", "model": MODEL, "choices": [_choice()]}
            if number:
                await asyncio.sleep(TPOT_S)
            else:
                event["played"] = _played(way_s, came, how)
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


def _choice(tokens: int = 1) -> dict[str, Any]:
    return {"index": 0, "text": "a" * tokens, "finish_reason": None}


def _played(way_s: float, came: float, how: str) -> dict[str, Any]:
    """What the client subtracts: how long the engine itself took until now, and when it spoke."""
    now = time.monotonic()
    return {"way_s": way_s, "service_s": now - came, "spoke_at": now, "how": how}


async def run_group(plan: GroupPlan) -> None:
    """Play until SIGTERM."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    folder = Path(plan.folder)
    stage = LiveStage(plan.seed, replace(CALM, mean_write_s=MEAN_WRITE_S))
    fabric = LinkedFabric(stage, folder / f"{plan.name}.sock")
    scene = Scene(stage, ShippedPace(wait=1.0, work=plan.work, lead_s=0.0, calm_s=0.0), fabric)
    counts: Counter[str] = Counter()
    came_s: list[float] = []
    fronts: list[Front] = []
    engines: list[LiveEngine] = []
    buses: list[NatsBus] = []

    def make_bus(name: str) -> NatsBus:
        buses.append(NatsBus([plan.nats_url], name))
        return buses[-1]

    def report() -> None:
        bus: Counter[str] = Counter()
        for each in buses:
            bus.update(each.counters.snapshot())
        said = {
            "counts": counts,
            "bus": bus,
            "ranks": scene.counters.snapshot(),
            "leftovers": sum(sum(engine.leftovers().values()) for engine in engines),
            "prefill_way_s": came_s,
        }
        _write(folder / f"{plan.name}.json", said)

    try:
        await fabric.open()
        addresses: dict[str, str] = {}
        for name, role in plan.engines:
            front = Front(counts, came_s)
            fronts.append(front)
            addresses[name] = await front.open()
            own = Heartbeat(name, time.time_ns(), 0, Role(role), State.READY, 1, MODEL, addresses[name])
            front.engine = LiveEngine(scene, stage, own, make_bus)
            engines.append(front.engine)
        _write(folder / f"{plan.name}.ready", addresses)
        others = [folder / f"{name}.sock" for name in plan.groups]
        while not all(path.exists() for path in others):  # noqa: ASYNC110 - no event comes from other processes
            await asyncio.sleep(0.05)
        await fabric.meet([str(path) for path in others])
        for engine in engines:
            await engine.start()
        await stage.until(stop.is_set, float("inf"))
    finally:
        for front in fronts:
            await front.close()
        report()
        await stage.close()
        await asyncio.gather(*(engine.close() for engine in engines), return_exceptions=True)
        await fabric.close()


def _write(path: Path, what: object) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(what))
    part.replace(path)


def engines_of(count: int, processes: int) -> list[tuple[tuple[str, str], ...]]:
    """So many engines, half of them for prefill, dealt to so many processes."""
    every = [(f"P{number}", Role.PREFILL.value) for number in range(count // 2)]
    every += [(f"D{number}", Role.DECODE.value) for number in range(count - count // 2)]
    return [tuple(every[number::processes]) for number in range(processes)]


def as_argument(plan: GroupPlan) -> str:
    return json.dumps(asdict(plan))


def run_fast(what: Coroutine[Any, Any, None]) -> None:
    """Until it ends, or Ctrl-C."""
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(what)


def main(arguments: Sequence[str]) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    said = json.loads(arguments[0])
    said["engines"] = tuple((name, role) for name, role in said["engines"])
    run_fast(run_group(GroupPlan(**said)))


if __name__ == "__main__":
    main(sys.argv[1:])
