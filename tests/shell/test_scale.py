"""The simulated data plane between processes, and the parts of ``kvbus scale`` that need no process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvbus.errors import ConfigError, PeerRefusedError, TransferRefusedError
from kvbus.protocol.prefill import WriteJob
from kvbus.sim.fabric import BlockPool, owner_of_attempt
from kvbus.sim.faults import NO_FAULTS, Violation
from kvbus.sim.realtime_runtime import RealTimeRuntime
from kvbus.sim.scale.engines import deal_engines
from kvbus.sim.scale.plan import Scale
from kvbus.sim.scale.report import quantiles_ms
from kvbus.sim.socket_fabric import SocketFabric
from kvbus.sim.timing import REAL_TIME

JOB = WriteJob("t", 1, "p-t", (((0, 2),),), "D", 7, "d-t", (((0, 2),),), "")


class Pair:
    """A prefill and a decode engine of two processes, here in one."""

    def __init__(self, folder: Path) -> None:
        self.runtime = RealTimeRuntime(1, replace(NO_FAULTS, mean_write_s=0.001))
        self.source = SocketFabric(self.runtime, REAL_TIME, folder / "source.sock")
        self.sink = SocketFabric(self.runtime, REAL_TIME, folder / "sink.sock")
        self.prefill = self.source.make_transport("P", 0)
        self.decode = self.sink.make_transport("D", 0)
        self.source.pools["P"] = BlockPool(5, self.source.settle)
        self.sink.pools["D"] = BlockPool(7, self.sink.settle)
        self.source.pools["P"].allocate("p-t", 2)

    async def open(self) -> None:
        await self.source.open()
        await self.sink.open()
        await self.source.connect([self.sink.metadata_of(7).decode().partition("@")[2]])
        assert self.prefill.add_peer("D", 1, {0: self.sink.metadata_of(7)}) > 0


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    made = Pair(tmp_path)
    await made.open()
    yield made
    await made.source.close()
    await made.sink.close()


async def test_a_write_lands_and_is_told_at_both_ends(pair: Pair) -> None:
    pair.sink.pools["D"].allocate(owner_of_attempt("d-t", 1), 2)
    pair.prefill.post(JOB, "landed")
    ended: list[str] = []
    await pair.runtime.until(
        lambda: bool(ended) or bool(ended.extend(each.failure for each in pair.prefill.poll())), pair.runtime.now + 5
    )
    assert ended == [""]
    assert pair.decode.notifications() == ["landed"]


async def test_a_write_into_blocks_of_another_request_ends_the_run(pair: Pair) -> None:
    pair.sink.pools["D"].allocate(owner_of_attempt("another", 1), 2)
    pair.prefill.post(JOB, "landed")
    with pytest.raises(Violation, match=r"a WRITE for d-t/1 landed in block . of another/1"):
        await pair.runtime.until(lambda: False, pair.runtime.now + 5)


async def test_a_write_from_blocks_that_were_freed_ends_the_run(pair: Pair) -> None:
    pair.sink.pools["D"].allocate(owner_of_attempt("d-t", 1), 2)
    pair.prefill.post(JOB, "landed")
    pair.source.pools["P"].free([0, 1])
    with pytest.raises(Violation, match=r"a WRITE for p-t read block . of None"):
        await pair.runtime.until(lambda: False, pair.runtime.now + 5)


async def test_a_dropped_peer_gets_nothing(pair: Pair) -> None:
    pair.sink.pools["D"].allocate(owner_of_attempt("d-t", 1), 2)
    pair.prefill.post(JOB, "landed")
    pair.prefill.drop_peer("D")
    assert [each.failure for each in pair.prefill.poll()] == ["disconnected"]
    with pytest.raises(TransferRefusedError):
        pair.prefill.post(JOB, "landed")
    with pytest.raises(PeerRefusedError):
        pair.prefill.add_peer("D", 1, {0: b"7"})
    await pair.runtime.until(lambda: False, pair.runtime.now + 0.1)
    assert pair.decode.notifications() == []


def test_engines_are_dealt_to_all_processes() -> None:
    dealt = deal_engines(9, 2)
    assert [len(each) for each in dealt] == [5, 4]
    names = sorted(name for each in dealt for name in each)
    assert names == ["D0", "D1", "D2", "D3", "D4", "P0", "P1", "P2", "P3"]


def test_quantiles_are_in_ms() -> None:
    values = [number / 1000 for number in range(101)]
    assert quantiles_ms(values) == {"p50": 50.0, "p90": 90.0, "p99": 99.0, "max": 100.0}
    assert quantiles_ms([])["p99"] == 0.0


def test_a_bad_plan_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--engines=1; allowed: at least 2"):
        Scale(engines=1)
    with pytest.raises(ConfigError, match=r"--processes=9; allowed: 1 to --engines=8"):
        Scale(engines=8, processes=9)
