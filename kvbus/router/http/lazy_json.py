"""A request's JSON object, parsed only as far as the router needs it: a long prompt is found and passed on unparsed.

To parse 30 MB holds an event loop for seconds, and to encode it again changes it. So only the members of the object are
found. Short ones are parsed; long ones stay :class:`Raw`, the bytes that the client sent. The engine parses those
anyway, and says what is wrong in them.

The one rule: no step here holds the loop for longer than :data:`SLICE_BYTES`, or :data:`MARKS`, take.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SHORT_BYTES = 1 << 16
SLICE_BYTES = 1 << 19
MARKS = 1 << 13  # brackets and quotes; so many take a few ms
MAX_DEPTH = 512
_SPACE = re.compile(rb"[ \t\n\r]*")
_STRUCTURE = re.compile(rb'["\[\]{}]')
_SCALAR = re.compile(rb"[^ \t\n\r,}\]]+")
_OPEN = b"[{"
_BACKSLASH = ord("\\")


@dataclass(frozen=True, slots=True)
class Raw:
    """A long JSON value as the client sent it. ``children``: how many strings, arrays and objects an array holds."""

    raw: memoryview
    children: int = 0

    @property
    def head(self) -> bytes:
        return bytes(self.raw[:SHORT_BYTES])

    @property
    def begins(self) -> bytes:
        """Its first two characters without spaces: the kind of the value, and of its first element."""
        return re.sub(rb"[ \t\n\r]", b"", self.head[:64])[:2]

    @property
    def items(self) -> int:
        """About how many numbers an array of numbers holds, estimated from its head."""
        head = self.head
        return 1 + head.count(b",") * len(self.raw) // len(head)


Content = bytes | bytearray


async def members(content: Content) -> dict[str, Any]:
    """The members of the JSON object ``content``.

    Raises:
        ValueError: it is not JSON, as far as it was read.
        TypeError: it is JSON, but no object.
    """
    if len(content) <= SHORT_BYTES:
        found = json.loads(content)
        if not isinstance(found, dict):
            raise TypeError(f"not a JSON object but {type(found).__name__}")
        return found
    at = _skip(content, 3 if content.startswith(b"\xef\xbb\xbf") else 0)
    body: dict[str, Any] = {}
    if content[at : at + 1] != b"{":
        raise ValueError(f"it does not begin with {{ but with {bytes(content[at : at + 20])!r}")
    at = _skip(content, at + 1)
    while content[at : at + 1] != b"}":
        if body:
            at = _skip(content, _expect(content, at, b","))
        end = await _end_of_string(content, at) if content[at : at + 1] == b'"' else -1
        if end < 0:
            raise ValueError(f"a member's name is missing at byte {at}")
        name = json.loads(content[at:end])
        at = _skip(content, _expect(content, _skip(content, end), b":"))
        end, children = await _end_of_value(content, at)
        short = end - at <= SHORT_BYTES
        body[name] = json.loads(content[at:end]) if short else Raw(memoryview(content)[at:end], children)
        at = _skip(content, end)
    if _skip(content, at + 1) != len(content):
        raise ValueError(f"there is more after its end, at byte {at + 1}")
    return body


def pieces(body: Mapping[str, Any]) -> list[Content | memoryview]:
    """The inverse of :func:`members`: a JSON object in pieces, its long values as the client sent them, not copied."""
    parts: list[Content | memoryview] = []
    for name, value in body.items():
        parts += [b"," if parts else b"{", json.dumps(name).encode(), b":"]
        parts.append(value.raw if isinstance(value, Raw) else json.dumps(value).encode())
    return [*(parts or [b"{"]), b"}"]


def _skip(content: Content, at: int) -> int:
    found = _SPACE.match(content, at)
    return found.end() if found is not None else at


def _expect(content: Content, at: int, what: bytes) -> int:
    if content[at : at + 1] != what:
        raise ValueError(f"{what.decode()!r} is missing at byte {at}")
    return at + 1


async def _end_of_string(content: Content, at: int) -> int:
    """Past the closing quote of the string that begins at ``at``."""
    close, marks = at, 0
    while True:
        close, marks = content.find(b'"', close + 1), marks + 1
        if close < 0:
            raise ValueError(f"the text that begins at byte {at} does not end")
        escapes = 0
        while content[close - 1 - escapes] == _BACKSLASH:
            escapes += 1
        if escapes % 2 == 0:
            return close + 1
        if marks % MARKS == 0:
            await asyncio.sleep(0)


async def _end_of_value(content: Content, at: int) -> tuple[int, int]:
    """Where the value that begins at ``at`` ends, and how many children it has."""
    if content[at : at + 1] == b'"':
        return await _end_of_string(content, at), 0
    if content[at : at + 1] not in (b"[", b"{"):
        scalar = _SCALAR.match(content, at)
        if scalar is None:
            raise ValueError(f"a value is missing at byte {at}")
        return scalar.end(), 0
    depth, children, marks, pause_at = 0, 0, 0, at + SLICE_BYTES
    while True:
        found = _STRUCTURE.search(content, at, pause_at)
        marks += 1
        if found is None or marks > MARKS:
            if found is None and pause_at >= len(content):
                raise ValueError("it ends before all its brackets are closed")
            at, marks = (pause_at if found is None else found.start()), 0
            pause_at = at + SLICE_BYTES
            await asyncio.sleep(0)
            continue
        mark, at = found[0], found.end()
        if mark == b'"':
            children += depth == 1
            close = content.find(b'"', at)
            # Nearly every string ends at the next quote. A call for each of a million would cost more than the rest.
            plain = close > 0 and content[close - 1] != _BACKSLASH
            at = close + 1 if plain else await _end_of_string(content, at - 1)
        elif mark in _OPEN:
            children += depth == 1
            depth += 1
            if depth > MAX_DEPTH:
                raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
        else:
            depth -= 1
            if not depth:
                return at, children
        pause_at = max(pause_at, at)
