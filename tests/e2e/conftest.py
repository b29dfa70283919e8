"""Real engines, booted once for all tests: a reference without a connector, and a cluster behind the router."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.engines import ARGUMENTS, BLOCK_LEASE_S, TRANSFER_ALL, say

from kvbus.local import Cluster, cache_dir, tiny
from kvbus.local.cluster import Engine, EngineSpec, wait_until


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that hurt the shared cluster run after the last one that only asks it; all others stay where they are."""
    harmful = [item for item in items if item.get_closest_marker("hurts_the_cluster")]
    others = [item for item in items if item not in harmful]
    asking = [index for index, item in enumerate(others) if "cluster" in getattr(item, "fixturenames", ())]
    after = asking[-1] + 1 if asking else len(others)
    items[:] = [*others[:after], *harmful, *others[after:]]


@pytest.fixture(scope="session")
def model() -> Path:
    return tiny(cache_dir() / "tiny-qwen3")


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def booting_reference(model: Path, logs: Path) -> Iterator[Engine]:
    """One engine by itself; it boots beside whatever is done until :func:`reference` is used."""
    engine = Engine(EngineSpec("reference", model, "tiny-qwen3", arguments=ARGUMENTS), logs)
    yield engine
    engine.child.stop()


@pytest.fixture(scope="session")
def reference(booting_reference: Engine) -> str:
    """The URL of one engine by itself."""
    engine = booting_reference
    wait_until(lambda: engine.healthy, [engine.child], "booting the reference", say)
    return engine.url


@pytest.fixture(scope="session")
def cluster(model: Path, logs: Path, booting_reference: Engine) -> Iterator[Cluster]:
    """One prefill and one decode engine behind the router."""
    extra = {"block_lease_s": BLOCK_LEASE_S, **TRANSFER_ALL}
    with Cluster(model, logs, arguments=ARGUMENTS, extra=extra, say=say) as running:
        yield running
