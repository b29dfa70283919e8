"""Which engines serve one request, and which takes over when one of them is lost. Pure.

The one rule: until the first token is out any engine may be lost, and the client only gets its token later. From then
on nothing is sent a second time. Only :meth:`Failover.apply` changes the state; an event that comes too late changes
nothing.

A lost prefill engine is replaced under the next attempt, and the decode engine must agree, since it may have the KV
already. A lost decode engine is replaced without a second prefill: the prefill engine keeps the KV until the first
token is out. Called by :class:`kvbus.router.request.serving.Serving` only.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from kvbus.router.fleet import Key, key_of
from kvbus.router.http import Answer
from kvbus.router.request.failover_events import (
    AskRebind,
    AwaitVerdict,
    ClientLeft,
    Effect,
    EngineLeft,
    Event,
    Fail,
    PassOn,
    RebindAnswered,
    Refuse,
    Release,
    SendDecode,
    SendPrefill,
    SinkAnswered,
    SinkComputes,
    SinkLost,
    SourceAnswered,
    SourceLost,
    SourceRefused,
    TookOver,
    TransferLost,
    VerdictDue,
)
from kvbus.wire import FIRST_ATTEMPT, Heartbeat


class Options(Protocol):
    """The engines that can be chosen now; see :class:`kvbus.router.fleet.policy.Choice`."""

    def source(self, sink: Heartbeat | None, without: Collection[Key]) -> Heartbeat | None: ...

    def sink(self, source: Heartbeat | None, without: Collection[Key]) -> Heartbeat | None: ...


class _Prefill(Enum):
    NONE = "only decode computes the prompt"
    ASKING = "decode is asked to take the KV from another engine"
    RUNNING = "running"
    DONE = "done"


@dataclass(slots=True)
class Failover:
    """See the module's docstring.

    Args:
        source: None if ``sink`` computes the prompt itself.
        max_takeovers: how many engines, of either kind, may be replaced.
        takeover_s: how long a decode engine shall wait for another prefill engine, seconds.
    """

    source: Heartbeat | None
    sink: Heartbeat
    max_takeovers: int
    takeover_s: float
    attempt: int = FIRST_ATTEMPT
    over: bool = False
    _prefill: _Prefill = _Prefill.NONE
    _prefill_leg: int = FIRST_ATTEMPT  # the attempt under which each leg was sent
    _decode_leg: int = FIRST_ATTEMPT
    _takeovers: int = 0
    _waits_s: float = 0.0  # the takeover_s that the decode engine was told
    _refusal: Answer | None = None
    _asked: TookOver | None = None
    _kv_holder: Heartbeat | None = None  # its WRITE failed; if the decode engine is to blame, its KV is still wanted
    _lost: set[Key] = field(default_factory=set)

    def begin(self, options: Options) -> list[Effect]:
        """Both legs go out at once."""
        effects: list[Effect] = []
        if self.source is not None:
            self._prefill = _Prefill.RUNNING
            effects.append(SendPrefill(self.source, self.attempt))
        return [*effects, self._send_decode(options)]

    def apply(self, event: Event, options: Options) -> list[Effect]:
        """Apply one event."""
        if self.over and not isinstance(event, ClientLeft):
            return []
        match event:
            case SourceAnswered(attempt):
                if self._prefill is _Prefill.RUNNING and attempt == self._prefill_leg:
                    self._prefill = _Prefill.DONE
                return []
            case SourceRefused(attempt, answer):
                if self._prefill is not _Prefill.RUNNING or attempt != self._prefill_leg:
                    return []
                self._refusal = answer
                return [AwaitVerdict()]
            case SourceLost(attempt, why):
                current = self._prefill is _Prefill.RUNNING and attempt == self._prefill_leg
                return self._lose_source(why, options) if current else []
            case SinkAnswered(attempt, status):
                return self._answered(status) if attempt == self._decode_leg else []
            case SinkLost(attempt, why, answer):
                return self._lose_sink(why, answer, options) if attempt == self._decode_leg else []
            case RebindAnswered(attempt, refused):
                return self._rebound(attempt, refused)
            case EngineLeft(engine, incarnation, why):
                return self._leave((engine, incarnation), why, options)
            case TransferLost():
                return self._lose_transfer(event, options)
            case SinkComputes(engine, attempt):
                return self._end_prefill() if (engine, attempt) == (self.sink.engine, self.attempt) else []
            case VerdictDue():
                return self._refuse() if self._refusal is not None else []
            case ClientLeft():
                self.over = True
                return self._release()

    def _lose_transfer(self, lost: TransferLost, options: Options) -> list[Effect]:
        current = self.source is not None and (lost.engine, lost.attempt) == (self.source.engine, self.attempt)
        if not current or self._refusal is not None:
            return []
        if lost.kept and self._prefill is _Prefill.RUNNING:  # the bus was faster than the answer to its leg
            self._prefill = _Prefill.DONE
        kept = self.source if self._prefill is _Prefill.DONE else None
        effects = self._lose_source(lost.why, options, keep=kept is not None)
        self._kv_holder = kept
        return effects

    def _end_prefill(self) -> list[Effect]:
        """Decode needs it no more. A refusal of the prompt is still waited for: it is the better answer."""
        if self._refusal is not None:
            return []
        effects = self._release()
        self.source, self._prefill, self._asked, self._kv_holder = None, _Prefill.NONE, None, None
        return effects

    def _answered(self, status: int) -> list[Effect]:
        self.over = True
        return [*(self._release() if status >= 400 else []), PassOn()]

    def _refuse(self) -> list[Effect]:
        assert self._refusal is not None
        self.over = True
        return [*self._release(), Refuse(self._refusal)]

    def _leave(self, gone: Key, why: str, options: Options) -> list[Effect]:
        if self._kv_holder is not None and gone == key_of(self._kv_holder):
            self._kv_holder = None
        if gone == key_of(self.sink):
            others = options.sink(None, self._lost | {gone}) if self._may_take_over else None
            # It may have lost only the bus: if no engine can take over, its leg decides.
            return self._lose_sink(why, None, options) if others is not None or self._refusal is not None else []
        if self.source is not None and gone == key_of(self.source) and self._refusal is None:
            return self._lose_source(why, options)
        return []

    def _lose_source(self, why: str, options: Options, *, keep: bool = False) -> list[Effect]:
        lost, effects = self.source, [] if keep else self._release()
        assert lost is not None
        self._kv_holder = None
        self._lost.add(key_of(lost))
        needed = self._prefill is not _Prefill.DONE  # else decode probably has the KV
        self.source = options.source(self.sink, self._lost) if self._may_take_over else None
        self._asked = None
        if self.source is None:
            self._prefill = _Prefill.NONE
            if needed:
                effects.append(TookOver("prefill", lost.engine, self.sink.engine, self.attempt, why))
            if needed or self._waits_s:
                self.attempt += 1
                effects.append(AskRebind(self.sink, None, self.attempt))
            return effects
        self._prefill = _Prefill.ASKING
        self._takeovers += 1
        self.attempt += 1
        self._asked = TookOver("prefill", lost.engine, self.source.engine, self.attempt, why)
        return [*effects, AskRebind(self.sink, self.source, self.attempt)]

    def _rebound(self, attempt: int, refused: str) -> list[Effect]:
        if self._prefill is not _Prefill.ASKING or attempt != self.attempt or self.source is None:
            return []
        assert self._asked is not None
        if refused:  # decode has the KV, or computes it
            self.source, self._prefill = None, _Prefill.NONE
            return []
        self._prefill, self._prefill_leg, self._kv_holder = _Prefill.RUNNING, attempt, None
        return [self._asked, SendPrefill(self.source, attempt)]

    def _lose_sink(self, why: str, answer: Answer | None, options: Options) -> list[Effect]:
        lost = self.sink
        self._lost.add(key_of(lost))
        if self._refusal is not None:
            return self._refuse()
        if self._kv_holder is not None:
            self.source, self._prefill, self._kv_holder = self._kv_holder, _Prefill.DONE, None
        has_kv = self._prefill in (_Prefill.RUNNING, _Prefill.DONE)
        kept = self.source if has_kv else None
        sink = options.sink(kept, self._lost) if self._may_take_over else None
        effects: list[Effect] = []
        if sink is None and kept is not None and self._may_take_over:  # no other fits this prefill engine
            sink, kept, effects = options.sink(None, self._lost), None, self._release()
        if sink is None:
            self.over = True
            return [*self._release(), Refuse(answer) if answer is not None else Fail(lost.engine, why)]
        self.attempt += 1
        self._takeovers += 1
        self.sink = sink
        effects.append(TookOver("decode", lost.engine, sink.engine, self.attempt, why))
        if kept is None:
            self.source = options.source(sink, self._lost)
            self._prefill, self._prefill_leg = _Prefill.NONE, self.attempt
            if self.source is not None:
                self._prefill = _Prefill.RUNNING
                effects.append(SendPrefill(self.source, self.attempt))
        return [*effects, self._send_decode(options)]

    def _send_decode(self, options: Options) -> SendDecode:
        self._decode_leg = self.attempt
        self._waits_s = 0.0
        # After a prefill that is done the KV is there, or it was given back after a first token that did not arrive.
        # Either way it makes no sense to wait for another prefill engine.
        if self.source is not None and self._prefill is _Prefill.RUNNING:
            others = options.source(self.sink, self._lost | {key_of(self.source)})
            self._waits_s = self.takeover_s if others is not None else 0.0
        return SendDecode(self.sink, self.source, self.attempt, self._waits_s)

    def _release(self) -> list[Effect]:
        return [Release(self.source, self.sink, self.attempt)] if self.source is not None else []

    @property
    def _may_take_over(self) -> bool:
        return self._takeovers < self.max_takeovers
