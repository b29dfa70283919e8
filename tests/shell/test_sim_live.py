"""The simulator in real time, over the bus in memory: real shells hold, and a broken one is found."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from kvbus.bus import Keys
from kvbus.engine import Item, Overheard, Rank, SinkScheduler
from kvbus.errors import ConfigError
from kvbus.protocol import SinkLease
from kvbus.sim.faults import ALL_FAULTS, FAULT_KINDS, NO_FAULTS
from kvbus.sim.realtime import run_real_time
from kvbus.sim.run import InvariantBrokenError, run_many
from kvbus.wire import PrefillCompleted

ENDS = ("pushed", "recomputed", "computed locally", "aborted", "lost with its decode engine")
MANY_FAULTS = replace(
    ALL_FAULTS, partition_every_s=10.0, kill_every_s=10.0, outage_every_s=12.0, freeze_every_s=12.0, stall_every_s=8.0
)


@pytest.mark.slow
def test_without_faults_everything_is_pushed() -> None:
    told: list[int] = []
    assert run_real_time(4, NO_FAULTS, "memory", 30, told.append).counts["pushed"] == 30
    assert told[-1] == 30


@pytest.mark.slow
def test_no_invariant_is_broken_by_many_faults() -> None:
    threads = threading.active_count()
    account = run_real_time(20, MANY_FAULTS, "memory", 60)  # a seed whose schedule has something of everything
    counts = account.counts
    assert sum(counts[end] for end in ENDS) == account.transfers == 60
    assert counts["pushed"] > 12
    happened = ("kills", "restarts", "partitions", "outages", "freezes", "stalls")
    happened += ("messages dropped", "messages doubled", "messages late", "messages held up")
    assert all(counts[each] for each in happened), counts
    assert threading.active_count() == threads


@pytest.mark.slow
def test_blocks_that_go_back_without_waiting_for_anybody_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """F1: nearly every such run shows it in seconds."""
    faults = replace(NO_FAULTS, abort=0.6, partition_every_s=3.0, mean_write_s=1.9)
    monkeypatch.setitem(FAULT_KINDS, "abort", faults)
    monkeypatch.setattr(SinkLease, "safe_at", lambda *_: float("-inf"))
    hint = r"landed in block .* try more than once: kvbus sim --bus memory --seed"
    with pytest.raises(InvariantBrokenError, match=hint):
        run_many(14, 1400, "abort", lambda _: None, "memory")


def test_a_shell_that_raises_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SinkScheduler, "_hear_heartbeat", lambda self, heartbeat: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_real_time(1, NO_FAULTS, "memory", 10)


@pytest.mark.slow
def test_no_invariant_is_broken_by_a_forger() -> None:
    """P3: one that hears everything, has no key, and says ten times as much as the engines."""
    counts = run_real_time(1, FAULT_KINDS["forge"], "memory", 60).counts
    assert counts["messages forged"] > 500
    assert counts["pushed"] > 20


class TestAForgerFinds:
    """Within the first of some runs, as a rule within a second."""

    def violation(self) -> str:
        with pytest.raises(InvariantBrokenError) as caught:
            run_many(1, 1000, "forge", lambda _: None, "memory")
        return str(caught.value)

    def test_engines_that_believe_everything(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Keys, "believes", lambda *_: True)
        assert "kvbus sim --bus memory --seed" in self.violation()

    def test_an_engine_that_believes_a_completion_on_the_bus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        handle = Rank.handle

        def believe(rank: Rank, item: Item, came_at: float | None = None) -> None:
            handle(rank, item.word if isinstance(item, Overheard) else item, came_at)

        monkeypatch.setattr(PrefillCompleted, "SEALED", False)
        monkeypatch.setattr(Rank, "handle", believe)
        assert "which it does not hold: vLLM dies of it" in self.violation()


def test_a_forger_needs_a_bus_with_keys() -> None:
    with pytest.raises(ConfigError, match=r"--faults='forge'; allowed: with --bus memory or --bus nats"):
        run_many(1, 10, "forge", lambda _: None)


def test_an_unknown_bus_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--bus='carrier'; allowed: virtual, memory, nats"):
        run_many(1, 10, "none", lambda _: None, "carrier")
