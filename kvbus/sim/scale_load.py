"""``python -m kvbus.sim.scale_load PLAN``: ``kvbus scale``'s client, an open loop of requests, in a process of its own.

Now and then one request goes to a decode engine directly, which answers it at once: what that takes is the floor, of
this client, of HTTP and of the engine's own HTTP server, without a router.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import sys
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import aiohttp

from kvbus.local import make_prompt
from kvbus.sim.played import TOKENS_PER_BLOCK
from kvbus.sim.scale_group import MODEL, SENT_HEADER, run_fast

TIMEOUT_S = 30.0
MAX_OUTSTANDING = 2000
SESSIONS = 1024
WINDOW_S = 60.0
MAX_ERRORS = 10


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What the client is told.

    Attributes:
        direct: addresses of decode engines, for the requests past the router.
        direct_rate: how many of them a second.
        warm_s: the first seconds, which do not count.
    """

    router_url: str
    folder: str
    direct: tuple[str, ...]
    rate: float
    direct_rate: float
    seconds: float
    warm_s: float
    prompt_blocks: int
    max_tokens: int
    seed: int


@dataclass(slots=True)
class Seen:
    """What came of the requests that started in one window of the run; seconds."""

    ttft_s: array[float] = field(default_factory=lambda: array("f"))
    overhead_s: array[float] = field(default_factory=lambda: array("f"))
    direct_s: array[float] = field(default_factory=lambda: array("f"))
    late_s: array[float] = field(default_factory=lambda: array("f"))
    how: Counter[str] = field(default_factory=Counter)


def quantiles_ms(values: Sequence[float]) -> dict[str, float]:
    """The quantiles that are reported, in ms."""
    ordered = sorted(values) or [0.0]
    at = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    last = len(ordered) - 1
    return {name: round(1e3 * ordered[min(last, int(share * len(ordered)))], 2) for name, share in at.items()}


def summary_of(windows: Sequence[Seen]) -> dict[str, object]:
    def of(name: str) -> dict[str, float]:
        return quantiles_ms([value for each in windows for value in getattr(each, name)])

    how: Counter[str] = Counter()
    for each in windows:
        how.update(each.how)
    return {"how": how, **{name: of(f"{name}_s") for name in ("ttft", "overhead", "direct", "late")}}


class Load:
    """See the module's docstring."""

    def __init__(self, plan: LoadPlan) -> None:
        self._plan = plan
        self._chance = random.Random(plan.seed)
        # Each of another session: of prompts that begin alike the router makes one engine's.
        self._bodies = [self._body(number) for number in range(SESSIONS)]
        self._windows: list[Seen] = []
        self._outstanding: set[asyncio.Task[None]] = set()
        self._errors: list[str] = []
        self._started = self._finished = 0

    def _body(self, session: int) -> bytes:
        prompt = make_prompt(self._plan.prompt_blocks * TOKENS_PER_BLOCK, SESSIONS * self._plan.seed + session)
        body = {"model": MODEL, "prompt": prompt, "max_tokens": self._plan.max_tokens, "stream": True}
        return json.dumps(body).encode()

    async def run(self) -> None:
        plan = self._plan
        self._began = time.monotonic()
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)
        ) as self._session:
            routers = asyncio.create_task(self._keep_up(plan.rate, direct=False), name="through the router")
            others = asyncio.create_task(self._keep_up(plan.direct_rate, direct=True), name="past it")
            while not routers.done() or not others.done():
                self._report(over=False)
                await asyncio.sleep(1.0)
            await asyncio.gather(routers, others)
            if self._outstanding:
                await asyncio.wait(self._outstanding, timeout=TIMEOUT_S)
        self._report(over=True)

    async def _keep_up(self, rate: float, *, direct: bool) -> None:
        """Start requests at their time, whether or not earlier ones are answered."""
        due, until = self._began, self._began + self._plan.warm_s + self._plan.seconds
        while rate > 0 and (due := due + self._chance.expovariate(rate)) < until:
            if (wait_s := due - time.monotonic()) > 0:
                await asyncio.sleep(wait_s)
            elif self._started % 64 == 0:
                await asyncio.sleep(0)
            self._started += 1
            seen = self._window(due)
            if len(self._outstanding) >= MAX_OUTSTANDING:
                if seen is not None:
                    seen.how["not sent: too many outstanding"] += 1
                continue
            task = asyncio.create_task(self._request(due, seen, direct=direct), name="request")
            self._outstanding.add(task)
            task.add_done_callback(self._outstanding.discard)

    def _window(self, due: float) -> Seen | None:
        since_s = due - self._began - self._plan.warm_s
        if since_s < 0:
            return None
        while len(self._windows) <= since_s // WINDOW_S:
            self._windows.append(Seen())
        return self._windows[int(since_s // WINDOW_S)]

    async def _request(self, due: float, seen: Seen | None, *, direct: bool) -> None:
        base = f"http://{self._chance.choice(self._plan.direct)}" if direct else self._plan.router_url
        seen = seen or Seen()
        sent = time.monotonic()
        headers = {SENT_HEADER: repr(sent), "Content-Type": "application/json"}
        try:
            async with self._session.post(
                f"{base}/v1/completions", data=self._chance.choice(self._bodies), headers=headers
            ) as answer:
                while (first := await answer.content.readline()).startswith((b":", b"\n")):
                    pass  # a comment, for who waits long
                came = time.monotonic()
                if answer.status != 200:
                    raise ValueError(f"status {answer.status}: {first[:200]!r}")
                said = json.loads(first.removeprefix(b"data: "))["played"]
                rest = first + await answer.content.read()
            if b"[DONE]" not in rest:
                raise ValueError("the stream was cut")
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
            self._count(seen, f"failed: {type(error).__name__}: {error}"[:200])
            return
        finally:
            self._finished += 1
        overhead_s = came - sent - said["service_s"]
        if direct:
            seen.direct_s.append(overhead_s)
            return
        seen.how[said["how"]] += 1
        seen.ttft_s.append(came - due)
        seen.overhead_s.append(overhead_s)
        seen.late_s.append(sent - due)

    def _count(self, seen: Seen, what: str) -> None:
        seen.how["failed"] += 1
        if len(self._errors) < MAX_ERRORS:
            self._errors.append(what)

    def _report(self, *, over: bool) -> None:
        said: dict[str, object] = {
            "over": over,
            "at_s": time.monotonic() - self._began,
            "started": self._started,
            "finished": self._finished,
            "outstanding": len(self._outstanding),
            "errors": self._errors,
        }
        if over:
            said["all"] = summary_of(self._windows)
            said["windows"] = [summary_of([each]) for each in self._windows]
        path = Path(self._plan.folder) / "load.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps(said))
        part.replace(path)


def as_argument(plan: LoadPlan) -> str:
    return json.dumps(asdict(plan))


def main(arguments: Sequence[str]) -> None:
    logging.basicConfig(level=logging.WARNING)
    run_fast(Load(LoadPlan(**json.loads(arguments[0]))).run())


if __name__ == "__main__":
    main(sys.argv[1:])
