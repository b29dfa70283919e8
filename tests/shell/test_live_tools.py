"""The tools over a bus: what they hear, what they print, how they end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import pytest
from rich.console import Console
from support.waiting import eventually

from kvbus.bus import MemoryBroker, MemoryBus, NatsBus
from kvbus.errors import BusUnavailableError
from kvbus.local import NatsServer
from kvbus.sim.faults import NO_FAULTS
from kvbus.sim.realtime import run_real_time
from kvbus.tools import watch
from kvbus.tools.lines import Decoded, Selection, Undecodable
from kvbus.tools.listen import MAX_HEARD, Listener, listening
from kvbus.tools.pending import PendingTable, Stage
from kvbus.tools.tables import TopView
from kvbus.tools.traffic import MIB, Snapshot, Traffic
from kvbus.wire import (
    Heartbeat,
    Message,
    PrefillCompleted,
    Registration,
    Role,
    State,
    Subjects,
    TransferDone,
    Who,
    decode,
    encode,
)

SUBJECTS = Subjects("default")
BEAT = Heartbeat("P", 5, 1, Role.PREFILL, State.READY, 1, "m", free_blocks=300, total_blocks=400)
REGISTRATION = Registration("t", 1, "D", 7, "d1", (((10, 3),),), 96)
COMPLETED = PrefillCompleted("u", "P", 5, "p1", (((0, 4),),), 96)
DONE = TransferDone("w", "P", 5, 1, 0, 1, "d1", 3, 64 * MIB, "decode", 0.2, 0.001, 0.01)
SPOKEN: list[tuple[str, Message]] = [
    (SUBJECTS.heartbeats("prefill", "P"), BEAT),
    (SUBJECTS.registrations("P", "D"), REGISTRATION),
    (SUBJECTS.prefill("P"), COMPLETED),
    (SUBJECTS.transfers("D", "P"), DONE),
]


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


def speak(broker: MemoryBroker) -> None:
    for subject, message in SPOKEN:
        broker.route(subject, encode(message))


def heard_by(broker: MemoryBroker) -> bool:
    """Whether anybody listens."""
    return broker.route(SUBJECTS.everything.replace(">", "done.nobody.x"), b"junk") > 0


class TestListening:
    async def test_nobody_there_is_said_within_the_time(self, broker: MemoryBroker) -> None:
        with broker.down(), pytest.raises(BusUnavailableError, match="no NATS server answers at nats://x:1"):
            async with listening(MemoryBus(broker), SUBJECTS, ["x"], where="nats://x:1", timeout_s=0.05):
                pass

    async def test_it_says_nothing_unless_it_shall_ask(self, broker: MemoryBroker) -> None:
        async with listening(MemoryBus(broker), SUBJECTS, ["x.*"], where="") as listener:
            broker.route("x.1", b"1")
            assert [(heard.subject, heard.payload) for heard in await listener.take(5)] == [("x.1", b"1")]
            assert await listener.take(0.01) == []
        assert [subject for subject, _ in broker.log] == ["x.1"]
        async with listening(MemoryBus(broker), SUBJECTS, ["x.*"], where="", asks="kvbus-top"):
            pass
        assert [decode(payload) for _, payload in list(broker.log)[1:]] == [Who("kvbus-top")]

    async def test_what_nobody_takes_is_missed_not_kept(self, broker: MemoryBroker) -> None:
        listener = Listener(MemoryBus(broker))
        for _ in range(MAX_HEARD + 3):
            listener.hear("x", b"")
        assert listener.missed == 3
        assert len(await listener.take(0)) == MAX_HEARD


class TestLoops:
    async def test_tap_shows_what_is_selected_and_ends_at_the_limit(self, broker: MemoryBroker) -> None:
        shown: list[tuple[str, Decoded]] = []
        told: list[str] = []
        tap = asyncio.create_task(
            watch.tap(
                MemoryBus(broker),
                SUBJECTS,
                Selection(),
                where="nats://x",
                limit=4,
                show=lambda _, subject, said: shown.append((subject, said)),
                say=told.append,
            )
        )
        await eventually(lambda: told)
        speak(broker)
        broker.route("kvbus.v1.other.reg", encode(REGISTRATION))
        broker.route("kvbus.v1.default.new.thing", b"\x01")
        await asyncio.wait_for(tap, 5)
        assert [said for _, said in shown[:3]] == [REGISTRATION, COMPLETED, DONE]
        assert shown[3] == ("kvbus.v1.default.new.thing", Undecodable("not a map but int", 1))
        assert [subject for subject, _ in shown[:2]] == [SUBJECTS.registrations("P", "D"), SUBJECTS.prefill("P")]

    async def test_tap_says_what_came_too_fast(self, broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvbus.tools.listen.MAX_HEARD", 2)
        told: list[str] = []
        tap = watch.tap(
            MemoryBus(broker), SUBJECTS, Selection(), where="", limit=None, show=lambda *_: None, say=told.append
        )
        task = asyncio.create_task(tap)
        await eventually(lambda: told)
        speak(broker)
        await eventually(lambda: "2 messages came too fast to be shown" in told)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def test_top_draws_again_and_again_and_says_when_the_bus_is_away(self, broker: MemoryBroker) -> None:
        seen: list[tuple[Snapshot, bool]] = []
        top = watch.top(
            MemoryBus(broker),
            SUBJECTS,
            where="",
            interval_s=0.02,
            once=False,
            show=lambda got, connected, _: seen.append((got, connected)),
        )
        task = asyncio.create_task(top)
        await eventually(lambda: heard_by(broker))
        speak(broker)
        await eventually(lambda: seen and seen[-1][0].engines and seen[-1][0].transfers)
        with broker.down():
            await eventually(lambda: not seen[-1][1])
        await eventually(lambda: seen[-1][1])
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        got = seen[-1][0]
        assert (got.engines[0].engine, got.transfers, got.written_bytes) == ("P", 1, 64 * MIB)
        assert got.undecodable >= 1
        asked = [decode(payload) for subject, payload in broker.log if subject == SUBJECTS.who("kvbus-top")]
        assert asked == [Who("kvbus-top")] * 2  # at the start, and when the bus was back

    async def test_pending_lists_what_has_not_ended(self, broker: MemoryBroker) -> None:
        passed: list[float] = []
        task = asyncio.create_task(
            watch.pending(MemoryBus(broker), SUBJECTS, where="", listen_s=0.5, progress=passed.append)
        )
        await eventually(lambda: passed)
        speak(broker)
        rows, unkept, nobody = await asyncio.wait_for(task, 5)
        assert {row.transfer_id: row.stage for row in rows} == {
            "t": Stage.NO_COMPLETION,
            "u": Stage.NO_REGISTRATION,
            "w": Stage.NOT_DELIVERED,
        }
        assert (unkept, nobody) == (0, "")
        assert [subject for subject, _ in broker.log if "who" in subject] == []

    async def test_tap_says_once_that_nobody_speaks(
        self, broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """S5: as in a wrong namespace."""
        monkeypatch.setattr("kvbus.tools.watch.QUIET_S", 0.01)
        monkeypatch.setattr("kvbus.bus.wrong_namespace.LISTEN_S", 0.05)
        told: list[str] = []
        tap = watch.tap(
            MemoryBus(broker), SUBJECTS, Selection(), where="x", limit=1, show=lambda *_: None, say=told.append
        )
        task = asyncio.create_task(tap)
        await eventually(lambda: len(told) == 2)
        assert told[1] == "kvbus: no engine is heard in namespace default at x; nor in any other"
        speak(broker)
        await asyncio.wait_for(task, 5)
        assert len(told) == 2

    @pytest.mark.slow
    def test_of_real_shells_transfers_nothing_stays_pending(self, monkeypatch: pytest.MonkeyPatch) -> None:
        table, traffic, began = PendingTable(), Traffic(time.monotonic()), time.monotonic()
        most = 0
        route = MemoryBroker.route

        def spied(self: MemoryBroker, subject: str, payload: bytes, reply: str = "") -> int:
            nonlocal most
            if subject.startswith("kvbus."):
                message = decode(payload.partition(b"\0")[2])
                for each in (table, traffic):
                    each.hear(message, time.monotonic())
                most = max(most, len(table.pending(time.monotonic())))
            return route(self, subject, payload, reply)

        monkeypatch.setattr(MemoryBroker, "route", spied)
        counts = run_real_time(4, NO_FAULTS, "memory", 30).counts
        assert counts["pushed"] == 30
        got = traffic.snapshot(time.monotonic())
        assert table.pending(time.monotonic()) == ()
        assert most > 1
        written = 30 + counts["history: received"]
        assert written <= got.transfers <= written + counts["history: failed"]
        assert got.failures <= counts["history: failed"], "to have no history is no failure"
        assert sum(row.count for row in got.waits[:2]) >= 30
        assert 0 < got.listened_s <= time.monotonic() - began


class TestTopView:
    LONG = "prefill-" + "x" * 56

    def drawn(self, width: int, lines: int | None = None) -> str:
        traffic = Traffic(0.0)
        for number in range(12):
            role = Role.PREFILL if number % 2 else Role.DECODE
            beat = replace(BEAT, engine=f"{self.LONG[:-2]}{number:02}", role=role, model="m" * 80)
            traffic.hear(replace(beat, requests=10**9, queued_tokens=10**12, free_blocks=1), 0.0)
        traffic.hear(replace(DONE, source_engine=f"{self.LONG[:-2]}01", nbytes=10**12, match_wait_s=3600.0), 0.0)
        console = Console(width=width, highlight=False, force_terminal=False, legacy_windows=False)
        with console.capture() as capture:
            console.print(TopView(traffic.snapshot(3.0), "default", "nats://127.0.0.1:4222", True, lines))
        return capture.get()

    @pytest.mark.parametrize("width", [20, 60, 80, 100, 140, 200])
    def test_no_line_is_wider_than_the_terminal(self, width: int) -> None:
        assert max(len(text.rstrip()) for text in self.drawn(width).splitlines()) <= width

    def test_80_columns_lose_the_model_and_keep_both_ends_of_the_names(self) -> None:
        text = self.drawn(80)
        assert len([row for row in text.splitlines() if row.startswith("prefill-x…")]) == 12
        assert all(f"xxx{number:02} " in text for number in range(12))
        assert "mmm" not in text
        table = text[text.index("engine ") :]
        assert table.count("…") == 12  # nothing else is cut off
        assert "█████ 1/400" in table

    def test_200_columns_show_all(self) -> None:
        text = self.drawn(200)
        assert f"{self.LONG[:-2]}11 prefill ready" in text
        assert "mmm" in text
        assert "████████ 1/400" in text
        assert "1 transfers, 953,674 MiB, 0 failed" in text

    def test_engines_that_do_not_fit_are_counted(self) -> None:
        text = self.drawn(200, lines=20)
        assert len(text.splitlines()) <= 20
        shown = text.count("prefill-xxx")
        assert 5 < shown < 12
        assert text.splitlines()[-1].strip() == f"and {12 - shown} more engines"

    def test_no_engine_at_all(self) -> None:
        console = Console(width=80)
        with console.capture() as capture:
            console.print(TopView(Traffic(0.0).snapshot(1.0), "default", "nats://x", False))
        assert "no engine is on the bus" in capture.get()
        assert "the NATS server is away" in capture.get()


class TestCommands:
    """The commands in processes of their own, over a real nats-server."""

    @contextmanager
    def command(
        self, *arguments: str, stdout: IO[str] | int = subprocess.PIPE, **environment: str
    ) -> Iterator[subprocess.Popen[str]]:
        environment = {**os.environ, "COLUMNS": "200", "PYTHONUNBUFFERED": "1", **environment}
        command = [sys.executable, "-m", "kvbus", *arguments]
        with subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment) as process:
            try:
                yield process
            finally:
                process.kill()

    async def spoken_to(self, server: NatsServer, process: subprocess.Popen[str], namespace: str) -> tuple[str, str]:
        """Say everything again and again until the command ends; its output."""
        ended = asyncio.create_task(asyncio.to_thread(process.communicate, timeout=30))

        def say_all() -> bool:
            for subject, message in SPOKEN:
                bus.publish(subject.replace(".default.", f".{namespace}."), encode(message))
            return ended.done()

        async with NatsBus([server.url], "test") as bus:
            await eventually(lambda: bus.connected)
            await eventually(say_all, 30.0)
        return await ended

    @pytest.mark.slow
    async def test_tap(self, nats_server: NatsServer) -> None:
        about = ("--nats-url", nats_server.url, "--namespace", "tap")
        with self.command("tap", *about, "--limit", "2", "--transfer", "t") as process:
            out, err = await self.spoken_to(nats_server, process, "tap")
            assert process.returncode == 0, err
        assert [text.split()[1:5] for text in out.splitlines()] == [
            ["reg.P.D", "reg", "transfer_id=t", "attempt=1"]
        ] * 2
        assert "blocks=3 blocks" in out
        assert f"listening to namespace tap at {nats_server.url}" in err
        with self.command("tap", *about, "--json", "--limit", "1", "--kind", "done") as process:
            out, err = await self.spoken_to(nats_server, process, "tap")
        assert json.loads(out)["nbytes"] == 64 * MIB

    async def test_tap_ends_with_130_at_ctrl_c(self, nats_server: NatsServer) -> None:
        with self.command("tap", "--nats-url", nats_server.url) as process:
            assert process.stderr is not None
            said = await asyncio.to_thread(process.stderr.readline)
            assert "listening" in said
            process.send_signal(signal.SIGINT)
            _, err = await asyncio.to_thread(process.communicate, timeout=10)
            assert process.returncode == 130
            assert "stopped" in err
            assert "Traceback" not in err

    @pytest.mark.slow
    @pytest.mark.parametrize("words", [("tap", "--all"), ("top", "--json"), ("pending", "--for", "1")])
    async def test_a_full_disk_is_one_line(self, nats_server: NatsServer, words: tuple[str, ...]) -> None:
        """S9"""
        about = ("--nats-url", nats_server.url, "--namespace", "full")
        with Path("/dev/full").open("w") as full, self.command(*words, *about, stdout=full) as process:
            _, err = await self.spoken_to(nats_server, process, "full")
        assert process.returncode == 1
        assert err.splitlines()[-1] == "kvbus: standard output: No space left on device"
        assert "Traceback" not in err

    async def test_a_closed_pipe_ends_it_quietly(self, nats_server: NatsServer) -> None:
        """S9: as in ``kvbus tap | head -n 1``."""
        about = ("--nats-url", nats_server.url, "--namespace", "head")
        reads, writes = os.pipe()
        with os.fdopen(writes, "w") as output, self.command("tap", *about, stdout=output) as process:
            os.close(reads)
            _, err = await self.spoken_to(nats_server, process, "head")
        assert process.returncode == 128 + signal.SIGPIPE
        assert len(err.splitlines()) == 1, err

    @pytest.mark.slow
    async def test_top(self, nats_server: NatsServer) -> None:
        about = ("--nats-url", nats_server.url, "--namespace", "top")
        with self.command("top", *about, "--json", "--interval", "1") as process:
            out, err = await self.spoken_to(nats_server, process, "top")
            assert process.returncode == 0, err
        got: dict[str, Any] = json.loads(out)
        assert [row["engine"] for row in got["engines"]] == ["P"]
        assert (got["namespace"], got["transfers"], got["written_bytes"]) == ("top", 1, 64 * MIB)
        with self.command(
            "top", *about, "--once", "--interval", "1", COLUMNS="80", PYTHONIOENCODING="ascii"
        ) as process:
            out, err = await self.spoken_to(nats_server, process, "top")
            assert process.returncode == 0, err
        assert "1 engines (1 prefill)" in out
        assert "300/400" in out
        assert max(len(text) for text in out.splitlines()) <= 80

    @pytest.mark.slow
    async def test_pending(self, nats_server: NatsServer) -> None:
        about = ("--nats-url", nats_server.url, "--namespace", "pending", "--for", "1")
        with self.command("pending", *about) as process:
            out, err = await self.spoken_to(nats_server, process, "pending")
            assert process.returncode == 0, err
        for words in ("no completion", "no registration", "not delivered", "? → D", "P → ?"):
            assert words in out
        assert "listening for 1 s" in err
        with self.command("pending", *about, "--json") as process:
            out, err = await asyncio.to_thread(process.communicate, timeout=30)
        assert json.loads(out) == {"listened_s": 1.0, "pending": [], "unkept": 0}
        with self.command("pending", *about) as process:
            out, err = await asyncio.to_thread(process.communicate, timeout=30)
        assert (process.returncode, out) == (1, "nothing is pending\n")
        assert "no engine is heard in namespace pending" in err.splitlines()[-1]

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["tap", "--nats-url", "foo"], "nats_url='foo'; allowed: a URL such as nats://host:4222"),
            (["tap", "--nats-url", "nats://x", "--kind", "reg,regs"], "--kind='regs'; allowed: ack, bye,"),
            (["top", "--nats-url", "nats://x", "--namespace", "a.b"], "namespace='a.b'; allowed:"),
            (["pending", "--nats-url", "nats://u:p@127.0.0.1:1"], "no NATS server answers at nats://127.0.0.1:1"),
        ],
    )
    def test_what_is_wrong_is_said(self, arguments: list[str], message: str) -> None:
        began = time.monotonic()
        with self.command(*arguments) as process:
            out, err = process.communicate(timeout=30)
        assert (process.returncode, out) == (1, "")
        assert message in err
        assert "Traceback" not in err
        assert time.monotonic() - began < 10
