"""Record the traces in ``recorded/`` anew: real engines, a real nats-server, the tiny model. Takes about four minutes.

python traces/record.py
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from kvbus.errors import KVBusError
from kvbus.local import Cluster, cache_dir, make_prompt, tiny
from kvbus.local.load import completion_body, read_events
from kvbus.tools.sources import read_files
from kvbus.tools.view import TraceView
from kvbus.trace import Outcome
from kvbus.trace.otlp_json import to_otlp

RECORDED = Path(__file__).parent / "recorded"
PROMPT_TOKENS = 2048
WAIT_S = 30.0
ARGUMENTS = ("--max-model-len", "4096", "--max-num-batched-tokens", "256")


async def ask(cluster: Cluster, seed: int, act: Callable[[], object] | None = None) -> None:
    """One completion; ``act`` is called when its prefill has begun."""
    body = completion_body(cluster.served_name, make_prompt(PROMPT_TOKENS, seed), 8)
    headers = {"X-Request-Id": f"recorded-{seed}"}
    async with aiohttp.ClientSession() as session:
        posting = asyncio.create_task(_read(session, cluster, body, headers))
        if act is not None:
            while not any(prefill.computed for prefill in list(cluster.observer.prefilling.values())):
                await asyncio.sleep(0.005)
            act()
        await posting


async def _read(session: aiohttp.ClientSession, cluster: Cluster, body: Any, headers: dict[str, str]) -> None:
    async with session.post(f"{cluster.url}/v1/completions", json=body, headers=headers) as answer:
        async for _ in read_events(answer):
            pass


def keep(name: str, cluster: Cluster, seed: int, outcome: Outcome) -> None:
    """Write the trace of that request to ``recorded/``."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        views = read_files([cluster.trace_file]) if cluster.trace_file.stat().st_size else []
        found = [view for view in views if view.has_id(f"recorded-{seed}")]
        if found:
            _write(name, found[0], outcome)
            return
        time.sleep(0.1)
    raise SystemExit(f"{name}: no trace of request recorded-{seed}")


def _write(name: str, view: TraceView, outcome: Outcome) -> None:
    if view.about("kvbus.outcome", "") != outcome:
        raise SystemExit(f"{name}: the outcome is {view.about('kvbus.outcome', '')}, not {outcome}")
    RECORDED.mkdir(exist_ok=True)
    path = RECORDED / f"{name}.json"
    path.write_text(json.dumps(to_otlp(view.spans), indent=1) + "\n")
    print(f"{path.name}: {view.ttft_ms:.0f} ms, {len(view.spans)} spans")


def main() -> None:
    model = tiny(cache_dir() / "tiny-qwen3")

    def cluster(**about: Any) -> Cluster:
        return Cluster(model, Path(tempfile.mkdtemp()), arguments=ARGUMENTS, say=print, **about)

    with cluster() as early:
        asyncio.run(ask(early, 1))
        asyncio.run(ask(early, 2))
        keep("push-early", early, 2, Outcome.PUSHED)
        asyncio.run(ask(early, 3, lambda: early.engines["prefill-0"].child.signal(signal.SIGKILL)))
        keep("recompute", early, 3, Outcome.RECOMPUTED)
    with cluster(extra={"registration": "after_prefill"}) as late:
        asyncio.run(ask(late, 4))
        asyncio.run(ask(late, 5))
        keep("push-late", late, 5, Outcome.PUSHED)
    two = ("--tensor-parallel-size", "2")
    with cluster(prefill_arguments=two, decode_arguments=two) as parallel:
        asyncio.run(ask(parallel, 6))
        asyncio.run(ask(parallel, 7))
        keep("tensor-parallel", parallel, 7, Outcome.PUSHED)


if __name__ == "__main__":
    try:
        main()
    except KVBusError as error:
        sys.exit(str(error))
