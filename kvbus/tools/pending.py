"""Which transfers have begun and not ended, as far as a listener can tell. Pure, bounded.

The one rule: each message is believed. Registrations and completions from before we listened are unknown, and a
transfer that ends without a message (a block lease that runs out, a killed engine) stays pending.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvbus.bounded import BoundedDict
from kvbus.wire import (
    Cancel,
    Delivered,
    Message,
    PrefillCompleted,
    PrefillFailed,
    PrefillProgress,
    Registration,
    RegistrationAck,
    Release,
    TransferDone,
    TransferFailed,
    TransferStarted,
    Wanted,
    blocks,
)

MAX_OPEN = 1 << 16
MAX_ENDED = 1 << 14
MAX_RANKS = 1024


class Stage(StrEnum):
    """What a transfer waits for."""

    NO_COMPLETION = "no completion"
    NO_REGISTRATION = "no registration"
    NOT_POSTED = "WRITE not posted"
    WRITING = "WRITE under way"
    NOT_DELIVERED = "not delivered"


@dataclass(frozen=True, slots=True)
class PendingRow:
    """One transfer. Engines are empty and numbers None until a message names them."""

    transfer_id: str
    attempt: int | None
    stage: Stage
    source_engine: str
    sink_engine: str
    blocks: int | None
    prompt_tokens: int | None
    age_s: float


Source = tuple[str, int]


@dataclass(slots=True)
class _OpenTransfer:
    since: float
    attempt: int = 0
    source: Source | None = None
    sink: str = ""
    registration: Registration | None = None
    completion: PrefillCompleted | None = None
    started: bool = False
    ranks: int = 0
    done: set[int] = field(default_factory=set)

    def start_attempt(self, attempt: int) -> None:
        """Forget what is known of an older attempt."""
        self.attempt, self.registration, self.started, self.ranks = attempt, None, False, 0
        self.done.clear()

    @property
    def stage(self) -> Stage | None:
        if self.ranks and len(self.done) >= min(self.ranks, MAX_RANKS):
            return Stage.NOT_DELIVERED
        if self.started:
            return Stage.WRITING
        if self.registration is not None:
            return Stage.NOT_POSTED if self.completion is not None else Stage.NO_COMPLETION
        return Stage.NO_REGISTRATION if self.completion is not None else None


@dataclass(frozen=True, slots=True)
class _EndedTransfer:
    """``completion``: its KV may still be there, for an attempt above ``attempt``."""

    attempt: int
    source: Source | None
    completion: PrefillCompleted | None = None


class PendingTable:
    """See the module's docstring. ``unkept`` counts messages about transfers for which there was no room."""

    def __init__(self, max_open: int = MAX_OPEN) -> None:
        self._max_open = max_open
        self._open: dict[str, _OpenTransfer] = {}
        self._ended: BoundedDict[str, _EndedTransfer] = BoundedDict(MAX_ENDED)
        self.unkept = 0

    def hear(self, message: Message, now: float) -> None:
        match message:
            case Registration():
                self._register(message, now)
            case PrefillCompleted():
                self._complete(message, now)
            case TransferStarted() | TransferDone():
                self._write(message, now)
            case Wanted(key, _, sink) if key in self._open:
                self._open[key].sink = sink
            case PrefillProgress(key, engine, incarnation) if key in self._open:
                self._open[key].source = (engine, incarnation)
            case RegistrationAck():
                self._acknowledge(message)
            case TransferFailed(key, _, _, attempt):
                self._close(key, attempt, kept=True)
            case PrefillFailed(key, engine, incarnation):
                held = self._open.get(key)
                if held is None or held.source in (None, (engine, incarnation)):  # else another engine took over
                    self._close(key, held.attempt if held is not None else 0)
            case Cancel():
                self._cancel(message)
            case Delivered(key, attempt) | Release(key, attempt):
                self._close(key, attempt)
            case _:
                pass

    def pending(self, now: float) -> tuple[PendingRow, ...]:
        """Oldest first. Ages count from the first message about a transfer."""
        rows = [_row(key, held, stage, now) for key, held in self._open.items() if (stage := held.stage) is not None]
        return tuple(sorted(rows, key=lambda row: (-row.age_s, row.transfer_id)))

    def _register(self, message: Registration, now: float) -> None:
        held = self._find(message.transfer_id, message.attempt, None, now)
        if held is not None and message.attempt >= held.attempt:
            if message.attempt > held.attempt:
                held.start_attempt(message.attempt)
            held.registration, held.sink = message, message.sink_engine

    def _complete(self, message: PrefillCompleted, now: float) -> None:
        source = (message.source_engine, message.source_incarnation)
        held = self._find(message.transfer_id, 0, source, now)
        if held is None:
            return
        known = held.completion
        # Decode engines that wait without blocks are told of the completion, too, but not of its blocks.
        if known is None or held.source != source or not known.blocks:
            held.completion, held.source = message, source

    def _write(self, message: TransferStarted | TransferDone, now: float) -> None:
        held = self._find(message.transfer_id, message.attempt, None, now)
        if held is None or message.attempt < held.attempt:
            return
        if message.attempt > held.attempt:
            held.start_attempt(message.attempt)
        held.started, held.ranks = True, message.ranks
        held.source = (message.source_engine, message.source_incarnation)
        if isinstance(message, TransferDone) and len(held.done) < MAX_RANKS:
            held.done.add(message.rank)

    def _acknowledge(self, ack: RegistrationAck) -> None:
        held = self._open.get(ack.transfer_id)
        if held is None or held.attempt != ack.attempt:
            return
        held.source = (ack.source_engine, ack.source_incarnation)
        if ack.refused:
            self._close(ack.transfer_id, ack.attempt)

    def _cancel(self, cancel: Cancel) -> None:
        held = self._open.get(cancel.transfer_id)
        if cancel.release or held is None or held.completion is None:
            self._close(cancel.transfer_id, cancel.attempt)
        elif cancel.attempt >= held.attempt:
            held.start_attempt(cancel.attempt)  # the KV is kept for another attempt

    def _find(self, key: str, attempt: int, source: Source | None, now: float) -> _OpenTransfer | None:
        """The transfer, added if it is new; None if it has ended and this message is late, or if there is no room."""
        if (held := self._open.get(key)) is not None:
            return held
        over = self._ended.get(key)
        if over is not None:
            is_elsewhere = None not in (source, over.source) and source != over.source
            if attempt <= over.attempt and not is_elsewhere:
                return None
        if len(self._open) >= self._max_open:
            self.unkept += 1
            return None
        held = self._open[key] = _OpenTransfer(now)
        if over is not None:
            del self._ended[key]
            held.completion, held.source = over.completion, over.source
            held.attempt = over.attempt
        return held

    def _close(self, key: str, attempt: int, *, kept: bool = False) -> None:
        """This attempt is over; ``kept``: the prefill engine may hold the KV for the next one."""
        held = self._open.get(key)
        if held is not None and attempt < held.attempt:
            return
        over = self._ended.get(key)
        if held is None and over is not None and attempt < over.attempt:
            return
        self._open.pop(key, None)
        if held is not None:
            self._ended[key] = _EndedTransfer(attempt, held.source, held.completion if kept else None)
        else:
            self._ended[key] = _EndedTransfer(attempt, over.source if over is not None else None)


def _row(key: str, held: _OpenTransfer, stage: Stage, now: float) -> PendingRow:
    registration, completion = held.registration, held.completion
    both = [each for each in (registration, completion) if each is not None]
    tokens = completion.tokens if completion is not None else None
    return PendingRow(
        transfer_id=key,
        attempt=held.attempt if registration is not None or held.started else None,
        stage=stage,
        source_engine=held.source[0] if held.source is not None else "",
        sink_engine=held.sink,
        blocks=blocks.count(both[0].blocks) if both else None,
        prompt_tokens=registration.prompt_tokens if registration is not None else tokens,
        age_s=now - held.since,
    )
