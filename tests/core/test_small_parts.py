"""Blocks, bounded containers, subjects, configuration."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.bounded import BoundedDict, Deadlines
from kvbus.config import Config
from kvbus.errors import ConfigError
from kvbus.wire import Subjects, blocks

URL = "nats://localhost:4222"


@given(st.lists(st.lists(st.integers(0, 50))))
def test_runs_keep_ids_and_their_order(groups: list[list[int]]) -> None:
    runs = blocks.to_runs(groups)
    assert blocks.from_runs(runs) == groups
    assert blocks.count(runs) == sum(map(len, groups))
    assert blocks.highest(runs) == max((block for group in groups for block in group), default=-1)


def test_runs_join_neighbours() -> None:
    assert blocks.to_runs([[4, 5, 6, 2], []]) == (((4, 3), (2, 1)), ())


def test_bounded_dict_forgets_the_oldest() -> None:
    table: BoundedDict[str, int] = BoundedDict(2)
    for number, key in enumerate("abac"):
        table[key] = number
    assert dict(table) == {"b": 1, "c": 3}


def test_deadlines_come_in_order_and_can_move() -> None:
    deadlines: Deadlines[str] = Deadlines()
    deadlines.set("late", 9.0)
    deadlines.set("moved", 1.0)
    deadlines.set("moved", 5.0)
    deadlines.set("dropped", 2.0)
    deadlines.drop("dropped")
    assert deadlines.next() == 5.0
    assert deadlines.pop_due(4.9) == []
    assert deadlines.pop_due(9.0) == ["moved", "late"]
    assert deadlines.next() is None


def test_deadlines_moved_for_ever_do_not_grow() -> None:
    deadlines: Deadlines[str] = Deadlines()
    for at in range(10_000):
        deadlines.set("only", float(at))
    assert len(deadlines._heap) < 100
    assert deadlines.pop_due(10_000.0) == ["only"]


def test_subjects_hold_engines_and_no_requests() -> None:
    subjects = Subjects("ns")
    assert subjects.registrations("p", "d") == "kvbus.v1.ns.reg.p.d"
    assert subjects.metadata("d", 1, "p") == "kvbus.v1.ns.meta.d.1.p"
    assert subjects.everything == "kvbus.v1.ns.>"


@pytest.mark.parametrize("namespace", ["", "a.b", "a b", ">", "*", "x" * 129])
def test_a_namespace_is_one_token(namespace: str) -> None:
    with pytest.raises(ConfigError, match="namespace"):
        Subjects(namespace)


def test_configuration_from_a_connector() -> None:
    config = Config.from_mapping({"nats_url": f"{URL}, tls://b:1", "block_lease_s": 5, "backends": ["UCX", "GDS"]})
    assert config.servers == [URL, "tls://b:1"]
    assert config.block_lease_s == 5.0
    assert config.backends == ("UCX", "GDS")


@pytest.mark.parametrize(
    ("values", "key", "text"),
    [
        ({}, "nats_url", "required"),
        ({"nats_url": "localhost:4222"}, "nats_url", "nats://host:4222"),
        ({"nats_url": "http://host"}, "nats_url", "schemes: nats, tls"),
        ({"nats_url": "nats://"}, "nats_url", "a URL"),
        ({"nats_url": "nats://h:99999"}, "nats_url", "a URL"),
        ({"nats_url": 5}, "nats_url", "text"),
        ({"nats_url": URL, "nats_ulr": "x"}, "nats_ulr", "the keys backends"),
        ({"nats_url": URL, "block_lease_s": "30"}, "block_lease_s", "a number"),
        ({"nats_url": URL, "block_lease_s": True}, "block_lease_s", "a number"),
        ({"nats_url": URL, "block_lease_s": 0}, "block_lease_s", "0.01 to 86400"),
        ({"nats_url": URL, "dead_after_s": 0.6}, "dead_after_s", "at least twice"),
        ({"nats_url": URL, "backends": []}, "backends", "a list of NIXL backend names"),
        ({"nats_url": URL, "backends": "UCX"}, "backends", "a list"),
        ({"nats_url": URL, "http_address": "8000"}, "http_address", "host:port"),
        ({"nats_url": URL, "namespace": "a.b"}, "namespace", "characters"),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(values: dict[str, Any], key: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        Config.from_mapping(values)
    assert caught.value.key == key
    assert key in str(caught.value)
    assert repr(values.get(key)) in str(caught.value)
