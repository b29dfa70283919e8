"""Whom an engine believes: seals, pinned keys, and what a seal costs."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from kvbus.bus import Keys
from kvbus.bus.keys import FORGET_S, MAX_PINS
from kvbus.errors import MessageError
from kvbus.protocol import Membership, PeerJoined
from kvbus.wire import (
    Bye,
    CancelAck,
    Heartbeat,
    LeaseEcho,
    Message,
    PrefillCompleted,
    Pulse,
    Registration,
    RegistrationAck,
    Release,
    Role,
    State,
    Subjects,
    Who,
    decode,
    encode,
    heard,
)

S = Subjects("ns")
ACK = RegistrationAck("t", "P", 5, 1, 0, 1, "r")
ECHO = LeaseEcho("D", 7, (("P", 5, 0, 1 << 61),))


def engine(name: str, incarnation: int, secret: bytes = b"x") -> Keys:
    return Keys(secret + name.encode(), name, incarnation)


def beat(keys: Keys, name: str, incarnation: int) -> Heartbeat:
    return keys.introduce(Heartbeat(name, incarnation, 1, Role.PREFILL, State.READY, 1))


@pytest.fixture
def met() -> tuple[Keys, Keys]:
    """P, incarnation 5, and D, incarnation 7, which have heard of each other."""
    prefill, decode_ = engine("P", 5), engine("D", 7)
    prefill.learn(beat(decode_, "D", 7), 0.0)
    decode_.learn(beat(prefill, "P", 5), 0.0)
    return prefill, decode_


def sealed(keys: Keys, message: Message, to: str, incarnation: int) -> bytes:
    [key] = keys.towards(to, incarnation)
    return encode(message, key)


def test_what_is_sealed_is_believed_and_is_the_same_message(met: tuple[Keys, Keys]) -> None:
    prefill, sink = met
    payload = sealed(prefill, ACK, "D", 7)
    assert decode(payload) == ACK
    assert sink.believes(ACK, payload)


def test_no_bit_can_be_changed(met: tuple[Keys, Keys]) -> None:
    prefill, sink = met
    payload = sealed(prefill, ACK, "D", 7)
    for place in range(len(payload)):
        changed = bytearray(payload)
        changed[place] ^= 1
        assert not sink.believes(ACK, bytes(changed))
    assert not sink.believes(ACK, payload + b"\0")
    assert not sink.believes(ACK, encode(ACK))
    assert not sink.believes(ACK, b"")


def test_a_seal_is_for_one_direction_and_one_incarnation_of_each(met: tuple[Keys, Keys]) -> None:
    prefill, sink = met
    assert not prefill.believes(ACK, sealed(prefill, ACK, "D", 7)), "to another engine"
    echo = sealed(sink, ECHO, "P", 5)
    assert prefill.believes(ECHO, echo)
    assert not sink.believes(ECHO, echo), "back to the sender"
    again = engine("P", 6)
    again.learn(beat(sink, "D", 7), 0.0)
    assert not again.believes(ECHO, echo), "to a later incarnation"
    assert not sink.believes(replace(ACK, source_incarnation=6), sealed(again, ACK, "D", 7)), "of one never heard"


def test_an_engine_has_a_key_to_itself(met: tuple[Keys, Keys]) -> None:
    prefill, sink = met
    word = PrefillCompleted("t", "P", 5, "r", (((1, 3),),), 96, number=1)
    payload = sealed(prefill, word, "P", 5)
    assert Keys(b"xP", "P", 5).believes(word, payload), "another process of the same engine"
    assert not sink.believes(word, payload)
    assert not Keys(b"yP", "P", 5).believes(word, payload), "another secret"


def test_another_key_of_the_same_incarnation_is_not_taken_while_the_first_one_speaks(met: tuple[Keys, Keys]) -> None:
    """Nor is it refused for good: the first one may be the liar."""
    prefill, sink = met
    liar = engine("P", 5, b"liar")
    lie = beat(liar, "P", 5)
    sink.learn(beat(prefill, "P", 5), 5.0)
    assert not sink.may_be(lie, 5.0 + FORGET_S)
    sink.learn(lie, 5.0 + FORGET_S)
    assert sink.believes(ACK, sealed(prefill, ACK, "D", 7))
    sink.learn(lie, 5.1 + FORGET_S)
    assert not sink.believes(ACK, sealed(prefill, ACK, "D", 7))
    sink.learn(beat(prefill, "P", 5), 5.2 + 2 * FORGET_S)
    assert sink.believes(ACK, sealed(prefill, ACK, "D", 7))


def test_a_flood_of_engines_pushes_out_none_that_speaks(met: tuple[Keys, Keys]) -> None:
    prefill, sink = met
    stranger = Heartbeat("X", 0, 1, Role.PREFILL, State.READY, 1, public_key=b"x" * 32)
    for number in range(MAX_PINS + 10):
        sink.learn(replace(stranger, incarnation=number), 1.0)
    assert sink.believes(ACK, sealed(prefill, ACK, "D", 7))
    new = engine("Q", 9)
    sink.learn(beat(new, "Q", 9), 2.0)
    assert sink.towards("Q", 9) == [], "full"
    sink.learn(beat(new, "Q", 9), 2.0 + FORGET_S)
    assert sink.towards("Q", 9) != [], "they were silent"


@pytest.mark.parametrize("key", [b"", b"x", bytes(32), b"\1" + bytes(31), b"\xff" * 32])
def test_a_bad_public_key_believes_nobody(key: bytes) -> None:
    """Too short, and points that would give the same key to everybody, too."""
    sink = engine("D", 7)
    sink.learn(replace(beat(sink, "P", 5), public_key=key), 0.0)
    assert not sink.believes(ACK, encode(ACK, b"k" * 32))
    if len(key) < 32 or not any(key[1:]):
        assert sink.towards("P", 5) == []


def test_metadata_is_for_its_reader_alone(met: tuple[Keys, Keys]) -> None:
    """S2."""
    prefill, sink = met
    secret = sink.encrypt(b"metadata", ("P", 5))
    assert secret is not None
    assert b"metadata" not in secret
    assert prefill.decrypt(secret, ("D", 7)) == b"metadata"
    assert engine("P", 5, b"liar").decrypt(secret, ("D", 7)) is None
    assert prefill.decrypt(secret[:-1] + b"\0", ("D", 7)) is None
    assert prefill.decrypt(b"", ("D", 7)) is None
    assert sink.encrypt(b"metadata", ("Q", 5)) is None, "not heard of"


def test_only_an_engine_itself_can_say_goodbye() -> None:
    keys, members = engine("P", 5), Membership()
    there = beat(keys, "P", 5)
    assert members.hear(there, 0.0) == [PeerJoined(there)]
    assert members.hear(Bye("P", 5), 1.0) == []
    assert members.hear(Bye("P", 5, b"guess"), 1.0) == []
    assert members.get("P") == there
    assert members.hear(keys.bye(), 1.0) != []
    assert members.get("P") is None


@pytest.mark.parametrize(
    ("subject", "message"),
    [
        (S.heartbeats("decode", "P"), Heartbeat("P", 1, 1, Role.PREFILL, State.READY, 1)),
        (S.heartbeats("prefill", "P"), Heartbeat("Q", 1, 1, Role.PREFILL, State.READY, 1)),
        (S.acks("D", "Q"), ACK),
        (S.acks("D", "Q"), CancelAck("t", "P", 5, 1, 0, 1, "r")),
        (S.echoes("P", "E"), ECHO),
        (S.pulses("Q"), Pulse("P", 1, 0, 1)),
        (S.bye("Q"), Bye("P", 1)),
        (S.who("x"), Who("y")),
        (S.releases("P", "x"), Release("t", 1, "y", "D", 1, "why")),
        (S.registrations("P", "E"), Registration("t", 1, "D", 1, "r", (((1, 3),),), 96)),
        (S.pool("E"), Registration("t", 1, "D", 1, "r", (((1, 3),),), 96)),
    ],
)
def test_the_subject_says_who_speaks(subject: str, message: Message) -> None:
    """S1: who may publish on one subject speaks for nobody else."""
    with pytest.raises(MessageError, match="said by"):
        heard(subject, encode(message))


def test_what_a_seal_costs(met: tuple[Keys, Keys]) -> None:
    """Printed, and bounded very generously: a message costs some 20 us anyway, and the way through NATS 150."""
    prefill, sink = met
    rounds = 5000
    [key] = prefill.towards("D", 7)

    def us_of(act: object) -> float:
        began = time.perf_counter()
        for _ in range(rounds):
            act()  # type: ignore[operator]
        return (time.perf_counter() - began) / rounds * 1e6

    plain, payload = us_of(lambda: encode(ACK)), encode(ACK, key)
    sealing = us_of(lambda: encode(ACK, prefill.towards("D", 7)[0])) - plain
    checking = us_of(lambda: sink.believes(ACK, payload))
    print(f"encode {plain:.1f} us, to seal {sealing:.1f} us more, to check a seal {checking:.1f} us")
    assert max(sealing, checking) < 500
