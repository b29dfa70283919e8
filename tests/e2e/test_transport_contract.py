"""One contract, two data planes: what holds for real NIXL must hold for the in-memory one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.planes import NUM_BLOCKS, End, memory_ends, real_ends

from kvbus.errors import PeerRefusedError, TransferRefusedError
from kvbus.local import free_port
from kvbus.protocol.prefill import WriteEnded, WriteJob

JOB = WriteJob("t", 1, "p1", (((1, 3),),), "D", 1, "d1", (((10, 2), (20, 1)),))


@pytest.fixture(scope="module", params=["memory", pytest.param("nixl", marks=pytest.mark.e2e)])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[End, End]]:
    if request.param == "memory":
        yield from memory_ends()
    else:
        model: Path = request.getfixturevalue("model")
        yield from real_ends(str(model), free_port())


@pytest.fixture
def pair(ends: tuple[End, End]) -> Iterator[tuple[End, End]]:
    """The decode end's memory is known to the prefill end."""
    prefill, decode = ends
    assert prefill.transport.add_peer("D", 1, {0: decode.metadata}) == NUM_BLOCKS
    yield prefill, decode
    prefill.transport.drop_peer("D")


def drive(prefill: End, decode: End, job: WriteJob, note: str = "note") -> tuple[WriteEnded, list[str]]:
    """Post, and drive both ends until the WRITE has ended and its notification has come."""
    prefill.transport.post(job, note)
    ended: list[WriteEnded] = []
    notes: list[str] = []
    deadline = time.monotonic() + 20
    while not ended or not notes:
        assert time.monotonic() < deadline, f"ended {ended}, notes {notes}"
        ended += prefill.transport.poll()
        notes += decode.transport.notifications()
    assert prefill.transport.poll() == []
    assert decode.transport.notifications() == []
    return ended[0], notes


class TestTransportContract:
    def test_blocks_arrive_in_order_before_their_notification(self, pair: tuple[End, End]) -> None:
        prefill, decode = pair
        for block in (1, 2, 3):
            prefill.fill(block, 100 + block)
        ended, notes = drive(prefill, decode, JOB, "d1:1:0:1")
        assert notes == ["d1:1:0:1"]
        assert ended == WriteEnded("t", 1, 3 * prefill.block_bytes)
        assert [decode.read(block) for block in (10, 11, 20)] == [101, 102, 103]
        assert decode.read(12) is None

    def test_of_more_source_blocks_the_last_ones_line_up(self, pair: tuple[End, End]) -> None:
        prefill, decode = pair
        for block in (1, 2, 3):
            prefill.fill(block, 50 + block)
        drive(prefill, decode, replace(JOB, transfer_id="tail", sink_blocks=(((30, 2),),)))
        assert [decode.read(block) for block in (30, 31)] == [52, 53]

    def test_two_jobs_at_once(self, pair: tuple[End, End]) -> None:
        prefill, decode = pair
        prefill.fill(1, 1)
        prefill.fill(2, 2)
        prefill.transport.post(replace(JOB, source_blocks=(((1, 1),),), sink_blocks=(((40, 1),),)), "a")
        prefill.transport.post(replace(JOB, attempt=2, source_blocks=(((2, 1),),), sink_blocks=(((41, 1),),)), "b")
        ended: set[int] = set()
        notes: set[str] = set()
        deadline = time.monotonic() + 20
        while len(ended) < 2 or len(notes) < 2:
            assert time.monotonic() < deadline
            ended |= {each.attempt for each in prefill.transport.poll()}
            notes |= set(decode.transport.notifications())
        assert (ended, notes) == ({1, 2}, {"a", "b"})
        assert (decode.read(40), decode.read(41)) == (1, 2)

    def test_what_cannot_be_posted_is_refused_and_leaves_nothing(self, pair: tuple[End, End]) -> None:
        prefill, _ = pair
        for job in (
            replace(JOB, sink_engine="X"),
            replace(JOB, sink_blocks=(((10, 4),),)),
            replace(JOB, sink_blocks=((),)),
        ):
            with pytest.raises(TransferRefusedError):
                prefill.transport.post(job, "never")
        assert prefill.transport.poll() == []

    def test_metadata_that_does_not_fit_is_refused_and_not_kept(self, ends: tuple[End, End]) -> None:
        prefill, decode = ends
        for engine, metadata in (("E", decode.metadata), ("D", b"junk"), ("D", b"")):
            with pytest.raises(PeerRefusedError, match=f"peer engine {engine} refused"):
                prefill.transport.add_peer(engine, 1, {0: metadata})
        with pytest.raises(TransferRefusedError):
            prefill.transport.post(JOB, "never")

    def test_a_peer_can_go_and_come_back(self, ends: tuple[End, End]) -> None:
        prefill, decode = ends
        prefill.transport.drop_peer("nobody")
        for round_number in range(2):
            prefill.transport.add_peer("D", 1, {0: decode.metadata})
            prefill.fill(1, 70 + round_number)
            job = replace(JOB, attempt=1 + round_number, source_blocks=(((1, 1),),), sink_blocks=(((50, 1),),))
            drive(prefill, decode, job)
            assert decode.read(50) == 70 + round_number
            prefill.transport.drop_peer("D")

    def test_ranks_of_an_equal_peer(self, ends: tuple[End, End]) -> None:
        assert list(ends[0].transport.peer_ranks(1)) == [0]
