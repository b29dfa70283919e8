"""``kvbus engine`` around a stand-in for vLLM: signals, exit statuses, what is said. The real one: tests/e2e."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PROGRAM = """
import sys
from pathlib import Path
from kvbus.config import Config
from kvbus.local import engine
from kvbus.messages import Role

stand_in = sys.argv[2]
engine.engine_command = lambda spec, host, port: [sys.executable, "-c", stand_in]
plan = engine.EnginePlan(
    Role.PREFILL, Path(sys.argv[1]), Config(nats_url="nats://127.0.0.1:9"), "prefill-x", "127.0.0.1", 1, 5.0
)
sys.exit(engine.run_engine(plan, lambda text: print(text, flush=True)))
"""
SLEEPS = "import time; print('engine runs', flush=True); time.sleep(60)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPS}"


@contextmanager
def running(model: Path, stand_in: str) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(model), stand_in],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def until(child: subprocess.Popen[str], text: str) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        if text in line:
            return
    raise AssertionError(f"it never said {text!r}")


@pytest.mark.parametrize(("code", "status"), [(0, 1), (3, 3)])
def test_an_engine_that_ends_by_itself_is_a_failure(model: Path, code: int, status: int) -> None:
    with running(model, f"raise SystemExit({code})") as child:
        output = child.communicate(timeout=20)[0]
    assert child.returncode == status
    assert f"engine prefill-x has ended by itself, status {code}" in output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_is_stopped_also_when_it_cannot_be_drained(model: Path, number: signal.Signals) -> None:
    with running(model, SLEEPS) as child:
        until(child, "engine runs")
        child.send_signal(number)
        output = child.communicate(timeout=30)[0]
    assert child.returncode == 0
    assert "not drained: kvbus: no NATS server answers; is --nats-url right?" in output


def test_told_twice_it_does_not_wait(model: Path) -> None:
    with running(model, SLEEPS) as child:
        until(child, "engine runs")
        child.send_signal(signal.SIGTERM)
        until(child, "draining prefill-x")
        started = time.monotonic()
        child.send_signal(signal.SIGTERM)
        output = child.communicate(timeout=30)[0]
    assert child.returncode == 0
    assert "told twice" in output
    assert time.monotonic() - started < 4


def test_an_engine_that_does_not_end_is_killed(model: Path) -> None:
    with running(model, DEAF) as child:
        until(child, "engine runs")
        child.send_signal(signal.SIGTERM)
        until(child, "draining prefill-x")
        child.send_signal(signal.SIGTERM)
        output = child.communicate(timeout=40)[0]
    assert child.returncode == 0
    assert "killing it" in output
