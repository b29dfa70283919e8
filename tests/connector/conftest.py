"""Two halves of the connector for each fake engine, on one bus and one fabric in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from kvbus_connector import history
from support.fake_engine import Boot, FakeEngine
from support.waiting import eventually_sync

from kvbus.bus import MemoryBroker
from kvbus.engine.memory_transport import Fabric
from kvbus.wire import Role


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
def fabric() -> Fabric:
    return Fabric()


@pytest.fixture
def boot(broker: MemoryBroker, fabric: Fabric) -> Iterator[Boot]:
    """Starts the prefill engines ``P`` and ``Q`` and the decode engines ``D`` and ``E``."""
    running: list[FakeEngine] = []

    def start(name: str, **changes: Any) -> FakeEngine:
        role = {"P": Role.PREFILL, "Q": Role.PREFILL, "D": Role.DECODE, "E": Role.DECODE}[name]
        running.append(FakeEngine(broker, fabric, name, role, **changes))
        return running[-1]

    yield start
    for engine in running:
        engine.close()


@pytest.fixture
def pair(boot: Boot) -> tuple[FakeEngine, FakeEngine]:
    """A prefill and a decode engine that know each other."""
    prefill, decode = boot("P"), boot("D")
    eventually_sync(lambda: decode.knows(prefill) and prefill.knows(decode))
    return prefill, decode


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill waits longer for an offer of history than it ever should, so that no test depends on this machine."""
    monkeypatch.setattr(history, "MAX_WAIT_S", 2.0)
