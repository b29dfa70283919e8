"""The cluster of ``docker/compose.yaml`` on a real Docker engine; needs the images, see ``docker/README.md``.

``-s`` prints the figures: boot time, image sizes, memory of each container, what was lost when containers were killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.otlp import Endpoint, otlp_endpoint
from support.waiting import eventually

from kvbus.local import free_port
from kvbus.local.load import Prompt, run_load
from kvbus.tools.view import problems, views_of
from kvbus.trace import SpanData

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
IMAGES = {"ENGINE_IMAGE": "kvbus-engine", "ROUTER_IMAGE": "kvbus-router", "NATS_IMAGE": "nats:2.12.0-alpine"}
MODEL = "SmolLM2-135M-Instruct"
BOOT_S = 300
QUESTIONS = ("capital of France", "largest planet", "color of the sky", "first month of the year")


def docker(*words: str, check: bool = True) -> str:
    done = subprocess.run(["docker", *words], capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, done.stderr
    return done.stdout if done.returncode == 0 else ""


def why_not() -> str:
    if shutil.which("docker") is None or not docker("version", "--format", "{{.Server.Version}}", check=False).strip():
        return "a Docker engine that answers, with the images of docker/README.md"
    missing = [image for image in images().values() if not docker("images", "-q", image, check=False).strip()]
    return f"the images {', '.join(missing)} (docker/README.md says how to build them)" if missing else ""


def own_address() -> str:
    """Under which containers reach this host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing
        return str(probe.getsockname()[0])


def images() -> dict[str, str]:
    return {variable: os.environ.get(variable, image) for variable, image in IMAGES.items()}


@dataclass(frozen=True, slots=True)
class Cluster:
    """``compose`` runs the compose tool on it."""

    url: str
    environment: dict[str, str]
    endpoint: Endpoint

    def compose(self, *words: str, check: bool = True) -> str:
        plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0
        tool = ["docker", "compose"] if plugin else ["docker-compose"]
        command = [*tool, "-f", str(ROOT / "docker" / "compose.yaml"), "-p", "kvbustest", *words]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, **self.environment}
        )
        assert not check or done.returncode == 0, done.stderr + done.stdout
        return done.stdout + done.stderr

    def up(self, **scale: int) -> float:
        """Start what is not there, and wait until as many engines are ready; returns seconds."""
        started = time.monotonic()
        scales = [word for name, number in scale.items() for word in ("--scale", f"{name}={number}")]
        self.compose("up", "-d", "--no-build", *scales)
        wanted = {"prefill": 1, "decode": 1, **scale}
        self.wait_for(wanted)
        return time.monotonic() - started

    def wait_for(self, wanted: dict[str, int]) -> None:
        deadline = time.monotonic() + BOOT_S
        while {kind: len(self.state().get(f"{kind}_engines", [])) for kind in wanted} != wanted:
            assert time.monotonic() < deadline, f"{self.state()}\n{self.compose('logs', '--tail', '30')}"
            time.sleep(1)

    def state(self) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except OSError:
            return {}

    def containers(self, service: str) -> list[str]:
        return self.compose("ps", "-q", service).split()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(reason)
    ports = {name: str(free_port()) for name in ("PORT", "NATS_PORT", "NATS_MONITOR_PORT")}
    with otlp_endpoint("0.0.0.0") as endpoint:
        otlp = f"http://{own_address()}:{endpoint.url.rpartition(':')[2]}"
        environment = {**images(), **ports, "COMPOSE_PROFILES": "none", "OTLP_ENDPOINT": otlp}
        running = Cluster(f"http://127.0.0.1:{ports['PORT']}", environment, endpoint)
        try:
            yield running
        finally:
            running.compose("down", "-v", "--timeout", "20", check=False)


async def chat(session: aiohttp.ClientSession, url: str, question: str, max_tokens: int) -> AsyncIterator[list[int]]:
    """Stream an answer; yields a one for each event with text."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
        if answer.status != 200:
            raise ValueError(f"status {answer.status}: {(await answer.text())[:200]}")
        async for line in answer.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    raise ValueError(str(event["error"])[:200])
                if event["choices"] and event["choices"][0]["delta"].get("content"):
                    yield [1]


async def load(cluster: Cluster, requests: int, rate: float, during: Any) -> tuple[int, int, float]:
    """Requests at a rate while ``during`` runs; returns how many failed before their first token, later, and the
    slowest first token, seconds."""

    async def stream(session: aiohttp.ClientSession, prompt: Prompt, max_tokens: int) -> AsyncIterator[list[int]]:
        question = f"Question {prompt[0]}: what is the {QUESTIONS[prompt[0] % len(QUESTIONS)]}?"
        async for each in chat(session, cluster.url, question, max_tokens):
            yield each

    loading = asyncio.create_task(
        run_load(stream, [[n] for n in range(requests)], rate=rate, max_tokens=8, timeout_s=120)
    )
    await during()
    finished = await loading
    failed = [result for result in finished if result.error and "of 8 tokens" not in result.error]
    early = [result for result in failed if not result.tokens]
    for result in failed:
        print(f"request {result.index}: {result.error}")
    return len(early), len(failed) - len(early), max(result.ttft_s for result in finished if not result.error)


async def test_one_command_one_curl_one_trace(cluster: Cluster) -> None:
    took = cluster.up()
    print(f"\nready {took:.0f} s after `up`; images: " + ", ".join(
        f"{image} {docker('images', '--format', '{{.Size}}', image).split()[0]}" for image in images().values()
    ))  # fmt: skip
    async with aiohttp.ClientSession() as session:
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "max_tokens": 12,
        }
        async with session.post(f"{cluster.url}/v1/chat/completions", json={**body, "temperature": 0}) as answer:
            said = (await answer.json())["choices"][0]["message"]["content"]
    print(f"answer: {said}")
    assert "Paris" in said
    last = ("exec", "-T", "router", "kvbus", "trace", "last")
    await eventually(lambda: "TTFT" in cluster.compose(*last, check=False), 30)
    told = cluster.compose(*last)
    print(told)
    assert "prefill.compute" in told
    assert "decode.first_token" in told
    print(docker("stats", "--no-stream", "--format", "{{.Name}}  {{.MemUsage}}"))
    await eventually(lambda: any(span.name == "llm_request" for span in cluster.endpoint.spans), 20)
    spans: list[SpanData] = cluster.endpoint.spans
    views = [view for view in views_of(spans) if view.root is not None]
    assert views
    assert problems(views[-1]) == []
    assert {span.name for span in spans} >= {"request", "match.wait", "llm_request"}


async def test_killed_containers_cost_no_request_before_its_first_token(cluster: Cluster) -> None:
    took = cluster.up(prefill=2, decode=2)
    print(f"\n2 prefill and 2 decode engines ready {took:.0f} s after `up --scale`")

    async def kill() -> None:
        for service in ("decode", "prefill"):
            await asyncio.sleep(5)
            victim = cluster.containers(service)[0]
            await asyncio.to_thread(docker, "kill", victim)
            print(f"killed {service} {victim[:12]}")

    early, later, slowest = await load(cluster, 60, 2.0, kill)
    print(f"60 requests at 2/s: {early} failed before their first token, {later} after it; slowest {slowest:.1f} s")
    assert early == 0
    cluster.up(prefill=2, decode=2)
    early, later, _ = await load(cluster, 10, 2.0, lambda: asyncio.sleep(0))
    assert early == later == 0


async def test_stop_drains(cluster: Cluster) -> None:
    cluster.up(prefill=1, decode=2)

    async def stop() -> None:
        await asyncio.sleep(2)
        victim = cluster.containers("decode")[0]
        await asyncio.to_thread(docker, "stop", "-t", "60", victim)
        log = docker("logs", victim)
        assert "is drained" in log + subprocess.run(["docker", "logs", victim], capture_output=True, text=True).stderr

    early, later, slowest = await load(cluster, 20, 2.0, stop)
    print(
        f"\n20 requests while one decode engine is stopped: {early + later} failed, slowest first token {slowest:.1f} s"
    )
    assert early == later == 0


def test_what_a_user_sees_who_got_it_wrong(cluster: Cluster) -> None:
    def run(*words: str, **environment: str) -> str:
        flags = [word for key, value in environment.items() for word in ("-e", f"{key}={value}")]
        done = subprocess.run(
            ["docker", "run", "--rm", *flags, images()["ENGINE_IMAGE"], *words],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode != 0
        return done.stdout + done.stderr

    said = run("engine", "prefill", KVBUS_NATS_URL="http://nats:4222", KVBUS_MODEL="/models/x")
    print(f"\n{said}")
    assert "nats_url='http://nats:4222'; allowed: a URL such as nats://host:4222" in said
    said = run("engine", "prefill", KVBUS_NATS_URL="nats://nats:4222", KVBUS_MODEL="/models/x")
    print(said)
    assert "no model in /models/x" in said
    said = run("engine", "prefill", KVBUS_MODEL="/models/x")
    print(said)
    assert "KVBUS_NATS_URL" in said
    taken = subprocess.run(
        [
            "docker",
            "run",
            "--rm",
            "-p",
            f"127.0.0.1:{cluster.environment['PORT']}:8000",
            images()["ROUTER_IMAGE"],
            "--version",
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    print(taken.stderr)
    assert "address already in use" in taken.stderr or "port is already allocated" in taken.stderr
