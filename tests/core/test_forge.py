"""The forger changes every field of every kind, comes from a seed, and remembers a bounded number of things."""

from __future__ import annotations

import random

import msgpack

from kvbus.errors import MessageError
from kvbus.sim.forge import Forger
from kvbus.wire import Bye, Cancel, Heartbeat, Message, PrefillCompleted, Role, State, decode, encode

HEARD: list[tuple[str, Message]] = [
    ("kvbus.v1.default.hb.prefill.P", Heartbeat("P", 7, 1, Role.PREFILL, State.READY, 1, "m")),
    ("kvbus.v1.default.bye.Q", Bye("Q", 3)),
    ("kvbus.v1.default.cancel.P", Cancel("t", 1, "D", 9, "r", "x")),
    ("kvbus.v1.default.prefill.P", PrefillCompleted("t", "P", 7, "r", (((1, 3), (9, 2)),), 96)),
]


def a_forger(seed: int = 1) -> Forger:
    forger = Forger(random.Random(seed), late_s=60.0)
    for subject, message in HEARD:
        forger.hear(subject, encode(message), now=0.0)
    return forger


def test_nothing_is_made_of_nothing() -> None:
    assert Forger(random.Random(1), 60.0).forge(0.0) is None


def test_a_seed_gives_the_same_messages() -> None:
    one, two = a_forger(), a_forger()
    assert [one.forge(0.0) for _ in range(500)] == [two.forge(0.0) for _ in range(500)]


def test_every_field_of_every_kind_is_changed_and_the_rest_kept() -> None:
    forger, alone = a_forger(), set()
    true = {message.KIND: msgpack.unpackb(encode(message)) for _, message in HEARD}
    for _ in range(4000):
        forged = forger.forge(0.0)
        assert forged is not None
        if forged.how == "field":
            body = msgpack.unpackb(forged.payload)
            if (kind := str(body.get("k"))) in true:
                changed = {name for name in true[kind] if name not in body or body[name] != true[kind][name]}
                alone |= {(kind, *changed)} if len(changed) == 1 else set()
    assert {(kind, name) for kind, body in true.items() for name in body if name != "k"} <= alone


def test_many_pass_the_codec_and_many_do_not() -> None:
    forger, passed, refused = a_forger(), 0, 0
    for _ in range(2000):
        forged = forger.forge(0.0)
        assert forged is not None
        try:
            decode(forged.payload)
            passed += 1
        except MessageError:
            refused += 1
    assert passed > 500, "these are the dangerous ones"
    assert refused > 200


def test_a_seal_is_kept_dropped_or_spoiled() -> None:
    forger = Forger(random.Random(1), 60.0)
    body = {"v": 1, "k": "some", "number": 5, "s": b"0123456789abcdef"}
    forger.hear("kvbus.v1.default.some.P", msgpack.packb(body), 0.0)
    made = [forged for _ in range(500) if (forged := forger.forge(0.0)) is not None and forged.how == "field"]
    seals = [msgpack.unpackb(forged.payload).get("s") for forged in made]
    assert body["s"] in seals
    assert None in seals
    assert any(isinstance(seal, bytes) and len(seal) == 16 and seal != body["s"] for seal in seals)


def test_late_replays_are_late_and_its_own_are_not_heard() -> None:
    forger = a_forger()
    for _ in range(3000):
        forged = forger.forge(now=59.0)
        assert forged is not None
        assert forged.how != "late"
        forger.hear(forged.subject, forged.payload, now=59.0)
    hows = {forged.how for _ in range(500) if (forged := forger.forge(61.0))}
    assert hows == {"field", "swap", "bit", "cut", "replay", "late"}
    repeated = [forged for _ in range(500) if (forged := forger.forge(61.0)) and forged.how in ("replay", "late")]
    assert {forged.payload for forged in repeated} == {encode(message) for _, message in HEARD}
