from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.errors import MessageError
from kvbus.wire import (
    KINDS,
    Heartbeat,
    Message,
    MetadataReply,
    Registration,
    Role,
    State,
    TransferDone,
    cache_messages,
    decode,
    encode,
    engine_messages,
    fields,
    transfer_messages,
)

REGISTRATION = Registration("t", 1, "decode-0", 7, "r", (((3, 2), (9, 1)), ()), 100, 32, "00-a-b-01")
HEARTBEAT = Heartbeat("e", 1, 2, Role.PREFILL, State.READY, 2, "m", "h:1", 3, 4, 5, 6, (("dtype", "bf16"),))
CACHED = {"engine": "e", "incarnation": 1, "number": 1, "check": bytes(8)}
EXAMPLES: list[Message] = [
    REGISTRATION,
    HEARTBEAT,
    TransferDone("t", "p", 1, 1, 0, 2, "r", 5, 1000, "decode", 0.1, 0.2, 0.3),
    MetadataReply("e", 1, 0, b"\x00\xff"),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: message.KIND)
def test_decode_inverts_encode(message: Message) -> None:
    assert decode(encode(message)) == message


def test_every_message_has_a_kind_of_its_own() -> None:
    classes = [*vars(engine_messages).values(), *vars(transfer_messages).values(), *vars(cache_messages).values()]
    spoken = [cls for cls in classes if isinstance(cls, type) and issubclass(cls, Message) and cls.KIND]
    assert len(spoken) == len(KINDS) == 30
    assert set(spoken) == set(KINDS.values())


def wire(**changes: Any) -> bytes:
    body = {"v": 1, "k": "reg", **dataclasses.asdict(REGISTRATION), **changes}
    return bytes(msgpack.packb({key: value for key, value in body.items() if value is not Ellipsis}))


def test_unknown_fields_are_ignored() -> None:
    assert decode(wire(later="x")) == REGISTRATION


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "not msgpack"),
        (b"\xc1", "not msgpack"),
        (b"\x01trailing", "not msgpack"),
        (msgpack.packb([1]), "not a map but list"),
        (msgpack.packb({1: 2}), "not msgpack"),
        (wire(v=2), "wire version 2"),
        (wire(k="nonsense"), "unknown kind 'nonsense'"),
        (wire(k=[1]), "unknown kind"),
        (wire(transfer_id=...), "missing transfer_id"),
        (wire(transfer_id=5), "transfer_id: 5 is not text"),
        (wire(transfer_id="x" * 513), "is not text of at most 512"),
        (wire(attempt=-1), "attempt: -1"),
        (wire(attempt=True), "attempt: True"),
        (wire(attempt=1.0), "attempt: 1.0"),
        (wire(blocks=[[[1, 0]]]), "block runs"),
        (wire(blocks=[[[1]]]), "block runs"),
        (wire(blocks=[[[-1, 1]]]), "block runs"),
        (wire(blocks=[[[0, fields.MAX_BLOCKS], [0, 1]]]), "block runs"),
        (wire(blocks=[[]] * 65), "block runs"),
        (wire(blocks=[[[0, 1]] * (fields.MAX_RUNS + 1)]), "not msgpack"),
        (msgpack.packb({"v": 1, "k": "cache", **CACHED, "stored": b"1234567"}), "keys of 8 bytes"),
        (msgpack.packb({"v": 1, "k": "cache", **CACHED, "removed": bytes((1 << 19) + 8)}), "at most 65536 keys"),
        (msgpack.packb({"v": 1, "k": "hb", **dataclasses.asdict(HEARTBEAT), "role": "king"}), "one of prefill"),
        (msgpack.packb({"v": 1, "k": "hb", **dataclasses.asdict(HEARTBEAT), "compat": [[1, 2]]}), "compat"),
    ],
)
def test_what_is_not_a_message_is_refused_with_its_reason(payload: bytes, reason: str) -> None:
    with pytest.raises(MessageError, match=reason):
        decode(payload)


def test_a_message_is_checked_when_it_is_built() -> None:
    with pytest.raises(MessageError, match="attempt"):
        dataclasses.replace(REGISTRATION, attempt=-3)


@given(st.binary(max_size=400))
def test_no_bytes_raise_anything_else(payload: bytes) -> None:
    with contextlib.suppress(MessageError):
        decode(payload)


@given(st.data())
def test_no_mutation_raises_anything_else(data: st.DataObject) -> None:
    payload = bytearray(encode(data.draw(st.sampled_from(EXAMPLES))))
    for _ in range(data.draw(st.integers(1, 8))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(MessageError):
        decode(bytes(payload))
