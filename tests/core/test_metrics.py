"""Durations are counted in buckets, shipped as counts, and become the histogram that had seen each of them."""

from __future__ import annotations

import random
from collections import Counter

import msgpack
import pytest
from kvbus_connector.board import METRICS, TIMES, Board
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client import Counter as PromCounter

from kvbus.metrics import BUCKETS_US, Counters, durations, plain

LABELS = {"model_name": "m", "engine": "0"}


class Shown:
    """A board as a front end has one, and what its ``/metrics`` says."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(**about: object) -> PromCounter:
            return PromCounter(**about, registry=self.registry)  # type: ignore[arg-type]

        def histogram(**about: object) -> Histogram:
            return Histogram(**about, registry=self.registry)  # type: ignore[arg-type]

        self.board = Board(counter, histogram, list(LABELS), [list(LABELS.values())])

    def add(self, counts: dict[str, int]) -> None:
        self.board.add(msgpack.unpackb(msgpack.packb(counts)), list(LABELS.values()))

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"vllm:kvbus_{name}", LABELS | labels)


@pytest.fixture
def shown() -> Shown:
    return Shown()


def observed(*seconds: float) -> dict[str, int]:
    counters = Counters()
    for each in seconds:
        counters.observe("write", each)
    return counters.snapshot()


def test_nothing_is_lost_between_a_rank_and_the_histogram(shown: Shown) -> None:
    """Two ranks, three steps each: the buckets are those of every duration, and so is the sum, to the microsecond."""
    chance = random.Random(4)
    bounds_s = [bound_us / 1e6 for bound_us in BUCKETS_US]
    direct = Histogram("direct", "", buckets=bounds_s, registry=(alone := CollectorRegistry()))
    for _ in range(3):
        step: Counter[str] = Counter()
        for _ in range(2):
            seen = [*chance.choices(bounds_s, k=5), *(10 ** chance.uniform(-5, 3.5) for _ in range(20)), 0.0]
            step.update(observed(*seen))
            for each in seen:
                direct.observe(round(each * 1e6) / 1e6)
        shown.add(dict(step))
    for bound in [*map(str, bounds_s), "+Inf"]:
        assert shown.value("write_seconds_bucket", le=bound) == alone.get_sample_value("direct_bucket", {"le": bound})
    assert shown.value("write_seconds_count") == 156
    assert shown.value("write_seconds_sum") == pytest.approx(alone.get_sample_value("direct_sum"), rel=1e-9)


@pytest.mark.parametrize("bound_us", BUCKETS_US)
def test_a_bound_belongs_to_its_bucket(shown: Shown, bound_us: int) -> None:
    shown.add(observed(*[bound_us / 1e6] * 7, (bound_us + 1) / 1e6))
    assert shown.value("write_seconds_bucket", le=str(bound_us / 1e6)) == 7


def test_a_clock_that_steps_back_counts_as_no_time() -> None:
    assert list(durations(observed(-0.5))) == [("write", 1, 0.0)]


def test_waits_are_told_apart_by_the_late_side(shown: Shown) -> None:
    counters = Counters()
    counters.observe("match_wait_decode", 1.5)
    counters.add("transfers_done")
    shown.add(counters.snapshot())
    assert shown.value("match_wait_seconds_sum", side="decode") == 1.5
    assert shown.value("match_wait_seconds_count", side="prefill") == 0
    assert shown.value("transfers_total", outcome="done") == 1
    assert plain(counters.snapshot()) == {"transfers_done": 1}


def test_everything_is_there_before_anything_happens(shown: Shown) -> None:
    """An alert on an increase misses a counter's first step if the counter appears with it."""
    there = {sample.name for family in shown.registry.collect() for sample in family.samples}
    assert there >= {f"vllm:kvbus_{name}_total" for name in METRICS} | {f"vllm:kvbus_{name}_count" for name in TIMES}
    assert shown.value("errors_total", where="writer") == 0


def test_what_is_not_to_be_shown_is_passed_by(shown: Shown) -> None:
    shown.add({"something new": 3, **{f"else{key.removeprefix('write')}": 1 for key in observed(1.0)}})
    samples = [sample for family in shown.registry.collect() for sample in family.samples]
    assert [sample for sample in samples if sample.value and not sample.name.endswith("_created")] == []
