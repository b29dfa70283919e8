"""A killed engine is noticed by the server's word of its lost connection, long before its silence would tell."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest
from support.waiting import eventually

from kvbus.bus import NatsBus, Node
from kvbus.local import Child, NatsServer
from kvbus.protocol import Membership
from kvbus.wire import Subjects

ENGINE = """
import asyncio, sys
from kvbus.bus import NatsBus, Node, connection_name
from kvbus.protocol import Membership
from kvbus.wire import Heartbeat, Role, State, Subjects

async def main():
    bus = NatsBus([sys.argv[1]], connection_name("P", 5))
    node = Node(bus, Subjects("default"), name="P", membership=Membership())
    node.present(lambda number: Heartbeat("P", 5, number, Role.PREFILL, State.READY, 1))
    async with node:
        await asyncio.sleep(3600)

asyncio.run(main())
"""


@pytest.mark.slow
async def test_a_killed_engine_is_missed_at_once(own_nats_server: NatsServer, tmp_path: Path) -> None:
    watcher = Node(
        NatsBus([own_nats_server.url], "watcher"),
        Subjects("default"),
        name="watcher",
        membership=Membership(dead_after_s=60.0),
    )
    engine = Child("engine", [sys.executable, "-c", ENGINE, own_nats_server.url], tmp_path)
    try:
        async with watcher:
            await eventually(lambda: watcher.membership.get("P") is not None)
            engine.signal(signal.SIGKILL)
            killed = time.monotonic()
            await eventually(lambda: watcher.membership.get("P") is None)
            assert time.monotonic() - killed < 5
    finally:
        engine.stop()
