"""Real engines, booted once for all tests: a reference without a connector, and a cluster behind the router."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support.engines import ARGUMENTS, EXACT, say

from kvbus.local import Cluster, cache_dir, tiny
from kvbus.local.cluster import Engine, EngineSpec, wait_until


@pytest.fixture(scope="session")
def model() -> Path:
    return tiny(cache_dir() / "tiny-qwen3")


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


def _alone(name: str, model: Path, logs: Path, arguments: Sequence[str]) -> Iterator[str]:
    engine = Engine(EngineSpec(name, model, "tiny-qwen3", arguments=arguments), logs)
    try:
        wait_until(lambda: engine.healthy, [engine.child], "booting the reference", say)
        yield engine.url
    finally:
        engine.child.stop()


@pytest.fixture(scope="session")
def reference(model: Path, logs: Path) -> Iterator[str]:
    """The URL of one engine by itself."""
    yield from _alone("reference", model, logs, ARGUMENTS)


@pytest.fixture(scope="session")
def exact_reference(model: Path, logs: Path) -> Iterator[str]:
    """Likewise, in float32."""
    yield from _alone("exact-reference", model, logs, EXACT)


@pytest.fixture(scope="session")
def cluster(model: Path, logs: Path) -> Iterator[Cluster]:
    """One prefill and one decode engine behind the router."""
    with Cluster(model, logs, arguments=ARGUMENTS, say=say) as running:
        yield running
