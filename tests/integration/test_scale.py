"""``kvbus scale`` in small: several processes of engines, one router, one nats-server."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from kvbus.sim.scale.plan import Scale
from kvbus.sim.scale.report import rows
from kvbus.sim.scale.run import run_scale


@pytest.mark.slow
async def test_everything_is_pushed_and_every_process_ends(tmp_path: Path) -> None:
    before = psutil.Process().children()
    told: list[str] = []
    plan = Scale(engines=8, rate=20.0, minutes=0.05, processes=2, direct_rate=5.0, warm_s=2.0)
    outcome = await run_scale(plan, tmp_path, told.append)
    assert psutil.Process().children() == before
    assert outcome.load["how"] == {"pushed": sum(outcome.load["how"].values())}, outcome.errors
    assert outcome.load["how"]["pushed"] > 20
    assert outcome.counts["direct"] > 0
    assert outcome.leftovers == 0
    assert outcome.samples
    assert 0 < outcome.load["direct"]["p50"] < outcome.load["ttft"]["p50"]
    assert "the router knows 8 engines" in told
    assert dict(rows(outcome))["requests still remembered by engines"] == "0"
