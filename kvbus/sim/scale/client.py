"""``python -m kvbus.sim.scale.client PLAN``: the client of ``kvbus scale``, an open loop in a process of its own.

Now and then one request goes to a decode engine directly, which answers it at once: what that takes is the floor, of
this client, of HTTP and of the engine's own HTTP server, without a router.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from kvbus.local import make_prompt
from kvbus.sim.fake_vllm import TOKENS_PER_BLOCK
from kvbus.sim.scale.plan import Scale
from kvbus.sim.scale.process import MODEL, SENT_HEADER, run_process, write_json
from kvbus.sim.scale.report import quantiles_ms

TIMEOUT_S = 30.0
MAX_OUTSTANDING = 2000
SESSIONS = 1024
WINDOW_S = 60.0
REPORT_INTERVAL_S = 1.0
MAX_ERRORS = 10


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What the client is told. ``direct``: addresses of decode engines, for the requests past the router."""

    scale: Scale
    router_url: str
    folder: str
    direct: Sequence[str]


def _seconds() -> array[float]:
    return array("f")


@dataclass(slots=True)
class Window:
    """The requests that started in one window of the run: how they ended, and seconds that they took."""

    ttft_s: array[float] = field(default_factory=_seconds)
    overhead_s: array[float] = field(default_factory=_seconds)
    direct_s: array[float] = field(default_factory=_seconds)
    late_s: array[float] = field(default_factory=_seconds)
    how: Counter[str] = field(default_factory=Counter)


def summary_of(windows: Sequence[Window]) -> dict[str, object]:
    def of(name: str) -> dict[str, float]:
        return quantiles_ms([value for each in windows for value in getattr(each, name)])

    how = sum((each.how for each in windows), Counter[str]())
    return {"how": how, **{name: of(f"{name}_s") for name in ("ttft", "overhead", "direct", "late")}}


class Load:
    """See the module's docstring."""

    def __init__(self, plan: LoadPlan) -> None:
        self._plan, self._scale = plan, plan.scale
        self._rng = random.Random(self._scale.seed)
        # Each of another session: the router sends prompts that begin alike to one engine.
        self._bodies = [self._body(number) for number in range(SESSIONS)]
        self._windows: list[Window] = []
        self._outstanding: set[asyncio.Task[None]] = set()
        self._errors: list[str] = []
        self._started = self._finished = 0

    def _body(self, session: int) -> bytes:
        prompt = make_prompt(self._scale.prompt_blocks * TOKENS_PER_BLOCK, SESSIONS * self._scale.seed + session)
        body = {"model": MODEL, "prompt": prompt, "max_tokens": self._scale.max_tokens, "stream": True}
        return json.dumps(body).encode()

    async def run(self) -> None:
        self._began = time.monotonic()
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)
        ) as self._session:
            routed = asyncio.create_task(self._send_at(self._scale.rate, direct=False), name="through the router")
            direct = asyncio.create_task(self._send_at(self._scale.direct_rate, direct=True), name="past it")
            while not routed.done() or not direct.done():
                self._report(over=False)
                await asyncio.sleep(REPORT_INTERVAL_S)
            await asyncio.gather(routed, direct)
            if self._outstanding:
                await asyncio.wait(self._outstanding, timeout=TIMEOUT_S)
        self._report(over=True)

    async def _send_at(self, rate: float, *, direct: bool) -> None:
        """Start requests at their time, whether or not earlier ones are answered."""
        due, until = self._began, self._began + self._scale.end_s
        while rate > 0 and (due := due + self._rng.expovariate(rate)) < until:
            if (wait_s := due - time.monotonic()) > 0:
                await asyncio.sleep(wait_s)
            elif self._started % 64 == 0:
                await asyncio.sleep(0)
            self._started += 1
            window = self._window_at(due)
            if len(self._outstanding) >= MAX_OUTSTANDING:
                window.how["not sent: too many outstanding"] += 1
                continue
            task = asyncio.create_task(self._request(due, window, direct=direct), name="request")
            self._outstanding.add(task)
            task.add_done_callback(self._outstanding.discard)

    def _window_at(self, due: float) -> Window:
        since_s = due - self._began - self._scale.warm_s
        if since_s < 0:
            return Window()  # warming up: it is not reported
        while len(self._windows) <= since_s // WINDOW_S:
            self._windows.append(Window())
        return self._windows[int(since_s // WINDOW_S)]

    async def _request(self, due: float, window: Window, *, direct: bool) -> None:
        base = f"http://{self._rng.choice(self._plan.direct)}" if direct else self._plan.router_url
        sent = time.monotonic()
        headers = {SENT_HEADER: repr(sent), "Content-Type": "application/json"}
        try:
            async with self._session.post(
                f"{base}/v1/completions", data=self._rng.choice(self._bodies), headers=headers
            ) as answer:
                while (first := await answer.content.readline()).startswith((b":", b"\n")):
                    pass  # a comment, which the router sends to clients that wait long
                arrived = time.monotonic()
                if answer.status != 200:
                    raise ValueError(f"status {answer.status}: {first[:200]!r}")
                engine = json.loads(first.removeprefix(b"data: "))["simulated"]
                rest = first + await answer.content.read()
            if b"[DONE]" not in rest:
                raise ValueError("the stream was cut")
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
            window.how["failed"] += 1
            if len(self._errors) < MAX_ERRORS:
                self._errors.append(f"failed: {type(error).__name__}: {error}"[:200])
            return
        finally:
            self._finished += 1
        overhead_s = arrived - sent - engine["service_s"]
        if direct:
            window.direct_s.append(overhead_s)
            return
        window.how[engine["how"]] += 1
        window.ttft_s.append(arrived - due)
        window.overhead_s.append(overhead_s)
        window.late_s.append(sent - due)

    def _report(self, *, over: bool) -> None:
        report: dict[str, object] = {
            "over": over,
            "started": self._started,
            "finished": self._finished,
            "errors": self._errors,
        }
        if over:
            report["all"] = summary_of(self._windows)
            report["windows"] = [summary_of([each]) for each in self._windows]
        write_json(Path(self._plan.folder) / "load.json", report)


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    run_process(Load(LoadPlan(**{**told, "scale": Scale(**told["scale"])})).run())
