"""Fixtures of every layer, and the run's last word: what was skipped, and how to get it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from kvbus.local import NatsServer

# What an example costs depends on what else this machine does.
hypothesis.settings.register_profile("kvbus", deadline=None)
hypothesis.settings.load_profile("kvbus")


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A real nats-server for tests that do not harm it."""
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    yield server
    server.stop()


@pytest.fixture
def own_nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A real nats-server for a test that stops or kills it."""
    server = NatsServer(tmp_path)
    yield server
    server.stop()


def pytest_unconfigure(config: pytest.Config) -> None:
    """One line below pytest's own: a skip's reason says what it wants and how to get it."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter is not None else []
    reasons = Counter(str(each.longrepr[2]).removeprefix("Skipped: ") for each in skipped)
    if reasons:
        told = "; ".join(f"{number} want {reason}" for reason, number in reasons.items())
        reporter.write_line(f"{reasons.total()} tests were skipped: {told}")
