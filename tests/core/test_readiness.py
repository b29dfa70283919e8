"""Whether the router is ready, and what it lacks (R3)."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from kvbus.router.fleet import readiness_of
from kvbus.router.fleet.readiness import ALONE
from kvbus.wire import Heartbeat, Role, State

P = Heartbeat("P", 1, 1, Role.PREFILL, State.READY, 1, "m", address="p:1", compat=(("dtype", "a"),))
D = replace(P, engine="D", role=Role.DECODE, address="d:1")
BOTH = replace(P, engine="B", role=Role.BOTH)
STARTING = replace(P, state=State.STARTING)
DRAINING = replace(D, state=State.DRAINING)
OTHER = replace(P, compat=(("dtype", "b"),))
OF_N = replace(D, engine="E", model="n")


@pytest.mark.parametrize(
    ("engines", "status", "pair", "lacking"),
    [
        ([P, D], "ok", True, []),
        ([BOTH, replace(BOTH, engine="C")], "ok", True, []),
        ([BOTH], "degraded", False, [f"m: no prefill engine fits a decode engine: {ALONE}"]),
        ([D], "degraded", False, [f"m: no prefill engine is ready: {ALONE}"]),
        ([STARTING, D], "degraded", False, [f"m: no prefill engine is ready: {ALONE}"]),
        ([OTHER, D], "degraded", False, [f"m: no prefill engine fits a decode engine: {ALONE}"]),
        ([P, D, OF_N], "degraded", True, [f"n: no prefill engine is ready: {ALONE}"]),
        (
            [P, DRAINING, OF_N],
            "degraded",
            False,
            ["m: no decode engine is ready", f"n: no prefill engine is ready: {ALONE}"],
        ),
        ([P], "not ready", False, ["m: no decode engine is ready"]),
        ([P, DRAINING], "not ready", False, ["m: no decode engine is ready"]),
        ([], "not ready", False, ["no engine is known"]),
    ],
)
def test_by_engines(engines: list[Heartbeat], status: str, pair: bool, lacking: list[str]) -> None:
    now = readiness_of(engines)
    assert (now.status, now.has_pair, list(now.lacking)) == (status, pair, lacking)
    assert now.ready is (status in ("ok", "degraded"))


def test_told_to_stop_it_is_not_ready() -> None:
    now = readiness_of([P, D], draining=True)
    assert (now.ready, now.status, now.lacking) == (False, "draining", ("the router was told to stop",))


def test_without_the_bus_it_goes_on_with_who_was_there() -> None:
    now = readiness_of([P, D], bus_away_s=12.3)
    assert (now.ready, now.status) == (True, "degraded")
    assert now.as_json()["bus_away_s"] == 12.3
    assert not readiness_of([], bus_away_s=12.3).ready


def test_thousands_of_engines_that_do_not_fit_cost_little() -> None:
    many = [replace(each, engine=f"{each.engine}{number}") for number in range(1000) for each in (OTHER, D)]
    began = time.perf_counter()
    assert not readiness_of(many).has_pair
    assert time.perf_counter() - began < 1, "each with each it would be a million comparisons"
