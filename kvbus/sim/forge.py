"""A forger: it hears a bus, and makes changed messages of what it heard. For tests, and against real clusters.

The one rule: it knows nothing of any kind of message. It changes the map on the wire, field by field in turn and by the
type of each value, so that kinds and fields still to come are covered. It has no key: a seal it keeps, drops or spoils.

Pure: chance and time are arguments, and it publishes nothing itself.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import msgpack

from kvbus.bounded import BoundedDict

MAX_HEARD = 4096
MAX_KINDS = 64
MAX_OF_KIND = 64
MAX_VALUES = 128
MAX_NAMES = 256
MAX_OWN = 1 << 14
HUGE = ((1 << 31) - 1, (1 << 32) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
TEXTS = ("", "x", "*", ">", "a.b", "\x00", "é" * 40, "x" * 512, "x" * 513, "127.0.0.1:1/path?x=", "http://127.0.0.1:1/")
SHARE_OF_OTHER_SUBJECTS = 0.25

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Forged:
    """What to publish, and ``how`` it was made."""

    subject: str
    payload: bytes
    how: str


@dataclass(frozen=True, slots=True)
class _Heard:
    subject: str
    payload: bytes
    at: float


class Forger:
    """Tell it what is heard with :meth:`hear`; ask it for one changed message with :meth:`forge`.

    Args:
        late_s: a late replay is of something at least so old: longer than any lease.
    """

    def __init__(self, chance: random.Random, late_s: float) -> None:
        self._chance, self._late_s = chance, late_s
        self._recent: deque[_Heard] = deque(maxlen=MAX_HEARD)
        self._old: deque[_Heard] = deque(maxlen=MAX_HEARD)
        self._of_kind: BoundedDict[str, deque[_Heard]] = BoundedDict(MAX_KINDS)
        self._values: BoundedDict[str, deque[Any]] = BoundedDict(MAX_NAMES)
        self._tokens: BoundedDict[int, deque[str]] = BoundedDict(MAX_NAMES)
        self._own: BoundedDict[int, None] = BoundedDict(MAX_OWN)
        self._turns: deque[tuple[str, str]] = deque()
        self._turned: set[tuple[str, str]] = set()
        self._ways: list[tuple[Callable[[float], tuple[_Heard, bytes] | None], int]] = [
            (self._field, 60),
            (self._swap, 10),
            (self._bit, 10),
            (self._cut, 4),
            (self._replay, 8),
            (self._late, 8),
        ]

    def hear(self, subject: str, payload: bytes, now: float) -> None:
        """Take note of a message, unless the forger itself has made it."""
        if hash((subject, payload)) in self._own or (body := _body(payload)) is None:
            return
        heard = _Heard(subject, payload, now)
        self._recent.append(heard)
        if len(self._old) < MAX_HEARD or self._chance.random() < 0.1:
            self._old.append(heard)
        kind = str(body.get("k"))
        self._remember(self._of_kind, kind, heard, MAX_OF_KIND)
        for name, value in body.items():
            self._remember(self._values, name, value, MAX_VALUES)
            if (kind, name) not in self._turned and len(self._turned) < MAX_KINDS * MAX_NAMES:
                self._turned.add((kind, name))
                self._turns.append((kind, name))
        for place, token in enumerate(subject.split(".")):
            self._remember(self._tokens, place, token, MAX_VALUES)

    def forge(self, now: float) -> Forged | None:
        """One changed, moved or repeated message; nothing while there is none to make it of."""
        if not self._recent:
            return None
        ways, weights = zip(*self._ways, strict=True)
        [way] = self._chance.choices(ways, weights)
        made = way(now)
        if made is None:
            way, made = self._replay, self._replay(now)
        heard, payload = made
        subject = self._subject(heard.subject) if self._chance.random() < SHARE_OF_OTHER_SUBJECTS else heard.subject
        self._own[hash((subject, payload))] = None
        return Forged(subject, payload, way.__name__.strip("_"))

    # Ways to make one; each gives what it was made of, too

    def _field(self, now: float) -> tuple[_Heard, bytes] | None:
        """The next field of the next kind: no field waits longer than all others."""
        kind, name = self._turns[0]
        self._turns.rotate(-1)
        if kind not in self._of_kind:
            return None
        heard = self._chance.choice(self._of_kind[kind])
        body = _body(heard.payload) or {}
        if name not in body or self._chance.random() < 0.05:
            body.pop(name, None)
        else:
            body[name] = self._changed(name, body[name])
        return heard, self._packed(body)

    def _swap(self, now: float) -> tuple[_Heard, bytes]:
        """A message with a field, or with half of its fields, of another."""
        heard, other = self._chance.choice(self._recent), self._chance.choice(self._recent)
        body, given = _body(heard.payload) or {}, _body(other.payload) or {}
        common = [name for name in body if name in given and name not in ("v", "k")]
        taken = self._chance.sample(common, self._chance.choice((min(1, len(common)), len(common) // 2)))
        return heard, self._packed(body | {name: given[name] for name in taken})

    def _bit(self, now: float) -> tuple[_Heard, bytes]:
        heard = self._chance.choice(self._recent)
        made, bit = bytearray(heard.payload), self._chance.randrange(8 * len(heard.payload))
        made[bit // 8] ^= 1 << bit % 8
        return heard, bytes(made)

    def _cut(self, now: float) -> tuple[_Heard, bytes]:
        heard = self._chance.choice(self._recent)
        return heard, heard.payload[: self._chance.randrange(len(heard.payload))]

    def _replay(self, now: float) -> tuple[_Heard, bytes]:
        """Of what was heard lately, in any order."""
        heard = self._chance.choice(self._recent)
        return heard, heard.payload

    def _late(self, now: float) -> tuple[_Heard, bytes] | None:
        """Of what was heard longer ago than any lease."""
        heard = self._chance.choice(self._old)
        return (heard, heard.payload) if now - heard.at >= self._late_s else None

    # Parts of them

    def _subject(self, subject: str) -> str:
        """Another subject that was heard, or one that differs in one word."""
        if self._chance.random() < 0.5:
            return self._chance.choice(self._recent).subject
        tokens = subject.split(".")
        place = self._chance.randrange(len(tokens))
        tokens[place] = self._chance.choice(self._tokens[place])
        return ".".join(tokens)

    def _packed(self, body: Body) -> bytes:
        """With its seal, which is of another text now, as it is; without; or with one of nobody."""
        if "s" in body and (seal := self._chance.random()) < 0.4:
            seal_of = body.pop("s")
            if seal < 0.2:
                body["s"] = self._chance.randbytes(len(seal_of)) if isinstance(seal_of, bytes) else seal_of
        return cast(bytes, msgpack.packb(body))

    def _changed(self, name: str, value: object) -> object:
        chance = self._chance
        match chance.random():
            case share if share < 0.4:
                return chance.choice(self._values[name])  # another engine's, transfer's, incarnation's
            case share if share < 0.45:
                return chance.choice(self._values[chance.choice(list(self._values))])
            case _:
                return self._near(value)

    def _near(self, value: object) -> object:
        """A value at the bounds of its type, or beside it."""
        chance = self._chance
        match value:
            case bool():
                return not value
            case int():
                return chance.choice((0, 1, -1, max(value - 1, -(1 << 62)), min(value + 1, HUGE[-1]), *HUGE))
            case float():
                return chance.choice((0.0, -1.0, -value, 1e308, float("nan"), float("inf"), value * 2))
            case str():
                return chance.choice((*TEXTS, value + "x", value[:-1], value + "/path", value.upper()))
            case bytes():
                return chance.choice((b"", value[:-1], value + b"x", chance.randbytes(len(value))))
            case list() if value:
                place = chance.randrange(len(value))
                before, item, after = value[:place], value[place], value[place + 1 :]
                if chance.random() < 0.6:
                    return [*before, self._near(item), *after]
                return chance.choice(([*before, *after], [*value, item], value[::-1], []))
            case _:
                return chance.choice(([], [[]], [[[0, 1]]], {}, None, 0))

    @staticmethod
    def _remember(table: BoundedDict[Any, deque[Any]], key: object, value: object, limit: int) -> None:
        kept = table.get(key)
        if kept is None:
            kept = table[key] = deque(maxlen=limit)
        if not kept or kept[-1] != value:
            kept.append(value)


def _body(payload: bytes) -> Body | None:
    try:
        body = msgpack.unpackb(payload)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException):
        return None
    return body if isinstance(body, dict) and all(isinstance(name, str) for name in body) else None
