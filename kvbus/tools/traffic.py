"""What `kvbus top` knows: engines by their heartbeats, rates and waits by what prefill ranks say. Pure, bounded.

The one rule: times are the listener's own, and a message that is repeated counts once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from kvbus.bounded import BoundedDict
from kvbus.protocol import MAX_PEERS, Membership, PeerLeft
from kvbus.wire import HISTORY_SUFFIX, Bye, Heartbeat, Message, PrefillFailed, TransferDone, TransferFailed

RATE_WINDOW_S = 10
WINDOW_S = 60.0
GONE_AFTER_S = 5.0
MAX_SAMPLES = 1 << 16
MAX_REMEMBERED = 1 << 14
MAX_GONE = 64
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class EngineRow:
    """An engine. Rates are of what it wrote into others; ``failures`` are its prefills and transfers that failed.

    ``hit_rate``: which share of the prompts was in its prefix cache, of the requests that have ended since it started;
    None if none has.
    """

    engine: str
    role: str
    state: str
    model: str
    requests: int
    queued_tokens: int
    free_blocks: int
    total_blocks: int
    heartbeat_age_s: float
    transfers_per_s: float
    mib_per_s: float
    failures: int
    hit_rate: float | None = None


@dataclass(frozen=True, slots=True)
class WaitRow:
    """How long ``count`` WRITEs of one rank each waited in the last :data:`WINDOW_S`, or took."""

    what: str
    count: int
    p50_ms: float
    p90_ms: float
    max_ms: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One picture. ``transfers``, ``written_bytes``, ``failures`` and ``undecodable`` count since the start."""

    listened_s: float
    engines: tuple[EngineRow, ...]
    waits: tuple[WaitRow, ...]
    transfers_per_s: float
    mib_per_s: float
    transfers: int
    written_bytes: int
    failures: int
    undecodable: int


class Rate:
    """Transfers and bytes for each of the last :data:`RATE_WINDOW_S` seconds."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, int, int]] = deque(maxlen=RATE_WINDOW_S)

    def add(self, now: float, transfers: int, nbytes: int) -> None:
        second = math.floor(now)
        if self._seconds and self._seconds[-1][0] == second:
            _, more, more_bytes = self._seconds.pop()
            transfers, nbytes = transfers + more, nbytes + more_bytes
        self._seconds.append((second, transfers, nbytes))

    def per_s(self, now: float, since: float) -> tuple[float, float]:
        """Transfers and MiB per second, of someone who listens since ``since``."""
        first = math.floor(now) - RATE_WINDOW_S + 1
        span_s = max(now - max(first, since), 0.1)
        counted = [each for each in self._seconds if each[0] >= first]
        return sum(each[1] for each in counted) / span_s, sum(each[2] for each in counted) / MIB / span_s


class Traffic:
    """See the module's docstring. ``now`` is seconds, monotonic, everywhere."""

    def __init__(self, now: float) -> None:
        self._since = now
        self._membership = Membership(dead_after_s=GONE_AFTER_S)
        self._beats: dict[str, tuple[Heartbeat, float]] = {}
        self._gone: BoundedDict[str, tuple[Heartbeat, float, float, str]] = BoundedDict(MAX_GONE)
        self._rates: BoundedDict[str, Rate] = BoundedDict(MAX_PEERS)
        self._failures: BoundedDict[str, int] = BoundedDict(MAX_PEERS)
        self._total = Rate()
        self._samples: deque[tuple[float, TransferDone]] = deque(maxlen=MAX_SAMPLES)
        self._said: BoundedDict[Hashable, None] = BoundedDict(MAX_REMEMBERED)
        self._transfers = self._written_bytes = self._failed = 0
        self.undecodable = 0

    def hear(self, message: Message, now: float) -> None:
        match message:
            case Heartbeat() | Bye():
                self._leave(self._membership.hear(message, now), now)
                if isinstance(message, Heartbeat) and self._membership.get(message.engine) is message:
                    self._beats[message.engine] = (message, now)
                    self._gone.pop(message.engine, None)
            case TransferDone(transfer_id, source, incarnation, attempt, rank):
                if self._is_new(("done", transfer_id, source, incarnation, attempt, rank)):
                    self._count(message, now)
            case TransferFailed(transfer_id, source, incarnation, attempt):
                if self._is_new(("failed", transfer_id, source, incarnation, attempt)):  # for whichever of its ranks
                    self._fail(source)
            case PrefillFailed(transfer_id, source, incarnation) if not transfer_id.endswith(HISTORY_SUFFIX):
                if self._is_new(("prefill", transfer_id, source, incarnation)):
                    self._fail(source)
            case _:
                pass

    def tick(self, now: float) -> None:
        """Time has passed while we were connected."""
        self._leave(self._membership.tick(now), now)
        while self._samples and self._samples[0][0] < now - WINDOW_S:
            self._samples.popleft()
        for engine in [engine for engine, (_, _, at, _) in self._gone.items() if at < now - WINDOW_S]:
            del self._gone[engine]

    def excuse_silence(self, now: float) -> None:
        """Time has passed while we were not."""
        self._membership.excuse_silence(now)

    def snapshot(self, now: float) -> Snapshot:
        self.tick(now)
        rows = [self._row(beat, at, now, beat.state.value) for beat, at in self._beats.values()]
        rows += [self._row(beat, at, now, f"gone: {why}") for beat, at, _, why in self._gone.values()]
        transfers_per_s, mib_per_s = self._total.per_s(now, self._since)
        return Snapshot(
            listened_s=now - self._since,
            engines=tuple(sorted(rows, key=lambda row: (row.role == "decode", row.role, row.engine))),
            waits=self._waits(),
            transfers_per_s=transfers_per_s,
            mib_per_s=mib_per_s,
            transfers=self._transfers,
            written_bytes=self._written_bytes,
            failures=self._failed,
            undecodable=self.undecodable,
        )

    def _leave(self, changes: Sequence[object], now: float) -> None:
        for change in changes:
            if isinstance(change, PeerLeft) and change.engine in self._beats:
                beat, at = self._beats.pop(change.engine)
                self._gone[change.engine] = (beat, at, now, change.reason)

    def _count(self, done: TransferDone, now: float) -> None:
        transfers = int(done.rank == 0)  # each rank says so of its part
        for rate in (self._total, self._rates.setdefault(done.source_engine, Rate())):
            rate.add(now, transfers, done.nbytes)
        self._transfers += transfers
        self._written_bytes += done.nbytes
        self._samples.append((now, done))

    def _fail(self, engine: str) -> None:
        self._failed += 1
        self._failures[engine] = self._failures.get(engine, 0) + 1

    def _is_new(self, key: Hashable) -> bool:
        if key in self._said:
            return False
        self._said[key] = None
        return True

    def _row(self, beat: Heartbeat, heard_at: float, now: float, state: str) -> EngineRow:
        rate = self._rates.get(beat.engine)
        transfers_per_s, mib_per_s = rate.per_s(now, self._since) if rate is not None else (0.0, 0.0)
        return EngineRow(
            engine=beat.engine,
            role=beat.role.value,
            state=state,
            model=beat.model,
            requests=beat.requests,
            queued_tokens=beat.queued_tokens,
            free_blocks=beat.free_blocks,
            total_blocks=beat.total_blocks,
            heartbeat_age_s=now - heard_at,
            transfers_per_s=transfers_per_s,
            mib_per_s=mib_per_s,
            failures=self._failures.get(beat.engine, 0),
            hit_rate=min(1.0, beat.cached_tokens / beat.prompt_tokens) if beat.prompt_tokens else None,
        )

    def _waits(self) -> tuple[WaitRow, ...]:
        done = [each for _, each in self._samples]
        by_side = [
            _wait(f"match wait, {side} late", [each.match_wait_s for each in done if each.late_side == side])
            for side in ("prefill", "decode")
        ]
        queue = _wait("match to post of the WRITE", [each.queue_s for each in done])
        return (*by_side, queue, _wait("WRITE", [each.write_s for each in done]))


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of them do not exceed; 0 if there are none."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def _wait(what: str, seconds: list[float]) -> WaitRow:
    ordered = sorted(1000 * each for each in seconds)
    return WaitRow(what, len(ordered), quantile(ordered, 0.5), quantile(ordered, 0.9), ordered[-1] if ordered else 0.0)
