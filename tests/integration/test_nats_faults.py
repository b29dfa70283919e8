"""The NATS adapter against a server that is away, restarted, frozen, or never there."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from pathlib import Path

import pytest
from support.waiting import eventually

from kvbus.bus import NatsBus
from kvbus.local import NatsServer, free_port


async def test_it_starts_without_a_server_and_joins_when_there_is_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    got: list[bytes] = []
    heard: list[bool] = []
    bus = NatsBus([f"nats://kvbus:kvbus@127.0.0.1:{port}"], "test")
    bus.watch(heard.append)
    with caplog.at_level(logging.WARNING, "kvbus"):
        async with bus:
            await bus.subscribe("a.b", lambda _, payload: got.append(payload))
            await eventually(lambda: bus.counters["connect_failed"] > 2)
            assert not bus.connected
            server = NatsServer(tmp_path, port=port)
            try:
                await eventually(lambda: heard == [True])
                bus.publish("a.b", b"hello")
                await eventually(lambda: got == [b"hello"])
            finally:
                server.stop()
    complaints = [record for record in caplog.records if "no NATS server at" in record.message]
    assert len(complaints) == 1, "said once, not at every try"
    assert f"nats://127.0.0.1:{port}" in complaints[0].getMessage()
    assert "kvbus:kvbus" not in caplog.text


async def test_it_survives_a_restart_of_the_server(own_nats_server: NatsServer, tmp_path: Path) -> None:
    got: list[bytes] = []
    heard: list[bool] = []
    async with NatsBus([own_nats_server.url], "test") as bus:
        bus.watch(heard.append)
        await bus.subscribe("a.b", lambda _, payload: got.append(payload))
        await eventually(lambda: bus.connected)
        own_nats_server.child.signal(signal.SIGKILL)
        await eventually(lambda: not bus.connected)
        assert bus.publish("a.b", b"lost") is False
        again = NatsServer(tmp_path, port=own_nats_server.port, name="again")
        try:
            await eventually(lambda: bus.connected)
            bus.publish("a.b", b"found")
            await eventually(lambda: got == [b"found"])
            assert heard[-2:] == [False, True]
        finally:
            again.stop()


@pytest.mark.slow
async def test_a_frozen_server_is_noticed_in_seconds(own_nats_server: NatsServer) -> None:
    async with NatsBus([own_nats_server.url], "test") as bus:
        await eventually(lambda: bus.connected)
        own_nats_server.child.signal(signal.SIGSTOP)
        frozen = time.monotonic()
        try:
            await eventually(lambda: not bus.connected, timeout_s=8.0)
            assert time.monotonic() - frozen < 6.0
        finally:
            own_nats_server.child.signal(signal.SIGCONT)
        await eventually(lambda: bus.connected)


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize(("messages", "size"), [(1, 1000), (200, 900_000)])
async def test_leaving_is_quick_while_the_server_is_frozen(
    own_nats_server: NatsServer, messages: int, size: int
) -> None:
    """Also with more to say than the socket takes: nats-py's publish is blocked then, and swallows a cancel."""
    async with NatsBus([own_nats_server.url], "test") as bus:
        await eventually(lambda: bus.connected)
        own_nats_server.child.signal(signal.SIGSTOP)
        for _ in range(messages):
            bus.publish("a.b", b"x" * size)
        await asyncio.sleep(0.1)  # the pump is in it
        leaving = time.monotonic()
    assert time.monotonic() - leaving < 4.0
    own_nats_server.child.signal(signal.SIGCONT)
