"""The codec: messages as bytes, and back.

The one rule: nothing past this module sees a dict or an unchecked field. :func:`encode` and :func:`decode` are each
other's inverse; whatever :func:`decode` cannot accept raises :class:`~kvbus.errors.MessageError` and nothing else.

Wire format: one msgpack map ``{"v": version, "k": kind, field: value, ...}``. Unknown fields are ignored, missing
ones take their default, or the message is refused if there is none. What one engine says to another ends in a field
``"s"``, its seal (:mod:`kvbus.bus.keys`): 16 bytes over all bytes before them.

Wire versions:
    1  first.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any, cast

import msgpack

from kvbus.errors import MessageError
from kvbus.wire import cache_messages, engine_messages, transfer_messages
from kvbus.wire.engine_messages import Heartbeat
from kvbus.wire.fields import MAX_BINARY_BYTES, MAX_RUNS, MAX_TEXT_CHARS
from kvbus.wire.message import Message, checks_of

WIRE_VERSION = 1

MAX_MESSAGE_BYTES = 8 << 20
SEAL_BYTES = 16
_NO_SEAL = bytes(SEAL_BYTES)

KINDS: dict[str, type[Message]] = {
    cls.KIND: cls
    for module in (transfer_messages, engine_messages, cache_messages)
    for cls in vars(module).values()
    if isinstance(cls, type) and issubclass(cls, Message) and cls.KIND
}
"""Every kind of message that there is."""


def encode(message: Message, key: bytes | None = None) -> bytes:
    """Encode a message; the inverse of :func:`decode`. With a ``key`` it is sealed."""
    body: dict[str, Any] = {"v": WIRE_VERSION, "k": message.KIND}
    for name, _ in checks_of(type(message)):
        body[name] = getattr(message, name)
    if key is None:
        return cast(bytes, msgpack.packb(body))
    payload = cast(bytes, msgpack.packb({**body, "s": _NO_SEAL}))
    return payload[:-SEAL_BYTES] + seal_of(payload, key)


def seal_of(payload: bytes, key: bytes) -> bytes:
    """The seal that belongs into the last :data:`SEAL_BYTES` of ``payload``."""
    return hashlib.blake2b(payload[:-SEAL_BYTES], key=key, digest_size=SEAL_BYTES).digest()


def farewell_of(word: bytes) -> bytes:
    """What a heartbeat says beforehand of the ``word`` that a :class:`Bye` will reveal."""
    return hashlib.blake2b(word, digest_size=32).digest()


def heard(subject: str, payload: bytes) -> Message:
    """Decode what was heard on ``subject``: the subject, which the server can guard, says who speaks.

    Raises:
        MessageError: as :func:`decode`, or the message is of somebody else.
    """
    message, (*_, role, speaker) = decode(payload), subject.split(".")
    if message.SPEAKER[0] and message.speaker[0] != speaker:
        raise MessageError(f"{message.KIND} of {message.speaker[0]!r:.80}, said by {speaker}")
    if isinstance(message, Heartbeat) and message.role != role:
        raise MessageError(f"heartbeat of a {message.role} engine, said by one for {role}")
    return message


def decode(data: bytes) -> Message:
    """Decode one message.

    Raises:
        MessageError: for anything else than a well-formed message of a known kind and version.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise MessageError(f"message of {len(data)} bytes, allowed {MAX_MESSAGE_BYTES}")
    try:
        body = msgpack.unpackb(
            data,
            strict_map_key=True,
            max_str_len=4 * MAX_TEXT_CHARS,
            max_bin_len=MAX_BINARY_BYTES,
            max_array_len=MAX_RUNS,
            max_map_len=64,
            max_ext_len=0,
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise MessageError(f"not msgpack within bounds: {type(error).__name__}") from None
    if not isinstance(body, dict):
        raise MessageError(f"not a map but {type(body).__name__}")
    if body.get("v") != WIRE_VERSION:
        raise MessageError(f"wire version {body.get('v')!r}, spoken here: {WIRE_VERSION}")
    kind = body.get("k")
    cls = KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise MessageError(f"unknown kind {kind!r:.80}")
    try:
        return cls(**{name: body[name] for name, _ in checks_of(cls) if name in body})
    except TypeError:
        missing = [f.name for f in dataclasses.fields(cls) if _is_required(f) and f.name not in body]
        raise MessageError(f"{kind}: missing {', '.join(missing)}") from None


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
