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

from kvbus.config import Config
from kvbus.errors import ConfigError, LocalClusterError
from kvbus.local import engine
from kvbus.local.cluster import EngineSpec
from kvbus.wire import Role

PROGRAM = """
import sys
from kvbus.config import Config
from kvbus.local import drain, engine
from kvbus.wire import Role

drain.FIND_TIMEOUT_S = float(sys.argv[3])
stand_in = sys.argv[2]
engine.engine_command = lambda spec, host, port: [sys.executable, "-c", stand_in]
plan = engine.EnginePlan(
    Role.PREFILL, sys.argv[1], Config(nats_url="nats://127.0.0.1:9"), "prefill-x", "127.0.0.1", 1, 5.0
)
sys.exit(engine.run_engine(plan, lambda text: print(text, flush=True)))
"""
SLEEPS = "import time; print('engine runs', flush=True); time.sleep(60)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPS}"


@contextmanager
def running(model: Path, stand_in: str, find_timeout_s: float = 1.0) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(model), stand_in, str(find_timeout_s)],
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


def test_what_one_of_its_processes_found_wrong_is_the_last_line(model: Path) -> None:
    """P5"""
    finds = "from kvbus_connector import reason\nreason.arrange()\nwith reason.told(): raise ValueError('the\\n value')"
    with running(model, f"{finds}") as child:
        output = child.communicate(timeout=20)[0]
    assert child.returncode == 1
    assert output.splitlines()[-1].endswith("status 1: kvbus: this engine cannot start: ValueError: the value")


@pytest.mark.parametrize(
    ("model", "role", "settings", "transfer"),
    [
        ("Qwen/Qwen3-0.6B", Role.BOTH, ("registration=jit", "backends=UCX, POSIX"), "kv_both"),
        ("Qwen/Qwen3-0.6B", Role.DECODE, ("transfer_timeout_s=30",), "kv_consumer"),
    ],
)
def test_a_model_of_the_hub_any_role_and_settings_reach_vllm(
    monkeypatch: pytest.MonkeyPatch, model: str, role: Role, settings: tuple[str, ...], transfer: str
) -> None:
    """S9"""
    commands: list[EngineSpec] = []

    def command(spec: EngineSpec, host: str, port: int) -> list[str]:
        commands.append(spec)
        return [sys.executable, "-c", "import os; raise SystemExit(os.environ['HF_HUB_OFFLINE'] == '0' and 7)"]

    monkeypatch.setattr(engine, "engine_command", command)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    config = Config.from_words(settings, nats_url="nats://127.0.0.1:9", namespace="x")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        status = engine.run_engine(engine.EnginePlan(role, model, config, "e", "127.0.0.1", 1, 5.0), lambda _: None)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert status == 7
    [spec] = commands
    assert (str(spec.model), spec.served_name) == (model, model)
    assert spec.transfer is not None
    assert spec.transfer["kv_role"] == transfer
    assert Config.from_mapping(spec.transfer["kv_connector_extra_config"]) == config


def test_no_model_is_said(tmp_path: Path) -> None:
    for model in (str(tmp_path), str(tmp_path / "nowhere"), "nowhere"):
        with pytest.raises(LocalClusterError, match="no model in"):
            engine.run_engine(
                engine.EnginePlan(Role.BOTH, model, Config(nats_url="nats://x"), "e", "", 1, 5.0), lambda _: None
            )


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("nats_url=nats://y", "--set='nats_url=nats://y'; allowed: key=value"),
        ("registration", "--set='registration'"),
        ("registration=later", "registration='later'; allowed: eager, jit, after_prefill, auto"),
        ("transfer_timeout_s=soon", "transfer_timeout_s='soon'; allowed: a number"),
        ("transfer_timeout_s=nan", "transfer_timeout_s=nan; allowed: 0.01 to 86400 seconds"),
        ("bakends=UCX", "bakends='UCX'; allowed: the keys"),
        ("backends=", "backends="),
    ],
)
def test_a_bad_setting_is_refused(word: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_words([word], nats_url="nats://x", namespace="default")
    assert message in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_is_stopped_also_when_it_cannot_be_drained(model: Path, number: signal.Signals) -> None:
    with running(model, SLEEPS) as child:
        until(child, "engine runs")
        child.send_signal(number)
        output = child.communicate(timeout=30)[0]
    assert child.returncode == 0
    assert "not drained: kvbus: no NATS server answers; is --nats-url right?" in output


def test_told_twice_it_does_not_wait(model: Path) -> None:
    with running(model, SLEEPS, find_timeout_s=60.0) as child:
        until(child, "engine runs")
        child.send_signal(signal.SIGTERM)
        until(child, "draining prefill-x")
        started = time.monotonic()
        child.send_signal(signal.SIGTERM)
        output = child.communicate(timeout=30)[0]
    assert child.returncode == 0
    assert "told twice" in output
    assert time.monotonic() - started < 25


@pytest.mark.slow
def test_an_engine_that_does_not_end_is_killed(model: Path) -> None:
    with running(model, DEAF) as child:
        until(child, "engine runs")
        child.send_signal(signal.SIGTERM)
        until(child, "draining prefill-x")
        child.send_signal(signal.SIGTERM)
        output = child.communicate(timeout=40)[0]
    assert child.returncode == 0
    assert "killing it" in output
