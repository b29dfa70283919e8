"""Server-sent events of a stream of tokens: where the first token is, and where an event ends. Pure.

An engine opens its stream, and may send a role, before it has a token. What goes wrong from then on it says in an
event, under status 200. The APIs differ in their events, but not in ways that contradict each other.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

MAX_HEAD_BYTES = 1 << 20
_NOT_A_TOKEN = ("role", "refusal")
_OPENINGS = frozenset({"response.created", "response.queued", "response.in_progress", "message_start", "ping"})


@dataclass(frozen=True, slots=True)
class Nothing:
    """No token yet."""


@dataclass(frozen=True, slots=True)
class Token:
    """From here on the client has output that cannot be taken back."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The engine says in the stream that it failed."""

    status: int
    message: str
    body: bytes


def look(head: bytes) -> Nothing | Token | Failure:
    """What the beginning of a stream holds. An event that is not understood counts as a token: the client gets it."""
    if len(head) > MAX_HEAD_BYTES:
        return Token()
    for line in head[: head.rfind(b"\n") + 1].splitlines():
        name, _, value = line.partition(b":")
        if name != b"data":
            continue  # a comment, a blank line, an event's name
        try:
            event = json.loads(value)
        except ValueError:
            return Token()
        found = _look_at(event)
        if not isinstance(found, Nothing):
            return found
    return Nothing()


def _look_at(event: Any) -> Nothing | Token | Failure:
    if not isinstance(event, dict):
        return Token()
    if event.get("type") in _OPENINGS:
        return Nothing()
    error = event if event.get("type") == "error" and "error" not in event else event.get("error")
    if isinstance(error, dict):
        code = error.get("code")
        return Failure(
            code if type(code) is int and 400 <= code < 600 else 500,
            str(error.get("message", "")),
            json.dumps(event).encode(),
        )
    choices = event.get("choices")
    if not isinstance(choices, list) or any(_has_content(choice) for choice in choices):
        return Token()
    return Nothing() if choices else Token()


def _has_content(choice: Any) -> bool:
    if not isinstance(choice, dict) or choice.get("finish_reason") or choice.get("text") or choice.get("token_ids"):
        return True
    delta = choice.get("delta")
    return isinstance(delta, dict) and any(value for key, value in delta.items() if key not in _NOT_A_TOKEN)


def whole_events(held: bytes) -> tuple[bytes, bytes]:
    """What of a stream may be passed on now, and the rest. Half an event must not go out: the engine may die there."""
    end = max(held.rfind(b"\n\n") + 2, held.rfind(b"\n\r\n") + 3)
    return (held[:end], held[end:]) if end > 2 else (b"", held)


def error_event(body: bytes, *, named: bool = False) -> bytes:
    """An error in the middle of a stream. OpenAI's clients raise it; Anthropic's do if it is ``named``."""
    return (b"\nevent: error" if named else b"") + b"\ndata: " + body + b"\n\n"
