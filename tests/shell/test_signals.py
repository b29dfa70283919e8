"""Who hears of a signal, how often, and the exit status that comes of it (R2, S9)."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.waiting import eventually_sync

from kvbus.local import Child, NatsServer, process, stop_all
from kvbus.signals import SIGNALS, Signals

# Says each SIGTERM, and ends half a second after the first; so does its own child, which hears only what it tells it.
COUNTS = """
import signal, subprocess, sys, time
heard = []
signal.signal(signal.SIGTERM, lambda *_: (heard.append(1), print(sys.argv[1], "heard", flush=True)))
below = subprocess.Popen([sys.executable, __file__, "below"]) if sys.argv[1] == "above" else None
print(sys.argv[1], "runs", flush=True)
while not heard:
    time.sleep(0.01)
if below is not None:
    below.terminate()
    below.wait()
time.sleep(0.5)
"""
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('runs', flush=True); time.sleep(60)"


@pytest.mark.slow
def test_a_child_hears_one_sigterm_and_so_does_what_it_started(tmp_path: Path) -> None:
    program = tmp_path / "counts.py"
    program.write_text(COUNTS)
    children = [Child(name, [sys.executable, str(program), "above"], tmp_path) for name in ("a", "b")]
    eventually_sync(lambda: all("below runs" in child.log.read_text() for child in children), 60)
    stop_all(children)
    stop_all(children)
    for child in children:
        said = child.log.read_text().splitlines()
        assert sorted(said) == ["above heard", "above runs", "below heard", "below runs"]
        assert child.status == 0


def test_who_does_not_end_in_time_is_killed(tmp_path: Path) -> None:
    child = Child("deaf", [sys.executable, "-c", DEAF], tmp_path)
    eventually_sync(lambda: "runs" in child.log.read_text(), 60)
    child.stop(0.3)
    assert child.status == -signal.SIGKILL


def test_told_a_second_time_nobody_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hurried = Signals()
    monkeypatch.setattr(process, "SIGNALS", hurried)
    child = Child("deaf", [sys.executable, "-c", DEAF], tmp_path)
    eventually_sync(lambda: "runs" in child.log.read_text(), 60)
    with hurried.told_to(lambda _: None):
        hurried.hear(signal.SIGINT)
        hurried.hear(signal.SIGINT)
    began = time.monotonic()
    child.stop(60)
    assert time.monotonic() - began < 20


def test_the_first_signal_is_raised_once_where_nobody_listens() -> None:
    signals = Signals()
    with pytest.raises(KeyboardInterrupt):
        signals.hear(signal.SIGTERM)
    signals.hear(signal.SIGTERM)  # what cleans up is not interrupted
    assert (signals.hurry, signals.status) == (True, 143)


async def test_who_listens_late_is_told_of_what_was_heard() -> None:
    signals, told = Signals(), asyncio.Queue[signal.Signals]()
    with signals.told_to(told.put_nowait):
        signals.hear(signal.SIGINT)
    with signals.told_to(told.put_nowait):
        assert [told.get_nowait(), told.get_nowait()] == [signal.SIGINT] * 2
    assert SIGNALS.heard == []


@contextmanager
def command(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", "kvbus", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        env={**os.environ, "COLUMNS": "200"},
    ) as started:
        try:
            yield started
        finally:
            started.kill()


@pytest.mark.parametrize(
    ("name", "number", "status", "last"),
    [
        ("collect", signal.SIGTERM, 0, "stopping"),
        ("collect", signal.SIGINT, 0, "stopping"),
        ("tap", signal.SIGTERM, 143, "stopped"),
        ("tap", signal.SIGINT, 130, "stopped"),
    ],
)
def test_exit_statuses(
    nats_server: NatsServer, tmp_path: Path, name: str, number: signal.Signals, status: int, last: str
) -> None:
    more = ["--trace-file", str(tmp_path / "traces.jsonl")] if name == "collect" else []
    with command(name, "--nats-url", nats_server.url, *more) as started:
        assert started.stderr is not None
        for line in started.stderr:
            if "Ctrl-C ends it" in line:
                break
        started.send_signal(number)
        _, said = started.communicate(timeout=60)
    assert started.returncode == status
    assert said.strip().endswith(last)
    assert "Traceback" not in said


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether that process has a handler of its own for it."""
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(status["SigCgt"], 16) >> (number - 1) & 1)


def test_chaos_that_is_broken_off_says_so() -> None:
    with command("sim", "--bus", "memory", "--transfers", "100000") as started:
        eventually_sync(lambda: catches(started.pid, signal.SIGTERM), 60)
        started.send_signal(signal.SIGTERM)
        _, said = started.communicate(timeout=60)
    assert started.returncode == 143
    assert "Traceback" not in said
