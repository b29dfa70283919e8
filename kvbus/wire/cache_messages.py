"""What an engine says of its prefix cache: what has entered and left it, and all of it for who asks."""

from __future__ import annotations

from dataclasses import dataclass

from kvbus.wire.fields import CacheKeys, Key
from kvbus.wire.message import Message


@dataclass(frozen=True, slots=True)
class CacheUpdate(Message):
    """What has changed in an engine's prefix cache since its last update; ``number`` grows by one with each.

    The keys are those of :mod:`kvbus.protocol.cache_keys`, one after the other. With ``cleared`` the cache was empty
    first; then ``removed`` left it; then ``stored`` entered it. ``check`` is the XOR of all keys that are in it now.
    """

    KIND = "cache"
    SPEAKER = ("engine", "incarnation")

    engine: str
    incarnation: int
    number: int
    check: Key
    stored: CacheKeys = b""
    removed: CacheKeys = b""
    cleared: bool = False


@dataclass(frozen=True, slots=True)
class CacheRequest(Message):
    """Asks an engine for all keys, from ``offset`` on, as they were at the update ``number``; 0: as they are now."""

    KIND = "cache?"
    SPEAKER = ("sender", "")

    sender: str
    number: int = 0
    offset: int = 0


@dataclass(frozen=True, slots=True)
class CachePage(Message):
    """Some of the ``total`` keys that were in the cache at the update ``number``, those from ``offset`` on.

    The number is another one than was asked for if the engine no longer knows: then ``offset`` is 0.
    """

    KIND = "cache!"

    engine: str
    incarnation: int
    number: int
    check: Key
    total: int
    offset: int = 0
    keys: CacheKeys = b""
