"""Arrivals: which receives of one rank of a decode engine are complete, each reported exactly once.

vLLM hands a request's blocks on the moment a rank reports its receive as finished, and dies of an id it does not
know; so an attempt is reported once, only after the scheduler half has announced it, and never again.

Pure. Called by :class:`kvbus.engine.rank.Rank` only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvbus.bounded import BoundedDict
from kvbus.wire import MAX_TOKEN_ID, NO_TOKEN

MAX_EARLY = 1 << 12
MAX_REPORTED = 1 << 13


@dataclass(frozen=True, slots=True)
class Landed:
    """One prefill rank's WRITE is in this rank's memory; ``writers`` ranks write here for this request.

    ``first_token``: the one that the prefill sampled, if it was asked for.
    """

    request_id: str
    attempt: int
    source_rank: int
    writers: int
    first_token: int = NO_TOKEN

    def encode(self) -> str:
        """The text that travels with the WRITE; the inverse of :meth:`decode`."""
        token = f"!{self.first_token}" if self.first_token != NO_TOKEN else ""
        return f"{self.request_id}:{self.attempt}:{self.source_rank}:{self.writers}{token}"

    @classmethod
    def decode(cls, text: str) -> Landed | None:
        """None for anything else than what :meth:`encode` makes."""
        request_id, *parts = text.rsplit(":", 3)
        if len(parts) != 3:
            return None
        parts[2], mark, token = parts[2].partition("!")
        parts += [token] if mark else []
        if not all(part.isascii() and part.isdigit() and len(part) <= 10 for part in parts):
            return None
        attempt, source_rank, writers, first_token = (*(int(part) for part in parts), *([] if mark else [NO_TOKEN]))
        if not 0 <= source_rank < writers * 1024 or writers < 1 or first_token > MAX_TOKEN_ID:
            return None
        return cls(request_id, attempt, source_rank, writers, first_token)


@dataclass(frozen=True, slots=True)
class Arrived:
    """Report this to vLLM: the receive of ``request_id`` is over; ``ok`` is whether its KV is here."""

    request_id: str
    ok: bool
    first_token: int = NO_TOKEN


@dataclass(slots=True)
class _Expected:
    attempt: int
    landed: set[int] = field(default_factory=set)
    first_token: int = NO_TOKEN


class Arrivals:
    """The table of receives of one rank."""

    def __init__(self, max_early: int = MAX_EARLY) -> None:
        self._expected: dict[str, _Expected] = {}
        self._early: BoundedDict[str, dict[int, Landed]] = BoundedDict(max_early)
        self._reported: BoundedDict[str, int] = BoundedDict(MAX_REPORTED)
        self.rejected: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._expected)

    def expect(self, request_id: str, attempt: int) -> list[Arrived]:
        """The scheduler half has registered this request: this attempt's notifications count from now on."""
        if request_id in self._expected or self._reported.get(request_id, 0) >= attempt:
            return self._reject("expected again")
        self._expected[request_id] = _Expected(attempt)
        early = self._early.pop(request_id, {})
        return [arrived for landed in early.values() for arrived in self.land(landed)]

    def land(self, landed: Landed) -> list[Arrived]:
        """A notification came with a WRITE."""
        expected = self._expected.get(landed.request_id)
        if expected is None:
            if self._reported.get(landed.request_id, 0) >= landed.attempt:
                return self._reject("late notification")
            self._early.setdefault(landed.request_id, {})[landed.source_rank] = landed
            return []
        if landed.attempt != expected.attempt:
            return self._reject("notification of another attempt")
        expected.landed.add(landed.source_rank)
        expected.first_token = landed.first_token
        if len(expected.landed) < landed.writers:
            return []
        return self._report(landed.request_id, ok=True)

    def abandon(self, request_id: str) -> list[Arrived]:
        """The scheduler half says that nothing is written for this request any more."""
        if request_id not in self._expected:
            return self._reject("abandoned after report")
        return self._report(request_id, ok=False)

    def _report(self, request_id: str, *, ok: bool) -> list[Arrived]:
        expected = self._expected.pop(request_id)
        self._reported[request_id] = expected.attempt
        return [Arrived(request_id, ok, expected.first_token if ok else NO_TOKEN)]

    def _reject(self, reason: str) -> list[Arrived]:
        self.rejected[reason] = self.rejected.get(reason, 0) + 1
        return []
