"""A message as one line, for people or as JSON, and which messages `kvbus tap` shows. Pure.

The one rule: whatever peers put into a field cannot break the line or reach the terminal as a control sequence.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from dataclasses import dataclass

from kvbus.errors import ConfigError
from kvbus.wire import KINDS, Heartbeat, LeaseEcho, Message, Pulse, blocks

MAX_SHOWN_CHARS = 160
_CUT_TO = {"digest": 8, "traceparent": 16}
NOISE = frozenset(cls.KIND for cls in (Heartbeat, Pulse, LeaseEcho))


@dataclass(frozen=True, slots=True)
class Undecodable:
    """A payload that is no message: why, and how long it is."""

    reason: str
    size_bytes: int


Decoded = Message | Undecodable


def _bare(kind: str) -> str:
    """Without the mark of requests and replies, which shells take for a pattern."""
    return kind.rstrip("?!")


@dataclass(frozen=True, slots=True)
class Selection:
    """Which messages are shown: of these kinds, or, without any, all but noise; of one transfer, if it is named."""

    kinds: frozenset[str] = frozenset()
    transfer_id: str = ""
    noise: bool = False

    def wants(self, said: Decoded) -> bool:
        if isinstance(said, Undecodable):
            return not self.kinds and not self.transfer_id
        if self.transfer_id and getattr(said, "transfer_id", None) != self.transfer_id:
            return False
        return _bare(said.KIND) in self.kinds if self.kinds else self.noise or said.KIND not in NOISE


def parse_kinds(text: str) -> frozenset[str]:
    """Read ``reg,completed``.

    Raises:
        ConfigError: a kind that does not exist.
    """
    allowed = sorted({_bare(kind) for kind in KINDS})
    wanted = [_bare(name.strip()) for name in text.split(",")] if text else []
    for name in wanted:
        if name not in allowed:
            raise ConfigError("--kind", name, ", ".join(allowed))
    return frozenset(wanted)


def line(clock: str, subject: str, said: Decoded) -> str:
    """For people: long values are shortened, empty ones left out."""
    head = f"{clock} {printable(subject)}"
    if isinstance(said, Undecodable):
        return f"{head}  ? {printable(said.reason, spaces=True)}, {said.size_bytes} bytes"
    shown = [
        f"{field.name}={_short(field.name, value)}"
        for field in dataclasses.fields(said)
        if (value := getattr(said, field.name)) not in ("", (), b"")
    ]
    return "  ".join([head, said.KIND, " ".join(shown)]).rstrip()


def json_line(wall_s: float, subject: str, said: Decoded) -> str:
    """For programs: every field whole; bytes as base64."""
    about = {"time": round(wall_s, 6), "subject": subject}
    if isinstance(said, Undecodable):
        return json.dumps({**about, "kind": None, "error": said.reason, "bytes": said.size_bytes})
    fields = {field.name: getattr(said, field.name) for field in dataclasses.fields(said)}
    return json.dumps({**about, "kind": said.KIND, **fields}, default=_as_text)


def printable(text: str, *, spaces: bool = False) -> str:
    """``text``, escaped and in quotes if it could be taken for anything else than one word."""
    cut = text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 1] + "…"
    return cut if cut.isprintable() and (spaces or " " not in cut) else ascii(cut)


def _short(name: str, value: object) -> str:
    match value:
        case str() if len(value) > _CUT_TO.get(name, MAX_SHOWN_CHARS):
            return printable(value[: _CUT_TO.get(name, MAX_SHOWN_CHARS)] + "…")
        case str():
            return printable(value)
        case bytes():
            return f"{len(value)} bytes"
        case float():
            return f"{value:.6g}"
        case int() if name.endswith("incarnation") and value > 10**6:
            return f"…{value % 10**6:06}"  # ns since the epoch: its last digits tell two of them apart
        case tuple() if name == "blocks":
            return _blocks(value)
        case tuple():
            return f"{len(value)} {'pairs' if name == 'compat' else name}"
        case _:
            return str(value)


def _blocks(runs: blocks.BlockRuns) -> str:
    groups = f" in {len(runs)} groups" if len(runs) > 1 else ""
    return f"{blocks.count(runs)} blocks{groups}"


def _as_text(value: object) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError(type(value).__name__)
