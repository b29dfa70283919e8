"""``kvbus engine``: one vLLM engine in the foreground, drained before it is stopped.

The one rule: a first SIGTERM or Ctrl-C lets the engine finish what it has; a second one does not.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbus.bus import NatsBus
from kvbus.config import Config
from kvbus.errors import KVBusError
from kvbus.last_words import ASKED, new_file, read_once
from kvbus.local.cluster import EngineSpec, engine_command, engine_environment
from kvbus.local.drain import drain
from kvbus.local.model import check_model_dir
from kvbus.wire import Role, Subjects

STOP_TIMEOUT_S = 15.0
POLL_S = 0.2
_ROLES = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer", Role.BOTH: "kv_both"}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """What to run. ``engine_id`` must be new in the namespace; ``arguments`` go to vLLM.

    ``model``: a folder, or the id of one on the Hugging Face hub, such as ``Qwen/Qwen3-0.6B``.
    """

    role: Role
    model: str
    config: Config
    engine_id: str
    host: str
    port: int
    drain_s: float
    arguments: Sequence[str] = ()


def default_engine_id(role: Role) -> str:
    """The role and this host's name, which in a container is the container's id."""
    return f"{role.value}-{re.sub(r'[^A-Za-z0-9_-]', '-', socket.gethostname())[:100]}"


def run_engine(plan: EnginePlan, say: Callable[[str], None]) -> int:
    """Run until the engine ends, or is told to stop; returns an exit status.

    Raises:
        LocalClusterError: there is no model.
    """
    model, served_name = _model_of(plan.model)
    spec = EngineSpec(
        plan.engine_id,
        model,
        served_name,
        {
            "kv_connector": "KVBusConnector",
            "kv_role": _ROLES[plan.role],
            "engine_id": plan.engine_id,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": plan.config.as_mapping(),
        },
        plan.arguments,
        {} if model.exists() else {"HF_HUB_OFFLINE": "0"},
    )
    stops = _StopSignals()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stops)
    say(f"engine {plan.engine_id}: {plan.role.value}, model {plan.model}, NATS {plan.config.nats_url}")
    reason_file = new_file()
    child = subprocess.Popen(
        engine_command(spec, plan.host, plan.port),
        env={**engine_environment(spec), **os.environ, ASKED: reason_file},
        process_group=0,
    )
    while child.poll() is None:
        if stops.count:
            _drain(plan, stops, say)
            _stop(child, say)
            return 0
        time.sleep(POLL_S)
    reason = read_once(reason_file) or "its output above says why"
    say(f"engine {plan.engine_id} has ended by itself, status {child.returncode}: {reason}")
    return child.returncode if child.returncode > 0 else 1


def _model_of(text: str) -> tuple[Path, str]:
    """The model for vLLM, and the name that it is served under.

    Raises:
        LocalClusterError: neither a model's folder nor an id of the hub.
    """
    folder = Path(text)
    if not folder.exists() and _HUB_ID.fullmatch(text):
        return folder, text
    return check_model_dir(folder), folder.name


class _StopSignals:
    """Counts the signals to stop. It takes no lock: the code that the signal interrupts could hold it."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *_: object) -> None:
        self.count += 1


def _drain(plan: EnginePlan, stops: _StopSignals, say: Callable[[str], None]) -> None:
    """Return when the engine is empty, does not answer, or is out of time; at once at a second signal."""

    async def until_empty() -> None:
        bus = NatsBus(plan.config.servers, "kvbus-drain")
        draining = asyncio.create_task(
            drain(bus, Subjects(plan.config.namespace), plan.engine_id, plan.drain_s, say, force=True)
        )
        while not draining.done():
            if stops.count > 1:
                say("told twice: stopping at once")
                draining.cancel()
            await asyncio.wait({draining}, timeout=POLL_S)
        if not draining.cancelled():
            draining.result()

    say(f"draining {plan.engine_id}, at most {plan.drain_s:g} s; once more to stop at once")
    try:
        asyncio.run(until_empty())
    except KVBusError as error:
        say(f"not drained: {error}")


def _stop(child: subprocess.Popen[Any], say: Callable[[str], None]) -> None:
    child.terminate()
    try:
        child.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        say(f"the engine did not end within {STOP_TIMEOUT_S:g} s; killing it")
    finally:
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        child.wait()
