"""The chaos harness itself: it holds in calm and storm, gives the same life for a seed, and finds what is broken."""

from __future__ import annotations

from typing import Any

import pytest

from kvbus.arrivals import Arrivals, Arrived
from kvbus.lease import SinkLease, SourceLease
from kvbus.matcher import Matcher
from kvbus.sim.faults import KINDS, faults_of
from kvbus.sim.life import Life
from kvbus.sim.run import LawBrokenError, run_lives


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", "kvbus")


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_no_law_is_broken(kind: str) -> None:
    account = run_lives(1, 600, kind, lambda _: None)
    assert account.transfers == 600
    ends = ("pushed", "recomputed", "computed locally", "aborted", "lost with its decode engine")
    assert sum(account.counts[end] for end in ends) == 600
    assert account.counts["pushed"] > 300


def test_without_faults_everything_is_pushed() -> None:
    assert run_lives(5, 200, "none", lambda _: None).counts["pushed"] == 200


def test_a_seed_gives_the_same_life() -> None:
    one, two = (Life(11, faults_of("all"), 150).live() for _ in range(2))
    assert one == two


def renew_only(self: Any, heard: Any) -> bool:
    self._sinks.hear(heard)
    return True


def always(_: Any, *__: Any, **___: Any) -> Any:
    return float("inf")


MUTATIONS: dict[str, tuple[Any, str, Any, str]] = {
    "F1: blocks go back without waiting for anybody": (SinkLease, "safe_at", lambda *_: float("-inf"), "kill"),
    "F3: posted without a lease": (SourceLease, "until", always, "partition"),
    "F3: the lease begins when the echo comes": (
        SourceLease,
        "echoed",
        lambda self, sink, incarnation, number: self._until.__setitem__(
            (sink, incarnation), self._sent_at[self._number] + 5
        ),
        "partition",
    ),
    "F2: what an older epoch registered is not forgotten": (Matcher, "_hear", renew_only, "partition"),
    "F5: a late notification is reported again": (
        Arrivals,
        "land",
        lambda self, landed: [Arrived(landed.request_id, ok=True)],
        "all",
    ),
    "F4: a cancel is acknowledged under a WRITE": (
        Matcher,
        "_cancel",
        lambda self, cancel, now, direct: [self._cancel_ack(cancel)],
        "abort",
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_broken_fence_is_found(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, broken, kind = MUTATIONS[mutation]
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(LawBrokenError, match="see it again with: kvbus sim --seed"):
        run_lives(1, 6000, kind, lambda _: None)
