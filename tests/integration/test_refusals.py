"""What a NATS server refuses is said as refused, and who may only listen can observe (S5, S9)."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from nats.aio.client import Client
from support import certificates
from support.waiting import eventually

from kvbus.bus import NatsBus
from kvbus.local import NatsServer
from kvbus.wire import Heartbeat, Role, State, Subjects, encode

USERS = """\
authorization {
  users: [
    {user: admin, password: secret}
    {user: ear, password: secret, permissions: {subscribe: [">"], publish: {deny: [">"]}}}
    {user: strict, password: secret, permissions: {subscribe: ["kvbus.>"], publish: {deny: [">"]}}}
    {user: narrow, password: secret, permissions: {subscribe: ["kvbus.v1.other.>", "_INBOX.>"], publish: [">"]}}
    {user: boxless, password: secret, permissions: {subscribe: ["kvbus.>"], publish: [">"]}}
  ]
}
"""
HANGS_S = 60.0  # a command that waits for an answer; a busy machine takes half of it to start Python
BEAT = Heartbeat("P", 5, 1, Role.PREFILL, State.READY, 1, "m", free_blocks=300, total_blocks=400)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path_factory.mktemp("refusals"), configuration=USERS)
    yield server
    server.stop()


def url(server: NatsServer, user: str, password: str = "secret") -> str:
    return f"nats://{user}:{password}@127.0.0.1:{server.port}"


@asynccontextmanager
async def engine_in(server: NatsServer, namespace: str) -> AsyncIterator[None]:
    """An engine's heartbeats."""

    async def beat() -> None:
        while True:
            bus.publish(Subjects(namespace).heartbeats("prefill", "P"), encode(BEAT))
            await asyncio.sleep(0.1)

    async with NatsBus([url(server, "admin")], "engine") as bus:
        beating = asyncio.create_task(beat())
        yield
        beating.cancel()


async def kvbus(*words: str, **environment: str) -> tuple[int | None, str, str]:
    """Run a command to its end: status, what it wrote, what it said."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvbus", *words),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "COLUMNS": "200", **environment},
    )
    out, err = await asyncio.wait_for(process.communicate(), 40)
    return process.returncode, out.decode(), err.decode()


@pytest.mark.parametrize("user", ["ear", "strict", "boxless"])
async def test_who_may_only_listen_stays_connected(
    server: NatsServer, user: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbus.bus.nats_connection.PING_INTERVAL_S", 0.02)
    got: list[bytes] = []
    changes: list[bool] = []
    flushes = 0
    flush = Client.flush

    async def counted(client: Client, timeout: int) -> None:
        nonlocal flushes
        await flush(client, timeout)
        flushes += 1

    async with NatsBus([url(server, user)], "test") as bus:
        bus.watch(changes.append)
        await bus.subscribe("kvbus.x", lambda _, payload: got.append(payload))
        await eventually(lambda: bus.connected)
        monkeypatch.setattr(Client, "flush", counted)
        await eventually(lambda: flushes >= 5)
        async with NatsBus([url(server, "admin")], "other") as other:
            await eventually(lambda: other.connected)
            other.publish("kvbus.x", b"hello")
            await eventually(lambda: got == [b"hello"])
    assert changes[0] is True
    assert bus.counters["disconnects"] == 0
    assert "_INBOX" not in caplog.text


@pytest.mark.slow
async def test_a_frozen_server_is_noticed_by_who_may_only_listen(tmp_path: Path) -> None:
    own = NatsServer(tmp_path, configuration=USERS)
    try:
        async with NatsBus([url(own, "ear")], "test") as bus:
            await eventually(lambda: bus.connected)
            own.child.signal(signal.SIGSTOP)
            await eventually(lambda: not bus.connected, timeout_s=8.0)
            own.child.signal(signal.SIGCONT)
            await eventually(lambda: bus.connected)
    finally:
        own.stop()


async def test_a_permission_that_lacks_is_named_once(server: NatsServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvbus"):
        async with NatsBus([url(server, "narrow")], "test") as bus:
            await bus.subscribe("kvbus.v1.default.>", lambda *_: None)
            await eventually(lambda: bus.counters["permissions_denied"] >= 1)
        async with NatsBus([url(server, "ear")], "test") as bus:
            await eventually(lambda: bus.connected)
            for _ in range(3):
                bus.publish("kvbus.v1.default.who", b"")
            await eventually(lambda: bus.counters["permissions_denied"] >= 3)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == [
        "kvbus: this NATS user may not subscribe to kvbus.v1.default.>",
        "kvbus: this NATS user may not publish to kvbus.v1.default.who",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("user", ["ear", "strict"])
async def test_the_observers_work_for_who_may_only_listen(server: NatsServer, user: str) -> None:
    about = ("--nats-url", url(server, user))
    async with engine_in(server, "default"):
        tap, top, pending = await asyncio.gather(
            kvbus("tap", *about, "--all", "--json", "--limit", "3"),
            kvbus("top", *about, "--json"),
            kvbus("pending", *about, "--for", "1"),
        )
    assert tap[0] == 0, tap
    assert [json.loads(text)["engine"] for text in tap[1].splitlines()] == ["P"] * 3
    assert top[0] == 0, top
    assert [row["engine"] for row in json.loads(top[1])["engines"]] == ["P"]
    assert top[2].count("this NATS user may not publish to kvbus.v1.default.who") == 1
    assert pending[:2] == (0, "nothing is pending\n"), pending


@pytest.mark.slow
async def test_kvbus_collect_stays_connected_for_who_may_only_listen(server: NatsServer, tmp_path: Path) -> None:
    words = ["collect", "--nats-url", url(server, "ear"), "--trace-file", str(tmp_path / "traces")]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvbus", *words), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        said = ""
        assert process.stderr is not None
        while "no engine is heard in namespace default" not in said:
            said += (await asyncio.wait_for(process.stderr.readline(), 20)).decode()
        assert "deaf" not in said
        assert "lost" not in said
    finally:
        process.terminate()
        await process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("words", [("tap",), ("top",), ("pending",), ("drain", "P")], ids=lambda words: words[0])
async def test_a_refused_login_is_said_as_refused(server: NatsServer, words: tuple[str, ...]) -> None:
    began = time.monotonic()
    status, out, err = await kvbus(*words, "--nats-url", url(server, "ear", "wrong"))
    assert (status, out) == (1, "")
    assert "it refused the login: are user and password (or token, or keys) right?" in err.splitlines()[-1]
    assert "no NATS server" not in err
    assert "wrong" not in err
    assert "Traceback" not in err
    assert time.monotonic() - began < HANGS_S


@pytest.mark.slow
async def test_a_wrong_namespace_is_said(server: NatsServer) -> None:
    about = ("--nats-url", url(server, "ear"), "--namespace", "prod")
    async with engine_in(server, "default"):
        top, pending = await asyncio.gather(
            kvbus("top", *about, "--once", "--interval", "0.5"), kvbus("pending", *about, "--for", "0.5", "--json")
        )
    for status, _, err in (top, pending):
        assert status == 1
        assert "no engine is heard in namespace prod at nats://127.0.0.1" in err.splitlines()[-1]
        assert err.splitlines()[-1].endswith("engines are in: default")
    assert json.loads(pending[1])["pending"] == []


@pytest.mark.slow
@pytest.mark.parametrize("own_ca", [True, False], ids=["wants-a-client-certificate", "unknown-authority"])
async def test_tls_that_fails_is_said_within_seconds(tmp_path: Path, own_ca: bool) -> None:
    certificates.make(tmp_path)
    files = {name: tmp_path / name for name in ("ca.pem", "server.pem", "server.key")}
    tls = f'tls {{ cert_file: "{files["server.pem"]}", key_file: "{files["server.key"]}", '
    tls += f'ca_file: "{files["ca.pem"]}", verify: true }}'
    server = NatsServer(tmp_path, configuration=tls)
    environment = {"SSL_CERT_FILE": str(files["ca.pem"])} if own_ca else {}
    try:
        for command in ("top", "tap", "pending"):
            began = time.monotonic()
            status, _, err = await kvbus(command, "--nats-url", f"tls://127.0.0.1:{server.port}", **environment)
            assert status == 1
            assert "TLS failed: " in err.splitlines()[-1]
            assert "certificate" in err.splitlines()[-1]
            assert "Traceback" not in err
            assert time.monotonic() - began < HANGS_S
    finally:
        server.stop()
