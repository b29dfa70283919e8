"""Routers as processes of their own, over a real nats-server, with fake engines in the test's process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp

from kvbus.bus import NatsBus, Node
from kvbus.local import Child, free_port
from kvbus.protocol import Membership
from kvbus.wire import Heartbeat, Role, State, Subjects
from support.fronts import FakeApi
from support.waiting import eventually

CHAT = "/v1/chat/completions"


class RouterProcess:
    """``kvbus router``; ends with the context that started it."""

    def __init__(self, nats_url: str, namespace: str, folder: Path, *options: str, name: str = "router") -> None:
        self.port, self.trace_file = free_port(), folder / f"{name}.jsonl"
        self._command = [sys.executable, "-m", "kvbus", "router", "--nats-url", nats_url, "--namespace", namespace]
        self._command += ["--port", str(self.port), "--trace-file", str(self.trace_file), *options]
        self._folder, self._name = folder, name
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self.child.log.read_text()

    @property
    def traces(self) -> int:
        return len([line for line in self.trace_file.read_text().splitlines() if line])

    def start(self) -> None:
        """At the same port as before."""
        self.child = Child(self._name, self._command, self._folder)

    async def ended(self, timeout_s: float = 60.0) -> int:
        """Its exit status, once it has ended by itself."""
        await eventually(lambda: not self.child.alive, timeout_s)
        return self.child.status

    async def ready(self) -> None:
        """Return when it answers requests."""
        async with aiohttp.ClientSession() as session, asyncio.timeout(60):
            while True:
                self.child.check()
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"{self.url}/ready") as answer:
                        if answer.status == 200:
                            return
                await asyncio.sleep(0.05)


class Fleet:
    """Fake engines that say on a real bus that they are there: prefill if the name begins with P, else decode.

    They say so from threads of their own: a test that is busy must not make them look dead.
    """

    def __init__(self, nats_url: str, namespace: str, apis: Sequence[FakeApi]) -> None:
        self.nats_url, self.namespace = nats_url, namespace
        self.apis = {api.name: api for api in apis}

    def __getitem__(self, name: str) -> FakeApi:
        return self.apis[name]

    def node(self, name: str) -> Node:
        """The engine on the bus."""
        role = Role.PREFILL if name.startswith("P") else Role.DECODE
        beat = Heartbeat(name, 1, 1, role, State.READY, 1, "m", address=self.apis[name].address)
        bus, subjects = NatsBus([self.nats_url], name), Subjects(self.namespace)
        node = Node(bus, subjects, name=name, membership=Membership(), hears=())
        node.present(lambda number: replace(beat, number=number))
        return node


@asynccontextmanager
async def fleet(nats_url: str, namespace: str, *apis: FakeApi) -> AsyncIterator[Fleet]:
    async with contextlib.AsyncExitStack() as stack:
        for api in apis:
            await api.server.start_server()
            stack.push_async_callback(api.server.close)
        made = Fleet(nats_url, namespace, apis)
        for api in apis:
            node = made.node(api.name)
            node.start()
            stack.callback(node.close)
        yield made


@contextlib.contextmanager
def router_process(fleet: Fleet, folder: Path, *options: str, name: str = "router") -> Iterator[RouterProcess]:
    router = RouterProcess(fleet.nats_url, fleet.namespace, folder, *options, name=name)
    try:
        yield router
    finally:
        router.child.kill()


async def ask(session: aiohttp.ClientSession, url: str, **body: Any) -> tuple[int, str, dict[str, str]]:
    """One chat completion: status, body, headers."""
    async with session.post(f"{url}{CHAT}", json={"model": "m", "messages": [], **body}) as answer:
        return answer.status, await answer.text(), dict(answer.headers)


def message_of(text: str) -> str:
    """Of an error in OpenAI's form."""
    return str(json.loads(text)["error"]["message"])


def new_namespace() -> str:
    return f"n{os.urandom(6).hex()}"
