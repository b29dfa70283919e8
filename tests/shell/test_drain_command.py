"""``kvbus drain`` as an operator types it: what it prints, and its exit status (S7)."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

import pytest
from support.routers import new_namespace
from support.waiting import eventually

from kvbus.bus import NatsBus, Node
from kvbus.local import NatsServer
from kvbus.protocol import Membership
from kvbus.wire import DrainReply, DrainRequest, Heartbeat, Role, State, Subjects


class Engine:
    """Says that it is there, and drains when it is told; ``deaf`` ones answer and go on."""

    def __init__(self, url: str, namespace: str, name: str, role: Role, *, deaf: bool = False) -> None:
        self.name, self.role, self.state, self.requests = name, role, State.READY, 0
        self._deaf = deaf
        bus, subjects = NatsBus([url], name), Subjects(namespace)
        self.node = Node(bus, subjects, name=name, membership=Membership(), heartbeat_interval_s=0.1)
        self.node.present(self._beat)
        self.node.serve(subjects.drain(name), DrainRequest, self._told)

    def _beat(self, number: int) -> Heartbeat:
        return Heartbeat(self.name, 1, number, self.role, self.state, 1, "m", address="x:1", requests=self.requests)

    def _told(self, _: str, request: DrainRequest) -> DrainReply:
        if not (self._deaf and request.undo):
            self.state = State.READY if request.undo else State.DRAINING
        return DrainReply(self.name, 1, self.requests)


async def drain(url: str, namespace: str, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, the JSON object, what was said."""
    command = [sys.executable, "-m", "kvbus", "drain", "--nats-url", url, "--namespace", namespace, "--json"]
    done = await asyncio.create_subprocess_exec(
        *command, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0
    )
    out, said = await done.communicate()
    assert done.returncode is not None
    return done.returncode, json.loads(out), said.decode()


@pytest.mark.slow
async def test_what_it_prints_and_its_exit_status(nats_server: NatsServer) -> None:
    url, namespace = nats_server.url, new_namespace()
    one, two = (Engine(url, namespace, name, Role.DECODE) for name in ("D", "E"))
    async with one.node, two.node:
        await eventually(lambda: one.node.bus.connected and two.node.bus.connected)
        status, got, said = await drain(url, namespace, "D")
        assert (status, got["outcome"], got["decode_left"], got["prefill_left"]) == (0, "drained", ["E"], [])
        assert "left for model m: prefill none; decode E" in said
        status, got, said = await drain(url, namespace, "E")
        assert (status, got["outcome"], two.state) == (3, "last", State.READY)
        assert "E is the last ready decode engine" in said
        assert got["why"] in said.replace("\n", " ")
        status, got, _ = await drain(url, namespace, "D", "--undo")
        assert (status, got["outcome"], one.state) == (0, "ready", State.READY)
        two.requests = 3
        status, got, said = await drain(url, namespace, "E", "--timeout", "0.5")
        assert (status, got["outcome"], got["requests"]) == (4, "not empty", 3)
        assert "it goes on draining" in said
        status, got, said = await drain(url, namespace, "X", "--force")
        assert (status, got["outcome"]) == (1, "failed")
        assert "no engine 'X' is on the bus; engines: D, E" in said


@pytest.mark.slow
async def test_an_engine_that_is_not_taken_back_is_said_so(nats_server: NatsServer) -> None:
    url, namespace = nats_server.url, new_namespace()
    one = Engine(url, namespace, "D", Role.DECODE, deaf=True)
    async with one.node:
        await eventually(lambda: one.node.bus.connected)
        assert (await drain(url, namespace, "D", "--force"))[0] == 0
        status, got, said = await drain(url, namespace, "D", "--undo")
        assert (status, got["outcome"], one.state) == (1, "failed", State.DRAINING)
        assert "engine D goes on draining" in said
