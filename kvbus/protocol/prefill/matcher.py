"""The matcher: joins registrations and completions in one rank of a prefill engine, in whichever order they come.

The one rule: a WRITE is posted for an effect :class:`PostWrite` and for nothing else, by the thread that applied the
event, before it applies another one; so what was checked here still holds when the WRITE is posted.

Pure: time is an argument (seconds, monotonic), whatever a peer can send is answered with an effect. Called by
:class:`kvbus.engine.rank.Rank` only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvbus.bounded import BoundedDict, Deadlines
from kvbus.protocol import WRITE_LEASE_S
from kvbus.protocol.prefill.decode_peers import Epoch, Sinks
from kvbus.protocol.prefill.events import (
    Drain,
    Effect,
    Event,
    Introduce,
    PooledCancel,
    PooledRegistration,
    PostWrite,
    Reject,
    ReleaseBlocks,
    Released,
    Send,
    SinkJoined,
    SinkLeft,
    SinkRefused,
    WriteEnded,
)
from kvbus.protocol.prefill.transfer import Outcome, Stage, Tombstone, Transfer, mismatch, same, write_job
from kvbus.wire import (
    Cancel,
    CancelAck,
    Delivered,
    LeaseEcho,
    PrefillCompleted,
    PrefillFailed,
    PrefillProgress,
    Pulse,
    Registration,
    RegistrationAck,
    Release,
    TransferDone,
    TransferFailed,
    TransferStarted,
    Wanted,
    blocks,
)

MAX_TRANSFERS = 1 << 16
MAX_TOMBSTONES = 1 << 13


class Matcher:
    """The table of transfers of one rank; see the module's docstring.

    Args:
        engine, incarnation, rank, ranks: this rank's identity, put into every message.
        block_lease_s: how long the blocks of a completed prefill wait for a registration, seconds.
        pool_hold_s: how long an unclaimed registration from the pool is kept, seconds. The decode engine re-sends it.
        registration_hold_s: how long an acknowledged registration waits for its prefill, seconds.
        write_lease_s, pulse_number: see :mod:`kvbus.protocol.lease`.
    """

    def __init__(
        self,
        *,
        engine: str,
        incarnation: int,
        rank: int,
        ranks: int,
        block_lease_s: float = 30.0,
        pool_hold_s: float = 10.0,
        registration_hold_s: float = 600.0,
        write_lease_s: float = WRITE_LEASE_S,
        pulse_number: Callable[[], int] | None = None,
        max_transfers: int = MAX_TRANSFERS,
    ) -> None:
        self._engine, self._incarnation, self._rank, self._ranks = engine, incarnation, rank, ranks
        self._block_lease_s, self._pool_hold_s = block_lease_s, pool_hold_s
        self._registration_hold_s, self._max_transfers = registration_hold_s, max_transfers
        self._transfers: dict[str, Transfer] = {}
        self._sinks = Sinks(engine, incarnation, rank, write_lease_s, pulse_number)
        self._deadlines: Deadlines[str] = Deadlines()
        self._tombstones: BoundedDict[str, Tombstone] = BoundedDict(MAX_TOMBSTONES)
        self._draining = False
        self._released: BoundedDict[str, None] = BoundedDict(MAX_TOMBSTONES)

    @property
    def counts(self) -> dict[str, int]:
        """Sizes for metrics and tests: transfers by what they wait for."""
        held = self._transfers.values()
        return {
            "writing": sum(t.stage is Stage.WRITING for t in held),
            "written": sum(t.stage is Stage.WRITTEN for t in held),
            "awaiting_prefill": sum(t.completion is None for t in held),
            "awaiting_registration": sum(t.completion is not None and t.registration is None for t in held),
            "transfers": len(self._transfers),
        }

    def next_deadline(self) -> float | None:
        """When :meth:`tick` has something to do, None if never."""
        return self._deadlines.next()

    def apply(self, event: Event, now: float) -> list[Effect]:
        """Apply one event; the only way, with :meth:`tick`, that this table changes."""
        match event:
            case Registration():
                return self._register(event, now, direct=True)
            case PooledRegistration(registration):
                return self._register(registration, now, direct=False)
            case PrefillProgress():
                return self._announce(event, now)
            case PrefillCompleted():
                return self._complete(event, now)
            case PrefillFailed():
                return self._fail_prefill(event)
            case WriteEnded():
                return self._end_write(event, now)
            case Cancel():
                return self._cancel(event, now, direct=True)
            case PooledCancel(cancel):
                return self._cancel(cancel, now, direct=False)
            case Released(word):
                return self._release_unserved(word)
            case SinkJoined():
                return self._join(event, now)
            case SinkLeft():
                return self._leave(event)
            case SinkRefused():
                return self._refuse(event)
            case Wanted():
                return self._keep(event, now)
            case Delivered():
                return self._deliver(event)
            case Drain():
                return self._drain()
            case LeaseEcho():
                return self._match_all(event.sink_engine, now) if self._hear(event) else [Reject("stale epoch")]

    def pulse(self, now: float) -> Pulse:
        """The pulse to send now; see :mod:`kvbus.protocol.lease`."""
        return Pulse(self._engine, self._incarnation, self._rank, self._sinks.pulse(now))

    def tick(self, now: float) -> list[Effect]:
        """End what has waited too long: completions without registration, and registrations without prefill."""
        effects: list[Effect] = []
        for transfer_id in self._deadlines.pop_due(now):
            transfer = self._transfers.get(transfer_id)
            if transfer is None or transfer.stage is Stage.WRITING:
                continue
            if transfer.completion is None and not transfer.acknowledged and not transfer.lowest_attempt:
                del self._transfers[transfer_id]  # an unclaimed registration from the pool: not ours to answer
                effects.append(Reject("unclaimed registration"))
            else:
                effects += self._end(transfer_id, transfer, Outcome.EXPIRED)
        return effects

    def _register(self, registration: Registration, now: float, *, direct: bool) -> list[Effect]:
        if registration.source_incarnation not in (0, self._incarnation):
            return [Reject("for another incarnation")]
        if direct and not self._hear(registration):
            return [Reject("stale epoch")]
        bound = direct and registration.source_incarnation == self._incarnation
        if self._draining:
            return [self._ack(registration, refused=Outcome.DRAINED.value)] if direct else [Reject("draining")]
        key = registration.transfer_id
        sink = (registration.sink_engine, registration.sink_incarnation)
        if self._sinks.is_stale(*sink):
            return [Reject("stale incarnation")]
        if refusal := self._sinks.refusal(*sink):
            return [self._ack(registration, refused=refusal)] if direct else [Reject("unfit sink")]
        if tombstone := self._tombstones.get(key):
            return self._register_late(registration, tombstone, direct=direct)
        transfer = self._transfers.get(key)
        if transfer is None:
            if len(self._transfers) >= self._max_transfers:
                if not direct:
                    return [Reject("full")]
                self._tombstones[key] = Tombstone(Outcome.FULL, registration.attempt)  # decode frees its blocks for it
                return [self._ack(registration, refused=Outcome.FULL.value)]
            transfer = self._transfers[key] = Transfer()
        if registration.attempt < transfer.lowest_attempt:
            return [self._ack(registration, refused=Outcome.SUPERSEDED.value)] if direct else [Reject("stale attempt")]
        effects: list[Effect] = []
        held = transfer.registration
        repeated = held is not None and same(held, registration)
        if held is not None and not repeated and not transfer.bound and (bound or not direct):
            transfer.forget()  # anybody may have said it, in the pool: it does not stand against another word
            held = None
        if held is not None and not repeated and not direct:
            return [Reject("bound already")]
        if held is not None:
            if repeated and transfer.done is not None:
                return [Send(registration.sink_engine, transfer.done)]  # word of the end was lost
            if repeated and (transfer.bound or not bound):
                transfer.registration = registration
                # Re-sent, because it or its acknowledgement was lost or is still under way.
                again: list[Effect] = [self._ack(registration)] if transfer.acknowledged else []
                return again + self._match(key, transfer, now) or [Reject("duplicate registration")]
            if registration.attempt < held.attempt:
                transfer.close_before(registration.attempt + 1)
                superseded = self._ack(registration, refused=Outcome.SUPERSEDED.value)
                return [superseded if direct else Reject("stale attempt")]
            if not repeated and registration.attempt == held.attempt:
                used_up = direct and transfer.stage is Stage.WRITTEN
                return [self._ack(registration, refused=Outcome.DONE.value) if used_up else Reject("stale attempt")]
            if direct:
                transfer.highest_attempt = max(transfer.highest_attempt, registration.attempt)
            if transfer.stage is Stage.WRITING:
                # The old attempt's WRITE cannot be taken back; the new one is re-sent until it has ended.
                return [Reject("write in progress")]
            if not repeated:
                if transfer.acknowledged and transfer.done is None:
                    effects.append(self._ack(held, refused=Outcome.SUPERSEDED.value))
                transfer.close_attempt()
        if not repeated:
            transfer.registered_at = now
        transfer.registration, transfer.bound = registration, bound
        transfer.acknowledged = direct or transfer.announced or transfer.completion is not None
        effects += [self._ack(registration)] if transfer.acknowledged else []
        if self._sinks.get(*sink) is None:
            effects.append(Introduce(registration.sink_engine))
        if transfer.completion is None:
            hold = self._registration_hold_s if transfer.acknowledged else self._pool_hold_s
            self._deadlines.set(key, now + hold)
        return effects + self._match(key, transfer, now)

    def _keep(self, wanted: Wanted, now: float) -> list[Effect]:
        """L1: the decode engine's queue may be longer than the block lease. It also wants to know of the prefill."""
        key, sink = wanted.transfer_id, wanted.sink_engine
        if tombstone := self._tombstones.get(key):
            failed = tombstone.outcome is Outcome.NO_PREFILL and self._rank == 0
            return [Send(sink, self._prefill_failed(key))] if failed else [Reject("nothing to keep")]
        transfer = self._transfers.get(key)
        if transfer is None:
            if len(self._transfers) >= self._max_transfers:
                return [Reject("full")]
            transfer = self._transfers[key] = Transfer()
            self._deadlines.set(key, now + self._pool_hold_s)  # it is asked again
        if transfer.stage is Stage.WRITING:
            return [Reject("nothing to keep")]
        transfer.watching = sink
        transfer.highest_attempt = max(transfer.highest_attempt, wanted.attempt)
        if transfer.completion is not None:
            self._deadlines.set(key, now + self._block_lease_s)
        return self._tell_watcher(transfer, transfer.completion or transfer.progress)

    def _tell_watcher(self, transfer: Transfer, word: PrefillProgress | PrefillCompleted | None) -> list[Effect]:
        """All ranks hear the same of the scheduler: the first one passes it on."""
        if not transfer.watching or word is None or self._rank:
            return []
        if isinstance(word, PrefillCompleted):
            word = replace(word, blocks=())
        return [Send(transfer.watching, word)]

    def _prefill_failed(self, transfer_id: str) -> PrefillFailed:
        return PrefillFailed(transfer_id, self._engine, self._incarnation, "", Outcome.NO_PREFILL.value)

    def _drain(self) -> list[Effect]:
        self._draining = True
        effects: list[Effect] = []
        for key, transfer in list(self._transfers.items()):
            if transfer.stage is not Stage.WRITING:
                effects += self._end(key, transfer, Outcome.DRAINED)
        return effects

    def _register_late(self, registration: Registration, tombstone: Tombstone, *, direct: bool) -> list[Effect]:
        if tombstone.outcome in (Outcome.CANCELLED, Outcome.FULL) and not direct:
            return [Reject("late registration")]  # a cancel to the pool is remembered by engines that it did not mean
        reply = tombstone.reply
        if reply is not None and (reply.attempt, reply.request_id) == (registration.attempt, registration.request_id):
            return [Send(registration.sink_engine, reply)]  # word of the end was lost
        if registration.attempt < tombstone.attempt:
            return [Reject("stale attempt")]
        return [self._ack(registration, refused=tombstone.outcome.value)]

    def _announce(self, progress: PrefillProgress, now: float) -> list[Effect]:
        if not self._is_ours(progress):
            return [Reject("foreign prefill")]
        if progress.transfer_id in self._tombstones:
            return [Reject("late progress")]
        transfer = self._transfers.get(progress.transfer_id)
        if transfer is None:
            if len(self._transfers) >= self._max_transfers:
                return [Reject("full")]
            transfer = self._transfers[progress.transfer_id] = Transfer()
        transfer.announced, transfer.progress = True, progress
        if transfer.completion is None:
            self._deadlines.set(progress.transfer_id, now + self._registration_hold_s)
        if transfer.completion is not None:
            return []
        if transfer.registration is None:
            return self._tell_watcher(transfer, progress)
        transfer.acknowledged = True
        return [self._ack(transfer.registration)]  # it is how the decode engine learns that the request is here

    def _complete(self, completion: PrefillCompleted, now: float) -> list[Effect]:
        if not self._is_ours(completion):
            return [Reject("foreign prefill")]
        if completion.request_id in self._released:
            return [Reject("duplicate completion")]
        key = completion.transfer_id
        transfer = self._transfers.get(key)
        if transfer is not None and transfer.completion is not None:
            if transfer.completion.request_id == completion.request_id:
                return [Reject("duplicate completion")]
            return [*self._release(completion), Reject("transfer id reused")]
        if key in self._tombstones:
            return [*self._release(completion), Reject("late completion")]
        if transfer is None:
            if len(self._transfers) >= self._max_transfers:
                return [*self._release(completion), Reject("full")]
            transfer = self._transfers[key] = Transfer()
        transfer.completion, transfer.completed_at = completion, now
        self._deadlines.set(key, now + self._block_lease_s)
        if transfer.registration is None:
            return self._tell_watcher(transfer, completion)
        effects: list[Effect] = []
        if not transfer.acknowledged:
            transfer.acknowledged = True
            effects.append(self._ack(transfer.registration))
        effects += self._match(key, transfer, now)
        if not transfer.announced and not effects:
            return [self._ack(transfer.registration)]  # progress was lost, and the match waits: say that it is here
        return effects

    def _fail_prefill(self, failed: PrefillFailed) -> list[Effect]:
        if not self._is_ours(failed):
            return [Reject("foreign prefill")]
        transfer = self._transfers.get(failed.transfer_id)
        if transfer is not None and transfer.completion is not None:
            return [Reject("failure after completion")]
        if failed.transfer_id in self._tombstones:
            return [Reject("late failure")]
        watching = transfer.watching if transfer is not None and transfer.registration is None else ""
        effects = self._end(failed.transfer_id, transfer or Transfer(), Outcome.NO_PREFILL, failed.reason)
        return [*effects, Send(watching, failed)] if watching and not self._rank else effects

    def _match(self, key: str, transfer: Transfer, now: float) -> list[Effect]:
        registration, completion = transfer.registration, transfer.completion
        if registration is None or completion is None or transfer.stage is not Stage.WAITING:
            return []
        if not transfer.bound:
            transfer.held_up = "a registration that is sent to this engine itself"
            return []
        sink = self._sinks.get(registration.sink_engine, registration.sink_incarnation)
        if sink is None:
            transfer.held_up = "the decode engine's memory to be known here"
            return []  # SinkJoined matches again
        if reason := mismatch(registration, completion, sink):
            return self._end(key, transfer, Outcome.FAILED, reason)
        if not self._sinks.may_write(sink, now):
            transfer.held_up = "a write lease of the decode engine"
            return []  # LeaseEcho matches again
        transfer.stage, transfer.writing_since = Stage.WRITING, now
        self._deadlines.drop(key)
        started = TransferStarted(**self._about(registration))
        known = (transfer.registered_at, transfer.completed_at)
        job = write_job(registration, completion, *known, transfer.held_up)
        return [PostWrite(job), Send(registration.sink_engine, started)]

    def _end_write(self, ended: WriteEnded, now: float) -> list[Effect]:
        transfer = self._transfers.get(ended.transfer_id)
        registration = transfer.registration if transfer else None
        if transfer is None or registration is None or transfer.stage is not Stage.WRITING:
            return [Reject("unknown write")]
        if registration.attempt != ended.attempt:
            return [Reject("unknown write")]
        cancel = transfer.cancel
        if cancel is not None:
            transfer.stage = Stage.WAITING
            return self._cancel(cancel, now, direct=True)
        if ended.failure and self._draining:
            return self._end(ended.transfer_id, transfer, Outcome.FAILED, ended.failure)
        if ended.failure:
            # Its decode engine may be dead and another about to take over. One that lives cancels, which frees.
            failed = TransferFailed(**self._about(registration), reason=ended.failure)
            return self._await_next_attempt(ended.transfer_id, transfer, now, failed)
        both_known = max(transfer.registered_at, transfer.completed_at)
        done = TransferDone(
            **self._about(registration),
            blocks=blocks.count(registration.blocks),
            nbytes=ended.nbytes,
            late_side="decode" if transfer.registered_at >= transfer.completed_at else "prefill",
            match_wait_s=abs(transfer.registered_at - transfer.completed_at),
            queue_s=transfer.writing_since - both_known,
            write_s=now - transfer.writing_since,
        )
        sink_left = self._sinks.get(registration.sink_engine, registration.sink_incarnation) is None
        if transfer.delivered or self._draining:  # the first token can be faster than the word of the WRITE's end
            return self._bury(ended.transfer_id, transfer, Outcome.DONE, done)
        if sink_left or transfer.highest_attempt > registration.attempt:
            return self._await_next_attempt(ended.transfer_id, transfer, now, done)
        transfer.stage, transfer.done = Stage.WRITTEN, done
        self._deadlines.set(ended.transfer_id, now + self._block_lease_s)
        return [Send(registration.sink_engine, done)]

    def _deliver(self, delivered: Delivered) -> list[Effect]:
        """The first token is out: nobody will have to take over, so the KV may go."""
        transfer = self._transfers.get(delivered.transfer_id)
        held = transfer.registration if transfer is not None else None
        if transfer is None:
            return [Reject("late delivery")]
        if delivered.attempt < transfer.highest_attempt:
            return [Reject("late delivery")]  # another decode engine waits for its KV
        if held is None and transfer.completion is not None:  # P took the WRITE for failed, and it was not
            return self._bury(delivered.transfer_id, transfer, Outcome.DONE, None)
        if held is None or (held.attempt, held.request_id) != (delivered.attempt, delivered.request_id):
            return [Reject("late delivery")]
        match transfer.stage:
            case Stage.WRITTEN:
                return self._bury(delivered.transfer_id, transfer, Outcome.DONE, transfer.done, told=True)
            case Stage.WRITING:
                transfer.delivered = True
                return []
            case Stage.WAITING:
                return [Reject("delivered before it was written")]

    def _await_next_attempt(
        self, key: str, transfer: Transfer, now: float, word: TransferDone | TransferFailed
    ) -> list[Effect]:
        """This attempt is over, and ``word`` says how; the KV stays for another one, for a block lease."""
        sink = transfer.registration.sink_engine if transfer.registration is not None else ""
        transfer.close_attempt()
        self._deadlines.set(key, now + self._block_lease_s)
        return [Send(sink, word)]

    def _cancel(self, cancel: Cancel, now: float, *, direct: bool) -> list[Effect]:
        transfer = self._transfers.get(cancel.transfer_id)
        held = transfer.registration if transfer else None
        if transfer is not None and held is not None and cancel.attempt < held.attempt:
            transfer.close_before(cancel.attempt + 1)  # another attempt has taken its place: it is not written
            return [self._cancel_ack(cancel)]
        if held is not None and cancel.attempt == held.attempt and cancel.sink_engine != held.sink_engine:
            return [Reject("stale cancel")]
        if transfer is not None and transfer.bound and not direct:
            return [Reject("stale cancel")]  # its decode engine knows us, and cancels here
        if transfer is not None and transfer.stage is Stage.WRITING:
            transfer.cancel = cancel  # acknowledged when the WRITE has ended
            return []
        if transfer is None:
            known = cancel.transfer_id in self._tombstones
            if not known and cancel.release:  # the prefill may still come, and shall then free its blocks at once
                self._tombstones[cancel.transfer_id] = Tombstone(Outcome.CANCELLED, cancel.attempt)
            if known or cancel.release:
                return [self._cancel_ack(cancel)] if known or direct else [Reject("foreign cancel")]
            if not direct or len(self._transfers) >= self._max_transfers:
                return [Reject("foreign cancel" if not direct else "full")]
            transfer = self._transfers[cancel.transfer_id] = Transfer()
        if cancel.release and cancel.attempt >= transfer.highest_attempt:
            return [*self._bury(cancel.transfer_id, transfer, Outcome.CANCELLED, None), self._cancel_ack(cancel)]
        transfer.close_attempt()
        transfer.close_before(cancel.attempt + 1)
        self._deadlines.set(cancel.transfer_id, now + self._block_lease_s)
        return [self._cancel_ack(cancel)]

    def _release_unserved(self, word: Release) -> list[Effect]:
        """A router's word, which any client of the bus may say: a WRITE that is under way is left alone, and a decode
        engine that waits for one is told that none will come."""
        key = word.transfer_id
        transfer = self._transfers.get(key)
        if transfer is None:
            if key not in self._tombstones:  # the prefill may still come, and shall then free its blocks at once
                self._tombstones[key] = Tombstone(Outcome.CANCELLED, word.attempt)
            return []
        if transfer.stage is Stage.WRITING or word.attempt < transfer.highest_attempt:
            return [Reject("release of what is served")]
        if transfer.done is not None:
            return self._bury(key, transfer, Outcome.DONE, transfer.done, told=True)
        held = transfer.registration if transfer.acknowledged else None
        told: list[Effect] = [self._ack(held, refused=Outcome.CANCELLED.value)] if held is not None else []
        return told + self._bury(key, transfer, Outcome.CANCELLED, None)

    def _join(self, sink: SinkJoined, now: float) -> list[Effect]:
        if not self._sinks.join(sink):
            return [Reject("stale incarnation")]
        for _, transfer, registration in self._waiting_for(sink.engine):
            if registration.sink_incarnation < sink.incarnation:
                transfer.forget()
        return self._match_all(sink.engine, now)

    def _match_all(self, sink: str, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for key, transfer, _ in self._waiting_for(sink):
            effects += self._match(key, transfer, now)
        return effects

    def _waiting_for(self, sink: str) -> list[tuple[str, Transfer, Registration]]:
        """Transfers with a registration of this decode engine for which no WRITE was posted yet."""
        return [
            (key, transfer, transfer.registration)
            for key, transfer in self._transfers.items()
            if transfer.registration is not None
            and transfer.registration.sink_engine == sink
            and transfer.stage is Stage.WAITING
        ]

    def _hear(self, heard: Registration | LeaseEcho) -> bool:
        """Take the echoes in ``heard`` and forget what older epochs registered; False if it is of one itself."""
        match self._sinks.hear(heard):
            case Epoch.OLDER:
                return False
            case Epoch.NEWER:
                for _, transfer, held in self._waiting_for(heard.sink_engine):
                    if held.sink_incarnation == heard.sink_incarnation and held.epoch < heard.epoch:
                        transfer.forget()
            case Epoch.SAME:
                pass
        return True

    def _leave(self, left: SinkLeft) -> list[Effect]:
        self._sinks.leave(left)
        for transfer in self._transfers.values():
            registration = transfer.registration
            if registration is None or registration.sink_engine != left.engine:
                continue
            if registration.sink_incarnation > left.incarnation or transfer.stage is Stage.WRITING:
                continue
            if transfer.stage is Stage.WRITTEN:
                transfer.close_attempt()  # the KV stays: another decode engine may take over
            else:
                transfer.forget()
        return []

    def _refuse(self, refused: SinkRefused) -> list[Effect]:
        self._sinks.refuse(refused)
        effects: list[Effect] = []
        for _, transfer, registration in self._waiting_for(refused.engine):
            if registration.sink_incarnation == refused.incarnation:
                acknowledged = transfer.acknowledged
                transfer.forget()
                if acknowledged:
                    effects.append(self._ack(registration, refused=refused.reason))
        return effects

    def _end(self, key: str, transfer: Transfer, outcome: Outcome, reason: str = "") -> list[Effect]:
        """End a transfer and tell its sink, if it has one and nothing was written for it."""
        if transfer.done is not None:
            return self._bury(key, transfer, Outcome.DONE, transfer.done, told=True)
        registration = transfer.registration
        reply: CancelAck | TransferFailed | None = None
        if registration is not None:
            if outcome is Outcome.CANCELLED:
                reply = CancelAck(**self._about(registration))
            else:
                reply = TransferFailed(**self._about(registration), reason=reason or outcome.value)
        return self._bury(key, transfer, outcome, reply)

    def _bury(
        self,
        key: str,
        transfer: Transfer,
        outcome: Outcome,
        reply: CancelAck | TransferDone | TransferFailed | None,
        *,
        told: bool = False,
    ) -> list[Effect]:
        registration = transfer.registration
        sink, attempt = (registration.sink_engine, registration.attempt) if registration else ("", 0)
        self._transfers.pop(key, None)
        self._deadlines.drop(key)
        self._tombstones[key] = Tombstone(outcome, attempt, reply)
        effects: list[Effect] = [Send(sink, reply)] if reply is not None and not told else []
        return effects + (self._release(transfer.completion) if transfer.completion else [])

    def _release(self, completion: PrefillCompleted) -> list[Effect]:
        self._released[completion.request_id] = None
        return [ReleaseBlocks(completion.request_id)]

    def _is_ours(self, message: PrefillProgress | PrefillCompleted | PrefillFailed) -> bool:
        return message.source_engine == self._engine and message.source_incarnation == self._incarnation

    def _about(self, heard: Registration | Cancel) -> dict[str, Any]:
        return {
            "transfer_id": heard.transfer_id,
            "source_engine": self._engine,
            "source_incarnation": self._incarnation,
            "attempt": heard.attempt,
            "rank": self._rank,
            "ranks": self._ranks,
            "request_id": heard.request_id,
        }

    def _ack(self, registration: Registration, refused: str = "") -> Send:
        transfer = self._transfers.get(registration.transfer_id)
        known = transfer is not None and (transfer.announced or transfer.completion is not None)
        claimed = known and not refused
        ack = RegistrationAck(**self._about(registration), refused=refused, claimed=claimed)
        return Send(registration.sink_engine, ack)

    def _cancel_ack(self, cancel: Cancel) -> Send:
        return Send(cancel.sink_engine, CancelAck(**self._about(cancel)))
