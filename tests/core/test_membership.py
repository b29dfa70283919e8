from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from kvbus.bus import connection_name
from kvbus.bus.presence import lost_engine
from kvbus.protocol import Membership, PeerChanged, PeerJoined, PeerLeft, differences, to_all_interval_s
from kvbus.wire import Bye, Heartbeat, Role, State

BEAT = Heartbeat("P", 5, 1, Role.PREFILL, State.READY, 1, compat=(("dtype", "bfloat16"),))


def test_join_change_leave() -> None:
    members = Membership(dead_after_s=3.0)
    assert members.hear(BEAT, 0.0) == [PeerJoined(BEAT)]
    assert members.hear(replace(BEAT, number=2), 1.0) == []
    draining = replace(BEAT, number=3, state=State.DRAINING)
    assert members.hear(draining, 2.0) == [PeerChanged(draining)]
    assert members.hear(Bye("P", 5), 3.0) == [PeerLeft("P", 5, Role.PREFILL, "left")]
    assert members.hear(Bye("P", 5), 3.0) == []


def test_silence_is_death_after_a_while() -> None:
    members = Membership(dead_after_s=3.0)
    members.hear(BEAT, 0.0)
    members.hear(BEAT, 2.0)
    assert members.next_deadline() == 5.0
    assert members.tick(4.9) == []
    assert members.tick(5.0) == [PeerLeft("P", 5, Role.PREFILL, "silent")]


def test_a_lost_connection_leaves_little_time_to_speak_again() -> None:
    members = Membership(dead_after_s=3.0)
    members.hear(BEAT, 0.0)
    members.suspect("P", 4, 1.0)
    assert members.next_deadline() == 3.0, "the connection of an older incarnation"
    members.suspect("P", 5, 1.0)
    assert members.next_deadline() == 2.0
    members.hear(BEAT, 1.5)
    assert members.tick(4.4) == []
    members.suspect("P", 5, 4.4)
    assert members.tick(5.4) == [PeerLeft("P", 5, Role.PREFILL, "silent")]


def test_only_an_engines_own_connection_is_its_presence() -> None:
    def event(name: object) -> bytes:
        return json.dumps({"client": {"name": name}}).encode()

    assert lost_engine(event(connection_name("P", 5))) == ("P", 5)
    for junk in (b"", b"\xff", b"[]", b"{}", b'{"client": 3}', event(None), event("kvbus-router"), event("x/P/5")):
        assert lost_engine(junk) is None
    assert lost_engine(event("kvbus-engine/P/x")) is None
    assert lost_engine(b" " * (1 << 15)) is None


def test_our_own_deafness_is_not_their_silence() -> None:
    members = Membership(dead_after_s=3.0)
    members.hear(BEAT, 0.0)
    members.excuse_silence(100.0)
    assert members.tick(102.9) == []


def test_a_newer_incarnation_replaces_an_older_one_for_good() -> None:
    members = Membership()
    members.hear(BEAT, 0.0)
    newer = replace(BEAT, incarnation=6)
    assert members.hear(newer, 1.5) == [PeerLeft("P", 5, Role.PREFILL, "replaced"), PeerJoined(newer)]
    assert members.hear(BEAT, 1.6) == []
    assert members.hear(Bye("P", 5), 1.7) == []
    assert members.get("P") == newer
    assert members.rejected == 2


def test_a_newer_incarnation_does_not_unseat_one_that_speaks() -> None:
    """One heartbeat that anybody may say would take an engine away from all others. A restarted one needs seconds."""
    members = Membership(dead_after_s=3.0)
    lie = replace(BEAT, incarnation=1 << 62)
    interval_s = to_all_interval_s(0.5, 3.0)
    for at in (0.0, interval_s, 2 * interval_s):
        members.hear(BEAT, at)
        assert members.hear(lie, at + interval_s) == []
    assert members.get("P") == BEAT
    assert members.hear(lie, 4.0) == [PeerLeft("P", 5, Role.PREFILL, "replaced"), PeerJoined(lie)], "it was silent"
    assert members.hear(BEAT, 4.1) == []
    members.tick(7.0)
    assert members.hear(BEAT, 7.1) == [PeerJoined(BEAT)], "it gets its seat back"


@pytest.mark.parametrize("dead_after_s", [1.0, 3.0, 5.0, 60.0])
def test_one_lost_heartbeat_takes_no_engine_away(dead_after_s: float) -> None:
    interval_s = to_all_interval_s(0.01, dead_after_s)
    assert 2 * interval_s < dead_after_s
    members = Membership(dead_after_s=dead_after_s)
    members.hear(BEAT, 0.0)
    assert members.tick(2 * interval_s) == []


@pytest.mark.parametrize(
    "lie",
    [
        {"role": Role.BOTH},
        {"tp_size": 2},
        {"compat": ()},
        {"public_key": b"x" * 32},
        {"farewell": b"x" * 32},
        {"address": "10.0.0.9:80"},
        {"data_parallel": True},
    ],
)
def test_what_an_incarnation_is_does_not_change(lie: dict[str, Any]) -> None:
    """S1: prompts would go to another address, or blocks to another shape of memory."""
    members, there = Membership(), replace(BEAT, address="10.0.0.1:80")
    members.hear(BEAT, 0.0)
    assert members.hear(there, 0.1) == [PeerChanged(there)], "it did not serve HTTP yet"
    assert members.hear(replace(there, **lie), 0.2) == []
    assert members.get("P") == there
    assert members.rejected == 1


def test_peers_by_what_they_do() -> None:
    members = Membership()
    both = replace(BEAT, engine="B", role=Role.BOTH, state=State.STARTING)
    decode = replace(BEAT, engine="D", role=Role.DECODE)
    for beat in (decode, both, BEAT):
        members.hear(beat, 0.0)
    assert members.peers() == [both, decode, BEAT]
    assert members.peers(prefill=True) == [both, BEAT]
    assert members.peers(decode=True, ready=True) == [decode]


def test_the_table_is_bounded() -> None:
    members = Membership(max_peers=1)
    members.hear(BEAT, 0.0)
    assert members.hear(replace(BEAT, engine="Q"), 0.0) == []
    assert members.rejected == 1


def test_differences_are_named() -> None:
    other = replace(BEAT, engine="D", compat=(("dtype", "float32"), ("vllm", "0.33")))
    assert differences(BEAT, BEAT) == []
    assert differences(BEAT, other) == ["dtype: bfloat16 here, float32 on D", "vllm: unset here, 0.33 on D"]
